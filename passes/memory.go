package passes

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"sppo/graph"
	"sppo/ir"
)

// A bound on memory, for passes that choose among plans before anything is placed. It walks the tasks of a stage as codegen
// lowers them, layer by layer, and adds up whose bytes are held. Plan.Memory is what codegen then places, to the byte; a test
// in codegen holds the two together.

// Term is one of the things that a rank's device memory goes to.
type Term int

// Terms.
const (
	TermWeights    Term = iota
	TermOptimizer       // moments and f32 masters
	TermGradients       // of weights, those that the step has touched
	TermCaches          // K and V
	TermCacheGrads      // dK and dV
	TermKept            // units between their forward and their backward
	TermCopies          // units on their way to the host or back
	TermMessages        // between stages, and what waits for the head
	TermWorking         // what runs: a layer, the embedding, a chunk of the head
	TermPacking         // gaps that placing may leave
	numTerms
)

var termNames = [numTerms]string{
	"weights", "optimizer state", "gradients", "K and V", "dK and dV", "kept activations", "copies under way", "messages", "the layer that runs", "gaps",
}

func (t Term) String() string { return termNames[t] }

// Peak is the moment at which a stage's ranks hold most on the device.
type Peak struct {
	Bytes ir.Bytes           // sum of the terms
	Terms [numTerms]ir.Bytes // at that moment
	Task  Task               // that runs then
}

// Footprint bounds a plan's arenas from above.
type Footprint struct {
	Device []Peak     // [stage]
	Host   []ir.Bytes // [stage], of one rank
}

// FootprintOf bounds what codegen will place for a plan.
func FootprintOf(p *Plan) Footprint { return footprint(&Context{}, p) }

// Fits says whether a plan that needs no more than this has room.
func (f Footprint) Fits(device, host ir.Bytes) bool {
	for s := range f.Device {
		if f.Device[s].Bytes > device || f.Host[s] > host {
			return false
		}
	}
	return true
}

func footprint(c *Context, p *Plan) Footprint {
	if p.Mux.Left {
		return leftFootprint(c, p)
	}
	f := Footprint{Device: make([]Peak, len(p.Tasks)), Host: make([]ir.Bytes, len(p.Tasks))}
	inputs := p.waitingInputs(c.Model(p))
	for s := range p.Tasks {
		f.Device[s], f.Host[s] = c.stageFootprint(p, s, inputs[s])
	}
	return f
}

// Packing is the share of what does not persist that placing may lose in gaps: a test holds placed plans to it. Lives that end
// in another order than they began leave larger ones.
const (
	packing        = 0.03
	packingOfWoven = 0.08
)

func (p *Plan) packed(n ir.Bytes) ir.Bytes {
	if p.woven() {
		return ir.Bytes(float64(n) * packingOfWoven)
	}
	return ir.Bytes(float64(n) * packing)
}

// woven says whether activations of several microbatches on several virtual stages, or of backwards in halves, live at once.
func (p *Plan) woven() bool {
	s := p.chosenStrategy()
	return s.late || p.Parallel.VirtualStages > 1 && !s.rounds
}

// residence adds up what one stage holds while its tasks run.
type residence struct {
	context *Context
	plan    *Plan
	stage   int
	split   map[Task]bool
	graph   *graph.Model
	sizes   []graph.Size // of each subsequence
	saved   [][]ir.Bytes // units of a layer, of each subsequence
	layers  []int        // of each virtual stage
	first   []int        // of each virtual stage, where its layers begin among all of its rank

	now   [numTerms]ir.Bytes
	host  ir.Bytes
	peak  Peak
	most  ir.Bytes // on the host
	units map[Task]*unitsAway
	fresh []bool      // layers whose gradients the step has not touched
	owing bool        // a visit of a layer has given its gradients away, and the collectives may not be done
	lent  [2]ir.Bytes // keys of the stages that it helps, and their gradients

	detours []bool        // by task
	away    map[Task]bool // tasks whose input waits on the host
}

