package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"sppo.dev"
	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/compile"
	"sppo.dev/internal/meaning"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// Stages at which a job can fail, in order. The last two are reached only if the user asks for one of them.
const (
	failsCheck    = "check"
	failsPlan     = "plan"
	failsVerify   = "verify"
	failsMeaning  = "meaning"
	failsRun      = "run"
	failsEstimate = "estimate"
)

// estimateTolerance is the largest relative difference between the estimate of a step and its simulation that is no failure.
const estimateTolerance = 0.02

// failure says how a job fails at a stage.
type failure struct {
	stage string
	kinds []string // what must be equal if another job fails in the same way; several for several findings of the verifier
	err   error    // as the user sees it
}

// like reports whether a job fails in the same way as another one: it may have further findings.
func (f *failure) like(first *failure) bool {
	return f.stage == first.stage && slices.Contains(f.kinds, first.kinds[0])
}

// reducer finds out how a text fails.
type reducer struct {
	input   string // as the user gives it
	file    string // the name that a text is given; other files are relative to its folder
	program bool
	at      string   // the stage that the user asks for, or ""
	command []string // instead of stages, unless empty
	match   *regexp.Regexp
	timeout time.Duration
	context context.Context
	watch   *cli.Watch
}

func reduce(flags *pflag.FlagSet) cli.Action {
	var at string
	out := flags.StringP("output", "o", "", "write the result to this file instead of printing it")
	cli.Files(flags, "output", cli.JobFiles...)
	cli.Choice(flags, &at, "at", "", "the stage that fails: check, plan, verify, meaning, run or estimate; default: the first of the first four",
		failsCheck, failsPlan, failsVerify, failsMeaning, failsRun, failsEstimate)
	match := flags.String("match", "", "the output of the command must match this regular `EXPRESSION`")
	timeout := flags.Duration("timeout", time.Minute, "end the command after this time, which is then how it fails")
	attempts := flags.Int("attempts", 3000, "the largest `NUMBER` of attempts")
	set := cli.JobFlags(flags)
	return func(env *cli.Env, args []string) error {
		command := args[1:]
		if dash := flags.ArgsLenAtDash(); len(command) > 0 && dash != 1 {
			return cli.Usagef("reduce: give one file, and the command after --")
		}
		pattern, err := regexp.Compile(*match)
		switch {
		case err != nil:
			return cli.Usagef("--match %s: %v", *match, err)
		case *match != "" && len(command) == 0:
			return cli.Usagef("--match needs a command after --")
		case at != "" && len(command) > 0:
			return cli.Usagef("--at is for failures of sppoc; how a command fails is given by its exit code and --match")
		case *attempts < 1:
			return cli.Usagef("--attempts %d: it must be at least 1", *attempts)
		}
		if *out != "" {
			if err := cli.CheckOutput(*out, args[0]); err != nil {
				return err
			}
		}
		w := cli.NewWatch(env)
		defer w.End()
		r := &reducer{input: args[0], file: cmp.Or(*out, args[0]), at: at, command: command, match: pattern, timeout: *timeout, context: env.Context, watch: w}
		before, err := r.open(set())
		if err != nil {
			return err
		}
		return r.reduce(env, before, *out, *attempts)
	}
}

// open returns the text of the input. That of a spec is one without imports, parameters and overrides, if it can be read.
func (r *reducer) open(set []string) (string, error) {
	if r.program = cli.IsProgram(r.input); r.program {
		if len(set) > 0 {
			return "", cli.Usagef("%s is a program: --set, --cluster, --nodes and --sequence need a spec", r.input)
		}
		p, err := cli.ReadProgram(r.input)
		if err != nil {
			return "", err
		}
		var text bytes.Buffer
		err = ir.Print(&text, p)
		return text.String(), err
	}
	spec, err := cli.LoadSpec(r.input, set)
	if err == nil {
		return spec.Text(filepath.Dir(r.file)), nil
	}
	text, readErr := cli.ReadSpec(r.input)
	if len(set) > 0 || readErr != nil {
		return "", err
	}
	return string(text), nil
}

