package codegen

import (
	"fmt"
	"slices"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/passes"
)

// Tasks that the ranks of several stages share. A layer of a piece has two halves: what comes before attention, or in the
// backward pass before the gradients of K and V are used; then rows of K and V, or what others add to their gradients,
// travel; then the rest. In a shared slot every rank goes round its stages: of each it runs the second half of the layer
// before and the first half of the next, so that what travels for one stage has the time of the others. All ranks issue
// the messages of a slot in one order, slot by slot, layer by layer, stage by stage: the job cannot deadlock.

// sharedSlot emits what this rank does of the slot that begins with a task.
func (s *stage) sharedSlot(tasks []passes.Task, first int) {
	end := first
	for end < len(tasks) && passes.SameSlot(tasks[first], tasks[end]) {
		end++
	}
	t := tasks[first]
	w := &sharedWork{
		stage: s, mine: tasks[first:end], all: s.plan.SlotTasks(t.Kind, t.Microbatch, t.Slot()),
		beside: s.around(tasks, end-1), x: map[passes.Task]uint32{}, envs: map[passes.Task]*env{}, adds: map[int][]sum{},
	}
	if t.Kind == passes.Forward {
		w.forward(t.Slot())
	} else {
		w.backward(t.Slot())
	}
}

// sharedWork is what a rank does of a slot.
type sharedWork struct {
	*stage
	mine, all []passes.Task // of this rank, of all ranks
	beside    neighbours
	x         map[passes.Task]uint32 // what tasks have come to: rows or their gradients
	envs      map[passes.Task]*env   // of the layer that tasks are at
	adds      map[int][]sum          // [stage]: what has come for gradients and is yet to be added
}

// sum is a part of a gradient that another rank has sent.
type sum struct{ to, part ir.View }

func (w *sharedWork) forward(slot int) {
	w.handOut()
	for _, t := range w.mine {
		if _, known := w.x[t]; !known {
			w.x[t] = w.input(t)
		}
	}
	w.layerByLayer(slot, halves{w.beginForward, w.shareRows, func(e *env) {
		w.x[e.task] = w.finish(e, e.block.Forward[e.block.BeforeAttention():], e.block.Output)
	}})
	for _, t := range w.mine {
		w.pass(t, w.x[t])
	}
}

func (w *sharedWork) backward(slot int) {
	for _, t := range w.mine {
		w.reloadUpTo(t, nil, w.plan.Offload.Ahead-1)
		w.x[t] = w.input(t)
	}
	w.layerByLayer(slot, halves{w.beginBackward, w.shareGradients, func(e *env) {
		w.x[e.task] = w.finish(e, e.block.Backward[e.block.BeforeCacheGrads():], e.block.DInput)
	}})
	for _, t := range w.mine {
		if t.Stage > 0 {
			w.pass(t, w.x[t])
		}
	}
	w.handIn()
}

// halves are what a pass does of a layer: the first half of a task, the messages of a stage, the second half.
type halves struct {
	begin  func(t passes.Task, layer int)
	share  func(tasks []passes.Task, layer int)
	finish func(*env)
}

// layerByLayer takes all tasks through their layers side by side. Weights are lent while the slot before runs, or, in the first
// slot of a pass, the layer before. In the last backward slot of a stage the gradients of lent weights go back behind each layer.
func (w *sharedWork) layerByLayer(slot int, do halves) {
	layers, kind := slices.Max(w.plan.LayersPerStage), w.mine[0].Kind
	next, first := w.plan.NextShared(kind, slot)
	if first {
		w.lendWeights(slot, 0)
	}
	for k := range layers + 1 {
		for tasks := w.all; len(tasks) > 0; {
			n := runOf(tasks, func(t passes.Task) int { return t.Stage })
			w.goOn(tasks[:n], k, do)
			tasks = tasks[n:]
		}
		if first {
			w.lendWeights(slot, k+1)
		}
		w.lendWeights(next, k)
		if k > 0 {
			w.release(k - 1)
			w.endRound(k - 1)
		}
	}
	for round := layers; round < layers+w.plan.Parallel.PP-2-slot; round++ {
		w.endRound(round)
	}
	w.provide(w.mine[len(w.mine)-1], ir.None)
}

