package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"sppo.dev/cmd/internal/cli"
)

// childrenOf lists the processes that a process has started.
func childrenOf(pid int) (list []int) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, file := range files {
		text, _ := os.ReadFile(file) // empty once the thread has ended
		for _, word := range strings.Fields(string(text)) {
			if n, err := strconv.Atoi(word); err == nil {
				list = append(list, n)
			}
		}
	}
	return list
}

const killedSteps = "40"

// undisturbed trains without kills and returns the arguments of the job and its losses. The folder is "whole".
func undisturbed(t *testing.T) (args []string, want []float64) {
	t.Helper()
	args = []string{"tiny.sppo", "--set", "train.steps=" + killedSteps, "--json", "-q"}
	return args, losses(t, alone(t, append(args, "--save", "whole")...))
}

// asUndisturbed compares what a killed run has left with the run that was not killed. Its losses are those of several starts, of
// which some steps came twice.
func asUndisturbed(t *testing.T, dir, out string, want []float64) {
	t.Helper()
	same(t, "whole", dir)
	for _, o := range objects(t, out) {
		loss, ok := o["loss"].(float64)
		if step := int(o["step"].(float64)); ok && loss != want[step-1] {
			t.Errorf("step %d has loss %v, want %v", step, loss, want[step-1])
		}
	}
	for _, name := range namesIn(t, dir) {
		if !strings.HasPrefix(name, "step-") {
			t.Errorf("%s is left in %s", name, dir)
		}
	}
	if left := namesIn(t, "."); slices.ContainsFunc(left, func(name string) bool { return strings.HasPrefix(name, ".") }) {
		t.Errorf("stray files: %v", left)
	}
}

// complete drops lines that a killed process has not finished.
func complete(out string) string {
	var lines []string
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "{\"step\"") && strings.HasSuffix(line, "}\n") && strings.Contains(line, "\"loss\"") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

// kills is how many processes a test kills.
func kills(short, long int) int {
	if os.Getenv("SPPO_LONG") != "" {
		return long
	}
	return short
}

// Any process may be killed at any moment, during saving too: launch starts the job again, and it ends with the losses and weights
// of a run that was not disturbed.
func TestKilledAndRestarted(t *testing.T) {
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/task", os.Getpid())); err != nil {
		t.Skip("needs /proc to find processes")
	}
	inBase(t)
	args, want := undisturbed(t)
	for i, processes := range []int{1, 2, 4} {
		rng := rand.New(rand.NewPCG(uint64(processes), 1))
		for job, left := 0, kills([]int{6, 5, 4}[i], 84); left > 0; job++ {
			dir := fmt.Sprintf("dir-%d-%d", processes, job)
			all := launchCommand(t, "launch", 1, func(int) []string {
				return append([]string{"-n", fmt.Sprint(processes), "--restart", "1000", "run"}, append(args, "--save", dir, "--save-every", "1", "--resume", "auto")...)
			})
			done := make(chan struct{})
			go func() {
				defer close(done)
				for ; left > 0; left-- {
					time.Sleep(time.Duration(rng.IntN(700)) * time.Millisecond)
					children := childrenOf(all[0].Process.Pid)
					if len(children) == 0 {
						return // between two starts, or at the end
					}
					syscall.Kill(children[rng.IntN(len(children))], syscall.SIGKILL)
				}
			}()
			out := end(t, all)
			<-done
			if all[0].code != cli.Done {
				t.Fatalf("%d processes: exit %d\n%s", processes, all[0].code, all[0].errs.String())
			}
			asUndisturbed(t, dir, complete(out[0]), want)
		}
	}
}

// The same without launch: the same command line is started again by hand.
func TestKilledAndStartedAgain(t *testing.T) {
	inBase(t)
	args, want := undisturbed(t)
	for i, processes := range []int{1, 2, 4} {
		rng := rand.New(rand.NewPCG(uint64(processes), 2))
		for job, left := 0, kills([]int{3, 3, 2}[i], 83); left > 0; job++ {
			dir := fmt.Sprintf("dir-%d-%d", processes, job)
			text := ""
			for start, whole := 0, false; !whole; start++ {
				job := append(args, "--save", dir, "--save-every", "1", "--resume", "auto")
				all := launchAll(t, processes, inWorld(t, processes, append(job, "--rendezvous-timeout", "5s", "--job", fmt.Sprint(dir, start))...))
				if left > 0 {
					left--
					victim := all[rng.IntN(processes)]
					time.AfterFunc(time.Duration(rng.IntN(900))*time.Millisecond, func() { victim.Process.Kill() })
				}
				out := end(t, all)
				text += complete(out[0])
				whole = !slices.ContainsFunc(all, func(p *process) bool { return p.code != cli.Done })
			}
			asUndisturbed(t, dir, text, want)
		}
	}
}
