package estimate

import (
	"slices"

	"sppo.dev/internal/cost"
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// Updater computes the time that the last part of a step takes: reductions, the gradient norm and updates.
type Updater struct {
	plan     *plan.Plan
	graph    *graph.Model
	cost     cost.Model
	stage    []cost.Link // by group of the ranks of a stage
	replicas cost.Link
}

// NewUpdater returns the updater for a plan; g is its model on one rank.
func NewUpdater(p *plan.Plan, g *graph.Model, m cost.Model) Updater {
	replicas := make([]int32, p.Parallel.DP)
	for d := range replicas {
		replicas[d] = int32(d * p.Parallel.PP * p.Parallel.SP)
	}
	stage := make([]cost.Link, len(graph.GroupNames))
	for _, group := range []int{graph.GroupSP, graph.GroupKV, graph.GroupRing} {
		ranks := g.Members(group, 0)
		of := make([]int32, len(ranks))
		for i, k := range ranks {
			of[i] = rank(p, 0, k)
		}
		stage[group] = m.LinkOf(of)
	}
	return Updater{p, g, m, stage, m.LinkOf(replicas)}
}

// Block returns the time to complete the gradients of a block, compute their norm and update its weights. It
// omits the reductions of vectors over the ranks of a stage, which are small.
func (u Updater) Block(b *graph.Block) ir.Seconds {
	var t ir.Seconds
	for i := range b.Params {
		param := &b.Params[i]
		if param.Frozen {
			continue
		}
		t += u.kernels(b, param)
		if zero := u.plan.ZeroOf(b, param); zero < plan.ZeroGradients && !u.plan.SumsBeside(b, param) {
			s := u.series(func(s *series) { u.complete(s, param) })
			t += s.alone()
		}
		t += u.returned(b, param)
	}
	return t
}

// series is the time of collectives that follow each other, and of the kernels before them. Collectives of the same ranks form
// groups (vm.Groups).
type series struct {
	cost    cost.Model
	kernels ir.Seconds
	parts   []part
	group   int64 // 1 + the group of the last collective; 0: none
}

// part is the time of collectives on a link.
type part struct {
	link cost.Link
	d    ir.Seconds
}

func (s *series) add(op ir.Op, n ir.Bytes, l cost.Link, group int64) {
	w := ir.CollectiveWork(op, n)
	w.Grouped = s.group == group+1
	s.group = group + 1
	if last := len(s.parts) - 1; last < 0 || s.parts[last].link != l {
		s.parts = append(s.parts, part{link: l})
	}
	s.parts[len(s.parts)-1].d += s.cost.Time(w, l)
}

// alone returns the time of a series if nothing runs beside it.
func (s *series) alone() ir.Seconds {
	t := s.kernels
	for _, p := range s.parts {
		t += p.d
	}
	return t
}

func (u Updater) series(list func(*series)) series {
	s := series{cost: u.cost}
	list(&s)
	return s
}

// summed sums those gradients of a block that are summed during the backward pass.
func (u Updater) summed(b *graph.Block) series {
	return u.series(func(s *series) {
		beside := u.those(b, func(param *graph.Param) bool { return u.plan.SumsBeside(b, param) })
		u.complete(s, beside...)
		u.gather(s, u.plan.ReducedType, slices.DeleteFunc(beside, func(param *graph.Param) bool { return u.plan.ZeroOf(b, param) > 0 })...)
	})
}

// those returns the parameters of a block that a function selects.
func (u Updater) those(b *graph.Block, are func(*graph.Param) bool) (list []*graph.Param) {
	for i := range b.Params {
		if param := &b.Params[i]; are(param) {
			list = append(list, param)
		}
	}
	return list
}

// complete adds the time to reduce gradients over all ranks that hold the parameters. Each rank reduces its slice.
func (u Updater) complete(t *series, params ...*graph.Param) {
	bytes := make([]ir.Bytes, len(params))
	for i, param := range params {
		s, d := u.plan.Slicing(param), u.plan.ReducedType(param)
		bytes[i] = ir.Bytes(s.Whole()*param.Local[1]) * d.Bytes()
		if padding := ir.Bytes((s.Whole()-param.Local[0])*param.Local[1]) * ir.F32.Bytes(); padding > 0 {
			t.kernels += u.cost.Time(ir.Work{Kind: ir.WorkMemory, Bytes: padding}, cost.Link{})
		}
		if d != ir.F32 {
			t.kernels += u.cast(s.Whole()*param.Local[1], d)
		}
	}
	for i, param := range params {
		switch s := u.plan.Slicing(param); {
		case s.SP > 1:
			t.add(ir.ReduceScatter, bytes[i], u.holders(param), u.group(param))
			bytes[i] /= ir.Bytes(s.SP)
		case param.Shape[1] > 1 && param.Reduce != "":
			t.add(ir.AllReduce, bytes[i], u.holders(param), u.group(param))
		}
	}
	for i, param := range params {
		if u.plan.Slicing(param).DP > 1 {
			t.add(ir.ReduceScatter, bytes[i], u.replicas, graph.GroupDP)
		} else {
			t.add(ir.AllReduce, bytes[i], u.replicas, graph.GroupDP)
		}
	}
}

// cast returns the time to convert elements between f32 and another type.
func (u Updater) cast(elements int64, d ir.DType) ir.Seconds {
	return u.cost.Time(ir.Work{Kind: ir.WorkMemory, Bytes: ir.Bytes(elements) * (ir.F32.Bytes() + d.Bytes())}, cost.Link{})
}

// holders returns the link among the ranks of a stage that hold a parameter.
func (u Updater) holders(param *graph.Param) cost.Link { return u.stage[u.group(param)] }

// group returns the group of these ranks.
func (u Updater) group(param *graph.Param) int64 {
	return int64(slices.Index(graph.GroupNames, param.Reduce))
}

// gather adds the time to gather the slices of parameters, of types that a function returns, on all ranks that hold them.
func (u Updater) gather(t *series, typeOf func(*graph.Param) ir.DType, params ...*graph.Param) {
	whole := func(param *graph.Param) ir.Bytes {
		return ir.Bytes(u.plan.Slicing(param).Whole()*param.Local[1]) * typeOf(param).Bytes()
	}
	for _, param := range params {
		if s := u.plan.Slicing(param); s.DP > 1 {
			t.add(ir.AllGather, whole(param)/ir.Bytes(s.SP), u.replicas, graph.GroupDP)
		}
	}
	for _, param := range params {
		if u.plan.Slicing(param).SP > 1 {
			t.add(ir.AllGather, whole(param), u.holders(param), u.group(param))
		}
	}
}

// weightType returns the type of a weight that kernels read.
func (u Updater) weightType(param *graph.Param) ir.DType { return param.DType(u.graph.DType()) }

// gathered returns the time to gather a parameter alone.
func (u Updater) gathered(param *graph.Param, d ir.DType) ir.Seconds {
	s := u.series(func(s *series) { u.gather(s, func(*graph.Param) ir.DType { return d }, param) })
	return s.alone()
}

// returned returns the time to send slices of gradients, or of new weights, back to all ranks at the end
// of a step.
func (u Updater) returned(b *graph.Block, param *graph.Param) ir.Seconds {
	switch zero := u.plan.ZeroOf(b, param); {
	case zero == 0 && u.plan.SumsBeside(b, param), u.plan.KeepsSlice(b, param):
		return 0
	case zero == 0:
		return u.gathered(param, u.plan.ReducedType(param))
	}
	return u.gathered(param, u.weightType(param))
}

// ownStream reports whether collectives on weights and gradients have a stream of their own.
func (u Updater) ownStream() bool { return u.plan.Parallel.DP > 1 && u.plan.ReplicasOverlap() }

// weights gathers the weights of a layer of which ranks keep slices.
func (u Updater) weights(layer *graph.Block) series {
	return u.series(func(s *series) {
		u.gather(s, u.weightType, u.those(layer, func(param *graph.Param) bool { return u.plan.KeepsSlice(layer, param) })...)
	})
}

// gradients reduces the gradients of a layer that ranks divide.
func (u Updater) gradients(layer *graph.Block) series {
	return u.series(func(s *series) { u.complete(s, u.divided(layer)...) })
}

// byVisit reports whether weights are gathered for each visit to a layer, rather than once. Two layers are always kept whole.
func (u Updater) byVisit() bool { return u.plan.Parallel.Zero >= plan.ZeroWeights && u.many() }

// many reports whether a rank has more layers than can be whole at a time.
func (u Updater) many() bool {
	for r := range u.plan.Parallel.PP {
		if u.plan.LayersOf(r) > schedule.WholeLayers {
			return true
		}
	}
	return false
}

// Beside returns the times of the collectives that take turns with the collectives of a layer: those that gather the weights
// of the next layer and, in a backward pass that completes gradients, those that reduce the gradients of the
// previous layer, as if these layers were of the same kind. There are none if they have a stream of their own.
func (u Updater) Beside(kind int) (weights, gradients ir.Seconds) {
	if u.ownStream() {
		return 0, 0
	}
	layer := u.graph.Plain(kind)
	if u.byVisit() {
		s := u.weights(layer)
		weights = s.alone()
	}
	s := u.gradients(layer)
	return weights, s.alone()
}

// divided returns the parameters of a layer whose gradients ranks divide.
func (u Updater) divided(layer *graph.Block) []*graph.Param {
	return u.those(layer, func(param *graph.Param) bool {
		return !param.Frozen && u.plan.ZeroOf(layer, param) >= plan.ZeroGradients
	})
}

// added returns the time to add those gradients of a layer that a visit has reduced to those of earlier visits.
func (u Updater) added(layer *graph.Block) (t ir.Seconds) {
	for _, param := range u.divided(layer) {
		sum := u.slice(param, ir.F32)
		add := ir.Instr{Op: ir.Add, Args: []ir.View{sum, sum, u.slice(param, u.plan.ReducedType(param))}}
		t += u.cost.Time(add.Work(), cost.Link{})
	}
	return t
}

// slice returns a view of a rank's slice of a gradient.
func (u Updater) slice(param *graph.Param, d ir.DType) ir.View {
	return ir.View{Shape: [ir.MaxDims]int64{u.plan.Slicing(param).Rows, param.Local[1]}, DType: d}
}

// kernels returns the time to compute the sum of squares of a rank's slice of a gradient, and to update the
// part of the parameter whose optimizer state the rank holds.
func (u Updater) kernels(b *graph.Block, param *graph.Param) ir.Seconds {
	d := u.plan.ReducedType(param)
	sumsq := ir.Instr{Op: ir.SumSq, Args: []ir.View{{}, u.slice(param, d)}, Attrs: make([]ir.Attr, len(ir.Ops[ir.SumSq].Attrs))}
	t := u.cost.Time(sumsq.Work(), cost.Link{}) + max(u.update(b, param), u.passes(b, param))
	if d != ir.F32 && u.plan.ZeroOf(b, param) < plan.ZeroGradients {
		t += u.cast(u.plan.StateRows(b, param)*param.Local[1], d)
	}
	return t
}

// passes returns the time to copy optimizer state from host memory to the device and back, block by
// block.
func (u Updater) passes(b *graph.Block, param *graph.Param) ir.Seconds {
	var in, out ir.Seconds
	rows, each := u.plan.StateRows(b, param), u.plan.HostBlock(b, param)
	for _, d := range u.plan.HostStates(u.graph, b, param) {
		for first := int64(0); first < rows; first += each {
			bytes := ir.Bytes(min(each, rows-first)*param.Local[1]) * d.Bytes()
			in += u.cost.Time(ir.Work{Kind: ir.WorkH2D, Bytes: bytes}, cost.Link{})
			out += u.cost.Time(ir.Work{Kind: ir.WorkD2H, Bytes: bytes}, cost.Link{})
		}
	}
	if u.plan.Cluster.CopyDuplex == "half" {
		return in + out
	}
	return max(in, out)
}

// update returns the time of the optimizer's kernels and collectives for the part of a parameter whose state a
// rank holds.
func (u Updater) update(b *graph.Block, param *graph.Param) (t ir.Seconds) {
	update := u.graph.Update(&u.plan.Train.Optimizer, b, param, u.plan.StateSlices(b, param))
	for i := range update.Forward {
		switch n := &update.Forward[i]; n.Op {
		case ir.AllGather:
			t += u.gathered(param, update.Values[n.Args[0].Value].DType)
		case ir.AllReduce:
			t += u.cost.Time(update.Work(n, graph.Size{}), u.stage[graph.GroupSP])
		default:
			t += u.cost.Time(update.Work(n, graph.Size{}), cost.Link{})
		}
	}
	return t
}
