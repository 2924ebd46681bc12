package main

import (
	"bytes"
	"fmt"
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

// TestLongSteps plans each job in a process of its own, and prints its processor time and its memory.
func TestLongSteps(t *testing.T) {
	if os.Getenv("SPPO_LONG") == "" {
		t.Skip("takes minutes; set SPPO_LONG=1")
	}
	dir := t.TempDir()
	bin := filepath.Join(dir, "sppoc")
	if out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "job\tCPU\tmemory\tranks\tstep")
	for i, name := range longSteps {
		t.Run(name, func(t *testing.T) {
			file, set := fleetFile(t, strings.Fields(name))
			args := []string{"plan", file}
			for _, s := range set {
				args = append(args, "--set", s)
			}
			c := exec.Command(bin, args...)
			var out bytes.Buffer
			c.Stdout, c.Stderr = &out, &out
			if err := c.Run(); err != nil {
				t.Fatalf("%v\n%s", err, out.String())
			}
			spent := c.ProcessState.UserTime() + c.ProcessState.SystemTime()
			memory := float64(c.ProcessState.SysUsage().(*syscall.Rusage).Maxrss) / (1 << 20) // GiB
			row := fmt.Sprintf("%s\t%.1f s\t%.2f GiB\t%s\t%s", name, spent.Seconds(), memory, lineOf(out.String(), "ranks"), lineOf(out.String(), "step"))
			t.Log(row)
			fmt.Fprintln(w, row)
			limit, most := 60*time.Second, 2.0
			if i < 2 {
				limit, most = 20*time.Second, 1
			}
			if spent > limit || memory > most {
				t.Errorf("the plan took %s and %.2f GiB, more than %s or %g GiB", spent, memory, limit, most)
			}
		})
	}
	w.Flush()
	t.Log("\n" + table.String())
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