// unitsAway is what a forward has left, layer by layer of its virtual stage.
type unitsAway struct {
	kept, offloaded []ir.Bytes
	leaving, back   []bool // offloaded: the device bytes are still held; they are on their way back or have come
}

func (c *Context) stageFootprint(p *Plan, stage int, inputs []ir.Bytes) (Peak, ir.Bytes) {
	r := &residence{context: c, plan: p, stage: stage, split: p.Splits(stage), graph: c.Model(p), layers: p.LayersPerStage, units: map[Task]*unitsAway{},
		detours: p.Detours(p.Tasks[stage]), away: map[Task]bool{}}
	r.fresh = slices.Repeat([]bool{true}, p.layersOf(stage))
	for i := range p.Subsequences.N {
		z := p.Size(i)
		r.sizes, r.saved = append(r.sizes, z), append(r.saved, unitSizes(r.graph.Layer, z))
	}
	for j := range r.layers {
		first, _ := p.span(j)
		r.first = append(r.first, first)
	}
	r.persist()
	tasks := p.Tasks[stage]
	for i, t := range tasks {
		r.now[TermMessages] += inputs[i]
		r.unpark(tasks, i)
		blocks := r.blocks(tasks[i:min(i+2, len(tasks))])
		r.now[TermCaches] += blocks
		switch t.Kind {
		case Forward:
			r.forward(tasks, i)
		case Backward:
			r.backward(tasks, i)
		case WeightGrad:
			r.weightGrads(tasks, i)
		}
		r.now[TermMessages] -= inputs[i]
		r.now[TermCaches] -= blocks
		r.detour(t, r.detours[i])
	}
	r.optimizer()
	for t, n := range r.peak.Terms {
		if Term(t) != TermWeights && Term(t) != TermOptimizer {
			r.peak.Terms[TermPacking] += p.packed(n)
		}
	}
	r.peak.Bytes += r.peak.Terms[TermPacking]
	return r.peak, r.most + p.packed(r.most)
}

// note compares a moment with the peak so far: what is held, and what runs.
func (r *residence) note(t Task, working ir.Bytes) {
	r.now[TermWorking] = working
	var sum ir.Bytes
	for _, n := range r.now {
		sum += n
	}
	if sum > r.peak.Bytes {
		r.peak = Peak{sum, r.now, t}
	}
	r.most = max(r.most, r.host)
}

func (r *residence) firstStage() bool { return r.stage == r.plan.Home(0) }
func (r *residence) lastStage() bool  { return r.stage == r.plan.Home(r.plan.Parallel.Stages()-1) }

// persist counts what lives through the whole run. A tied head on the embedding's stage has no weights of its own.
func (r *residence) persist() {
	add := func(b *graph.Block, layers ir.Bytes) {
		weights, _, optimizer := r.plan.stateBytes(r.graph, b)
		r.now[TermWeights] += layers * weights
		r.now[TermOptimizer] += layers * optimizer
	}
	const scalars = 4 // losses, the step's parameters, the norm of gradients
	r.now[TermWeights] = scalars * ir.Alignment
	add(r.graph.Layer, ir.Bytes(len(r.fresh)))
	near, _ := r.plan.visitBytes(r.graph) // of the layer that is visited, and of the next
	r.now[TermWeights] += near * ir.Bytes(min(2, len(r.fresh)))
	if r.firstStage() {
		add(r.graph.Embedding, 1)
	}
	if r.lastStage() && !(r.firstStage() && r.graph.Tied) {
		add(r.graph.Head, 1)
	}
}

// touch counts a block's gradients, which stay to the end of the step.
func (r *residence) touch(b *graph.Block) {
	_, gradients, _ := r.plan.stateBytes(r.graph, b)
	r.now[TermGradients] += gradients
}

