package hf

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"sppo.dev/internal/data/safetensors"
)

// A folder may have quantized matrices, with a scale for each block of them. They are multiplied by their scales as they are read.
// Exports have none: such a tensor gets the type of the model.

// format is a format of quantized matrices.
type format struct {
	title  string
	dtype  string // of the tensor that holds the values
	suffix string // what follows the name of the matrix in that of its values
	scales string // and in that of its scales
	packed bool   // its values have four bits, in bytes of which the lower half comes first, and its blocks are a dimension
}

// packedBlock is the number of values in a block of MXFP4, which lie in one row.
const packedBlock = 32

var (
	fp8   = format{title: "FP8", dtype: safetensors.F8E4M3, scales: "_scale_inv"}
	mxfp4 = format{title: "MXFP4", dtype: safetensors.U8, suffix: packedSuffix, scales: "_scales", packed: true}
)

// blocks is how matrices of a folder are quantized. The format is nil if none is.
type blocks struct {
	*format
	rows, cols int64 // of a block
}

// readBlocks reads how the weights of a config are quantized.
func readBlocks(c *config) (blocks, error) {
	if !c.has("quantization_config") {
		return blocks{}, nil
	}
	q, method := c.object("quantization_config"), "weights"
	if q.has("quant_method") {
		method = q.word("quant_method") + " weights"
	}
	for _, key := range []string{"modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize"} {
		q.skip(key) // the types of tensors say which are quantized
	}
	switch method {
	case "mxfp4 weights":
		return blocks{&mxfp4, 1, packedBlock}, *c.err
	case "fp8 weights":
		return readFP8(q)
	}
	return blocks{}, fmt.Errorf("quantization_config: quantised %s are not supported; use the original folder", method)
}

// readFP8 reads the settings of weights in FP8.
func readFP8(q *config) (blocks, error) {
	for _, k := range []struct{ name, only string }{{"fmt", "e4m3"}, {"activation_scheme", "dynamic"}, {"scale_fmt", "float"}, {"expert_dtype", "fp8"}} {
		if q.has(k.name) {
			q.among(k.name, q.word(k.name), []string{k.only})
		}
	}
	const name = "weight_block_size"
	size := get[[]int64](q, name, "a list of two numbers")
	if *q.err == nil && (len(size) != 2 || slices.Min(size) < 1) {
		q.failf(name, "= %v is not a number of rows and one of columns", size)
	}
	if *q.err != nil {
		return blocks{}, *q.err
	}
	return blocks{&fp8, size[0], size[1]}, nil
}

// Quantized says what happens to quantized weights of the folder, or returns "" if it has none.
func (m *Model) Quantized() string {
	if m.blocks.format == nil {
		return ""
	}
	return fmt.Sprintf("weights in %s are multiplied by their scales as they are read; an export has %s instead", m.title, exportTypes[m.value("dtype")])
}

// scaled is a tensor of a folder. If it is quantized, it has the shape of its values, and scales.
type scaled struct {
	*safetensors.Tensor
	blocks                     // no format: it is not quantized
	scales []float32           // of FP8, by block; those of a row next to each other
	powers *safetensors.Tensor // of MXFP4, by block: the exponent of two, plus 127
}

// in returns a tensor of a folder with its scales.
func (b blocks) in(folder *safetensors.Folder, t *safetensors.Tensor) (*scaled, error) {
	plain := &scaled{Tensor: t}
	if t.DType != fp8.dtype && t.DType != mxfp4.dtype {
		return plain, nil
	}
	if b.format == nil {
		return nil, fmt.Errorf("%s: tensor %q has values of type %s, but %s has no quantization_config", t.File, t.Name, t.DType, ConfigFile)
	}
	name, ok := b.matrix(t)
	if !ok {
		return plain, nil
	}
	scales := folder.Find(name + b.format.scales)
	if scales == nil {
		return nil, fmt.Errorf("%s: tensor %q has values of type %s, but there is no tensor %q", t.File, t.Name, t.DType, name+b.format.scales)
	}
	if b.packed {
		return b.unpack(t, scales)
	}
	switch {
	case len(t.Shape) != 2 || !slices.Equal(scales.Shape, []int64{ceilDiv(t.Shape[0], b.rows), ceilDiv(t.Shape[1], b.cols)}):
		return nil, fmt.Errorf("%s: tensor %q has shape %v, which does not fit %q of shape %v in blocks of %d by %d", scales.File, scales.Name, scales.Shape, t.Name, t.Shape, b.rows, b.cols)
	case !safetensors.Convertible(scales.DType):
		return nil, fmt.Errorf("%s: tensor %q has values of type %s; F32, F16 and BF16 are supported", scales.File, scales.Name, scales.DType)
	}
	s := &scaled{Tensor: t, blocks: b, scales: make([]float32, scales.Elements())}
	_, err := scales.Float32s(s.scales, 0, nil)
	return s, err
}

