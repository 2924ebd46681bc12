package hf_test

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/data/safetensors"
	"sppo.dev/internal/hf"
	"sppo.dev/ir"
)

const quantization = `"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [3, 4]},`

// quantized returns the folder of a fixture whose matrices in layers are in FP8, with scales for blocks of 3 by 4, and the values of these.
func quantized(t *testing.T, fixture string, further ...safetensors.Source) (string, []ir.Tensor, map[string][]float64) {
	t.Helper()
	r, want := rand.New(rand.NewPCG(1, 2)), map[string][]float64{}
	dir, list := folder(t, fixture, func(l sources) (out sources) {
		for _, s := range append(l, further...) {
			if len(s.Shape) != 2 || !strings.Contains(s.Name, "layers") {
				out = append(out, s)
				continue
			}
			rows, cols := s.Shape[0], s.Shape[1]
			across := (cols + 3) / 4
			scales := make([]byte, 4*((rows+2)/3)*across)
			for i := 0; i < len(scales); i += 4 {
				binary.LittleEndian.PutUint32(scales[i:], math.Float32bits(r.Float32()))
			}
			bytes, values := make([]byte, rows*cols), make([]float64, rows*cols)
			for i := range values {
				bytes[i] = byte(r.IntN(127)) | byte(r.IntN(2)<<7) // no NaN
				scale := math.Float32frombits(binary.LittleEndian.Uint32(scales[4*(int64(i)/cols/3*across+int64(i)%cols/4):]))
				values[i] = e4m3(bytes[i]) * float64(scale)
			}
			info, scaleInfo := s.Info, s.Info
			info.DType, want[s.Name] = "F8_E4M3", values
			scaleInfo.Name, scaleInfo.DType, scaleInfo.Shape = s.Name+"_scale_inv", safetensors.F32, []int64{(rows + 2) / 3, across}
			out = append(out, source(info, bytes), source(scaleInfo, scales[:4*scaleInfo.Elements()]))
		}
		return out
	})
	config := filepath.Join(dir, hf.ConfigFile)
	text, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, []byte(strings.Replace(string(text), "{", "{"+quantization, 1)), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir, list, want
}

// e4m3 returns the value of a number in FP8, from its bits.
func e4m3(b byte) float64 {
	value := float64(b&7) / 512
	if exponent := b >> 3 & 15; exponent > 0 {
		value = (1 + float64(b&7)/8) * math.Pow(2, float64(exponent)-7)
	}
	if b >= 128 {
		return -value
	}
	return value
}

// openNoticing opens the weights of a folder, and checks that a notice says what becomes of them.
func openNoticing(t *testing.T, dir string, list []ir.Tensor, notice string) (*hf.Model, *hf.Weights) {
	t.Helper()
	model, w := openFolder(t, dir, list)
	if !strings.Contains(strings.Join(model.Notices, "\n"), notice) {
		t.Errorf("notices %q", model.Notices)
	}
	return model, w
}

// openFolder opens the weights of a folder until the test ends.
func openFolder(t *testing.T, dir string, list []ir.Tensor) (*hf.Model, *hf.Weights) {
	t.Helper()
	model, err := hf.ReadModel(dir)
	if err != nil {
		t.Fatal(err)
	}
	w, err := model.OpenWeights(list)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return model, w
}

// Matrices in FP8 are multiplied by the scales of their blocks. An export has neither scales nor FP8, not even in layers that are not
// trained.
func TestBlocksOfFP8(t *testing.T) {
	further := source(safetensors.Info{Name: "model.layers.2.eh_proj.weight", DType: safetensors.BF16, Shape: []int64{5, 7}}, make([]byte, 70))
	dir, list, want := quantized(t, "glm4-moe-mtp", further)
	model, w := openNoticing(t, dir, list, "weights in FP8 are multiplied by their scales")
	if !slices.Equal(w.Ignored, []string{further.Name}) || !w.Wider("layer.0.wq", ir.BF16) {
		t.Errorf("ignored are %q", w.Ignored)
	}
	const q = "model.layers.1.self_attn.q_proj.weight"
	values := make([]float32, 3*5)
	if err := w.Read("layer.1.wq", 2, 4, 3, 5, values); err != nil {
		t.Fatal(err)
	}
	for i, v := range values {
		if x := want[q][(4+i%5)*8+2+i/5]; v != float32(x) {
			t.Errorf("value %d is %g, want %g", i, v, x)
		}
	}
	out := filepath.Join(t.TempDir(), "out")
	if err := (&hf.Export{Values: w, Tensors: list, From: model, DType: "f32"}).Write(t.Context(), out); err != nil {
		t.Fatal(err)
	}
	written := floats(t, out)
	for name, x := range want {
		for i, v := range written[name] {
			if v != float32(x[i]) {
				t.Fatalf("value %d of %s is exported as %g, want %g", i, name, v, x[i])
			}
		}
		if len(written[name]) != len(x) || written[name+"_scale_inv"] != nil {
			t.Errorf("%s has %d values, want %d", name, len(written[name]), len(x))
		}
	}
	if text, err := os.ReadFile(filepath.Join(out, hf.ConfigFile)); err != nil || strings.Contains(string(text), "quantization_config") {
		t.Errorf("%v: %s", err, text)
	}
	if again, err := hf.ReadModel(out); err != nil {
		t.Error(err)
	} else if w, err := again.OpenWeights(list); err != nil {
		t.Error(err)
	} else {
		w.Close()
	}
	out = filepath.Join(t.TempDir(), "same")
	if err := (&hf.Export{Values: w, Tensors: list, From: model}).Write(t.Context(), out); err != nil {
		t.Fatal(err)
	}
	if types := tensors(t, out)[q]; !strings.HasPrefix(types, safetensors.BF16) {
		t.Errorf("%s is exported as %s", q, types[:10])
	}
}

