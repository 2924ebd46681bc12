package main

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/ir"
)

// childrenOf lists the child processes of a process.
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

// undisturbed trains without killing any process, and returns the job's arguments and losses. It saves the
// checkpoint in the folder "whole".
func undisturbed(t *testing.T) (args []string, want []float64) {
	t.Helper()
	job, err := cli.OpenProgram(nil, "tiny.sppo", []string{"train.steps=" + killedSteps})
	if err != nil {
		t.Fatal(err)
	}
	var program bytes.Buffer
	if err := ir.Encode(&program, job.Program); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("job.sppb", program.Bytes(), 0o644); err != nil { // compiling repeatedly takes too long
		t.Fatal(err)
	}
	args = []string{"job.sppb", "--json", "-q"}
	return args, losses(t, alone(t, append(args, "--save", "whole")...))
}

// counting is a reader that counts the lines read from it.
type counting struct {
	io.ReadCloser
	lines atomic.Int64
}

func (c *counting) Read(b []byte) (int, error) {
	n, err := c.ReadCloser.Read(b)
	c.lines.Add(int64(bytes.Count(b[:n], []byte("\n"))))
	return n, err
}

// killer kills processes at random moments.
type killer struct {
	rng    *rand.Rand
	left   int
	done   int
	saving int // number of kills in done that came during a save
}

// moment waits for a random moment in a run. Usually it is a few steps from now, but sometimes it may be any time,
// even before the first step.
func (k *killer) moment(out *counting, over <-chan struct{}) {
	enough, wait := out.lines.Load()+1+k.rng.Int64N(3), time.Duration(k.rng.IntN(20_000))*time.Microsecond
	limit := 5 * time.Second
	if k.rng.IntN(4) == 0 {
		enough, limit = math.MaxInt64, time.Duration(k.rng.IntN(500))*time.Millisecond
	}
	for began := time.Now(); out.lines.Load() < enough && time.Since(began) < limit; {
		select {
		case <-over:
			return
		case <-time.After(time.Millisecond):
		}
	}
	time.Sleep(wait)
}

// kill kills a process, and counts it if it was still running.
func (k *killer) kill(pid, parent int, dir string) {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if fields := strings.Fields(string(stat)); len(fields) < 4 || fields[2] == "Z" || fields[3] != fmt.Sprint(parent) || syscall.Kill(pid, syscall.SIGKILL) != nil {
		return
	}
	k.done, k.left = k.done+1, k.left-1
	if list, _ := filepath.Glob(filepath.Join(dir, ".step-*")); len(list) > 0 {
		k.saving++
	}
}

// asUndisturbed compares the results of a killed run with those of an undisturbed one. The losses of the killed
// run come from several starts, so some steps occur more than once.
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

// complete returns the complete lines about steps. Killed processes may leave an incomplete line.
func complete(out string) string {
	var lines []string
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "{\"step\"") && strings.HasSuffix(line, "}\n") && strings.Contains(line, "\"loss\"") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

// killers calls run for jobs of 1, 2 and 4 processes, each time with a killer. The number of kills is short[i]
// for the job with index i or, in the long form of the test, long.
func killers(t *testing.T, seed uint64, short [3]int, long int, run func(processes int, k *killer)) {
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/task", os.Getpid())); err != nil {
		t.Skip("needs /proc to find processes")
	}
	for i, processes := range []int{1, 2, 4} {
		k := &killer{rng: rand.New(rand.NewPCG(uint64(processes), seed)), left: short[i]}
		if os.Getenv("SPPO_LONG") != "" {
			k.left = long
		}
		run(processes, k)
		t.Logf("%d processes: %d kills, %d of them while a checkpoint was being written", processes, k.done, k.saving)
	}
}

// endKilling waits for processes to end. Meanwhile it runs kills, which receives the counted output of the
// first process and a channel that closes when all have ended.
func (k *killer) endKilling(t *testing.T, all []*process, kills func(lines *counting, over chan struct{})) []string {
	t.Helper()
	lines, over, killed := &counting{ReadCloser: all[0].out}, make(chan struct{}), make(chan struct{})
	all[0].out = lines
	go func() {
		defer close(killed)
		kills(lines, over)
	}()
	out := end(t, all)
	close(over)
	<-killed
	return out
}

// Any process may be killed at any moment, even during a save. launch restarts the job, which ends with the
// same losses and weights as an uninterrupted run.
func TestKilledAndRestarted(t *testing.T) {
	inBase(t)
	args, want := undisturbed(t)
	killers(t, 1, [3]int{4, 3, 2}, 84, func(processes int, k *killer) {
		for job := 0; k.left > 0; job++ {
			dir := fmt.Sprintf("dir-%d-%d", processes, job)
			all := launchCommand(t, "launch", 1, func(int) []string {
				return append([]string{"-n", fmt.Sprint(processes), "--restart", "1000", "run"}, append(args, "--save", dir, "--save-every", "1", "--resume", "auto")...)
			})
			out := k.endKilling(t, all, func(lines *counting, over chan struct{}) {
				for k.left > 0 {
					k.moment(lines, over)
					select {
					case <-over:
						return
					default:
					}
					if children := childrenOf(all[0].Process.Pid); len(children) > 0 { // otherwise launch is between two starts
						k.kill(children[k.rng.IntN(len(children))], all[0].Process.Pid, dir)
					}
				}
			})
			if all[0].code != cli.Done {
				t.Fatalf("%d processes: exit %d\n%s", processes, all[0].code, all[0].errs.String())
			}
			asUndisturbed(t, dir, complete(out[0]), want)
		}
	})
}

// A killed job that is restarted by hand with the same command, without launch, also ends with the losses and
// weights of an undisturbed run.
func TestKilledAndStartedAgain(t *testing.T) {
	inBase(t)
	args, want := undisturbed(t)
	killers(t, 2, [3]int{2, 2, 1}, 83, func(processes int, k *killer) {
		for job := 0; k.left > 0; job++ {
			dir := fmt.Sprintf("dir-%d-%d", processes, job)
			text := ""
			for start, whole := 0, false; !whole; start++ {
				job := append(args, "--save", dir, "--save-every", "1", "--resume", "auto")
				all := launchAll(t, processes, inWorld(t, processes, append(job, "--rendezvous-timeout", "3s", "--job", fmt.Sprint(dir, start))...))
				out := k.endKilling(t, all, func(lines *counting, over chan struct{}) {
					if k.left > 0 {
						k.moment(lines, over)
						k.kill(all[k.rng.IntN(processes)].Process.Pid, os.Getpid(), dir)
					}
				})
				text += complete(out[0])
				whole = !slices.ContainsFunc(all, func(p *process) bool { return p.code != cli.Done })
			}
			asUndisturbed(t, dir, text, want)
		}
	})
}
