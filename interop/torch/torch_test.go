// Package torch_test runs the same programs on the cpu device and on the machine in this folder, which uses PyTorch, and compares the
// results. The tests need a Python with torch: SPPO_PYTHON names it. Without one, they are skipped.
package torch_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"sppo.dev"
	"sppo.dev/ir"
)

// here is this folder, and root that of the repository, in which programs look for their data.
var (
	here, _ = os.Getwd()
	root    = filepath.Join(here, "..", "..")
)

// interpreter returns a Python that has torch, or why there is none.
var interpreter = sync.OnceValues(func() (string, error) {
	name := os.Getenv("SPPO_PYTHON")
	if name == "" {
		name = "python3"
	}
	if out, err := exec.Command(name, "-c", "import torch, numpy").CombinedOutput(); err != nil {
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		return "", fmt.Errorf("%s: %v: %s", name, err, lines[len(lines)-1])
	}
	return name, nil
})

// torch returns a command that runs Python on this package, or skips the test.
func torch(t *testing.T, arguments ...string) *exec.Cmd {
	t.Helper()
	name, err := interpreter()
	if err != nil {
		t.Skipf("SPPO_PYTHON names no Python with torch: %v", err)
	}
	c := exec.CommandContext(t.Context(), name, arguments...)
	c.Env = append(os.Environ(), "PYTHONPATH="+here, "OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1")
	c.Dir = here
	return c
}

// record is a line of the output of `run --json`.
type record struct {
	Step     int      `json:"step"`
	Loss     *float64 `json:"loss"`
	GradNorm float64  `json:"grad_norm"`
	EvalLoss *float64 `json:"eval_loss"`
	Done     bool     `json:"done"`
	Device   ir.Bytes `json:"device_peak_bytes"`
	Host     ir.Bytes `json:"host_peak_bytes"`
}

// run runs a program on the PyTorch machine and returns its records.
func run(t *testing.T, file string, flags ...string) (out []record) {
	t.Helper()
	return records(t, torch(t, append([]string{"-m", "sppo_torch", "run", file, "--json", "-q", "--dir", root}, flags...)...))
}

func records(t *testing.T, c *exec.Cmd) (out []record) {
	t.Helper()
	var stderr bytes.Buffer
	c.Stderr = &stderr
	text, err := c.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", c.Args, err, stderr.String())
	}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		var r record
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
	}
	return out
}

// compile compiles a spec and writes the program to a file.
func compile(t *testing.T, spec string, overrides ...string) (*ir.Program, string) {
	t.Helper()
	s, err := sppo.Load(filepath.Join(root, spec), overrides...)
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
func train(t *testing.T, p *ir.Program, steps int, resume, save string) (out []record) {
	t.Helper()
	t.Chdir(root)
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
		out = append(out, record{Step: s.Step, Loss: &s.Loss, GradNorm: s.GradNorm})
		if s.Step == steps {
			break
		}
	}
	if loss, err := job.Eval(t.Context()); err == nil {
		out = append(out, record{Step: steps, EvalLoss: &loss})
	}
	if save != "" {
		if err := job.Save(save); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// compare requires equal losses and norms, except for rounding.
func compare(t *testing.T, got, want []record, tolerance float64) {
	t.Helper()
	key := func(r record) string { return fmt.Sprint(r.Step, r.EvalLoss != nil) }
	of := map[string]record{}
	for _, r := range got {
		of[key(r)] = r
	}
	worst := 0.0
	for _, w := range want {
		g, ok := of[key(w)]
		if !ok {
			t.Fatalf("no record of step %d", w.Step)
		}
		pairs := [][2]*float64{{g.Loss, w.Loss}, {g.EvalLoss, w.EvalLoss}, {&g.GradNorm, &w.GradNorm}}
		for i, pair := range pairs {
			if pair[1] == nil {
				continue
			}
			difference := math.Abs(*pair[0]-*pair[1]) / math.Max(1, math.Abs(*pair[1]))
			if !(difference <= tolerance) {
				t.Errorf("step %d, %s: %g, the cpu device has %g", w.Step, [...]string{"loss", "validation loss", "norm"}[i], *pair[0], *pair[1])
			}
			worst = math.Max(worst, difference)
		}
	}
	t.Logf("the largest difference is %.2g", worst)
}

func steps(short, long int) int {
	if os.Getenv("SPPO_LONG") != "" {
		return long
	}
	return short
}

// Both machines compute the same losses and norms, and the arenas have the sizes that the program declares.
func TestSameLosses(t *testing.T) {
	torch(t)
	for _, c := range []struct {
		name, spec string
		overrides  []string
		steps      int
		tolerance  float64
	}{
		{"tiny", "examples/tiny.sppo", nil, 10, 1e-4},
		{"random", "examples/tiny.sppo", []string{"train.data=random()", "schedule.sp_mode=ring", "schedule.zero=3", "schedule.dp=2", "schedule.pp=1"}, 5, 1e-4},
		{"bf16", "examples/tiny.sppo", []string{"model.dtype=bf16", "train.optimizer=muon(lr = 1e-2)"}, 5, 2e-3},
		{"gpt-docs", "examples/gpt-docs.sppo", nil, steps(2, 50), 1e-4},
		{"llama-docs", "examples/llama-docs.sppo", nil, steps(1, 10), 2e-3},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, file := compile(t, c.spec, c.overrides...)
			got := run(t, file, "--steps", strconv.Itoa(c.steps))
			compare(t, got, train(t, p, c.steps, "", ""), c.tolerance)
			var device, host ir.Bytes
			for _, code := range p.Codes {
				device, host = max(device, code.Arenas[ir.Device]), max(host, code.Arenas[ir.Host])
			}
			if last := got[len(got)-1]; !last.Done || last.Device != device || last.Host != host {
				t.Errorf("arenas of %v and %v bytes, the program declares %v and %v", last.Device, last.Host, device, host)
			}
		})
	}
}

// A checkpoint of each machine is resumed by the other, also by a program that divides the model differently.
func TestCheckpoints(t *testing.T) {
	torch(t)
	p, file := compile(t, "examples/tiny.sppo")
	other, otherFile := compile(t, "examples/tiny.sppo", "schedule.pp=1", "schedule.sp=4")
	want := train(t, p, 6, "", "")
	ours, theirs := t.TempDir(), t.TempDir()
	train(t, p, 3, "", ours)
	compare(t, run(t, otherFile, "--steps", "6", "--resume", ours), want[3:], 1e-4)
	run(t, file, "--steps", "3", "--save", theirs)
	compare(t, train(t, other, 6, theirs, ""), want[3:], 1e-4)
}

// Four processes under torchrun give the same bits as one.
func TestProcesses(t *testing.T) {
	torch(t)
	_, file := compile(t, "examples/tiny.sppo")
	one := run(t, file, "--steps", "3")
	c := torch(t, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "sppo_torch", "run", file, "--json", "-q", "--dir", root, "--steps", "3")
	compare(t, records(t, c), one[:len(one)-1], 0)
}

// The tests in Python.
func TestPython(t *testing.T) {
	if out, err := torch(t, "-m", "unittest", "discover", "-s", "tests").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
