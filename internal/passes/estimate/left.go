package estimate

import (
	"sppo.dev/internal/cost"
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// This file estimates the durations of tasks that ranks share at the start of the pipeline. As in the
// program, all ranks run a slot together, layer by layer.

// leftCosts holds the costs of sharing layers of one kind. A layer has two halves: the part up to the computation of
// K and V or their gradients, and the rest.
type leftCosts struct {
	forward, backward [2][]ir.Seconds // [half][range]
	rows, gradients   []ir.Seconds    // [range], to send K and V, or contributions to their gradients, to one rank
	give              ir.Seconds      // to pass weight gradients to the previous rank
	add               ir.Seconds      // to add these gradients
}

// lendCosts are the times to send a layer's weights to one rank.
type lendCosts [plan.Backward + 1][][]ir.Seconds // [kind of task][stage][layer of the stage]

// The work, in layer visits, of computing the times of a layer for a subsequence, and the times of a task with
// helpers.
const (
	visitsPriced = 8
	visitsShared = 2
)

// allCosts returns the costs of a plan whose subsequences may be cut into pieces. In the result, index i is a
// range of tokens: a piece or a whole subsequence.
func (e *Estimator) allCosts(m cost.Model) *Costs {
	p, g := e.Plan, e.Model
	q, s := p, e.Shapes
	if len(p.Mux.Pieces) > 0 {
		q = inRanges(p)
		s = walk.NewShapes(q, g)
	}
	t := taskCosts(e.cache, q, s, m)
	e.work.Spend(visitsPriced * q.Subsequences.N * len(t.kinds))
	far := WidestLink(p, m, Farthest)
	pr := NewPricer(e.cache, p, m)
	if p.Mux.Right {
		t.shared = pr.sharedCosts(p, g, t, far)
		e.work.Spend(visitsShared * len(t.shared.layer))
	}
	if !p.Mux.Left {
		return t
	}
	message := func(n ir.Bytes) ir.Seconds { return m.Time(ir.Work{Kind: ir.WorkP2P, Bytes: n}, far) }
	for kind := range t.kinds {
		t.kinds[kind].left = pr.leftCosts(g, kind, q.Sizes(), message)
	}
	for _, kind := range []plan.TaskKind{plan.Forward, plan.Backward} {
		t.lend[kind] = lendTimes(p, g, kind, message)
	}
	return t
}

// leftCosts returns the costs of sharing layers of a kind, given the sizes of all ranges and the time of a message.
func (pr Pricer) leftCosts(g *graph.Model, kind int, sizes []graph.Size, message func(ir.Bytes) ir.Seconds) (of leftCosts) {
	b := g.Plain(kind)
	halves := func(of *[2][]ir.Seconds, nodes []graph.Node, first int, z graph.Size) {
		half := pr.Makespan(b, nodes[:first], z, 0)
		of[0], of[1] = append(of[0], half), append(of[1], pr.Makespan(b, nodes, z, 0)-half)
	}
	for _, z := range sizes {
		z = g.OfKind(z, kind)
		halves(&of.forward, b.Forward, b.BeforeAttention(), z)
		halves(&of.backward, b.Backward, b.BeforeKVGrads(), z)
		var rows, gradients ir.Seconds
		for v := range b.Values {
			part := b.Values[v].Bytes(z) * ir.Bytes(z.Tokens) / ir.Bytes(z.Sequence)
			switch b.Values[v].Kind {
			case graph.Cache:
				rows += message(part)
			case graph.CacheGrad:
				gradients += message(part)
			}
		}
		of.rows, of.gradients = append(of.rows, rows), append(of.gradients, gradients)
	}
	for i := range b.Params {
		n := ir.Bytes(b.Params[i].Local[0] * b.Params[i].Local[1])
		of.give += message(n * ir.F32.Bytes())
		of.add += pr.Cost.Time(ir.Work{Kind: ir.WorkMemory, Bytes: 3 * n * ir.F32.Bytes()}, cost.Link{})
	}
	return of
}

// lendTimes returns, for each layer of each stage, the time to send a helper all weights that any helper reads
// in a pass.
func lendTimes(p *plan.Plan, g *graph.Model, kind plan.TaskKind, message func(ir.Bytes) ir.Seconds) (times [][]ir.Seconds) {
	for stage, layers := range p.LayersPerStage {
		of := make([]ir.Seconds, layers)
		for k := range of {
			var read plan.ParamSet
			for rank := range p.Tasks {
				read |= p.Borrows(g, kind, rank, stage, k)
			}
			b := g.LayerOf(g.KindOf(p.LayerAt(stage, k)))
			for i := range b.Params {
				if w := &b.Params[i]; read>>i&1 == 1 {
					of[k] += message(ir.Bytes(w.Local[0]*w.Local[1]) * w.DType(g.DType()).Bytes())
				}
			}
		}
		times = append(times, of)
	}
	return times
}

// inRanges returns a copy of the plan in which every piece is a subsequence, so that costs can be computed for
// pieces. The tasks of the copy are not adapted.
func inRanges(p *plan.Plan) *plan.Plan {
	q := *p
	q.Subsequences.Lengths, q.Offload.Placement = nil, make([][]string, len(p.Offload.Placement))
	for x := range p.Subsequences.N {
		for _, t := range p.Pieces(plan.Task{Subsequence: x}) {
			q.Subsequences.Lengths = append(q.Subsequences.Lengths, p.SizeOf(t).Tokens)
			for s := range q.Offload.Placement {
				q.Offload.Placement[s] = append(q.Offload.Placement[s], p.Offload.Placement[s][x])
			}
		}
	}
	q.Subsequences.N = len(q.Subsequences.Lengths)
	return &q
}

// transfer simulates a message between ranks that share tasks, and returns when it arrives. Each rank sends one
// message at a time, and receives one at a time.
func (s *Simulation) transfer(from, to *simStage, ready, d ir.Seconds) ir.Seconds {
	from.muxOut = max(from.muxOut, to.muxIn, ready) + d
	to.muxIn = from.muxOut
	return to.muxIn
}

// sharedSlot is a slot being simulated. All lists except the list of the slot's tasks are indexed by rank.
type sharedSlot struct {
	*Simulation
	first   plan.Task
	all     []slotTask
	actions [][]schedule.Action  // actions of this slot that have not run yet
	ready   []map[int]ir.Seconds // [stage]: when the results of other ranks have arrived
	summed  []ir.Seconds         // when the last weight gradients received have been added
}

// slotTask is a task in a slot.
type slotTask struct {
	plan.Task
	runner, at int // the rank that runs it; the range of its tokens
	readers    []schedule.Reader
}

func sharedTasks(p *plan.Plan, of plan.Task) (out []slotTask) {
	sharing := p.Sharing()
	for _, t := range sharing.Tasks(of.Kind, of.Microbatch, of.Slot()) {
		out = append(out, slotTask{t, sharing.Runner(t), walk.RangeOf(p, t), sharing.Readers(t)})
	}
	return out
}

// lentLayer is the k-th layer of a stage, in order of use, on a rank that borrows it.
type lentLayer struct{ rank, stage, k int }

// newSharedSlot returns the slot that all ranks have reached.
func newSharedSlot(s *Simulation, t plan.Task) *sharedSlot {
	w := &sharedSlot{
		Simulation: s, first: t, all: sharedTasks(s.Plan, t), summed: make([]ir.Seconds, len(s.stages)),
	}
	for r := range s.stages {
		w.actions, w.ready = append(w.actions, s.stages[r].list.Of(s.stages[r].done)), append(w.ready, map[int]ir.Seconds{})
	}
	return w
}

// run simulates the slot. It advances every rank through its own actions up to the next action that all ranks
// take together, simulates that action, and so on.
func (w *sharedSlot) run() {
	for {
		var common []schedule.Action
		for r := range w.stages {
			for len(w.actions[r]) > 0 && !w.actions[r][0].Op.Common() {
				w.actAlone(r, w.actions[r][0])
				w.actions[r] = w.actions[r][1:]
			}
			if len(w.actions[r]) > 0 {
				common, w.actions[r] = w.actions[r][:1], w.actions[r][1:]
			}
		}
		if common == nil {
			return
		}
		w.actTogether(common[0])
	}
}

// actAlone simulates an action that one rank takes by itself.
func (w *sharedSlot) actAlone(rank int, a schedule.Action) {
	st := &w.stages[rank]
	n := st.first + a.Task
	switch a.Op {
	case schedule.Enter:
		st.now = max(st.now, st.whole)
	case schedule.Gather, schedule.Reduce:
		w.divided(st, n, a)
	case schedule.Sum:
		w.sum(st, n, a)
	case schedule.FirstHalf:
		w.firstHalf(st, n, int(a.Layer))
	case schedule.SecondHalf:
		w.secondHalf(st, n, int(a.Layer))
	case schedule.Release:
		w.release(st, &w.Nodes[st.first+int32(st.done)], a)
	case schedule.Reload:
		w.reload(st, a)
	case schedule.End:
		st.done++
		if t := &w.Nodes[n]; t.Feeds {
			w.deliver(t)
		}
	case schedule.Complete, schedule.Free: // take no time
	default:
		panic("estimate: an action of a shared slot without a duration: " + schedule.Ops[a.Op].Name)
	}
}

// divided simulates a collective on a layer's divided weights or gradients. Without replicas, the next visit waits for it.
func (w *sharedSlot) divided(st *simStage, n int32, a schedule.Action) {
	of := &w.params.kinds[w.kindAt(n, a)]
	switch {
	case w.params.ownStream && a.Op == schedule.Gather:
		w.gather(st, a)
	case w.params.ownStream:
		w.reduce(st, n, a)
	case a.Op == schedule.Gather:
		w.gather(st, a)
		if w.params.byVisit {
			st.whole = max(st.whole, st.now) + of.weights.alone()
		}
	default:
		w.reduce(st, n, a)
		st.whole = max(st.whole, st.now) + of.gradients.alone()
	}
}

// actTogether simulates an action that all ranks take together.
func (w *sharedSlot) actTogether(a schedule.Action) {
	switch a.Op {
	case schedule.HandOut:
		w.handOut()
	case schedule.HandIn:
		w.handIn()
	case schedule.Lend:
		w.lendWeights(int(a.Of), int(a.Layer))
	case schedule.Exchange:
		for _, t := range w.all {
			if t.Stage == int(a.Of) {
				w.exchange(t, int(a.Layer))
			}
		}
	case schedule.Return:
		w.giveBack(int(a.Layer))
	default:
		panic("estimate: a common action without a duration: " + schedule.Ops[a.Op].Name)
	}
}

// lendWeights sends the weights of the k-th layer of every stage in a slot to the ranks that begin to help the stage
// in that slot. Each of these ranks passes the weights on to the next.
func (w *sharedSlot) lendWeights(slot, k int) {
	sharing := w.Plan.Sharing()
	for stage := range slot + 1 {
		if k >= w.Plan.LayersPerStage[stage] {
			continue
		}
		layer := k
		if w.first.Kind == plan.Backward {
			layer = w.Plan.LayersPerStage[stage] - 1 - k
		}
		lender, there := w.Plan.Home(stage), ir.Seconds(0)
		for _, r := range sharing.Borrowers(w.first.Kind, stage, slot) {
			there = w.transfer(&w.stages[lender], &w.stages[r], there, w.lend[w.first.Kind][stage][layer])
			w.lent[lentLayer{r, stage, k}], lender = there, r
		}
	}
}

// giveBack sends the helpers' weight gradients one rank closer to their owner. Gradients are added
// as they arrive.
func (w *sharedSlot) giveBack(round int) {
	stage := w.first.Slot()
	for _, hop := range w.Plan.Sharing().Hops(stage, w.Plan.LayersPerStage[stage], round) {
		st, to, of := &w.stages[hop.From], &w.stages[hop.From-1], &w.layerAt(stage, hop.Layer).left
		w.transfer(st, to, max(st.now, w.summed[hop.From]), of.give)
		to.muxIn = max(to.muxIn, to.now) + of.add
		w.summed[hop.From-1] = to.muxIn
	}
}

// handOut embeds the pieces of the first stage and sends them to the ranks that run them.
func (w *sharedSlot) handOut() {
	home := &w.stages[w.Plan.Home(0)]
	for _, t := range w.all {
		if t.Stage == 0 {
			home.run(w.embed[t.at])
			if st := &w.stages[t.runner]; st != home {
				w.arrives[w.NumberOf(t.Task)] = w.transfer(home, st, home.now, w.message[t.at])
			}
		}
	}
}

// handIn sends the gradients of the first stage's pieces to the rank with the embedding. The last slot ends
// only when all messages have arrived.
func (w *sharedSlot) handIn() {
	home := &w.stages[w.Plan.Home(0)]
	for _, t := range w.all {
		if t.Stage == 0 {
			if st := &w.stages[t.runner]; st != home {
				home.now = max(home.now, w.transfer(st, home, st.now, w.message[t.at]))
			}
			home.run(w.embedGrad[t.at].Whole)
		}
	}
	if w.first.Slot() == 0 {
		for r := range w.stages {
			w.stages[r].now = max(w.stages[r].now, w.stages[r].muxOut, w.stages[r].muxIn)
		}
	}
}

// firstHalf runs a layer until K and V, or their gradients, are computed.
func (w *sharedSlot) firstHalf(st *simStage, n int32, layer int) {
	t := &w.Nodes[n]
	st.now = max(st.now, w.arrives[n])
	k := layer
	if t.Kind == plan.Backward {
		k = int(t.End-t.First) - 1 - layer
	}
	st.now = max(st.now, w.lent[lentLayer{int(t.Rank), int(t.Stage), k}], st.gathered[[2]int32{t.Stage, int32(layer)}])
	if t.Kind == plan.Forward {
		st.run(w.layer(t.Stage, layer).left.forward[0][t.At])
		return
	}
	st.wait(t.Subsequence, w.back[int(t.Layers)+layer])
	of := w.layer(t.Stage, layer)
	st.run(of.left.backward[0][t.At] + w.backwardOf(t, layer).Whole - of.backward[t.At].Whole)
}

// secondHalf runs the rest of a layer.
func (w *sharedSlot) secondHalf(st *simStage, n int32, layer int) {
	t := &w.Nodes[n]
	st.now = max(st.now, w.ready[t.Rank][int(t.Stage)])
	begin := st.now
	if t.Kind == plan.Backward {
		st.run(w.layer(t.Stage, layer).left.backward[1][t.At])
		return
	}
	st.run(w.layer(t.Stage, layer).left.forward[1][t.At])
	w.sent[int(t.Layers)+layer] = w.offload(st, t, layer, begin)
}

// layerAt returns the costs of the k-th layer of a stage, in the order of the slot's pass.
func (w *sharedSlot) layerAt(stage, k int) *layerCosts {
	if w.first.Kind == plan.Backward {
		k = w.Plan.LayersPerStage[stage] - 1 - k
	}
	return w.layer(int32(stage), k)
}

// exchange sends K and V of a task's k-th layer from the rank that computes them to the ranks that read them. In the
// backward pass it sends contributions to their gradients the other way.
func (w *sharedSlot) exchange(t slotTask, k int) {
	a, of := &w.stages[t.runner], &w.layerAt(t.Stage, k).left
	for _, other := range t.readers {
		b := &w.stages[other.Rank]
		if t.Kind == plan.Backward {
			added := ir.Seconds(0) // contributions summed in earlier slots are ready immediately
			if other.Waits {
				added = b.now
			}
			w.ready[t.runner][t.Stage] = w.transfer(b, a, added, of.gradients[t.at])
			continue
		}
		end := w.transfer(a, b, a.now, of.rows[t.at])
		if other.Waits {
			w.ready[other.Rank][t.Stage] = end
		}
	}
}
