package cuda

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/codegen"
	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/shipped"
	"sppo.dev/internal/train"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/vmtest"
	"sppo.dev/ir"
	"sppo.dev/lang"
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

  init_std = 0.2 # large, so that every gradient of attention shows in the gradient norm
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

// trainingProgram compiles trainingSpec; requests set keys of the schedule, such as pp=1, or of the block they name.
func trainingProgram(t *testing.T, family, dtype string, requests ...string) *ir.Program {
	t.Helper()
	text := strings.NewReplacer("FAMILY", family, "DTYPE", dtype).Replace(trainingSpec)
	var set []string
	for _, r := range requests {
		if key, _, _ := strings.Cut(r, "="); !strings.Contains(key, ".") {
			r = "schedule." + r
		}
		set = append(set, r)
	}
	p, err := compiled(text, set...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// compiled returns a spec's program.
func compiled(text string, set ...string) (*ir.Program, error) {
	spec, err := lang.Parse("case.sppo", []byte(text), lang.Options{Shipped: shipped.Files, Set: set})
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
func losses(p *ir.Program, dir string, newDevice func(rank int) vm.Device, transport vm.Transport) (out []probe.TrainingStep, err error) {
	open := func(rank int) (vm.Device, error) { return newDevice(rank), nil }
	job, err := train.Open(p, open, train.Options{Dir: dir, Transport: transport})
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
		out = append(out, probe.TrainingStep{Loss: r.Loss, Norm: r.GradNorm})
	}
	return out, nil
}

// wordsFolder returns a folder with the data of trainingSpec: text with much structure, the source of a kernel.
func wordsFolder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "words.txt"), []byte(kernels.Text("attention.cu")), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// training is a run that is compared with the cpu device.
type training struct {
	name, family, dtype string
	requests            []string
}

// trainings are runs that together use every kind of instruction: gpt and llama in a pipeline, and each way
// to divide, share, defer and stream the work.
var trainings = []training{
	{"pipeline", "gpt", "f32", nil},
	{"pipeline bf16", "llama", "bf16", nil},
	{"K and V from the host", "llama", "f32", []string{"keep=[]", "sp=1", "offload=full"}},
	{"K and V from the host bf16", "gpt", "bf16", []string{"keep=[]", "offload=full"}},
	{"mux", "gpt", "f32", []string{"mux=on", "sp=1", "subsequences=4"}},
	{"mux and recomputation", "llama", "bf16", []string{"mux=on", "recompute=full", "subsequences=4"}},
	{"ulysses and sharded weights", "llama", "f32", []string{"pp=1", "dp=2", "sp_mode=ulysses", "zero=3", "offload=0.5"}},
	{"late gradients of weights", "gpt", "f32", []string{"sp=1", "pp=2", "strategy=zb-h1", "virtual_stages=1", "recompute=none"}},
	{"layer by layer", "llama", "f32", []string{"pp=1", "order=layer", "offload=full", "recompute=selective"}},
}

// cardTrainings are runs whose heads have kernels for one architecture. Their subsequences are longer than a tile.
var cardTrainings = []training{
	{"heads of 64, K and V from the host", "llama", "bf16", append([]string{"model.heads=2", "model.kv_heads=1", "keep=[]", "sp=1", "pp=1", "offload=full"}, long...)},
	{"heads of 128 in two stages", "gpt", "bf16", append([]string{"model.heads=1", "sp=1", "pp=2", "offload=full"}, long...)},
	{"heads of 64, ulysses", "llama", "bf16", append([]string{"model.heads=2", "sp=2", "pp=1", "sp_mode=ulysses"}, long...)},
}

var long = []string{"model.hidden=128", "model.init_std=0.1", "train.sequence=300", "train.batch=1", "subsequences=3"}

// emulatedSteps is the number of steps of the trainings with emulated kernels. The second step reads the results of
// the first.
const emulatedSteps = 2

// Complete training runs, with all ranks on one GPU whose streams are delayed at random, give the same losses
// and gradient norms as the CPU.
func TestTrainingIsThatOfTheCPU(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	fake, emulated := useFake(t), emu.Need(t)
	dir := wordsFolder(t)
	for _, c := range slices.Concat(trainings, cardTrainings) {
		t.Run(c.name, func(t *testing.T) {
			p := trainingProgram(t, c.family, c.dtype, c.requests...)
			if os.Getenv("SPPO_LONG") == "" || strings.HasPrefix(c.name, "heads of") {
				p.Run.Steps = emulatedSteps
			}
			fake.reset(1, 1<<30, 100)
			m := fake.open(t, Options{OwnProducts: true})
			m.code, m.tried = fixedCode(emulated.Path), smallTrial
			checkTraining(t, m, p, dir, c.dtype == "bf16")
			if tried := len(m.trials.done) > 0; tried != strings.HasPrefix(c.name, "heads of") {
				t.Errorf("the kernels for the card were tried: %t", tried)
			}
			if n := fake.live(); n != 0 {
				t.Errorf("%d things were not given back", n)
			}
		})
	}
}

// checkTraining compares a program's losses and gradient norms on a machine with those on the cpu device.
func checkTraining(t *testing.T, m *Machine, p *ir.Program, dir string, bf16 bool) {
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
		worst, err := probe.SameTraining(got, want, bf16)
		if err != nil {
			t.Error(err)
		}
		t.Logf("the largest difference is %.2g of its tolerance; %v", worst, got)
	})
}

