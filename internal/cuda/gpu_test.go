package cuda

import (
	"context"
	"slices"
	"testing"

	"sppo.dev/internal/train"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/vmtest"
	"sppo.dev/ir"
)

// The tests in this file need a GPU. `make gpu-check` runs them from a binary that needs no Go installation.

// needGPU opens the machine's GPUs, or skips the test if that fails.
func needGPU(t *testing.T, options Options) *Machine {
	t.Helper()
	m, err := Open(options)
	if err != nil {
		t.Skip("SKIPPED: ", err)
	}
	t.Log(m.Describe())
	return m
}

// products are the two implementations of products: cuBLASLt if it is installed, and our own kernels.
var products = []struct {
	name    string
	options Options
}{{"cuBLASLt", Options{}}, {"own products", Options{OwnProducts: true}}}

// TestGPUConformance checks every kernel, copy and accumulation against the naive formulas.
func TestGPUConformance(t *testing.T) {
	for _, c := range products {
		t.Run(c.name, func(t *testing.T) {
			m := needGPU(t, c.options)
			vmtest.Conformance(t, func() vm.Device { return m.New(0) })
		})
	}
}

// Ranks on one GPU, each with its own streams, train for a hundred steps, or twenty if they take long on the CPU. Their
// losses and gradient norms are those of the CPU up to rounding differences, which accumulate over the steps.
func TestGPUTrainingIsThatOfTheCPU(t *testing.T) {
	for _, by := range products {
		for i, c := range slices.Concat(cardTrainings, trainings) {
			t.Run(c.name+" "+by.name, func(t *testing.T) {
				m := needGPU(t, by.options)
				dir, p := wordsFolder(t), trainingProgram(t, c.family, c.dtype, c.requests...)
				p.Run.Steps = 100
				if i < len(cardTrainings) {
					p.Run.Steps = 20
				}
				if rehearsed() {
					p.Run.Steps = emulatedSteps
				}
				checkTraining(t, m, p, dir, c.dtype == "bf16")
			})
		}
	}
}

// Training with captured and replayed sections is bitwise equal to training with individual calls.
func TestGPUGraphs(t *testing.T) {
	dir, p := wordsFolder(t), trainingProgram(t, "llama", "bf16", "pp=1", "sp=1", "offload=full")
	if p.Run.Steps = 20; rehearsed() {
		p.Run.Steps = emulatedSteps
	}
	var all [2][]probe.TrainingStep
	for i, graphs := range []bool{false, true} {
		m := needGPU(t, Options{Graphs: graphs})
		var err error
		if all[i], err = losses(p, dir, m.New, m); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(all[0], all[1]) {
		t.Errorf("by calls %v, by graphs %v", all[0], all[1])
	}
}

// A GPU touches each arena up to exactly the size that the program declares, as the CPU does.
func TestGPUPeaks(t *testing.T) {
	m := needGPU(t, Options{})
	p := trainingProgram(t, "gpt", "f32")
	job, err := train.Open(p, func(rank int) (vm.Device, error) { return m.New(rank), nil }, train.Options{Dir: wordsFolder(t), Transport: m})
	if err != nil {
		t.Fatal(err)
	}
	defer job.Close()
	if err := job.Init(context.Background()); err != nil {
		t.Fatal(err)
	}
	if _, err := job.Step(context.Background()); err != nil {
		t.Fatal(err)
	}
	if _, err := job.Eval(context.Background()); err != nil {
		t.Fatal(err)
	}
	for r := range p.Ranks {
		if got, want := job.Peaks(r), p.Codes[p.Ranks[r].Code].Arenas; got != [ir.NumArenas]ir.Bytes(want) {
			t.Errorf("rank %d touched %v bytes, the program declares %v", r, got, want)
		}
	}
}
