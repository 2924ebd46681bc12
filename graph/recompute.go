package graph

import "sppo/ir"

// Policies of recomputation: what of a layer the backward pass makes again instead of keeping.
const (
	RecomputeNone          = "none"
	RecomputeSelective     = "selective"      // results of norms and activation functions: no matmul is repeated
	RecomputeKeepAttention = "keep_attention" // all but the layer's input and attention's result
	RecomputeFull          = "full"           // all but the layer's input
)

// recomputes says for each policy which opcodes' results are made again. K and V are never among them: later
// subsequences read them anyway.
var recomputes = map[string]func(ir.Op) bool{
	RecomputeNone:          moves,
	RecomputeSelective:     func(op ir.Op) bool { return moves(op) || elementwise(op) },
	RecomputeKeepAttention: func(op ir.Op) bool { return op != ir.Attention },
	RecomputeFull:          func(ir.Op) bool { return true },
}

// moves are the opcodes that bring data in another form which is kept anyway.
func moves(op ir.Op) bool { return op == ir.AllGather || op == ir.LoadTokens }

func elementwise(op ir.Op) bool {
	switch op {
	case ir.LayerNorm, ir.RMSNorm, ir.Gelu, ir.SwiGLU:
		return true
	}
	return false
}
