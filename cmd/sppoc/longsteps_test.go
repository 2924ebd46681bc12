package main

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"
)

// longSteps lists jobs with many sequences or many GPUs. Their limits are those of every plan; the first two have
// lower ones.
var longSteps = []string{
	"qwen2.5-72b h100 8 8 1M train.batch=64",
	"llama-405b h100 2048 8 128K train.batch=1024",
	"qwen2.5-72b h100 8 8 1M train.batch=1",
	"llama-70b h100 8 8 512K train.batch=128",
	"qwen2.5-32b h200 4 8 256K train.batch=256",
	"llama-8b h100 1 8 1M train.batch=64",
	"mistral-7b h100 1 1 128K train.batch=64",
	"llama-70b h100 512 8 128K train.batch=512",
	"qwen2.5-72b h100 1024 8 64K train.batch=2048",
	"llama-405b h200 1024 8 32K train.batch=2048",
}

// longBudget is the processor time and memory that building a job's program, or verifying and simulating it, may take.
const (
	longBudget = 60 * time.Second
	longMemory = 4.0 // GiB
)

// TestLongSteps plans, builds, verifies and simulates each job, each command in a process of its own, and prints their processor time and
// memory. The step of the plan must be that of the simulation of the whole program.
func TestLongSteps(t *testing.T) {
	if os.Getenv("SPPO_LONG") == "" {
		t.Skip("takes minutes; set SPPO_LONG=1")
	}
	bin := t.TempDir()
	if out, err := exec.Command("go", "build", "-o", bin+"/", ".", "../sppovm").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "job\tplan\tbuild\tsimulation\tranks\tstep\tsimulated")
	for i, name := range longSteps {
		t.Run(name, func(t *testing.T) {
			file, set := fleetFile(t, strings.Fields(name))
			var flags []string
			for _, s := range set {
				flags = append(flags, "--set", s)
			}
			limit, most := longBudget, 2.0
			if i < 2 {
				limit, most = 20*time.Second, 1
			}
			program := filepath.Join(t.TempDir(), "job.sppb")
			report, plan := spend(t, limit, most, filepath.Join(bin, "sppoc"), append([]string{"plan", file}, flags...)...)
			_, build := spend(t, limit+longBudget, longMemory, filepath.Join(bin, "sppoc"), append([]string{"build", file, "-o", program}, flags...)...)
			simulated, simulation := spend(t, longBudget, longMemory, filepath.Join(bin, "sppovm"), "run", program, "--device", "sim")
			_, step, _ := strings.Cut(simulated, "simulated step 1/1  ")
			step, _, _ = strings.Cut(step, "  ")
			off := secondsOf(t, lineOf(report, "step"))/secondsOf(t, step) - 1
			if accuracy := accuracyOf(report); math.Abs(off) > accuracy {
				t.Errorf("the plan's step is %+.2f%% off the simulation of the program, more than %g%%", 100*off, 100*accuracy)
			}
			row := strings.Join([]string{name, plan, build, simulation, lineOf(report, "ranks"), lineOf(report, "step"), step}, "\t")
			t.Log(row)
			fmt.Fprintln(w, row)
		})
	}
	w.Flush()
	t.Log("\n" + table.String())
}

// spend runs a command. It returns its output, and its processor time and memory in words.
func spend(t *testing.T, limit time.Duration, most float64, command string, args ...string) (output, spent string) {
	t.Helper()
	c := exec.Command(command, args...)
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	if err := c.Run(); err != nil {
		t.Fatalf("%s %s: %v\n%s", filepath.Base(command), args[0], err, out.String())
	}
	took := c.ProcessState.UserTime() + c.ProcessState.SystemTime()
	memory := float64(c.ProcessState.SysUsage().(*syscall.Rusage).Maxrss) / (1 << 20) // GiB
	if took > limit || memory > most {
		t.Errorf("%s %s took %s and %.2f GiB, more than %s or %g GiB", filepath.Base(command), args[0], took, memory, limit, most)
	}
	return out.String(), fmt.Sprintf("%.1f s, %.2f GiB", took.Seconds(), memory)
}

// accuracyOf returns the largest relative error of the step of a report. Placing the whole program may leave other gaps than
// placing the shorter one that the plan simulates, and so other waits.
func accuracyOf(report string) float64 {
	if strings.Contains(lineOf(report, "step"), "estimated") {
		return timeAccuracy
	}
	return 0.005
}

// secondsOf parses a time as reports print it, such as 1.5 ms.
func secondsOf(t *testing.T, text string) float64 {
	t.Helper()
	var n float64
	var unit string
	units := map[string]float64{"s": 1, "ms": 1e-3, "us": 1e-6}
	if _, err := fmt.Sscan(text, &n, &unit); err != nil || units[unit] == 0 {
		t.Fatalf("%q is not a time", text)
	}
	return n * units[unit]
}

// lineOf returns the text of a row of a report.
func lineOf(report, name string) string {
	for _, line := range strings.Split(report, "\n") {
		if rest, ok := strings.CutPrefix(line, "  "+name+" "); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}
