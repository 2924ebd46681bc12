package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/passes/search"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// Limits on the output of --why-idle: how many waits to show, how many kinds of work to make faster in the simulation,
// and by what factor.
const (
	waitsShown = 6
	sortsShown = 4
	fasterBy   = 2
)

// whyIdle reports what would shorten a simulated step, and the causes of the longest waits.
func whyIdle(env *cli.Env, job *cli.Job, set []string) (string, error) {
	if job.Timeline == nil {
		return "", cli.Usagef("--why-idle: the job has too many ranks to simulate")
	}
	var b strings.Builder
	if n := job.Plan.Time.Microbatches; n > 0 {
		fmt.Fprintf(&b, "The following times are those of a step of %d microbatches instead of %d.\n\n", n, job.Plan.Parallel.Microbatches)
	}
	sorts, err := shorten(&b, job.Program, job.Timeline)
	if err != nil {
		return "", err
	}
	w := cli.NewWatch(env)
	defer w.End()
	b.WriteString(fasterChanges(w, job, set, sorts) + "\n")
	longestWaits(&b, job.Program, job.Timeline)
	return b.String(), nil
}

// shorten simulates the step several times, each time with one kind of work on the critical path made faster. It returns these
// kinds.
func shorten(b *strings.Builder, p *ir.Program, t *sim.Timeline) ([]sim.Sort, error) {
	causes := t.Causes()
	var on [sim.NumSorts]ir.Seconds
	for _, s := range causes.Path() {
		on[causes.SortOf(s)] += s.End - s.Begin
	}
	order := make([]sim.Sort, 0, len(on))
	for sort := range sim.NumSorts {
		if on[sort] > 0 && len(sort.Kinds()) > 0 {
			order = append(order, sort)
		}
	}
	slices.SortStableFunc(order, func(x, y sim.Sort) int { return cmp.Compare(on[y], on[x]) })
	fmt.Fprintf(b, "What would shorten a step of %s, simulated with work that is %d times as fast:\n", t.Makespan, fasterBy)
	order = order[:min(len(order), sortsShown)]
	for _, sort := range order {
		scale := map[ir.WorkKind]float64{}
		for _, kind := range sort.Kinds() {
			scale[kind] = 1.0 / fasterBy
		}
		faster, err := sim.Run(p, ir.SectionStep, sim.Options{Scale: scale})
		if err != nil {
			return nil, cli.Wrong(err)
		}
		fmt.Fprintf(b, "  %-21s %s (%.1f%% less)\n", sort, faster.Makespan, 100*(1-float64(faster.Makespan/t.Makespan)))
	}
	b.WriteByte('\n')
	return order, nil
}

// fasterChanges leaves each given key that affects one of the sorts of work to the search, and lists the plans that are then
// faster. The search has tried the values of the other keys.
func fasterChanges(w *cli.Watch, job *cli.Job, set []string, sorts []sim.Sort) string {
	if job.Spec == nil || slow(job.Plan) {
		return "No other settings were tried.\n"
	}
	var searched, given, faster []string
	now := job.Plan.Time.EstimateS
	keys, values := search.Pins(job.Spec.Schedule)
	for i, key := range keys {
		_, name, _ := strings.Cut(key, ".")
		switch affects := func(s sim.Sort) bool { return slices.Contains(s.Keys(), name) }; {
		case !slices.ContainsFunc(sorts, affects) || w.Stopped():
		case values[i] == "":
			searched = append(searched, name)
		default:
			given = append(given, name)
			if found, fits := try(w, job, set, key+"=auto"); fits && found.job.Plan.Time.StepS < (1-worthPinning)*now {
				t := found.job.Plan.Time.StepS
				faster = append(faster, fmt.Sprintf("  --set %s: %s (%.1f%% less)\n", found.words, t, 100*(1-float64(t/now))))
			}
		}
	}
	if len(faster) > 0 {
		return fmt.Sprintf("Of the settings that were tried, these are faster, by estimate (this plan: %s):\n%s", now, strings.Join(faster, ""))
	}
	var tried []string
	if len(searched) > 0 {
		tried = append(tried, "the search has chosen "+strings.Join(searched, ", "))
	}
	if len(given) > 0 {
		tried = append(tried, "the search finds nothing better for the given "+strings.Join(given, ", ")+", one at a time")
	}
	return cli.Wrap("None of the settings that were tried is faster: "+strings.Join(tried, "; ")+".", "")
}

// longestWaits describes the longest waits of the compute stream on one rank of each stage.
func longestWaits(b *strings.Builder, p *ir.Program, t *sim.Timeline) {
	type wait struct {
		at   sim.Site
		took ir.Seconds
	}
	var waits []wait
	seen := map[int32]bool{}
	for r := range p.Ranks {
		code := p.Ranks[r].Code
		if seen[code] {
			continue
		}
		seen[code] = true
		spans := t.Rank(r).Spans
		for pc := range p.Codes[code].Sections[ir.SectionStep] {
			if in := &p.Codes[code].Sections[ir.SectionStep][pc]; in.Op == ir.Wait && in.Stream == ir.Compute && spans[pc].End > spans[pc].Begin {
				waits = append(waits, wait{sim.Site{Rank: r, PC: pc}, spans[pc].End - spans[pc].Begin})
			}
		}
	}
	slices.SortStableFunc(waits, func(x, y wait) int { return cmp.Compare(y.took, x.took) })
	if len(waits) == 0 {
		b.WriteString("No rank waits.\n\n")
		return
	}
	fmt.Fprintf(b, "Longest of %d waits on compute streams, on the first rank of each stage:\n", len(waits))
	causes := t.Causes()
	for _, w := range waits[:min(len(waits), waitsShown)] {
		fmt.Fprintf(b, "  %s\n    %s from %s for\n", siteText(p, w.at), w.took, t.Rank(w.at.Rank).Spans[w.at.PC].Begin)
		for at, depth := causes.Of(w.at), 0; at != sim.Nowhere && depth < 3; at, depth = causes.Of(at), depth+1 {
			span := t.Rank(at.Rank).Spans[at.PC]
			fmt.Fprintf(b, "    %s, from %s to %s\n", siteText(p, at), span.Begin, span.End)
			if span.Begin <= t.Rank(w.at.Rank).Spans[w.at.PC].Begin {
				break // it was already running when the wait began
			}
			if depth < 2 {
				b.WriteString("      which waited for\n")
			}
		}
	}
	b.WriteByte('\n')
}

// siteText describes an instruction: rank, stream, number, opcode, task, result.
func siteText(p *ir.Program, at sim.Site) string {
	code := &p.Codes[p.Ranks[at.Rank].Code]
	in := &code.Sections[ir.SectionStep][at.PC]
	text := fmt.Sprintf("rank %d %s %d: %s", at.Rank, in.Stream, at.PC, in.Info().Name)
	v := &in.Prov
	if letter, ok := map[ir.Phase]string{ir.PhaseForward: "F", ir.PhaseBackward: "B", ir.PhaseWeights: "W"}[v.Phase]; ok && v.Subsequence >= 0 {
		text += fmt.Sprintf(" in %s%d.%d@%d", letter, max(0, v.Microbatch), v.Subsequence, v.Stage)
	}
	if v.Layer >= 0 {
		text += fmt.Sprintf(" layer %d", v.Layer)
	}
	if in.Info().Written() > 0 && in.Args[0].Present() {
		text += " of " + code.Buffers[in.Args[0].Buffer].Name
	} else if in.Op == ir.Send {
		text += " of " + code.Buffers[in.Args[0].Buffer].Name
	}
	return text
}
