package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cmd/internal/trace"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// writeProfile writes the timeline of the last step and compares it with the simulation.
func (r *training) writeProfile() error {
	if len(r.meter.last) == 0 {
		r.show.warn("no step was measured; %s was not written", r.f.profile)
		return nil
	}
	if err := r.meter.gather(); err != nil {
		return err
	}
	measured, err := sim.Measured(r.program, ir.SectionStep, r.device, sim.SpansOf(r.program, r.meter.last))
	if err != nil {
		return err
	}
	measured.Round = r.meter.last[0].Round
	all := make([]int, len(r.program.Ranks))
	for rank := range all {
		all[rank] = rank
	}
	if err := cli.WriteFile(r.f.profile, func(w io.Writer) error { return trace.Write(w, r.program, measured, all) }); err != nil {
		return err
	}
	simulated, err := sim.Run(r.program, ir.SectionStep, sim.Options{Spans: true})
	if err != nil {
		return err
	}
	r.show.say("%s: step %d took %s, %.3f times the simulated %s on %s", r.f.profile, measured.Round, measured.Makespan,
		float64(measured.Makespan/simulated.Makespan), simulated.Makespan, r.program.Machine.Name)
	for _, line := range compareOpcodes(r.program, measured, simulated) {
		r.show.say("%s", line)
	}
	if m := &r.program.Machine; m.Parallelism > 0 && float64(len(all)) > m.Parallelism {
		r.show.say("  measured ranks wait for a processor between instructions, whereas simulated ranks all run at once, but more slowly")
	}
	return nil
}

// mostOpcodes is the maximum number of opcodes that are compared.
const mostOpcodes = 8

// compareOpcodes compares measured and simulated time over all ranks, for the opcodes that take the most time.
// It leaves out the time that messages and collectives spend waiting for their peers.
func compareOpcodes(p *ir.Program, measured, simulated *sim.Timeline) []string {
	type sum struct {
		op        ir.Op
		count     int
		took, sim ir.Seconds
	}
	sums := make([]sum, ir.NumOps)
	for r := range p.Ranks {
		m, s := measured.Rank(r).Spans, simulated.Rank(r).Spans
		for pc := range m {
			op := p.Codes[p.Ranks[r].Code].Sections[ir.SectionStep][pc].Op
			if ir.Ops[op].Class == ir.ClassSync {
				continue
			}
			x := &sums[op]
			x.op, x.count = op, x.count+1
			x.took, x.sim = x.took+m[pc].End-m[pc].Begin, x.sim+s[pc].End-s[pc].Begin
		}
	}
	slices.SortStableFunc(sums, func(a, b sum) int { return cmp.Compare(b.took, a.took) })
	var lines []string
	for _, x := range sums[:mostOpcodes] {
		if x.count > 0 && x.sim > 0 {
			lines = append(lines, fmt.Sprintf("  %-20s %6d times  %10s measured  %10s simulated  %6.2f times as long",
				ir.Ops[x.op].Name, x.count, x.took, x.sim, float64(x.took/x.sim)))
		}
	}
	return lines
}
