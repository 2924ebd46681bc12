package memory

import (
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// borrow adds the blocks of other stages' keys and values that have just arrived when a task begins.
func (r *tracker) borrow(t plan.Task) {
	for i := r.rank + 1; i < len(r.plan.Tasks) && r.plan.Mux.Right; i++ {
		if i+r.loans[i].Behind+1 == t.Slot() {
			r.now[TermKV] += r.lentBytes(i, graph.Cache)
		}
	}
}

// lentBytes returns the bytes that this stage holds of another stage's keys and values, or of their gradients.
func (r *tracker) lentBytes(stage int, kind graph.Kind) (n ir.Bytes) {
	l := r.loans[stage]
	return r.keyBytes(kind, l.End-l.First) * ir.Bytes(r.plan.LayersOf(stage))
}

// keyBytes returns the bytes of a layer's keys and values, or of their gradients, for the given number of
// tokens.
func (r *tracker) keyBytes(kind graph.Kind, tokens int64) (n ir.Bytes) {
	rows := tokens * r.sizes[0].Batch
	for _, v := range r.graph.WithKV().Values {
		if v.Kind == kind {
			n += graph.Align(ir.Bytes(rows*v.Cols) * v.DType.Bytes())
		}
	}
	return n
}

// help tracks the bytes that a stage holds between its last forward and its first backward: all borrowed blocks
// with their gradients, and the queries and results in transit in the slot with the most of them.
func (r *tracker) help(t plan.Task) {
	if !r.plan.Mux.Right || r.rank == len(r.plan.Tasks)-1 {
		return
	}
	var blocks, gradients, travels ir.Bytes
	// The next stage needs help only in its first backward, during which it receives its gradients layer by layer.
	at := r.rank + 1
	for i := r.rank + 1; i < len(r.plan.Tasks); i++ {
		if i+r.loans[i].Behind+1 > t.Slot() {
			r.now[TermKV] += r.lentBytes(i, graph.Cache)
		}
		blocks += r.lentBytes(i, graph.Cache)
		if n := r.lentBytes(i, graph.CacheGrad); i > at {
			gradients += n
		} else {
			gradients += n / ir.Bytes(r.plan.LayersOf(i))
		}
	}
	for slot := len(r.sizes); slot < len(r.sizes)+len(r.plan.Tasks)-1; slot++ {
		travels = max(travels, r.travelling(slot))
	}
	r.now[TermKVGrads] += gradients
	r.note(t, travels)
	r.now[TermKV] -= blocks
	r.now[TermKVGrads] -= gradients
}

// travelling returns the bytes of other stages' queries, and of the results for them, that a stage holds while
// it helps in a slot.
func (r *tracker) travelling(slot int) (held ir.Bytes) {
	for _, shared := range r.plan.HelpedTasks(plan.Backward, slot) {
		if shared.Stage > r.rank && r.plan.Helpers(shared) > r.rank {
			rows, stats := r.queryBytes(shared)
			held += 3*rows + 2*stats
		}
	}
	return held
}

// queryBytes returns the bytes of a task's queries, and the bytes of one number per query and head.
func (r *tracker) queryBytes(t plan.Task) (rows, stats ir.Bytes) {
	b := r.graph.Plain(r.graph.FullKind())
	nodes := b.Forward
	for i := range nodes {
		if nodes[i].Op == ir.Attention {
			in := graph.BlockInstr(b, &nodes[i], r.sizes[t.Subsequence])
			return graph.Align(in.Arg("q").Bytes()), graph.Align(in.Arg("lse").Bytes())
		}
	}
	return 0, 0
}

// sharing returns the additional bytes of a layer whose attention is shared: what helpers of this stage send,
// and what this stage holds as a helper of others.
func (r *tracker) sharing(t plan.Task) ir.Bytes {
	helpers := ir.Bytes(r.plan.Helpers(t))
	if helpers == 0 {
		return 0
	}
	rows, stats := r.queryBytes(t)
	others := r.travelling(t.Slot())
	if t.Kind == plan.Forward {
		return (helpers+1)*(rows+stats) + others
	}
	for first, end := r.plan.Returns(t); first < end; first++ { // received gradients that are added to the stage's own
		others += r.keyBytes(graph.CacheGrad, r.plan.Lent(t.Stage, first).End-r.plan.HelpedBlocks(t)[first+1])
	}
	inF32 := rows * ir.Bytes(4/r.graph.DType().Bytes())
	return helpers*rows + inF32 + stats + others
}
