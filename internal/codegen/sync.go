package codegen

import (
	"math/bits"
	"slices"

	"sppo.dev/ir"
)

// This phase inserts the events that order conflicting accesses from different streams, and no others.
//
// Streams and conflicts form a partial order of the instructions. A wait is needed for exactly
// those edges of this order that connect two streams and are not implied by other paths. An event
// is needed at the start of each such edge. This set is the transitive reduction, so it is unique,
// and removing any wait leaves a race.

// synchronise inserts records and waits into a section that has none. Instructions of different streams that
// touch the same bytes, at least one of them writing, then run in the order of the slice. It returns the new
// section and the number of its events. A record has the provenance of the instruction before it, and a wait
// has that of the instruction after it, except for the given pass and for the spec line, which crossing
// determines.
func synchronise(instrs []ir.Instr, buffers []ir.Buffer, pass uint8) ([]ir.Instr, int32) {
	return insertEvents(instrs, neededWaits(instrs, buffers), pass)
}

// A tick identifies an instruction: its index plus 1, so that 0 means "none" and later instructions have larger
// ticks.
type tick int32

// A clock holds the last instruction of each stream that is known to be done. Earlier instructions on that
// stream are also done.
type clock [ir.NumStreams]tick

func (c *clock) join(other *clock) {
	for s := range c {
		c[s] = max(c[s], other[s])
	}
}

// beyond returns the latest instruction of c that the clock known does not cover, or 0.
func (c *clock) beyond(known *clock) tick {
	latest := tick(0)
	for s := range c {
		if c[s] > known[s] {
			latest = max(latest, c[s])
		}
	}
	return latest
}

// An edge is a wait: the consumer may start once the producer is done.
type edge struct{ producer, consumer tick }

// neededWaits returns the waits in the order of their consumers.
//
// The waits of an instruction are chosen in order of producers, latest first. A wait can be implied only by a
// wait for a later producer, which has been chosen by then.
func neededWaits(instrs []ir.Instr, buffers []ir.Buffer) []edge {
	var edges []edge
	var last clock                       // last instruction of each stream
	done := make([]clock, len(instrs)+1) // by tick: what is done when the instruction is done
	history, ends := newHistory(instrs, buffers), groupEnds(instrs)
	for i := range instrs {
		t, stream := tick(i+1), instrs[i].Stream
		needs := history.access(&instrs[i], t)
		for s, producer := range needs {
			if ir.Stream(s) != stream {
				needs[s] = ends[producer]
			}
		}
		known := done[last[stream]]
		known[stream] = t
		for producer := needs.beyond(&known); producer != 0; producer = needs.beyond(&known) {
			edges = append(edges, edge{producer, t})
			known.join(&done[producer])
		}
		done[t], last[stream] = known, t
	}
	return edges
}

// groupEnds returns, by tick, the last collective of a layer that may begin together with an instruction (vm.Groups), or the
// instruction itself. Others wait for all collectives of such a group, so that no event divides it.
func groupEnds(instrs []ir.Instr) []tick {
	ends := make([]tick, len(instrs)+1)
	for i := len(instrs) - 1; i >= 0; i-- {
		ends[i+1] = tick(i + 1)
		if i+1 < len(instrs) && together(&instrs[i], &instrs[i+1]) {
			ends[i+1] = ends[i+2]
		}
	}
	return ends
}

func together(a, b *ir.Instr) bool {
	c := a.Op.Collective()
	return c != nil && c.Traffic == ir.TrafficRing && a.Op == b.Op && a.Stream == b.Stream && a.Prov.Layer == b.Prov.Layer && a.Attr("group") == b.Attr("group")
}

// insertEvents puts a record after every producer and waits before its consumers. Events are numbered in the
// order of their records.
func insertEvents(instrs []ir.Instr, edges []edge, pass uint8) ([]ir.Instr, int32) {
	event := make([]int32, len(instrs)+1) // by tick: 1 + the event, or 0
	for _, e := range edges {
		event[e.producer] = 1
	}
	count := int32(0)
	for t := range event {
		if event[t] != 0 {
			count++
			event[t] = count
		}
	}
	attrs := make([]ir.Attr, count+1) // one allocation; the instructions of an event share its entry
	for i := range attrs {
		attrs[i] = ir.Int(int64(i - 1))
	}
	lines, lined := make([]uint16, count+1), make([]bool, count+1) // by event: spec line of its record
	for _, e := range edges {
		if n := event[e.producer]; !lined[n] {
			lined[n], lines[n] = true, crossing(&instrs[e.producer-1], &instrs[e.consumer-1])
		}
	}
	mark := func(op ir.Op, event int32, at *ir.Instr, line uint16) ir.Instr {
		in := ir.Instr{Op: op, Stream: at.Stream, Prov: at.Prov, Attrs: attrs[event : event+1 : event+1]}
		in.Prov.Pass, in.Prov.Line = pass, line
		return in
	}
	out := make([]ir.Instr, 0, len(instrs)+len(edges)+int(count))
	for i := range instrs {
		in, t := &instrs[i], tick(i+1)
		for ; len(edges) > 0 && edges[0].consumer == t; edges = edges[1:] {
			producer := edges[0].producer
			out = append(out, mark(ir.Wait, event[producer], in, crossing(&instrs[producer-1], in)))
		}
		out = append(out, *in)
		if event[t] != 0 {
			out = append(out, mark(ir.Record, event[t], in, lines[event[t]]))
		}
	}
	return out, count
}

// crossing returns the spec line of an event: that of the copy, message or collective that needs it. If both
// instructions are of these kinds, it is the line of the producer.
func crossing(producer, consumer *ir.Instr) uint16 {
	if producer.Stream == ir.Compute {
		return consumer.Prov.Line
	}
	return producer.Prov.Line
}