// goOn takes the tasks of one stage from the middle of a layer to the middle of their k-th.
func (w *sharedWork) goOn(tasks []passes.Task, k int, do halves) {
	path, start := w.path(tasks[0]), w.now()
	if 0 < k && k <= len(path) {
		w.provide(tasks[0], path[k-1])
		w.addUp(tasks[0].Stage)
		for _, t := range w.mine {
			if t.Stage == tasks[0].Stage {
				w.at(t)
				do.finish(w.envs[t])
				w.reloadUpTo(t, nil, k-1+w.plan.Offload.Ahead)
			}
		}
	}
	if k >= len(path) {
		return
	}
	if tasks[0].Stage == w.index0 {
		w.provide(tasks[0], path[k])
		w.enter(path[k])
	}
	for _, t := range w.mine {
		if t.Stage == tasks[0].Stage {
			w.at(t)
			do.begin(t, path[k])
		}
	}
	w.provide(tasks[0], path[k])
	do.share(tasks, path[k])
	for _, a := range w.adds[tasks[0].Stage] {
		w.reserve(a.part.Buffer, start)
	}
}

// endRound is behind the second halves of the layers that tasks have come to as their round-th. What has the last shared tasks of
// its stage leaves a layer when the gradients of those who helped have come through.
func (w *sharedWork) endRound(round int) {
	w.returnGradients(round)
	if slot := w.mine[0].Slot(); w.index0 == slot {
		round -= w.plan.Parallel.PP - 2 - slot
	}
	w.leave(round)
}

// leave ends the visit of the layer that own tasks have come to as their k-th.
func (w *sharedWork) leave(k int) {
	t := w.mine[0]
	t.Stage, t.Subsequence = w.index0, t.Slot()-w.index0
	if path := w.path(t); t.Kind == passes.Backward && t.Subsequence >= 0 && 0 <= k && k < len(path) {
		w.provide(t, path[k])
		w.leaveBackward(t, path[k])
	}
}

// addUp adds to gradients of K and V what has come for them.
func (w *sharedWork) addUp(stage int) {
	for _, a := range w.adds[stage] {
		w.op(ir.Add, ir.Compute, []ir.View{a.to, a.to, a.part})
	}
	delete(w.adds, stage)
}

// release ends and begins the copies of other tasks that go along with the k-th layer of the slot.
func (w *sharedWork) release(k int) {
	layers := slices.Max(w.plan.LayersPerStage)
	for _, t := range w.beside.leaving {
		w.releaseLayer(t, k)
	}
	if last := k + w.plan.Offload.Ahead - layers; last >= 0 && len(w.beside.coming) > 0 {
		w.reloadUpTo(w.beside.coming[0], w.beside.coming[1:], last)
	}
}

// runOf is how many of the first tasks have the same key.
func runOf(tasks []passes.Task, key func(passes.Task) int) int {
	n := 1
	for n < len(tasks) && key(tasks[n]) == key(tasks[0]) {
		n++
	}
	return n
}

// provide sets the provenance of what is lent, shared or returned.
func (s *stage) provide(t passes.Task, layer int) {
	s.at(t)
	s.prov.Layer = int32(layer)
	s.decidedBy("mux", "schedule.mux")
}

func (w *sharedWork) layerEnv(t passes.Task, layer int) *env {
	w.prov.Layer = int32(layer)
	w.decidedBy("lower", "model.layers")
	e := w.newEnv(w.block(t, layer), w.paramsOf(t, layer), t, layer, w.sizeOf(t))
	w.envs[t] = e
	return e
}

