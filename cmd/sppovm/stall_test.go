package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/vm/vmtest"
)

// If a process is suspended while its host still responds, the job stalls, and the other processes end after
// --stall-timeout. The suspended process ends when it is resumed.
func TestStoppedProcess(t *testing.T) {
	inBase(t)
	const running = `rank \d (waits for (a message from )?rank \d|waits in \w+ for ranks [\d, ]+|executes \w+|has nothing left)`
	const stalled = ` has stalled: no rank has made progress for \S+`
	for stopped, want := range []string{
		`^sppovm: process 1 \(ranks 2 to 3, on .*\) failed: process 0 \(ranks 0 to 1, on .*\) has not answered for 2s, although its host has\n$`,
		`^(.* has taken .*, although the last ones took at most .*\n(  .*\n)+)?sppovm: ((step|validation section) \d+` + stalled + `\n  ` + running + `.*\n  ` + running + `.*|(reading a rank's values|a question to all processes)` + stalled + `)\n  process 1 \(ranks 2 to 3, on .*\) does not answer\n$`,
	} {
		all := launchAll(t, 2, inWorld(t, 2, append(endless, "--stall-timeout", "2s")...))
		afterLines(t, all[0], 3)
		all[stopped].Process.Signal(syscall.SIGSTOP)
		began := time.Now()
		resume := time.AfterFunc(25*time.Second, func() { all[stopped].Process.Signal(syscall.SIGCONT) })
		other := all[1-stopped]
		end(t, []*process{other})
		if !resume.Stop() {
			t.Errorf("process %d stopped: the other took %s to end", stopped, time.Since(began))
		}
		all[stopped].Process.Signal(syscall.SIGCONT)
		end(t, []*process{all[stopped]})
		for i, p := range all {
			if p.code != cli.Failed {
				t.Errorf("process %d stopped: process %d has exit %d", stopped, i, p.code)
			}
		}
		if text := other.errs.String(); !regexp.MustCompile(want).MatchString(text) {
			t.Errorf("process %d stopped: the other says\n%s, want\n%s", stopped, text, want)
		}
		if text := all[stopped].errs.String(); !regexp.MustCompile(`^sppovm: process \d .*\n$`).MatchString(text) {
			t.Errorf("process %d stopped, and then says\n%s", stopped, text)
		}
	}
}

// If the file system hangs while a process writes its part of a checkpoint during training, all processes also end,
// and the error names the folder and the rank. To make it hang, the test puts a full pipe in place of a rank's
// file. It must do so before the process creates the file, so it tries at every checkpoint until it succeeds.
func TestHangingDisk(t *testing.T) {
	inBase(t)
	for process, rank := range []int{1, 3} { // the last rank of each process
		dir := fmt.Sprint("dir", process)
		all := launchAll(t, 2, inWorld(t, 2, append(endless, "--stall-timeout", "2s", "--save", dir, "--save-every", "2")...))
		folder := ""
		pipe := vmtest.FullPipe(t)
		for began := time.Now(); folder == ""; {
			list, _ := filepath.Glob(filepath.Join(dir, ".step-[1-9]*.tmp")) // step 0 only tests whether the folder is writable
			for _, l := range list {
				if os.Link(pipe, filepath.Join(l, fmt.Sprintf("rank-%05d.safetensors", rank))) == nil {
					folder = l
				}
			}
			if time.Since(began) > time.Minute {
				t.Fatal("the process was always faster")
			}
		}
		began := time.Now()
		end(t, all)
		if took := time.Since(began); took > 25*time.Second {
			t.Errorf("process %d: the end took %s", process, took)
		}
		want := fmt.Sprintf(`saving the checkpoint to \S*%s has stalled: rank %d has written nothing for 2s\n$`, regexp.QuoteMeta(folder), rank)
		for i, p := range all {
			if text := p.errs.String(); p.code != cli.Failed || !regexp.MustCompile(want).MatchString(text) {
				t.Errorf("process %d says with exit %d\n%s, want\n%s", i, p.code, text, want)
			}
		}
		for _, name := range namesIn(t, dir) {
			if name != filepath.Base(folder) && !strings.HasPrefix(name, "step-") {
				t.Errorf("left is %s", name)
			}
		}
	}
}
