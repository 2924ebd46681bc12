package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/train"
	"sppo.dev/internal/train/store"
)

// runs executes sppovm run in a separate process and returns the exit code, the output and the messages.
func runs(t *testing.T, args ...string) (code int, out, errs string) {
	t.Helper()
	all := launchAll(t, 1, func(int) []string { return args })
	text := end(t, all)
	return all[0].code, text[0], all[0].errs.String()
}

func namesIn(t *testing.T, dir string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

// Checkpoints are written during a run and at its end, and resuming from any of them gives the same results, bit
// for bit.
func TestSaveEvery(t *testing.T) {
	inBase(t)
	whole := alone(t, "tiny.sppo", "--json", "--save", "whole")
	for _, more := range [][]string{{"--save-every", "1"}, {"--save-every", "1", "--save-wait"}, {"--save-every", "1ns"}} {
		os.RemoveAll("often")
		out := alone(t, append([]string{"tiny.sppo", "--json", "--save", "often", "--keep", "3"}, more...)...)
		if diff := cmp.Diff(numbersOf(t, whole), numbersOf(t, out)); diff != "" {
			t.Errorf("%v: saving changes the run:\n%s", more, diff)
		}
		same(t, "whole", "often")
		names := namesIn(t, "often")
		if names[len(names)-1] != "step-4" || len(names) > 3 {
			t.Errorf("%v: the folder has %v", more, names)
		}
		for _, name := range names {
			step := strings.TrimPrefix(name, "step-")
			os.RemoveAll("again")
			again := alone(t, "tiny.sppo", "--json", "--resume", filepath.Join("often", name), "--save", "again")
			want, got := losses(t, whole), losses(t, again)
			if !slices.Equal(want[len(want)-len(got):], got) {
				t.Errorf("from step %s: losses %v, want the last of %v", step, got, want)
			}
			same(t, "whole", "again")
		}
	}
}

// If a run is started again with the same command, it continues from the newest undamaged checkpoint.
func TestResumeAuto(t *testing.T) {
	inBase(t)
	alone(t, "tiny.sppo", "-q", "--save", "whole")
	args := []string{"tiny.sppo", "-q", "--save", "dir", "--save-every", "1", "--save-wait", "--resume", "auto"} // -q hides no warning
	if code, _, text := runs(t, append(args, "--steps", "3")...); code != cli.Done || !strings.Contains(text, "no checkpoint in dir: starting from the beginning") {
		t.Fatalf("exit %d\n%s", code, text)
	}
	newest := filepath.Join("dir", "step-3")
	flipMiddle(t, filepath.Join(newest, "rank-00002.safetensors"))
	if code, _, text := runs(t, "tiny.sppo", "--resume", newest, "-q"); code != cli.BadInput || text != "sppovm: checkpoint dir/step-3 is damaged: rank-00002.safetensors has a wrong checksum\n" {
		t.Errorf("exit %d\n%s", code, text)
	}
	all := launchAll(t, 2, inWorld(t, 2, args...))
	end(t, all)
	for i, p := range all {
		if p.code != cli.Done {
			t.Fatalf("process %d: exit %d\n%s", i, p.code, p.errs.String())
		}
	}
	if text := all[0].errs.String(); !strings.Contains(text, "rank-00002.safetensors has a wrong checksum; it is now dir/step-3.damaged\n") || !strings.Contains(text, "resumed from dir/step-2\n") {
		t.Errorf("%s", text)
	}
	same(t, "whole", "dir")
}

// threeSteps trains three steps and leaves a checkpoint of each in the folder "dir". It returns the arguments that
// continue the run.
func threeSteps(t *testing.T) (args []string) {
	t.Helper()
	inBase(t)
	alone(t, "tiny.sppo", "-q", "--steps", "3", "--save", "dir", "--save-every", "1", "--save-wait", "--keep", "9")
	return []string{"tiny.sppo", "-q", "--save", "dir", "--keep", "9", "--resume", "auto"}
}

// flipMiddle flips a bit in the middle of a file.
func flipMiddle(t *testing.T, file string) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 4
	if err := os.WriteFile(file, data, 0o666); err != nil {
		t.Fatal(err)
	}
}

