package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/train/world"
)

// startFlags are the flags of launch.
type startFlags struct {
	processes int
	restart   int
	grace     time.Duration
}

func launchProcesses(flags *pflag.FlagSet) cli.Action {
	var f startFlags
	flags.IntVarP(&f.processes, "processes", "n", 1, "number of processes to start on this host, each with the same number of ranks")
	flags.IntVar(&f.restart, "restart", 0, "when a process dies or fails, restart all processes, at most this many times; needs --resume auto")
	flags.DurationVar(&f.grace, "grace", time.Minute, "how long the other processes may take to exit after one dies, before they are killed")
	flags.SetInterspersed(false)
	return func(env *cli.Env, args []string) error {
		if args[0] != "run" {
			return cli.Usagef("launch starts sppovm run: write sppovm launch [flags] run FILE ...")
		}
		if f.processes < 1 || f.restart < 0 || f.grace <= 0 {
			return cli.Usagef("launch: --processes and --grace must be more than 0, --restart at least 0")
		}
		if f.restart > 0 && !resumesAuto(args) {
			return cli.Usagef("launch: --restart needs run --save FOLDER --save-every N --resume auto, so that the job continues where it stopped")
		}
		return f.launch(env, args)
	}
}

// resumesAuto reports whether the arguments of run request the newest checkpoint.
func resumesAuto(args []string) bool {
	at := slices.Index(args, "--resume")
	return slices.Contains(args, "--resume="+resumeAuto) || at >= 0 && at+1 < len(args) && args[at+1] == resumeAuto
}

// launch runs the job. After a failure, it runs the job again if that is allowed and may help.
func (f *startFlags) launch(env *cli.Env, args []string) error {
	for attempt := 0; ; attempt++ {
		code, err := f.once(env, args, attempt)
		switch {
		case err != nil:
			return err
		case code == cli.Done || env.Context.Err() != nil || code == cli.BadInput || code == cli.NoFit:
			return cli.Silent(code) // after an input error, another attempt would fail in the same way
		case attempt == f.restart:
			return cli.Silent(code)
		}
		fmt.Fprintf(env.Stderr, "launch: restarting, attempt %d of %d\n", attempt+1, f.restart)
	}
}

// child is a process of the job.
type child struct {
	*exec.Cmd
	process int
	ended   chan struct{}
	err     error
}

// once starts the processes and waits until all have ended. It returns the exit code of the first that failed.
func (f *startFlags) once(env *cli.Env, args []string, attempt int) (code int, err error) {
	self, err := os.Executable()
	if err != nil {
		return cli.Failed, err
	}
	port, err := freePort()
	if err != nil {
		return cli.Failed, err
	}
	secret := cmp.Or(os.Getenv(world.SecretVariable), rand.Text()) // other users of this host can reach the port
	runtime.LockOSThread()                                         // the system ends children when the thread that started them ends
	defer runtime.UnlockOSThread()
	ended, told := make(chan *child), &told{to: env.Stderr}
	var all []*child
	var waiting sync.WaitGroup
	for i := range f.processes {
		c := &child{process: i, Cmd: exec.Command(self, args...), ended: make(chan struct{})}
		said := &messages{to: told, process: i}
		c.Stdout, c.Stderr = env.Stdout, said
		c.Env = append(os.Environ(), "RANK="+strconv.Itoa(i), "WORLD_SIZE="+strconv.Itoa(f.processes), "LOCAL_RANK="+strconv.Itoa(i),
			"LOCAL_WORLD_SIZE="+strconv.Itoa(f.processes), "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port,
			"TORCHELASTIC_RUN_ID=launch "+strconv.Itoa(os.Getpid()), "TORCHELASTIC_RESTART_COUNT="+strconv.Itoa(attempt), "TORCHELASTIC_USE_AGENT_STORE=",
			world.SecretVariable+"="+secret)
		endWithParent(c.Cmd)
		if err := c.Start(); err != nil {
			f.end(all)
			return cli.Failed, err
		}
		all = append(all, c)
		waiting.Go(func() {
			c.err = c.Wait()
			said.end()
			close(c.ended)
			ended <- c
		})
	}
	go func() { waiting.Wait(); close(ended) }()
	defer context.AfterFunc(env.Context, func() { signalAll(all, syscall.SIGTERM) })()
	kill := make(<-chan time.Time)
	for {
		select {
		case c, ok := <-ended:
			if !ok {
				return code, nil
			}
			if c.err == nil {
				break
			}
			first := code == cli.Done
			exit := exitOf(c, env, !first || env.Context.Err() != nil)
			if first {
				code = exit
				signalAll(all, syscall.SIGTERM) // otherwise a process waiting for the others would wait for minutes
				kill = time.After(f.grace)
			}
		case <-kill:
			signalAll(all, syscall.SIGKILL)
		}
	}
}

// exitOf returns the exit code of a process that failed. If the process was killed, exitOf also reports this,
// because a killed process cannot report anything, unless it was asked to end, and did.
func exitOf(c *child, env *cli.Env, asked bool) int {
	var exit *exec.ExitError
	if !errors.As(c.err, &exit) {
		fmt.Fprintf(env.Stderr, "launch: %v\n", c.err)
		return cli.Failed
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		if !asked || status.Signal() != syscall.SIGTERM {
			fmt.Fprintf(env.Stderr, "launch: process %d (PID %d) was ended by signal %d: %s\n", c.process, c.Process.Pid, status.Signal(), status.Signal())
		}
		return cli.Failed
	}
	return exit.ExitCode()
}

// told is the standard error of all processes. It repeats no line of one process that another has written, such as an
// error that both have found, or that says that another process of this host has failed, because that one says why.
type told struct {
	mu     sync.Mutex
	to     io.Writer
	recent []toldLine
}

type toldLine struct {
	process int
	text    string
}

// mostRecent is the number of lines that are compared with new ones: more than an error has.
const mostRecent = 100

func (t *told) line(process int, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var other int
	_, err := fmt.Sscanf(text, "sppovm: process %d (", &other)
	switch {
	case err == nil && other != process && strings.Contains(text, ") failed: "):
	case slices.ContainsFunc(t.recent, func(l toldLine) bool { return l.text == text && l.process != process }):
	default:
		fmt.Fprintln(t.to, text)
		t.recent = append(t.recent[max(0, len(t.recent)+1-mostRecent):], toldLine{process, text})
	}
}

// messages is the standard error of a process.
type messages struct {
	to      *told
	process int
	held    string // an incomplete line
}

// Write implements io.Writer.
func (m *messages) Write(b []byte) (int, error) {
	m.held += string(b)
	for {
		text, rest, ok := strings.Cut(m.held, "\n")
		if !ok {
			return len(b), nil
		}
		m.to.line(m.process, text)
		m.held = rest
	}
}

// end writes the incomplete line of a process that has ended.
func (m *messages) end() {
	if m.held != "" {
		m.to.line(m.process, m.held)
	}
}

func signalAll(all []*child, s syscall.Signal) {
	for _, c := range all {
		select {
		case <-c.ended:
		default:
			_ = c.Process.Signal(s) // it may have just ended
		}
	}
}

// end kills the processes that were started and waits for them.
func (f *startFlags) end(all []*child) {
	signalAll(all, syscall.SIGKILL)
	for _, c := range all {
		<-c.ended
	}
}

// freePort returns a port of this host on which nothing listens.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}
