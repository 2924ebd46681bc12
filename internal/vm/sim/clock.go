package sim

import (
	"sppo.dev/internal/cost"
	"sppo.dev/ir"
)

// clock is the time of a rank's stream.
type clock struct {
	now   float64 // when all instructions issued so far are done
	cause moment  // the reason why now is not earlier
	busy  float64
	last  int32 // its last instruction that takes time
}

// moment is a time and its cause: a stream that worked without a pause until then, and the event that it had
// waited for before.
type moment struct {
	at, since float64
	stream    ir.Stream
	before    int32 // 1 + index into rank.causes; 0: no cause in this rank
}

// rank is one rank, or the representative of its class.
type rank struct {
	index    int // index in the job
	class    int
	factor   float64 // on the duration of its own work
	round    int64   // round of the section
	binding  *binding
	pc       int
	clocks   [ir.NumStreams]clock
	link     cost.HostLink // host link, for copies that take turns
	beside   cost.Beside   // the collectives that run beside other work
	events   []moment
	causes   []moment   // referenced by other moments
	meetings []*meeting // by port
	blocked  *meeting
	waits    [ir.NumStreams]float64 // time that the compute stream waited for work on each of the other streams
	idle     float64                // time that the compute stream waited because of other ranks
	pipeline Pipeline               // up to the rank's current position
	spans    []Span
	wake     chan error // used only by a device, whose goroutine blocks on it
}

// begin resets a rank to the start of a section.
func (r *rank) begin(events int32, link cost.HostLink, spans bool) {
	r.pc, r.blocked = 0, nil
	r.clocks, r.link, r.beside = [ir.NumStreams]clock{}, link, cost.Beside{}
	r.waits, r.idle, r.pipeline = [ir.NumStreams]float64{}, 0, Pipeline{Ranks: 1}
	if cap(r.events) < int(events) {
		r.events = make([]moment, events)
	}
	r.events, r.causes = r.events[:events], r.causes[:0]
	if spans {
		r.spans = make([]Span, len(r.binding.steps))
	}
}

// occupy records that a stream works from begin to end.
func (r *rank) occupy(pc int, s ir.Stream, begin, end float64) {
	r.lead(s, begin, end)
	r.worked(pc, s, end-begin)
	if r.spans != nil {
		r.spans[pc] = Span{ir.Seconds(begin), ir.Seconds(end)}
	}
}

// lasts returns how long a rank's own work takes that begins at a given time and takes d if no collective runs beside it.
func (r *rank) lasts(s ir.Stream, begin, d float64) float64 {
	if s != ir.Compute {
		return d
	}
	return float64(r.beside.Kernel(ir.Seconds(begin), ir.Seconds(d)))
}

// slow lets the work of a stream, as far as it is known, end later.
func (r *rank) slow(s ir.Stream, by ir.Seconds) {
	c := &r.clocks[s]
	r.lead(s, c.now, c.now+float64(by))
	c.busy += float64(by)
	if r.spans != nil {
		r.spans[c.last].End = ir.Seconds(c.now)
	}
}

// worked records the work of a stream.
func (r *rank) worked(pc int, s ir.Stream, seconds float64) {
	r.clocks[s].busy += seconds
	r.clocks[s].last = int32(pc)
	if pc+1 == r.binding.tasks {
		r.pipeline = r.books()
	}
}

// books returns the pipeline times as if the pipeline ended now.
func (r *rank) books() Pipeline {
	c := &r.clocks[ir.Compute]
	return Pipeline{
		Ranks: 1, End: ir.Seconds(c.now), Busy: ir.Seconds(c.busy + r.waits[ir.Coll] + r.waits[ir.Params]),
		Exposed: ir.Seconds(r.waits[ir.D2H] + r.waits[ir.H2D]),
	}
}

// copied records a stream's copy to or from the host that took turns with copies in the other direction. The
// stream is not busy while it waits for its turn, but if the compute stream waits for it meanwhile, that counts
// as a wait for a transfer.
func (r *rank) copied(pc int, s ir.Stream, ready, begin, end float64) {
	r.lead(s, ready, end)
	r.clocks[s].busy += end - begin
	if r.spans != nil {
		r.spans[pc] = Span{ir.Seconds(begin), ir.Seconds(end)}
	}
}

// lead advances a stream to the end of a piece of work, and records why the work did not end earlier.
func (r *rank) lead(s ir.Stream, begin, end float64) {
	c := &r.clocks[s]
	m := moment{at: end, since: c.cause.since, stream: s, before: c.cause.before}
	switch waited := c.cause.stream != s; {
	case begin > c.cause.at: // it waited for other ranks
		m.since, m.before = begin, 0
	case waited: // it waited for another stream of this rank
		r.causes = append(r.causes, c.cause)
		m.since, m.before = begin, int32(len(r.causes))
	}
	c.now, c.cause = end, m
}

// record stores a stream's time and its cause as an event.
func (r *rank) record(pc int, st *step) {
	c := &r.clocks[st.stream]
	r.events[st.arg] = moment{c.now, c.cause.since, c.cause.stream, c.cause.before}
	if r.spans != nil {
		r.spans[pc] = Span{ir.Seconds(c.now), ir.Seconds(c.now)}
	}
}

// wait delays a stream until an event.
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

// blame attributes a wait of the compute stream to the streams that worked during it, following the chain of
// events that each of them had waited for. The rest is idle time, caused by other ranks.
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

// finish returns the time at which all streams are done.
func (r *rank) finish() float64 {
	end := 0.0
	for s := range r.clocks {
		end = max(end, r.clocks[s].now)
	}
	return end
}
