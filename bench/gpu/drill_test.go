package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The drill runs the commands of the first hour, as docs/gpu.md prints them, on a stand-in for a machine that is lent. With
// SPPO_LONG=1, as in make gpu-drill, the stages that check results run the real programs on the stand-in driver, with
// emulated kernels; all other programs are stand-ins.

// lent is a machine that runs each command for at most ten minutes, empties the results folder before each, and is taken
// away after each reply: the next command finds only what is sent along.
type lent struct {
	bundle string        // folder of the bundle
	home   string        // where results come back to: a folder for each command
	env    []string      // of every command
	limit  time.Duration // of a command
}

// Limits of such a machine.
const (
	lentLimit     = 10 * time.Minute
	lentFiles     = 8
	lentFileBytes = 16 << 20
)

// run runs a command on a fresh machine that has the bundle and, in the folder before, the results of the command before.
// It returns the output, and the folder with the files of the results folder.
func (m *lent) run(t *testing.T, command, before string) (out, results string, err error) {
	t.Helper()
	machine := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(exec.Command("tar", "-C", filepath.Dir(m.bundle), "-czf", filepath.Join(machine, "gpu.tar.gz"), filepath.Base(m.bundle)).Run())
	if before != "" {
		must(os.CopyFS(filepath.Join(machine, "before"), os.DirFS(before)))
	}
	left := filepath.Join(machine, "out")
	must(os.Mkdir(left, 0o755))
	ctx, stop := context.WithTimeout(t.Context(), m.limit)
	defer stop()
	cmd := exec.CommandContext(ctx, "bash", "-c", command)
	cmd.Dir, cmd.Env = machine, append(append(os.Environ(), outVariable+"="+left, filesVariable+"="+filepath.Join(machine, "gpu")), m.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	text, err := cmd.CombinedOutput()
	results = filepath.Join(m.home, fmt.Sprint("results", len(m.returned())))
	must(os.CopyFS(results, os.DirFS(left)))
	files := 0
	must(filepath.WalkDir(results, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files++
			if info, err := d.Info(); err != nil || info.Size() > lentFileBytes {
				t.Errorf("%s does not come back: %v", path, err)
			}
		}
		return err
	}))
	if files > lentFiles {
		t.Errorf("%d files do not come back", files)
	}
	must(os.RemoveAll(machine)) // it is taken away
	return string(text), results, err
}

func (m *lent) returned() []string {
	all, _ := filepath.Glob(filepath.Join(m.home, "results*")) // only a bad pattern is an error
	return all
}

// firstHour returns the commands of docs/gpu.md, with the limit that they set.
func firstHour(t *testing.T) (commands []string, limit time.Duration) {
	t.Helper()
	page, err := os.ReadFile("../../docs/gpu.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^    (tar xzf gpu\.tar\.gz && .*check\.sh .+)$`).FindAllStringSubmatch(string(page), -1) {
		commands = append(commands, m[1])
		set := regexp.MustCompile(limitVariable + `=(\S+) `).FindStringSubmatch(m[1])
		if set == nil {
			t.Fatalf("no limit in %s", m[1])
		}
		d, err := time.ParseDuration(set[1])
		if err != nil {
			t.Fatal(err)
		}
		limit = max(limit, d)
	}
	if len(commands) != 4 || limit > lentLimit-30*time.Second {
		t.Fatalf("%d commands of %v", len(commands), limit)
	}
	return commands, limit
}

