package hf_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/data/safetensors"
	"sppo.dev/internal/hf"
	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

// packedFixture is a model whose matrices of experts are in MXFP4.
const packedFixture = "gpt-oss-mxfp4"

// repacked returns the folder of the fixture with random matrices of experts, and their values by name, those in a block next to
// each other. Scales are below the limit.
func repacked(t *testing.T, r *rand.Rand, limit int) (string, []ir.Tensor, map[string][]float64) {
	t.Helper()
	want := map[string][]float64{}
	dir, list := folder(t, packedFixture, func(l sources) sources {
		for i := range l {
			name, ok := strings.CutSuffix(l[i].Name, "_blocks")
			if !ok {
				continue
			}
			scales := named(l, name+"_scales")
			packed, powers := make([]byte, l[i].Bytes()), make([]byte, scales.Bytes())
			for k := range powers {
				powers[k] = byte(r.IntN(limit))
			}
			for k := range packed {
				packed[k] = byte(r.IntN(256))
				scale := math.Pow(2, float64(powers[k/16])-127)
				want[name] = append(want[name], e2m1(packed[k]&15)*scale, e2m1(packed[k]>>4)*scale)
			}
			l[i], *scales = source(l[i].Info, packed), source(scales.Info, powers)
		}
		return l
	})
	return dir, list, want
}

// e2m1 returns the value of a number with two bits of exponent and one of mantissa, from its bits.
func e2m1(b byte) float64 {
	value := float64(b&1) / 2
	if exponent := b >> 1 & 3; exponent > 0 {
		value = (1 + value) * math.Pow(2, float64(exponent)-1)
	}
	if b >= 8 {
		return -value
	}
	return value
}

// Random matrices in MXFP4 have the values of the format's definition, in any part of a tensor that is read, and in exports, which have
// the names and shapes of the other folders of this architecture.
func TestMXFP4(t *testing.T) {
	const hidden, width, experts = 64, 32, 3
	r := rand.New(rand.NewPCG(irtest.Seed(t), 0))
	dir, list, want := repacked(t, r, 253)
	model, w := openNoticing(t, dir, list, "weights in MXFP4 are multiplied by their scales")
	if len(w.Ignored) > 0 || w.Wider("layer.0.experts.w_up", ir.BF16) {
		t.Errorf("ignored are %q", w.Ignored)
	}
	// value returns the value of a matrix of all experts, from its place in the folder.
	value := func(ours, layer string, row, col int64) float64 {
		name, expert, from := "model.layers."+layer+".mlp.experts.", row/hidden, row%hidden
		switch ours {
		case "w_gate":
			return want[name+"gate_up_proj"][(expert*2*width+2*col)*hidden+from]
		case "w_up":
			return want[name+"gate_up_proj"][(expert*2*width+2*col+1)*hidden+from]
		}
		return want[name+"down_proj"][row*width+col]
	}
	for range 200 {
		ours, layer := []string{"w_gate", "w_up", "w_down"}[r.IntN(3)], fmt.Sprint(r.IntN(2))
		row, col := r.Int64N(experts*hidden), r.Int64N(width)
		rows, cols := 1+r.Int64N(experts*hidden-row), 1+r.Int64N(width-col)
		values := make([]float32, rows*cols)
		if err := w.Read("layer."+layer+".experts."+ours, row, col, rows, cols, values); err != nil {
			t.Fatal(err)
		}
		for i, v := range values {
			if x := value(ours, layer, row+int64(i)/cols, col+int64(i)%cols); float64(v) != x {
				t.Fatalf("%s of layer %s in (%d, %d) is %g, want %g", ours, layer, row+int64(i)/cols, col+int64(i)%cols, v, x)
			}
		}
	}
	for _, dtype := range []string{"", "f32"} {
		out := filepath.Join(t.TempDir(), "out")
		if err := (&hf.Export{Values: w, Tensors: list, From: model, DType: dtype}).Write(t.Context(), out); err != nil {
			t.Fatal(err)
		}
		written := floats(t, out)
		for name, x := range want {
			rows, cols := hidden, width // of a matrix in the folder, the transpose of the exported
			if strings.HasSuffix(name, "gate_up_proj") {
				rows, cols = 2*width, hidden
			}
			for i, v := range written[name] {
				expert, row, col := i/(rows*cols), i%rows, i/rows%cols
				if float64(v) != x[(expert*rows+row)*cols+col] {
					t.Fatalf("value %d of %s is exported as %g, want %g", i, name, v, x[(expert*rows+row)*cols+col])
				}
			}
			if len(written[name]) != len(x) {
				t.Errorf("%s has %d values, want %d", name, len(written[name]), len(x))
			}
		}
		for name := range written {
			if strings.HasSuffix(name, "_blocks") || strings.HasSuffix(name, "_scales") {
				t.Errorf("%s is exported", name)
			}
		}
		text, err := os.ReadFile(filepath.Join(out, hf.ConfigFile))
		if err != nil || strings.Contains(string(text), "quantization_config") {
			t.Errorf("%v: %s", err, text)
		}
		openFolder(t, out, list)
	}
}

