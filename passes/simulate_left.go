package passes

import (
	"slices"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/ir/cost"
)

// Tasks that ranks share at the start of the pipeline, in virtual time: slots are run layer by layer by all ranks at once, as
// the program does.

// leftCosts are what sharing adds to the costs of ranges.
type leftCosts struct {
	forward, backward [2][]ir.Seconds              // [half][range], of a layer: until K and V are made, or their gradients, and behind that
	visit             visitTime                    // of parameters, which all pieces of a slot have in common
	rows, gradients   []ir.Seconds                 // [range], to bring K and V of a layer, or what was added to their gradients, to one rank
	lend              [Backward + 1][][]ir.Seconds // [kind][stage][layer of the stage], its weights to one rank
	give              ir.Seconds                   // a layer's gradients of weights from one rank
	add               ir.Seconds                   // these gradients up
}

// allCosts are the costs of a plan whose subsequences may be cut: indices i are of ranges, pieces or whole subsequences.
func (p *Plan) allCosts(c *Context, m cost.Model) *costs {
	q := p.inRanges()
	t := taskCosts(c, q, m)
	g, far := c.Model(p), p.widestLink(m, p.farthest)
	pr, b := newPricer(c, p, m), g.Layer
	if p.Mux.Right {
		t.shared = pr.sharedCosts(p, g, t, far)
	}
	if !p.Mux.Left {
		return t
	}
	message := func(n ir.Bytes) ir.Seconds { return m.Time(ir.Work{Kind: ir.WorkP2P, Bytes: n}, far) }
	t.left = &leftCosts{visit: t.under[0]}
	halves := func(of *[2][]ir.Seconds, nodes []graph.Node, first int, z graph.Size) {
		half := pr.makespan(b, nodes[:first], z, 0)
		of[0], of[1] = append(of[0], half), append(of[1], pr.makespan(b, nodes, z, 0)-half)
	}
	for _, z := range q.Sizes() {
		halves(&t.left.forward, b.Forward, b.BeforeAttention(), z)
		halves(&t.left.backward, b.Backward, b.BeforeCacheGrads(), z)
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
		t.left.rows, t.left.gradients = append(t.left.rows, rows), append(t.left.gradients, gradients)
	}
	for i := range b.Params {
		n := ir.Bytes(b.Params[i].Local[0] * b.Params[i].Local[1])
		t.left.give += message(n * ir.F32.Bytes())
		t.left.add += m.Time(ir.Work{Kind: ir.WorkMemory, Bytes: 3 * n * ir.F32.Bytes()}, cost.Link{})
	}
	for _, kind := range []TaskKind{Forward, Backward} {
		t.left.lend[kind] = p.lendTimes(g, kind, message)
	}
	return t
}

// lendTimes are the durations of bringing the weights of each stage's layers to a rank that helps in a pass, of all that any
// helper reads.
func (p *Plan) lendTimes(g *graph.Model, kind TaskKind, message func(ir.Bytes) ir.Seconds) (times [][]ir.Seconds) {
	for stage, layers := range p.LayersPerStage {
		of := make([]ir.Seconds, layers)
		for k := range of {
			var read ParamSet
			for rank := range p.Tasks {
				read |= p.Borrows(g, kind, rank, stage, k)
			}
			for i := range g.Layer.Params {
				if w := &g.Layer.Params[i]; read>>i&1 == 1 {
					of[k] += message(ir.Bytes(w.Local[0]*w.Local[1]) * g.DType().Bytes())
				}
			}
		}
		times = append(times, of)
	}
	return times
}

// rangeOf is the number of a task's tokens among pieces and whole subsequences.
func (p *Plan) rangeOf(t Task) int {
	at := t.Subsequence + max(0, t.Piece-1)
	for _, pieces := range p.Mux.Pieces[:min(t.Subsequence, len(p.Mux.Pieces))] {
		at += len(pieces) - 1
	}
	return at
}

// inRanges is the plan with pieces for subsequences: what it takes to price them. It has no tasks of its own.
func (p *Plan) inRanges() *Plan {
	if len(p.Mux.Pieces) == 0 {
		return p
	}
	q := *p
	q.Subsequences.Lengths, q.Offload.Fate = nil, make([][]string, len(p.Offload.Fate))
	for x := range p.Subsequences.N {
		for _, t := range p.Pieces(Task{Subsequence: x}) {
			q.Subsequences.Lengths = append(q.Subsequences.Lengths, p.SizeOf(t).Tokens)
			for s := range q.Offload.Fate {
				q.Offload.Fate[s] = append(q.Offload.Fate[s], p.Offload.Fate[s][x])
			}
		}
	}
	q.Subsequences.N = len(q.Subsequences.Lengths)
	return &q
}

