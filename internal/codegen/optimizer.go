package codegen

import (
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// trained returns the parameters that have gradients.
func (s *lowering) trained() []*param {
	return slices.DeleteFunc(s.params(), func(p *param) bool { return p.Frozen })
}

// params returns the parameters of the stage in the global order of tensors, with a tied head last.
func (s *lowering) params() []*param {
	ps := append([]*param(nil), s.weights.embedding...)
	for _, l := range s.layers() {
		ps = append(ps, s.weights.layer[l]...)
	}
	return append(ps, s.weights.head...)
}

// gradBuffer returns the buffer of a parameter's gradient. It is live from its first use in a step to the end
// of the step or, from ZeroGradients on, to the end of the visit.
func (s *lowering) gradBuffer(p *param) uint32 {
	if !p.gradReady {
		name, n := p.name+".grad", p.padded()
		if p.shared != nil {
			name, n = name+".head", p.elements() // a tied embedding always has two partial gradients, of which no collective reads this one
		}
		if p.zero >= plan.ZeroGradients {
			name = s.byVisit(name)
		}
		p.grad = s.allocate(name, ir.Device, ir.Bytes(n)*ir.F32.Bytes())
		p.gradReady = true
	}
	return p.grad
}

// optimizer completes the gradients, computes their norm and updates the weights.
func (s *lowering) optimizer() {
	s.prov.Phase = ir.PhaseOptimizer
	s.decidedBy("lower", "train.optimizer")
	for _, b := range s.visits.summing {
		s.hold(b)
	}
	queue := s.newPassing()
	queue.load()
	if s.last() {
		s.averageOverReplicas(s.numbers.loss)
	}
	s.completeGradients()
	s.gradNorm()
	s.balanceExperts()
	sent := -1 // buffer with weights that are being sent while the next parameter is updated
	for _, p := range s.trained() {
		if p.shared != nil {
			continue
		}
		before := sent
		sent = s.update(p, queue)
		if before >= 0 {
			s.hold(uint32(before))
		}
	}
	for _, p := range s.trained() { // keep gradients readable after a step
		if p.shared == nil {
			s.hold(p.sum.Buffer)
		} else {
			s.hold(p.grad)
		}
	}
}

// update updates the part of a parameter whose optimizer state this rank holds, and sends divided
// weights to all ranks that use them. It returns the buffer from which they are sent, or -1.
func (s *lowering) update(p *param, queue *passing) int {
	if p.cut.Slices() > 1 && p.zero == 0 {
		if !p.back.Present() {
			s.gatherAll([]gathering{s.gatherBack(p)})
		}
		p.sum = p.back
	}
	p.sum = s.widened(p, p.sum)
	act := s.model.DType()
	weight := p.stateView(p.master, ir.F32)
	if act != ir.F32 {
		weight = p.stateView(p.kept, act)
		if p.zero > 0 && !p.sliced {
			weight = s.scratch(p, ".slice", p.stateRows(), act)
		}
	}
	if p.onHost {
		queue.update(p, weight)
	} else {
		given := map[string]ir.View{graph.UpdateWeight: p.stateView(p.master, ir.F32), graph.UpdateGrad: p.sum, graph.UpdateCopy: weight}
		for i, state := range p.optimizer.States {
			given[state.Name] = p.stateView(p.states[i], state.DType)
		}
		s.applyUpdate(p, given)
	}
	s.addState(p, ir.RoleGrad, s.stateRectangles(p, p.sum.Buffer, ir.F32))
	if p.zero == 0 || p.sliced {
		return -1
	}
	s.gather(p, "", p.view(p.weight, act), weight)
	return int(weight.Buffer)
}

// gatherBack returns how the slices of a summed gradient are gathered.
func (s *lowering) gatherBack(p *param) gathering {
	return gathering{p, "", func() ir.View {
		p.back = p.view(s.takeOver(p.grad), p.sum.DType)
		return p.back
	}, p.sum}
}

// applyUpdate emits the optimizer's instructions for a parameter. The caller passes tensors by name;
// applyUpdate allocates the others.
func (s *lowering) applyUpdate(p *param, given map[string]ir.View) {
	b := s.model.Update(&s.plan.Train.Optimizer, p.block, p.Param, p.stateSlices())
	given[graph.UpdateStep], given[graph.UpdateNorm] = vector(s.numbers.step, ir.F32, 3), vector(s.numbers.norm, ir.F32, 2)
	views := make([]ir.View, len(b.Values))
	for i := range b.Values {
		views[i] = given[b.Values[i].Name]
	}
	view := func(a graph.Arg, v ir.View) ir.View {
		x := &views[a.Value]
		if value := &b.Values[a.Value]; value.Kind != graph.Weight && x.Shape[0] == 0 {
			*x = v
			x.Buffer = s.allocate(p.name+"."+value.Name, ir.Device, value.Bytes(graph.Size{}))
		}
		return *x
	}
	attr := func(a graph.Attr) ir.Attr {
		if a.Const == graph.ConstSlice {
			return s.constRef(slicePlace{rows: p.stateRows(), cut: p.cut}.name())
		}
		return s.constRef(a.Const)
	}
	for i := range b.Forward {
		in := b.Instr(&b.Forward[i], graph.Size{}, view, attr)
		switch in.Stream = ir.Compute; {
		case in.Op == ir.AllGather:
			s.gather(p, ".momentum", in.Args[0], in.Args[1])
			continue
		case in.Info().Class == ir.ClassComm:
			in.Stream = ir.Coll
		}
		s.emit(in)
	}
}

// balanceExperts sums the load of experts over all ranks that count other tokens or other layers, and changes what is added to the scores of
// the rank's experts.
func (s *lowering) balanceExperts() {
	n := s.loads()
	if n == 0 {
		return
	}
	load := vector(s.numbers.load, ir.F32, n)
	group, members := s.model.Counters()
	for _, by := range []struct {
		ranks, group int
		stream       ir.Stream
	}{{members, group, ir.Coll}, {s.plan.Parallel.PP, graph.GroupPP, ir.Coll}, {s.plan.Parallel.DP, graph.GroupDP, s.paramStream()}} {
		if by.ranks > 1 {
			s.allReduce(by.stream, load, int64(by.group))
		}
	}
	for _, l := range s.layers() {
		for _, p := range s.weights.layer[l] {
			if !s.model.Balances(p.Param, p.name, s.plan.Train.BiasRate) {
				continue
			}
			own := vector(s.numbers.load, ir.F32, p.Local[0])
			own.Offset = ir.Bytes(int64(l)*p.Local[0]) * ir.F32.Bytes()
			s.op(ir.ExpertBias, ir.Compute, []ir.View{p.view(p.kept, ir.F32), own, vector(s.numbers.norm, ir.F32, 2)}, ir.Float(s.plan.Train.BiasRate))
		}
	}
}

// averageOverReplicas sums the loss over the replicas. Each has already divided its share by the number of
// tokens of all replicas.
func (e *emitter) averageOverReplicas(loss uint32) {
	if e.plan.Parallel.DP > 1 {
		e.allReduce(e.paramStream(), vector(loss, ir.F32, 1), graph.GroupDP)
	}
}

func (e *emitter) allReduce(stream ir.Stream, v ir.View, group int64) {
	e.op(ir.AllReduce, stream, []ir.View{v}, ir.Int(group))
}

// sumGradients sums the gradients of a layer, or of the head, over all ranks while the backward pass continues. The
// buffers in use are held until its end, so that nothing waits for a slow network.
func (s *lowering) sumGradients(params []*param) {
	s.decidedBy("lower", "train.optimizer")
	params = slices.DeleteFunc(slices.Clone(params), func(p *param) bool { return !s.plan.SumsBeside(p.block, p.Param) })
	sums, between := s.sumAll(params)
	s.visits.summing = append(s.visits.summing, between...)
	for i, p := range params {
		p.sum = sums[i]
		if p.cut.Slices() > 1 && p.zero > 0 {
			s.visits.summing = append(s.visits.summing, p.grad)
		}
	}
	var back []gathering
	for _, p := range params {
		if p.cut.Slices() > 1 && p.zero == 0 {
			back = append(back, s.gatherBack(p))
		}
	}
	s.visits.summing = append(s.visits.summing, s.gatherAll(back)...)
}

// sumAll sums the gradients of parameters over all ranks that have partial sums of them. It also returns the buffers between the
// sums over a stage and those over replicas. Collectives over the same ranks follow each other, so that they can begin together.
func (s *lowering) sumAll(params []*param) (sums []ir.View, between []uint32) {
	for _, p := range params {
		sums = append(sums, s.ready(p))
	}
	for i, p := range params {
		sums[i] = s.sumOverStage(p, sums[i])
		between = append(between, sums[i].Buffer)
	}
	for i, p := range params {
		sums[i] = s.sumOverReplicas(p, sums[i])
	}
	return sums, between
}

// completeGradients sums each gradient that is not yet complete over the ranks that have partial sums of it: the ranks of
// the stage, those with the other copy of a tied embedding, and the replicas.
func (s *lowering) completeGradients() {
	s.aside(s.settle)
	late := slices.DeleteFunc(s.trained(), func(p *param) bool { return p.sum.Present() || p.zero >= plan.ZeroGradients })
	for _, p := range late {
		if p.shared != nil {
			to, g := p.view(p.shared.grad, ir.F32), p.view(s.gradBuffer(p), ir.F32)
			s.op(ir.Add, ir.Compute, []ir.View{to, to, g})
		}
	}
	late = slices.DeleteFunc(late, func(p *param) bool { return p.shared != nil })
	sums, _ := s.sumAll(late)
	for i, p := range late {
		p.sum = sums[i]
	}
}

// gradNorm sums squares by tensor and part, in an order that does not depend on the stages. Every rank fills
// the slots of its own tensors and clears the others. The stages then add up their vectors; the zeros change
// nothing. The parts are concatenated by replica and then by SP rank.
func (s *lowering) gradNorm() {
	n := int64(len(s.tables.tensors))
	sums := s.allocate("norm.sums", ir.Device, ir.Bytes(n)*ir.F32.Bytes())
	slots := func(first, n int64) []ir.View {
		v := vector(sums, ir.F32, n)
		v.Offset = ir.Bytes(first) * ir.F32.Bytes()
		return []ir.View{v}
	}
	own := make([]bool, n)
	for _, p := range s.trained() {
		own[p.tensor] = true
	}
	for first := int64(0); first < n; {
		end := first + 1
		for end < n && own[end] == own[first] {
			end++
		}
		if !own[first] {
			s.op(ir.Fill, ir.Compute, slots(first, end-first), ir.Float(0))
		}
		first = end
	}
	for _, p := range s.trained() {
		if p.shared == nil {
			s.op(ir.SumSq, ir.Compute, append(slots(int64(p.tensor), 1), p.sum), s.normWeight(p))
		}
	}
	if s.plan.Parallel.PP > 1 {
		s.allReduce(ir.Coll, vector(sums, ir.F32, n), graph.GroupPP)
	}
	for _, by := range []struct {
		name   string
		ranks  int
		group  int64
		stream ir.Stream
	}{{"norm.replicas", s.plan.Parallel.DP, graph.GroupDP, s.paramStream()}, {"norm.parts", s.plan.Parallel.SP, graph.GroupSP, ir.Coll}} {
		if by.ranks == 1 {
			continue
		}
		whole := n * int64(by.ranks)
		all := s.allocate(by.name, ir.Device, ir.Bytes(whole)*ir.F32.Bytes())
		s.op(ir.AllGather, by.stream, []ir.View{vector(all, ir.F32, whole), vector(sums, ir.F32, n)}, ir.Int(by.group))
		sums, n = all, whole
	}
	s.op(ir.GradNorm, ir.Compute, []ir.View{vector(s.numbers.norm, ir.F32, 2), vector(sums, ir.F32, n), s.numbers.spike}, ir.Float(s.plan.Train.GradClip))
}