// history records for every byte which instruction wrote it last and which instructions have accessed it
// since. Adjacent bytes with the same history form a segment. All ends of views are known beforehand, so a
// segment is identified by the index of the address where it starts, and no tree is needed.
type history struct {
	buffers  []ir.Buffer
	stops    []ir.Bytes // every address where a view starts or ends, ascending
	starts   bitset     // the stops where a segment starts
	segments []segment  // by stop
}

type segment struct {
	writer  tick
	stream  ir.Stream // of the writer
	touched clock     // the writer, and the last instruction of each stream that has read since
}

func newHistory(instrs []ir.Instr, buffers []ir.Buffer) *history {
	h := &history{buffers: buffers}
	last := make([]ir.Bytes, 2*len(buffers)) // the range of each buffer that was accessed last: usually all of it
	limit := leastStops
	for i := range instrs {
		if instrs[i].Info().Class == ir.ClassSync {
			panic("internal: sync: the section is synchronised already")
		}
		for _, v := range instrs[i].Args {
			lo, hi := h.addresses(v)
			if lo >= hi || last[2*v.Buffer] == lo && last[2*v.Buffer+1] == hi {
				continue
			}
			last[2*v.Buffer], last[2*v.Buffer+1] = lo, hi
			if h.stops = append(h.stops, lo, hi); len(h.stops) >= limit { // many buffers have the same addresses
				h.sortStops()
				limit = max(limit, 2*len(h.stops))
			}
		}
	}
	h.sortStops()
	h.segments = make([]segment, len(h.stops))
	h.starts = newBitset(len(h.stops))
	if len(h.stops) > 0 {
		h.starts.set(0)
	}
	return h
}

// leastStops is the number of addresses at which those that occur several times are removed first.
const leastStops = 1 << 12

// sortStops sorts the addresses and removes those that occur several times.
func (h *history) sortStops() {
	slices.Sort(h.stops)
	h.stops = slices.Compact(h.stops)
}

// addresses maps a view to one address space for all arenas.
func (h *history) addresses(v ir.View) (lo, hi ir.Bytes) {
	if !v.Present() {
		return 0, 0
	}
	const arenaSpan = ir.Bytes(1) << 56
	b := &h.buffers[v.Buffer]
	lo = ir.Bytes(b.Arena)*arenaSpan + b.Offset + v.Offset
	return lo, lo + v.Bytes()
}

// access records the accesses of an instruction and returns the instructions that it must follow. They may
// include the instruction itself and others on its stream.
func (h *history) access(in *ir.Instr, t tick) clock {
	var needs clock
	for i, v := range in.Args {
		lo, hi := h.addresses(v)
		if lo >= hi {
			continue
		}
		first, end := h.cut(lo), h.cut(hi)
		if _, writes := in.Access(i); writes {
			h.write(first, end, in.Stream, t, &needs)
		} else {
			h.read(first, end, in.Stream, t, &needs)
		}
	}
	return needs
}

func (h *history) read(first, end int, stream ir.Stream, t tick, needs *clock) {
	for k := first; k < end; k = h.starts.next(k + 1) {
		seg := &h.segments[k]
		needs[seg.stream] = max(needs[seg.stream], seg.writer)
		seg.touched[stream] = t
	}
}

// write turns the range into one segment and forgets earlier accesses: whatever follows this write also follows
// them.
func (h *history) write(first, end int, stream ir.Stream, t tick, needs *clock) {
	for k := first; k < end; k = h.starts.next(k + 1) {
		needs.join(&h.segments[k].touched)
		if k > first {
			h.starts.clear(k)
		}
	}
	seg := segment{writer: t, stream: stream}
	seg.touched[stream] = t
	h.segments[first] = seg
}

// cut starts a segment at a known address and returns the address's index.
func (h *history) cut(address ir.Bytes) int {
	k, _ := slices.BinarySearch(h.stops, address)
	if from := h.starts.previous(k); from != k {
		h.segments[k] = h.segments[from]
		h.starts.set(k)
	}
	return k
}

// bitset is a set of small integers with a fast search for neighbours. Level 0 has a bit for every member,
// and each level above has a bit for every non-zero word of the level below.
type bitset [][]uint64

func newBitset(size int) bitset {
	var b bitset
	for more := true; more; more = size > 1 {
		size = (size + 63) / 64
		b = append(b, make([]uint64, size+1)) // the spare word ends searches past the last member
	}
	return b
}

func (b bitset) set(i int) {
	for _, words := range b {
		words[i/64] |= 1 << (i % 64)
		i /= 64
	}
}

func (b bitset) clear(i int) {
	for _, words := range b {
		words[i/64] &^= 1 << (i % 64)
		if words[i/64] != 0 {
			return
		}
		i /= 64
	}
}

// next returns the smallest member that is at least i, or a number greater than all members.
func (b bitset) next(i int) int {
	for level, words := range b {
		if word := words[i/64] >> (i % 64); word != 0 {
			i += bits.TrailingZeros64(word)
			for level--; level >= 0; level-- {
				i = i*64 + bits.TrailingZeros64(b[level][i])
			}
			return i
		}
		i = i/64 + 1
	}
	return len(b[0]) * 64
}

// previous returns the largest member that is at most i, which must exist.
func (b bitset) previous(i int) int {
	for level, words := range b {
		if word := words[i/64] << (63 - i%64); word != 0 {
			i -= bits.LeadingZeros64(word)
			for level--; level >= 0; level-- {
				i = i*64 + 63 - bits.LeadingZeros64(b[level][i])
			}
			return i
		}
		i = i/64 - 1
	}
	panic("internal: sync: no segment before an address")
}