// transfer is a message between ranks that share tasks; each sends one at a time, and receives one.
func (s *simulation) transfer(from, to *simStage, ready, d ir.Seconds) ir.Seconds {
	from.muxOut = max(from.muxOut, to.muxIn, ready) + d
	to.muxIn = from.muxOut
	return to.muxIn
}

// sharedSlot is a slot while it is simulated. All lists are by rank; tasks are numbers.
type sharedSlot struct {
	*simulation
	first   Task
	all     []slotTask
	mine    [][2]int32 // of the first, and of what is behind the last
	leaving [][]int
	ready   []map[int]ir.Seconds // [stage]: when what other ranks have made is there
	summed  []ir.Seconds         // when what helpers have given back last was added up
}

// slotTask is a task of a slot, and what each of its layers asks for again.
type slotTask struct {
	Task
	runner, at int    // who does it; its tokens among pieces and whole subsequences
	seers      []seer // other ranks
}

// seer is a rank that sees a task, in the same slot, where it waits for it, or in later ones.
type seer struct {
	rank  int
	waits bool
}

func (p *Plan) sharedTasks(of Task) (out []slotTask) {
	for _, t := range p.SlotTasks(of.Kind, of.Microbatch, of.Slot()) {
		w := slotTask{Task: t, runner: p.Runner(t), at: p.rangeOf(t)}
		for rank := range p.Parallel.PP {
			if rank != w.runner && p.sees(rank, t, w.runner) {
				w.seers = append(w.seers, seer{rank, p.waitsFor(rank, t, w.runner)})
			}
		}
		out = append(out, w)
	}
	return out
}

// lentLayer is the k-th layer of a stage, in the order of need, on a rank that borrows it.
type lentLayer struct{ rank, stage, k int }

// newSharedSlot is of the slot that all ranks have come to.
func newSharedSlot(s *simulation, t Task) *sharedSlot {
	w := &sharedSlot{simulation: s, first: t, all: s.plan.sharedTasks(t)}
	for r := range s.stages {
		st := &s.stages[r]
		end := st.done
		for end < len(st.tasks) && SameSlot(st.tasks[end], t) {
			end++
		}
		w.mine = append(w.mine, [2]int32{int32(s.firsts[r] + st.done), int32(s.firsts[r] + end)})
		w.leaving = append(w.leaving, slices.Clone(s.findLeaving(st, end-1, int32(r))))
		w.ready, w.summed = append(w.ready, map[int]ir.Seconds{}), append(w.summed, 0)
	}
	return w
}

func (w *sharedSlot) run() {
	slot, layers := w.first.Slot(), slices.Max(w.plan.LayersPerStage)
	next, first := w.plan.NextShared(w.first.Kind, slot)
	if w.first.Kind == Forward {
		w.enter()
	}
	if first {
		w.lend(slot, 0)
	}
	for k := range layers + 1 {
		visited := w.visit(slot, k)
		for tasks := w.all; len(tasks) > 0; {
			stage := tasks[0].Stage
			w.eachTask(stage, k-1, w.finish)
			w.eachTask(stage, k, w.begin)
			for ; len(tasks) > 0 && tasks[0].Stage == stage; tasks = tasks[1:] {
				w.exchange(tasks[0], k)
			}
		}
		if first {
			w.lend(slot, k+1)
		}
		w.lend(next, k)
		for r, until := range visited {
			w.stages[r].now = max(w.stages[r].now, until)
		}
		if k == 0 {
			continue
		}
		for r := range w.stages {
			w.release(&w.stages[r], w.leaving[r], k-1)
		}
		w.giveBack(k - 1)
	}
	for round := layers; round < layers+w.plan.Parallel.PP-2-slot; round++ {
		w.giveBack(round)
	}
	for r := range w.stages {
		for n := w.mine[r][0]; n < w.mine[r][1]; n++ {
			if t := &w.stops[n]; t.feeds {
				w.deliver(t)
			}
		}
	}
	if w.first.Kind == Backward {
		w.leave()
	}
}

// visit is until when each rank that has tasks of its own brings together parameters of its k-th layer, beside what it computes.
func (w *sharedSlot) visit(slot, k int) []ir.Seconds {
	until := make([]ir.Seconds, slot+1)
	for r := range until {
		if k < w.plan.LayersPerStage[r] {
			until[r] = w.stages[r].now + w.left.visit.weights
			if w.first.Kind == Backward {
				until[r] += w.left.visit.gradients
			}
		}
	}
	return until
}

// lend brings the weights of the k-th layers of a slot to the ranks that begin to help then, from one to the next.
func (w *sharedSlot) lend(slot, k int) {
	for stage := range slot + 1 {
		if k >= w.plan.LayersPerStage[stage] {
			continue
		}
		layer := k
		if w.first.Kind == Backward {
			layer = w.plan.LayersPerStage[stage] - 1 - k
		}
		lender, there := w.plan.Home(stage), ir.Seconds(0)
		for r := range w.stages {
			if w.plan.Begins(w.first.Kind, r, stage, slot) {
				there = w.transfer(&w.stages[lender], &w.stages[r], there, w.left.lend[w.first.Kind][stage][layer])
				w.lent[lentLayer{r, stage, k}], lender = there, r
			}
		}
	}
}