func (r *residence) forward(tasks []Task, i int) {
	t := tasks[i]
	z := r.sizes[t.Subsequence]
	if _, _, fed := r.plan.Source(t); !fed {
		r.note(t, r.context.working(r.graph, r.graph.Embedding, forwardPass, z, false))
	}
	u := r.leave(t)
	leaving := r.plan.Leaving(tasks, i)
	r.borrow(t)
	for k := range r.layers[t.Stage] {
		b := r.block(t, k)
		if t.Subsequence == 0 {
			r.now[TermCaches] += r.caches(b, graph.Cache, z)
			r.host += r.streamed(graph.Cache, z.Sequence)
		}
		r.note(t, r.context.working(r.graph, b, forwardPass, z, false)+r.sharing(t))
		r.park(t, b)
		r.now[TermKept] += u.kept[k]
		r.now[TermCopies] += u.offloaded[k]
		r.host += u.offloaded[k]
		if k == 0 && r.away[t] {
			r.host -= r.hidden(z)
		}
		u.leaving[k] = true
		r.copiesBeside(tasks, i, leaving, k)
	}
	if t.Subsequence == len(r.sizes)-1 {
		r.help(t)
	}
}

func (r *residence) backward(tasks []Task, i int) {
	t := tasks[i]
	f, pass := t.As(Forward), backwardPass
	if r.split[t] {
		pass = inputPass
	}
	z, u := r.sizes[t.Subsequence], r.units[f]
	layers := r.layers[t.Stage]
	if i > 0 && t.Undoes(tasks[i-1]) {
		for k := range layers {
			r.release(f, k)
		}
	}
	r.reloadUpTo(tasks, i, r.plan.Offload.Ahead-1)
	_, _, fed := r.plan.Source(t)
	if !fed {
		r.touching(t, r.graph.Head, backwardPass, z, t.Microbatch == 0 && t.Subsequence == len(r.sizes)-1)
	}
	leaving := r.plan.Leaving(tasks, i)
	for at := range layers {
		k := layers - 1 - at
		b, own := r.block(t, k), r.first[t.Stage]+k
		r.now[TermKept] -= u.kept[k]
		r.now[TermCopies] -= u.offloaded[k]
		r.touching(t, b, pass, z, r.fresh[own])
		r.fresh[own] = false
		r.leaveBackward(t, b, z)
		if t.Slot() == len(r.sizes) {
			r.stopHelping(layers - at)
		}
		if t.Subsequence == len(r.sizes)-1 {
			r.now[TermCacheGrads] += r.caches(b, graph.CacheGrad, z)
			r.host += r.streamed(graph.CacheGrad, z.Prefix)
			r.most = max(r.most, r.host)
		}
		if t.Subsequence == 0 {
			r.now[TermCacheGrads] -= r.caches(b, graph.CacheGrad, z)
			r.now[TermCaches] -= r.caches(b, graph.Cache, z)
			if r.split[t] {
				r.now[TermCacheGrads] += r.cachesBetween(b, z)
			}
			r.host -= r.streamed(graph.Cache, z.Sequence) + r.streamed(graph.CacheGrad, r.sizes[len(r.sizes)-1].Prefix)
		}
		r.copiesBeside(tasks, i, leaving, at)
	}
	delete(r.units, f)
	if _, _, feeds := r.plan.Target(t); !feeds {
		r.touching(t, r.graph.Embedding, pass, z, t.Microbatch == 0 && t.Subsequence == len(r.sizes)-1)
		if r.split[t] {
			r.now[TermKept] += r.between(r.graph.Embedding, z)
		}
	}
}

// weightGrads is the second half of a backward.
func (r *residence) weightGrads(tasks []Task, i int) {
	t := tasks[i]
	z, layers := r.sizes[t.Subsequence], r.layers[t.Stage]
	leaving := r.plan.Leaving(tasks, i)
	for at := range layers {
		b := r.block(t, layers-1-at)
		r.now[TermKept] -= r.between(b, z)
		r.touching(t, b, weightPass, z, false)
		r.leaveBackward(t, b, z)
		if t.Subsequence == 0 {
			r.now[TermCacheGrads] -= r.cachesBetween(b, z)
		}
		r.copiesBeside(tasks, i, leaving, at)
	}
	if t.Stage == 0 {
		r.now[TermKept] -= r.between(r.graph.Embedding, z)
		r.touching(t, r.graph.Embedding, weightPass, z, false)
	}
}

