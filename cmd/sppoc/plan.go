package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/report"
)

// passFlags defines the flags that select the passes to run.
func passFlags(flags *pflag.FlagSet) *passes.Options {
	o := &passes.Options{}
	flags.StringSliceVar(&o.PrintAfter, "print-after", nil, "print the plan as JSON after each of these `PASSES`, or after every pass (all), before the result")
	flags.StringVar(&o.StopAfter, "stop-after", "", "stop after this `PASS`")
	flags.StringSliceVar(&o.Disable, "disable", nil, "skip these `PASSES`")
	timePasses(flags, o)
	for _, name := range []string{"print-after", "stop-after", "disable"} {
		cli.Words(flags, name, passes.Names())
	}
	return o
}

// timePasses defines the flag that measures passes.
func timePasses(flags *pflag.FlagSet, o *passes.Options) {
	flags.BoolFunc("time-passes", "after the output, print the time of each pass on standard error", func(value string) error {
		if o.Times = nil; value == "true" {
			o.Times = passes.NewTimes()
		}
		return nil
	})
}

func planJob(flags *pflag.FlagSet) cli.Action {
	asJSON := flags.Bool("json", false, "print the plan as JSON, for sppoc build")
	set := cli.JobFlags(flags)
	options := passFlags(flags)
	long := flags.Bool("long", false, "print the full report: all sections")
	sections := flags.StringSlice("section", nil, "print only these `SECTIONS` of the full report")
	cli.Words(flags, "section", report.SectionNames())
	idle := flags.Bool("why-idle", false, "also report changes that would shorten a step, and the causes of the longest waits")
	longest := flags.Bool("max-sequence", false, "find the longest sequence that fits if all other settings stay as in the spec, and the resource that limits its length")
	fewest := flags.Bool("min-gpus", false, "find the smallest number of GPUs on which the job fits, and the additional "+
		"memory that fewer GPUs would need")
	out := flags.StringP("output", "o", "", "write a spec with the answer of --max-sequence or --min-gpus to this file")
	force := flags.Bool("force", false, "replace the file if it exists")
	cli.Files(flags, "output", "sppo")
	return func(env *cli.Env, args []string) error {
		err := checkFlags(*asJSON, *long || len(*sections) > 0, *idle, *longest, *fewest, *out != "")
		if err = errors.Join(err, knownSections(*sections)); err != nil {
			return err
		}
		set := set()
		defer options.Times.Write(env.Stderr)
		if *longest || *fewest {
			defer options.Times.Time("search")()
		}
		switch {
		case *longest:
			return printAnswer(env, args[0], set, *out, *force, longestSequence)
		case *fewest:
			return printAnswer(env, args[0], set, *out, *force, fewestGPUs)
		}
		options.Print = env.Stdout
		job, whole, err := planned(env, args[0], set, *options)
		if err != nil {
			return err
		}
		if job.Spec != nil {
			noteData(env, job.Spec)
		}
		if whole && !*asJSON {
			w := cli.NewWatch(env)
			end := options.Times.Time("hints")
			seekFaster(w, job, set)
			end()
			w.End()
		}
		var out bytes.Buffer
		if *asJSON {
			err = job.Plan.WriteJSON(&out)
		} else {
			err = writeReport(&out, job.Plan, whole, *long, *sections)
			if err == nil && *idle && whole {
				var text string
				text, err = whyIdle(env, job, set)
				out.WriteString("\n" + text)
			}
		}
		if _, werr := out.WriteTo(env.Stdout); err != nil || werr != nil {
			return errors.Join(err, werr)
		}
		cli.NoteModel(env, args[0], job.Plan.Train.Sequence)
		if !whole || job.Plan.Memory.Fits {
			return nil
		}
		w := cli.NewWatch(env)
		end := options.Times.Time("hints")
		advice := adviseFit(w, job, set)
		end()
		w.End()
		return cli.DoesNotFit(advice)
	}
}

// checkFlags returns an error if flags of plan contradict each other.
func checkFlags(asJSON, parts, idle, longest, fewest, out bool) error {
	searches := longest || fewest
	switch {
	case longest && fewest:
		return cli.Usagef("plan: use either --max-sequence or --min-gpus, not both")
	case asJSON && parts:
		return cli.Usagef("plan: --long and --section are for the report, which --json replaces")
	case asJSON && idle:
		return cli.Usagef("plan: --why-idle is part of the report; with --json, the critical path is in the plan")
	case asJSON && searches:
		return cli.Usagef("plan: --json prints a plan and cannot be combined with --max-sequence or --min-gpus")
	case out && !searches:
		return cli.Usagef("plan: -o writes the spec that --max-sequence or --min-gpus finds; --json > FILE writes a plan")
	}
	return nil
}

