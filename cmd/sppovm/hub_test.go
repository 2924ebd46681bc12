package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/internal/hf"
)

// expectedModel is the output of bench/peers/hub_models.py for a model: the results of transformers for a
// held-out text.
type expectedModel struct {
	Tokens []int     `json:"tokens"`
	Losses []float64 `json:"losses"`
	Loss   float64   `json:"loss"`
}

// hubJobs lists fixtures from package hf, each with one schedule for training and another for evaluation.
var hubJobs = []struct{ name, train, eval string }{
	{"llama-3.1", "pp=2 sp=1 subsequences=3", "pp=1 sp=2 subsequences=2 sp_mode=ring"},
	{"qwen3-window", "pp=1 sp=2 subsequences=2", "pp=3 sp=1 subsequences=3"},
	{"phi3-longrope", "pp=1 sp=2 sp_mode=ulysses subsequences=2", "pp=2 sp=1 subsequences=1"},
	{"gemma3", "pp=2 sp=1 subsequences=3 offload=full", "pp=1 sp=1 subsequences=1"},
	{"gpt2", "pp=1 sp=2 subsequences=2 recompute=full", "pp=2 sp=2 subsequences=2"},
	{"mistral-small-vision", "pp=1 sp=1 subsequences=1", "pp=2 sp=1 subsequences=3"},
}

// TestEvalEqualsTransformers imports a folder, trains the model for 20 steps and exports it. The losses of a
// held-out text must equal those of transformers before and after training. The fixture contains the losses that
// transformers computes before training. The losses after training are compared only if SPPO_PYTHON names a
// Python that has transformers, which then computes them from the exported folder. eval must compute the same
// losses from that folder as from the checkpoint.
func TestEvalEqualsTransformers(t *testing.T) {
	for _, job := range hubJobs {
		t.Run(job.name, func(t *testing.T) {
			here, err := filepath.Abs(".")
			if err != nil {
				t.Fatal(err)
			}
			folder := filepath.Join(here, "../../internal/hf/testdata/models", job.name)
			var want expectedModel
			if err := json.Unmarshal(mustRead(t, filepath.Join(folder, "expected.json")), &want); err != nil {
				t.Fatal(err)
			}
			hubJob(t, folder, want.Tokens)
			set := func(schedule string) []string {
				args := []string{"--set", "model.dtype=f32"}
				for _, pair := range strings.Fields(schedule) {
					args = append(args, "--set", "schedule."+pair)
				}
				return args
			}
			evaluate := func(of ...string) (evaluation, []float32) {
				args := append(append([]string{"job.sppo", "--token-losses", "losses.bin", "--set", `train.data=tokens("held.bin",type=uint16,shuffle=off)`}, of...), set(job.eval)...)
				return evalOf(t, args...), tokenLosses(t, "losses.bin")
			}
			before, losses := evaluate("--weights", folder)
			checkHeld(t, "before training", before, losses, want)

			sppovm(t, t.Context(), append([]string{"run", "job.sppo", "--weights", folder, "--save", "end.ckpt", "-q"}, set(job.train)...)...)
			after, losses := evaluate("--resume", "end.ckpt")
			if math.Abs(float64(after.Loss-before.Loss)) < 1e-2 {
				t.Errorf("training has not changed the loss of %v", before.Loss)
			}
			sppovm(t, t.Context(), "export", "end.ckpt", "-o", "out", "--dtype", "f32")
			again, same := evaluate("--weights", "out")
			if again.Loss != after.Loss || fmt.Sprint(same) != fmt.Sprint(losses) {
				t.Errorf("the exported folder has loss %v, the checkpoint %v", again.Loss, after.Loss)
			}
			python := os.Getenv("SPPO_PYTHON")
			if python == "" {
				return
			}
			command := exec.Command(python, filepath.Join(here, "../../bench/peers/hub_models.py"), "--measure", "out")
			var errs bytes.Buffer
			command.Stderr = &errs
			text, err := command.Output()
			if err == nil {
				err = json.Unmarshal(text, &want)
			}
			if err != nil {
				t.Fatalf("%v\n%s", err, errs.String())
			}
			checkHeld(t, "after training", after, losses, want)
		})
	}
}

// longRecipes lists ways to extend the context of a model with a maximum of 64 tokens.
var longRecipes = []struct {
	name, folder string
	set          []string
	config       []string // parts of the exported config
}{
	{"theta", "llama", []string{"model.rope_theta=500000"}, []string{`"rope_theta": 500000.0`, `"rope_type": "default"`}},
	{"yarn", "qwen3", []string{"model.rope_scaling=yarn", "model.rope_factor=2", "model.rope_original=64"},
		[]string{`"rope_type": "yarn"`, `"factor": 2.0`, `"original_max_position_embeddings": 64`}},
	{"window", "mistral-window", []string{"model.window=40"}, []string{`"sliding_window": 40`}},
	{"length", "llama", nil, []string{`"dtype": "bfloat16"`}}, // only longer sequences
}

