package ir

import (
	"fmt"
)

// Collective describes an opcode that all members of a group execute together: which bytes of which
// member go where. It is the only description of a collective. The verifier, the transports of all
// devices and the cost model read it.
type Collective struct {
	// Transfer returns the bytes that member `to` of a group of n gets from the x of member `from`. Transfers
	// from consecutive members to the same place in y are added up, in f32 and in group order.
	Transfer func(in *Instr, to, from, n int64) Transfer
	// Everywhere means that, at the end, the result of each member is copied to the same place on all other
	// members.
	Everywhere bool
	// Members returns the group size that the shapes of the operands imply, or 0 if they fit any group.
	Members func(in *Instr) int64
	// Check checks the conditions that do not depend on the group.
	Check func(in *Instr) error
	// Shaped means that the collective depends on the rows and columns of its operands, and not only on their sizes.
	Shaped bool
	// Traffic is the path of the bytes in a fast implementation.
	Traffic Traffic
}

// Traffic is the path of a collective's bytes among t members.
type Traffic uint8

// Paths.
const (
	TrafficRing      Traffic = iota // t-1 steps; in each, every member passes on 1/t of the whole
	TrafficNeighbour                // one step, in which every member passes on the whole
	TrafficDirect                   // every member sends 1/t of the whole to every other at the same time
)

// Transfer is a rectangle of bytes that is sent from one member's x to another member's y.
type Transfer struct {
	Rows, Width      Bytes // 0: nothing is transferred
	X, Y             Bytes // the first byte, from the start of the operand
	XStride, YStride Bytes // from one row to the next
}

// run returns a transfer of contiguous bytes.
func run(x, y, n Bytes) Transfer { return Transfer{Rows: 1, Width: n, X: x, Y: y} }

// Size returns the number of bytes transferred.
func (p Transfer) Size() Bytes { return p.Rows * p.Width }

// Packed returns the same transfer from an x that holds only the transferred rows, contiguously from byte 0
// onwards.
func (p Transfer) Packed() Transfer {
	p.X, p.XStride = 0, p.Width
	return p.simple()
}

// simple merges rows that are contiguous on both sides.
func (p Transfer) simple() Transfer {
	if p.Rows > 1 && p.XStride == p.Width && p.YStride == p.Width {
		return run(p.X, p.Y, p.Size())
	}
	return p
}

// end returns the position after the last byte on one side of the transfer, given that side's first byte and
// stride.
func (p Transfer) end(first, stride Bytes) Bytes {
	if p.Size() == 0 {
		return 0
	}
	return Plus(first, Plus(times(p.Rows-1, stride), p.Width))
}

// collectives lists the rows by opcode. It is separate from Ops because its functions look up operands in Ops.
var collectives = [NumOps]*Collective{
	AllGather: {
		Transfer: func(in *Instr, _, from, _ int64) Transfer {
			n := in.Args[1].Bytes()
			return run(0, Bytes(from)*n, n)
		},
		Members: gatherRatio, Check: checkGather,
	},
	ReduceScatter: {
		Transfer: func(in *Instr, to, _, _ int64) Transfer {
			n := in.Args[0].Bytes()
			return run(Bytes(to)*n, 0, n)
		},
		Members: gatherRatio, Check: checkGather,
	},
	AllReduce: {
		Transfer: func(in *Instr, to, _, n int64) Transfer {
			size, elements := in.Args[0].DType.Bytes(), in.Args[0].Elements()
			first, end := elements*to/n, elements*(to+1)/n
			return run(Bytes(first)*size, Bytes(first)*size, Bytes(end-first)*size)
		},
		Everywhere: true,
	},
	Rotate: {
		Transfer: func(in *Instr, to, from, n int64) Transfer {
			if (from+1)%n != to {
				return Transfer{}
			}
			return run(0, 0, in.Args[0].Bytes())
		},
		Check: checkRotate, Traffic: TrafficNeighbour,
	},
	AllToAll: {
		Transfer: allToAllTransfer,
		Members:  allToAllRatio, Check: checkAllToAll, Shaped: true, Traffic: TrafficDirect,
	},
}

