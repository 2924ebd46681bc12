package ir

import "slices"

// shadow records, for every byte of an arena, which instruction of a section wrote it last and which have read
// it since. Adjacent bytes with the same state form a segment. The segments are a sorted list cut into blocks,
// so that inserting one does not move all others.
type shadow struct {
	blocks [][]segment
	size   Bytes
}

// segment is the range of bytes from its start to the next segment.
type segment struct {
	start Bytes
	state
}

// state is the record of a byte.
type state struct {
	buffer uint32             // the buffer that owns the bytes; NoBuffer: unknown
	writer access             // last write of this section
	reads  [NumStreams]uint32 // by stream: number of the last instruction that has read the byte since that write
	past   past
	origin uint32 // 1 + the instruction that moved the value out of bytes to which it may return; 0: none
}

// access is an operand of an instruction. The instruction is identified by its stream and its
// number in the stream, from 1.
type access struct {
	stream  Stream
	operand uint8
	number  uint32 // 0: none
}

// past is the history of a byte's value. An instruction that changes a value in place does not count as a
// reader of it.
type past uint8

const (
	readOnce  past = 1 << iota // since the value was last written or changed
	readTwice                  // or more often
	readAsWas                  // while the value was still the one from before the section
	replaced                   // the section has overwritten the value from before the section
	stale                      // a copy of the value has been changed
)

// byVM stands for the stream of writes by the VM before a section. Every instruction comes after these writes.
const byVM = NumStreams

// blockSegments is the maximum number of segments in a block: large enough to keep the list of
// blocks short, and small enough that moving a block is cheap.
const blockSegments = 64

func newShadow(size Bytes) *shadow {
	first := make([]segment, 1, blockSegments)
	first[0].buffer = NoBuffer
	return &shadow{blocks: [][]segment{first}, size: size}
}

// cursor is a position in the list.
type cursor struct{ block, at int }

// find returns the position of the segment that holds the byte at addr.
func (s *shadow) find(addr Bytes) cursor {
	lo, hi := 0, len(s.blocks)
	for hi-lo > 1 {
		if mid := (lo + hi) / 2; s.blocks[mid][0].start <= addr {
			lo = mid
		} else {
			hi = mid
		}
	}
	b := s.blocks[lo]
	i, j := 0, len(b)
	for j-i > 1 {
		if mid := (i + j) / 2; b[mid].start <= addr {
			i = mid
		} else {
			j = mid
		}
	}
	return cursor{lo, i}
}

func (s *shadow) at(c cursor) *segment { return &s.blocks[c.block][c.at] }

// next moves a cursor to the next segment. It returns false if there is none.
func (s *shadow) next(c *cursor) bool {
	c.at++
	if c.at == len(s.blocks[c.block]) {
		c.block, c.at = c.block+1, 0
	}
	return c.block < len(s.blocks)
}

// cut splits the segment that holds addr, if necessary, and returns the position of the one that starts there.
func (s *shadow) cut(addr Bytes) cursor {
	c := s.find(addr)
	seg := *s.at(c)
	if seg.start == addr {
		return c
	}
	seg.start = addr
	b := s.blocks[c.block]
	if len(b) == blockSegments {
		half := make([]segment, blockSegments/2, blockSegments)
		copy(half, b[blockSegments/2:])
		s.blocks[c.block] = b[:blockSegments/2]
		s.blocks = slices.Insert(s.blocks, c.block+1, half)
		if c.at >= blockSegments/2 {
			c = cursor{c.block + 1, c.at - blockSegments/2}
		}
		b = s.blocks[c.block]
	}
	c.at++
	s.blocks[c.block] = slices.Insert(b, c.at, seg)
	return c
}

// visit splits segments at the ends of a range, calls f for each segment of the range, and merges neighbours
// that are then equal.
func (s *shadow) visit(lo, hi Bytes, f func(lo, hi Bytes, st *state)) {
	if lo >= hi {
		return
	}
	if hi < s.size {
		s.cut(hi)
	}
	c := s.cut(lo)
	for {
		seg := s.at(c)
		after := c
		end := s.size
		more := s.next(&after)
		if more {
			end = s.at(after).start
		}
		f(seg.start, min(end, hi), &seg.state)
		if c.at > 0 && seg.start > lo && s.blocks[c.block][c.at-1].state == seg.state {
			s.blocks[c.block] = slices.Delete(s.blocks[c.block], c.at, c.at+1)
			if after.block == c.block {
				after.at--
			}
		}
		if !more || end >= hi {
			return
		}
		c = after
	}
}

// replace sets the state of an entire range.
func (s *shadow) replace(lo, hi Bytes, st state) {
	if lo >= hi {
		return
	}
	if hi < s.size {
		s.cut(hi)
	}
	c := s.cut(lo)
	s.at(c).state = st
	c.at++
	for c.block < len(s.blocks) {
		b := s.blocks[c.block]
		end := c.at
		for end < len(b) && b[end].start < hi {
			end++
		}
		whole := end == len(b)
		switch {
		case c.at == 0 && whole:
			s.blocks = slices.Delete(s.blocks, c.block, c.block+1)
			continue
		default:
			s.blocks[c.block] = slices.Delete(b, c.at, end)
		}
		if !whole {
			return
		}
		c = cursor{c.block + 1, 0}
	}
}

// owned is a range of bytes that a section has written, with the buffer that owns them at the section's end.
type owned struct {
	lo, hi Bytes
	buffer uint32
	writer access
}

// written lists the ranges that a section has written.
func (s *shadow) written() []owned {
	var list []owned
	for i, b := range s.blocks {
		for j := range b {
			hi := s.size
			switch {
			case j+1 < len(b):
				hi = b[j+1].start
			case i+1 < len(s.blocks):
				hi = s.blocks[i+1][0].start
			}
			if b[j].writer.number == 0 {
				continue
			}
			if n := len(list); n > 0 && list[n-1].hi == b[j].start && list[n-1].buffer == b[j].buffer && list[n-1].writer == b[j].writer {
				list[n-1].hi = hi
				continue
			}
			list = append(list, owned{b[j].start, hi, b[j].buffer, b[j].writer})
		}
	}
	return list
}
