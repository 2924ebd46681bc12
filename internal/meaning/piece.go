package meaning

import (
	"slices"

	"sppo.dev/ir"
)

// rectangle is a part of a value: rows, and an interval of columns. Row i of n*batch rows is that of token first + i/batch of sequence
// sequence + i%batch. Rows of parameters have batch 1 and sequence 0.
type rectangle struct {
	sequence, batch, first, n int64
	cols                      interval
}

// matrix returns a rectangle whose rows are an interval.
func matrix(rows, cols interval) rectangle {
	return rectangle{batch: 1, first: rows.lo, n: rows.size(), cols: cols}
}

// scalars returns a rectangle of n numbers that belong together.
func scalars(n int64) rectangle { return matrix(full, interval{0, n}) }

func (r rectangle) rows() interval { return interval{r.first, r.first + r.n} }
func (r rectangle) count() int64   { return r.n * r.batch }
func (r rectangle) elements() int64 {
	return r.n * r.batch * r.cols.size()
}

// with returns the same rows with other columns.
func (r rectangle) with(cols interval) rectangle {
	r.cols = cols
	return r
}

// tokens returns the rows as indices of a sum.
func (r rectangle) tokens() box {
	return box{{r.sequence, r.sequence + r.batch}, r.rows(), full, full}
}

// content says what the elements of a rectangle are: a value, plus incomplete sums. It is never changed.
type content struct {
	value value
	parts []part
	made  site
	from  site // made its first operand
}

// part is an incomplete sum: a term, summed over some of its indices, times a factor.
type part struct {
	*term
	cover  cover
	factor float64
}

// site is an instruction of a rank.
type site struct{ rank, index int32 }

// equal reports whether two contents are the same.
func (c *content) equal(d *content) bool {
	if c == d {
		return true
	}
	if c == nil || d == nil || c.value != d.value || len(c.parts) != len(d.parts) {
		return false
	}
	for i := range c.parts {
		p, q := &c.parts[i], &d.parts[i]
		if p.term != q.term || p.factor != q.factor || !slices.Equal(p.cover, q.cover) {
			return false
		}
	}
	return true
}

// piece is a range of memory: a rectangle, row by row.
type piece struct {
	rectangle
	*content          // nil if the bytes have not been written
	anywhere bool     // every element is the same, such as 0: the rectangle has only the right number of elements
	size     int64    // bytes of an element
	bytes    int64    // of the range, if nothing has been written
	part     interval // while a rule uses an incomplete sum as if it were complete: its shares
}

func (p *piece) length() int64 {
	if p.content == nil {
		return p.bytes
	}
	return p.elements() * p.size
}

func hole(bytes int64) piece { return piece{bytes: bytes} }

// uniform returns n elements with the same content.
func uniform(c *content, n, size int64) piece {
	return piece{rectangle: matrix(interval{0, n}, full), content: c, anywhere: true, size: size}
}

// slice appends the part of a piece between two bytes, as one or more pieces. It returns false if an element is cut.
func (p *piece) slice(list []piece, lo, hi int64) ([]piece, bool) {
	if lo == 0 && hi == p.length() {
		return join(list, *p), true
	}
	if p.content == nil {
		return join(list, hole(hi-lo)), true
	}
	if lo%p.size != 0 || hi%p.size != 0 {
		return list, false
	}
	lo, hi = lo/p.size, hi/p.size
	if p.anywhere {
		return join(list, uniform(p.content, hi-lo, p.size)), true
	}
	for lo < hi {
		r, n := p.largest(lo, hi)
		list = join(list, piece{rectangle: r, content: p.content.settled(r), size: p.size, part: p.part})
		lo += n
	}
	return list, true
}

// largest returns the largest rectangle that begins at element lo and ends at or before element hi, and its size.
func (r rectangle) largest(lo, hi int64) (rectangle, int64) {
	width := r.cols.size()
	row, col := lo/width, lo%width
	token, sequence := row/r.batch, row%r.batch
	out := rectangle{sequence: r.sequence + sequence, batch: 1, first: r.first + token, n: 1, cols: r.cols}
	switch {
	case col > 0 || hi-lo < width: // part of a row
		out.cols = interval{r.cols.lo + col, r.cols.lo + min(width, col+hi-lo)}
	case sequence > 0 || hi-lo < width*r.batch: // part of the sequences of a token
		out.batch = min(r.batch-sequence, (hi-lo)/width)
	default:
		out.batch, out.n = r.batch, (hi-lo)/(width*r.batch)
	}
	return out, out.elements()
}

// join appends a piece to a list, and merges it with those before it where they make up a rectangle.
func join(list []piece, p piece) []piece {
	if p.length() == 0 {
		return list
	}
	for len(list) > 0 {
		merged, ok := list[len(list)-1].merged(&p)
		if !ok {
			break
		}
		list, p = list[:len(list)-1], merged
	}
	return append(list, p)
}

// merged returns the union of a piece and the one after it, if that is a rectangle.
func (p *piece) merged(q *piece) (piece, bool) {
	out := *p
	switch {
	case p.content == nil || q.content == nil:
		out.bytes += q.bytes
		return out, p.content == nil && q.content == nil
	case p.size != q.size || p.anywhere != q.anywhere || !p.equal(q.content):
		return out, false
	case p.anywhere:
		out.n += q.n
		return out, true
	case p.cols == q.cols && p.sequence == q.sequence && p.batch == q.batch && p.first+p.n == q.first:
		out.n += q.n
	case p.n == 1 && q.n == 1 && p.first == q.first && p.cols == q.cols && p.sequence+p.batch == q.sequence:
		out.batch += q.batch
	case p.count() == 1 && q.count() == 1 && p.first == q.first && p.sequence == q.sequence && p.cols.hi == q.cols.lo:
		out.cols.hi = q.cols.hi
	default:
		return out, false
	}
	if s := out.settled(out.rectangle); s != out.content {
		return *p, false // the union is complete, but not each piece: leave them as they are
	}
	return out, true
}

// memory is an arena: adjacent segments in ascending order, without gaps.
type memory struct{ segments []segment }

// segment is a piece that begins at a byte.
type segment struct {
	lo int64
	piece
}

func newMemory(size ir.Bytes) *memory {
	return &memory{segments: []segment{{0, hole(int64(size))}}}
}

// find returns the index of the segment that has a byte.
func (m *memory) find(at int64) int {
	lo, hi := 0, len(m.segments)
	for hi-lo > 1 {
		if mid := (lo + hi) / 2; m.segments[mid].lo <= at {
			lo = mid
		} else {
			hi = mid
		}
	}
	return lo
}

// read returns the pieces between two bytes. It returns false if an element is cut.
func (m *memory) read(lo, hi int64) (list []piece, ok bool) {
	for i := m.find(lo); lo < hi; i++ {
		s := &m.segments[i]
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
	first, last := m.find(lo), m.find(hi-1)
	var fresh []segment
	s := &m.segments[first]
	if s.lo < lo {
		fresh = appendCut(fresh, s, 0, lo-s.lo)
	}
	at := lo
	for i := range list {
		fresh = append(fresh, segment{at, list[i]})
		at += list[i].length()
	}
	s = &m.segments[last]
	if end := s.lo + s.length(); end > hi {
		fresh = appendCut(fresh, s, hi-s.lo, end-s.lo)
	}
	m.segments = slices.Replace(m.segments, first, last+1, fresh...)
}

// appendCut appends what is left of a segment. Where an element is cut, nothing is left.
func appendCut(list []segment, s *segment, lo, hi int64) []segment {
	pieces, ok := s.slice(nil, lo, hi)
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
