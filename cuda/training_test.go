package cuda

import (
	"bytes"
	"context"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/codegen"
	"sppo.dev/cuda/emu"
	"sppo.dev/examples"
	"sppo.dev/ir"
	"sppo.dev/lang"
	"sppo.dev/passes"
	"sppo.dev/passes/plan"
	"sppo.dev/vm"
	"sppo.dev/vm/cpu"
)

const trainingSpec = `
import "clusters/local.sppo"

model tiny {
  family = FAMILY
  layers = 2
  hidden = 32
  heads  = 4
  vocab  = 256
  dtype  = DTYPE
}

cluster four = local(ranks = 4)

train {
  sequence = 48
  batch    = 2
  steps    = 3
  data     = text("words.txt")
  optimizer  = adamw(lr = 3e-3)
}

schedule tiny {
  sp           = 2
  pp           = 2
  dp           = 1
  subsequences = 3
}
`

// trainingProgram compiles trainingSpec; requests set keys of the schedule, such as pp=1.
func trainingProgram(t *testing.T, family, dtype string, requests ...string) *ir.Program {
	t.Helper()
	text := strings.NewReplacer("FAMILY", family, "DTYPE", dtype).Replace(trainingSpec)
	var set []string
	for _, r := range requests {
		set = append(set, "schedule."+r)
	}
	p, err := compiled(text, set...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// compiled returns a spec's program.
func compiled(text string, set ...string) (*ir.Program, error) {
	spec, err := lang.Parse("case.sppo", []byte(text), lang.Options{Shipped: examples.Shipped, Set: set})
	if err != nil {
		return nil, err
	}
	plan := plan.New(spec)
	if err := passes.Run(spec, plan, passes.Options{}); err != nil {
		return nil, err
	}
	return codegen.Build(plan)
}

// losses trains a program and returns the loss and gradient norm of every step.
func losses(p *ir.Program, dir string, newDevice func(rank int) vm.Device, transport vm.Transport) (out []float64, err error) {
	open := func(rank int) (vm.Device, error) { return newDevice(rank), nil }
	job, err := vm.Open(p, open, vm.Options{Dir: dir, Transport: transport})
	if err != nil {
		return nil, err
	}
	defer func() {
		if closed := job.Close(); err == nil {
			err = closed
		}
	}()
	ctx := context.Background()
	if err := job.Init(ctx); err != nil {
		return nil, err
	}
	for range p.Run.Steps {
		r, err := job.Step(ctx)
		if err != nil {
			return nil, err
		}
		out = append(out, r.Loss, r.GradNorm)
	}
	return out, nil
}

// wordsFolder returns a folder with the data of trainingSpec, drawn at random from a fixed seed.
func wordsFolder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	rng := rand.New(rand.NewPCG(1, 2))
	words := bytes.Buffer{}
	for range 2000 {
		words.WriteByte(byte('!' + rng.IntN(20)))
	}
	if err := os.WriteFile(filepath.Join(dir, "words.txt"), words.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// trainings are runs that together use every kind of instruction: gpt and llama in a pipeline, and each way
// to divide, share, defer and stream the work.
var trainings = []struct {
	name, family, dtype string
	requests            []string
	tolerance           float64
}{
	{"pipeline", "gpt", "f32", nil, 2e-4},
	{"pipeline bf16", "llama", "bf16", nil, 3e-2},
	{"K and V from the host", "llama", "f32", []string{"keep=[]", "sp=1", "offload=full"}, 2e-4},
	{"K and V from the host bf16", "gpt", "bf16", []string{"keep=[]", "offload=full"}, 3e-2},
	{"mux", "gpt", "f32", []string{"mux=on", "sp=1", "subsequences=4"}, 2e-4},
	{"mux and recomputation", "llama", "bf16", []string{"mux=on", "recompute=full", "subsequences=4"}, 3e-2},
	{"ulysses and sharded weights", "llama", "f32", []string{"pp=1", "dp=2", "sp_mode=ulysses", "zero=3", "offload=0.5"}, 2e-4},
	{"late gradients of weights", "gpt", "f32", []string{"sp=1", "pp=2", "strategy=zb-h1", "virtual_stages=1", "recompute=none"}, 2e-4},
	{"layer by layer", "llama", "f32", []string{"pp=1", "order=layer", "offload=full", "recompute=selective"}, 2e-4},
}

// Complete training runs, with all ranks on one GPU whose streams are delayed at random, give the same losses
// and gradient norms as the CPU.
func TestTrainingIsThatOfTheCPU(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	fake, kernels := useFake(t), emu.Need(t)
	dir := wordsFolder(t)
	for _, c := range trainings {
		t.Run(c.name, func(t *testing.T) {
			p := trainingProgram(t, c.family, c.dtype, c.requests...)
			if os.Getenv("SPPO_LONG") == "" {
				p.Run.Steps = 2 // the second step reads the results of the first
			}
			fake.reset(1, 1<<30, 100)
			m := fake.open(t, Options{OwnProducts: true})
			m.code = fixedCode(kernels.Path)
			checkTraining(t, m, p, dir, c.tolerance)
			if n := fake.live(); n != 0 {
				t.Errorf("%d things were not given back", n)
			}
		})
	}
}

// checkTraining compares a program's losses and gradient norms on a machine with those on the cpu device.
func checkTraining(t *testing.T, m *Machine, p *ir.Program, dir string, tolerance float64) {
	t.Helper()
	want, err := losses(p, dir, func(int) vm.Device { return cpu.New(nil) }, nil)
	if err != nil {
		t.Fatal(err)
	}
	within(t, func() {
		got, err := losses(p, dir, m.New, m)
		if err != nil {
			t.Error(err)
			return
		}
		for i := range want {
			if !(math.Abs(got[i]-want[i]) <= tolerance*math.Abs(want[i])) {
				t.Errorf("step %d: losses and norms are %v, the cpu's %v", i/2+1, got, want)
				return
			}
		}
		t.Logf("%v on the cpu, %v here", want, got)
	})
}

// TestOptimizerOnHost checks that training gives the same bits whether optimizer state and f32 masters stay on
// the device or are copied from the host and back. Streams are delayed at random. The third step's loss is the
// first that depends on stored states.
func TestOptimizerOnHost(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	fake, kernels := useFake(t), emu.Need(t)
	dir := wordsFolder(t)
	train := func(where string) (got []float64) {
		p := trainingProgram(t, "llama", "bf16", "optimizer_offload="+where, "pp=1", "sp=1", "dp=2", "zero=1", "subsequences=2")
		fake.reset(1, 1<<30, 100)
		m := fake.open(t, Options{OwnProducts: true})
		m.code = fixedCode(kernels.Path)
		within(t, func() {
			var err error
			if got, err = losses(p, dir, m.New, m); err != nil {
				t.Error(err)
			}
		})
		if n := fake.live(); n != 0 {
			t.Errorf("%d things were not given back", n)
		}
		return got
	}
	if device, host := train("none"), train("host"); !slices.Equal(device, host) || len(host) != 6 {
		t.Errorf("losses and norms are %v with the state on the host, want %v", host, device)
	}
}
