package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/train/store"
	"sppo.dev/internal/train/world"
	"sppo.dev/internal/vm/vmtest"
)

// process is one of the processes that run a job.
type process struct {
	*exec.Cmd
	out  io.ReadCloser
	errs bytes.Buffer
	code int
}

// launchAll starts sppovm run in several processes, whose arguments may differ.
func launchAll(t *testing.T, processes int, args func(process int) []string, variables ...func(process int) []string) []*process {
	t.Helper()
	return launchCommand(t, "run", processes, args, variables...)
}

// launchCommand is like launchAll, for any command of sppovm.
func launchCommand(t *testing.T, command string, processes int, args func(process int) []string, variables ...func(process int) []string) []*process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var all []*process
	for i := range processes {
		p := &process{Cmd: exec.Command(self, append([]string{command}, args(i)...)...)}
		p.Env = append(os.Environ(), asCommand+"=1")
		for _, v := range variables {
			p.Env = append(p.Env, v(i)...)
		}
		p.Stderr = &p.errs
		if p.out, err = p.StdoutPipe(); err != nil {
			t.Fatal(err)
		}
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Process.Kill() })
		all = append(all, p)
	}
	return all
}

// end waits for all processes and returns their output. If a process hangs, the test fails.
func end(t *testing.T, all []*process) (stdout []string) {
	t.Helper()
	stdout = make([]string, len(all))
	timer := time.AfterFunc(2*time.Minute, func() {
		for _, p := range all {
			p.Process.Signal(syscall.SIGQUIT) // makes the process print its goroutines and end
		}
	})
	defer timer.Stop()
	var done sync.WaitGroup
	for i, p := range all {
		done.Go(func() {
			text, _ := io.ReadAll(p.out)
			stdout[i] = string(text)
			p.Wait()
			p.code = p.ProcessState.ExitCode()
		})
	}
	done.Wait()
	return stdout
}

// alone executes sppovm run in a single process, which must succeed, and returns the output.
func alone(t *testing.T, args ...string) string {
	t.Helper()
	all := launchAll(t, 1, func(int) []string { return args })
	out := end(t, all)
	if all[0].code != cli.Done {
		t.Fatalf("exit %d\n%s", all[0].code, all[0].errs.String())
	}
	return out[0]
}

// inWorld returns a function that gives each process its arguments, for several processes that run one job on this
// host.
func inWorld(t *testing.T, processes int, args ...string) func(int) []string {
	place := vmtest.FreePlace(t)
	return func(i int) []string {
		return append([]string{"--processes", fmt.Sprint(processes), "--process", fmt.Sprint(i), "--rendezvous", place, "--job", t.Name()}, args...)
	}
}

// numbersOf parses the lines that --json prints, and leaves out the times.
func numbersOf(t *testing.T, text string) (out []map[string]any) {
	for _, o := range objects(t, text) {
		for _, timed := range []string{"tokens_per_s", "step_s", "bubble_ratio", "split"} {
			delete(o, timed)
		}
		out = append(out, o)
	}
	return out
}

