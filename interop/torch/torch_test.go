// Package torch_test runs the same programs on the cpu device and on the machine in this folder, which uses PyTorch, and compares the
// results. The tests need a Python with torch: SPPO_PYTHON names it. Without one, they are skipped.
package torch_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"sppo.dev"
	"sppo.dev/interop/torch/torchtest"
	"sppo.dev/ir"
)

// compile compiles a spec and writes the program to a file.
func compile(t *testing.T, spec string, overrides ...string) (*ir.Program, string) {
	t.Helper()
	s, err := sppo.Load(filepath.Join(torchtest.Root(), spec), overrides...)
	if err != nil {
		t.Fatal(err)
	}
	p, err := sppo.Compile(t.Context(), s, sppo.Options{FirstFit: true})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "job.sppb")
	if err := ir.WriteFile(file, p); err != nil {
		t.Fatal(err)
	}
	return p, file
}

// train runs a program on the cpu device up to a step, and returns its records in the same form.
func train(t *testing.T, p *ir.Program, steps int, resume, save string) (out []torchtest.Record) {
	t.Helper()
	t.Chdir(torchtest.Root())
	job, err := sppo.Open(p, sppo.CPU(1))
	if err != nil {
		t.Fatal(err)
	}
	defer job.Close()
	if resume != "" {
		if err := job.Restore(t.Context(), resume); err != nil {
			t.Fatal(err)
		}
	}
	for s, err := range job.Train(context.Background()) {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, torchtest.Record{Step: s.Step, Loss: &s.Loss, GradNorm: s.GradNorm})
		if s.Step == steps {
			break
		}
	}
	if loss, err := job.Eval(t.Context()); err == nil {
		out = append(out, torchtest.Record{Step: steps, EvalLoss: &loss})
	}
	if save != "" {
		if err := job.Save(save); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func steps(short, long int) int {
	if os.Getenv("SPPO_LONG") != "" {
		return long
	}
	return short
}

// Both machines compute the same losses and norms, and the arenas have the sizes that the program declares.
func TestSameLosses(t *testing.T) {
	torchtest.Command(t)
	for _, c := range []struct {
		name, spec string
		overrides  []string
		steps      int
		tolerance  float64
	}{
		{"tiny", "examples/tiny.sppo", nil, 10, 1e-4},
		{"random", "examples/tiny.sppo", []string{"train.data=random()", "schedule.sp_mode=ring", "schedule.zero=3", "schedule.dp=2", "schedule.pp=1"}, 5, 1e-4},
		{"bf16", "examples/tiny.sppo", []string{"model.dtype=bf16", "train.optimizer=muon(lr = 1e-2)"}, 5, 2e-3},
		{"experts", "examples/tiny.sppo", []string{"model.num_experts=6", "model.num_experts_per_tok=2", "model.moe_intermediate_size=24", "model.bias=[router]",
			"model.scoring_func=sigmoid", "model.e_score_correction_bias=true", "schedule.sp=1"}, 5, 1e-4},
		{"gpt-docs", "examples/gpt-docs.sppo", nil, steps(2, 50), 1e-4},
		{"llama-docs", "examples/llama-docs.sppo", nil, steps(1, 10), 2e-3},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, file := compile(t, c.spec, c.overrides...)
			got := torchtest.Run(t, file, "--steps", strconv.Itoa(c.steps))
			torchtest.Compare(t, got, train(t, p, c.steps, "", ""), c.tolerance)
			torchtest.CheckArenas(t, p, got)
		})
	}
}

// A checkpoint of each machine is resumed by the other, also by a program that divides the model differently.
func TestCheckpoints(t *testing.T) {
	torchtest.Command(t)
	p, file := compile(t, "examples/tiny.sppo")
	other, otherFile := compile(t, "examples/tiny.sppo", "schedule.pp=1", "schedule.sp=4")
	want := train(t, p, 6, "", "")
	ours, theirs := t.TempDir(), t.TempDir()
	train(t, p, 3, "", ours)
	torchtest.Compare(t, torchtest.Run(t, otherFile, "--steps", "6", "--resume", ours), want[3:], 1e-4)
	torchtest.Run(t, file, "--steps", "3", "--save", theirs)
	torchtest.Compare(t, train(t, other, 6, theirs, ""), want[3:], 1e-4)
}

// Four processes under torchrun give the same bits as one.
func TestProcesses(t *testing.T) {
	torchtest.Command(t)
	_, file := compile(t, "examples/tiny.sppo")
	one := torchtest.Run(t, file, "--steps", "3")
	c := torchtest.Command(t, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "sppo_torch", "run", file, "--json", "-q", "--dir", torchtest.Root(), "--steps", "3")
	torchtest.Compare(t, torchtest.Records(t, c), one[:len(one)-1], 0)
}

// The tests in Python.
func TestPython(t *testing.T) {
	if out, err := torchtest.Command(t, "-m", "unittest", "discover", "-s", "tests").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