// stagesOf returns the stages that a command names.
func stagesOf(t *testing.T, command string) []chosen {
	t.Helper()
	_, args, _ := strings.Cut(command, "check.sh ")
	plan, err := choose(strings.Fields(args))
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

// Four commands run every stage of the check within their limits, and the last report has the results of all.
func TestDrill(t *testing.T) {
	commands, limit := firstHour(t)
	m := &lent{bundle: drillBundle(t), home: t.TempDir(), limit: lentLimit}
	if os.Getenv("SPPO_LONG") != "" {
		m.env = useRealPrograms(t, m.bundle)
	}
	seen, before := map[string]bool{}, ""
	for i, command := range commands {
		began := time.Now()
		out, results, err := m.run(t, command, before)
		t.Logf("command %c: %.0f s\n%s", 'A'+i, time.Since(began).Seconds(), out)
		if took := time.Since(began); err != nil || took > limit {
			t.Errorf("command %c: %v after %v", 'A'+i, err, took)
		}
		for _, p := range stagesOf(t, command) {
			seen[p.stage.name] = true
		}
		before = results
	}
	for _, s := range stages {
		within := slices.Contains([]string{"devices", "trial"}, s.name) // parts of first
		if s.tasks != nil && !within && !seen[s.name] {
			t.Errorf("no command runs %s", s.name)
		}
	}
	done := map[about]bool{}
	all, broken, err := readJournal(before)
	for _, p := range latest(all) {
		done[p.about] = true
	}
	for _, command := range commands {
		for _, p := range stagesOf(t, command) {
			for _, task := range p.stage.tasks(p.name) {
				if !done[about{p.stage.name, task.name}] {
					t.Errorf("the last report lacks %s: %s", p.stage.name, task.name)
				}
			}
		}
	}
	log, _ := os.ReadFile(filepath.Join(m.home, "results1", logFile)) // of command B
	if broken > 0 || err != nil || !strings.Contains(string(log), "cluster.host_memory=100GiB") {
		t.Errorf("%d broken lines, %v, or layers without the machine's memory:\n%s", broken, err, log)
	}
}

// If kernels fail in the first command, the next ones, on other machines, use portable ones. If a machine is taken away
// in the middle of a command, its results so far come back, and the next command begins with them.
func TestDrillWithFaults(t *testing.T) {
	t.Parallel()
	commands, _ := firstHour(t)
	m := &lent{bundle: drillBundle(t), home: t.TempDir(), limit: lentLimit}
	m.env = []string{faultVariable + "=fail TestGPUAttention/for_the_card_a"}
	out, results, err := m.run(t, commands[0], "")
	if err == nil || !strings.Contains(out, "failed: first: attention against the CPU") {
		t.Errorf("%v\n%s", err, out)
	}
	m.env, m.limit = []string{faultVariable + "=hang TestGPUFigures/memory/b"}, 20*time.Second
	m.env = append(m.env, quietVariable+"=10m")
	_, results, err = m.run(t, commands[1], results)
	if err == nil {
		t.Error("a command that hangs ends")
	}
	if got := resultsOf(t, results); !slices.Contains(got, `layers, 8b-128k-full: {"portable":"96"}`) || !slices.ContainsFunc(got, func(g string) bool {
		return strings.Contains(g, "TestGPUFigures/memory/a")
	}) {
		t.Errorf("results of a machine that was taken away: %s", got)
	}
	m.env, m.limit = nil, lentLimit
	if out, _, err = m.run(t, commands[2], results); err != nil || !strings.Contains(out, "with portable kernels (SPPO_CUDA_PORTABLE=96)") {
		t.Errorf("%v\n%s", err, out)
	}
}

// drillBundle returns the folder of a bundle of stand-ins.
func drillBundle(t *testing.T) string {
	t.Helper()
	folder := filepath.Join(t.TempDir(), "gpu")
	if err := os.CopyFS(folder, os.DirFS(bundle(t))); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("check.sh")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "check.sh"), text, 0o755); err != nil {
		t.Fatal(err)
	}
	return folder
}

// standIns lists the real programs of the bundle, each with the arguments for which a stand-in takes its place: measurements,
// the opcodes of the first stage, which the stage conformance has, too, and layers and comparisons of schedules that take a CPU
// too long.
var standIns = map[string]string{
	"gpu":       "touch*|compile*7b-*|compile*/8b-128k.*",
	"cuda.test": `*TestGPUFigures*|*"(matmul|attention|"*`,
	"e2e.test":  "*SchedulesAreEqual*",
	"sppovm":    "probe*|*7b-*|*/8b-128k.*",
}

// useRealPrograms puts the real programs into a bundle of stand-ins. It returns the environment in which they find the
// stand-ins for NVIDIA's libraries.
func useRealPrograms(t *testing.T, bundle string) []string {
	t.Helper()
	files := rehearsal(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(files)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		from, to := filepath.Join(files, e.Name()), filepath.Join(bundle, e.Name())
		args, program := standIns[e.Name()]
		switch {
		case strings.Contains(e.Name(), ".so."): // it belongs to the machine
			continue
		case e.IsDir():
			err = os.CopyFS(to, os.DirFS(from))
		case program:
			text := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in\n%s) %s=%s exec %s \"$@\";;\n*) echo \"$0 $*\" >&2; exec \"$(dirname \"$0\")/real-%s\" \"$@\";;\nesac\n",
				args, roleVariable, e.Name(), self, e.Name())
			err = errors.Join(os.Rename(from, filepath.Join(bundle, "real-"+e.Name())), os.WriteFile(to, []byte(text), 0o755))
		default:
			err = os.Rename(from, to)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return []string{"SPPO_CUDA_PATH=" + files, "SPPO_GPU_FIGURES=small", factorVariable + "=10", quietVariable + "=5m"}
}
