package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev"
	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/compile"
	"sppo.dev/internal/meaning"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/report"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/internal/passes/words"
	"sppo.dev/ir"
)

func build(flags *pflag.FlagSet) cli.Action {
	out := flags.StringP("output", "o", "", "write the program to this file")
	cli.Files(flags, "output", cli.ProgramFiles...)
	force := flags.Bool("force", false, "write the program even if it does not fit, or if the proof of its meaning refuses it")
	set := cli.JobFlags(flags)
	options := passFlags(flags)
	return func(env *cli.Env, args []string) error {
		file := args[0]
		set := set()
		options.Print = env.Stdout
		if cli.IsProgram(file) {
			return cli.Usagef("%s is already a program; asm converts between its forms", file)
		}
		path := *out
		if path == "" {
			path = programOf(file)
		}
		if err := cli.CheckOutput(path, file); err != nil {
			return err
		}
		defer options.Times.Write(env.Stderr)
		w := cli.NewWatch(env)
		defer w.End()
		w.Say("searching")
		job, err := cli.OpenPlan(file, set, w.Options(*options))
		if err != nil {
			return err
		}
		w.Say("building the program")
		if err := w.Do(job.Compile); err != nil {
			return err
		}
		w.Say("proving its meaning")
		var tensors int
		var unproved string
		if err := w.Do(func() (err error) {
			tensors, unproved, err = compile.Prove(job.Program)
			return err
		}); err != nil {
			w.End()
			if err := refusal(env, err, *force); err != nil {
				return err
			}
			unproved = "refused"
		}
		w.End()
		if !job.Plan.Memory.Fits {
			shortfall := job.Plan.Memory.Excess()
			if !*force {
				return cli.DoesNotFit(fmt.Errorf("%s does not fit: %s; sppoc plan suggests changes, --force builds it anyway", file, shortfall))
			}
			fmt.Fprintf(env.Stderr, "%s: %s does not fit: %s\n", env.Name, file, shortfall)
		}
		if err := ir.WriteFile(path, job.Program); err != nil {
			return err
		}
		if unproved == "" {
			unproved = "proved: loss, gradient and update of " + words.Plural(tensors, "tensor")
		}
		fmt.Fprintf(env.Stdout, "%s: verified, meaning %s\n", path, unproved)
		return nil
	}
}

// programOf returns the file name of the program compiled from a file or folder. That file is written to the
// current folder.
func programOf(file string) string {
	if info, err := os.Stat(file); err == nil && info.IsDir() {
		if abs, err := filepath.Abs(file); err == nil {
			file = abs
		}
		return filepath.Base(file) + ".sppb"
	}
	return strings.TrimSuffix(filepath.Base(file), filepath.Ext(file)) + ".sppb"
}

func asm(flags *pflag.FlagSet) cli.Action {
	out := flags.StringP("output", "o", "", "write the program to this file; its extension determines the format")
	cli.Files(flags, "output", cli.ProgramFiles...)
	force := flags.Bool("force", false, "write the program even if it needs more memory than its machine has")
	return func(env *cli.Env, args []string) error {
		if *out == "" {
			return cli.Usagef("asm: give the output file with -o")
		}
		if err := cli.CheckOutput(*out); err != nil {
			return err
		}
		program, err := verified(env, args[0], *force)
		if err != nil {
			return err
		}
		return ir.WriteFile(*out, program)
	}
}

// verified reads and verifies a program. With force, it tolerates a memory shortfall, but no other error.
func verified(env *cli.Env, file string, force bool) (*ir.Program, error) {
	w := cli.NewWatch(env)
	defer w.End()
	w.Say("verifying %s", file)
	var program *ir.Program
	if err := w.Do(func() (err error) {
		if program, err = cli.ReadProgram(file); err != nil {
			return err
		}
		return cli.Verify(file, program, force)
	}); err != nil {
		return nil, err
	}
	return program, nil
}

