package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"

	"sppo.dev/cmd/internal/cli"
)

// progress matches one state of the progress line: the text between a carriage return and the sequence that clears
// the rest of the line.
var progress = regexp.MustCompile(`\r([^\r\n]*)\x1b\[K`)

// terminal runs sppoc on a terminal and presses Ctrl-C once the progress line appears. It returns all states of
// that line, everything else that was printed, and the exit code.
func terminal(t *testing.T, args ...string) (lines []string, rest string, code int) {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), asCommand+"=1")
	screen, err := pty.Start(cmd)
	if err != nil {
		t.Skip("no terminal: ", err)
	}
	defer screen.Close()
	late := time.AfterFunc(5*time.Minute, func() { cmd.Process.Kill() })
	defer late.Stop()
	var all bytes.Buffer
	pressed := false
	buffer := make([]byte, 1<<16)
	for {
		n, err := screen.Read(buffer)
		all.Write(buffer[:n])
		if !pressed && progress.Match(all.Bytes()) {
			pressed = true
			io.WriteString(screen, "\x03")
		}
		if err != nil { // the command has ended
			break
		}
	}
	var failed *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &failed) {
		t.Fatal(err)
	}
	for _, line := range progress.FindAllStringSubmatch(all.String(), -1) {
		lines = append(lines, line[1])
	}
	return lines, progress.ReplaceAllString(all.String(), ""), cmd.ProcessState.ExitCode()
}

// TestTerminal checks that commands which take more than a second show their progress on one line, and that
// Ctrl-C makes them print their results so far.
func TestTerminal(t *testing.T) {
	if testing.Short() {
		t.Skip("each command runs for a second before it shows its progress")
	}
	dir := t.TempDir()
	text, set := fleetJob(strings.Fields("llama-405b h200 16 8 128K"))
	job, out := filepath.Join(dir, "job.sppo"), filepath.Join(dir, "job.sppb")
	if err := os.WriteFile(job, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string // regular expression
	}{
		{[]string{"plan", job}, `(?s)fits +yes.*the search was stopped`},
		{[]string{"plan", job, "--max-sequence"}, `tokens fit \(\d+\), with\r\n.*--set .*\r\nthe search was stopped; more may fit|stopped before it found`},
		{[]string{"plan", job, "--min-gpus"}, `are enough; the search was stopped|are enough: dp |stopped before it found`},
		{[]string{"build", job, "-o", out}, ``},
		{[]string{"compare", "../../examples/tiny.sppo", job}, `(?s)tiny.*4.*stopped after 1 of 2`},
	} {
		args := c.args
		for _, s := range set {
			args = append(args, "--set", s)
		}
		t.Run(strings.Join(c.args[:1], " ")+" "+c.args[len(c.args)-1], func(t *testing.T) {
			lines, rest, code := terminal(t, args...)
			if code != cli.Interrupted || !regexp.MustCompile(c.want).MatchString(rest) || strings.Contains(rest, `\u00`) {
				t.Errorf("%v: exit %d, want %d with %q:\n%s", c.args, code, cli.Interrupted, c.want, rest)
			}
			if len(lines) == 0 || lines[len(lines)-1] != "" {
				t.Errorf("%v: the progress line is not cleared at the end: %q", c.args, lines)
			}
			for _, line := range lines {
				if len([]rune(line)) >= 80 || line != "" && !strings.Contains(line, "Ctrl-C") {
					t.Errorf("%v: the progress line %q does not fit a terminal, or does not say what Ctrl-C does", c.args, line)
				}
			}
		})
	}
	if _, err := os.Stat(out); err != nil {
		t.Error("Ctrl-C ended the search of build, and no program was written: ", err)
	}
}
