package hf_test

import (
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/data/safetensors"
	"sppo.dev/internal/hf"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// placed gives every element its row and column as its value.
type placed struct{}

func (placed) Read(_ string, row, col, rows, cols int64, out []float32) error {
	for i := range out {
		out[i] = float32((row+int64(i)/cols)*1000 + col + int64(i)%cols)
	}
	return nil
}

// written is an adapter in a folder.
type written struct {
	program *ir.Program
	model   *hf.Model
	dir     string
	file    *safetensors.Folder
}

// writeAdapter writes an adapter of a model, whose values are those of placed.
func writeAdapter(t *testing.T, model string) written {
	t.Helper()
	w := written{program: compile(t, model, 1, readExpected(t, model), "train.adapter=lora(rank = 2, alpha = 4)"), dir: filepath.Join(t.TempDir(), "adapter")}
	var err error
	if w.model, err = hf.ReadModel(model); err != nil {
		t.Fatal(err)
	}
	of := lang.Model(w.program.Model)
	if err := w.model.WriteAdapter(t.Context(), w.dir, placed{}, w.program.Tensors, &of); err != nil {
		t.Fatal(err)
	}
	if w.file, err = safetensors.OpenFile(filepath.Join(w.dir, hf.AdapterWeights)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.file.Close() })
	return w
}

// The second matrices of adapters change the order of elements of heads as the matrices do that they adapt. Blocks that begin and end
// inside a head have the same values as whole tensors.
func TestAdaptersOfNeighbours(t *testing.T) {
	const dim = 6
	dir := filepath.Join("testdata", "models", "ernie-4.5")
	w := writeAdapter(t, dir)
	for _, name := range []string{"q_proj", "k_proj", "v_proj"} {
		x := w.file.Find("base_model.model.model.layers.1.self_attn." + name + ".lora_B.weight") // [out, rank]
		values := make([]float32, x.Elements())
		if _, err := x.Float32s(values, 0, nil); err != nil {
			t.Fatal(err)
		}
		for i, v := range values {
			row := i / 2
			if name != "v_proj" {
				row = row/dim*dim + row%dim/2 + row%2*dim/2
			}
			if want := float32(i%2*1000 + row); v != want {
				t.Errorf("%s: value %d is %g, want %g", name, i, v, want)
			}
		}
	}
	sameAdapter(t, w.model, w.dir, w.program)
}

// sameAdapter checks that the second matrices of an adapter of placed have the same values once it is read.
func sameAdapter(t *testing.T, model *hf.Model, dir string, program *ir.Program) {
	t.Helper()
	of := lang.Model(program.Model)
	w, err := model.OpenAdapter(dir, program.Tensors, &of)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for _, tensor := range program.Tensors {
		if !strings.HasSuffix(tensor.Name, ".lora_b") {
			continue
		}
		rows, cols := tensor.Shape[0], min(5, tensor.Shape[1]-1)
		got, want := make([]float32, rows*cols), make([]float32, rows*cols)
		if err := w.Read(tensor.Name, 0, 1, rows, cols, got); err != nil {
			t.Fatal(err)
		}
		_ = placed{}.Read("", 0, 1, rows, cols, want)
		for i := range want {
			if math.Abs(float64(got[i]-want[i])) > 0 {
				t.Fatalf("%s: value %d is %g, want %g", tensor.Name, i, got[i], want[i])
			}
		}
	}
}

// Adapters of fused maps, in which every head may have a part of each of ours, have the same values once they are read again.
func TestFusedAdapters(t *testing.T) {
	for fixture, fused := range map[string]string{
		"qwen3-next": "linear_attn.in_proj_qkvz", "qwen3.5": "self_attn.q_proj", "nemotron-h": "mixer.in_proj", "kimi-linear-fused": "forget_gate.f_b_proj",
	} {
		dir := filepath.Join("testdata", "models", fixture)
		w := writeAdapter(t, dir)
		whole, err := safetensors.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, b := range w.file.Tensors() {
			name, isB := strings.CutSuffix(strings.TrimPrefix(b.Name, "base_model.model."), ".lora_B.weight")
			if own, ok := strings.CutPrefix(name, "model."); ok && fixture == "nemotron-h" {
				name = "backbone." + own
			}
			found = found || isB && strings.HasSuffix(name, fused)
			if w := whole.Find(name + ".weight"); isB && (w == nil || w.Shape[0] != b.Shape[0]) {
				t.Errorf("%s: %s has shape %v, the weight of %s another number of rows", fixture, b.Name, b.Shape, name)
			}
		}
		if !found {
			t.Errorf("%s: the adapter has no %s", fixture, fused)
		}
		whole.Close()
		sameAdapter(t, w.model, w.dir, w.program)
	}
}

// Adapters of latent attention have the parts of fused matrices, in the order of the folder.
func TestAdaptersOfLatents(t *testing.T) {
	for _, name := range []string{"deepseek-v3", "deepseek-v3-plain", "deepseek-v3-halves"} {
		dir := filepath.Join("testdata", "models", name)
		adapter := writeAdapter(t, dir)
		of := lang.Model(adapter.program.Model)
		rows := func(module string) (list []int) {
			x := adapter.file.Find("base_model.model.model.layers.1.self_attn." + module + ".lora_B.weight") // [out, rank]
			values := make([]float32, x.Elements())
			if _, err := x.Float32s(values, 0, nil); err != nil {
				t.Fatal(err)
			}
			for i := 0; i < len(values); i += 2 {
				list = append(list, int(values[i]))
			}
			return list
		}
		heads, still, turned, wide, latent := of.Heads, of.NopeDim, of.RopeDim, of.ValueHeadDim, of.KVLatent
		place := func(i int) int { // of a rotated element in ours
			if name == "deepseek-v3-halves" {
				return i
			}
			return i%2*turned/2 + i/2
		}
		var q, a, b []int
		for h := range heads {
			for i := range still {
				q, b = append(q, h*(still+turned)+turned+i), append(b, h*still+i)
			}
			for i := range turned {
				q = append(q, h*(still+turned)+place(i))
			}
			for i := range wide {
				b = append(b, h*wide+i)
			}
		}
		for i := range latent {
			a = append(a, i)
		}
		for i := range turned {
			a = append(a, place(i))
		}
		queries := "q_b_proj"
		if of.QLatent == 0 {
			queries = "q_proj"
		}
		for module, want := range map[string][]int{queries: q, "kv_a_proj_with_mqa": a, "kv_b_proj": b} {
			if got := rows(module); !slices.Equal(got, want) {
				t.Errorf("%s: the rows of %s are %v, want %v", name, module, got, want)
			}
		}
		w, err := adapter.model.OpenAdapter(adapter.dir, adapter.program.Tensors, &of)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		for _, tensor := range adapter.program.Tensors {
			if !hf.IsAdapter(tensor.Name) {
				continue
			}
			got, want := make([]float32, tensor.Shape[0]*tensor.Shape[1]), make([]float32, tensor.Shape[0]*tensor.Shape[1])
			if err := w.Read(tensor.Name, 0, 0, tensor.Shape[0], tensor.Shape[1], got); err != nil {
				t.Fatal(err)
			}
			_ = placed{}.Read("", 0, 0, tensor.Shape[0], tensor.Shape[1], want)
			if !slices.Equal(got, want) {
				t.Errorf("%s: %s became %v, want %v", name, tensor.Name, got, want)
			}
		}
	}
}