func (w *sharedWork) beginForward(t passes.Task, layer int) {
	e := w.layerEnv(t, layer)
	e.put(e.block.Input, w.x[t], 0)
	e.saveUnits()
	e.run(e.block.Forward[:e.block.BeforeAttention()])
}

func (w *sharedWork) beginBackward(t passes.Task, layer int) {
	e := w.layerEnv(t, layer)
	e.put(e.block.DOutput, w.x[t], 0)
	e.loadUnits()
	e.run(e.block.Backward[:e.block.BeforeCacheGrads()])
}

// finish emits the second half of a layer and gives its result.
func (w *sharedWork) finish(e *env, nodes []graph.Node, result int) uint32 {
	w.prov.Layer = int32(e.layer)
	w.decidedBy("lower", "model.layers")
	e.run(nodes)
	w.prov.Layer = ir.None
	return e.at[result].buffer
}

// sizeOf is the shape of a task as this rank does it: of another stage's K and V it has the rows up to the last that it helps
// with.
func (s *stage) sizeOf(t passes.Task) graph.Size {
	z := s.plan.SizeOf(t)
	if s.helps(t) {
		z.Sequence = s.helpedTokens(t)
	}
	return z
}

func (s *stage) helps(t passes.Task) bool {
	return s.order.Runner(t) == s.index0 && s.plan.Home(t.Stage) != s.index0
}

// helpedTokens are those up to the end of this rank's last task on a stage that it helps.
func (s *stage) helpedTokens(t passes.Task) int64 {
	end := int64(0)
	for _, other := range s.plan.Tasks[s.index0] {
		if other.Stage == t.Stage {
			z := s.plan.SizeOf(other)
			end = max(end, z.Prefix+z.Tokens)
		}
	}
	return end
}

// aside says whether a message between two tasks goes to or from a rank that helps, and so not along the ring.
func (s *stage) aside(from, to passes.Task) bool {
	helped := func(t passes.Task) bool { return s.order.Runner(t) != s.plan.Home(t.Stage) }
	return helped(from) || helped(to)
}

// toRank and fromRank issue the two ends of a message to the same rank of another stage.
func (s *stage) toRank(stage int, v ir.View) {
	s.op(ir.Send, ir.Mux, []ir.View{v}, s.constRef(rankConst(stage)))
}

func (s *stage) fromRank(stage int, v ir.View) {
	s.op(ir.Recv, ir.MuxIn, []ir.View{v}, s.constRef(rankConst(stage)))
}

// shareRows brings the rows of K and V that tasks of one stage have made to the ranks that will look at them.
func (w *sharedWork) shareRows(tasks []passes.Task, _ int) {
	w.eachExchange(tasks, graph.Cache, func(from, to int, _ string, view func() ir.View) {
		switch w.index0 {
		case from:
			w.toRank(to, view())
		case to:
			w.fromRank(from, view())
		}
	})
}

// shareGradients brings what ranks have added to the gradients of the rows of tasks to the ranks that run them, which will add
// it up in the order of ranks.
func (w *sharedWork) shareGradients(tasks []passes.Task, layer int) {
	w.eachExchange(tasks, graph.CacheGrad, func(to, from int, value string, view func() ir.View) {
		switch w.index0 {
		case from:
			w.toRank(to, view())
		case to:
			to := view()
			name := w.label(tasks[0], layer, fmt.Sprintf("%s.from%d", value, from))
			part := in(w.allocate(name, ir.Device, to.Bytes()), to)
			part.Offset = 0
			w.fromRank(from, part)
			w.adds[tasks[0].Stage] = append(w.adds[tasks[0].Stage], sum{to, part})
		}
	})
}