// Collective returns the row of a collective, or nil for other opcodes.
func (op Op) Collective() *Collective { return collectives[op] }

// CollectiveWork returns the work of a collective whose largest operand, the whole, has n bytes.
func CollectiveWork(op Op, n Bytes) Work { return Work{Kind: WorkCollective, Op: op, Bytes: n} }

// Meeting lists the transfers of one member of a collective, indexed by the other member.
type Meeting struct {
	Gets       []Transfer // received from the x of each member
	Gives      []Transfer // sent from its own x to each member
	Everywhere bool       // the result is then copied to all members
}

// Meeting returns the transfers of a member of a group of n. It may return an error for a program
// that has not been verified.
func (in *Instr) Meeting(member, n int) (Meeting, error) {
	c := in.Op.Collective()
	if err := in.CheckRule(); err != nil {
		return Meeting{}, err
	}
	if members := in.members(); members != 0 && members != int64(n) {
		return Meeting{}, fmt.Errorf("%s from %d to %d bytes is for %d ranks, but the group has %d", in.Info().Name, in.X().Bytes(), in.Y().Bytes(), members, n)
	}
	m := Meeting{Everywhere: c.Everywhere}
	for other := range n {
		m.Gets = append(m.Gets, c.Transfer(in, int64(member), int64(other), int64(n)).simple())
		m.Gives = append(m.Gives, c.Transfer(in, int64(other), int64(member), int64(n)).simple())
	}
	return m, m.check(in)
}

// check checks that transfers lie inside the operands, and that the elements are f32 or bf16 if they are added
// or moved by rows.
func (m *Meeting) check(in *Instr) error {
	for i, g := range m.Gets {
		if out := m.Gives[i]; g.end(g.Y, g.YStride) > in.Y().Bytes() || max(g.end(g.X, g.XStride), out.end(out.X, out.XStride)) > in.X().Bytes() {
			return fmt.Errorf("%s of %d bytes to %d leaves its operands", in.Info().Name, in.X().Bytes(), in.Y().Bytes())
		}
	}
	if t := in.X().DType; m.Computes() && t != F32 && t != BF16 {
		return fmt.Errorf("%s cannot be summed", t)
	}
	return nil
}

// Computes reports whether values are added or rows are not contiguous, so that plain copies are not enough.
func (m *Meeting) Computes() bool {
	for i, g := range m.Gets {
		if g.Rows > 1 || m.Gives[i].Rows > 1 || m.Adds(i) {
			return true
		}
	}
	return false
}

// Adds reports whether the transfer from a member is added to the one from the previous member.
func (m *Meeting) Adds(i int) bool {
	return i > 0 && m.Gets[i].Size() > 0 && m.Gets[i].Size() == m.Gets[i-1].Size() && m.Gets[i].Y == m.Gets[i-1].Y
}

// Sums calls f for each rectangle of the result. The rectangle is the sum of the transfers from members first
// to end-1.
func (m *Meeting) Sums(f func(first, end int) error) error {
	for first, end := 0, 0; first < len(m.Gets); first = end {
		for end = first + 1; end < len(m.Gets) && m.Adds(end); end++ {
		}
		if m.Gets[first].Size() > 0 {
			if err := f(first, end); err != nil {
				return err
			}
		}
	}
	return nil
}

// Y returns the result of a collective. It may be the same operand as X.
func (in *Instr) Y() *View { return &in.Args[0] }

// X returns the operand that a member of a collective contributes.
func (in *Instr) X() *View { return &in.Args[len(in.Args)-1] }

// members returns the group size that the operands imply, or 0 if they fit any group.
func (in *Instr) members() int64 {
	if c := in.Op.Collective(); c.Members != nil {
		return c.Members(in)
	}
	return 0
}

