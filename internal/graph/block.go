package graph

import (
	"slices"

	"sppo.dev/ir"
)

// Size holds all numbers that determine the shapes of a task.
type Size struct {
	Sequence int64 // S
	Prefix   int64 // tokens before the subsequence
	Tokens   int64 // n
	Batch    int64 // b, sequences of the microbatch
	SP       int64 // t
	Ring     int64 // r; 0: 1
	Chunk    int64 // first row of the head's chunk
	Rows     int64 // rows of the head's chunk
	Chunks   int64 // most rows in a chunk of the head; 0: LeastChunk
	Piece    int64 // most tokens in a piece of earlier keys, if attention expands latents; 0: none
	Window   int64 // tokens that a query of the layer attends to, including its own; 0: all
}

func (s Size) rings() int64 { return max(1, s.Ring) }

// vocabLocal returns the number of vocabulary entries of a rank, including padding.
func (s Split) vocabLocal(vocab int) int64 { return ceilDiv(int64(vocab), int64(s.SP)) }

// LeastChunk returns the number of rows for which the head's f32 logits take 64 MiB, in multiples of 64.
func (s Split) LeastChunk(vocab int) int64 {
	const bytes = 64 << 20
	return max(bytes/(4*s.vocabLocal(vocab))/64*64, 64)
}

// ChunkRows returns the number of rows per iteration of the head's loop: at most Size.Chunks, in multiples of 64
// if it is at least 64, spread evenly over the subsequence.
func (g *Model) ChunkRows(s Size) int64 {
	rows, most := s.Tokens*s.Batch, s.Chunks
	if most == 0 {
		most = g.LeastChunk(g.Vocab)
	}
	chunks := ceilDiv(rows, most)
	return min(ceilDiv(ceilDiv(rows, chunks), 64)*64, most, rows)
}

// rowCount returns the extent of the first dimension of the value's storage.
func (v *Value) rowCount(s Size) int64 {
	switch v.Rows {
	case Local:
		return s.Tokens * s.Batch / s.SP
	case Full:
		return s.Tokens * s.Batch
	case Held:
		return s.Tokens * s.Batch / s.rings()
	case LocalTokens:
		return s.Tokens / s.SP
	case Whole:
		return s.Sequence * s.Batch
	case WholeTokens:
		return s.Sequence / s.SP
	case WholeLocal:
		return s.Sequence * s.Batch / s.rings()
	case SeenLocal:
		return (s.Prefix + s.Tokens) * s.Batch / s.rings()
	case PerSequence:
		return s.Batch
	case ChunkRows:
		return s.Rows
	case Piece:
		return max(s.Tokens, min(s.Piece, s.Prefix)) * s.Batch
	case Each:
		return v.Count * s.Batch
	}
	return v.Count
}

// Spans reports whether the value has rows for the whole sequence, shared by all its subsequences.
func (v *Value) Spans() bool { return v.Kind != Given && v.Rows == Whole || v.Rows == WholeLocal }

// Given returns the value of kind Given with that name, or Missing.
func (b *Block) Given(name string) int {
	return slices.IndexFunc(b.Values, func(v Value) bool { return v.Kind == Given && v.Name == name })
}

// Bytes returns the size of the value's storage.
func (v *Value) Bytes(s Size) ir.Bytes {
	n := (v.rowCount(s) + v.Padding) * max(v.Cols, 1) * max(v.Planes, 1)
	return ir.Bytes(n) * v.DType.Bytes()
}

// View returns the part of a value's storage that an operand covers. The caller adds the buffer and
// the start of the storage.
func (b *Block) View(a Arg, s Size) ir.View {
	v := &b.Values[a.Value]
	first, rows := v.span(a.Span, s)
	out := ir.View{DType: v.DType, Offset: ir.Bytes(first*max(v.Cols, 1)) * v.DType.Bytes()}
	at := 0
	switch {
	case a.Span == Elements:
		out.Shape[0] = int64(v.Bytes(s) / v.DType.Bytes())
		return out
	case v.Rows == Each && v.Planes > 0:
		out.Shape = [ir.MaxDims]int64{s.Batch, v.Planes, v.Count, v.Cols}
		return out
	}
	if v.Planes > 0 && a.Span != Flat {
		out.Shape[at], at = v.Planes, at+1
	}
	cols := v.Cols
	if a.Heads > 0 {
		rows, cols = rows*a.Heads, cols/a.Heads
	}
	out.Shape[at], at = rows, at+1
	if cols > 0 {
		out.Shape[at] = cols
	}
	return out
}