// giveBack takes the gradients of lent weights a rank nearer to who has the weights; they are added up as they come in.
func (w *sharedSlot) giveBack(round int) {
	stage, last := w.first.Slot(), len(w.stages)-1
	for from := stage + 1; from <= last && w.first.Kind == Backward; from++ {
		if k := round - (last - from); 0 <= k && k < w.plan.LayersPerStage[stage] {
			st, to := &w.stages[from], &w.stages[from-1]
			w.transfer(st, to, max(st.now, w.summed[from]), w.left.give)
			to.muxIn = max(to.muxIn, to.now) + w.left.add
			w.summed[from-1] = to.muxIn
		}
	}
}

// enter embeds the pieces of the first stage.
func (w *sharedSlot) enter() {
	home := &w.stages[w.plan.Home(0)]
	for _, t := range w.all {
		if t.Stage == 0 {
			home.run(w.embed[t.at])
			if st := &w.stages[t.runner]; st != home {
				w.arrives[w.numberOf(t.Task)] = w.transfer(home, st, home.now, w.message[t.at])
			}
		}
	}
}

// leave brings the gradients of the first stage's pieces to its embedding. Behind the last slot all messages have arrived.
func (w *sharedSlot) leave() {
	home := &w.stages[w.plan.Home(0)]
	for _, t := range w.all {
		if t.Stage == 0 {
			if st := &w.stages[t.runner]; st != home {
				home.now = max(home.now, w.transfer(st, home, st.now, w.message[t.at]))
			}
			home.run(w.embedGrad[t.at].whole)
		}
	}
	if w.first.Slot() == 0 {
		for r := range w.stages {
			w.stages[r].now = max(w.stages[r].now, w.stages[r].muxOut, w.stages[r].muxIn)
		}
	}
}

// eachTask visits the tasks of a stage that have a k-th layer to do, and that layer's number on its stage.
func (w *sharedSlot) eachTask(stage, k int, visit func(st *simStage, n int32, layer int)) {
	layers := w.plan.LayersPerStage[stage]
	if k < 0 || k >= layers {
		return
	}
	for r := range w.stages {
		for n := w.mine[r][0]; n < w.mine[r][1]; n++ {
			switch t := &w.stops[n]; {
			case int(t.stage) != stage:
			case t.kind == Forward:
				visit(&w.stages[r], n, k)
			default:
				visit(&w.stages[r], n, layers-1-k)
			}
		}
	}
}

// begin runs a layer until K and V, or their gradients, are made.
func (w *sharedSlot) begin(st *simStage, n int32, layer int) {
	t := &w.stops[n]
	st.now = max(st.now, w.arrives[n])
	k := layer
	if t.kind == Backward {
		k = int(t.end-t.first) - 1 - layer
	}
	st.now = max(st.now, w.lent[lentLayer{int(t.rank), int(t.stage), k}])
	if t.kind == Forward {
		st.run(w.left.forward[0][t.at])
		return
	}
	layers := int(t.end - t.first)
	for at := range min(layers, layers-layer+w.plan.Offload.Ahead-1) {
		w.reload(st, n, at, st.now)
	}
	st.wait(t.subsequence, w.back[int(t.layers)+layer])
	st.run(w.left.backward[0][t.at] + w.backwardOf(t, layer).whole - w.backward[t.at].whole)
}

// finish runs the rest of a layer.
func (w *sharedSlot) finish(st *simStage, n int32, layer int) {
	t := &w.stops[n]
	st.now = max(st.now, w.ready[t.rank][int(t.stage)])
	begin := st.now
	if t.kind == Backward {
		st.run(w.left.backward[1][t.at])
		return
	}
	st.run(w.left.forward[1][t.at])
	w.sent[int(t.layers)+layer] = w.simulation.leave(st, t, layer, begin)
}

// exchange brings K and V of a task's k-th layer to who looks at them, or what was added to their gradients to who runs their rows.
func (w *sharedSlot) exchange(t slotTask, k int) {
	if k >= w.plan.LayersPerStage[t.Stage] {
		return
	}
	a := &w.stages[t.runner]
	for _, other := range t.seers {
		b := &w.stages[other.rank]
		if t.Kind == Backward {
			added := ir.Seconds(0) // in slots before
			if other.waits {
				added = b.now
			}
			w.ready[t.runner][t.Stage] = w.transfer(b, a, added, w.left.gradients[t.at])
			continue
		}
		end := w.transfer(a, b, a.now, w.left.rows[t.at])
		if other.waits {
			w.ready[other.rank][t.Stage] = end
		}
	}
}