// A job prints and saves the same results, bit for bit, in several processes as in one, however its ranks are
// distributed.
func TestProcessesAreOneJob(t *testing.T) {
	inBase(t)
	for _, c := range []struct {
		processes int
		set       string
	}{
		{4, "pp=4 sp=1 dp=1 model.layers=4"},                                  // one stage each
		{4, "pp=1 sp=4 dp=1 subsequences=2"},                                  // gathers and scatters across processes
		{2, "pp=2 sp=2 dp=1 mux=on"},                                          // borrowed work
		{2, "pp=1 sp=4 dp=1 sp_mode=ulysses model.kv_heads=2"},                // two ranks of a group in each process
		{4, "pp=1 sp=2 dp=2 sp_mode=ring zero=1 order=layer"},                 // rings, and divided optimizer state
		{2, "pp=1 sp=2 dp=2 sp_mode=ulysses zero=3 model.dtype=bf16 batch=2"}, // gathered weights
	} {
		var args []string
		for _, s := range strings.Fields(c.set) {
			switch {
			case strings.Contains(s, "."):
			case strings.HasPrefix(s, "batch"):
				s = "train." + s
			default:
				s = "schedule." + s
			}
			args = append(args, "--set", s)
		}
		t.Run(c.set, func(t *testing.T) {
			args := append([]string{"tiny.sppo", "--steps", "2", "--json"}, args...)
			os.RemoveAll("one.ckpt")
			os.RemoveAll("many.ckpt")
			one := alone(t, append(slices.Clone(args), "--save", "one.ckpt")...)
			all := launchAll(t, c.processes, inWorld(t, c.processes, append(slices.Clone(args), "--save", "many.ckpt")...))
			many := end(t, all)
			for i, p := range all {
				if p.code != cli.Done || i > 0 && (many[i] != "" || p.errs.Len() > 0) {
					t.Fatalf("process %d: exit %d\n%s%s", i, p.code, many[i], p.errs.String())
				}
			}
			if diff := cmp.Diff(numbersOf(t, one), numbersOf(t, many[0])); diff != "" {
				t.Errorf("several processes compute something else than one:\n%s", diff)
			}
			same(t, "one.ckpt", "many.ckpt")
		})
	}
}

// same compares the newest checkpoints in two folders.
func same(t *testing.T, a, b string) {
	t.Helper()
	x, y := filesOf(t, a), filesOf(t, b)
	if diff := cmp.Diff(slices.Sorted(maps.Keys(x)), slices.Sorted(maps.Keys(y))); diff != "" {
		t.Errorf("%s and %s have other files: %s", a, b, diff)
	}
	for name := range x {
		if !bytes.Equal(x[name], y[name]) {
			t.Errorf("%s of %s and %s differ", name, a, b)
		}
	}
}