// A checkpoint that is not damaged but cannot be read ends the run with one error, and the folder stays as it is.
func TestUnreadableIsNotDamaged(t *testing.T) {
	for name, c := range map[string]struct {
		change func(manifest string) error
		code   int
		want   string
	}{
		"a later format": {func(m string) error { return os.WriteFile(m, []byte(`{"format": 4}`), 0o666) }, cli.Failed,
			"sppovm: checkpoint dir/step-3: manifest.json has format 4; this release reads format 3\n"},
		"I/O error": {func(m string) error { return errors.Join(os.Remove(m), os.Symlink("/proc/self/mem", m)) }, cli.Failed,
			"sppovm: checkpoint dir/step-3: read dir/step-3/manifest.json: input/output error\n"},
		"a broken link": {func(string) error {
			return errors.Join(os.Rename("dir/step-3", "moved"), os.Symlink("nowhere", "dir/step-3"))
		}, cli.Failed, "sppovm: dir/step-3: no such file\n"},
		"another seed": {func(string) error { return nil }, cli.BadInput,
			"sppovm: checkpoint dir/step-3 was made with seed 1, but this program runs with 5\n"},
	} {
		t.Run(name, func(t *testing.T) {
			args := threeSteps(t)
			if name == "another seed" {
				args = append(args, "--seed", "5")
			}
			if err := c.change("dir/step-3/manifest.json"); err != nil {
				t.Fatal(err)
			}
			code, _, text := runs(t, args...)
			if code != c.code || text != c.want {
				t.Errorf("exit %d, want %d\n%s", code, c.code, text)
			}
			if diff := cmp.Diff([]string{"step-1", "step-2", "step-3"}, namesIn(t, "dir")); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// With too few file descriptors, a run resumes from the newest checkpoint or ends, but sets nothing aside.
func TestFewDescriptors(t *testing.T) {
	args := threeSteps(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	failed := 0
	for limit := 6; limit <= 16; limit++ {
		c := exec.Command("sh", append([]string{"-c", fmt.Sprintf(`ulimit -n %d && exec "$@"`, limit), "sh", self, "run"}, append(args, "--steps", "3")...)...)
		c.Env = append(os.Environ(), asCommand+"=1")
		text, err := c.CombinedOutput()
		if strings.Contains(string(text), "too many open files") {
			failed++
		}
		if names := namesIn(t, "dir"); err == nil && len(text) > 0 || err != nil && c.ProcessState.ExitCode() == cli.Done || !slices.Equal(names, []string{"step-1", "step-2", "step-3"}) {
			t.Errorf("%d descriptors: %v, the folder has %v\n%s", limit, err, names, text)
		}
	}
	if failed == 0 {
		t.Error("no run had too few descriptors")
	}
}

// If every checkpoint is damaged, a run starts from the beginning only with --start-over.
func TestStartOver(t *testing.T) {
	args := append(threeSteps(t), "--steps", "3")
	alone(t, "tiny.sppo", "-q", "--steps", "3", "--save", "whole")
	for _, step := range []string{"step-1", "step-2"} {
		flipMiddle(t, filepath.Join("dir", step, "rank-00001.safetensors"))
	}
	if err := os.Remove("dir/step-3/manifest.json"); err != nil {
		t.Fatal(err)
	}
	const remedy = "no other checkpoint in dir is undamaged: repair one, or start from the beginning with --start-over\n"
	code, _, text := runs(t, args...)
	if code != cli.Failed || text != "sppovm: checkpoint dir/step-3 is incomplete: it has no manifest.json; "+remedy {
		t.Errorf("exit %d\n%s", code, text)
	}
	if diff := cmp.Diff([]string{"step-1", "step-2", "step-3"}, namesIn(t, "dir")); diff != "" {
		t.Error(diff)
	}
	if code, _, text := runs(t, append(args, "--start-over", "--set", "train.steps=4")...); code != cli.Done || strings.Count(text, "; it is now dir/step-") != 3 || !strings.Contains(text, "no checkpoint in dir: starting from the beginning\n") {
		t.Errorf("exit %d\n%s", code, text)
	}
	if diff := cmp.Diff([]string{"step-1.damaged", "step-2.damaged", "step-3", "step-3.damaged"}, namesIn(t, "dir")); diff != "" {
		t.Error(diff)
	}
	same(t, "whole", "dir")
	if err := os.RemoveAll("dir/step-3"); err != nil {
		t.Fatal(err)
	}
	if code, _, text := runs(t, args...); code != cli.Failed || text != "sppovm: dir/step-3.damaged is damaged; "+remedy {
		t.Errorf("exit %d\n%s", code, text)
	}
}

// A checkpoint that is damaged only in the view of one of several processes, or that one of them may not read, is not
// set aside.
func TestProcessesAgreeOnDamage(t *testing.T) {
	if err := exec.Command("unshare", "-rm", "setpriv", "--bounding-set", "-dac_override,-dac_read_search", "true").Run(); err != nil {
		t.Skip("needs unshare and setpriv, and leave to mount")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		before, as string // the latter is the script that starts one of the processes
		want       string
	}{
		"permission": {"chmod 000 dir/step-3", `exec setpriv --bounding-set -dac_override,-dac_read_search "$@"`, "dir/step-3/manifest.json: permission denied"},
		"shard": {"cp dir/step-3/rank-00002.safetensors other && printf xxxx | dd of=other bs=1 seek=5000 conv=notrunc 2>/dev/null",
			`mount --bind other dir/step-3/rank-00002.safetensors && exec "$@"`,
			"dir/step-3 is damaged: rank-00002.safetensors has a wrong checksum, but process OTHER finds no damage there: the processes see different files"},
		"manifest": {"true", `mount -t tmpfs tmpfs dir/step-3 && exec "$@"`, "checkpoint dir/step-3 is incomplete: it has no manifest.json, but process OTHER finds no damage there"},
	} {
		for odd := range 2 { // the process that sees the checkpoint differently
			t.Run(fmt.Sprint(name, " in process ", odd), func(t *testing.T) {
				args := threeSteps(t)
				if text, err := exec.Command("sh", "-c", c.before).CombinedOutput(); err != nil {
					t.Fatalf("%v\n%s", err, text)
				}
				job := inWorld(t, 2, args...)
				var all []*process
				for i := range 2 {
					script := `exec "$@"`
					if i == odd {
						script = c.as
					}
					p := &process{Cmd: exec.Command("unshare", append([]string{"-rm", "sh", "-c", script, "sh", self, "run"}, job(i)...)...)}
					p.Env, p.Stderr = append(os.Environ(), asCommand+"=1"), &p.errs
					if p.out, err = p.StdoutPipe(); err != nil {
						t.Fatal(err)
					}
					if err := p.Start(); err != nil {
						t.Fatal(err)
					}
					all = append(all, p)
				}
				end(t, all)
				want := strings.ReplaceAll(c.want, "OTHER", fmt.Sprint(1-odd))
				for i, p := range all {
					if text := p.errs.String(); p.code != cli.Failed || !strings.Contains(text, want) || strings.Count(text, "\n") != 1 {
						t.Errorf("process %d: exit %d\n%s, want %s", i, p.code, text, want)
					}
				}
				if diff := cmp.Diff([]string{"step-1", "step-2", "step-3"}, namesIn(t, "dir")); diff != "" {
					t.Error(diff)
				}
			})
		}
	}
}

// A checkpoint that cannot be written is reported, and the run continues but fails at its end. Existing
// checkpoints stay.
func TestUnwritable(t *testing.T) {
	inBase(t)
	if os.Getuid() == 0 {
		t.Log("root may write anywhere: the folder is replaced by a file instead")
	}
	alone(t, "tiny.sppo", "-q", "--save", "dir", "--steps", "1")
	job, err := train.OpenCheckpoint("dir")
	if err != nil {
		t.Fatal(err)
	}
	job.Close()
	all := launchAll(t, 1, func(int) []string {
		return []string{"tiny.sppo", "--json", "--set", "train.steps=1000000", "--save", "dir", "--save-every", "1000", "--resume", "dir"}
	})
	afterLines(t, all[0], 2)
	if err := os.Rename("dir", "moved"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("dir", nil, 0o666); err != nil {
		t.Fatal(err)
	}
	afterLines(t, all[0], 2500)
	all[0].Process.Signal(os.Interrupt)
	end(t, all)
	text := all[0].errs.String()
	if all[0].code != cli.Failed || !strings.Contains(text, "cannot save the checkpoint of step 1000: mkdir dir/.step-1000.") || !strings.Contains(text, "not a directory; the run continues") {
		t.Errorf("exit %d\n%s", all[0].code, text)
	}
	if steps, err := store.Steps("moved"); err != nil || len(steps) == 0 || steps[0] != 1 {
		t.Errorf("the checkpoints that were there are %v: %v", steps, err)
	}
}

// If the parent of the folder for checkpoints is removed during training, nothing makes it: the error names it.
func TestRemovedParent(t *testing.T) {
	inBase(t)
	if err := os.Mkdir("parent", 0o777); err != nil {
		t.Fatal(err)
	}
	all := launchAll(t, 1, func(int) []string {
		return []string{"tiny.sppo", "--json", "--set", "train.steps=1000000", "--save", "parent/dir", "--save-every", "50"}
	})
	afterLines(t, all[0], 2)
	if err := os.RemoveAll("parent"); err != nil {
		t.Fatal(err)
	}
	afterLines(t, all[0], 200)
	all[0].Process.Signal(os.Interrupt)
	end(t, all)
	text := all[0].errs.String()
	for _, want := range []string{": parent/dir and its parent folder are gone; is a file system not mounted? ", "; the run continues"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if _, err := os.Stat("parent"); all[0].code != cli.Failed || err == nil {
		t.Errorf("exit %d, %v", all[0].code, err)
	}
}

// A job whose hosts lack the memory for the copy from which a checkpoint is written is refused.
func TestCopyDoesNotFit(t *testing.T) {
	inBase(t)
	args := []string{"tiny.sppo", "-q", "--save", "dir", "--save-every", "1", "--set", "cluster.host_memory=500KiB"}
	code, _, text := runs(t, args...)
	if code != cli.NoFit || !strings.Contains(text, "the copy from which a checkpoint is written during training takes ") || !strings.Contains(text, "--save-wait needs no copy") {
		t.Errorf("exit %d\n%s", code, text)
	}
	for _, more := range [][]string{{"--save-wait"}, {"--set", "cluster.host_memory=600KiB", "--set", "schedule.offload=auto", "--set", "schedule.checkpoint_copy=on"}} {
		os.RemoveAll("dir")
		if code, _, text := runs(t, append(args[:len(args):len(args)], more...)...); code != cli.Done {
			t.Errorf("%v: exit %d\n%s", more, code, text)
		}
	}
}

func TestSaveUsage(t *testing.T) {
	inBase(t)
	if err := errors.Join(os.WriteFile("file", nil, 0o666), os.Symlink("nowhere", "link")); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args string
		want string
	}{
		{"--save-every 5", "--save-every and --save-wait need --save"},
		{"--resume auto", "--resume auto needs --save"},
		{"--save d --save-every 0", "--save-every 0: must be more than 0"},
		{"--save d --save-every -5m", "must be more than 0"},
		{"--save d --save-every soon", "--save-every soon: write a number of steps, or a time such as 30s, 10m or 2h"},
		{"--save d --keep 0", "--keep 0: at least 1"},
		{"--save no/d", "--save no/d: there is no folder no"},
		{"--save file", "--save file: it is a file: name a folder"},
		{"--save link", "--save link: it is a link to nowhere, which does not exist"},
		{"--start-over", "--start-over needs --resume auto"},
		{"--prometheus -1", "--prometheus -1: ports are 0 to 65535"},
	} {
		code, _, text := runs(t, append([]string{"tiny.sppo", "-q"}, strings.Fields(c.args)...)...)
		if code != cli.BadInput || !strings.Contains(text, c.want) {
			t.Errorf("%s: exit %d\n%s", c.args, code, text)
		}
	}
}

// A checkpoint that cannot be read is not damaged: it ends the run and stays where it is.
func TestUnreadableCheckpointStays(t *testing.T) {
	inBase(t)
	alone(t, "tiny.sppo", "-q", "--save", "dir", "--steps", "2")
	args := []string{"tiny.sppo", "-q", "--save", "dir", "--resume", "auto"}
	shard := filepath.Join("dir", "step-2", "rank-00001.safetensors")
	if err := errors.Join(os.Rename(shard, "shard"), os.Symlink("rank-00001.safetensors", shard)); err != nil { // a loop
		t.Fatal(err)
	}
	for _, processes := range []int{1, 2} {
		all := launchAll(t, processes, inWorld(t, processes, args...))
		end(t, all)
		if text := all[0].errs.String(); all[0].code != cli.Failed || !strings.Contains(text, "too many levels of symbolic links") || strings.Count(text, "\n") != 1 {
			t.Errorf("%d processes: exit %d\n%s", processes, all[0].code, text)
		}
	}
	if err := os.Rename("shard", shard); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	few := exec.Command("sh", append([]string{"-c", `ulimit -n 8; exec "$0" run "$@"`, self}, args...)...)
	few.Env = append(os.Environ(), asCommand+"=1")
	if text, err := few.CombinedOutput(); err == nil || !strings.Contains(string(text), "too many open files") {
		t.Errorf("with few open files: %v\n%s", err, text)
	}
	if diff := cmp.Diff([]string{"step-2"}, namesIn(t, "dir")); diff != "" {
		t.Error(diff)
	}
	if code, _, text := runs(t, args...); code != cli.Done || text != "" {
		t.Errorf("exit %d\n%s", code, text)
	}
}
