package e2e

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/sample"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/internal/vm/vmtest/naive"
	"sppo.dev/lang"
)

// sampled opens a random model with the given keys for sampling, and returns it, together with its
// configuration and weights for the independent implementation.
func sampled(t *testing.T, keys string, sequence int) (*sample.Model, naive.Config, naive.Tensors) {
	t.Helper()
	text := fmt.Sprintf("import \"clusters/local.sppo\"\nmodel m { %s dtype = f32 }\ncluster c = local(ranks = 1)\n"+
		"train { sequence = %d eval_batch = 0 data = random() }\nschedule s { sp = 1 pp = 1 dp = 1 subsequences = 1 offload = none recompute = none }\n", keys, sequence)
	spec, err := parse(text)
	if err != nil {
		t.Fatal(err)
	}
	_, p, err := build(spec)
	if err != nil {
		t.Fatal(err)
	}
	source := &drawnModel{p: p}
	size := int64(sequence)
	model, err := sample.Open(lang.Model(p.Model), sample.Size{Sequence: size, Tokens: size}, source, simd.NewPool(1))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { model.Close() })
	w := naive.Tensors{}
	for _, tensor := range sample.Tensors(spec.Model, size) {
		values := make([]float32, tensor.Shape[0]*tensor.Shape[1])
		if err := source.Read(tensor.Name, 0, 0, tensor.Shape[0], tensor.Shape[1], values); err != nil {
			t.Fatal(err)
		}
		for _, v := range values {
			w[tensor.Name] = append(w[tensor.Name], float64(v))
		}
	}
	return model, naiveModel(t, p), w
}

func closeLogits(t *testing.T, at int, got []float32, want []float64) {
	t.Helper()
	for i := range want {
		if !(math.Abs(float64(got[i])-want[i]) <= 2e-4*max(1, math.Abs(want[i]))) {
			t.Fatalf("after token %d, logit %d is %.6f, the full forward pass has %.6f", at, i, got[i], want[i])
		}
	}
}

// sampledModels returns the models of TestTransformers, and others with traits that none of these has.
func sampledModels(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob(oracleFolder + "/*.json")
	if err != nil || len(files) < 12 {
		t.Fatalf("%d files in %s, %v", len(files), oracleFolder, err)
	}
	const sizes = " layers = 3 hidden = 24 heads = 4 ffn = 36 vocab = 37 "
	all := map[string]string{
		"windows":     "family = llama kv_heads = 1 window = 7 layer_types = [sliding, full] head_dim = 10" + sizes,
		"wide window": "family = llama window = 100" + sizes,
		"none":        "family = gpt positions = none kv_heads = 2" + sizes,
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var o oracle
		if err := json.Unmarshal(data, &o); err != nil {
			t.Fatal(err)
		}
		all[strings.TrimSuffix(filepath.Base(file), ".json")] = o.Keys
	}
	return all
}

// TestSampleIsTheFullForwardPass checks for every family that logits computed token by token, with cached K and
// V, are those of an independent model that computes the whole text at once. Every token chosen greedily must
// also have that model's largest logit.
func TestSampleIsTheFullForwardPass(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	for name, keys := range sampledModels(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			model, cfg, w := sampled(t, keys, oracleSequence)
			prompt := []int32{3, 1, 4, 1, 5, 9, 2, 6}
			greedy := sample.Choice{TopP: 1}
			var logits [][]float32
			next := prompt
			for model.Left() > 0 {
				row, err := model.Feed(next)
				if err != nil {
					t.Fatal(err)
				}
				logits = append(logits, row)
				next = []int32{greedy.Pick(row, 0)}
			}
			rows := naive.Logits(cfg, w, append(slices.Clone(model.Tokens()), 0))
			for i, row := range logits {
				at := len(prompt) - 1 + i
				closeLogits(t, at, row, rows[at])
				if at+1 == len(model.Tokens()) {
					break
				}
				if chosen := rows[at][model.Tokens()[at+1]]; chosen < slices.Max(rows[at])-1e-4 {
					t.Errorf("token %d has the logit %.6f, the full forward pass has %.6f", at+1, chosen, slices.Max(rows[at]))
				}
			}
		})
	}
}

// TestSampleOfLongPrompts checks that feeding a prompt in several chunks gives the logits that the independent
// model computes for the prompt as a whole.
func TestSampleOfLongPrompts(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	const n = 600
	model, cfg, w := sampled(t, "family = qwen3 layers = 2 hidden = 16 heads = 2 kv_heads = 1 head_dim = 6 ffn = 24 vocab = 37 window = 300 layer_types = [full, sliding]", n)
	prompt := make([]int32, n)
	for i := range prompt {
		prompt[i] = int32(i*i%37+i%5) % 37
	}
	want := naive.Logits(cfg, w, append(slices.Clone(prompt), 0))
	for _, feed := range []int{570, 1, 2, 27} {
		at := len(model.Tokens()) + feed
		logits, err := model.Feed(prompt[at-feed : at])
		if err != nil {
			t.Fatal(err)
		}
		closeLogits(t, at-1, logits, want[at-1])
	}
	if model.Left() != 0 {
		t.Errorf("room for %d tokens after all", model.Left())
	}
	if _, err := model.Feed([]int32{1}); err == nil {
		t.Error("a token beyond the sequence was taken")
	}
}