// Differs describes how two members' instructions for a collective differ, or returns "" if they agree.
func (in *Instr) Differs(other *Instr) string {
	switch {
	case in.Op != other.Op:
		return "opcode"
	case in.Stream != other.Stream:
		return "stream"
	}
	for i := range in.Args {
		if in.Args[i].DType != other.Args[i].DType {
			return "element type"
		}
		if in.Args[i].Elements() != other.Args[i].Elements() {
			return "size"
		}
	}
	for i, a := range in.Attrs {
		if in.Info().Attrs[i].Kind != KindGroup && a != other.Attrs[i] {
			return "layout"
		}
	}
	if in.Op.Collective().Shaped && in.Args[0].Rows() != other.Args[0].Rows() {
		return "layout"
	}
	return ""
}

// gatherRatio returns the ratio of the whole's size to the share's size.
func gatherRatio(in *Instr) int64 {
	a, b := in.Args[0].Elements(), in.Args[1].Elements()
	return max(a, b) / min(a, b)
}

// checkGather checks that the size of the whole is a multiple of the share's, and that both have the same type.
func checkGather(in *Instr) error {
	whole, share := in.Args[0], in.Args[1]
	if in.Op == ReduceScatter {
		whole, share = share, whole
	}
	if whole.DType != share.DType {
		return fmt.Errorf("element types %s and %s differ", whole.DType, share.DType)
	}
	if share.Elements() == 0 || whole.Elements()%share.Elements() != 0 {
		return fmt.Errorf("%d elements are not a multiple of %d", whole.Elements(), share.Elements())
	}
	return nil
}

// checkRotate checks that input and output have the same size and type.
func checkRotate(in *Instr) error {
	y, x := in.Args[0], in.Args[1]
	if y.DType != x.DType || y.Elements() != x.Elements() {
		return fmt.Errorf("%d elements of %s do not become %d of %s", x.Elements(), x.DType, y.Elements(), y.DType)
	}
	return nil
}

// checkAllToAll checks that the two sides hold the same elements, apart from copies.
func checkAllToAll(in *Instr) error {
	tall, wide := allToAllSides(in)
	ratio := tall.Rows() / max(wide.Rows(), 1)
	copies := int64(in.Attr("copies").Bits)
	switch {
	case len(tall.Dims()) != 2 || len(wide.Dims()) != 2:
		return fmt.Errorf("both sides have two dimensions")
	case tall.Rows()%wide.Rows() != 0:
		return fmt.Errorf("%d rows are not a multiple of %d", tall.Rows(), wide.Rows())
	case ratio%copies != 0 || wide.Cols() != times(ratio/copies, tall.Cols()):
		return fmt.Errorf("%d columns are not %d members / %d copies times %d", wide.Cols(), ratio, copies, tall.Cols())
	}
	return nil
}

// allToAllRatio returns the group size.
func allToAllRatio(in *Instr) int64 {
	tall, wide := allToAllSides(in)
	return tall.Rows() / wide.Rows()
}

// allToAllSides returns the operand with the rows of all members, and the one with the columns of all.
func allToAllSides(in *Instr) (tall, wide View) {
	if in.Attr("inverse").Bits != 0 {
		return in.Args[1], in.Args[0]
	}
	return in.Args[0], in.Args[1]
}

// allToAllTransfer returns a column block of the sender's rows or, for the inverse, a row block of its columns.
func allToAllTransfer(in *Instr, to, from, n int64) Transfer {
	tall, wide := allToAllSides(in)
	size, rows, copies := tall.DType.Bytes(), Bytes(wide.Rows()), int64(in.Attr("copies").Bits)
	block, row := Bytes(tall.Cols())*size, Bytes(wide.Cols())*size
	if in.Attr("inverse").Bits != 0 {
		return Transfer{Rows: rows, Width: block, X: Bytes(to) * rows * block, XStride: block, Y: Bytes(from/copies) * block, YStride: row}
	}
	return Transfer{Rows: rows, Width: block, X: Bytes(to/copies) * block, XStride: row, Y: Bytes(from) * rows * block, YStride: block}
}
