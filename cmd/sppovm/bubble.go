package main

import (
	"time"

	"sppo/ir"
	"sppo/vm"
)

// bubbleMeter measures how much of the steps the ranks' compute streams stand idle.
type bubbleMeter struct {
	program    *ir.Program
	traces     []*vm.Trace
	last       []*vm.Timeline // of the last step, by rank
	idle, busy time.Duration
}

func newBubbleMeter(p *ir.Program) *bubbleMeter {
	return &bubbleMeter{program: p, traces: make([]*vm.Trace, len(p.Ranks))}
}

func (m *bubbleMeter) wrap(rank int, d vm.Device) vm.Device {
	m.traces[rank] = vm.NewTrace(d)
	return m.traces[rank]
}

// add takes up the step that has just ended. A step is as long as its last instruction on any rank says.
func (m *bubbleMeter) add() {
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

// ratio is idle over busy time; 0 before the first step.
func (m *bubbleMeter) ratio() float64 {
	if m.busy == 0 {
		return 0
	}
	return float64(m.idle) / float64(m.busy)
}
