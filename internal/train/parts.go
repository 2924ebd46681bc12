package train

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"sppo.dev/internal/train/store"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// area is a rectangle of a tensor's elements.
type area struct{ row, col, rows, cols int64 }

func (a area) empty() bool { return a.rows <= 0 || a.cols <= 0 }

func (a area) elements() int64 { return a.rows * a.cols }

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
	return p.elements() * int64(p.held.view.DType.Bytes())
}

// holder is a rank's state that contains part of an entry, without padding.
type holder struct {
	area
	rank, nth int   // the state is the nth with the entry's tensor and role on its rank
	size      int64 // number of elements of the state, with padding
}

// stateKey names the states of a code that hold a tensor in a role.
type stateKey struct {
	code   int32
	tensor int
	role   ir.Role
}

// division assigns parts of entries to the ranks of a program.
type division struct {
	program *ir.Program
	states  map[stateKey][]*ir.State
	load    []ir.Bytes // what each rank writes
	// Where no element of an entry is held twice, nothing is left to choose, and entries whose states have the same extents and
	// places have the same parts. Most layers are alike, and a job of thousands of ranks has millions of parts.
	parts map[string][]holder

	candidates []holder // of one entry, kept for the next
}

// divide assigns parts of entries to ranks, so that each element is written once and ranks with equal contents
// share the work. Smaller states are used first: where a tensor is held both whole and in slices, the slices
// are written, so no rank writes more than its share of the state. All processes of a job compute the same
// assignment. It returns the parts of the given ranks, by rank, and the number of bytes that each rank writes.
func divide(p *ir.Program, ranks []*rank) (parts [][]savedPart, load []ir.Bytes, err error) {
	d := division{program: p, states: map[stateKey][]*ir.State{}, load: make([]ir.Bytes, len(p.Ranks)), parts: map[string][]holder{}}
	for c := range p.Codes {
		for i := range p.Codes[c].States {
			s := &p.Codes[c].States[i]
			k := stateKey{int32(c), int(s.Tensor), s.Role}
			d.states[k] = append(d.states[k], s)
		}
	}
	parts, mine := make([][]savedPart, len(p.Ranks)), make([]bool, len(p.Ranks))
	for _, r := range ranks {
		mine[r.index] = true
	}
	entries := entriesOf(p)
	for i := range entries {
		e := &entries[i]
		states := d.held(e)
		assigned, err := d.assign(e, states)
		if err != nil {
			return nil, nil, err
		}
		for _, h := range assigned {
			s := states[p.Ranks[h.rank].Code][h.nth]
			d.load[h.rank] += ir.Bytes(h.elements()) * s.View.DType.Bytes()
			if mine[h.rank] {
				parts[h.rank] = append(parts[h.rank], savedPart{h.area, e, rectangleOf(&p.Tensors[e.tensor], s, p.Ranks[h.rank].Consts)})
			}
		}
	}
	return parts, d.load, nil
}

// held returns the states that hold an entry, by code.
func (d *division) held(e *entry) [][]*ir.State {
	states := make([][]*ir.State, len(d.program.Codes))
	for c := range states {
		states[c] = d.states[stateKey{int32(c), e.tensor, e.role}]
	}
	return states
}

// assign returns which rank writes which part of an entry, from which of its states. The entry's states are given by code.
func (d *division) assign(e *entry, states [][]*ir.State) (assigned []holder, err error) {
	key := describe(e, states)
	if assigned, ok := d.parts[key]; ok {
		return assigned, nil
	}
	candidates, left := d.candidates[:0], []area{{0, 0, e.Shape[0], e.Shape[1]}}
	twice := -left[0].elements()
	for r := range d.program.Ranks {
		for nth, s := range states[d.program.Ranks[r].Code] {
			x := rectangleOf(&d.program.Tensors[e.tensor], s, d.program.Ranks[r].Consts)
			c := holder{left[0].and(area{x.row0, x.col0, min(x.rows, x.end-x.row0), x.cols}), r, nth, x.rows * x.cols}
			if !c.empty() {
				candidates = append(candidates, c)
				twice += c.elements()
			}
		}
	}
	d.candidates = candidates
	slices.SortStableFunc(candidates, func(a, b holder) int {
		return cmp.Or(cmp.Compare(a.size, b.size), cmp.Compare(d.load[a.rank], d.load[b.rank]))
	})
	for _, c := range candidates {
		var rest []area
		for _, a := range left {
			mine := a.and(c.area)
			if mine.empty() {
				rest = append(rest, a)
				continue
			}
			assigned = append(assigned, holder{mine, c.rank, c.nth, c.size})
			rest = append(rest, a.without(mine)...)
		}
		left = rest
	}
	if len(left) > 0 {
		return nil, fmt.Errorf("no rank has %[3]d rows of %[1]s of %[2]s, from row %[4]d on", e.role, e.Tensor.Tensor, left[0].rows, left[0].row)
	}
	if twice == 0 {
		d.parts[key] = assigned
	}
	return assigned, nil
}

// describe returns what the areas depend on that the ranks hold of an entry.
func describe(e *entry, states [][]*ir.State) string {
	text := fmt.Append(nil, e.Shape)
	for c := range states {
		for _, s := range states[c] {
			text = fmt.Append(text, c, s.View.Shape, s.View.DType, s.Row0, s.Col0, s.End)
		}
	}
	return string(text)
}

// blockBytes is the number of bytes read from a device, or written to a file, at a time.
const blockBytes = 16 << 20

// stream reads a part from its device and writes it to w. It runs on the rank's goroutine.
func (p *savedPart) stream(d vm.Device, w io.Writer) error {
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
func (p *savedPart) fill(d vm.Device, to *filled) error {
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
	_, bytes, err = divide(p, nil)
	return bytes, err
}
