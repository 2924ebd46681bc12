package hf_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"sppo.dev/internal/hf"
	"sppo.dev/internal/sample"
	"sppo.dev/internal/vm/cpu/simd"
)

// Greedy text equals that of transformers, up to the first choice that is so close that rounding could decide
// it.
func TestGreedyTextIsThatOfTransformers(t *testing.T) {
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		t.Skip("SPPO_PYTHON names no Python with transformers")
	}
	folders := fixtures(t)
	command := exec.Command(python, append([]string{filepath.Join("..", "..", "bench", "peers", "hub_models.py"), "--generate"}, folders...)...)
	var errs bytes.Buffer
	command.Stderr = &errs
	text, err := command.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, errs.String())
	}
	lines := json.NewDecoder(bytes.NewReader(text))
	for _, dir := range folders {
		var want struct {
			Tokens  []int32
			Margins []float64
		}
		if err := lines.Decode(&want); err != nil {
			t.Fatalf("%s: %v", dir, err)
		}
		got, n := greedy(t, dir, want.Tokens, len(want.Tokens)-len(want.Margins)), len(want.Tokens)
		for i, margin := range want.Margins {
			if margin < 1e-3 {
				n = min(n, len(want.Tokens)-len(want.Margins)+i)
			}
		}
		if !slices.Equal(got[:n], want.Tokens[:n]) {
			t.Errorf("%s: %v, transformers generates %v", dir, got[:n], want.Tokens[:n])
		}
	}
}

// greedy takes the first tokens of a text as the prompt and generates the others, up to the length of the text.
func greedy(t *testing.T, dir string, text []int32, prompt int) []int32 {
	t.Helper()
	folder, err := hf.ReadModel(dir)
	if err != nil {
		t.Fatal(err)
	}
	n := int64(len(text))
	m, err := folder.Lang(n, "f32")
	if err != nil {
		t.Fatal(err)
	}
	weights, err := folder.OpenWeights(sample.Tensors(m, n))
	if err != nil {
		t.Fatal(err)
	}
	defer weights.Close()
	model, err := sample.Open(m, sample.Size{Sequence: n, Tokens: n}, weights, simd.NewPool(1))
	if err != nil {
		t.Fatal(err)
	}
	defer model.Close()
	next := text[:prompt:prompt]
	for len(model.Tokens()) < len(text)-1 {
		logits, err := model.Feed(next)
		if err != nil {
			t.Fatal(err)
		}
		next = []int32{(&sample.Choice{}).Pick(logits, 0)}
	}
	return append(slices.Clone(model.Tokens()), next...)
}
