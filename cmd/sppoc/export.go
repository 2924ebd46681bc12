package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/passes/words"
)

// formats lists what export writes. A format returns the text and, in words, what the text cannot say of the plan.
var formats = []struct {
	name   string
	export func(*plan.Plan) (text string, lost []string, err error)
}{
	{"torch-csv", torchCSV},
	{"torchtitan", torchtitan},
	{"trl", trl},
}

func formatNames() (names []string) {
	for _, f := range formats {
		names = append(names, f.name)
	}
	return names
}

func export(flags *pflag.FlagSet) cli.Action {
	var to string
	cli.Choice(flags, &to, "to", "", strings.Join(formatNames(), ", "), formatNames()...)
	cli.Words(flags, "to", formatNames())
	out := flags.StringP("output", "o", "", "write to this file instead of standard output")
	cli.Files(flags, "output")
	set := cli.JobFlags(flags)
	return func(env *cli.Env, args []string) error {
		if to == "" {
			return cli.Usagef("export: give the format with --to: %s", strings.Join(formatNames(), ", "))
		}
		if *out != "" {
			if err := cli.CheckOutput(*out, args...); err != nil {
				return err
			}
		}
		if cli.IsProgram(args[0]) {
			return cli.Usagef("%s is a program: export needs a spec or a plan", args[0])
		}
		w := cli.NewWatch(env)
		defer w.End()
		w.Say("searching")
		job, err := cli.OpenPlan(args[0], set(), w.Options(passes.Options{}))
		if err != nil {
			return err
		}
		w.End()
		var text string
		var lost []string
		for _, f := range formats {
			if f.name == to {
				text, lost, err = f.export(job.Plan)
			}
		}
		if err != nil {
			return err
		}
		for _, what := range lost {
			fmt.Fprintf(env.Stderr, "%s: not in the output: %s\n", env.Name, what)
		}
		if *out == "" {
			_, err = io.WriteString(env.Stdout, text)
			return err
		}
		return cli.WriteFile(*out, func(w io.Writer) error {
			_, err := io.WriteString(w, text)
			return err
		})
	}
}

// torchCSV returns the order of tasks as PyTorch's pipeline schedules read it: a line for each pipeline rank.
func torchCSV(p *plan.Plan) (string, []string, error) {
	if p.Mux.Left || p.Mux.Right {
		return "", nil, cli.Usagef("ranks share tasks, which the format cannot state; use --set schedule.mux=off")
	}
	var lost []string
	if n := p.Subsequences.N; n > 1 {
		lost = append(lost, fmt.Sprintf("%s, which count as microbatches: subsequence s of microbatch m is m*%d + s. PyTorch does not pass K and V between microbatches, so it can check and draw this order, but not train with it",
			words.Plural(n, "subsequence"), n))
	}
	if p.LayerOrder() {
		lost = append(lost, "order = layer: as strategy = csv, the same order keeps K and V of all layers")
	}
	return strategy.Text(p), lost, nil
}

// flagList is a list of a program's flags, without their dashes.
type flagList []string

func (f *flagList) add(key string, value any) { *f = append(*f, fmt.Sprintf("%s=%v", key, value)) }

// String writes a flag on each line.
func (f flagList) String() string { return "--" + strings.Join(f, "\n--") + "\n" }

// losses lists what a format cannot say of a plan.
type losses []string

func (l *losses) add(is bool, format string, args ...any) {
	if is {
		*l = append(*l, fmt.Sprintf(format, args...))
	}
}

// common adds what neither torchtitan nor TRL can say.
func (l *losses) common(p *plan.Plan) {
	l.add(p.LayerOrder(), "order = layer")
	l.add(p.Streams(), "keep: K and V that are streamed from the host")
}

func recomputes(p *plan.Plan) bool { return places(p, plan.PlacementRecompute) }
func offloads(p *plan.Plan) bool   { return places(p, plan.PlacementOffload) }

// places reports whether a plan places any unit in one way.
func places(p *plan.Plan, placement rune) bool {
	return strings.ContainsRune(strings.Join(slices.Concat(p.Offload.Placement...), ""), placement)
}

// tensorRanks returns the size of a group that PyTorch calls tensor parallel.
func tensorRanks(p *plan.Plan) int {
	if p.Parallel.SPMode != graph.ModeMegatron {
		return 1
	}
	return p.Split().HeadRanks()
}

// replicasAndShards divides replicas into those that hold whole weights and those that divide them, as FSDP does.
func replicasAndShards(p *plan.Parallel) (replicas, shards int) {
	if p.Zero >= plan.ZeroState {
		return 1, p.DP
	}
	return p.DP, 1
}
