package vm

import (
	"slices"
	"time"

	"sppo.dev/ir"
)

// Span is one executed instruction. Times are since the section began: real ones, or the simulator's.
type Span struct {
	PC         int32
	Begin, End time.Duration
}

// Spans is where a device reports the instructions of the current section, in the order in which each stream executed
// them. A stream appends only to its own list, so that recording orders no stream against another.
type Spans struct {
	Start   time.Time // of the section: what times are counted from. A device with its own clock says when that began
	Off     bool      // nobody wants to know of this section: a device for which reporting costs time leaves it out
	Streams [ir.NumStreams][]Span
}

// Timeline is what a rank did in one section.
type Timeline struct {
	Section ir.Section
	Round   int64
	Start   time.Time // of the times, on a clock that the ranks of a process share
	Streams [ir.NumStreams][]Span
}

// Trace wraps any device and keeps the timelines of its sections. The times come from the device; the wrapper adds
// what every device has in common: which section they belong to.
type Trace struct {
	Device
	Timelines []Timeline
	Wanted    func(section ir.Section, round int64) bool // of which sections; nil: of all
	spans     Spans
	current   Timeline
}

// NewTrace wraps a device that is not loaded yet.
func NewTrace(d Device) *Trace { return &Trace{Device: d} }

// Load hands the device the place to report to.
func (t *Trace) Load(p *ir.Program, rank int, env *Env) error {
	traced := *env
	traced.Spans = &t.spans
	return t.Device.Load(p, rank, &traced)
}

// Begin starts a timeline.
func (t *Trace) Begin(section ir.Section, round int64) error {
	t.current = Timeline{Section: section, Round: round}
	for s := range t.spans.Streams {
		t.spans.Streams[s] = t.spans.Streams[s][:0]
	}
	t.spans.Start, t.spans.Off = time.Now(), t.Wanted != nil && !t.Wanted(section, round)
	return t.Device.Begin(section, round)
}

// Join ends the timeline, which is kept even if the section failed: it shows how far each stream came.
func (t *Trace) Join() error {
	err := t.Device.Join()
	if t.spans.Off {
		return err
	}
	t.current.Start = t.spans.Start
	for s, spans := range t.spans.Streams {
		t.current.Streams[s] = slices.Clone(spans)
	}
	t.Timelines = append(t.Timelines, t.current)
	return err
}

// Elapsed is that of a device with a clock.
func (t *Trace) Elapsed() (time.Duration, bool) { return elapsed(t.Device) }