// span returns the first of the rows that a span covers, and their number.
func (v *Value) span(of Span, s Size) (first, rows int64) {
	rows = v.rowCount(s)
	switch of {
	case Tail, Seen:
		if v.Rows == Full || v.Rows == Piece {
			break
		}
		unit := s.Batch // rows of storage per token
		div := int64(1)
		switch v.Rows {
		case WholeTokens:
			unit, div = 1, s.SP
		case WholeLocal:
			div = s.rings()
		}
		first, rows = s.Prefix*unit/div, s.Tokens*unit/div
		if of == Seen {
			first, rows = 0, first+rows
		}
	case Chunk:
		first, rows = s.Chunk, s.Rows
	case FrontHalf, BackHalf:
		if v.Rows == Whole {
			first, rows = s.Prefix*s.Batch, s.Tokens*s.Batch
		}
		if rows /= 2; of == BackHalf {
			first += rows
		}
	}
	return first, rows
}

// Instr builds the instruction of a node. It calls view to place each operand, and attr for each attribute that
// is not a literal and does not follow from Size, in the order of the opcode's table entry.
func (b *Block) Instr(n *Node, s Size, view func(Arg, ir.View) ir.View, attr func(Attr) ir.Attr) ir.Instr {
	in := ir.Instr{Op: n.Op, Args: make([]ir.View, len(n.Args)), Attrs: make([]ir.Attr, len(n.Attrs))}
	for i, a := range n.Args {
		if a.Value == Missing {
			in.Args[i] = ir.Absent()
			continue
		}
		in.Args[i] = view(a, b.View(a, s))
	}
	for i, a := range n.Attrs {
		switch a.Source {
		case Literal:
			in.Attrs[i] = a.Value
		case FromBatch:
			in.Attrs[i] = ir.Int(s.Batch)
		case FromPrefix:
			in.Attrs[i] = ir.Int(s.Prefix + int64(a.Value.Bits))
		case FromWindow:
			in.Attrs[i] = ir.Int(s.Window)
		case FromLocalPrefix:
			in.Attrs[i] = ir.Int(s.Prefix / s.rings())
		default:
			in.Attrs[i] = attr(a)
		}
	}
	return in
}

// Work returns the work of a node for a given size, before buffers are placed.
func (b *Block) Work(n *Node, s Size) ir.Work {
	in := b.Instr(n, s, func(_ Arg, v ir.View) ir.View { return v }, func(Attr) ir.Attr { return ir.Int(1) })
	return in.Work()
}

// ForwardFlops sums the FLOPs of the forward pass, by kind of work, with all rows of the head in a single chunk.
func (b *Block) ForwardFlops(s Size) map[ir.WorkKind]ir.Flops {
	s.Rows = s.Tokens * s.Batch
	sums := map[ir.WorkKind]ir.Flops{}
	for i := range b.Forward {
		w := b.Work(&b.Forward[i], s)
		sums[w.Kind] += w.Flops
	}
	return sums
}

// UnitLayout returns the offsets of a unit's values in its storage, one after another, each aligned, and their
// total size.
func (b *Block) UnitLayout(u *Unit, s Size) (offsets []ir.Bytes, size ir.Bytes) {
	for _, v := range u.Values {
		at := Align(size)
		offsets = append(offsets, at)
		size = at + b.Values[v].Bytes(s)
	}
	return offsets, size
}

// UnitBytes returns the size of a unit's storage.
func (b *Block) UnitBytes(u *Unit, s Size) ir.Bytes {
	var size ir.Bytes
	for _, v := range u.Values {
		size = Align(size) + b.Values[v].Bytes(s)
	}
	return size
}

// Align rounds a size up to the alignment of buffers.
func Align(n ir.Bytes) ir.Bytes { return (n + ir.Alignment - 1) / ir.Alignment * ir.Alignment }

// ReadsBack reports whether the backward pass reads a value.
func (b *Block) ReadsBack(value int) bool {
	return slices.ContainsFunc(b.Backward, func(n Node) bool { return slices.Contains(n.Reads(), value) })
}

// Finishes reports whether a forward node is the last one that writes to a value.
func (b *Block) Finishes(n *Node, value int) bool {
	for i := range slices.Backward(b.Forward) {
		if slices.Contains(b.Forward[i].Writes(), value) {
			return &b.Forward[i] == n
		}
	}
	return true
}

// BeforeAttention returns the number of forward nodes before the first one that reads K or V. BeforeKVGrads
// returns the number of backward nodes before the first one that reads the gradient of K or V. The
// contributions of other ranks must arrive before these nodes run.
func (b *Block) BeforeAttention() int { return b.firstReader(b.Forward, Cache) }
func (b *Block) BeforeKVGrads() int   { return b.firstReader(b.Backward, CacheGrad) }

func (b *Block) firstReader(nodes []Node, kind Kind) int {
	first := slices.IndexFunc(nodes, func(n Node) bool {
		return slices.ContainsFunc(n.Reads(), func(v int) bool { return b.Values[v].Kind == kind })
	})
	if first < 0 {
		return len(nodes)
	}
	return first
}
