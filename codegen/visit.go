package codegen

import (
	"fmt"
	"maps"
	"slices"

	"sppo.dev/ir"
	"sppo.dev/passes/plan"
)

// A visit is the work of one task in one layer. Stages 2 and 3 of ZeRO act at the boundaries of visits. With
// stage 2, a backward visit that completes its layer's gradients (see plan.Completes) ends with a
// reduce-scatter of them: each rank keeps the sum of its slice, as in DeepSpeed. With stage 3, the weights of a
// layer are gathered during the computation of the previous visit, and freed at the end of their own. In a slot
// that ranks share, all of a rank's own tasks form one visit to a layer, which ends when the gradients of the
// helpers have been added.
type visits struct {
	order  []visit               // visits of the section, except those that read no weights
	done   int                   // number of these visits that have begun
	number int                   // number of all visits so far
	whole  map[int]plan.ParamSet // by layer: weights that are whole
	lent   []uint32              // operands of gathers in progress, held until the next visit
	owed   []owed                // gradients in transit, until the next backward visit ends
}

// visit is a layer and those of its weights that the visit reads.
type visit struct {
	layer int
	reads plan.ParamSet
}

// owed is a sum of gradients that a collective is computing.
type owed struct {
	p      *param
	layer  int
	from   []uint32 // operands of the collective
	sum    ir.View  // of this visit
	before bool     // p.sum contains the sum of earlier visits
}

// plan records the visits of a section.
func (v *visits) plan(s *stage, steps []step) {
	for _, st := range steps {
		if st.kind != running && st.kind != sharing {
			continue
		}
		t := s.order.Tasks[s.index0][st.task]
		if st.kind == sharing {
			if t.Stage = s.index0; t.Stage > s.order.Tasks[s.index0][st.task].Slot() {
				continue // the step has only tasks of other ranks
			}
			t.Subsequence = s.order.Tasks[s.index0][st.task].Slot() - t.Stage
		}
		if t.Kind != plan.WeightGrad {
			for _, layer := range s.path(t) {
				v.order = append(v.order, visit{layer, s.readBy(t, layer)})
			}
		}
	}
}

// readBy returns the weights of a layer that a task reads, or no weights below ZeroWeights.
func (s *stage) readBy(t plan.Task, layer int) plan.ParamSet {
	if s.plan.Parallel.Zero < plan.ZeroWeights {
		return 0
	}
	b := s.block(t, layer)
	reads := plan.ParamsRead(b, t.Kind)
	if s.plan.RecomputesCaches(t) && b.Attends {
		reads |= plan.CachingReads(b)
	}
	return reads
}

// path returns the layers of a task in the order in which it visits them.
func (s *stage) path(t plan.Task) []int {
	layers := s.stages[t.Stage]
	if t.Kind == plan.Backward {
		layers = slices.Clone(layers)
		slices.Reverse(layers)
		layers = slices.DeleteFunc(layers, func(layer int) bool { return layer < s.plan.Untrained })
	}
	return layers
}

// byVisit adds the number of the visit to the name of a buffer that is allocated anew for each visit.
func (s *stage) byVisit(name string) string {
	if !s.training {
		name = "eval." + name
	}
	return fmt.Sprintf("%s.%d", name, s.visits.number)
}

// enter begins a visit. The weights of the layer are then whole, those of the next layer are being gathered,
// and all others are freed.
func (s *stage) enter(layer int) {
	v := &s.visits
	if v.order[v.done].layer != layer {
		panic("internal: lower: a visit out of order")
	}
	v.done++
	v.number++
	if s.plan.Parallel.Zero < plan.ZeroWeights {
		return
	}
	for _, b := range v.lent {
		s.hold(b)
	}
	v.lent = nil
	near := v.order[v.done-1 : min(v.done+1, len(v.order))]
	maps.DeleteFunc(v.whole, func(l int, _ plan.ParamSet) bool {
		return !slices.ContainsFunc(near, func(n visit) bool { return n.layer == l })
	})
	for _, n := range near {
		s.gatherWeights(n.layer, n.reads)
	}
}

// gatherWeights gathers some weights of a layer, except those that are already whole.
func (s *stage) gatherWeights(layer int, reads plan.ParamSet) {
	reads &^= s.visits.whole[layer]
	if reads == 0 || s.plan.Parallel.Zero < plan.ZeroWeights {
		return
	}
	s.visits.whole[layer] |= reads
	prov, act := s.prov, s.model.DType()
	s.prov.Layer = int32(layer)
	s.decidedBy("solve", "schedule.zero")
	for i, p := range s.layer[layer] {
		if p.zero < plan.ZeroWeights || !reads.Has(i) {
			continue
		}
		p.weight = s.allocate(s.byVisit(p.name), ir.Device, ir.Bytes(p.padded())*act.Bytes())
		if on := s.gather(p, "", p.view(p.weight, act), p.stateView(p.kept, act)); on != p.kept {
			s.visits.lent = append(s.visits.lent, on)
		}
	}
	s.prov = prov
}

// leaveBackward ends a backward visit.
func (s *stage) leaveBackward(t plan.Task, layer int) {
	if s.plan.Parallel.Zero < plan.ZeroGradients || !s.plan.Completes(t) {
		return
	}
	defer func(prov ir.Provenance) { s.prov = prov }(s.prov)
	s.settle()
	s.decidedBy("solve", "schedule.zero")
	for _, p := range s.layer[layer] {
		if p.zero < plan.ZeroGradients || p.Frozen {
			continue
		}
		g := p.view(p.grad, ir.F32)
		part := s.sumOverStage(p, g)
		o := owed{p, layer, []uint32{g.Buffer, part.Buffer}, s.sumOverReplicas(p, part), p.sum.Present()}
		if !o.before {
			p.sum = o.sum
		}
		s.visits.owed = append(s.visits.owed, o)
		p.gradReady = false
	}
}

// settle adds reduced gradients to those of earlier visits. It is called after another layer has been computed.
func (s *stage) settle() {
	defer func(prov ir.Provenance) { s.prov = prov }(s.prov)
	for _, o := range s.visits.owed {
		for _, b := range o.from {
			s.hold(b)
		}
		if o.before {
			s.prov.Layer = int32(o.layer)
			s.decidedBy("solve", "schedule.zero")
			s.op(ir.Add, ir.Compute, []ir.View{o.p.sum, o.p.sum, o.sum})
		}
	}
	s.visits.owed = nil
}
