package main

import (
	"regexp"
	"syscall"
	"testing"
	"time"

	"sppo.dev/cmd/internal/cli"
)

// A process that is suspended while its host responds stalls the job. The other processes end after
// --stall-timeout. The suspended process ends when it is resumed.
func TestStoppedProcess(t *testing.T) {
	inBase(t)
	const running = `rank \d (waits for (a message from )?rank \d|waits in \w+ for ranks [\d, ]+|executes \w+|has nothing left)`
	for stopped, want := range []string{
		`^sppovm: process 1 \(ranks 2 to 3, on .*\) failed: process 0 \(ranks 0 to 1, on .*\) has not answered for 2s, although its host has\n$`,
		`^sppovm: (step|validation section) \d+ has stalled: no rank has made progress for \S+\n  ` + running + `.*\n  ` + running + `.*\n  process 1 \(ranks 2 to 3, on .*\) does not answer\n$`,
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
