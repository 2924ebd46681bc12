package memory

import (
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// gather counts the whole weights of a layer, and the halves of its gathers until the next visit.
func (r *tracker) gather(v *visitBytes) {
	r.now[TermWeights] += v.weights + v.halves
	r.halves += v.halves
}

// enter begins a visit.
func (r *tracker) enter() {
	r.now[TermWeights] -= r.halves
	r.halves = 0
}

// free counts the weights of a layer with the running block: each is freed after its last use in the visit.
func (r *tracker) free(v *visitBytes) {
	r.now[TermWeights] -= v.weights
	r.passing = v.gathered
}

// reduce passes the gradients of a layer to collectives; those of the previous visit are then complete. Gradients to
// which later visits add stay whole.
func (r *tracker) reduce(own int, v *visitBytes) {
	r.whole[own] &^= v.divided
	r.now[TermGradients] -= v.gradients + r.owed
	r.owed = v.gradients + v.halfSums
	if r.given[own] { // added to the sums of earlier visits
		r.owed += v.sums
	} else {
		r.given[own] = true
		r.now[TermGradients] += v.sums
	}
	r.now[TermGradients] += r.owed
}

// visitOf returns the bytes of a visit to the layer of an action.
func (r *tracker) visitOf(a schedule.Action) *visitBytes {
	stage := r.plan.Tasks[r.stage][a.Task].Stage
	return &r.visitsOf[r.graph.KindOf(r.plan.LayerAt(stage, int(a.Layer)))]
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