// reduce makes a text smaller and writes the result.
func (r *reducer) reduce(env *cli.Env, before, out string, attempts int) error {
	first, err := r.failure(before)
	if err != nil {
		return err
	}
	if first == nil && len(r.command) > 0 {
		return cli.Usagef("%s does not fail: the output of the command does not match %s", r.input, r.match)
	}
	if first == nil {
		return cli.Usagef("%s does not fail", r.input)
	}
	if r.at != "" && first.stage != r.at {
		return cli.Usagef("%s does not fail at stage %s, but at %s: %w", r.input, r.at, first.stage, first.err)
	}
	s := &shrinker{lines: strings.Split(before, "\n"), left: attempts, stopped: r.watch.Stopped}
	if r.program { // without its header, a program would be another job
		s.fixed = slices.IndexFunc(s.lines, func(line string) bool { return strings.HasPrefix(line, "code ") })
	}
	s.fails = func(text string) bool {
		r.watch.Say("attempt %d, %d lines", s.made, len(s.lines))
		f, err := r.failure(text)
		return err == nil && f != nil && f.like(first)
	}
	s.shrink(!r.program)
	after := r.styled(strings.Join(s.lines, "\n"))
	last, err := r.failure(after)
	if err != nil && !r.watch.Stopped() {
		return err
	}
	if last == nil {
		last = first
	}
	r.watch.End()
	r.report(env, last, strings.Split(before, "\n"), s)
	return r.write(env, out, after)
}

// report says what was removed, and how the result fails.
func (r *reducer) report(env *cli.Env, last *failure, before []string, s *shrinker) {
	if !r.program {
		for _, e := range compare(before, s.lines) {
			for _, line := range e.lines {
				if line = strings.Join(strings.Fields(line), " "); e.kind != ' ' && line != "" && line != "}" {
					fmt.Fprintf(env.Stderr, "%c %s\n", e.kind, line)
				}
			}
		}
	}
	more, how := "", "it fails at stage "+last.stage+":"
	if s.left == 0 {
		more = ", and more may find a smaller one"
	}
	if len(r.command) > 0 {
		how = "the command ends"
	}
	fmt.Fprintf(env.Stderr, "%s: %d lines of %d after %d attempts%s; %s %v\n", env.Name, len(s.lines), len(before), s.made, more, how, last.err)
}

// styled returns a text in the standard style.
func (r *reducer) styled(text string) string {
	if out, err := lang.Format(r.file, []byte(text)); err == nil && !r.program {
		text = string(out)
	}
	return strings.TrimSpace(text) + "\n"
}

// write writes a text, or prints it.
func (r *reducer) write(env *cli.Env, out, text string) error {
	switch {
	case out == "":
		_, err := io.WriteString(env.Stdout, text)
		return err
	case r.program:
		p, err := ir.ParseText(out, []byte(text))
		if err != nil {
			return err
		}
		return ir.WriteFile(out, p)
	}
	return cli.WriteFile(out, func(w io.Writer) error { _, err := io.WriteString(w, text); return err })
}

// failure returns how a text fails, or nil if it does not. An error says why that could not be found out.
func (r *reducer) failure(text string) (f *failure, err error) {
	if len(r.command) > 0 {
		return r.runCommand(text)
	}
	err = r.watch.Do(func() error {
		f = r.stages(text)
		return nil
	})
	if err != nil {
		return nil, err // f may still be written
	}
	return f, nil
}

// stages compiles a text, as far as a stage that fails. A panic is a failure.
func (r *reducer) stages(text string) (f *failure) {
	stage := failsCheck
	defer func() {
		if p := recover(); p != nil {
			f = &failure{stage, []string{"panic: " + withoutNames(fmt.Sprint(p))}, fmt.Errorf("panic: %v", p)}
		}
	}()
	fails := func(err error) *failure { return &failure{stage, kindsOf(err), err} }
	var program *ir.Program
	var predicted ir.Seconds
	var err error
	if r.program {
		if program, err = ir.ParseText(r.file, []byte(text)); err != nil {
			return fails(err)
		}
	} else {
		spec, err := sppo.Parse(r.file, []byte(text))
		if err != nil {
			return fails(err)
		}
		stage = failsPlan
		plan, err := compile.Plan(spec, passes.Options{})
		if err != nil {
			return fails(err)
		}
		stage, predicted = failsVerify, plan.Time.StepS
		if program, err = compile.Build(plan, nil); err != nil {
			return fails(err)
		}
	}
	for _, s := range []struct {
		name string
		err  func() error
	}{
		{failsVerify, func() error { return compile.Verify(program) }},
		{failsMeaning, func() error { _, err := meaning.Prove(program); return err }},
		{failsRun, func() error { return runStep(program) }},
		{failsEstimate, func() error { return compareEstimate(program, predicted) }},
	} {
		if asked := s.name == r.at; !asked && (s.name == failsRun || s.name == failsEstimate || s.name == failsMeaning && r.at != "") {
			continue
		}
		stage = s.name
		if err := s.err(); err != nil {
			return fails(err)
		}
	}
	return nil
}