// eachExchange visits the pairs of a rank that runs pieces of a stage and a rank that sees them, for each cache or each
// gradient of one. The view is of the rows of the pieces, on a rank that takes part.
func (w *sharedWork) eachExchange(tasks []passes.Task, kind graph.Kind, visit func(runner, other int, value string, view func() ir.View)) {
	for len(tasks) > 0 {
		n := runOf(tasks, w.plan.Runner)
		run, runner := tasks[:n], w.plan.Runner(tasks[0])
		tasks = tasks[n:]
		for other := range w.plan.Parallel.PP {
			if other == runner || !w.plan.Sees(other, run[0]) || w.index0 != runner && w.index0 != other {
				continue
			}
			e := w.envOfStage(run[0].Stage)
			for v := range e.block.Values {
				if e.block.Values[v].Kind == kind {
					visit(runner, other, e.block.Values[v].Name, func() ir.View { return w.rowsOf(e, v, run) })
				}
			}
		}
	}
}

// envOfStage is one of this rank's tasks on a stage.
func (w *sharedWork) envOfStage(stage int) *env {
	for _, t := range w.mine {
		if t.Stage == stage {
			return w.envs[t]
		}
	}
	panic("internal: mux: a rank shares rows of a stage without a task on it")
}

// rowsOf are the rows of a cache, or of a gradient of one, that belong to a run of pieces.
func (w *sharedWork) rowsOf(e *env, value int, run []passes.Task) ir.View {
	z := w.plan.SizeOf(run[0])
	for _, t := range run[1:] {
		other := w.plan.SizeOf(t)
		z.Prefix, z.Tokens = min(z.Prefix, other.Prefix), z.Tokens+other.Tokens
	}
	a := graph.Arg{Value: value, Span: graph.Tail}
	return e.view(a, e.block.View(a, z))
}

// handOut embeds the subsequence that enters the pipeline, and brings its pieces to the ranks that begin with them.
func (w *sharedWork) handOut() {
	for _, t := range w.all {
		if t.Stage > 0 {
			continue
		}
		runner, home := w.plan.Runner(t), w.plan.Home(0)
		w.at(t)
		if w.index0 == home {
			w.x[t] = w.forwardInput(t)
		}
		if runner == home {
			continue
		}
		w.provide(t, ir.None)
		_, view := w.hidden(w.plan.SizeOf(t))
		switch w.index0 {
		case home:
			w.toRank(runner, view(w.x[t]))
			w.lagging = append(w.lagging, w.x[t])
		case runner:
			w.x[t] = w.allocateInput(t)
			w.fromRank(home, view(w.x[t]))
		}
	}
}

// handIn brings the gradients of the first stage's pieces to the rank that has the embedding.
func (w *sharedWork) handIn() {
	for _, t := range w.all {
		if t.Stage > 0 {
			continue
		}
		runner, home := w.plan.Runner(t), w.plan.Home(0)
		w.provide(t, ir.None)
		size, view := w.hidden(w.plan.SizeOf(t))
		if runner != home {
			switch w.index0 {
			case home:
				w.x[t] = w.allocate(w.label(t, ir.None, "d.embed.in"), ir.Device, size)
				w.fromRank(runner, view(w.x[t]))
			case runner:
				w.toRank(home, view(w.x[t]))
				w.lagging = append(w.lagging, w.x[t])
			}
		}
		if w.index0 == home {
			w.at(t)
			w.embeddingGradients(t, w.x[t])
		}
	}
}

// lendWeights brings the weights of the layers that the tasks of a slot come to as their k-th to the ranks that begin to help:
// from the rank that has them to the first, and from each to the next.
func (w *sharedWork) lendWeights(slot, k int) {
	for stage := range slot + 1 {
		w.lendWeightsOf(stage, slot, k)
	}
}

