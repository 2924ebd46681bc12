package cuda

import (
	"bytes"
	"context"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sppo/codegen"
	"sppo/examples"
	"sppo/ir"
	"sppo/lang"
	"sppo/passes"
	"sppo/vm"
	"sppo/vm/cpu"
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

func trainingProgram(t *testing.T, family, dtype string) *ir.Program {
	t.Helper()
	text := strings.NewReplacer("FAMILY", family, "DTYPE", dtype).Replace(trainingSpec)
	spec, err := lang.Parse("case.sppo", []byte(text), lang.Options{Shipped: examples.Shipped})
	if err != nil {
		t.Fatal(err)
	}
	plan := passes.New(spec)
	if err := passes.Run(spec, plan, passes.Options{}); err != nil {
		t.Fatal(err)
	}
	p, err := codegen.Build(plan)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// losses trains and returns the loss and the gradient's norm of every step.
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

// wordsFolder holds the data of trainingSpec, drawn at random from a fixed seed.
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

// Whole training runs: four ranks of a pipeline on one GPU, whose streams run late at random, learn what they learn on
// the cpu.
func TestTrainingIsThatOfTheCPU(t *testing.T) {
	if testing.Short() {
		t.Skip("kernels on the processor take their time")
	}
	fake, kernels := useFake(t), needEmulator(t)
	dir := wordsFolder(t)
	for _, c := range []struct {
		family, dtype string
		tolerance     float64
	}{{"gpt", "f32", 2e-4}, {"llama", "bf16", 3e-2}} {
		t.Run(c.family+" "+c.dtype, func(t *testing.T) {
			p := trainingProgram(t, c.family, c.dtype)
			want, err := losses(p, dir, func(int) vm.Device { return cpu.New(nil) }, nil)
			if err != nil {
				t.Fatal(err)
			}
			fake.reset(1, 1<<30, 100)
			m := fake.open(t, Options{OwnProducts: true})
			m.code = fixedCode(kernels.Path)
			within(t, 3*time.Minute, func() {
				got, err := losses(p, dir, m.New, m)
				if err != nil {
					t.Error(err)
					return
				}
				for i := range want {
					if !(math.Abs(got[i]-want[i]) <= c.tolerance*math.Abs(want[i])) {
						t.Errorf("step %d: losses and norms are %v, the cpu's %v", i/2+1, got, want)
						return
					}
				}
				t.Logf("%v on the cpu, %v here", want, got)
			})
			if n := fake.live(); n != 0 {
				t.Errorf("%d things were not given back", n)
			}
		})
	}
}
