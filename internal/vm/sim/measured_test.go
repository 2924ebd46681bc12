package sim_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// A device that runs exactly as simulated gives the simulation's figures. Each rank measures messages and
// collectives from its own arrival; Measured corrects this.
func TestMeasuredAsSimulated(t *testing.T) {
	_, p := compile(t, "tiny.sppo")
	want, err := sim.Run(p, ir.SectionStep, sim.Options{Spans: true, NoFold: true, Jitter: 0.3, Seed: 5})
	if err != nil {
		t.Fatal(err)
	}
	spans := make([][]sim.Span, len(p.Ranks))
	for r := range spans {
		spans[r] = append([]sim.Span(nil), want.Rank(r).Spans...)
		var ends [ir.NumStreams]ir.Seconds
		for pc := range spans[r] {
			in := &p.Codes[p.Ranks[r].Code].Sections[ir.SectionStep][pc]
			if in.Info().Class == ir.ClassComm {
				spans[r][pc].Begin = ends[in.Stream]
			}
			ends[in.Stream] = spans[r][pc].End
		}
	}
	got, err := sim.Measured(p, ir.SectionStep, "a device", spans)
	if err != nil {
		t.Fatal(err)
	}
	near := func(what string, a, b ir.Seconds) {
		if math.Abs(float64(a-b)) > 1e-12 {
			t.Errorf("%s: %v, simulated %v", what, a, b)
		}
	}
	near("the step", got.Makespan, want.Makespan)
	near("compute", got.Split().Compute, want.Split().Compute)
	near("exposed copies", got.Split().Copies, want.Split().Copies)
	near("exposed communication", got.Split().Communication, want.Split().Communication)
	idle := ir.Seconds(0)
	for r := range p.Ranks {
		idle += want.Rank(r).Idle
	}
	near("bubble", want.Split().Bubble(), idle)
	for r := range p.Ranks {
		g, w := got.Rank(r), want.Rank(r)
		near("idle", g.Idle, w.Idle)
		for s := range ir.NumStreams {
			near("busy "+s.String(), g.Busy[s], w.Busy[s])
			near("waits for "+s.String(), g.Waits[s], w.Waits[s])
		}
		for pc := range w.Spans {
			near("begin", g.Spans[pc].Begin, w.Spans[pc].Begin)
		}
	}
	if got.Measured != "a device" || want.Measured != "" || math.Abs(got.BubbleRatio()-want.BubbleRatio()) > 1e-9 || got.TGS() != want.TGS() {
		t.Errorf("%q: bubble %g, simulated %g", got.Measured, got.BubbleRatio(), want.BubbleRatio())
	}
	if _, err := sim.Measured(p, ir.SectionStep, "", spans[:2]); err == nil || !strings.Contains(err.Error(), "2 ranks were measured") {
		t.Errorf("%v", err)
	}
	spans[1] = spans[1][:7]
	if _, err := sim.Measured(p, ir.SectionStep, "", spans); err == nil || !strings.Contains(err.Error(), "rank 1: 7 instructions were measured") {
		t.Errorf("%v", err)
	}
}

// Each rank reports times since its own start; SpansOf converts them to times since the first rank started.
func TestSpansOf(t *testing.T) {
	p := &ir.Program{Codes: []ir.Code{{}}, Ranks: []ir.Rank{{}, {}}}
	p.Codes[0].Sections[ir.SectionStep] = make([]ir.Instr, 2)
	now := time.Now()
	late := vm.Timeline{Section: ir.SectionStep, Start: now.Add(time.Second)}
	late.Streams[ir.D2H] = []vm.Span{{PC: 1, Begin: time.Second, End: 3 * time.Second}}
	got := sim.SpansOf(p, []*vm.Timeline{&late, {Section: ir.SectionStep, Start: now}})
	if got[0][1] != (sim.Span{Begin: 2, End: 4}) || got[1][1] != (sim.Span{}) {
		t.Errorf("%v", got)
	}
}