// leaveBackward ends the visit of a layer: what its second half will read is kept, or its gradients are given away, and from
// then on what the visit before has given away is on its way.
func (r *residence) leaveBackward(t Task, b *graph.Block, z graph.Size) {
	if r.split[t] {
		r.now[TermKept] += r.between(b, z)
		return
	}
	if !r.owing {
		_, owed := r.plan.visitBytes(r.graph)
		r.now[TermGradients] += owed
		r.owing = true
	}
}

// between are the bytes that a block holds from the first half of its backward to the second.
func (r *residence) between(b *graph.Block, z graph.Size) ir.Bytes {
	return r.context.working(r.graph, b, betweenHalves, z, false)
}

// cachesBetween are the gradients of K and V that the second half reads.
func (r *residence) cachesBetween(b *graph.Block, z graph.Size) (n ir.Bytes) {
	for _, v := range b.Between {
		if b.Values[v].Kind == graph.CacheGrad {
			n += graph.Align(b.Values[v].Bytes(z))
		}
	}
	return n
}

// touching notes a backward pass of a block, which may be the first to touch its gradients.
func (r *residence) touching(t Task, b *graph.Block, pass direction, z graph.Size, fresh bool) {
	begins := fresh || r.plan.Parallel.Zero >= ZeroGradients && b.Name == graph.BlockLayer // at each visit, whole
	r.note(t, r.context.working(r.graph, b, pass, z, begins)+r.sharing(t))
	if fresh {
		r.touch(b)
	}
}

// optimizer is the end of the step: all gradients, their slices, and weights under way.
func (r *residence) optimizer() {
	slices, largest := ir.Bytes(0), ir.Bytes(0)
	count := func(b *graph.Block, layers ir.Bytes) {
		for i := range b.Params {
			param := &b.Params[i]
			cut := r.plan.Slicing(param)
			if cut.Slices() == 1 || r.plan.ZeroOf(b, param) >= ZeroGradients {
				continue // there is no slice, or it has been counted
			}
			whole := ir.Bytes(param.Local[0]*param.Local[1]) * ir.F32.Bytes()
			if cut.SP > 1 && cut.DP > 1 {
				slices += layers * graph.Align(whole/ir.Bytes(cut.SP))
			}
			slices += layers * graph.Align(whole/ir.Bytes(cut.Slices()))
			largest = max(largest, 2*whole/ir.Bytes(min(cut.SP, cut.Slices())))
		}
	}
	count(r.graph.Layer, ir.Bytes(len(r.fresh)))
	if r.firstStage() {
		count(r.graph.Embedding, 1)
	}
	if r.lastStage() {
		count(r.graph.Head, 1)
	}
	r.note(Task{}, slices+largest)
}

// block is the dataflow of the k-th layer of a task.
func (r *residence) block(t Task, k int) *graph.Block {
	units := len(r.saved[0])
	at := (r.first[t.Stage] + k) * units
	return r.graph.LayerWithout(remadeBy(r.plan.Offload.Fate[r.stage][t.Subsequence][at : at+units]))
}

// leave is what a forward will leave.
func (r *residence) leave(t Task) *unitsAway {
	n := r.layers[t.Stage]
	u := &unitsAway{make([]ir.Bytes, n), make([]ir.Bytes, n), make([]bool, n), make([]bool, n)}
	fate, sizes := r.plan.Offload.Fate[r.stage][t.Subsequence], r.saved[t.Subsequence]
	for k := range n {
		for at, size := range sizes {
			switch fate[(r.first[t.Stage]+k)*len(sizes)+at] {
			case FateOffload:
				u.offloaded[k] += graph.Align(size)
			case FateKeep:
				u.kept[k] += graph.Align(size)
			}
		}
	}
	r.units[t] = u
	return u
}

