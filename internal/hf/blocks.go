package hf

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"sppo.dev/internal/data/safetensors"
)

// A folder may have matrices in FP8, with a scale for each block of them. They are multiplied by their scales as they are read.
// Exports have none: a tensor in FP8 gets the type of the model.

// scaleSuffix is what follows the name of a matrix in FP8 in that of its scales.
const scaleSuffix = "_scale_inv"

// blocks is the size of the blocks of quantized matrices: rows and columns. It is empty if no matrix is quantized.
type blocks []int64

// readBlocks reads how the weights of a config are quantized.
func readBlocks(c *config) (blocks, error) {
	if !c.has("quantization_config") {
		return nil, nil
	}
	q, method := c.object("quantization_config"), "weights"
	if q.has("quant_method") {
		method = q.word("quant_method") + " weights"
	}
	if method != "fp8 weights" {
		return nil, fmt.Errorf("quantization_config: quantised %s are not supported; use the original folder", method)
	}
	for _, k := range []struct{ name, only string }{{"fmt", "e4m3"}, {"activation_scheme", "dynamic"}, {"scale_fmt", "float"}, {"expert_dtype", "fp8"}} {
		if q.has(k.name) {
			q.among(k.name, q.word(k.name), []string{k.only})
		}
	}
	const name = "weight_block_size"
	size := get[[]int64](q, name, "a list of two numbers")
	if *c.err == nil && (len(size) != 2 || slices.Min(size) < 1) {
		q.failf(name, "= %v is not a number of rows and one of columns", size)
	}
	for _, key := range []string{"modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize"} {
		q.skip(key) // the types of tensors say which are quantized
	}
	return size, *c.err
}

// Quantized says what happens to quantized weights of the folder, or returns "" if it has none.
func (m *Model) Quantized() string {
	if len(m.blocks) == 0 {
		return ""
	}
	return "weights in FP8 are multiplied by their scales as they are read; an export has " + exportTypes[m.value("dtype")] + " instead"
}

// scaled is a tensor of a folder, with the scales of its blocks if it is quantized.
type scaled struct {
	*safetensors.Tensor
	blocks
	scales []float32 // by block, those of a row next to each other
}

// in returns a tensor of a folder with its scales.
func (b blocks) in(folder *safetensors.Folder, t *safetensors.Tensor) (*scaled, error) {
	s := &scaled{Tensor: t, blocks: b}
	if t.DType != safetensors.F8E4M3 {
		return s, nil
	}
	scales := folder.Find(t.Name + scaleSuffix)
	switch {
	case len(b) == 0:
		return nil, fmt.Errorf("%s: tensor %q has values of type %s, but %s has no quantization_config", t.File, t.Name, t.DType, ConfigFile)
	case scales == nil:
		return nil, fmt.Errorf("%s: tensor %q has values of type %s, but there is no tensor %q", t.File, t.Name, t.DType, t.Name+scaleSuffix)
	case len(t.Shape) != 2 || !slices.Equal(scales.Shape, []int64{ceilDiv(t.Shape[0], b[0]), ceilDiv(t.Shape[1], b[1])}):
		return nil, fmt.Errorf("%s: tensor %q has shape %v, which does not fit %q of shape %v in blocks of %d by %d", scales.File, scales.Name, scales.Shape, t.Name, t.Shape, b[0], b[1])
	case !safetensors.Convertible(scales.DType):
		return nil, fmt.Errorf("%s: tensor %q has values of type %s; F32, F16 and BF16 are supported", scales.File, scales.Name, scales.DType)
	}
	s.scales = make([]float32, scales.Elements())
	_, err := scales.Float32s(s.scales, 0, nil)
	return s, err
}

func ceilDiv(a, b int64) int64 { return a/b + min(1, a%b) }

// Float32s is that of safetensors.Tensor, with the scales.
func (s *scaled) Float32s(out []float32, first int64, buffer []byte) ([]byte, error) {
	buffer, err := s.Tensor.Float32s(out, first, buffer)
	if s.scales == nil || err != nil {
		return buffer, err
	}
	width := s.Shape[1]
	across := ceilDiv(width, s.blocks[1])
	for i := range out {
		row, col := (first+int64(i))/width, (first+int64(i))%width
		out[i] *= s.scales[row/s.blocks[0]*across+col/s.blocks[1]]
	}
	return buffer, nil
}

// isScale reports whether a tensor has the scales of another in the folder.
func isScale(folder *safetensors.Folder, name string) bool {
	of, ok := strings.CutSuffix(name, scaleSuffix)
	t := folder.Find(of)
	return ok && t != nil && t.DType == safetensors.F8E4M3
}

// dequantize writes a tensor that is not part of the model.
func (b blocks) dequantize(ctx context.Context, to io.Writer, folder *safetensors.Folder, t *safetensors.Tensor, dtype string) error {
	s, err := b.in(folder, t)
	if err != nil {
		return err
	}
	var raw, buffer []byte
	for first := int64(0); first < t.Elements(); first += writeElements {
		values := make([]float32, min(writeElements, t.Elements()-first))
		if buffer, err = s.Float32s(values, first, buffer); err != nil {
			return err
		}
		if raw, err = safetensors.Append(raw[:0], values, dtype); err != nil {
			return err
		}
		if _, err := to.Write(raw); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

// withoutBlocks removes quantization_config from a config.json.
func withoutBlocks(text []byte) ([]byte, error) {
	members := map[string]json.RawMessage{}
	if err := json.Unmarshal(text, &members); err != nil {
		return nil, err
	}
	delete(members, "quantization_config")
	text, err := json.MarshalIndent(members, "", "  ")
	return append(text, '\n'), err
}
