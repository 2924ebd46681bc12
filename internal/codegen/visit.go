package codegen

import (
	"fmt"
	"slices"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// Stages 2 and 3 of ZeRO act at the boundaries of visits, as internal/schedule/divided.go lists. With stage 2, a backward
// visit that completes its layer's gradients (see plan.Completes) ends with a reduce-scatter of them: each rank
// keeps the sum of its slice, as in DeepSpeed. With stage 3, the weights of a layer are gathered during the
// computation of the previous visit, and freed at the end of their own.
type visits struct {
	number  int                   // of the current visit
	whole   map[int]plan.ParamSet // by layer: weights that are whole
	entered int                   // layer of the current visit
	lent    []lentHalf            // operands of gathers in progress
	owed    []owed                // gradients in transit, until the next backward visit ends
	summing []uint32              // operands of the collectives that sum whole gradients, held until the backward pass ends
}

// owed is a sum of gradients that a collective is computing.
type owed struct {
	p      *param
	layer  int
	from   []uint32 // operands of the collective
	sum    ir.View  // of this visit
	before bool     // p.sum contains the sum of earlier visits
}

// lentHalf is a buffer that a collective reads which gathers weights of a layer.
type lentHalf struct {
	layer  int
	buffer uint32
}

// readBy returns the weights of a layer that a task reads.
func (l *layout) readBy(t plan.Task, layer int) plan.ParamSet {
	b := l.block(t, layer)
	if l.plan.Parallel.Zero < plan.ZeroWeights {
		return ^plan.ParamSet(0) // they are gathered once, for all tasks
	}
	reads := plan.ParamsRead(b, t.Kind)
	if l.plan.RecomputesKV(t) && b.Attends {
		reads |= plan.KVReads(b)
	}
	return reads
}

// path returns the layers of a task in the order in which it visits them.
func (l *layout) path(t plan.Task) []int {
	layers := l.stages[t.Stage]
	if t.Kind == plan.Backward {
		layers = slices.Clone(layers)
		slices.Reverse(layers)
		layers = slices.DeleteFunc(layers, func(layer int) bool { return layer < l.plan.Untrained })
	}
	return layers
}

// byVisit adds the number of the visit to the name of a buffer that is allocated anew for each visit.
func (s *lowering) byVisit(name string) string {
	if !s.trains() {
		name = "eval." + name
	}
	return fmt.Sprintf("%s.%d", name, s.visits.number)
}

// enter begins a visit to a layer. Operands of gathers are held until the next visit or, if weights are gathered once, until
// their layer is visited.
func (s *lowering) enter(layer int) {
	before := s.visits.entered
	s.visits.number++
	s.visits.entered = layer
	s.visits.lent = slices.DeleteFunc(s.visits.lent, func(l lentHalf) bool {
		through := s.plan.Parallel.Zero >= plan.ZeroWeights || l.layer == layer || l.layer == before
		if through {
			s.hold(l.buffer)
		}
		return through
	})
}

// gatherWeights gathers some weights of a layer, except those that are already whole.
func (s *lowering) gatherWeights(layer int, reads plan.ParamSet) {
	reads &^= s.visits.whole[layer]
	if reads == 0 || !slices.ContainsFunc(s.weights.layer[layer], func(p *param) bool { return p.sliced }) {
		return
	}
	s.visits.whole[layer] |= reads
	s.prov.Layer = int32(layer)
	s.decidedBy("solve", "schedule.zero")
	var list []gathering
	for i, p := range s.weights.layer[layer] {
		if act := p.DType(s.model.DType()); p.sliced && reads.Has(i) {
			list = append(list, gathering{p, "", func() ir.View {
				p.weight = s.allocate(s.byVisit(p.name), ir.Device, ir.Bytes(p.padded())*act.Bytes())
				return p.view(p.weight, act)
			}, p.stateView(p.kept, act)})
		}
	}
	for i, on := range s.gatherAll(list) {
		if on != list[i].p.kept {
			s.visits.lent = append(s.visits.lent, lentHalf{layer, on})
		}
	}
}

// reduceGradients passes the divided gradients of a layer to collectives. The first half of a backward may have passed some.
func (s *lowering) reduceGradients(layer int) {
	s.settle()
	s.prov.Layer = int32(layer)
	s.decidedBy("solve", "schedule.zero")
	divided := slices.DeleteFunc(slices.Clone(s.weights.layer[layer]), func(p *param) bool { return p.zero < plan.ZeroGradients || !p.gradReady })
	sums, between := s.sumAll(divided)
	for i, p := range divided {
		o := owed{p, layer, []uint32{p.grad, between[i]}, sums[i], p.sum.Present()}
		if !o.before {
			p.sum = o.sum
		}
		s.visits.owed = append(s.visits.owed, o)
		p.gradReady = false
	}
}

// settle adds reduced gradients to those of earlier visits. It is called after another layer has been computed.
func (s *lowering) settle() {
	for _, o := range s.visits.owed {
		for _, b := range o.from {
			s.hold(b)
		}
		if o.before {
			s.prov.Layer = int32(o.layer)
			s.decidedBy("solve", "schedule.zero")
			all := o.p.sum
			if all.DType != ir.F32 {
				all = s.scratch(o.p, ".grad.sum", all.Rows(), ir.F32)
			}
			s.op(ir.Add, ir.Compute, []ir.View{all, o.p.sum, o.sum})
			o.p.sum = all
		}
	}
	s.visits.owed = nil
}
