// Package torchtest starts the machine in interop/torch, which needs a Python with torch: SPPO_PYTHON names it. It is for tests only.
package torchtest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"sppo.dev/ir"
)

// folder returns that of the machine.
func folder() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(file))
}

// Root returns the folder of the repository.
func Root() string { return filepath.Dir(filepath.Dir(folder())) }

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

// Command returns a command that runs Python on this package, or skips the test.
func Command(t testing.TB, arguments ...string) *exec.Cmd {
	t.Helper()
	name, err := interpreter()
	if err != nil {
		t.Skipf("SPPO_PYTHON names no Python with torch: %v", err)
	}
	c := exec.CommandContext(t.Context(), name, arguments...)
	c.Env = append(os.Environ(), "PYTHONPATH="+folder(), "OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1")
	c.Dir = folder()
	return c
}

// Install makes this package available to the commands that a test starts, or skips the test.
func Install(t testing.TB) {
	t.Helper()
	c := Command(t)
	t.Setenv("SPPO_PYTHON", c.Path)
	t.Setenv("PYTHONPATH", folder())
	t.Setenv("OMP_NUM_THREADS", "1")
	t.Setenv("PYTHONDONTWRITEBYTECODE", "1")
}

// Record is a line of the output of `run --json`.
type Record struct {
	Step     int      `json:"step"`
	Loss     *float64 `json:"loss"`
	GradNorm float64  `json:"grad_norm"`
	EvalLoss *float64 `json:"eval_loss"`
	Done     bool     `json:"done"`
	Device   ir.Bytes `json:"device_peak_bytes"`
	Host     ir.Bytes `json:"host_peak_bytes"`
}

// Run runs a program on the PyTorch machine and returns its records.
func Run(t testing.TB, file string, flags ...string) (out []Record) {
	t.Helper()
	return Records(t, Command(t, append(runs(file), flags...)...))
}

// Spread does the same with a process for each rank, under torchrun.
func Spread(t testing.TB, ranks int, file string, flags ...string) []Record {
	t.Helper()
	torchrun := []string{"-m", "torch.distributed.run", "--standalone", "--nproc-per-node", strconv.Itoa(ranks)}
	return Records(t, Command(t, slices.Concat(torchrun, runs(file), flags)...))
}

// runs returns the arguments of Python that run a program on the files of the repository.
func runs(file string) []string {
	return []string{"-m", "sppo_torch", "run", file, "--json", "-q", "--dir", Root()}
}

// Records runs such a command and returns what it prints.
func Records(t testing.TB, c *exec.Cmd) (out []Record) {
	t.Helper()
	var stderr bytes.Buffer
	c.Stderr = &stderr
	text, err := c.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", c.Args, err, stderr.String())
	}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		var r Record
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
	}
	return out
}

// Compare requires equal losses and norms, except for rounding.
func Compare(t testing.TB, got, want []Record, tolerance float64) {
	t.Helper()
	losses, norms := compare(t, got, want, tolerance)
	t.Logf("the largest difference is %.2g", max(losses, norms))
}

// Difference returns the largest differences of losses and of norms, relative to numbers above 1.
func Difference(t testing.TB, got, want []Record) (losses, norms float64) {
	t.Helper()
	return compare(t, got, want, math.Inf(1))
}

func compare(t testing.TB, got, want []Record, tolerance float64) (losses, norms float64) {
	t.Helper()
	key := func(r Record) string { return fmt.Sprint(r.Step, r.EvalLoss != nil) }
	of := map[string]Record{}
	for _, r := range got {
		of[key(r)] = r
	}
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
			if i == 2 {
				norms = max(norms, difference)
			} else {
				losses = max(losses, difference)
			}
		}
	}
	return losses, norms
}

// CheckArenas requires that the machine has allocated exactly the arenas that the program declares.
func CheckArenas(t testing.TB, p *ir.Program, got []Record) {
	t.Helper()
	var arenas [ir.NumArenas]ir.Bytes
	for _, code := range p.Codes {
		for a, size := range code.Arenas {
			arenas[a] = max(arenas[a], size)
		}
	}
	if last := got[len(got)-1]; !last.Done || last.Device != arenas[ir.Device] || last.Host != arenas[ir.Host] {
		t.Errorf("arenas of %d and %d bytes, the program declares %d and %d", last.Device, last.Host, arenas[ir.Device], arenas[ir.Host])
	}
}
