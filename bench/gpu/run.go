package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// check runs stages.
type check struct {
	ctx      context.Context
	out      io.Writer
	folder   string // results folder
	files    string // folder with binaries and specs
	work     string // folder for temporary files
	end      time.Time
	patience time.Duration // if not 0, replaces the quiet time of every task
	factor   int           // multiplies every task's limit
	journal  *journal
	failed   []string // tasks
}

// task is a process, or tests in as many processes as they need.
type task struct {
	name  string
	limit time.Duration // time limit of the whole task
	quiet time.Duration // maximum time without output; 0: the limit
	argv  []string      // a file in the bundle or a system program, and its arguments; {files}, {work} and {out} are folders
	tests string        // if argv is a test binary: the pattern of tests to run
	env   []string
	must  string                                              // text that some line must contain; empty: none
	cause string                                              // start of the line that gives the reason if it is missing
	kind  string                                              // kind of JSON lines
	first func(c *check) (map[string][]any, error)            // results known before the task runs, by kind
	last  func(results *part) error                           // judges the task's results
	found func(c *check, line string) (kind string, data any) // parses a line that is not JSON; an empty kind means no result

	refused  *regexp.Regexp // matches a line that says that the program does not work on this machine, so that the task is skipped
	optional bool           // if it is skipped, the check has not failed
}

var (
	errTime    = errors.New("out of time")
	errSilent  = errors.New("it was silent for too long")
	errSkipped = errors.New("skipped")
)

// task runs a task and reports how it ended, on screen and in the journal.
func (c *check) task(stage string, t task) {
	began := time.Now()
	limit := t.limit * time.Duration(c.factor)
	if !c.end.IsZero() {
		limit = min(limit, time.Until(c.end))
	}
	r := &running{check: c, task: t, stage: stage, deadline: began.Add(limit)}
	end := End{Status: "ok"}
	for _, setting := range t.env {
		if dims, ok := strings.CutPrefix(setting, portable); ok {
			end.Portable = dims
		}
	}
	err := errTime
	if limit > 0 && c.ctx.Err() == nil {
		c.journal.say(fmt.Sprintf("== %s: %s", stage, t.name))
		sampled := c.sampleClocks(stage, t.name)
		err = r.run()
		sampled()
	}
	if err != nil {
		end.Status, end.Why = "failed", err.Error()
		if errors.Is(err, errSkipped) {
			end.Status = "skipped"
		}
		if end.Status == "failed" || !t.optional {
			c.failed = append(c.failed, stage+": "+t.name)
		}
	}
	end.Seconds = time.Since(began).Seconds()
	c.journal.add(stage, t.name, kindEnd, end)
	fmt.Fprintf(c.out, "%-8s %6.1f s  %s  %s\n", end.Status, end.Seconds, t.name, end.Why)
}

// running is a task in progress.
type running struct {
	*check
	task
	stage    string
	deadline time.Time
	tail     []string // last lines of the current process
	refusal  string   // a line that says that the program does not work here
	met      bool     // a line contained the required text
	told     string   // the last line that gives the reason
	results  part     // if the task judges them
}

func (r *running) add(kind string, data any) {
	r.journal.add(r.stage, r.task.name, kind, data)
	if text, err := json.Marshal(data); err == nil && r.task.last != nil { // the journal has reported an error
		r.results.results = append(r.results.results, Result{Kind: kind, Data: text})
	}
}

func (r *running) run() error {
	if r.first != nil {
		results, err := r.first(r.check)
		for kind, all := range results {
			for _, data := range all {
				r.add(kind, data)
			}
		}
		if err != nil {
			return err
		}
	}
	if len(r.argv) == 0 {
		return nil
	}
	if r.tests != "" {
		return r.runTests()
	}
	err := r.process(nil, r.line)
	if r.refusal != "" {
		return fmt.Errorf("%w: %s", errSkipped, r.refusal)
	}
	if err == nil && r.must != "" && !r.met {
		err = fmt.Errorf("no line contains %q; %s", r.must, r.told)
	}
	if err == nil && r.task.last != nil {
		err = r.task.last(&r.results)
	}
	return err
}