func (w *sharedWork) lendWeightsOf(stage, slot, k int) {
	t := w.mine[0]
	t.Stage = stage
	path := w.path(t)
	if k >= len(path) {
		return
	}
	layer, act := path[k], w.model.DType()
	w.provide(t, layer)
	way, needed := w.lendingWay(t, layer, slot)
	for i := range w.model.Layer.Params {
		for hop := 1; hop < len(way) && needed[hop]>>i&1 == 1; hop++ {
			lender, borrower := way[hop-1], way[hop]
			switch w.index0 {
			case lender:
				if hop == 1 {
					w.gatherWeights(layer)
				}
				p := w.paramsFor(stage, layer)[i]
				w.toRank(borrower, p.view(p.weight, act))
			case borrower:
				p := w.borrowed[layer][i]
				p.weight = w.allocate(p.name+"."+t.Kind.String(), ir.Device, ir.Bytes(p.elements())*act.Bytes())
				w.fromRank(lender, p.view(p.weight, act))
			}
		}
	}
}

// lendingWay lists the rank that has a stage and those that begin to help it in a slot, in the order in which weights
// go from one to the next, and the parameters of a layer that each and those after it read. A borrower gets new params.
func (w *sharedWork) lendingWay(t passes.Task, layer, slot int) (way []int, needed []passes.ParamSet) {
	way = []int{w.plan.Home(t.Stage)}
	for rank := range w.plan.Parallel.PP {
		if w.plan.Begins(t.Kind, rank, t.Stage, slot) {
			way = append(way, rank)
		}
	}
	needed = make([]passes.ParamSet, len(way)+1)
	for hop := len(way) - 1; hop > 0; hop-- {
		needed[hop] = needed[hop+1] | w.plan.Borrows(w.model, t.Kind, way[hop], t.Stage, layer-w.stages[t.Stage][0])
		if way[hop] == w.index0 {
			w.borrowed[layer] = w.borrow(t, layer)
		}
	}
	return way, needed
}

// borrow makes the parameters of a layer of another stage, without their weights.
func (w *sharedWork) borrow(t passes.Task, layer int) (ps []*param) {
	for i := range w.model.Layer.Params {
		g := &w.model.Layer.Params[i]
		ps = append(ps, &param{Param: g, name: fmt.Sprintf("m%d.%s%s", t.Microbatch, layerPrefix(layer), g.Name), weight: ir.NoBuffer})
	}
	return ps
}

// paramsOf are the weights that a task uses: the rank's own, or those that it has borrowed.
func (s *stage) paramsOf(t passes.Task, layer int) []*param { return s.paramsFor(t.Stage, layer) }

// paramsFor are those of a layer of a stage.
func (s *stage) paramsFor(stage, layer int) []*param {
	if s.plan.Home(stage) != s.index0 {
		return s.borrowed[layer]
	}
	return s.layer[layer]
}

// returnGradients brings the gradients of borrowed weights to the rank that has the weights: the last helper's go to the one
// before it, which adds its own, and so on. Each passes a layer on a round later than the one behind it, so that nobody waits
// for the whole row. The stage with the number of the slot has no more shared tasks.
func (w *sharedWork) returnGradients(round int) {
	t := w.mine[0]
	t.Stage = t.Slot()
	t.Subsequence = 0
	path, last := w.path(t), w.plan.Parallel.PP-1
	for from := t.Stage + 1; from <= last && t.Kind == passes.Backward; from++ {
		k := round - (last - from)
		if k < 0 || k >= len(path) || w.index0 != from && w.index0 != from-1 {
			continue
		}
		w.provide(t, path[k])
		for _, p := range w.paramsFor(t.Stage, path[k]) {
			if w.index0 == from {
				w.toRank(from-1, p.whole(w.gradBuffer(p), ir.F32))
			} else {
				w.addGradient(p, from, t.Microbatch)
			}
		}
	}
}

// addGradient adds up where the message comes in: nothing else waits for the sum.
func (w *sharedWork) addGradient(p *param, from, microbatch int) {
	sum := p.whole(w.gradBuffer(p), ir.F32)
	name := fmt.Sprintf("m%d.%s.grad.from%d", microbatch, p.name, from)
	part := in(w.allocate(name, ir.Device, sum.Bytes()), sum)
	w.fromRank(from, part)
	w.op(ir.Add, ir.MuxIn, []ir.View{sum, sum, part})
}
