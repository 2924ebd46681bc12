package memory

import (
	"slices"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/passes/plan"
)

// Divided weights are gathered and released at the same points as in codegen. During a visit, the weights of
// the current and the next layer are whole. After it, weights stay whole if one of the next two visits needs
// them.

// planVisits records the visits of a stage's tasks, except those of the second half of a backward, which reads
// no weights.
func (r *tracker) planVisits() {
	for _, t := range r.plan.Tasks[r.stage] {
		if t.Kind == plan.WeightGrad {
			continue
		}
		first := len(r.path)
		for k := range r.layers[t.Stage] {
			r.path = append(r.path, r.first[t.Stage]+k)
		}
		if t.Kind == plan.Backward {
			slices.Reverse(r.path[first:])
			r.path = r.path[:len(r.path)-r.plan.Skipped(t.Stage)]
		}
	}
}

// layerAt returns the layer of a visit, or -1 if there is no such visit.
func (r *tracker) layerAt(visit int) int {
	if visit < 0 || visit >= len(r.path) {
		return -1
	}
	return r.path[visit]
}

// enter begins a visit. It also gathers the next layer's weights, unless they are whole. The weights of the
// current layer are counted with the running block, unless one of the next two visits is to the same layer.
func (r *tracker) enter() {
	if r.path == nil {
		return
	}
	v := r.visited
	before, layer, next, then := r.layerAt(v-1), r.layerAt(v), r.layerAt(v+1), r.layerAt(v+2)
	n := ir.Bytes(0)
	if next == layer || then == layer {
		n += r.visits.weights
	} else {
		r.passing = r.visits.gathered
	}
	if next >= 0 && next != layer {
		n += r.visits.weights
		if next != before {
			n += r.visits.halves
		}
	}
	if before < 0 {
		n += r.visits.halves
	}
	r.hasWhole(n)
}

// exit ends a visit.
func (r *tracker) exit() {
	if r.path != nil {
		r.visited++
		r.passing = 0
	}
}

func (r *tracker) hasWhole(n ir.Bytes) {
	r.now[TermWeights] += n - r.gathered
	r.gathered = n
}

// visitBytes holds the bytes that a visit to a layer needs temporarily, in addition to the slices.
type visitBytes struct {
	gathered, divided  params   // parameters of a layer whose weights, and whose gradients, are divided
	weights, gradients ir.Bytes // bytes when whole
	halves, halfSums   ir.Bytes // bytes between the two steps of a collective; 0: it has one step
	sums               ir.Bytes // summed slices of the gradients
}

func visitBytesOf(p *plan.Plan, g *graph.Model, layer *graph.Block) (n visitBytes) {
	for i := range layer.Params {
		param := &layer.Params[i]
		zero, cut := p.ZeroOf(layer, param), p.Slicing(param)
		whole := ir.Bytes(cut.Whole() * param.Local[1])
		half := ir.Bytes(0) // after the first step, if divided over the ranks of a stage and over replicas
		if cut.SP > 1 && cut.DP > 1 {
			half = ir.Bytes(cut.Part() * param.Local[1])
		}
		if zero >= plan.ZeroWeights {
			n.gathered |= 1 << i
			n.weights += graph.Align(whole * g.DType().Bytes())
			n.halves += graph.Align(half * g.DType().Bytes())
		}
		if zero >= plan.ZeroGradients && !param.Frozen {
			n.divided |= 1 << i
			n.gradients += graph.Align(whole * ir.F32.Bytes())
			n.halfSums += graph.Align(half * ir.F32.Bytes())
			n.sums += graph.Align(ir.Bytes(cut.Rows*param.Local[1]) * ir.F32.Bytes())
		}
	}
	return n
}
