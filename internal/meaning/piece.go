package meaning

import "slices"

// rectangle is a part of a value: rows, and an interval of columns. Row i of n*batch rows is that of token first + i/batch of sequence
// sequence + i%batch. Rows of parameters have batch 1 and sequence 0.
type rectangle struct {
	sequence, batch, first, n int64
	cols                      interval
	order                     int64 // 0: as described; otherwise, rows are numbered in an order of experts: see rules_experts.go
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
	*content        // nil if the bytes have not been written: the rectangle has as many rows as there are bytes
	made     site   // the instruction that computed its first element
	size     int32  // bytes of an element
	anywhere bool   // every element is the same, such as 0: the rectangle has only the right number of elements
	part     *share // while a rule uses an incomplete sum as if it were complete: what it lacks
}

func (p *piece) length() int64 {
	if p.content == nil {
		return p.n
	}
	return p.elements() * int64(p.size)
}

func hole(bytes int64) piece { return piece{rectangle: rectangle{n: bytes}} }

// uniform returns n elements with the same content.
func uniform(c *content, n, size int64) piece {
	return piece{rectangle: matrix(interval{0, n}, full), content: c, anywhere: true, size: int32(size)}
}

// slice appends the part of a piece between two bytes, as one or more pieces. It returns false if an element is cut.
func (p *piece) slice(list []piece, lo, hi int64) ([]piece, bool) {
	if lo == 0 && hi == p.length() {
		return join(list, *p), true
	}
	if p.content == nil {
		return join(list, hole(hi-lo)), true
	}
	size := int64(p.size)
	if lo%size != 0 || hi%size != 0 {
		return list, false
	}
	lo, hi = lo/size, hi/size
	if p.anywhere {
		out := uniform(p.content, hi-lo, size)
		out.made = p.made
		return join(list, out), true
	}
	for lo < hi {
		r, n := p.largest(lo, hi)
		list = join(list, piece{rectangle: r, content: p.content.settled(r), made: p.made, size: p.size, part: p.part})
		lo += n
	}
	return list, true
}

// largest returns the largest rectangle that begins at element lo and ends at or before element hi, and its size.
func (r rectangle) largest(lo, hi int64) (rectangle, int64) {
	width := r.cols.size()
	row, col := lo/width, lo%width
	token, sequence := row/r.batch, row%r.batch
	out := rectangle{sequence: r.sequence + sequence, batch: 1, first: r.first + token, n: 1, cols: r.cols, order: r.order}
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
	for len(list) > 0 && list[len(list)-1].absorb(&p) {
		p, list = list[len(list)-1], list[:len(list)-1]
	}
	return append(list, p)
}

// absorb adds the piece after this one, if the union is a rectangle.
func (p *piece) absorb(q *piece) bool {
	if p.content == nil || q.content == nil {
		if p.content != q.content {
			return false
		}
		p.n += q.n
		return true
	}
	if p.size != q.size || p.anywhere != q.anywhere || p.order != q.order {
		return false
	}
	r := p.rectangle
	switch {
	case p.anywhere, p.cols == q.cols && p.sequence == q.sequence && p.batch == q.batch && p.first+p.n == q.first:
		r.n += q.n
	case p.n == 1 && q.n == 1 && p.first == q.first && p.cols == q.cols && p.sequence+p.batch == q.sequence:
		r.batch += q.batch
	case p.count() == 1 && q.count() == 1 && p.first == q.first && p.sequence == q.sequence && p.cols.hi == q.cols.lo:
		r.cols.hi = q.cols.hi
	default:
		return false
	}
	if !p.equal(q.content) || !p.anywhere && p.settled(r) != p.content {
		return false // where the union is complete, but not each piece, leave them as they are
	}
	p.rectangle = r
	return true
}
