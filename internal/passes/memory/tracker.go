package memory

import (
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// gauge adds up the bytes that a rank holds.
type gauge struct {
	meter *Meter
	plan  *plan.Plan
	graph *graph.Model
	sizes []graph.Size
	rank  int
	first []int // [virtual stage]: index of its first layer among all layers of its rank

	now   [numTerms]ir.Bytes
	host  ir.Bytes
	peak  Peak
	most  ir.Bytes // maximum on the host
	rests ir.Bytes // optimizer state on the host, which is part of the maximum
}

// tracker goes through the actions of a rank.
type tracker struct {
	*gauge
	gradients gradients
	kv        kv
	kept      kept

	task   int            // the current task
	waits  []bool         // [task]: whether its input is on the host; nil: no task's input is
	inputs ir.Bytes       // inputs of a layer that have been loaded to recompute K and V, and not yet used
	loans  []plan.Lending // [i]: the keys that stage i lends to this stage
}

func (m *Meter) newTracker(rank int) *tracker {
	p := m.Plan
	g := &gauge{meter: m, plan: p, graph: m.Model, sizes: m.Sizes, rank: rank}
	for j := range p.LayersPerStage {
		first, _ := p.Span(j)
		g.first = append(g.first, first)
	}
	r := &tracker{gauge: g, gradients: newGradients(g), kv: newKV(g), kept: newKept(g)}
	if p.LayerOrder() || p.Streams() {
		r.waits = make([]bool, len(p.Tasks[rank]))
	}
	if p.Mux.Right {
		r.loans = make([]plan.Lending, len(p.Tasks))
		for i := rank + 1; i < len(p.Tasks); i++ {
			r.loans[i] = p.Lent(i, rank)
		}
	}
	return r
}

// Rank returns an upper bound on the arenas of a rank. The argument inputs is the rank's result from
// WaitingInputs.
func (m *Meter) Rank(rank int, inputs []ir.Bytes) (Peak, ir.Bytes) {
	p, r := m.Plan, m.newTracker(rank)
	r.persist()
	persistent := r.now[TermWeights] + r.now[TermOptimizer]
	m.work.Spend(len(r.kept.leaving) + walk.CountLoads(p, p.LayersOf(rank)))
	list := r.meter.Schedule(rank)
	for i, t := range p.Tasks[rank] {
		r.task = i
		r.now[TermMessages] += inputs[i]
		for _, a := range list.Of(i) {
			r.act(t, a)
		}
		r.now[TermMessages] -= inputs[i]
	}
	r.optimizer()
	r.peak.Terms[TermPacking] = Packed(p, r.peak.Bytes-persistent)
	r.peak.Bytes += r.peak.Terms[TermPacking]
	return r.peak, r.most + Packed(p, r.most-r.rests)
}

// note compares the current bytes, including those of the running block, with the peak so far.
func (g *gauge) note(t plan.Task, working ir.Bytes) {
	g.now[TermWorking] = working
	var sum ir.Bytes
	for _, n := range g.now {
		sum += n
	}
	if sum > g.peak.Bytes {
		g.peak = Peak{sum, g.now, t}
	}
	g.most = max(g.most, g.host)
}

func (g *gauge) hasEmbedding() bool { return g.rank == g.plan.Home(0) }

func (g *gauge) hasHead() bool { return g.rank == g.plan.Home(g.plan.Parallel.Stages()-1) }

// persist counts the tensors that exist throughout the run.
func (g *gauge) persist() {
	add := func(b *graph.Block, layers ir.Bytes) {
		weights, _, optimizer := g.plan.StateBytes(g.graph, b)
		g.now[TermWeights] += layers * weights
		g.now[TermOptimizer] += layers * optimizer
		g.rests += layers * g.plan.HostStateBytes(g.graph, b)
	}
	scalars := ir.Bytes(4) // losses, the step's parameters, the norm of the gradients
	if g.graph.Gives(graph.ValueDropout) {
		scalars++
	}
	if g.graph.Masked {
		scalars += 2 // label weights of steps and validations
	}
	g.now[TermWeights] = scalars*ir.Alignment + graph.Align(ir.Bytes(g.graph.Layers*g.graph.Experts)*ir.F32.Bytes()) // the load of experts
	if g.graph.Gives(graph.ValuePositions) {
		z := g.sizes[0]
		g.now[TermKV] = ir.Bytes(g.plan.Parallel.Microbatches) * graph.Align(ir.Bytes(z.Sequence*z.Batch)*ir.I32.Bytes())
	}
	if g.graph.Joint() { // also on ranks without layers that have experts
		g.now[TermKV] += ir.Bytes(g.plan.Parallel.Microbatches) * graph.Align(ir.Bytes(g.plan.Parallel.Microbatch*g.graph.Experts)*ir.F32.Bytes())
	}
	for kind, n := range g.plan.KindsOf(g.graph, g.plan.StagesOf(g.rank)...) {
		add(g.graph.LayerOf(kind), ir.Bytes(n))
	}
	if g.hasEmbedding() {
		add(g.graph.Embedding, 1)
	}
	if g.hasHead() {
		add(g.graph.Head, 1)
	}
	g.host, g.most = g.rests, g.rests
}

// hidden returns the bytes of the hidden rows that stages pass on.
func (g *gauge) hidden(z graph.Size) ir.Bytes {
	return graph.Align(g.graph.HiddenBytes(z))
}

// ofEmbedding and ofHead are the indices of the embedding and the head, which follow those of the layers.
func (r *tracker) ofEmbedding() int { return len(r.gradients.reduced) }

func (r *tracker) ofHead() int { return len(r.gradients.reduced) + 1 }

// act counts the bytes that an action of a task takes and frees.
func (r *tracker) act(t plan.Task, a schedule.Action) {
	at := &r.meter.Nodes[r.meter.Firsts[r.rank]+int(a.Task)]
	switch a.Op {
	case schedule.Begin:
		if t.Kind == plan.Forward {
			r.borrow(t)
		}
	case schedule.Embedding:
		r.embedding(t, at)
	case schedule.Head:
		r.touching(t, r.graph.Head, r.ofHead(), BackwardPass, r.plan.HeadSize(r.sizes[t.Subsequence]))
	case schedule.Enter:
		r.note(t, r.hidden(r.sizes[t.Subsequence])) // what has been reloaded and the halves of gathers are both on the device
		r.gradients.enter(r.layerAt(a))
	case schedule.End, schedule.EndOnHost:
		r.endStaged(t, a)
		if t.Kind == plan.Forward && t.Subsequence == len(r.sizes)-1 {
			r.help(t)
		}
	default:
		r.actOn(t, at, a)
	}
}

// actOn counts the bytes that an action on a layer takes and frees.
func (r *tracker) actOn(t plan.Task, at *walk.Node, a schedule.Action) {
	switch a.Op {
	case schedule.KVFromHost:
		r.kvFromHost(r.plan.Tasks[r.rank][a.Task], int(a.Layer))
	case schedule.Gather:
		r.gradients.gather(r.layerAt(a), r.gradients.visitOf(a))
	case schedule.Free:
		r.gradients.free(r.gradients.visitOf(a))
	case schedule.LoadInput, schedule.Recompute:
		r.recompute(t, a)
	case schedule.Visit:
		r.visit(t, at, a)
	case schedule.Reduce:
		r.gradients.reduce(t, r.first[t.Stage]+int(a.Layer), r.gradients.visitOf(a))
	case schedule.Sum:
		if v := r.gradients.visitOf(a); v.divided == 0 {
			r.note(t, v.rounding)
			r.now[TermGradients] += v.beside
		}
	case schedule.Release:
		r.kept.release(at, a)
	case schedule.Reload:
		r.kept.reload(at, a)
	case schedule.InputFromHost, schedule.Complete: // the input is counted where it is read, the weights where they were gathered
	default:
		panic("memory: an action whose bytes are not counted: " + schedule.Ops[a.Op].Name)
	}
}

// layerAt returns the stage of an action's task, and the number of its layer there.
func (r *tracker) layerAt(a schedule.Action) [2]int32 {
	return [2]int32{int32(r.plan.Tasks[r.rank][a.Task].Stage), a.Layer}
}

func (r *tracker) embedding(t plan.Task, at *walk.Node) {
	b, z := r.graph.Embedding, r.sizes[t.Subsequence]
	switch {
	case t.Kind == plan.Forward:
		r.note(t, r.meter.blocks.Bytes(r.plan, r.graph, b, forwardPass, z, 0, 0))
	case t.Kind == plan.WeightGrad:
		r.now[TermKept] -= r.between(b, z)
		r.touching(t, b, r.ofEmbedding(), weightPass, z)
	case at.Split:
		r.touching(t, b, r.ofEmbedding(), inputPass, z)
		r.now[TermKept] += r.between(b, z)
	default:
		r.touching(t, b, r.ofEmbedding(), BackwardPass, z)
	}
}

func (r *tracker) visit(t plan.Task, at *walk.Node, a schedule.Action) {
	k := int(a.Layer)
	b, own := r.kept.block(t, k), r.first[t.Stage]+k
	switch t.Kind {
	case plan.Forward:
		r.forward(t, at, a, b, own)
	case plan.Backward:
		r.backward(t, at, k, b, own)
	case plan.WeightGrad:
		r.weightGrads(t, k, b)
	}
	r.gradients.passing = 0
}

func (r *tracker) forward(t plan.Task, at *walk.Node, a schedule.Action, b *graph.Block, own int) {
	z, u, k := r.sizes[t.Subsequence], r.kept.leave(t), int(a.Layer)
	if t.Subsequence == 0 {
		r.now[TermKV] += r.kv.bytes(b, graph.Cache, z) + r.kv.carried(b, graph.Carry, z) + r.kv.carried(b, graph.Tally, z) // tallies are small: to the end of the step
		r.host += r.kv.onHost(b, z.Sequence)
	}
	r.now[TermLoads] = r.kv.attend()
	r.note(t, r.working(b, forwardPass, z, 0)+r.sharing(t))
	r.now[TermLoads] = r.kv.held
	r.kvToHost(t, b)
	if t.Subsequence == len(r.sizes)-1 {
		r.now[TermKV] -= r.kv.carried(b, graph.Carry, z)
		if !b.Attends { // no backward reads K and V
			r.now[TermKV] -= r.kv.bytes(b, graph.Cache, z)
			r.host -= r.kv.onHost(b, z.Sequence)
		}
	}
	r.now[TermKept] += u.kept[own]
	r.host += u.offloaded[own]
	if k == 0 && r.inputWaits() {
		r.host -= r.hidden(z)
	}
	*r.kept.isLeaving(at, k) = true
	r.now[TermCopies] += u.offloaded[own]
}

func (r *tracker) backward(t plan.Task, at *walk.Node, k int, b *graph.Block, own int) {
	z, u, pass := r.sizes[t.Subsequence], r.kept.units[t.Subsequence], BackwardPass
	if at.Split {
		pass = inputPass
	}
	r.now[TermKept] -= u.kept[own]
	r.now[TermCopies] -= u.offloaded[own]
	if t.Subsequence == len(r.sizes)-1 {
		r.now[TermKVGrads] += r.kv.carried(b, graph.CarryGrad, z)
	}
	r.visiting(t, k, b, pass, z)
	if at.Split {
		r.now[TermKept] += r.between(b, z)
	}
	if t.Subsequence == 0 {
		r.now[TermKVGrads] -= r.kv.carried(b, graph.CarryGrad, z)
	}
	if !b.Attends {
		return
	}
	if t.Subsequence == len(r.sizes)-1 {
		r.now[TermKVGrads] += r.kv.bytes(b, graph.CacheGrad, z)
		r.host += r.kv.gradsOnHost(t, k)
		r.most = max(r.most, r.host)
	}
	if t.Subsequence == 0 {
		r.now[TermKVGrads] -= r.kv.bytes(b, graph.CacheGrad, z)
		r.now[TermKV] -= r.kv.bytes(b, graph.Cache, z)
		if at.Split {
			r.now[TermKVGrads] += r.kv.gradsBetween(b, z)
		}
		r.host -= r.kv.streamed(graph.Cache, z.Sequence) + r.kv.gradsOnHost(t, k)
	}
}

// weightGrads tracks the second half of a backward.
func (r *tracker) weightGrads(t plan.Task, k int, b *graph.Block) {
	z := r.sizes[t.Subsequence]
	r.now[TermKept] -= r.between(b, z)
	r.visiting(t, k, b, weightPass, z)
	if t.Subsequence == 0 && b.Attends {
		r.now[TermKVGrads] -= r.kv.gradsBetween(b, z)
	}
}

// visiting tracks a backward pass through the k-th layer of a task, and the gradients that it creates.
func (r *tracker) visiting(t plan.Task, k int, b *graph.Block, pass Direction, z graph.Size) {
	own := r.first[t.Stage] + k
	begins := r.gradients.begins(b, own, pass)
	working := r.working(b, pass, z, begins) + r.sharing(t)
	if r.plan.Streams() {
		if issued := r.kv.queue.Issued; b.Attends && len(issued) > 0 { // its own rows, which are counted with the running layer
			r.now[TermLoads] -= r.kv.loadBytes(issued[0].Load)
		}
		r.note(t, working)
		r.now[TermLoads] = r.kv.attend()
		working = r.working(b, attendingPass, z, begins)
	}
	r.note(t, working)
	r.now[TermLoads] = r.kv.held
	r.gradients.begin(b, own, begins)
}

// touching tracks a backward pass through the embedding or the head, and the gradients that it creates.
func (r *tracker) touching(t plan.Task, b *graph.Block, own int, pass Direction, z graph.Size) {
	begins := r.gradients.begins(b, own, pass)
	r.note(t, r.working(b, pass, z, begins)+r.sharing(t))
	r.gradients.begin(b, own, begins)
}

// between returns the bytes that a block holds between the two halves of its backward.
func (r *tracker) between(b *graph.Block, z graph.Size) ir.Bytes {
	return r.working(b, betweenHalves, z, 0)
}

// working returns the bytes that a block holds while it runs. Most layers of a subsequence hold the same number
// of bytes, and comparing with recent keys is faster than looking up such a long key.
func (r *tracker) working(b *graph.Block, pass Direction, z graph.Size, begins params) ir.Bytes {
	key, held := keyOf(r.plan, b, pass, z, begins, r.gradients.passing), &r.meter.recent[slotOf(pass, z, begins)]
	if held.workingKey != key {
		*held = heldBytes{key, r.meter.blocks.Bytes(r.plan, r.graph, b, pass, z, begins, r.gradients.passing)}
	}
	return held.bytes
}

// slotOf returns the index of a key among the recent results: a hash of its subsequence and pass.
func slotOf(pass Direction, z graph.Size, begins params) int {
	const mix = 0x9e3779b97f4a7c15 // 2^64 divided by the golden ratio
	key := uint64(z.Prefix)<<4 + uint64(pass)<<1
	if begins != 0 {
		key++
	}
	return int(key * mix >> (64 - recentBits))
}

// inputWaits reports whether the input of the current task is on the host.
func (r *tracker) inputWaits() bool { return r.waits != nil && r.waits[r.task] }

// endStaged counts results that stay on the host until another task reads them, and frees the input of a
// backward. The input of a forward becomes a saved unit of its first layer.
func (r *tracker) endStaged(t plan.Task, a schedule.Action) {
	if t.Kind == plan.Backward && r.inputWaits() {
		r.host -= r.hidden(r.sizes[t.Subsequence])
	}
	if a.Op != schedule.EndOnHost {
		return
	}
	if reader := r.plan.Tasks[r.rank][a.Of]; r.plan.ResultOnHost(t, reader) {
		r.waits[a.Of] = true
		r.host += r.hidden(r.sizes[t.Subsequence])
	}
}

// kvToHost frees K and V of a layer once the last subsequence has passed through the layer.
func (r *tracker) kvToHost(t plan.Task, b *graph.Block) {
	if !b.Attends {
		return
	}
	kvBytes := r.kv.bytes(b, graph.Cache, r.sizes[0])
	if !r.plan.HoldsKVOnHost(t.Stage) {
		if last := t.As(plan.Backward); r.plan.RecomputesKV(last) {
			r.now[TermKV] -= kvBytes
		}
		return
	}
	if t.Subsequence == 0 {
		r.host += kvBytes
	}
	if t.Subsequence == len(r.sizes)-1 {
		r.now[TermKV] -= kvBytes
	}
}

// recompute tracks the recomputation of K and V of a layer from inputs on the device.
func (r *tracker) recompute(t plan.Task, a schedule.Action) {
	b, z := r.kept.block(t, int(a.Layer)), r.sizes[a.Of]
	switch {
	case !b.Attends:
	case a.Op == schedule.Recompute:
		r.inputs -= r.hidden(z)
		gradient := r.hidden(r.sizes[t.Subsequence])
		r.note(t, gradient+r.inputs+r.working(r.graph.Plain(r.kept.last.kind), kvPass, z, 0))
	default:
		r.inputs += r.hidden(z)
		if a.Of == 0 {
			r.now[TermKV] += r.kv.bytes(b, graph.Cache, r.sizes[0])
		}
	}
}

// kvFromHost reloads K and V of a layer for the stage's first backward.
func (r *tracker) kvFromHost(next plan.Task, k int) {
	if !r.plan.HoldsKVOnHost(next.Stage) {
		return
	}
	if b := r.kept.block(next, k); b.Attends {
		kvBytes := r.kv.bytes(b, graph.Cache, r.sizes[0])
		r.most = max(r.most, r.host)
		r.now[TermKV] += kvBytes
		r.host -= kvBytes
	}
}