func verify(flags *pflag.FlagSet) cli.Action {
	means := flags.Bool("meaning", false, "also prove that the program computes the loss, gradient and update of its model")
	return func(env *cli.Env, args []string) error {
		program, err := verified(env, args[0], false)
		if err != nil {
			return err
		}
		instructions := 0
		for c := range program.Codes {
			for _, section := range program.Codes[c].Sections {
				instructions += len(section)
			}
		}
		fmt.Fprintf(env.Stdout, "%s: %s, %s, %s: verified\n",
			args[0], words.Plural(len(program.Ranks), "rank"), words.Plural(len(program.Codes), "code"), words.Plural(instructions, "instruction"))
		if *means {
			return prove(env, args[0], program)
		}
		return nil
	}
}

// refusal returns the error of a proof that is not made. If the proof refuses the program, force prints the refusal instead: it may
// be the proof that is wrong.
func refusal(env *cli.Env, err error, force bool) error {
	if !force || !errors.As(err, new(*sppo.BugError)) {
		return cli.Wrong(err)
	}
	fmt.Fprintf(env.Stderr, "%s: %v\n", env.Name, err)
	return nil
}

// prove proves what a program computes, and prints how much of the model it trains.
func prove(env *cli.Env, file string, program *ir.Program) error {
	w := cli.NewWatch(env)
	defer w.End()
	w.Say("proving the meaning of %s", file)
	var proof meaning.Proof
	if err := w.Do(func() (err error) {
		proof, err = meaning.Prove(program)
		return err
	}); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	w.End()
	frozen := ""
	if proof.Frozen > 0 {
		frozen = fmt.Sprintf(", %s unchanged", words.Plural(proof.Frozen, "tensor"))
	}
	fmt.Fprintf(env.Stdout, "%s: meaning proved: loss, gradient and update of %s%s\n", file, words.Plural(proof.Trained, "tensor"), frozen)
	return nil
}

// dumpFlags are the flags of dump.
type dumpFlags struct {
	rank    int
	section string
	after   string
	format  string
}

func dump(flags *pflag.FlagSet) cli.Action {
	var f dumpFlags
	flags.IntVar(&f.rank, "rank", -1, "print only this rank's code")
	cli.Choice(flags, &f.section, "section", "", "print only this section: init, step or eval", sectionNames()...)
	cli.Choice(flags, &f.after, "after", "", "print the plan or program as it is after this pass", passes.Names()...)
	cli.Choice(flags, &f.format, "format", "text", "text, json or actions", "text", "json", "actions")
	set := cli.JobFlags(flags)
	return func(env *cli.Env, args []string) error {
		if pass := passes.Find(f.after); pass != nil && pass.Run != nil || f.format == "actions" {
			return dumpPlan(env, args[0], set(), f)
		}
		w := cli.NewWatch(env)
		defer w.End()
		job, err := cli.OpenProgram(w, args[0], set())
		if err != nil {
			return err
		}
		w.End()
		return dumpProgram(env.Stdout, asAfter(job.Program, f.after), f)
	}
}

// dumpPlan prints the plan, or the schedules written from it, as they are after the pass that --after names.
func dumpPlan(env *cli.Env, file string, set []string, f dumpFlags) error {
	if cli.IsProgram(file) {
		return cli.Usagef("%s is a program: --after %s and --format actions need a spec or a plan", file, cmp.Or(f.after, "PASS"))
	}
	w := cli.NewWatch(env)
	defer w.End()
	w.Say("searching")
	job, err := cli.OpenPlan(file, set, w.Options(passes.Options{StopAfter: f.after}))
	if err != nil {
		return err
	}
	w.End()
	switch f.format {
	case "json":
		return job.Plan.WriteJSON(env.Stdout)
	case "actions":
		return dumpActions(env.Stdout, job.Plan, f)
	}
	return report.Write(env.Stdout, job.Plan)
}

