package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cmd/internal/trace"
	"sppo.dev/internal/passes/words"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// mostSpans is the number of instructions above which a trace shows only one rank of each stage, because
// viewers do not handle larger files well.
const mostSpans = 500_000

func writeTrace(flags *pflag.FlagSet) cli.Action {
	out := flags.StringP("output", "o", "", "write the trace to this file")
	ranks := flags.String("ranks", "", "ranks to include: all, stages (one rank of each), or a list such as 0,8,16; default: all, or "+
		"stages if a trace of all ranks would be too large")
	var section string
	cli.Choice(flags, &section, "section", "step", "init, step or eval", sectionNames()...)
	cli.Files(flags, "output", "json")
	cli.Words(flags, "ranks", rankWords)
	set := cli.JobFlags(flags)
	return func(env *cli.Env, args []string) error {
		if *out == "" {
			return cli.Usagef("trace: give the output file with -o")
		}
		if err := cli.CheckOutput(*out, args...); err != nil {
			return err
		}
		s := slices.Index(sectionNames(), section)
		w := cli.NewWatch(env)
		defer w.End()
		job, err := cli.OpenProgram(w, args[0], set())
		if err != nil {
			return err
		}
		w.Say("drawing the timeline")
		timeline, err := sim.Run(job.Program, ir.Section(s), sim.Options{Spans: true})
		if err != nil {
			return cli.Wrong(err)
		}
		chosen, err := chooseRanks(*ranks, job.Program, timeline)
		if err != nil {
			return err
		}
		err = cli.WriteFile(*out, func(w io.Writer) error { return trace.Write(w, job.Program, timeline, chosen) })
		w.End()
		if err == nil {
			fmt.Fprintf(env.Stderr, "%s: simulated %s of %s in %s; wrote %d of them to %s\n",
				env.Name, section, words.Plural(len(job.Program.Ranks), "rank"), timeline.Makespan, len(chosen), *out)
		}
		return err
	}
}

// rankWords are the words that --ranks accepts instead of a list of ranks.
var rankWords = []string{"all", "stages"}

// chooseRanks returns the ranks that --ranks selects.
func chooseRanks(text string, p *ir.Program, t *sim.Timeline) ([]int, error) {
	var all, stages, list []int
	seen := map[int32]bool{}
	for r := range p.Ranks {
		all = append(all, r)
		if code := p.Ranks[r].Code; !seen[code] {
			seen[code] = true
			stages = append(stages, r)
		}
	}
	switch {
	case text == "all" || text == "" && t.Instructions <= mostSpans:
		return all, nil
	case text == "stages" || text == "":
		return stages, nil
	}
	for _, word := range strings.Split(text, ",") {
		r, err := strconv.Atoi(strings.TrimSpace(word))
		if err != nil || r < 0 || r >= len(p.Ranks) {
			return nil, cli.Usagef("--ranks %s: write all, stages, or ranks from 0 to %d", text, len(p.Ranks)-1)
		}
		if !slices.Contains(list, r) {
			list = append(list, r)
		}
	}
	return list, nil
}
