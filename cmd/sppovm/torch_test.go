package main

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"sppo.dev/interop/torch/torchtest"
)

// --engine torch has the losses of our own machine, and each continues from the other's checkpoint.
func TestTorchEngine(t *testing.T) { checkTorchEngine(t) }

// The machine gets sequences of token files from this program, a few steps at a time, with their order, documents and positions.
func TestTorchEngineOnTokens(t *testing.T) {
	t.Setenv(asCommand, "1")
	data := filepath.Join(t.TempDir(), "tokens.bin")
	tokens := make([]byte, 0, 4000)
	for i := range uint16(2000) {
		tokens = binary.LittleEndian.AppendUint16(tokens, i*i%23)
	}
	if err := os.WriteFile(data, tokens, 0o666); err != nil {
		t.Fatal(err)
	}
	checkTorchEngine(t, "--set", fmt.Sprintf("train.data=tokens(%q, documents = 9)", data), "--set", "train.steps=20", "--set", "train.holdout=0.1", "--set", "train.eval_batch=3")
}

func checkTorchEngine(t *testing.T, flags ...string) {
	t.Helper()
	torchtest.Install(t)
	inBase(t)
	run := func(args ...string) []float64 {
		out, _ := sppovm(t, t.Context(), append(append([]string{"run", "tiny.sppo", "--json", "-q"}, flags...), args...)...)
		return losses(t, out)
	}
	want := run("--steps", "4")
	got := run("--steps", "2", "--engine", "torch", "--save", "saved", "--resume", "auto")
	got = append(got, run("--steps", "3", "--save", "saved", "--resume", "auto")...)
	got = append(got, run("--steps", "4", "--engine", "torch", "--save", "saved", "--resume", "auto")...)
	if len(got) != len(want) {
		t.Fatalf("losses %v, our own machine has %v", got, want)
	}
	for i := range want {
		if math.Abs(got[i]-want[i]) > 1e-4 {
			t.Errorf("step %d: loss %g, our own machine has %g", i+1, got[i], want[i])
		}
	}
}
