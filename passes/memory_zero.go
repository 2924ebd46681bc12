package passes

import (
	"slices"

	"sppo.dev/ir"
)

// Weights that are divided are whole where codegen has them so: those of the layer that is visited and of the next, and
// behind a visit those that one of the next two wants again.

// planVisits notes the visits of a stage's tasks; the second half of a backward reads no weights.
func (r *tracker) planVisits() {
	for _, t := range r.plan.Tasks[r.stage] {
		if t.Kind == WeightGrad {
			continue
		}
		first := len(r.path)
		for k := range r.layers[t.Stage] {
			r.path = append(r.path, r.first[t.Stage]+k)
		}
		if t.Kind == Backward {
			slices.Reverse(r.path[first:])
		}
	}
}

// layerAt is that of a visit; -1: there is none.
func (r *tracker) layerAt(visit int) int {
	if visit < 0 || visit >= len(r.path) {
		return -1
	}
	return r.path[visit]
}

// enter begins a visit: the next layer's weights are gathered, too, unless they are whole. Those of the layer itself are among what it
// holds while it runs, unless one of the next two visits is of the same.
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
