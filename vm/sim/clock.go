package sim

import "sppo/ir"

// clock is where a stream of a rank stands.
type clock struct {
	now   float64 // when all that was issued so far is done
	end   float64 // of the last instruction that was not a wait
	cause moment  // why now is not earlier
	busy  float64
}

// moment is a time on a stream and what led to it: since when that stream has worked without a pause.
type moment struct {
	at, since float64
	stream    ir.Stream
}

// rank is one rank, or the one that stands for all of its class.
type rank struct {
	index    int // of the rank
	class    int
	slow     float64
	round    int64 // of the section
	binding  *binding
	pc       int
	clocks   [ir.NumStreams]clock
	events   []moment
	meetings []*meeting // by port
	blocked  *meeting
	waits    [ir.NumStreams]float64 // of the compute stream, for work on each other stream
	idle     float64                // of the compute stream, while the stream that it waits for waits, too
	spans    []Span
	wake     chan error // of a device: its goroutine sleeps on it
}

// begin sets a rank to the start of a section.
func (r *rank) begin(events int32, spans bool) {
	r.pc, r.blocked = 0, nil
	r.clocks = [ir.NumStreams]clock{}
	r.waits, r.idle = [ir.NumStreams]float64{}, 0
	if cap(r.events) < int(events) {
		r.events = make([]moment, events)
	}
	r.events = r.events[:events]
	if spans {
		r.spans = make([]Span, len(r.binding.steps))
	}
}

// occupy has a stream work from begin to end.
func (r *rank) occupy(pc int, s ir.Stream, begin, end float64) {
	c := &r.clocks[s]
	if begin > c.end || c.cause.stream != s {
		c.cause = moment{since: begin, stream: s}
	}
	c.now, c.end = end, end
	c.busy += end - begin
	if r.spans != nil {
		r.spans[pc] = Span{ir.Seconds(begin), ir.Seconds(end)}
	}
}

// record stores where a stream is, and why.
func (r *rank) record(pc int, st *step) {
	c := &r.clocks[st.stream]
	r.events[st.arg] = moment{c.now, c.cause.since, c.cause.stream}
	if r.spans != nil {
		r.spans[pc] = Span{ir.Seconds(c.now), ir.Seconds(c.now)}
	}
}

// wait holds a stream up until an event. The compute stream keeps books on whom it waits for: what the other stream
// worked in that time is exposed, what it waited itself is nobody's work.
func (r *rank) wait(pc int, st *step) {
	c, e := &r.clocks[st.stream], &r.events[st.arg]
	begin := c.now
	if e.at > begin {
		if st.stream == ir.Compute {
			exposed := e.at - max(begin, min(e.since, e.at))
			r.waits[e.stream] += exposed
			r.idle += e.at - begin - exposed
		}
		c.now, c.cause = e.at, *e
	}
	if r.spans != nil {
		r.spans[pc] = Span{ir.Seconds(begin), ir.Seconds(c.now)}
	}
}

// finish is the time at which all streams are done.
func (r *rank) finish() float64 {
	end := 0.0
	for s := range r.clocks {
		end = max(end, r.clocks[s].now)
	}
	return end
}