// printAnswer prints what a search finds, and writes a spec with the overrides of its answer to a file if one is given.
func printAnswer(env *cli.Env, file string, set []string, out string, force bool,
	search func(w *cli.Watch, file string, set []string) (text string, answer []string, err error)) error {
	if out != "" {
		if err := newFile(out, file, force); err != nil {
			return err
		}
	}
	w := cli.NewWatch(env)
	text, found, err := search(w, file, set)
	w.End()
	io.WriteString(env.Stdout, text)
	if err != nil || out == "" {
		return err
	}
	spec, err := cli.LoadSpec(file, slices.Concat(set, found))
	if err != nil {
		return err
	}
	first, _, _ := strings.Cut(text, "\n")
	return cli.WriteFile(out, func(w io.Writer) error {
		_, err := fmt.Fprintf(w, "# %s\n%s", strings.TrimSuffix(first, ", with"), spec.Text(filepath.Dir(out)))
		return err
	})
}

// newFile returns an error if an output file cannot be written, or exists and is not to be replaced.
func newFile(out, input string, force bool) error {
	if err := cli.CheckOutput(out, input); err != nil {
		return err
	}
	if _, err := os.Lstat(out); err == nil && !force {
		return cli.Usagef("%s already exists: --force replaces it", out)
	}
	return nil
}

// knownSections returns an error if one of the names is not that of a section.
func knownSections(names []string) error {
	for _, name := range names {
		if !slices.Contains(report.SectionNames(), name) {
			return cli.Usagef("plan: there is no section %q; the sections are %s", name, strings.Join(report.SectionNames(), ", "))
		}
	}
	return nil
}

// writeReport writes the requested sections of the report of a plan. Without a request, it writes the summary of a whole plan,
// and all sections if the passes stopped before the end.
func writeReport(w io.Writer, p *plan.Plan, whole, long bool, sections []string) error {
	switch {
	case len(sections) > 0:
		return report.WriteSections(w, p, sections)
	case long || !whole:
		return report.Write(w, p)
	}
	if err := report.WriteSummary(w, p); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "Details: --long, or --section %s\n", strings.Join(report.SectionNames(), ","))
	return err
}

// planned plans a job. If all passes have run, it also places the plan, simulates the program, and returns true for
// whole.
func planned(env *cli.Env, file string, set []string, o passes.Options) (job *cli.Job, whole bool, err error) {
	w := cli.NewWatch(env)
	defer w.End()
	w.Say("searching")
	if job, err = cli.OpenPlan(file, set, w.Options(o)); err != nil {
		return nil, false, err
	}
	if passes.Verify(job.Plan) != nil {
		return job, false, nil
	}
	w.Say("placing the plan")
	if err := w.Do(job.Measure); err != nil {
		return nil, false, cli.Wrong(err)
	}
	w.Say("simulating the program")
	return job, true, w.Do(job.Simulate)
}

const (
	worthPinning  = 0.01    // speed-up by estimate from which a plan with a pinned value is suggested
	mostSeekingIn = 1 << 13 // layer visits of a step, and GPUs, beyond which another search would take too long
)

// seekFaster tries the value that is most worth pinning if the search has not proved its plan the best. If the plan with this value
// is faster, the report suggests the value. A step with many tasks or on many GPUs takes long to plan, so seekFaster does
// not try the value.
func seekFaster(w *cli.Watch, job *cli.Job, set []string) {
	s := job.Plan.Search
	if job.Spec == nil || !report.Unproved(job.Plan) {
		return
	}
	if slow(job.Plan) {
		return
	}
	value := job.Plan.Untried()
	if value == nil {
		return
	}
	w.Say("trying %s=%s", value.Key, value.Value)
	pinned, err := cli.OpenPlan(job.Spec.File, append(set[:len(set):len(set)], value.Key+"="+value.Value), w.Options(passes.Options{Patience: advicePatience}))
	if err != nil || shortfall(pinned) != "" {
		return // no plan with this value
	}
	if t := pinned.Plan.Time.StepS; t < (1-worthPinning)*s.StepS {
		s.Faster = &plan.Rejection{Key: value.Key, Value: value.Value, StepS: t}
	}
}

// slow reports whether a job takes too long to plan for trying other settings.
func slow(p *plan.Plan) bool {
	return max(p.Cluster.GPUs(), p.Model.Layers*p.Subsequences.N*p.Parallel.Microbatches) > mostSeekingIn
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