// dumpActions prints the schedule of every pipeline rank, or of the one to which --rank belongs.
func dumpActions(w io.Writer, p *plan.Plan, f dumpFlags) error {
	par := &p.Parallel
	switch {
	case len(p.Tasks) == 0:
		return cli.Usagef("after pass %s, tasks have no order yet: use --after schedule or a later pass", f.after)
	case f.rank >= par.Ranks() || f.rank < -1:
		return cli.Usagef("--rank %d: the plan has ranks 0 to %d", f.rank, par.Ranks()-1)
	case f.section != "":
		return cli.Usagef("--section is for programs; schedules are of the step alone")
	}
	pipeline := walk.Pipeline(p)
	for i, tasks := range p.Tasks {
		if f.rank >= 0 && i != f.rank/par.SP%par.PP {
			continue
		}
		if _, err := fmt.Fprintf(w, "# pipeline rank %d\n", i); err != nil {
			return err
		}
		if err := pipeline.Write(i, p.Timing(), nil).Print(w, tasks); err != nil {
			return err
		}
	}
	return nil
}

// asAfter removes from a program what the code-generation passes after the given one added: the events (from the
// sync pass) and the offsets of buffers (from the place pass).
func asAfter(p *ir.Program, pass string) *ir.Program {
	if pass != "lower" && pass != "place" {
		return p
	}
	q := *p
	q.Codes = slices.Clone(p.Codes)
	for c := range q.Codes {
		code := &q.Codes[c]
		for s := range code.Sections {
			code.Sections[s] = slices.DeleteFunc(slices.Clone(code.Sections[s]), func(in ir.Instr) bool { return in.Info().Class == ir.ClassSync })
			code.Events[s] = 0
		}
		if pass == "lower" {
			code.Arenas = [ir.NumArenas]ir.Bytes{}
			code.Buffers = slices.Clone(code.Buffers)
			for b := range code.Buffers {
				code.Buffers[b].Offset = 0
			}
		}
	}
	return &q
}

func dumpProgram(w io.Writer, p *ir.Program, f dumpFlags) error {
	if f.rank >= len(p.Ranks) || f.rank < -1 {
		return cli.Usagef("--rank %d: the program has ranks 0 to %d", f.rank, len(p.Ranks)-1)
	}
	if f.section != "" {
		p = onlySection(p, f.section)
	}
	if f.format == "json" {
		return dumpJSON(w, p, f.rank)
	}
	printer := ir.Printer{Annotate: f.after != "lower"} // there are no addresses before the place pass
	if f.section != "" {
		w = &withoutLines{w: w, prefixes: []string{"  buffer ", "  state "}}
	}
	if f.rank >= 0 {
		return printer.PrintRank(w, p, f.rank)
	}
	return printer.Print(w, p)
}

// onlySection returns the program with all sections empty except the named one.
func onlySection(p *ir.Program, name string) *ir.Program {
	q := *p
	q.Codes = slices.Clone(p.Codes)
	for c := range q.Codes {
		for s := range ir.NumSections {
			if s.String() != name {
				q.Codes[c].Sections[s], q.Codes[c].Events[s] = nil, 0
			}
		}
	}
	return &q
}

// withoutLines drops lines that begin with one of the prefixes. It is used for --section, which prints only
// instructions, because these already show the addresses of buffers.
type withoutLines struct {
	w        io.Writer
	prefixes []string
	begun    []byte // an incomplete line
}

func (f *withoutLines) Write(data []byte) (int, error) {
	f.begun = append(f.begun, data...)
	for {
		end := bytes.IndexByte(f.begun, '\n') + 1
		if end == 0 {
			return len(data), nil
		}
		line := f.begun[:end]
		if !slices.ContainsFunc(f.prefixes, func(p string) bool { return bytes.HasPrefix(line, []byte(p)) }) {
			if _, err := f.w.Write(line); err != nil {
				return 0, err
			}
		}
		f.begun = f.begun[end:]
	}
}

func sectionNames() []string {
	var names []string
	for s := range ir.NumSections {
		names = append(names, s.String())
	}
	return names
}
