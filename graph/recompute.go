package graph

import "sppo/ir"

// Policies of recomputation: what of a layer the backward pass makes again instead of keeping.
const (
	RecomputeNone          = "none"
	RecomputeSelective     = "selective"      // results of norms and activation functions: no matmul is repeated
	RecomputeKeepAttention = "keep_attention" // all but the layer's input and attention's result
	RecomputeFull          = "full"           // all but the layer's input
)

// recomputes says for each policy which nodes' results are made again. K and V are never among them: later
// subsequences read them anyway.
var recomputes = map[string]func(*Node) bool{
	RecomputeNone:          moves,
	RecomputeSelective:     func(n *Node) bool { return moves(n) || elementwise(n) },
	RecomputeKeepAttention: func(n *Node) bool { return n.Op != ir.Attention },
	RecomputeFull:          func(*Node) bool { return true },
}

// moves are the nodes that bring data in another form which is kept anyway. An exchange of rows for heads is not among
// them: attention's gradient needs Q by heads, and nothing needs it by rows.
func moves(n *Node) bool {
	switch n.Op {
	case ir.AllGather, ir.LoadTokens:
		return true
	case ir.AllToAll:
		return n.Attrs[attrIndex(n.Op, "inverse")].Value.Bits != 0
	}
	return false
}

func elementwise(n *Node) bool {
	switch n.Op {
	case ir.LayerNorm, ir.RMSNorm, ir.Gelu, ir.SwiGLU:
		return true
	}
	return false
}