// copiesBeside follows codegen's: it ends and begins the copies that go along with the k-th layer that a task runs.
func (r *residence) copiesBeside(tasks []Task, i int, leaving []Task, k int) {
	t := tasks[i]
	layers := r.layers[t.Stage]
	for _, f := range leaving {
		r.release(f, k)
		for rest := k + 1; k == layers-1 && rest < r.layers[f.Stage]; rest++ {
			r.release(f, rest)
		}
	}
	r.reloadUpTo(tasks, i, k+r.plan.Offload.Ahead)
}

// reloadUpTo begins the reloads of the layers up to the last-th from the start of a task on, as codegen does.
func (r *residence) reloadUpTo(tasks []Task, i, last int) {
	for _, t := range append([]Task{tasks[i]}, r.plan.Coming(tasks, i)...) {
		for at := 0; at <= last && at < r.layers[t.Stage] && t.Kind == Backward; at++ {
			r.reload(t, at)
		}
		last -= r.layers[t.Stage]
	}
}

// detour counts what waits on the host for its reader. A layer's input becomes its unit there.
func (r *residence) detour(t Task, away bool) {
	if r.away[t] && t.Kind == Backward {
		r.host -= r.hidden(r.sizes[t.Subsequence])
	}
	if away {
		_, reader, _ := r.plan.Reader(t)
		r.away[reader] = true
		r.host += r.hidden(r.sizes[t.Subsequence])
	}
}

// park lets K and V of a layer go once the last subsequence has passed it.
func (r *residence) park(t Task, b *graph.Block) {
	if !r.plan.Parks(t.Stage) {
		return
	}
	caches := r.caches(b, graph.Cache, r.sizes[0])
	if t.Subsequence == 0 {
		r.host += caches
	}
	if t.Subsequence == len(r.sizes)-1 {
		r.now[TermCaches] -= caches
	}
}

// unpark brings them back while the task before the stage's first backward runs.
func (r *residence) unpark(tasks []Task, i int) {
	if i+1 == len(tasks) || !r.plan.Unparks(tasks[i+1]) {
		return
	}
	for k := range r.layers[tasks[i+1].Stage] {
		caches := r.caches(r.block(tasks[i+1], k), graph.Cache, r.sizes[0])
		r.most = max(r.most, r.host)
		r.now[TermCaches] += caches
		r.host -= caches
	}
}

// release ends the copy of the k-th layer of a forward to the host.
func (r *residence) release(f Task, k int) {
	if u := r.units[f]; u != nil && k < len(u.leaving) && u.leaving[k] {
		u.leaving[k] = false
		r.now[TermCopies] -= u.offloaded[k]
	}
}

// reload begins the copy back of the layer that a backward comes to as its at-th.
func (r *residence) reload(t Task, at int) {
	t = t.As(Forward)
	u := r.units[t]
	k := r.layers[t.Stage] - 1 - at
	if k < 0 || u.back[k] {
		return
	}
	r.release(t, k)
	u.back[k] = true
	r.now[TermCopies] += u.offloaded[k]
	r.most = max(r.most, r.host)
	r.host -= u.offloaded[k]
}

// hidden are the bytes of the rows that stages pass on.
func (r *residence) hidden(z graph.Size) ir.Bytes {
	return graph.Align(r.graph.Layer.Values[r.graph.Layer.Input].Bytes(z))
}

// caches are the bytes of K and V of a layer, or of their gradients.
func (r *residence) caches(b *graph.Block, kind graph.Kind, z graph.Size) (n ir.Bytes) {
	for v := range b.Values {
		if b.Values[v].Kind == kind && b.Values[v].Rows == graph.Whole {
			n += graph.Align(b.Values[v].Bytes(z))
		}
	}
	return n
}

