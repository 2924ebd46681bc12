package vm

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"sppo.dev/ir"
	"sppo.dev/vm/store"
)

// area is a rectangle of a tensor's elements.
type area struct{ row, col, rows, cols int64 }

func (a area) empty() bool { return a.rows <= 0 || a.cols <= 0 }

func (a area) and(b area) area {
	row, col := max(a.row, b.row), max(a.col, b.col)
	return area{row, col, min(a.row+a.rows, b.row+b.rows) - row, min(a.col+a.cols, b.col+b.cols) - col}
}

// without returns the part of an area that is outside another area, as up to four areas.
func (a area) without(b area) (rest []area) {
	c := a.and(b)
	if c.empty() {
		return []area{a}
	}
	for _, x := range []area{
		{a.row, a.col, c.row - a.row, a.cols},
		{c.row + c.rows, a.col, a.row + a.rows - c.row - c.rows, a.cols},
		{c.row, a.col, c.rows, c.col - a.col},
		{c.row, c.col + c.cols, c.rows, a.col + a.cols - c.col - c.cols},
	} {
		if !x.empty() {
			rest = append(rest, x)
		}
	}
	return rest
}

// savedPart is an area of an entry that a rank writes to checkpoints, with the state that contains it.
type savedPart struct {
	area
	of   *entry
	held rectangle
}

func (p *savedPart) bytes() int64 {
	return p.rows * p.cols * int64(p.held.view.DType.Bytes())
}

// holder is a rank's state that contains part of an entry.
type holder struct {
	rank int
	held rectangle
}

// divide assigns parts of entries to ranks, so that each element is written once and ranks with equal contents
// share the work. Smaller states are used first: where a tensor is held both whole and in slices, the slices
// are written, so no rank writes more than its share of the state. All processes of a job compute the same
// assignment.
func divide(p *ir.Program) ([][]savedPart, error) {
	type key struct{ code, tensor, role int }
	states := map[key][]*ir.State{}
	for c := range p.Codes {
		for i := range p.Codes[c].States {
			s := &p.Codes[c].States[i]
			k := key{c, int(s.Tensor), int(s.Role)}
			states[k] = append(states[k], s)
		}
	}
	var candidates []holder // of one entry at a time, because there may be millions
	parts, load := make([][]savedPart, len(p.Ranks)), make([]int64, len(p.Ranks))
	entries := entriesOf(p)
	for i := range entries {
		e := &entries[i]
		candidates = candidates[:0]
		for r := range p.Ranks {
			for _, s := range states[key{int(p.Ranks[r].Code), e.tensor, int(e.role)}] {
				candidates = append(candidates, holder{r, rectangleOf(&p.Tensors[e.tensor], s, p.Ranks[r].Consts)})
			}
		}
		slices.SortStableFunc(candidates, func(a, b holder) int {
			return cmp.Or(cmp.Compare(a.held.rows*a.held.cols, b.held.rows*b.held.cols), cmp.Compare(load[a.rank], load[b.rank]))
		})
		left := []area{{0, 0, e.Shape[0], e.Shape[1]}}
		for _, c := range candidates {
			var rest []area
			for _, a := range left {
				mine := a.and(area{c.held.row0, c.held.col0, min(c.held.rows, c.held.end-c.held.row0), c.held.cols})
				if mine.empty() {
					rest = append(rest, a)
					continue
				}
				part := savedPart{mine, e, c.held}
				parts[c.rank], load[c.rank] = append(parts[c.rank], part), load[c.rank]+part.bytes()
				rest = append(rest, a.without(mine)...)
			}
			left = rest
		}
		if len(left) > 0 {
			return nil, fmt.Errorf("no rank has %[3]d rows of %[1]s of %[2]s, from row %[4]d on", e.role, e.Tensor.Tensor, left[0].rows, left[0].row)
		}
	}
	return parts, nil
}

// blockBytes is the number of bytes read from a device, or written to a file, at a time.
const blockBytes = 16 << 20

// stream reads a part from its device and writes it to w. It runs on the rank's goroutine.
func (p *savedPart) stream(d Device, w io.Writer) error {
	size := int64(p.held.view.DType.Bytes())
	each := max(1, blockBytes/(p.held.cols*size))
	block, line := make([]byte, min(each, p.rows)*p.held.cols*size), p.held.cols*size
	from := (p.col - p.held.col0) * size
	for row := int64(0); row < p.rows; row += each {
		n := min(each, p.rows-row)
		b := block[:n*line]
		if err := d.Read(p.held.band(p.row-p.held.row0+row, n), b); err != nil {
			return err
		}
		if p.cols < p.held.cols { // leave out the other columns
			for r := range n {
				copy(b[r*p.cols*size:(r+1)*p.cols*size], b[r*line+from:])
			}
			b = b[:n*p.cols*size]
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
	}
	return nil
}

// fill reads a part that spans all columns from its device straight into memory, without an intermediate block.
func (p *savedPart) fill(d Device, to *filled) error {
	each := max(1, blockBytes/(p.held.cols*int64(p.held.view.DType.Bytes())))
	for row := int64(0); row < p.rows; row += each {
		band := p.held.band(p.row-p.held.row0+row, min(each, p.rows-row))
		n := int(band.Bytes())
		if n > len(to.memory)-to.n {
			return errCopyFull
		}
		if err := d.Read(band, to.memory[to.n:to.n+n]); err != nil {
			return err
		}
		to.n += n
	}
	return nil
}

// shardPart converts a part to a store.Part.
func (p *savedPart) shardPart(write func(w io.Writer) error) store.Part {
	return store.Part{Of: &p.of.Tensor, Row: p.row, Col: p.col, Rows: p.rows, Cols: p.cols, Write: write}
}

// CopyBytes returns, for each rank, the host memory needed to copy its part of a checkpoint that is written
// during training.
func CopyBytes(p *ir.Program) (bytes []ir.Bytes, err error) {
	all, err := divide(p)
	for _, parts := range all {
		bytes = append(bytes, copyBytes(parts))
	}
	return bytes, err
}

func copyBytes(parts []savedPart) (sum ir.Bytes) {
	for i := range parts {
		sum += ir.Bytes(parts[i].bytes())
	}
	return sum
}