// TestLongContextRecipe follows the recipe of docs/hub.md: other position settings, training on sequences of 80 and then of
// 96 tokens, which is beyond the 64 of the folder's config, evaluation by position, and export. The exported config has
// the position settings and the new limit. The losses of the exported folder at the new length are those of the checkpoint
// and, if SPPO_PYTHON names a Python that has transformers, those of transformers.
func TestLongContextRecipe(t *testing.T) {
	const first, second = 80, 96
	here, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		t.Log("SKIPPED: SPPO_PYTHON names no Python with transformers, so its losses are not compared")
	}
	for _, recipe := range longRecipes {
		t.Run(recipe.name, func(t *testing.T) {
			folder := filepath.Join(here, "../../internal/hf/testdata/models", recipe.folder)
			held := make([]int, second+1)
			for i := range held {
				held[i] = (i*i*7 + 3*i + i/5) % 37
			}
			hubJob(t, folder, held)
			set := []string{"--set", "model.dtype=f32", "--set", "schedule.subsequences=2", "--set", "schedule.pp=1", "--set", "schedule.sp=1"}
			for _, s := range recipe.set {
				set = append(set, "--set", s)
			}
			run := func(args ...string) string {
				_, text := sppovm(t, t.Context(), append(append([]string{"run", "job.sppo", "--steps", "4"}, args...), set...)...)
				return text
			}
			text := run("--weights", folder, "--sequence", fmt.Sprint(first), "--save", "one.ckpt")
			if !strings.Contains(text, "sequences of 80 tokens are longer than max_position_embeddings = 64") {
				t.Errorf("the run does not say that its sequences are longer than the model's:\n%s", text)
			}
			if changed := strings.Contains(text, "but the program has"); changed != (len(recipe.set) > 0) {
				t.Errorf("the run says wrongly whether positions differ from the folder's:\n%s", text)
			}
			sppovm(t, t.Context(), "export", "one.ckpt", "-o", "one", "--dtype", "f32")
			text = run("--weights", "one", "--sequence", fmt.Sprint(second), "--save", "two.ckpt")
			if !strings.Contains(text, "longer than max_position_embeddings = 80") || strings.Contains(text, "but the program has") {
				t.Errorf("the second run starts from the settings of the first:\n%s", text)
			}
			sppovm(t, t.Context(), "export", "two.ckpt", "-o", "two", "--dtype", "f32")
			config := string(mustRead(t, "two/config.json"))
			for _, part := range append(recipe.config[:len(recipe.config):len(recipe.config)], `"max_position_embeddings": 96`) {
				if part = strings.ReplaceAll(part, "bfloat16", "float32"); !strings.Contains(config, part) {
					t.Errorf("the exported config lacks %s:\n%s", part, config)
				}
			}
			evaluate := func(of ...string) (evaluation, []float32) {
				args := append(append([]string{"job.sppo", "--sequence", fmt.Sprint(second), "--token-losses", "losses.bin",
					"--set", `train.data=tokens("held.bin",type=uint16,shuffle=off)`}, of...), set...)
				return evalOf(t, args...), tokenLosses(t, "losses.bin")
			}
			ours, losses := evaluate("--resume", "two.ckpt")
			if last := ours.Positions[len(ours.Positions)-1]; last.Last != second-1 {
				t.Errorf("losses by position end at %d", last.Last)
			}
			again, same := evaluate("--weights", "two")
			if again.Loss != ours.Loss || fmt.Sprint(same) != fmt.Sprint(losses) {
				t.Errorf("the exported folder has loss %v, the checkpoint %v", again.Loss, ours.Loss)
			}
			if python == "" {
				return
			}
			command := exec.Command(python, filepath.Join(here, "../../bench/peers/hub_models.py"), "--tokens", fmt.Sprint(second), "--measure", "two")
			var errs bytes.Buffer
			command.Stderr = &errs
			out, err := command.Output()
			var want expectedModel
			if err == nil {
				err = json.Unmarshal(out, &want)
			}
			if err != nil {
				t.Fatalf("%v\n%s", err, errs.String())
			}
			var stream []byte
			for _, token := range want.Tokens {
				stream = binary.LittleEndian.AppendUint16(stream, uint16(token))
			}
			if err := os.WriteFile("held.bin", stream, 0o644); err != nil {
				t.Fatal(err)
			}
			ours, losses = evaluate("--resume", "two.ckpt")
			checkHeld(t, "at the new length", ours, losses, want)
		})
	}
}

// hubJob writes a job that trains the model of a folder, and two streams of tokens: the held-out text, and the
// training data, which has the tokens of that text in another order.
func hubJob(t *testing.T, folder string, held []int) {
	t.Helper()
	m, err := hf.ReadModel(folder)
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	spec := fmt.Sprintf(`import "clusters/local.sppo"
cluster here = local(ranks = 4)
%s
train {
  sequence = %d   steps = 20   eval_batch = 0   holdout = 0   optimizer = adamw(lr = 1e-2)
  data = tokens("stream.bin", type = uint16)
}
schedule s { dp = 1   align = 4 }
`, m.Text(), len(held)-1)
	var other, kept []byte
	for i := range 20 * len(held) {
		other = binary.LittleEndian.AppendUint16(other, uint16(held[i*i%len(held)]))
	}
	for _, token := range held {
		kept = binary.LittleEndian.AppendUint16(kept, uint16(token))
	}
	for file, text := range map[string][]byte{"job.sppo": []byte(spec), "stream.bin": other, "held.bin": kept} {
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// checkHeld compares the loss of a held-out text, and the loss of each of its tokens, with those of
// transformers.
func checkHeld(t *testing.T, when string, got evaluation, losses []float32, want expectedModel) {
	t.Helper()
	if len(losses) != len(want.Losses) {
		t.Fatalf("%s: %d losses, transformers has %d", when, len(losses), len(want.Losses))
	}
	if !(math.Abs(float64(got.Loss)-want.Loss) <= 1e-4) {
		t.Errorf("%s: loss %.6f, transformers has %.6f", when, got.Loss, want.Loss)
	}
	for i, l := range losses {
		if !(math.Abs(float64(l)-want.Losses[i]) <= 1e-4) {
			t.Errorf("%s: the loss of token %d is %.6f, transformers has %.6f", when, i, l, want.Losses[i])
			return
		}
	}
}
