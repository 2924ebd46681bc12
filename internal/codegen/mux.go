package codegen

import (
	"fmt"
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// This file emits tasks that the ranks of several stages share. internal/schedule/slot.go defines the order of actions.
// All ranks issue their messages in the same order: slot by slot, layer by layer, stage by stage.

// sharedSlot is a rank's work in a slot.
type sharedSlot struct {
	*lowering
	mine, all []plan.Task          // tasks in the slot, of this rank and of all ranks
	x         map[plan.Task]uint32 // the current rows of tasks, or their gradients
	envs      map[plan.Task]*env   // of tasks, for their current layer
	adds      map[int][]sum        // [stage]: contributions to gradients that have been received but not yet added
	working   int                  // stage whose pieces the rank is working on; -1: none
	since     position             // start of that work
}

// newSharedSlot returns the slot that contains a task.
func (s *lowering) newSharedSlot(t plan.Task) *sharedSlot {
	w := &sharedSlot{
		lowering: s, all: s.plan.Sharing().Tasks(t.Kind, t.Microbatch, t.Slot()), x: map[plan.Task]uint32{},
		envs: map[plan.Task]*env{}, adds: map[int][]sum{}, working: -1,
	}
	for _, mine := range s.work.tasks {
		if schedule.SameSlot(mine, t) {
			w.mine = append(w.mine, mine)
		}
	}
	return w
}

// act emits an action of the slot.
func (w *sharedSlot) act(a schedule.Action) {
	t := w.work.tasks[a.Task]
	switch a.Op {
	case schedule.HandOut:
		w.handOut()
	case schedule.HandIn:
		w.handIn()
	case schedule.Lend:
		w.lendWeights(int(a.Of), int(a.Layer))
	case schedule.Enter:
		w.workOn(w.rank)
		w.provide(t, w.layerOf(a))
		w.enter(w.layerOf(a))
	case schedule.FirstHalf:
		w.workOn(t.Stage)
		w.firstHalf(t, w.layerOf(a))
	case schedule.SecondHalf:
		w.workOn(t.Stage)
		w.secondHalf(t, w.layerOf(a))
	case schedule.Exchange:
		w.workOn(int(a.Of))
		w.exchange(int(a.Of), int(a.Layer))
		w.working = -1
	case schedule.Return:
		w.returnGradients(int(a.Layer))
	case schedule.Reduce:
		w.provide(t, w.layerOf(a))
		w.lowering.act(a)
	case schedule.End:
		w.endTask(t, a, w.x[t])
	default:
		w.lowering.act(a)
	}
}

// workOn records the position at which the rank begins to work on the pieces of a stage.
func (w *sharedSlot) workOn(stage int) {
	if w.working != stage {
		w.working, w.since = stage, w.now()
	}
}

// sum is a contribution to a gradient that another rank has sent.
type sum struct{ to, part ir.View }

// tasksOf returns the tasks of a stage in the slot.
func (w *sharedSlot) tasksOf(stage int) []plan.Task {
	return slices.DeleteFunc(slices.Clone(w.all), func(t plan.Task) bool { return t.Stage != stage })
}

// exchange issues the messages that the tasks of a stage need in their k-th layer. Incoming messages may arrive
// while this rank works on the stage.
func (w *sharedSlot) exchange(stage, k int) {
	tasks := w.tasksOf(stage)
	layer := w.path(tasks[0])[k]
	w.provide(tasks[0], layer)
	if tasks[0].Kind == plan.Forward {
		w.shareRows(tasks)
		return
	}
	w.shareGradients(tasks, layer)
	for _, a := range w.adds[stage] {
		w.reserve(a.part.Buffer, w.since)
	}
}

// addUp adds the received contributions to the gradients of K and V.
func (w *sharedSlot) addUp(t plan.Task, layer int) {
	w.provide(t, layer)
	for _, a := range w.adds[t.Stage] {
		w.op(ir.Add, ir.Compute, []ir.View{a.to, a.to, a.part})
	}
	delete(w.adds, t.Stage)
}

// runOf returns how many tasks at the start of a list have the same key.
func runOf(tasks []plan.Task, key func(plan.Task) int) int {
	n := 1
	for n < len(tasks) && key(tasks[n]) == key(tasks[0]) {
		n++
	}
	return n
}

// provide sets the provenance of instructions that lend weights, share rows or return gradients.
func (e *emitter) provide(t plan.Task, layer int) {
	e.at(t)
	e.prov.Layer = int32(layer)
	e.decidedBy("mux", "schedule.mux")
}

func (w *sharedSlot) layerEnv(t plan.Task, layer int) *env {
	w.prov.Layer = int32(layer)
	w.decidedBy("lower", "model.layers")
	e := w.newEnv(w.block(t, layer), w.paramsOf(t, layer), t, layer, w.sizeOf(t))
	w.envs[t] = e
	return e
}

// firstHalf emits the part of a layer that precedes the exchange of K and V, or of their gradients.
func (w *sharedSlot) firstHalf(t plan.Task, layer int) {
	w.at(t)
	if _, known := w.x[t]; !known {
		w.x[t] = w.flow.input(t)
	}
	e := w.layerEnv(t, layer)
	if t.Kind == plan.Forward {
		e.put(e.block.Input, w.x[t], 0)
		e.saveUnits()
		e.run(e.block.Forward[:e.block.BeforeAttention()])
		return
	}
	e.put(e.block.DOutput, w.x[t], 0)
	e.loadUnits()
	e.run(e.block.Backward[:e.block.BeforeKVGrads()])
}

// secondHalf emits the rest of a layer.
func (w *sharedSlot) secondHalf(t plan.Task, layer int) {
	w.addUp(t, layer)
	w.at(t)
	e := w.envs[t]
	w.prov.Layer = int32(e.layer)
	w.decidedBy("lower", "model.layers")
	if t.Kind == plan.Forward {
		e.run(e.block.Forward[e.block.BeforeAttention():])
		w.x[t] = e.at[e.block.Output].buffer
	} else {
		e.run(e.block.Backward[e.block.BeforeKVGrads():])
		w.x[t] = e.gradient()
	}
	w.prov.Layer = ir.None
}

// sizeOf returns the shape of a task on this rank. For a task of another stage, K and V end with the last rows
// that this rank computes for that stage.
func (e *emitter) sizeOf(t plan.Task) graph.Size {
	z := e.plan.SizeOf(t)
	if e.helps(t) {
		z.Sequence = e.helpedTokens(t)
	}
	return z
}

func (e *emitter) helps(t plan.Task) bool {
	return e.order.plan.Runner(t) == e.rank && e.plan.Home(t.Stage) != e.rank
}

// helpedTokens returns the number of tokens up to the end of this rank's last task on a stage that it helps.
func (e *emitter) helpedTokens(t plan.Task) int64 {
	end := int64(0)
	for _, other := range e.plan.Tasks[e.rank] {
		if other.Stage == t.Stage {
			z := e.plan.SizeOf(other)
			end = max(end, z.Prefix+z.Tokens)
		}
	}
	return end
}

// toRank and fromRank issue the two ends of a message between this rank and its counterpart in another stage.
func (e *emitter) toRank(rank int, v ir.View) {
	e.op(ir.Send, ir.Mux, []ir.View{v}, e.constRef(rankConst(rank)))
}

func (e *emitter) fromRank(rank int, v ir.View) {
	e.op(ir.Recv, ir.MuxIn, []ir.View{v}, e.constRef(rankConst(rank)))
}

// shareRows sends the rows of K and V that tasks of one stage have computed to the ranks that will read them.
func (w *sharedSlot) shareRows(tasks []plan.Task) {
	w.eachExchange(tasks, graph.Cache, func(from, to int, _ string, view func() ir.View) {
		switch w.rank {
		case from:
			w.toRank(to, view())
		case to:
			w.fromRank(from, view())
		}
	})
}

// shareGradients sends each rank's contributions to the gradients of a task's rows to the rank that
// runs the task, which adds them in the order of ranks.
func (w *sharedSlot) shareGradients(tasks []plan.Task, layer int) {
	w.eachExchange(tasks, graph.CacheGrad, func(to, from int, value string, view func() ir.View) {
		switch w.rank {
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

// eachExchange calls visit for each of K and V, or each of their gradients, and for each pair of ranks in which one
// runs pieces of a stage and the other reads their rows. On both ranks, the view covers the rows of these
// pieces.
func (w *sharedSlot) eachExchange(tasks []plan.Task, kind graph.Kind, visit func(runner, other int, value string, view func() ir.View)) {
	for len(tasks) > 0 {
		n := runOf(tasks, w.plan.Runner)
		run, runner := tasks[:n], w.plan.Runner(tasks[0])
		tasks = tasks[n:]
		for _, reader := range w.plan.Sharing().Readers(run[0]) {
			other := reader.Rank
			if w.rank != runner && w.rank != other {
				continue
			}
			e := w.envOfStage(run[0].Stage)
			for v := range e.block.Values {
				if e.block.Values[v].Kind == kind && (kind == graph.Cache || e.block.ReadsBack(v)) {
					visit(runner, other, e.block.Values[v].Name, func() ir.View { return w.rowsOf(e, v, run) })
				}
			}
		}
	}
}

// envOfStage returns the env of one of this rank's tasks on a stage.
func (w *sharedSlot) envOfStage(stage int) *env {
	for _, t := range w.mine {
		if t.Stage == stage {
			return w.envs[t]
		}
	}
	panic("internal: mux: a rank shares rows of a stage without a task on it")
}

// rowsOf returns the rows of K, V or one of their gradients that belong to consecutive pieces.
func (w *sharedSlot) rowsOf(e *env, value int, run []plan.Task) ir.View {
	z := w.plan.SizeOf(run[0])
	for _, t := range run[1:] {
		other := w.plan.SizeOf(t)
		z.Prefix, z.Tokens = min(z.Prefix, other.Prefix), z.Tokens+other.Tokens
	}
	a := graph.Arg{Value: value, Span: graph.Tail}
	return e.view(a, e.block.View(a, z))
}

// handOut embeds the subsequence that enters the pipeline, and sends its pieces to the ranks that run them in
// the first stage.
func (w *sharedSlot) handOut() {
	for _, t := range w.all {
		if t.Stage > 0 {
			continue
		}
		runner, home := w.plan.Runner(t), w.plan.Home(0)
		w.at(t)
		if w.rank == home {
			w.x[t] = w.embed(t)
		}
		if runner == home {
			continue
		}
		w.provide(t, ir.None)
		_, view := w.hidden(w.plan.SizeOf(t))
		switch w.rank {
		case home:
			w.toRank(runner, view(w.x[t]))
			w.flow.lagging = append(w.flow.lagging, w.x[t])
		case runner:
			w.x[t] = w.flow.allocateInput(t)
			w.fromRank(home, view(w.x[t]))
		}
	}
}

// handIn sends the gradients of the first stage's pieces to the rank that has the embedding.
func (w *sharedSlot) handIn() {
	if len(w.model.Embedding.Backward) == 0 {
		return
	}
	for _, t := range w.all {
		if t.Stage > 0 {
			continue
		}
		runner, home := w.plan.Runner(t), w.plan.Home(0)
		w.provide(t, ir.None)
		size, view := w.hidden(w.plan.SizeOf(t))
		if runner != home {
			switch w.rank {
			case home:
				w.x[t] = w.allocate(w.label(t, ir.None, "d.embed.in"), ir.Device, size)
				w.fromRank(runner, view(w.x[t]))
			case runner:
				w.toRank(home, view(w.x[t]))
				w.flow.lagging = append(w.flow.lagging, w.x[t])
			}
		}
		if w.rank == home {
			w.at(t)
			w.embeddingGradients(t, w.x[t])
		}
	}
}

// lendWeights sends the weights of the k-th layers of a slot's tasks to the ranks that begin to help: from
// the rank that has them to the first helper, and from each helper to the next.
func (w *sharedSlot) lendWeights(slot, k int) {
	for stage := range slot + 1 {
		w.lendWeightsOf(stage, slot, k)
	}
}

func (w *sharedSlot) lendWeightsOf(stage, slot, k int) {
	t := w.mine[0]
	t.Stage = stage
	path := w.path(t)
	if k >= len(path) {
		return
	}
	layer := path[k]
	w.provide(t, layer)
	way, needed := w.lendingWay(t, layer, slot)
	for i := range w.layerOfModel(layer).Params {
		for hop := 1; hop < len(way) && needed[hop]>>i&1 == 1; hop++ {
			lender, borrower := way[hop-1], way[hop]
			switch w.rank {
			case lender:
				if hop == 1 {
					w.aside(func() { w.gatherWeights(layer, 1<<i) })
				}
				p := w.paramsFor(stage, layer)[i]
				w.toRank(borrower, p.view(p.weight, p.DType(w.model.DType())))
			case borrower:
				p := w.weights.borrowed[layer][i]
				act := p.DType(w.model.DType())
				p.weight = w.allocate(p.name+"."+t.Kind.String(), ir.Device, ir.Bytes(p.elements())*act.Bytes())
				w.fromRank(lender, p.view(p.weight, act))
			}
		}
	}
}

// lendingWay lists the ranks through which a stage's weights pass in a slot: the rank that holds the stage,
// then those that begin to help it. It also returns, for each helper, the parameters of the layer that this or
// a later helper reads. If the rank itself is one of these helpers, lendingWay creates the params that it
// borrows.
func (w *sharedSlot) lendingWay(t plan.Task, layer, slot int) (way []int, needed []plan.ParamSet) {
	way = append([]int{w.plan.Home(t.Stage)}, w.plan.Sharing().Borrowers(t.Kind, t.Stage, slot)...)
	needed = make([]plan.ParamSet, len(way)+1)
	for hop := len(way) - 1; hop > 0; hop-- {
		needed[hop] = needed[hop+1] | w.plan.Borrows(w.model, t.Kind, way[hop], t.Stage, layer-w.stages[t.Stage][0])
		if way[hop] == w.rank {
			w.weights.borrowed[layer] = w.borrow(t, layer)
		}
	}
	return way, needed
}

// borrow creates the parameters of a layer of another stage, but no buffers for their weights.
func (w *sharedSlot) borrow(t plan.Task, layer int) (ps []*param) {
	b := w.layerOfModel(layer)
	for i := range b.Params {
		g := &b.Params[i]
		ps = append(ps, &param{Param: g, cut: plan.Slicing{SP: 1, DP: 1, Rows: g.Local[0]}, name: fmt.Sprintf("m%d.%s%s", t.Microbatch, graph.LayerPrefix(layer), g.Name), weight: ir.NoBuffer})
	}
	return ps
}

// paramsOf returns the weights that a task uses: the rank's own, or those that it has borrowed.
func (s *lowering) paramsOf(t plan.Task, layer int) []*param { return s.paramsFor(t.Stage, layer) }

// paramsFor returns the weights of a layer of a stage.
func (s *lowering) paramsFor(stage, layer int) []*param {
	if s.plan.Home(stage) != s.rank {
		return s.weights.borrowed[layer]
	}
	return s.weights.layer[layer]
}

// returnGradients sends the gradients of borrowed weights to the rank that holds the weights. The last helper
// sends its gradients to the previous one, which adds its own, and so on. Each helper passes on a layer's
// gradients one round later than the next helper does, so no rank waits for the whole chain. The weights are
// those of the stage with the same number as the slot, because that stage has no shared tasks after the slot.
func (w *sharedSlot) returnGradients(round int) {
	t := w.mine[0]
	t.Stage = t.Slot()
	t.Subsequence = 0
	path := w.path(t)
	for _, hop := range w.plan.Sharing().Hops(t.Stage, len(path), round) {
		if w.rank != hop.From && w.rank != hop.From-1 {
			continue
		}
		w.provide(t, path[hop.Layer])
		for _, p := range w.paramsFor(t.Stage, path[hop.Layer]) {
			switch {
			case p.Frozen:
			case w.rank == hop.From:
				w.toRank(hop.From-1, p.whole(w.gradBuffer(p), ir.F32))
			default:
				w.addGradient(p, hop.From, t.Microbatch)
			}
		}
	}
}

// addGradient receives a helper's gradient and adds it on the stream of the message, because no other
// instruction waits for the sum.
func (w *sharedSlot) addGradient(p *param, from, microbatch int) {
	sum := p.whole(w.gradBuffer(p), ir.F32)
	name := fmt.Sprintf("m%d.%s.grad.from%d", microbatch, p.name, from)
	part := in(w.allocate(name, ir.Device, sum.Bytes()), sum)
	w.fromRank(from, part)
	w.op(ir.Add, ir.MuxIn, []ir.View{sum, sum, part})
}
