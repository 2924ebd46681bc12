package codegen

import (
	"slices"

	"sppo.dev/ir"
)

// byteRange is a range of bytes [lo, hi).
type byteRange struct{ lo, hi ir.Bytes }

// ranges is a set of bytes, stored as ranges in ascending order that neither overlap nor touch.
type ranges []byteRange

// after returns the index of the first range that ends past an offset.
func (r ranges) after(at ir.Bytes) int {
	lo, hi := 0, len(r)
	for lo < hi {
		if mid := (lo + hi) / 2; r[mid].hi > at {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}

// add inserts a range and merges it with those that it overlaps or touches.
func (r *ranges) add(b byteRange) {
	s := *r
	first := s.after(b.lo - 1)
	end := first
	for end < len(s) && s[end].lo <= b.hi {
		end++
	}
	if first == end {
		*r = slices.Insert(s, first, b)
		return
	}
	s[first] = byteRange{min(b.lo, s[first].lo), max(b.hi, s[end-1].hi)}
	if end > first+1 {
		*r = slices.Delete(s, first+1, end)
	}
}

// skyline records which bytes are in use at which instants. It is a segment tree over the instants: each node
// covers a span, and its children cover the halves. Any span is the union of a few nodes, and the bytes of a
// node are a few ranges if lives are packed tightly. A query is therefore cheap, however many lives overlap the
// span.
type skyline struct {
	leaves int
	whole  []ranges // by node: bytes taken by lives that cover the node's span
	any    []ranges // by node: bytes taken at some instant of the node's span
	asked  []ranges // scratch of lowestGap: the bytes to avoid
}

func newSkyline(instants int) *skyline {
	leaves := 1
	for leaves < instants {
		leaves *= 2
	}
	return &skyline{leaves: leaves, whole: make([]ranges, 2*leaves), any: make([]ranges, 2*leaves)}
}

// occupy marks bytes as used over a span of instants.
func (s *skyline) occupy(over span, b byteRange) {
	if b.lo < b.hi {
		s.occupyNode(1, span{0, int32(s.leaves)}, over, b)
	}
}

func (s *skyline) occupyNode(node int, of, over span, b byteRange) {
	s.any[node].add(b)
	if over.from <= of.from && of.to <= over.to {
		s.whole[node].add(b)
		return
	}
	middle := (of.from + of.to) / 2
	if over.from < middle {
		s.occupyNode(2*node, span{of.from, middle}, over, b)
	}
	if middle < over.to {
		s.occupyNode(2*node+1, span{middle, of.to}, over, b)
	}
}

// lowestGap returns the lowest offset at which size bytes are free over a span of instants.
func (s *skyline) lowestGap(over span, size ir.Bytes) ir.Bytes {
	s.asked = s.asked[:0]
	s.ask(1, span{0, int32(s.leaves)}, over)
	at := ir.Bytes(0)
	for k, agreed := 0, 0; agreed < len(s.asked); k = (k + 1) % len(s.asked) {
		agreed++
		taken := s.asked[k]
		for i := taken.after(at); i < len(taken) && taken[i].lo < at+size; i++ {
			at, agreed = taken[i].hi, 1
		}
	}
	return at
}

// ask collects the bytes that a life over the span must avoid: those in use at any time within the nodes that
// make up the span, and those in use throughout the nodes above them.
func (s *skyline) ask(node int, of, over span) {
	if len(s.any[node]) == 0 {
		return
	}
	if over.from <= of.from && of.to <= over.to {
		s.asked = append(s.asked, s.any[node])
		return
	}
	if len(s.whole[node]) > 0 {
		s.asked = append(s.asked, s.whole[node])
	}
	middle := (of.from + of.to) / 2
	if over.from < middle {
		s.ask(2*node, span{of.from, middle}, over)
	}
	if middle < over.to {
		s.ask(2*node+1, span{middle, of.to}, over)
	}
}