// Folders in which blocks and scales do not belong together are refused, and so are scales that make a value infinite.
func TestRefusedMXFP4(t *testing.T) {
	const down = "model.layers.1.mlp.experts.down_proj"
	shaped := func(name string, dtype string, shape ...int64) func(sources) sources {
		return func(l sources) sources {
			info := safetensors.Info{Name: name, DType: dtype, Shape: shape}
			*named(l, name) = source(info, make([]byte, info.Bytes()))
			return l
		}
	}
	without := func(name string) func(sources) sources {
		return func(l sources) sources {
			return slices.DeleteFunc(l, func(s safetensors.Source) bool { return s.Name == name })
		}
	}
	scaled := func(power byte) func(sources) sources {
		return func(l sources) sources {
			info := named(l, down+"_scales").Info
			*named(l, down+"_scales") = source(info, slices.Repeat([]byte{power}, int(info.Bytes())))
			return l
		}
	}
	for _, c := range []struct {
		name, want string
		change     func(sources) sources
	}{
		{"unchanged", "", func(l sources) sources { return l }},
		{"no scales", `there is no tensor "` + down + `_scales"`, without(down + "_scales")},
		{"no blocks", `has no tensor "` + down + `_blocks"`, without(down + "_blocks")},
		{"fewer rows", "does not fit", shaped(down+"_blocks", "U8", 3, 32, 1, 16)},
		{"of another model", "has shape [3 32 32], but the model needs [3 64 32]", func(l sources) sources {
			return shaped(down+"_scales", "U8", 3, 32, 1)(shaped(down+"_blocks", "U8", 3, 32, 1, 16)(l))
		}},
		{"fewer scales", "does not fit", shaped(down+"_scales", "U8", 3, 63, 1)},
		{"scales of more dimensions", "does not fit", shaped(down+"_scales", "U8", 3, 64, 1, 1)},
		{"long blocks", "but a block of MXFP4 has 16 bytes", shaped(down+"_blocks", "U8", 3, 64, 1, 32)},
		{"two dimensions", "but a block of MXFP4 has 16 bytes", shaped(down+"_blocks", "U8", 64, 16)},
		{"no values", "does not fit", shaped(down+"_blocks", "U8", 0, 64, 1, 16)},
		{"signed blocks", "has shape [3 64 1 16], but the model needs [3 64 32]", shaped(down+"_blocks", "I8", 3, 64, 1, 16)},
		{"signed scales", "MXFP4 has U8", shaped(down+"_scales", "I8", 3, 64, 1)},
		{"no number", "is not finite", scaled(255)},
		{"infinite", "is not finite", scaled(254)},
		{"smallest", "", scaled(0)},
		{"other bytes", "values of type U8", shaped("model.layers.1.self_attn.q_proj.weight", "U8", 16, 64)},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, list := folder(t, packedFixture, c.change)
			model, err := hf.ReadModel(dir)
			if err != nil {
				t.Fatal(err)
			}
			w, err := model.OpenWeights(list)
			if err == nil {
				defer w.Close()
				err = w.Read("layer.1.experts.w_down", 0, 0, 3*64, 32, make([]float32, 3*64*32))
			}
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

// FuzzMXFP4 reads matrices in MXFP4 with blocks and scales of any shape.
func FuzzMXFP4(f *testing.F) {
	f.Add(int64(3), int64(64), int64(1), int64(16), int64(1), []byte{1, 2, 130, 255})
	f.Fuzz(func(t *testing.T, experts, rows, blocks, bytes, scales int64, data []byte) {
		dir, list := folder(t, packedFixture, func(l sources) sources {
			for suffix, shape := range map[string][]int64{"_blocks": {experts & 7, rows & 127, blocks & 3, bytes & 31}, "_scales": {experts & 7, rows & 127, scales & 3}} {
				info := safetensors.Info{Name: "model.layers.1.mlp.experts.down_proj" + suffix, DType: "U8", Shape: shape}
				values := make([]byte, info.Bytes())
				copy(values, data)
				*named(l, info.Name) = source(info, values)
			}
			return l
		})
		model, err := hf.ReadModel(dir)
		if err != nil {
			t.Fatal(err)
		}
		w, err := model.OpenWeights(list)
		if err != nil {
			return
		}
		defer w.Close()
		out := make([]float32, 3*64*32)
		if err := w.Read("layer.1.experts.w_down", 0, 0, 3*64, 32, out); err != nil && !strings.Contains(err.Error(), "is not finite") {
			t.Error(err)
		}
		for i, v := range out {
			if err == nil && (math.IsNaN(float64(v)) || math.IsInf(float64(v), 0)) {
				t.Fatalf("value %d is %g", i, v)
			}
		}
	})
}