// line handles a line of output that does not come from the testing package.
func (r *running) line(line string) {
	r.met = r.met || strings.Contains(line, r.must)
	if strings.HasPrefix(line, r.cause) {
		r.told = line
	}
	if r.refused != nil && r.refusal == "" && r.refused.MatchString(line) {
		r.refusal = strings.TrimSpace(line)
	}
	if r.kind != "" && json.Valid([]byte(line)) && strings.HasPrefix(line, "{") {
		r.add(r.kind, json.RawMessage(line))
	} else if r.found != nil {
		if kind, data := r.found(r.check, line); kind != "" {
			r.add(kind, data)
		}
	}
}

// process runs the task's program with further arguments and passes every line of its output to read. A program
// that exceeds its time limit is killed, and so are all its children. The error says why the program failed and
// quotes the end of its output.
func (r *running) process(more []string, read func(line string)) error {
	argv := append(slices.Clone(r.argv), more...)
	folders := strings.NewReplacer("{files}", r.files, "{work}", r.work, "{out}", r.folder)
	for i := range argv {
		argv[i] = folders.Replace(argv[i])
	}
	if own := filepath.Join(r.files, argv[0]); !strings.Contains(argv[0], "/") {
		if _, err := os.Stat(own); err == nil {
			argv[0] = own
		}
	}
	from, to, err := os.Pipe()
	if err != nil {
		return err
	}
	defer from.Close()
	runtime.LockOSThread() // the kernel kills the process when the thread that started it ends
	defer runtime.UnlockOSThread()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = os.Environ()
	for _, setting := range r.env {
		cmd.Env = append(cmd.Env, folders.Replace(setting))
	}
	cmd.Stdout, cmd.Stderr, cmd.Dir = to, to, r.work
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	err = cmd.Start()
	to.Close()
	if err != nil {
		return err
	}
	var heard atomic.Int64 // time of its last output
	heard.Store(time.Now().UnixNano())
	drained := make(chan struct{})
	r.tail = nil
	go func() {
		defer close(drained)
		lines := bufio.NewReaderSize(from, 1<<20)
		for {
			line, err := lines.ReadString('\n')
			if line = strings.TrimRight(line, "\r\n"); line != "" {
				heard.Store(time.Now().UnixNano())
				r.journal.say(line)
				r.tail = append(r.tail, line)
				r.tail = r.tail[max(0, len(r.tail)-5):]
				read(line)
			}
			if err != nil {
				return
			}
		}
	}()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	err = r.await(ended, &heard)
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // also kills children that are still running
	select {
	case <-drained:
	case <-time.After(5 * time.Second):
		from.Close()
		<-drained
	}
	if err != nil {
		return fmt.Errorf("%w: %s", err, strings.Join(r.tail, " | "))
	}
	return nil
}

// quietest returns the longest time for which a process may write nothing; 0: no limit.
func (r *running) quietest() time.Duration {
	if r.patience > 0 {
		return r.patience
	}
	return r.quiet
}

// await waits for a process to end, or for its time to run out.
func (r *running) await(ended <-chan error, heard *atomic.Int64) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case err := <-ended:
			return err
		case <-r.ctx.Done():
			return errors.New("stopped")
		case now := <-tick.C:
			if now.After(r.deadline) {
				return errTime
			}
			if quiet := r.quietest(); quiet > 0 && now.Sub(time.Unix(0, heard.Load())) > quiet {
				return errSilent
			}
		}
	}
}

var (
	testBegins = regexp.MustCompile(`^=== RUN\s+(\S+)`)
	testEnds   = regexp.MustCompile(`^\s*--- (PASS|FAIL|SKIP): (\S+)`)
)

// results holds the results of tests so far, in all processes.
type results struct {
	open, done []string // tests running in the current process; tests with a result of their own
	bad, first []string // tests that failed, crashed or hung, and why
	skipped    string   // why a test was skipped
}