// filesOf reads the files of the newest checkpoint in a folder.
func filesOf(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	steps, err := store.Steps(dir)
	if err != nil || len(steps) == 0 {
		t.Fatalf("%s has no checkpoints: %v", dir, err)
	}
	dir = filepath.Join(dir, store.StepName(steps[len(steps)-1]))
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]byte{}
	for _, e := range list {
		if out[e.Name()], err = os.ReadFile(filepath.Join(dir, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// asTorchrun returns the variables that torchrun sets for each process.
func asTorchrun(t *testing.T, processes int) func(int) []string {
	host, port, err := net.SplitHostPort(vmtest.FreePlace(t))
	if err != nil {
		t.Fatal(err)
	}
	return func(i int) []string {
		n := fmt.Sprint(processes)
		return []string{fmt.Sprintf("RANK=%d", i), "WORLD_SIZE=" + n, fmt.Sprintf("LOCAL_RANK=%d", i), "LOCAL_WORLD_SIZE=" + n, "MASTER_ADDR=" + host, "MASTER_PORT=" + port}
	}
}

// Several processes, started as if by a launcher, continue where a single process stopped, and write a profile
// of all ranks.
func TestProcessesResumeAndProfile(t *testing.T) {
	inBase(t)
	whole := alone(t, "tiny.sppo", "--json", "--save", "whole.ckpt")
	alone(t, "tiny.sppo", "--steps", "2", "--save", "half.ckpt")
	args := []string{"tiny.sppo", "--json", "--resume", "half.ckpt", "--save", "both.ckpt", "--profile", "p.json"}
	all := launchAll(t, 2, func(int) []string { return args }, asTorchrun(t, 2))
	out := end(t, all)
	if all[0].code != cli.Done || all[1].code != cli.Done {
		t.Fatalf("exit %d and %d\n%s%s", all[0].code, all[1].code, all[0].errs.String(), all[1].errs.String())
	}
	if diff := cmp.Diff(losses(t, whole)[2:], losses(t, out[0])); diff != "" {
		t.Error(diff)
	}
	same(t, "whole.ckpt", "both.ckpt")
	program, got := readProfile(t, "tiny.sppo", "p.json")
	for r := range program.Ranks {
		if spans := got.Rank(r).Spans; spans[len(spans)-1].End <= 0 || got.Round != 4 {
			t.Errorf("step %d: rank %d has no times", got.Round, r)
		}
	}
	left, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range left {
		if strings.HasPrefix(e.Name(), ".") {
			t.Errorf("%s was left", e.Name())
		}
	}
}

// afterLines waits until a process has printed the given number of lines.
func afterLines(t *testing.T, p *process, lines int) {
	t.Helper()
	in := bufio.NewReader(p.out)
	for range lines {
		if _, err := in.ReadString('\n'); err != nil {
			t.Fatalf("it ended before: %v\n%s", err, p.errs.String())
		}
	}
	rest := p.out
	p.out = struct {
		io.Reader
		io.Closer
	}{in, rest}
}

// endless lists the arguments of a job that does not end on its own during a test.
var endless = []string{"tiny.sppo", "--set", "train.steps=1000000", "--json", "-q"}

// If a process is killed, all others end, and their error messages name the killed process.
func TestProcessKilled(t *testing.T) {
	inBase(t)
	for victim := range 2 {
		all := launchAll(t, 2, inWorld(t, 2, append(endless, "--save", "never.ckpt")...))
		afterLines(t, all[0], 3)
		all[victim].Process.Kill()
		killed := time.Now()
		end(t, all)
		if took := time.Since(killed); took > 20*time.Second {
			t.Errorf("the others ended %s later", took)
		}
		other := all[1-victim]
		want := fmt.Sprintf("sppovm: process %d (ranks %d to %d, on ", victim, 2*victim, 2*victim+1)
		if text := other.errs.String(); other.code != cli.Failed || !strings.HasPrefix(text, want) ||
			!strings.HasSuffix(text, ") was lost: its connection closed\n") || strings.Count(text, "\n") != 1 {
			t.Errorf("exit %d\n%s", other.code, text)
		}
		if left, err := os.ReadDir("never.ckpt"); err != nil || len(left) > 0 {
			t.Errorf("half a job has left %v: %v", left, err)
		}
	}
}

// A process that fails reports why, and the error messages of the others name it.
func TestProcessFails(t *testing.T) {
	inBase(t)
	if err := os.WriteFile("other.txt", bytes.Repeat([]byte("Other words, as long as those of the other process.\n"), 40), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir("elsewhere", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename("other.txt", "elsewhere/words.txt"); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		dir  string
		want []string // per process
		code []int
	}{
		{"nowhere", []string{"sppovm: process 1 (ranks 2 to 3, on HOST) failed: ", "there is no file nowhere/words.txt"}, []int{cli.Failed, cli.BadInput}},
		{"elsewhere", []string{"sppovm: process 1 reads different data from process 0: 2080 bytes with checksum ", "sppovm: process 0 (ranks 0 to 1, on HOST) failed: process 1 reads different data"}, []int{cli.Failed, cli.Failed}},
	} {
		world := inWorld(t, 2, "tiny.sppo", "-q")
		all := launchAll(t, 2, func(i int) []string {
			if i == 1 {
				return append(world(i), "--dir", c.dir)
			}
			return world(i)
		})
		end(t, all)
		for i, p := range all {
			host, _ := os.Hostname()
			if want := strings.ReplaceAll(c.want[i], "HOST", host); p.code != c.code[i] || !strings.Contains(p.errs.String(), want) {
				t.Errorf("process %d: exit %d\n%s, want exit %d and %s", i, p.code, p.errs.String(), c.code[i], want)
			}
		}
	}
}

// Each failure to connect is reported in one line per process.
func TestProcessesThatDoNotMeet(t *testing.T) {
	inBase(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, c := range []struct {
		name   string
		args   func(i int, place string) []string
		want   []string
		secret string
	}{
		{"another program", func(i int, place string) []string {
			return []string{"--processes", "2", "--process", fmt.Sprint(i), "--rendezvous", place, "--seed", fmt.Sprint(i), "--job", "one"}
		}, []string{"has a different program from process 0 on", "has a different program from process 0 on"}, "a secret"},
		{"another program, and no secret", func(i int, place string) []string {
			return []string{"--processes", "2", "--process", fmt.Sprint(i), "--rendezvous", place, "--seed", fmt.Sprint(i), "--job", "one", "--rendezvous-timeout", "2s"}
		}, []string{"did not connect to PLACE within 2s; one was turned away: process 1 on ", "has a different program from process 0 on"}, ""},
		{"another program, and no name for the job", func(i int, place string) []string {
			return []string{"--processes", "2", "--process", fmt.Sprint(i), "--rendezvous", place, "--seed", fmt.Sprint(i), "--rendezvous-timeout", "2s"}
		}, []string{`did not connect to PLACE within 2s; process 1 of job "tiny `, `PLACE is the rendezvous of a job other than "tiny `}, ""},
		{"missing", func(i int, place string) []string {
			return []string{"--processes", "4", "--process", fmt.Sprint(i), "--rendezvous", place, "--rendezvous-timeout", "1s"}
		}, []string{"sppovm: processes 2 and 3 of 4 did not connect to ", "sppovm: processes 2 and 3 of 4 did not connect to "}, ""},
		{"port taken", func(i int, place string) []string {
			return []string{"--processes", "2", "--process", fmt.Sprint(i), "--rendezvous", taken.Addr().String(), "--rendezvous-timeout", "1s"}
		}, []string{"address already in use", "its reply is not that of process 0 of a job"}, ""},
	} {
		place := vmtest.FreePlace(t)
		all := launchAll(t, 2, func(i int) []string { return append(c.args(i, place), "tiny.sppo", "-q") }, func(int) []string { return []string{world.SecretVariable + "=" + c.secret} })
		end(t, all)
		for i, p := range all {
			want := strings.ReplaceAll(c.want[i], "PLACE", place)
			_, text, _ := strings.Cut("\n"+p.errs.String(), "\nsppovm: ") // after a warning about what was turned away
			if p.code != cli.Failed || !strings.Contains("sppovm: "+text, want) || strings.Count(text, "\n") != 1 {
				t.Errorf("%s: process %d: exit %d\n%s, want %s", c.name, i, p.code, p.errs.String(), want)
			}
		}
	}
}

// Processes that were told different things are not one job.
func TestProcessesAreToldTheSame(t *testing.T) {
	inBase(t)
	for _, c := range []struct{ own, want string }{
		{"--steps 3", `has a different --steps from process 0 on HOST: "3" instead of "2"`},
		{"--steps 2 --save other", `has a different --save from process 0 on HOST: "other" instead of "dir"`},
		{"--steps 2 --save dir --keep 7", `has a different --keep from process 0 on HOST: "7" instead of "2"`},
		{"--steps 2 --save dir --resume auto", `has a different --resume from process 0 on HOST: "auto" instead of ""`},
	} {
		job := inWorld(t, 2, "tiny.sppo", "-q")
		all := launchAll(t, 2, func(i int) []string {
			own := "--steps 2 --save dir"
			if i == 1 {
				own = c.own
			}
			return append(job(i), strings.Fields(own)...)
		}, func(int) []string { return []string{world.SecretVariable + "=a secret"} })
		end(t, all)
		host, err := os.Hostname()
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range all {
			if text := p.errs.String(); p.code != cli.Failed || !strings.Contains(text, strings.ReplaceAll(c.want, "HOST", host)) {
				t.Errorf("%s: process %d: exit %d\n%s", c.own, i, p.code, text)
			}
		}
	}
}

// launch shows an error that several processes find, or that one tells the others, only once, and says how a process ended
// that cannot say so itself.
func TestLaunchTellsErrorsOnce(t *testing.T) {
	inBase(t)
	for _, c := range []struct {
		args []string
		kill bool
		want string
	}{
		{[]string{"-n", "3", "run", "tiny.sppo"}, false, `^sppovm: 4 ranks cannot be divided evenly over 3 processes; use 1, 2 or 4\n$`},
		{[]string{"-n", "2", "run", "tiny.sppo", "-q", "--set", "schedule.sp=3"}, false, `^--set:1:13: error: [^\n]*\n    schedule.sp=3\n *\^\n    hint: [^\n]*\ntiny[^^]*\^\n    hint: [^\n]*\n$`},
		{[]string{"-n", "2", "run", "tiny.sppo", "-q", "--resume", "nowhere"}, false, `^sppovm: [^\n]*nowhere[^\n]*\n$`},
		{[]string{"-n", "2", "run", "tiny.sppo", "-q", "--steps", "1000000", "--json"}, true,
			`^(sppovm: process 1 [^\n]* was lost: [^\n]*\n|launch: process 1 \(PID \d+\) was ended by signal 9: killed\n){2}$`},
	} {
		all := launchCommand(t, "launch", 1, func(int) []string { return c.args })
		if c.kill {
			if _, err := all[0].out.Read(make([]byte, 1)); err != nil { // the run has begun
				t.Fatal(err)
			}
			syscall.Kill(slices.Max(childrenOf(all[0].Process.Pid)), syscall.SIGKILL)
		}
		end(t, all)
		if text := all[0].errs.String(); !regexp.MustCompile(c.want).MatchString(text) {
			t.Errorf("%q: exit %d\n%s", c.args, all[0].code, text)
		}
	}
}

// The processes that launch starts have a secret, so that nobody else can take part: the user's, or a new one.
func TestLaunchMakesASecret(t *testing.T) {
	inBase(t)
	seen := map[string]bool{}
	for _, given := range []string{"", "", "the user's secret"} {
		all := launchCommand(t, "launch", 1, func(int) []string { return []string{"-n", "2", "run", "tiny.sppo", "--steps", "1000000", "-q"} },
			func(int) []string { return []string{world.SecretVariable + "=" + given} })
		secrets := secretsOf(t, all[0].Process.Pid, 2)
		all[0].Process.Signal(syscall.SIGTERM)
		end(t, all)
		if len(secrets[0]) < 17 || secrets[0] != secrets[1] || given != "" && secrets[0] != given || seen[secrets[0]] {
			t.Errorf("given %q, the processes have the secrets %q", given, secrets)
		}
		seen[secrets[0]] = true
	}
}

// secretsOf waits until a process has so many children, and returns the secret of each.
func secretsOf(t *testing.T, parent, children int) (secrets []string) {
	t.Helper()
	for range 1000 {
		secrets = secrets[:0]
		for _, pid := range childrenOf(parent) {
			text, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
			if err != nil {
				continue
			}
			last := ""
			for variable := range strings.SplitSeq(string(text), "\x00") {
				if value, ok := strings.CutPrefix(variable, world.SecretVariable+"="); ok {
					last = value
				}
			}
			if last != "" {
				secrets = append(secrets, last)
			}
		}
		if len(secrets) == children {
			return secrets
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("launch has the children %v", childrenOf(parent))
	return nil
}

// Two unnamed jobs at one address do not mix: processes of the second are rejected with a message, and the first
// continues.
func TestJobsAtOnePlace(t *testing.T) {
	inBase(t)
	place := vmtest.FreePlace(t)
	as := func(process int, more ...string) []string {
		return append([]string{"tiny.sppo", "--steps", "1", "--json", "--processes", "2", "--process", fmt.Sprint(process), "--rendezvous", place}, more...)
	}
	first := launchAll(t, 1, func(int) []string { return as(0) })
	for _, other := range [][]string{as(1, "--seed", "7"), as(1, "--set", "train.sequence=128"), as(3, "--processes", "4")} {
		stray := launchAll(t, 1, func(int) []string { return other })
		end(t, stray)
		want := fmt.Sprintf("%s is the rendezvous of a job other than \"tiny ", place)
		if text := stray[0].errs.String(); stray[0].code != cli.Failed || !strings.Contains(text, want) || !strings.Contains(text, "processes\": use another address") {
			t.Errorf("%v: exit %d\n%s", other, stray[0].code, text)
		}
	}
	second := launchAll(t, 1, func(int) []string { return as(1) })
	all := append(first, second...)
	end(t, all)
	for i, p := range all {
		if p.code != cli.Done {
			t.Errorf("process %d: exit %d\n%s", i, p.code, p.errs.String())
		}
	}
	if text := first[0].errs.String(); strings.Count(text, "turned away process 1 of job") != 2 || strings.Count(text, "turned away process 3 of job") != 1 {
		t.Errorf("the first job does not say whom it has turned away:\n%s", text)
	}
}

// The signals of a user, a scheduler, a closing terminal and Slurm's early warning may arrive at any process.
// All processes then stop after the same step, with a checkpoint and exit code 0, or 130 for the process
// that a user interrupts.
func TestProcessInterrupted(t *testing.T) {
	inBase(t)
	for i, stop := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1} {
		if signal.Ignored(stop) { // as under nohup
			t.Logf("%s is ignored here, and so it is by the processes", stop)
			continue
		}
		who := i % 2
		os.RemoveAll("stop.ckpt")
		all := launchAll(t, 2, inWorld(t, 2, append(endless, "--save", "stop.ckpt")...))
		afterLines(t, all[0], 3)
		all[who].Process.Signal(stop)
		out := end(t, all)
		for i, p := range all {
			want := cli.Done
			if i == who && stop == syscall.SIGINT {
				want = cli.Interrupted
			}
			if p.code != want || p.errs.Len() > 0 {
				t.Errorf("%s: process %d: exit %d\n%s", stop, i, p.code, p.errs.String())
			}
		}
		if !strings.Contains(out[0], `"done":true`) {
			t.Errorf("it ends with %q", out[0][max(0, len(out[0])-200):])
		}
		if _, err := os.Stat("stop.ckpt"); err != nil {
			t.Error(err)
		}
	}
}

// Stopping a run before its first step writes nothing.
func TestStopBeforeTheBeginning(t *testing.T) {
	inBase(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, text := sppovm(t, ctx, "run", "tiny.sppo", "--save", "kept.ckpt")
	if _, err := os.Stat("kept.ckpt"); err == nil || !strings.Contains(text, "stopped after step 0") {
		t.Errorf("%v\n%s", err, text)
	}
}

// A launcher's variables tell a process its place in the job; flags override the variables.
func TestLaunchers(t *testing.T) {
	type variables map[string]string
	torch := variables{"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0"}
	slurm := variables{"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2",
		"SLURM_STEP_NODELIST": "rack1-node[003-010,12],other", "SLURM_NODELIST": "else"}
	mpi := variables{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "ns"}
	with := func(all ...variables) variables {
		out := variables{}
		for _, v := range all {
			for k, x := range v {
				out[k] = x
			}
		}
		return out
	}
	for _, c := range []struct {
		name string
		env  variables
		args []string
		want *launch
		err  string
	}{
		{name: "alone"},
		{name: "torchrun", env: torch, want: &launch{3, 8, 1, "n0:29500", "torchrun x 0", "torchrun"}},
		{name: "torchrun's own port", env: with(torch, variables{"TORCHELASTIC_USE_AGENT_STORE": "True"}), want: &launch{3, 8, 1, "n0:29501", "torchrun x 0", "torchrun"}},
		{name: "torchrun under srun", env: with(torch, slurm), want: &launch{3, 8, 1, "n0:29500", "torchrun x 0", "torchrun"}},
		{name: "srun", env: slurm, want: &launch{5, 8, 1, fmt.Sprintf("rack1-node003:%d", portOf("srun 77 2")), "srun 77 2", "srun"}},
		{name: "srun, told where", env: with(slurm, variables{"MASTER_ADDR": "n7", "MASTER_PORT": "1234"}), want: &launch{5, 8, 1, "n7:1234", "srun 77 2", "srun"}},
		{name: "a batch script", env: variables{"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}},
		{name: "one task", env: with(slurm, variables{"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})},
		{name: "mpirun on one host", env: mpi, want: &launch{1, 4, 1, fmt.Sprintf("127.0.0.1:%d", portOf("mpirun ns")), "mpirun ns", "mpirun"}},
		{name: "mpirun over srun", env: with(mpi, slurm), want: &launch{1, 4, 1, fmt.Sprintf("127.0.0.1:%d", portOf("mpirun ns")), "mpirun ns", "mpirun"}},
		{name: "mpirun on hosts", env: with(mpi, variables{"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}), err: "4 processes need a common address: --rendezvous HOST:PORT, where process 0 listens"},
		{name: "mpirun on hosts, told where", env: with(mpi, variables{"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}), args: []string{"--rendezvous", "n1:9"}, want: &launch{1, 4, 1, "n1:9", "mpirun ns", "mpirun"}},
		{name: "mpiexec", env: variables{"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, want: &launch{0, 2, 0, fmt.Sprintf("127.0.0.1:%d", portOf("mpiexec")), "", "mpiexec"}},
		{name: "flags", args: []string{"--processes", "2", "--process", "1", "--rendezvous", "[::1]:9", "--job", "j"}, want: &launch{1, 2, -1, "[::1]:9", "j", ""}},
		{name: "flags before variables", env: torch, args: []string{"--processes", "1", "--process", "0"}},
		{name: "no number", env: with(torch, variables{"RANK": "third"}), err: "torchrun started this process with RANK=third, which is not a number"},
		{name: "no port", env: with(torch, variables{"MASTER_PORT": "high"}), err: "MASTER_PORT=high is not a number"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var l launchFlags
			flags := pflag.NewFlagSet("run", pflag.ContinueOnError)
			l.define(flags)
			l.lookup = func(v string) string { return c.env[v] }
			if err := flags.Parse(c.args); err != nil {
				t.Fatal(err)
			}
			got, err := l.find()
			if fmt.Sprint(err) != fmt.Sprint(map[bool]any{true: nil, false: c.err}[c.err == ""]) {
				t.Errorf("%v, want %q", err, c.err)
			}
			if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(launch{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestFirstHost(t *testing.T) {
	for list, want := range map[string]string{
		"": "", "n1": "n1", "n1,n2": "n1", "n[1-4]": "n1", "n[07,09-11],m": "n07", "n[01-02]-ib": "n01-ib", "r[2-3]n[10,20],x": "r2n10",
	} {
		if got := firstHost(list); got != want {
			t.Errorf("the first of %s is %s, not %s", list, want, got)
		}
	}
}

// clocks measures how far the clocks of other processes are ahead.
func TestClocks(t *testing.T) {
	const ahead = 3 * time.Second
	m := &bubbleMeter{others: func(string) ([][]byte, error) {
		text, err := json.Marshal(time.Now().Add(ahead).UnixNano())
		return [][]byte{text}, err
	}}
	began := time.Now()
	got, err := m.clocks()
	if err != nil || len(got) != 1 || (got[0]-ahead).Abs() > time.Since(began) {
		t.Errorf("ahead by %v, want %v; %v", got, ahead, err)
	}
}
