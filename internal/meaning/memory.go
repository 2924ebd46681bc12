package meaning

import (
	"slices"

	"sppo.dev/ir"
)

// memory is an arena: adjacent segments in ascending order, without gaps. They are in chunks, so that a write moves few of them.
type memory struct {
	starts []int64     // of chunks
	chunks [][]segment // none is empty
}

// longest is the number of segments at which a chunk is divided.
const longest = 32

// segment is a piece that begins at a byte.
type segment struct {
	lo int64
	piece
}

func newMemory(size ir.Bytes) *memory {
	return &memory{[]int64{0}, [][]segment{{{0, hole(int64(size))}}}}
}

// find returns the chunk that has a byte, and the segment in it.
func (m *memory) find(at int64) (chunk, segment int) {
	lo, hi := 0, len(m.starts)
	for hi-lo > 1 {
		if mid := (lo + hi) / 2; m.starts[mid] <= at {
			lo = mid
		} else {
			hi = mid
		}
	}
	chunk, list := lo, m.chunks[lo]
	lo, hi = 0, len(list)
	for hi-lo > 1 {
		if mid := (lo + hi) / 2; list[mid].lo <= at {
			lo = mid
		} else {
			hi = mid
		}
	}
	return chunk, lo
}

// read appends the pieces between two bytes. It returns false if an element is cut.
func (m *memory) read(list []piece, lo, hi int64) (_ []piece, ok bool) {
	for k, i := m.find(lo); lo < hi; i++ {
		if i == len(m.chunks[k]) {
			k, i = k+1, 0
		}
		s := &m.chunks[k][i]
		end := min(hi, s.lo+s.length())
		if list, ok = s.slice(list, lo-s.lo, end-s.lo); !ok {
			return nil, false
		}
		lo = end
	}
	return list, true
}

// write replaces what is between two bytes.
func (m *memory) write(lo, hi int64, list []piece) {
	var space [8]segment
	fresh := space[:0]
	k, first := m.find(lo)
	n, last := m.find(hi - 1)
	s := &m.chunks[k][first]
	if s.lo < lo {
		fresh = appendCut(fresh, s, 0, lo-s.lo)
	}
	at := lo
	for i := range list {
		fresh = append(fresh, segment{at, list[i]})
		at += list[i].length()
	}
	s = &m.chunks[n][last]
	if end := s.lo + s.length(); end > hi {
		fresh = appendCut(fresh, s, hi-s.lo, end-s.lo)
	}
	if k < n {
		fresh = append(fresh, m.chunks[n][last+1:]...)
		last = len(m.chunks[k]) - 1
		m.chunks, m.starts = slices.Delete(m.chunks, k+1, n+1), slices.Delete(m.starts, k+1, n+1)
	}
	chunk := slices.Replace(m.chunks[k], first, last+1, fresh...)
	m.chunks[k] = chunk
	if len(chunk) <= longest {
		return
	}
	var chunks [][]segment
	var starts []int64
	for part := range slices.Chunk(chunk, longest/2) {
		chunks, starts = append(chunks, slices.Clone(part)), append(starts, part[0].lo)
	}
	m.chunks, m.starts = slices.Replace(m.chunks, k, k+1, chunks...), slices.Replace(m.starts, k, k+1, starts...)
}

// appendCut appends what is left of a segment. Where an element is cut, nothing is left.
func appendCut(list []segment, s *segment, lo, hi int64) []segment {
	var space [4]piece
	pieces, ok := s.slice(space[:0], lo, hi)
	if !ok {
		pieces = []piece{hole(hi - lo)}
	}
	at := s.lo + lo
	for _, p := range pieces {
		list = append(list, segment{at, p})
		at += p.length()
	}
	return list
}