// unpack returns a tensor of MXFP4. Its last two dimensions, blocks of a row and bytes of a block, become one.
func (b blocks) unpack(t, scales *safetensors.Tensor) (*scaled, error) {
	n := len(t.Shape) - 1
	switch {
	case n < 2 || t.Shape[n] != packedBlock/2:
		return nil, fmt.Errorf("%s: tensor %q has shape %v, but a block of %s has %d bytes", t.File, t.Name, t.Shape, b.title, packedBlock/2)
	case !slices.Equal(scales.Shape, t.Shape[:n]):
		return nil, fmt.Errorf("%s: tensor %q has shape %v, which does not fit %q of shape %v", scales.File, scales.Name, scales.Shape, t.Name, t.Shape)
	case scales.DType != b.dtype:
		return nil, fmt.Errorf("%s: tensor %q has values of type %s; %s has %s", scales.File, scales.Name, scales.DType, b.title, b.dtype)
	}
	values := *t
	values.DType, values.Shape = safetensors.F4, append(slices.Clone(t.Shape[:n-1]), packedBlock*t.Shape[n-1])
	return &scaled{Tensor: &values, blocks: b, powers: scales}, nil
}

func ceilDiv(a, b int64) int64 { return a/b + min(1, a%b) }

// Float32s is that of safetensors.Tensor, with the scales.
func (s *scaled) Float32s(out []float32, first int64, buffer []byte) ([]byte, error) {
	if s.powers != nil {
		return s.unpacked(out, first, buffer)
	}
	buffer, err := s.Tensor.Float32s(out, first, buffer)
	if s.scales == nil || err != nil {
		return buffer, err
	}
	width := s.Shape[1]
	across := ceilDiv(width, s.cols)
	for i := range out {
		row, col := (first+int64(i))/width, (first+int64(i))%width
		out[i] *= s.scales[row/s.rows*across+col/s.cols]
	}
	return buffer, nil
}

// e2m1 has the values of numbers with two bits of exponent and one of mantissa. The fourth bit is the sign.
var e2m1 = [16]float32{0, 0.5, 1, 1.5, 2, 3, 4, 6, float32(math.Copysign(0, -1)), -0.5, -1, -1.5, -2, -3, -4, -6}

// unpacked reads values of MXFP4.
func (s *scaled) unpacked(out []float32, first int64, buffer []byte) ([]byte, error) {
	if len(out) == 0 {
		return buffer, nil
	}
	last := first + int64(len(out)) - 1
	count, powers := last/2-first/2+1, last/packedBlock-first/packedBlock+1
	buffer = slices.Grow(buffer[:0], int(count+powers))[:count+powers]
	if _, err := s.Tensor.ReadAt(buffer[:count], first/2); err != nil {
		return buffer, err
	}
	if _, err := s.powers.ReadAt(buffer[count:], first/packedBlock); err != nil {
		return buffer, err
	}
	for i := range out {
		at := first + int64(i)
		power := buffer[count+at/packedBlock-first/packedBlock]
		value := math.Ldexp(float64(e2m1[buffer[at/2-first/2]>>(at%2*4)&15]), int(power)-127)
		if out[i] = float32(value); power == math.MaxUint8 || math.Abs(value) > math.MaxFloat32 {
			return buffer, fmt.Errorf("%s: tensor %q has a scale of 2^%d, with which value %d of %q is not finite", s.powers.File, s.powers.Name, int(power)-127, at, s.Name)
		}
	}
	return buffer, nil
}

// matrix returns the name of the matrix whose values a tensor has, and reports whether it is quantized.
func (b blocks) matrix(t *safetensors.Tensor) (name string, quantized bool) {
	if b.format == nil || t == nil || t.DType != b.dtype {
		return "", false
	}
	return strings.CutSuffix(t.Name, b.suffix)
}

// isScale reports whether a tensor has the scales of another in the folder.
func (b blocks) isScale(folder *safetensors.Folder, name string) bool {
	if b.format == nil {
		return false
	}
	of, ok := strings.CutSuffix(name, b.format.scales)
	_, quantized := b.matrix(folder.Find(of + b.suffix))
	return ok && quantized
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
