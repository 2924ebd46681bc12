package codegen

import (
	"slices"

	"sppo/graph"
	"sppo/ir"
)

// params are the parameters of the stage in the global order of tensors, a tied head last.
func (s *stage) params() []*param {
	ps := append([]*param(nil), s.embedding...)
	for _, l := range slices.Concat(s.layers...) {
		ps = append(ps, s.layer[l]...)
	}
	return append(ps, s.head...)
}

// gradBuffer is the gradient of a parameter; it lives from its first use in a step to the end of the step.
func (s *stage) gradBuffer(p *param) uint32 {
	if !p.gradReady {
		name := p.name + ".grad"
		if p.shared != nil {
			name += ".head" // a tied embedding always has two partial gradients
		}
		p.grad = s.allocate(name, ir.Device, ir.Bytes(p.elements())*ir.F32.Bytes())
		p.gradReady = true
	}
	return p.grad
}

// optimizer completes the gradients, takes their norm and updates the weights.
func (s *stage) optimizer() {
	s.prov.Phase = ir.PhaseOptimizer
	s.decidedBy("lower", "train.optimizer")
	if s.last() {
		s.averageOverReplicas(s.loss)
	}
	s.completeGradients()
	s.gradNorm()
	o := s.plan.Train.Optimizer
	for _, p := range s.params() {
		if p.shared != nil {
			continue
		}
		s.addState(p, ir.RoleGrad, p.grad, ir.F32)
		weightDecay := 0.0
		if p.Decay {
			weightDecay = o.WeightDecay
		}
		args := []ir.View{p.view(p.master, ir.F32), p.view(p.moment1, ir.F32), p.view(p.moment2, ir.F32), ir.Absent(),
			p.view(p.grad, ir.F32), vector(s.stepBuf, ir.F32, 3), vector(s.norm, ir.F32, 2)}
		if p.master != p.weight {
			args[3] = p.view(p.weight, s.model.DType())
		}
		s.op(ir.AdamW, ir.Compute, args, ir.Float(o.Beta1), ir.Float(o.Beta2), ir.Float(o.Eps), ir.Float(weightDecay))
	}
	for _, p := range s.params() {
		s.hold(p.grad) // so that gradients can be read after a step
	}
}

// averageOverReplicas adds the shares of the loss; each replica has already divided by the tokens of all.
func (s *stage) averageOverReplicas(loss uint32) {
	if s.plan.Parallel.DP > 1 {
		s.allReduce(vector(loss, ir.F32, 1), graph.GroupDP)
	}
}

func (s *stage) allReduce(v ir.View, group int64) {
	s.op(ir.AllReduce, ir.Coll, []ir.View{v}, ir.Int(group))
}

// completeGradients adds what other ranks hold of each gradient: the stage's ranks, the tied embedding's other
// half, the replicas.
func (s *stage) completeGradients() {
	for _, p := range s.params() {
		g := p.view(s.gradBuffer(p), ir.F32)
		switch {
		case p.shared != nil:
			to := p.view(p.shared.grad, ir.F32)
			s.op(ir.Add, ir.Compute, []ir.View{to, to, g})
		case p.Reduce == graph.GroupNames[graph.GroupSP]:
			s.allReduce(g, graph.GroupSP)
		case p.Reduce == graph.GroupNames[graph.GroupKV]:
			s.allReduce(g, graph.GroupKV)
		}
	}
	for _, p := range s.params() {
		if p.shared != nil {
			continue
		}
		g := p.view(p.grad, ir.F32)
		if s.plan.Model.Tied && s.plan.Parallel.PP > 1 && s.tensors[p.tensor].Name == "embed" {
			s.allReduce(g, graph.GroupTied)
		}
		if s.plan.Parallel.DP > 1 {
			s.allReduce(g, graph.GroupDP)
		}
	}
}

// gradNorm sums squares by tensor and part, in an order that does not depend on stages: every rank fills the slots
// of its own tensors, the stages add their vectors (a zero changes nothing), the parts are lined up by SP rank.
func (s *stage) gradNorm() {
	n := int64(len(s.tensors))
	sums := s.allocate("norm.sums", ir.Device, ir.Bytes(n)*ir.F32.Bytes())
	s.op(ir.Fill, ir.Compute, []ir.View{vector(sums, ir.F32, n)}, ir.Float(0))
	for _, p := range s.params() {
		if p.shared != nil {
			continue
		}
		weight := ir.Float(1)
		switch {
		case !p.owner:
			weight = ir.Float(0)
		case p.Once != "":
			weight = s.constRef(p.Once)
		}
		slot := vector(sums, ir.F32, 1)
		slot.Offset = ir.Bytes(p.tensor) * ir.F32.Bytes()
		s.op(ir.SumSq, ir.Compute, []ir.View{slot, p.view(p.grad, ir.F32)}, weight)
	}
	if s.plan.Parallel.PP > 1 {
		s.allReduce(vector(sums, ir.F32, n), graph.GroupPP)
	}
	if sp := int64(s.plan.Parallel.SP); sp > 1 {
		all := s.allocate("norm.parts", ir.Device, ir.Bytes(n*sp)*ir.F32.Bytes())
		s.op(ir.AllGather, ir.Coll, []ir.View{vector(all, ir.F32, n*sp), vector(sums, ir.F32, n)}, ir.Int(graph.GroupSP))
		sums, n = all, n*sp
	}
	s.op(ir.GradNorm, ir.Compute, []ir.View{vector(s.norm, ir.F32, 2), vector(sums, ir.F32, n)}, ir.Float(s.plan.Train.GradClip))
}
