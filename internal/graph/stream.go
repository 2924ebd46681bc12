package graph

import (
	"slices"

	"sppo.dev/ir"
)

// Attends reports whether a node reads K and V of earlier tokens.
func (n *Node) Attends() bool { return n.Op == ir.Attention || n.Op == ir.AttentionGrad }

// LooksBack reports whether the work of a node depends on the number of tokens that precede the subsequence.
func (b *Block) LooksBack(n *Node) bool {
	return n.Attends() || slices.ContainsFunc(n.Args, func(a Arg) bool {
		return a.Value != Missing && (a.Span == Seen || b.Values[a.Value].Rows == SeenLocal)
	})
}

// LoopOf returns where the loop over pieces of the keys begins and ends that a node of a list is part of: if it is part of none, before
// and after the node.
func LoopOf(nodes []Node, i int) (from, end int) {
	from, end = i, i+1
	for from > 0 && nodes[i].Loop > 0 && nodes[from-1].Loop == nodes[i].Loop {
		from--
	}
	for end < len(nodes) && nodes[i].Loop > 0 && nodes[end].Loop == nodes[i].Loop {
		end++
	}
	return from, end
}

// AroundOf returns the nodes of the loop of an attention node of the block.
func (b *Block) AroundOf(n *Node) []Node {
	for _, nodes := range [][]Node{b.Forward, b.Backward, b.Halves[InputGradient]} {
		for i := range nodes {
			if n == &nodes[i] {
				from, end := LoopOf(nodes, i)
				return nodes[from:end]
			}
		}
	}
	panic("internal: a node of another block")
}

// OfPiece returns the size of the nodes of a loop, except attention, for a range of tokens of the keys.
func (s Size) OfPiece(first, end int64) Size {
	s.Prefix, s.Tokens, s.Piece = first, end-first, 0
	return s
}

// Rows narrows an operand of an attention node to a range of tokens of K, V or their gradients. A
// streamed value has a separate block for these tokens; other values contain them at an offset.
func (b *Block) Rows(a Arg, v ir.View, s Size, first, end int64) ir.View {
	if a.Value == Missing {
		return v
	}
	value := &b.Values[a.Value]
	if value.Rows != Piece && value.Kind != Cache && value.Kind != CacheGrad {
		return v
	}
	v.Offset, v.Shape[0] = 0, (end-first)*s.Batch
	if value.Rows == Whole {
		v.Offset = ir.Bytes(first*s.Batch*value.Cols) * value.DType.Bytes()
	}
	return v
}

// Piece returns the instruction of an attention node for the keys and values of a range of tokens. view and
// attr are as for Instr.
func (b *Block) Piece(n *Node, s Size, first, end int64, view func(Arg, ir.View) ir.View, attr func(Attr) ir.Attr) ir.Instr {
	narrow := func(a Arg, v ir.View) ir.View { return view(a, b.Rows(a, v, s, first, end)) }
	in := b.Instr(n, s, narrow, attr)
	in.Attrs[attrIndex(n.Op, "prefix")] = ir.Int(s.Prefix - first)
	if end <= s.Prefix && s.Window == 0 && !in.Arg("positions").Present() { // all queries see the block, whatever their order
		in.Attrs[attrIndex(n.Op, "chunks")], in.Attrs[attrIndex(n.Op, "member")] = ir.Int(0), ir.Int(0)
	}
	return in
}