// Every training row of the check detects attention with a wrong output, dq, dk or dv, and runs whose loss does not
// fall, within its first steps.
func TestPlantedTraining(t *testing.T) {
	if raceEnabled {
		t.Skip("only the cpu device runs, and the tests of e2e run it under the race detector")
	}
	dir := wordsFolder(t)
	steps := 8
	if os.Getenv("SPPO_LONG") != "" {
		steps = 20
	}
	for _, c := range slices.Concat(trainings, cardTrainings) {
		if os.Getenv("SPPO_LONG") == "" && !slices.Contains([]string{"pipeline", "pipeline bf16", "K and V from the host bf16", "heads of 64, ulysses"}, c.name) {
			continue
		}
		run := func(op ir.Op, operand string) []probe.TrainingStep {
			p := trainingProgram(t, c.family, c.dtype, c.requests...)
			if p.Run.Steps = steps; operand != "" {
				vmtest.Zero(p, op, operand)
			}
			got, err := losses(p, dir, func(int) vm.Device { return cpu.New(nil) }, nil)
			if err != nil {
				t.Fatal(err)
			}
			return got
		}
		want := run(0, "")
		if os.Getenv("SPPO_LONG") != "" {
			t.Log(want)
		}
		for _, m := range vmtest.AttentionResults {
			worst, err := probe.SameTraining(run(m.Op, m.Operand), want, c.dtype == "bf16")
			if err == nil || worst < 1.5 {
				t.Errorf("%s: %s = 0 is within %.2g of the tolerance", c.name, m.Operand, worst)
				continue
			}
			told(t, "training", fmt.Sprintf("%s of %s is 0 on the cpu device", m.Operand, ir.Ops[m.Op].Name), fmt.Sprintf("%s: %v", c.name, err))
		}
	}
}

// TestOptimizerOnHost checks that training gives the same bits whether optimizer state and f32 masters stay on
// the device or are copied from the host and back. Streams are delayed at random. The third step's loss is the
// first that depends on stored states.
func TestOptimizerOnHost(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	fake, emulated := useFake(t), emu.Need(t)
	dir := wordsFolder(t)
	train := func(where string) (got []probe.TrainingStep) {
		p := trainingProgram(t, "llama", "bf16", "optimizer_offload="+where, "pp=1", "sp=1", "dp=2", "zero=1", "subsequences=2")
		fake.reset(1, 1<<30, 100)
		m := fake.open(t, Options{OwnProducts: true})
		m.code = fixedCode(emulated.Path)
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
	if device, host := train("none"), train("host"); !slices.Equal(device, host) || len(host) != 3 {
		t.Errorf("losses and norms are %v with the state on the host, want %v", host, device)
	}
}
