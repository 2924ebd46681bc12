package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/passes"
)

// passFlags choose what of the passes runs.
func passFlags(flags *pflag.FlagSet) *passes.Options {
	o := &passes.Options{}
	flags.StringSliceVar(&o.PrintAfter, "print-after", nil, "print the plan as JSON after each of these `PASSES`, or after all; it comes before the result")
	flags.StringVar(&o.StopAfter, "stop-after", "", "run no pass after this `PASS`")
	flags.StringSliceVar(&o.Passes, "passes", nil, "run these `PASSES`, in this order, instead of all")
	flags.StringSliceVar(&o.Disable, "disable", nil, "leave these `PASSES` out")
	for _, name := range []string{"print-after", "stop-after", "passes", "disable"} {
		cli.Words(flags, name, passes.Names())
	}
	return o
}

func plan(flags *pflag.FlagSet) cli.Action {
	asJSON := flags.Bool("json", false, "print the plan as JSON, which build reads")
	set := cli.SetFlag(flags, "set")
	options := passFlags(flags)
	idle := flags.Bool("why-idle", false, "say, too, what would shorten a step, and what the longest waits are for")
	longest := flags.Bool("max-sequence", false, "search the longest sequence that fits, all else as the spec has it, and say what bounds it")
	fewest := flags.Bool("min-gpus", false, "search the fewest GPUs of this kind on which the job fits, and say what fewer lack")
	return func(env *cli.Env, args []string) error {
		switch {
		case *longest && *fewest:
			return cli.Usagef("plan: --max-sequence and --min-gpus are two questions: ask one at a time")
		case *asJSON && *idle:
			return cli.Usagef("plan: --json prints the critical path of a step; --why-idle goes with a report")
		case *asJSON && (*longest || *fewest):
			return cli.Usagef("plan: --json prints a plan, which is no answer to --max-sequence or --min-gpus")
		}
		for _, question := range []struct {
			asked  bool
			answer func(file string, set []string) (string, error)
		}{{*longest, longestSequence}, {*fewest, fewestGPUs}} {
			if question.asked {
				text, err := question.answer(args[0], *set)
				io.WriteString(env.Stdout, text)
				return err
			}
		}
		options.Print = env.Stdout
		job, err := cli.OpenPlan(args[0], *set, *options)
		if err != nil {
			return err
		}
		whole := passes.Verify(job.Plan) == nil
		if whole {
			if err := job.Measure(); err != nil {
				return cli.Wrong(err)
			}
			if err := job.Simulate(); err != nil {
				return err
			}
		}
		var out bytes.Buffer
		if *asJSON {
			err = job.Plan.WriteJSON(&out)
		} else {
			err = passes.Report(&out, job.Plan)
			if err == nil && *idle && whole {
				var text string
				text, err = whyIdle(job)
				out.WriteString("\n" + text)
			}
		}
		if _, werr := out.WriteTo(env.Stdout); err != nil || werr != nil {
			return errors.Join(err, werr)
		}
		if !whole || job.Plan.Memory.Fits {
			return nil
		}
		return cli.DoesNotFit(adviseFit(job, *set))
	}
}

func listPasses(*pflag.FlagSet) cli.Action {
	return func(env *cli.Env, _ []string) error {
		for i := range passes.Passes {
			p := &passes.Passes[i]
			fmt.Fprintf(env.Stdout, "%s\n", p.Name)
			io.WriteString(env.Stdout, cli.Wrap(p.Doc, "    "))
		}
		return nil
	}
}
