package sim

import (
	"sppo.dev/ir"
	"sppo.dev/ir/cost"
)

// clock is where a stream of a rank stands.
type clock struct {
	now   float64 // when all that was issued so far is done
	cause moment  // why now is not earlier
	busy  float64
}

// moment is a time and what led to it: a stream that worked without a pause since, and what that one had waited for.
type moment struct {
	at, since float64
	stream    ir.Stream
	before    int32 // 1 + index into rank.causes; 0: nothing of this rank
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
	link     cost.HostLink // of copies that take turns
	events   []moment
	causes   []moment   // that others go back to
	meetings []*meeting // by port
	blocked  *meeting
	waits    [ir.NumStreams]float64 // of the compute stream, for work on each other stream
	idle     float64                // of the compute stream, while the stream that it waits for waits, too
	pipeline Pipeline               // as far as the rank has come
	spans    []Span
	wake     chan error // of a device: its goroutine sleeps on it
}

// begin sets a rank to the start of a section.
func (r *rank) begin(events int32, link cost.HostLink, spans bool) {
	r.pc, r.blocked = 0, nil
	r.clocks, r.link = [ir.NumStreams]clock{}, link
	r.waits, r.idle, r.pipeline = [ir.NumStreams]float64{}, 0, Pipeline{Ranks: 1}
	if cap(r.events) < int(events) {
		r.events = make([]moment, events)
	}
	r.events, r.causes = r.events[:events], r.causes[:0]
	if spans {
		r.spans = make([]Span, len(r.binding.steps))
	}
}

// occupy has a stream work from begin to end.
func (r *rank) occupy(pc int, s ir.Stream, begin, end float64) {
	r.lead(s, begin, end)
	r.worked(pc, s, end-begin)
	if r.spans != nil {
		r.spans[pc] = Span{ir.Seconds(begin), ir.Seconds(end)}
	}
}

// worked adds to the books of a stream.
func (r *rank) worked(pc int, s ir.Stream, seconds float64) {
	r.clocks[s].busy += seconds
	if pc+1 == r.binding.tasks {
		r.pipeline = r.books()
	}
}

// books are those of the pipeline, if it ends here.
func (r *rank) books() Pipeline {
	c := &r.clocks[ir.Compute]
	return Pipeline{
		Ranks: 1, End: ir.Seconds(c.now), Busy: ir.Seconds(c.busy + r.waits[ir.Coll]),
		Exposed: ir.Seconds(r.waits[ir.D2H] + r.waits[ir.H2D]),
	}
}

// copied has a stream copy to or from the host, in turns with copies the other way. While it waits for these it counts as at
// work: who waits for the copy waits for a transfer.
func (r *rank) copied(pc int, s ir.Stream, ready, begin, end float64) {
	r.lead(s, ready, end)
	r.clocks[s].busy += end - begin
	if r.spans != nil {
		r.spans[pc] = Span{ir.Seconds(begin), ir.Seconds(end)}
	}
}

// lead moves a stream to the end of work, and keeps why it ends no earlier.
func (r *rank) lead(s ir.Stream, begin, end float64) {
	c := &r.clocks[s]
	m := moment{at: end, since: c.cause.since, stream: s, before: c.cause.before}
	switch waited := c.cause.stream != s; {
	case begin > c.cause.at: // until other ranks were there
		m.since, m.before = begin, 0
	case waited: // for another stream of this rank
		r.causes = append(r.causes, c.cause)
		m.since, m.before = begin, int32(len(r.causes))
	}
	c.now, c.cause = end, m
}

// record stores where a stream is, and why.
func (r *rank) record(pc int, st *step) {
	c := &r.clocks[st.stream]
	r.events[st.arg] = moment{c.now, c.cause.since, c.cause.stream, c.cause.before}
	if r.spans != nil {
		r.spans[pc] = Span{ir.Seconds(c.now), ir.Seconds(c.now)}
	}
}

// wait holds a stream up until an event.
func (r *rank) wait(pc int, st *step) {
	c, e := &r.clocks[st.stream], &r.events[st.arg]
	begin := c.now
	if e.at > begin {
		if st.stream == ir.Compute {
			r.blame(begin, *e)
		}
		c.now, c.cause = e.at, *e
	}
	if r.spans != nil {
		r.spans[pc] = Span{ir.Seconds(begin), ir.Seconds(c.now)}
	}
}

// blame keeps books on whom the compute stream waits for: the stream that was at work at each time of the wait, back
// along what each had waited for itself. What is left is idle: it was up to other ranks.
func (r *rank) blame(begin float64, m moment) {
	until := m.at
	for {
		if from := max(begin, m.since); from < until {
			r.waits[m.stream] += until - from
			until = from
		}
		if until <= begin || m.before == 0 {
			break
		}
		m = r.causes[m.before-1]
	}
	r.idle += until - begin
}

// finish is the time at which all streams are done.
func (r *rank) finish() float64 {
	end := 0.0
	for s := range r.clocks {
		end = max(end, r.clocks[s].now)
	}
	return end
}
