package main

import (
	"bytes"
	"encoding/gob"
	"encoding/json"
	"fmt"
	"time"

	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// bubbleMeter measures the bubble of steps as the simulator defines it. Each process measures its own ranks;
// process 0 collects the results.
type bubbleMeter struct {
	program *ir.Program
	wanted  func(section ir.Section, round int64) bool // steps to measure; nil: all
	traces  []*vm.Trace                                // nil for ranks of other processes
	others  func(question string) ([][]byte, error)    // nil: there are no other processes
	last    []*vm.Timeline                             // timelines of the last step, by rank
	books   *sim.Books                                 // nil before the first step
	idle    ir.Seconds                                 // idle time over all measured steps
	busy    ir.Seconds
}

func newBubbleMeter(p *ir.Program) *bubbleMeter {
	return &bubbleMeter{program: p, traces: make([]*vm.Trace, len(p.Ranks))}
}

// sampled selects the steps to measure if measuring slows steps down: the second (the first is a warm-up),
// every hundredth, and the profiled one.
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

// measured holds the measurements of a step on some ranks.
type measured struct {
	Pipeline sim.Pipeline
	Split    sim.Split
}

// here returns the measurement of the step that has just ended, for the ranks of this process; it is empty if the
// step was not measured.
func (m *bubbleMeter) here() (all measured, err error) {
	m.last = m.last[:0]
	if m.unmeasured() {
		return all, nil
	}
	if m.books == nil {
		if m.books, err = sim.NewBooks(m.program, ir.SectionStep); err != nil {
			return all, err
		}
	}
	for _, t := range m.traces {
		if t == nil {
			m.last = append(m.last, nil)
			continue
		}
		last := t.Timelines[len(t.Timelines)-1]
		m.last = append(m.last, &last)
	}
	m.forget()
	t := m.books.Timeline(sim.SpansOf(m.program, m.last))
	return measured{t.Pipeline(), t.Split()}, nil
}

// add adds the step that has just ended to the totals, over all ranks, and returns its split, or nil if the
// step was not measured.
func (m *bubbleMeter) add() (*sim.Split, error) {
	if m.unmeasured() {
		return nil, nil
	}
	s, err := m.here()
	if err != nil {
		return nil, err
	}
	all, err := m.ask(askStep)
	for _, text := range all {
		var other measured
		if err := json.Unmarshal(text, &other); err != nil {
			return nil, err
		}
		s.Pipeline, s.Split = s.Pipeline.Add(other.Pipeline), s.Split.Add(other.Split)
	}
	m.busy, m.idle = m.busy+s.Pipeline.Busy, m.idle+s.Pipeline.Idle()
	return &s.Split, err
}

// unmeasured reports whether the step that has just ended was not measured. Either all ranks measure a step
// or none does.
func (m *bubbleMeter) unmeasured() bool {
	for _, t := range m.traces {
		if t != nil {
			return len(t.Timelines) == 0
		}
	}
	return true
}

// forget drops recorded timelines that are no longer needed.
func (m *bubbleMeter) forget() {
	for _, t := range m.traces {
		if t != nil {
			t.Timelines = t.Timelines[:0]
		}
	}
}

// ratio returns idle time divided by busy time, or 0 before the first measured step.
func (m *bubbleMeter) ratio() float64 {
	if m.busy == 0 {
		return 0
	}
	return float64(m.idle) / float64(m.busy)
}

// Questions that process 0 asks the others.
const (
	askStep      = "how long did the step take?"
	askClock     = "what time is it?"
	askTimelines = "when did each instruction run?"
)

func (m *bubbleMeter) ask(question string) ([][]byte, error) {
	if m.others == nil {
		return nil, nil
	}
	return m.others(question)
}

// reply answers a question for the ranks of this process.
func (m *bubbleMeter) reply(question string) ([]byte, error) {
	switch question {
	case askStep:
		s, err := m.here()
		if err != nil {
			return nil, err
		}
		return json.Marshal(s)
	case askClock:
		return json.Marshal(time.Now().UnixNano())
	case askTimelines:
		known := map[int]vm.Timeline{}
		for rank, t := range m.last {
			if t != nil {
				known[rank] = *t
			}
		}
		var out bytes.Buffer
		err := gob.NewEncoder(&out).Encode(known)
		return out.Bytes(), err
	}
	return nil, fmt.Errorf("internal: %q has no answer", question)
}

// gather fetches the timelines of the last step from the other processes and converts them to this process's clock.
func (m *bubbleMeter) gather() error {
	late, err := m.clocks()
	if err != nil {
		return err
	}
	all, err := m.ask(askTimelines)
	if err != nil {
		return err
	}
	for i, text := range all {
		known := map[int]vm.Timeline{}
		if err := gob.NewDecoder(bytes.NewReader(text)).Decode(&known); err != nil {
			return err
		}
		for rank, t := range known {
			t.Start = t.Start.Add(-late[i])
			m.last[rank] = &t
		}
	}
	for rank, t := range m.last {
		if t == nil {
			return fmt.Errorf("nothing was measured on rank %d", rank)
		}
	}
	return nil
}

// clocks returns how far the clock of each other process is ahead of ours. It assumes that the others read
// their clocks in the middle of the round trip, and uses the fastest of several round trips.
func (m *bubbleMeter) clocks() (ahead []time.Duration, err error) {
	shortest := time.Duration(0)
	for range 10 {
		asked := time.Now()
		all, err := m.ask(askClock)
		took := time.Since(asked)
		if err != nil {
			return nil, err
		}
		if shortest > 0 && took >= shortest {
			continue
		}
		shortest, ahead = took, ahead[:0]
		for _, text := range all {
			var theirs int64
			if err := json.Unmarshal(text, &theirs); err != nil {
				return nil, err
			}
			ahead = append(ahead, time.Duration(theirs-asked.Add(took/2).UnixNano()))
		}
	}
	return ahead, nil
}
