package main

import (
	"math"
	"testing"

	"sppo.dev/interop/torch/torchtest"
)

// --engine torch has the losses of our own machine, and each continues from the other's checkpoint.
func TestTorchEngine(t *testing.T) {
	torchtest.Install(t)
	inBase(t)
	run := func(args ...string) []float64 {
		out, _ := sppovm(t, t.Context(), append([]string{"run", "tiny.sppo", "--json", "-q"}, args...)...)
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
