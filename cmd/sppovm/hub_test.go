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

	"sppo.dev/hf"
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
// transformers computes before training. The losses after training are compared only if SPPO_HUB_PYTHON names a
// Python that has transformers, which then computes them from the exported folder. eval must compute the same
// losses from that folder as from the checkpoint.
func TestEvalEqualsTransformers(t *testing.T) {
	for _, job := range hubJobs {
		t.Run(job.name, func(t *testing.T) {
			here, err := filepath.Abs(".")
			if err != nil {
				t.Fatal(err)
			}
			folder := filepath.Join(here, "../../hf/testdata/models", job.name)
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
			python := os.Getenv("SPPO_HUB_PYTHON")
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