// runTests runs tests until each of them has been run. The first failure ends a process, because after a GPU
// error everything else in that process may fail too; the next process continues with the next test. The same
// happens after a crash or a hang.
func (r *running) runTests() error {
	var s results
	for {
		s.open = nil
		known := len(s.done)
		args := []string{"-test.v=test2json", "-test.failfast", "-test.timeout=0", "-test.run", r.tests}
		if len(s.done) > 0 {
			args = append(args, "-test.skip", skipPattern(s.done))
		}
		err := r.process(args, func(line string) { r.testLine(&s, line) })
		switch {
		case err == nil:
			return s.err()
		case len(s.open) > 0 && len(s.done) > known && s.begun(): // the next process runs the rest of the test
		case len(s.open) > 0: // the process ended in the middle of a test
			result := "crash"
			if errors.Is(err, errSilent) || errors.Is(err, errTime) {
				result = "hang"
			}
			name := s.open[len(s.open)-1]
			r.add(kindTest, Test{name, result})
			s.done, s.bad, s.first = append(s.done, name), append(s.bad, name), append(s.first, err.Error())
		case len(s.done) == known: // nothing would change
			return errors.Join(s.err(), err)
		}
		if time.Now().After(r.deadline) || r.ctx.Err() != nil {
			return errors.Join(err, s.err())
		}
	}
}

// testLine handles a line from a test binary.
func (r *running) testLine(s *results, line string) {
	for part := range strings.SplitSeq(line, "\x16") { // marks lines of the testing package
		if m := testBegins.FindStringSubmatch(part); m != nil {
			s.open = append(s.open, m[1])
		} else if m := testEnds.FindStringSubmatch(part); m != nil {
			r.testEnd(s, m[2], strings.ToLower(m[1]))
		} else if at := strings.Index(part, "SKIPPED: "); at >= 0 && s.skipped == "" {
			s.skipped = strings.TrimSpace(part[at+len("SKIPPED: "):])
		} else {
			r.line(part)
		}
	}
}

func (r *running) testEnd(s *results, name, result string) {
	s.open = slices.DeleteFunc(s.open, func(open string) bool { return open == name })
	within := func(other string) bool { return strings.HasPrefix(other, name+"/") }
	if result == "fail" && slices.ContainsFunc(s.bad, within) {
		return // its subtest has reported it; other subtests may not have run
	}
	s.done = append(slices.DeleteFunc(s.done, within), name)
	if result == "fail" {
		s.bad, s.first = append(s.bad, name), append(s.first, strings.Join(r.tail, " | "))
	}
	r.add(kindTest, Test{name, result})
}

// begun reports whether subtests of the running test already have results.
func (s *results) begun() bool {
	name := s.open[len(s.open)-1]
	return slices.ContainsFunc(s.done, func(done string) bool { return strings.HasPrefix(done, name+"/") })
}

func (s *results) err() error {
	switch {
	case len(s.bad) > 0:
		return fmt.Errorf("%d tests failed, the first is %s: %s", len(s.bad), s.bad[0], s.first[0])
	case s.skipped != "":
		return fmt.Errorf("%w: %s", errSkipped, s.skipped)
	case len(s.done) == 0:
		return errors.New("no test was run")
	}
	return nil
}

// skipPattern returns a pattern for -test.skip that matches the named tests.
func skipPattern(names []string) string {
	var all []string
	for _, name := range names {
		var parts []string
		for part := range strings.SplitSeq(name, "/") {
			parts = append(parts, "^"+regexp.QuoteMeta(part)+"$")
		}
		all = append(all, strings.Join(parts, "/"))
	}
	return strings.Join(all, "|")
}

// sampleClocks samples the card's clock and power once a second. The function that it returns stops the
// sampling and records means and maxima.
func (c *check) sampleClocks(stage, name string) func() {
	tool, err := exec.LookPath("nvidia-smi")
	if err != nil {
		return func() {}
	}
	cmd := exec.Command(tool, "-i", "0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil || cmd.Start() != nil {
		return func() {}
	}
	clocks, done := &Clocks{}, make(chan struct{})
	go func() {
		defer close(done)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			clocks.add(lines.Text())
		}
	}()
	return func() {
		_ = cmd.Process.Kill()
		select {
		case <-done:
			_ = cmd.Wait() // it was killed
			if clocks.Samples > 0 {
				c.journal.add(stage, name, kindClocks, clocks)
			}
		case <-time.After(time.Second):
		}
	}
}
