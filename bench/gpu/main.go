// Command gpu checks a machine with a GPU in stages and writes one JSON report: which capabilities of the GPU were
// verified, and which of this project's goals it meets. It needs no Go installation.
//
//	check.sh    the same, for users
//	main.go     the command line
//	stages.go   the table of stages: commands and time limits
//	run.go      processes with limits; after a failure, tests continue in a new process
//	journal.go  results.jsonl: a line for each result, written immediately
//	references.go
//	            jobs that train as on the CPU
//	touch.go    host memory that grows with use
//	tools.go    compute-sanitizer and ncu
//	report.go   from the journal to the report
//	goals.go    the goals, and how the report compares with them
//	*.sppo      models whose layers are timed
//
// Results are on disk as soon as they are known, so an interruption loses only the current measurement.
package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"sppo.dev"
	"sppo.dev/internal/cuda"
	"sppo.dev/ir"
)

// Environment variables.
const (
	outVariable    = "OUT"                  // the results folder; empty: the current folder
	limitVariable  = "SPPO_GPU_LIMIT"       // limit for all stages together, such as 9m30s; empty: none
	memoryVariable = "SPPO_GPU_HOST_MEMORY" // host memory for layers, such as 100GiB; empty: as in the cluster file
	beforeVariable = "SPPO_GPU_BEFORE"      // folder with the results of earlier stages, which the results folder then begins with; empty: none
	filesVariable  = "SPPO_GPU_FILES"       // the folder with binaries and specs; empty: that of this program
	quietVariable  = "SPPO_GPU_QUIET"       // longest time without output, such as 10s; empty: each task's own
	factorVariable = "SPPO_GPU_FACTOR"      // factor for the time limits of tasks, on a slow machine; empty: 1
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(command(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// command runs the stages that the arguments name and returns the exit status: 2 for wrong usage, 1 for a
// failure.
func command(ctx context.Context, args []string, out, errs io.Writer) int {
	fail := func(status int, err error) int {
		fmt.Fprintln(errs, "gpu:", err)
		return status
	}
	if len(args) > 0 {
		if h, ok := helpers[args[0]]; ok && len(args)-1 < h.least {
			return fail(2, fmt.Errorf("usage: gpu %s %s", args[0], h.usage))
		} else if ok {
			if err := h.run(args[1:], out); err != nil {
				return fail(1, err)
			}
			return 0
		}
	}
	if len(args) > 0 && args[0] == "help" {
		fmt.Fprintln(out, help())
		return 0
	}
	plan, err := choose(args)
	if err != nil {
		return fail(2, err)
	}
	c, err := newCheck(ctx, out)
	if err != nil {
		return fail(2, err)
	}
	defer c.close()
	return c.all(plan)
}

// helpers are commands that are not stages, with the least number of their arguments.
var helpers = map[string]struct {
	usage string
	least int
	run   func(args []string, out io.Writer) error
}{
	"kernels":    {"FOLDER ARCHITECTURE [ARCHITECTURE]...", 2, func(args []string, _ io.Writer) error { return cuda.KeepKernels(args[0], args[1:], nil) }},
	"references": {"FOLDER EXAMPLES", 2, func(args []string, _ io.Writer) error { return writeReferences(args[0], args[1]) }},
	"touch":      {"SIZE", 1, func(args []string, out io.Writer) error { return touch(args[0], out) }},
	"compile":    {"SPEC PROGRAM [KEY=VALUE]...", 2, func(args []string, _ io.Writer) error { return compile(args[0], args[1], args[2:]) }},
}

// compile builds the program of a spec.
func compile(spec, program string, overrides []string) error {
	s, err := sppo.Load(spec, overrides...)
	if err != nil {
		return err
	}
	p, err := sppo.Compile(context.Background(), s, sppo.Options{})
	if err != nil {
		return err
	}
	return ir.WriteFile(program, p)
}

// chosen is a stage, with its argument if it takes one.
type chosen struct {
	stage *stage
	name  string
}

// choose reads stages and their arguments from the command line. If it names none, the usual order applies.
func choose(args []string) (plan []chosen, err error) {
	if len(args) == 0 {
		args = strings.Fields(usual)
	}
	for i := 0; i < len(args); i++ {
		at := slices.IndexFunc(stages, func(s stage) bool { return s.name == args[i] })
		if at < 0 {
			return nil, fmt.Errorf("unknown stage %q\n%s", args[i], help())
		}
		c := chosen{stage: &stages[at]}
		if len(c.stage.names) > 0 {
			if i++; i == len(args) || !slices.Contains(c.stage.names, args[i]) {
				return nil, fmt.Errorf("%s needs one of %s after it", c.stage.name, strings.Join(c.stage.names, ", "))
			}
			c.name = args[i]
		}
		plan = append(plan, c)
	}
	return plan, nil
}

func help() string {
	text := "usage: check.sh [STAGE [NAME]]...\nstages, each with its limit; by default all run in the usual order:\n"
	for i := range stages {
		s := &stages[i]
		limit := time.Duration(0)
		if s.tasks != nil {
			for _, t := range s.tasks(append(s.names, "")[0]) {
				limit += t.limit
			}
		}
		text += fmt.Sprintf("  %-12s %5s  %s", s.name, limit, s.about)
		if len(s.names) > 0 {
			text += ": " + strings.Join(s.names, ", ")
		}
		text += "\n"
	}
	return text + "usual order: " + usual
}

// newCheck opens the results folder.
func newCheck(ctx context.Context, out io.Writer) (*check, error) {
	c := &check{ctx: ctx, out: out, folder: os.Getenv(outVariable), files: os.Getenv(filesVariable)}
	if c.files == "" {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		c.files = filepath.Dir(self)
	}
	limit, err := duration(limitVariable)
	if err != nil {
		return nil, err
	}
	if limit > 0 {
		c.end = time.Now().Add(limit)
	}
	if c.patience, err = duration(quietVariable); err != nil {
		return nil, err
	}
	if c.factor, err = strconv.Atoi(cmp.Or(os.Getenv(factorVariable), "1")); err != nil || c.factor < 1 {
		return nil, fmt.Errorf("%s=%s is not a whole number from 1 on", factorVariable, os.Getenv(factorVariable))
	}
	if c.folder, err = filepath.Abs(c.folder); err != nil { // the current folder if none is named
		return nil, err
	}
	if c.work, err = os.MkdirTemp("", "sppo-gpu-"); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(c.folder, 0o755); err != nil {
		return nil, err
	}
	c.journal, err = openJournal(c.folder)
	return c, err
}

// duration returns the value of a variable, or 0 if it is not set.
func duration(variable string) (time.Duration, error) {
	text := os.Getenv(variable)
	if text == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return 0, fmt.Errorf("%s=%s is not a duration such as 9m30s", variable, text)
	}
	return d, nil
}

func (c *check) close() {
	_ = c.journal.close()    // every line has already been written
	_ = os.RemoveAll(c.work) // the folder for temporary files
}

// all runs stages one after another, regardless of their results, and writes the report.
func (c *check) all(plan []chosen) int {
	for _, p := range plan {
		if p.stage.tasks == nil {
			continue // the report is written at the end anyway
		}
		fmt.Fprintf(c.out, "== %s %s\n", p.stage.name, p.name)
		var more []string
		if failed, dims := c.failedKernels(); failed != "" && !slices.Contains(testsKernels, p.stage.name) {
			more = []string{portable + dims}
			fmt.Fprintf(c.out, "with portable kernels (%s), because those for the card failed %s\n", more[0], failed)
		}
		for _, t := range p.stage.tasks(p.name) {
			t.env = append(t.env, more...)
			c.task(p.stage.name, t)
		}
	}
	name, err := write(c.folder, time.Now())
	if err != nil {
		fmt.Fprintln(c.out, "no report:", err)
		return 1
	}
	fmt.Fprintln(c.out, name)
	if len(c.failed) > 0 {
		fmt.Fprintln(c.out, "failed:", strings.Join(c.failed, "; "))
		return 1
	}
	return 0
}