// Settings of quantization that are not supported are refused by the names of their keys, and tensors without scales by theirs.
func TestRefusedBlocks(t *testing.T) {
	for change, want := range map[string]string{
		`"fp8"->"gptq"`:       "quantization_config: quantised gptq weights are not supported",
		`"e4m3"->"e5m2"`:      "quantization_config.fmt",
		`"dynamic"->"static"`: "quantization_config.activation_scheme",
		`[3, 4]->[3]`:         "quantization_config.weight_block_size",
		`[3, 4]->[0, 4]`:      "quantization_config.weight_block_size",
		`[3, 4]->null`:        "quantization_config.weight_block_size",
		`[3, 4]->[2, 4]`:      "does not fit",
		quantization + "->":   "has no quantization_config",
		`_scale_inv->_scales`: "there is no tensor",
	} {
		dir, list, _ := quantized(t, "llama")
		from, to, _ := strings.Cut(change, "->")
		for _, file := range []string{hf.ConfigFile, safetensors.SingleFile} {
			text, err := os.ReadFile(filepath.Join(dir, file))
			if err != nil {
				t.Fatal(err)
			}
			changed := strings.ReplaceAll(string(text), from, to)
			if file == safetensors.SingleFile { // keeps the length of the header
				if changed = string(text); strings.HasPrefix(from, "_") {
					changed = strings.ReplaceAll(changed, from, to+"xxx")
				}
			}
			if err := os.WriteFile(filepath.Join(dir, file), []byte(changed), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		model, err := hf.ReadModel(dir)
		if err == nil {
			_, err = model.OpenWeights(list)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", change, err, want)
		}
	}
}

// FuzzBlocks reads matrices in FP8 with scales of any shape, in blocks of any size.
func FuzzBlocks(f *testing.F) {
	f.Add(int64(3), int64(4), int64(3), int64(2), []byte{1, 2, 3, 4})
	f.Add(int64(1<<62), int64(1), int64(1), int64(8), []byte{127})
	f.Fuzz(func(t *testing.T, blockRows, blockCols, rows, cols int64, data []byte) {
		dir, list := folder(t, "llama", func(l sources) sources {
			s := named(l, "model.layers.1.self_attn.q_proj.weight")
			info := s.Info
			info.DType = safetensors.F8E4M3
			bytes := make([]byte, info.Elements())
			copy(bytes, data)
			*s = source(info, bytes)
			scales := safetensors.Info{Name: info.Name + "_scale_inv", DType: safetensors.F32, Shape: []int64{rows & 15, cols & 15}}
			return append(l, source(scales, make([]byte, scales.Bytes())))
		})
		config := filepath.Join(dir, hf.ConfigFile)
		text, err := os.ReadFile(config)
		if err != nil {
			t.Fatal(err)
		}
		size, _ := json.Marshal([]int64{blockRows, blockCols})
		text = []byte(strings.Replace(string(text), "{", "{"+strings.Replace(quantization, "[3, 4]", string(size), 1), 1))
		if err := os.WriteFile(config, text, 0o644); err != nil {
			t.Fatal(err)
		}
		model, err := hf.ReadModel(dir)
		if err != nil {
			return
		}
		w, err := model.OpenWeights(list)
		if err != nil {
			return
		}
		defer w.Close()
		if err := w.Read("layer.1.wq", 0, 0, 8, 12, make([]float32, 96)); err != nil {
			t.Error(err)
		}
	})
}
