package vm

import (
	"slices"
	"time"

	"sppo.dev/ir"
)

// Span is one executed instruction. Times are measured from the start of the section, in real or simulated
// time.
type Span struct {
	PC         int32
	Begin, End time.Duration
}

// Spans receives the executed instructions of the current section from a device: for each stream, in order of
// execution. A stream appends only to its own list, so that recording does not synchronise streams.
type Spans struct {
	Start   time.Time // start of the section and origin of the times; a device with its own clock sets it
	Off     bool      // this section is not recorded: a device may skip reports that cost time
	Streams [ir.NumStreams][]Span
}

// Timeline records how a rank executed a section.
type Timeline struct {
	Section ir.Section
	Round   int64
	Start   time.Time // origin of the times, on a clock shared by the ranks of a process
	Streams [ir.NumStreams][]Span
}

// Trace wraps a device and keeps the timelines of its sections. The device measures times; the wrapper adds the
// section that they belong to.
type Trace struct {
	Device
	Timelines []Timeline
	Wanted    func(section ir.Section, round int64) bool // selects the sections to record; nil: all
	spans     Spans
	current   Timeline
}

// NewTrace wraps a device that has not been loaded yet.
func NewTrace(d Device) *Trace { return &Trace{Device: d} }

// Load loads the device with an environment that records spans.
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

// Join ends the timeline. The timeline is kept even if the section failed, because it shows how far each stream
// got.
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

// Doing returns the current instructions if the device implements Watched, otherwise nil.
func (t *Trace) Doing() []Doing {
	if d, ok := t.Device.(Watched); ok {
		return d.Doing()
	}
	return nil
}

// Elapsed returns the duration of the last section according to the device's clock, or false if it has no
// clock.
func (t *Trace) Elapsed() (time.Duration, bool) { return Elapsed(t.Device) }
