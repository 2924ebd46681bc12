package main

import (
	"time"

	"sppo/ir"
	"sppo/vm"
)

// bubbleMeter measures how much of the steps the ranks' compute streams stand idle.
type bubbleMeter struct {
	program    *ir.Program
	wanted     func(section ir.Section, round int64) bool // what to measure; nil: everything
	traces     []*vm.Trace
	last       []*vm.Timeline // of the last step, by rank
	idle, busy time.Duration
}

func newBubbleMeter(p *ir.Program) *bubbleMeter {
	return &bubbleMeter{program: p, traces: make([]*vm.Trace, len(p.Ranks))}
}

// sampled are the steps that are measured where measuring slows them down: the second, for the first warms up, one of many
// behind it, and one that a profile is wanted of.
func sampled(profiled int64) func(section ir.Section, step int64) bool {
	return func(section ir.Section, step int64) bool {
		return section == ir.SectionStep && (step == 2 || step%100 == 0 || step == profiled)
	}
}

func (m *bubbleMeter) wrap(rank int, d vm.Device) vm.Device {
	m.traces[rank] = vm.NewTrace(d)
	m.traces[rank].Wanted = m.wanted
	return m.traces[rank]
}

// add takes up the step that has just ended. A step is as long as its last instruction on any rank says.
func (m *bubbleMeter) add() {
	if len(m.traces[0].Timelines) == 0 {
		return // it was not measured
	}
	var makespan, busy time.Duration
	m.last = m.last[:0]
	for rank, t := range m.traces {
		last := t.Timelines[len(t.Timelines)-1]
		m.last = append(m.last, &last)
		section := m.program.Codes[m.program.Ranks[rank].Code].Sections[ir.SectionStep]
		streams := &last.Streams
		for _, spans := range streams {
			if n := len(spans); n > 0 {
				makespan = max(makespan, spans[n-1].End)
			}
		}
		for _, span := range streams[ir.Compute] {
			if section[span.PC].Info().Class != ir.ClassSync {
				busy += span.End - span.Begin
			}
		}
	}
	m.busy += busy
	m.idle += makespan*time.Duration(len(m.traces)) - busy
	m.forget()
}

// forget drops the timelines that nobody will ask for.
func (m *bubbleMeter) forget() {
	for _, t := range m.traces {
		t.Timelines = t.Timelines[:0]
	}
}

// ratio is idle over busy time; 0 before the first step that was measured.
func (m *bubbleMeter) ratio() float64 {
	if m.busy == 0 {
		return 0
	}
	return float64(m.idle) / float64(m.busy)
}