// kindsOf says how something fails, without what differs from job to job.
func kindsOf(err error) (kinds []string) {
	var wrong *lang.Diagnostic
	var unsafe *ir.VerifyError
	var refused *meaning.Refusal
	switch {
	case errors.As(err, &wrong):
		return []string{string(wrong.Code) + " " + withoutNames(wrong.Message)}
	case errors.As(err, &unsafe):
		for i := range unsafe.Findings {
			kinds = append(kinds, string(unsafe.Findings[i].Kind)+" "+withoutNames(unsafe.Findings[i].Msg))
		}
		return kinds
	case errors.As(err, &refused):
		op := "the end of a section"
		if fields := strings.Fields(refused.Text); len(fields) > 1 {
			op = fields[1] // after the stream
		}
		problem := strings.Fields(withoutNames(refused.Problem)) // its rest lists parts of sums, of which there may be fewer
		return []string{op + ": " + strings.Join(problem[:min(4, len(problem))], " ")}
	}
	return []string{withoutNames(err.Error())}
}

// withoutNames returns the first line of a message without the numbers and names in it.
func withoutNames(message string) string {
	first, _, _ := strings.Cut(message, "\n")
	return regexp.MustCompile(`\S*[0-9.]\S*`).ReplaceAllString(first, "*")
}

// runStep runs one step on the CPU.
func runStep(p *ir.Program) error {
	job, err := sppo.Open(p, sppo.CPU(0))
	if err != nil {
		return err
	}
	defer job.Close()
	for step, err := range job.Train(context.Background()) {
		if err == nil && (math.IsNaN(step.Loss) || math.IsInf(step.Loss, 0)) {
			err = fmt.Errorf("the loss is %v", step.Loss)
		}
		return err
	}
	return nil
}

// compareEstimate compares the time that the passes predict for a step with that of its simulation.
func compareEstimate(p *ir.Program, predicted ir.Seconds) error {
	timeline, err := sim.Run(p, ir.SectionStep, sim.Options{})
	if err != nil {
		return err
	}
	switch ratio := float64(predicted / timeline.Makespan); {
	case predicted == 0:
		return errors.New("a program has no estimate: give its spec")
	case ratio > 1+estimateTolerance:
		return fmt.Errorf("the estimate is too long: %s, and simulated %s", predicted, timeline.Makespan)
	case ratio < 1-estimateTolerance:
		return fmt.Errorf("the estimate is too short: %s, and simulated %s", predicted, timeline.Makespan)
	}
	return nil
}

// runCommand runs the command on a file with a text, in the folder of the file. Its failure is its exit code, even if that is 0: a
// script may end with 0 to say that the text is of interest.
func (r *reducer) runCommand(text string) (*failure, error) {
	ending := filepath.Ext(r.file)
	if r.program {
		ending = ".sppir"
	}
	f, err := os.CreateTemp(filepath.Dir(r.file), ".reduce-*"+ending)
	if err != nil {
		return nil, err
	}
	defer os.Remove(f.Name())
	_, err = f.WriteString(text)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(r.context, r.timeout)
	defer cancel()
	words, named := []string{}, false
	for _, word := range r.command {
		named = named || strings.Contains(word, "{}")
		words = append(words, strings.ReplaceAll(word, "{}", f.Name()))
	}
	if !named {
		words = append(words, f.Name())
	}
	c := exec.CommandContext(ctx, words[0], words[1:]...)
	c.WaitDelay = time.Second
	output, err := c.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case r.context.Err() != nil:
		return nil, cli.Stopped("%s: stopped", r.input)
	case ctx.Err() != nil:
		return &failure{"command", []string{"time"}, fmt.Errorf("not within %s", r.timeout)}, nil
	case err != nil && !errors.As(err, &exit):
		return nil, cli.Usagef("%s: %w", words[0], err)
	case !r.match.Match(output):
		return nil, nil
	}
	code := fmt.Sprint("with exit code ", c.ProcessState.ExitCode())
	return &failure{"command", []string{code}, errors.New(code)}, nil
}