// streamed are the bytes of some tokens of what streams.
func (r *residence) streamed(kind graph.Kind, tokens int64) (n ir.Bytes) {
	z := r.sizes[0]
	z.Tokens = tokens
	for i := range r.graph.Layer.Values {
		if v := &r.graph.Layer.Values[i]; v.Kind == kind && v.Rows == graph.Full {
			n += graph.Align(v.Bytes(z))
		}
	}
	return n
}

// blocks bounds the loads that are there while a task and the next run: the one in use, those that come early, and dK and dV that
// have not left yet.
func (r *residence) blocks(tasks []Task) (most ir.Bytes) {
	s := r.plan.Stream
	for _, t := range tasks {
		tokens := min(s.Block, r.sizes[t.Subsequence].Prefix)
		n := ir.Bytes(s.Early+1) * r.streamed(graph.Cache, tokens)
		if t.Kind == Backward {
			n += ir.Bytes(s.Early+2) * r.streamed(graph.CacheGrad, tokens)
		}
		most = max(most, n)
	}
	return most
}

// waitingInputs are, for every task of every stage, the bytes of messages that are held while it runs: results of the task
// before it on their way out, inputs of tasks behind it that have come already or may come while it runs.
func (p *Plan) waitingInputs(g *graph.Model) [][]ir.Bytes {
	type arrival struct{ time, task int }
	hidden := make([]ir.Bytes, p.Subsequences.N)
	for i := range hidden {
		hidden[i] = graph.Align(g.Layer.Values[g.Layer.Input].Bytes(p.Size(i)))
	}
	starts, ends := p.Times()
	index := make([]map[Task]int, len(p.Tasks))
	for s, tasks := range p.Tasks {
		index[s] = make(map[Task]int, len(tasks))
		for i, t := range tasks {
			index[s][t] = i
		}
	}
	arrivals := make([][]arrival, len(p.Tasks))
	held := make([][]ir.Bytes, len(p.Tasks))
	for s, tasks := range p.Tasks {
		held[s] = make([]ir.Bytes, len(tasks))
		detours := p.Detours(tasks)
		for i, t := range tasks {
			to, next, ok := p.Reader(t)
			if !ok {
				continue
			}
			if detours[i] { // on its way out, and back
				held[s][i+1] += hidden[t.Subsequence]
				held[s][index[to][next]-1] += hidden[t.Subsequence]
				continue
			}
			arrivals[to] = append(arrivals[to], arrival{ends[s][i], index[to][next]})
			if to != s && i+1 < len(tasks) {
				held[s][i+1] += hidden[t.Subsequence]
			}
		}
	}
	for s, tasks := range p.Tasks {
		slices.SortFunc(arrivals[s], func(a, b arrival) int { return cmp.Compare(a.time, b.time) })
		var waiting ir.Bytes
		next := 0
		come := make([]bool, len(tasks))
		for i, t := range tasks {
			for next < len(arrivals[s]) && (i+1 == len(tasks) || arrivals[s][next].time <= starts[s][i+1]) {
				come[arrivals[s][next].task] = true
				waiting += hidden[tasks[arrivals[s][next].task].Subsequence]
				next++
			}
			if come[i] { // the layer that runs holds its input
				waiting -= hidden[t.Subsequence]
			}
			held[s][i] += waiting
		}
	}
	return held
}

// inWords lists the terms that matter, largest first.
func (k Peak) inWords() string {
	order := make([]Term, numTerms)
	for t := range order {
		order[t] = Term(t)
	}
	slices.SortStableFunc(order, func(a, b Term) int { return cmp.Compare(k.Terms[b], k.Terms[a]) })
	var words []string
	for _, t := range order {
		if k.Terms[t] > k.Bytes/100 {
			words = append(words, fmt.Sprintf("%s of %s", k.Terms[t], t))
		}
	}
	return strings.Join(words, ", ")
}
