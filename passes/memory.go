package passes

import (
	"cmp"
	"fmt"
	"math"
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
	TermLoads           // of these, rows that stream
	TermKept            // units between their forward and their backward
	TermCopies          // units on their way to the host or back
	TermMessages        // between stages, and what waits for the head
	TermWorking         // what runs: a layer, the embedding, a chunk of the head
	TermPacking         // gaps that placing may leave
	numTerms
)

var termNames = [numTerms]string{
	"weights", "optimizer state", "gradients", "K and V", "dK and dV", "K and V that stream", "kept activations", "copies under way", "messages", "the layer that runs", "gaps",
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
	f, _ := footprintWithin(c, p, Memory{DeviceCapacityBytes: math.MaxInt64, HostCapacityBytes: math.MaxInt64})
	return f
}

// footprintWithin says whether a plan has room, and looks no further than it takes to know: of one that has none the footprint
// is in part.
func footprintWithin(c *Context, p *Plan, m Memory) (f Footprint, fits bool) {
	if p.Mux.Left {
		return leftFootprint(c, p, m)
	}
	f = Footprint{Device: make([]Peak, len(p.Tasks)), Host: make([]ir.Bytes, len(p.Tasks))}
	inputs := c.waitingInputs(p)
	for s := range p.Tasks {
		f.Device[s], f.Host[s] = c.stageFootprint(p, s, inputs[s])
		if f.Device[s].Bytes > m.DeviceCapacityBytes || f.Host[s] > m.HostCapacityBytes {
			return f, false
		}
	}
	return f, true
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
	*course
	*shapes
	context *Context
	plan    *Plan
	stage   int
	graph   *graph.Model
	layers  []int // of each virtual stage
	first   []int // of each virtual stage, where its layers begin among all of its rank

	now   [numTerms]ir.Bytes
	host  ir.Bytes
	peak  Peak
	most  ir.Bytes    // on the host
	fresh []bool      // layers whose gradients the step has not touched
	whole []bool      // layers whose gradients wait, whole, for the visit that gives them away
	owing bool        // a visit of a layer has given its gradients away, and the collectives may not be done
	lent  [2]ir.Bytes // keys of the stages that it helps, and their gradients

	units     []*unitsLeft  // [i]: nil until the first forward
	away      []copiesState // of each layer of each forward
	begun     int           // layers of all tasks of the ranks before
	leaving   []int         // numbers of forwards whose copies the task sees leave
	reloads   int           // backwards behind the task whose reloads may begin while it runs
	reloaded  int           // layers from the start of the task on whose reloads have begun; 0: not looked at
	streaming []int         // values of which a rank holds own rows alone
	loads     loadsHeld
	visits    visitBytes
	path      []int    // under ZeroWeights, own layers in the order of visits
	visited   int      // of these
	gathered  ir.Bytes // weights that are whole, and what they are gathered from
	passing   params   // of the layer that runs those that are whole for this visit alone, and so not among these

	detours []bool        // by task; nil: there are none
	waits   map[Task]bool // tasks whose input waits on the host
	loans   []Lending     // [stage]: what it lends this one
	last    blockOf
	was     workingKey // of the layer that ran last
	held    ir.Bytes   // by it
}

// blockOf is the dataflow that letters stand for.
type blockOf struct {
	letters string
	block   *graph.Block
}

// unitsLeft is what the forwards of a subsequence leave, layer by layer of all of the rank.
type unitsLeft struct{ kept, offloaded []ir.Bytes }

// copiesState is that of what a layer has offloaded: the device bytes are still held; they are on their way back or have come.
type copiesState struct{ leaving, back bool }

// shapes are the sizes of a plan's subsequences, whatever becomes of what they leave.
type shapes struct {
	lengths []int64
	sizes   []graph.Size
	saved   [][]ir.Bytes // units of a layer
}

// shapes are worked out once for a plan's lengths.
func (c *Context) shapes(p *Plan) *shapes {
	if s := c.shaped; s == nil || len(s.lengths) != len(p.Subsequences.Lengths) || &s.lengths[0] != &p.Subsequences.Lengths[0] {
		c.shaped = &shapes{lengths: p.Subsequences.Lengths, sizes: p.Sizes()}
		for _, z := range c.shaped.sizes {
			c.shaped.saved = append(c.shaped.saved, unitSizes(c.Model(p).Layer, z))
		}
	}
	return c.shaped
}

func (c *Context) newResidence(p *Plan, stage int) *residence {
	r := &residence{context: c, course: c.course(p), shapes: c.shapes(p), plan: p, stage: stage, graph: c.Model(p), layers: p.LayersPerStage}
	r.visits = p.visitBytes(r.graph)
	r.fresh, r.whole = slices.Repeat([]bool{true}, p.layersOf(stage)), make([]bool, p.layersOf(stage))
	for j := range r.layers {
		first, _ := p.span(j)
		r.first = append(r.first, first)
	}
	from, to := r.firsts[stage], len(r.stops)
	if stage+1 < len(r.firsts) {
		to = r.firsts[stage+1]
	}
	r.begun = int(r.stops[from].layers)
	end := r.course.layers
	if to < len(r.stops) {
		end = int(r.stops[to].layers)
	}
	r.away, r.units = make([]copiesState, end-r.begun), make([]*unitsLeft, len(r.sizes))
	if p.layerOrder() || p.Streams() {
		r.detours, r.waits = p.Detours(p.Tasks[stage]), map[Task]bool{}
	}
	for i := range r.graph.Layer.Values {
		if v := &r.graph.Layer.Values[i]; v.Rows == graph.Full && (v.Kind == graph.Cache || v.Kind == graph.CacheGrad) {
			r.streaming = append(r.streaming, i)
		}
	}
	if p.Streams() {
		r.loads.queue = NewLoadQueue(p, r.graph, p.Tasks[stage])
	}
	if p.Parallel.Zero >= ZeroWeights {
		r.planVisits()
	}
	if p.Mux.Right {
		r.loans = make([]Lending, len(p.Tasks))
		for i := stage + 1; i < len(p.Tasks); i++ {
			r.loans[i] = p.Lent(i, stage)
		}
	}
	return r
}

func (c *Context) stageFootprint(p *Plan, stage int, inputs []ir.Bytes) (Peak, ir.Bytes) {
	r := c.newResidence(p, stage)
	r.persist()
	tasks := p.Tasks[stage]
	for i, t := range tasks {
		r.reloaded = 0
		r.now[TermMessages] += inputs[i]
		r.unpark(tasks, i)
		switch n := r.firsts[stage] + i; t.Kind {
		case Forward:
			r.forward(t, n)
		case Backward:
			r.backward(t, n)
		case WeightGrad:
			r.weightGrads(t, n)
		}
		r.now[TermMessages] -= inputs[i]
		if r.detours != nil {
			r.detour(t, r.detours[i])
		}
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

// persist counts what lives through the whole run.
func (r *residence) persist() {
	add := func(b *graph.Block, layers ir.Bytes) {
		weights, _, optimizer := r.plan.stateBytes(r.graph, b)
		r.now[TermWeights] += layers * weights
		r.now[TermOptimizer] += layers * optimizer
	}
	const scalars = 4 // losses, the step's parameters, the norm of gradients
	r.now[TermWeights] = scalars * ir.Alignment
	add(r.graph.Layer, ir.Bytes(len(r.fresh)))
	if r.firstStage() {
		add(r.graph.Embedding, 1)
	}
	if r.lastStage() {
		add(r.graph.Head, 1)
	}
}

// touch counts what stays of a block's gradients to the end of the step: of those that are divided under ZeroGradients, or of the
// others.
func (r *residence) touch(b *graph.Block, divided bool) {
	for i := range b.Params {
		if param := &b.Params[i]; divided == (r.plan.ZeroOf(b, param) >= ZeroGradients) {
			r.now[TermGradients] += r.plan.gradientBytes(b, param)
		}
	}
}

func (r *residence) forward(t Task, n int) {
	z, at := r.sizes[t.Subsequence], &r.stops[n]
	if !at.fed {
		r.note(t, r.context.working(r.graph, r.graph.Embedding, forwardPass, z, false, 0))
	}
	u := r.leave(t)
	r.findLeaving(n)
	r.borrow(t)
	for k := range r.layers[t.Stage] {
		b, own := r.block(t, k), r.first[t.Stage]+k
		if t.Subsequence == 0 {
			r.now[TermCaches] += r.caches(b, graph.Cache, z)
			r.host += r.streamed(graph.Cache, z.Sequence)
		}
		r.enter()
		r.now[TermLoads] = r.attend(t, k, b)
		r.note(t, r.working(b, forwardPass, z, false)+r.sharing(t))
		r.now[TermLoads] = r.loads.bytes()
		r.exit()
		r.park(t, b)
		r.now[TermKept] += u.kept[own]
		r.now[TermCopies] += u.offloaded[own]
		r.host += u.offloaded[own]
		if k == 0 && r.waits[t] {
			r.host -= r.hidden(z)
		}
		r.copies(at, k).leaving = true
		r.copiesBeside(n, k)
	}
	if t.Subsequence == len(r.sizes)-1 {
		r.help(t)
	}
}

func (r *residence) backward(t Task, n int) {
	at, pass := &r.stops[n], backwardPass
	if at.split {
		pass = inputPass
	}
	z, u := r.sizes[t.Subsequence], r.units[t.Subsequence]
	layers := r.layers[t.Stage]
	if int(at.undone) == n-1 {
		for k := range layers {
			r.release(at.undone, k)
		}
	}
	r.reloadUpTo(n, r.plan.Offload.Ahead-1)
	if !at.fed {
		r.touching(t, r.graph.Head, backwardPass, z, t.Microbatch == 0 && t.Subsequence == len(r.sizes)-1)
	}
	r.findLeaving(n)
	for ran := range layers {
		k := layers - 1 - ran
		b, own := r.block(t, k), r.first[t.Stage]+k
		r.now[TermKept] -= u.kept[own]
		r.now[TermCopies] -= u.offloaded[own]
		r.enter()
		r.visiting(t, k, b, pass, z)
		r.exit()
		r.leaveBackward(t, own, at, b, z)
		if t.Slot() == len(r.sizes) {
			r.stopHelping(layers - ran)
		}
		if t.Subsequence == len(r.sizes)-1 {
			r.now[TermCacheGrads] += r.caches(b, graph.CacheGrad, z)
			r.host += r.streamed(graph.CacheGrad, z.Prefix)
			r.most = max(r.most, r.host)
		}
		if t.Subsequence == 0 {
			r.now[TermCacheGrads] -= r.caches(b, graph.CacheGrad, z)
			r.now[TermCaches] -= r.caches(b, graph.Cache, z)
			if at.split {
				r.now[TermCacheGrads] += r.cachesBetween(b, z)
			}
			r.host -= r.streamed(graph.Cache, z.Sequence) + r.streamed(graph.CacheGrad, r.sizes[len(r.sizes)-1].Prefix)
		}
		r.copiesBeside(n, ran)
	}
	if !at.feeds {
		r.touching(t, r.graph.Embedding, pass, z, t.Microbatch == 0 && t.Subsequence == len(r.sizes)-1)
		if at.split {
			r.now[TermKept] += r.between(r.graph.Embedding, z)
		}
	}
}

// weightGrads is the second half of a backward.
func (r *residence) weightGrads(t Task, n int) {
	z, layers := r.sizes[t.Subsequence], r.layers[t.Stage]
	r.findLeaving(n)
	for ran := range layers {
		k := layers - 1 - ran
		b, own := r.block(t, k), r.first[t.Stage]+k
		r.now[TermKept] -= r.between(b, z)
		r.visiting(t, k, b, weightPass, z)
		r.leaveBackward(t, own, &r.stops[n], b, z)
		if t.Subsequence == 0 {
			r.now[TermCacheGrads] -= r.cachesBetween(b, z)
		}
		r.copiesBeside(n, ran)
	}
	if t.Stage == 0 {
		r.now[TermKept] -= r.between(r.graph.Embedding, z)
		r.touching(t, r.graph.Embedding, weightPass, z, false)
	}
}

// leaveBackward ends the visit of a layer: what its second half will read is kept, or its gradients are given away, and from
// then on what the visit before has given away is on its way. Gradients that are not complete wait, whole.
func (r *residence) leaveBackward(t Task, own int, at *stop, b *graph.Block, z graph.Size) {
	if at.split {
		r.now[TermKept] += r.between(b, z)
		return
	}
	complete := r.plan.Completes(t)
	switch {
	case !complete && !r.whole[own]:
		r.now[TermGradients] += r.visits.gradients
	case complete && r.whole[own]:
		r.now[TermGradients] -= r.visits.gradients
	}
	r.whole[own] = !complete
	if complete && !r.owing {
		r.now[TermGradients] += r.visits.gradients + r.visits.sums
		r.owing = true
	}
}

// between are the bytes that a block holds from the first half of its backward to the second.
func (r *residence) between(b *graph.Block, z graph.Size) ir.Bytes {
	return r.working(b, betweenHalves, z, false)
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

// visiting notes a backward pass of the k-th layer of a task, which may be the first to touch its gradients. Those that are divided
// under ZeroGradients it begins whole, unless they wait for it, and what stays to the end of the step comes of those that are complete.
func (r *residence) visiting(t Task, k int, b *graph.Block, pass direction, z graph.Size) {
	own := r.first[t.Stage] + k
	divided := r.plan.Parallel.Zero >= ZeroGradients
	fresh := r.fresh[own] && pass != weightPass
	first, begins := fresh && !r.whole[own], !r.whole[own] && (fresh || divided)
	working := r.working(b, pass, z, begins) + r.sharing(t)
	if r.loads.queue != nil {
		r.noteOwn(t, working)
		r.now[TermLoads] = r.attend(t, k, b)
		working = r.working(b, attendingPass, z, begins)
	}
	r.note(t, working)
	r.now[TermLoads] = r.loads.bytes()
	if first {
		r.touch(b, false)
	}
	if fresh && (!divided || r.plan.Completes(t)) {
		r.touch(b, true)
		r.fresh[own] = false
	}
}

// touching notes a backward pass of the embedding or the head, which may be the first to touch its gradients.
func (r *residence) touching(t Task, b *graph.Block, pass direction, z graph.Size, fresh bool) {
	r.note(t, r.working(b, pass, z, fresh)+r.sharing(t))
	if fresh {
		r.touch(b, false)
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
	if letters := r.plan.Offload.Fate[r.stage][t.Subsequence][at : at+units]; letters != r.last.letters {
		r.last = blockOf{letters, r.graph.LayerWithout(remadeBy(letters))}
	}
	return r.last.block
}

// working is what a block holds while it runs: most layers of a task hold the same.
func (r *residence) working(b *graph.Block, pass direction, z graph.Size, fresh bool) ir.Bytes {
	if key := (workingKey{b, pass, z, fresh, r.passing}); key != r.was {
		r.was, r.held = key, r.context.working(r.graph, b, pass, z, fresh, r.passing)
	}
	return r.held
}

// leave is what a forward will leave.
func (r *residence) leave(t Task) *unitsLeft {
	u := r.units[t.Subsequence]
	if u != nil {
		return u
	}
	n := len(r.fresh)
	u = &unitsLeft{make([]ir.Bytes, n), make([]ir.Bytes, n)}
	fate, sizes, before := r.plan.Offload.Fate[r.stage][t.Subsequence], r.saved[t.Subsequence], ""
	for k := range n {
		letters := fate[k*len(sizes) : (k+1)*len(sizes)]
		if letters == before {
			u.kept[k], u.offloaded[k] = u.kept[k-1], u.offloaded[k-1]
			continue
		}
		before = letters
		for at, size := range sizes {
			switch letters[at] {
			case FateOffload:
				u.offloaded[k] += graph.Align(size)
			case FateKeep:
				u.kept[k] += graph.Align(size)
			}
		}
	}
	r.units[t.Subsequence] = u
	return u
}

// copies are those of the k-th layer of a task.
func (r *residence) copies(t *stop, k int) *copiesState { return &r.away[int(t.layers)-r.begun+k] }

func (r *residence) findLeaving(n int) {
	r.leaving = r.course.leaving(r.leaving[:0], r.stage, n-r.firsts[r.stage])
}

// copiesBeside follows codegen's: it ends and begins the copies that go along with the k-th layer that a task runs.
func (r *residence) copiesBeside(n, k int) {
	t := &r.stops[n]
	for _, f := range r.leaving {
		of := &r.stops[f]
		layers := int(of.end - of.first)
		if k < layers {
			r.release(int32(f), k)
		}
		for rest := k + 1; k == int(t.end-t.first)-1 && rest < layers; rest++ {
			r.release(int32(f), rest)
		}
	}
	r.reloadUpTo(n, k+r.plan.Offload.Ahead)
}

// reloadUpTo begins the reloads of the layers up to the last-th from the start of a task on, as codegen does.
func (r *residence) reloadUpTo(n, last int) {
	if r.reloaded == 0 {
		r.reloads = r.plan.coming(r.plan.Tasks[r.stage], n-r.firsts[r.stage])
	}
	first := 0 // layer of the task, from the start of the one that is looked at
	for m := n; m <= n+r.reloads && first <= last; m++ {
		t := &r.stops[m]
		layers := int(t.end - t.first)
		if t.kind == Backward {
			for at := max(0, r.reloaded-first); at < layers && first+at <= last; at++ {
				r.reload(t, layers-1-at)
			}
		}
		first += layers
	}
	r.reloaded = max(r.reloaded, last+1)
}

// detour counts what waits on the host for its reader. A layer's input becomes its unit there.
func (r *residence) detour(t Task, away bool) {
	if r.waits[t] && t.Kind == Backward {
		r.host -= r.hidden(r.sizes[t.Subsequence])
	}
	if away {
		_, reader, _ := r.plan.Reader(t)
		r.waits[reader] = true
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
func (r *residence) release(f int32, k int) {
	t := &r.stops[f]
	if c := r.copies(t, k); c.leaving {
		c.leaving = false
		r.now[TermCopies] -= r.units[t.subsequence].offloaded[int(t.first)+k]
	}
}

// reload begins the copy back of the k-th layer of a backward.
func (r *residence) reload(t *stop, k int) {
	c := r.copies(&r.stops[t.undone], k)
	if c.back {
		return
	}
	r.release(t.undone, k)
	c.back = true
	n := r.units[t.subsequence].offloaded[int(t.first)+k]
	r.now[TermCopies] += n
	r.most = max(r.most, r.host)
	r.host -= n
}

// hidden are the bytes of the rows that stages pass on.
func (r *residence) hidden(z graph.Size) ir.Bytes {
	return graph.Align(r.graph.Layer.Values[r.graph.Layer.Input].Bytes(z))
}

// caches are the bytes of K and V of a layer, or of their gradients.
func (r *residence) caches(b *graph.Block, kind graph.Kind, z graph.Size) (n ir.Bytes) {
	for v := range b.Values {
		if b.Values[v].Kind == kind && b.Values[v].Spans() {
			n += graph.Align(b.Values[v].Bytes(z))
		}
	}
	return n
}

// streamed are the bytes of some tokens of what streams.
func (r *residence) streamed(kind graph.Kind, tokens int64) (n ir.Bytes) {
	z := r.sizes[0]
	z.Tokens = tokens
	for _, i := range r.streaming {
		if v := &r.graph.Layer.Values[i]; v.Kind == kind {
			n += graph.Align(v.Bytes(z))
		}
	}
	return n
}

// waitingInputs are, for every task of every stage, the bytes of messages that are held while it runs: results of the task
// before it on their way out, inputs of tasks behind it that have come already or may come while it runs.
func (c *Context) waitingInputs(p *Plan) [][]ir.Bytes {
	w := inputs{course: c.course(p), shapes: c.shapes(p)}
	g := c.Model(p)
	for _, z := range w.sizes {
		w.hidden = append(w.hidden, graph.Align(g.Layer.Values[g.Layer.Input].Bytes(z)))
	}
	w.starts, w.ends = w.times()
	w.held, w.arrivals = make([]ir.Bytes, len(w.stops)), make([][]arrival, len(p.Tasks))
	held := make([][]ir.Bytes, len(p.Tasks))
	for rank, tasks := range p.Tasks {
		w.arrivals[rank] = make([]arrival, 0, len(tasks))
	}
	for rank := range p.Tasks {
		w.send(rank)
	}
	for rank, tasks := range p.Tasks {
		w.wait(rank)
		held[rank] = w.held[w.firsts[rank] : w.firsts[rank]+len(tasks)]
	}
	return held
}

// inputs are the messages of a plan's tasks. Lists are by number of the task, or by rank.
type inputs struct {
	*course
	*shapes
	hidden       []ir.Bytes // [i]
	starts, ends []int
	held         []ir.Bytes
	arrivals     [][]arrival
}

// arrival is of a task's input.
type arrival struct{ time, task int }

// send notes where the results of a rank's tasks go, and what is held of them on the way.
func (w *inputs) send(rank int) {
	p, first := w.plan, w.firsts[rank]
	tasks := p.Tasks[rank]
	var detours []bool
	if p.layerOrder() || p.Streams() {
		detours = p.Detours(tasks)
	}
	for i := range tasks {
		n := first + i
		t := &w.stops[n]
		to, next := int(t.to), int(t.next)
		switch {
		case t.feeds:
		case t.kind == Forward: // the backward begins with the head
			to, next = rank, int(w.numberOf(w.task(int32(n)).As(Backward)))
		default:
			continue
		}
		size := w.hidden[t.subsequence]
		if detours != nil && detours[i] { // on its way out, and back
			w.held[n+1] += size
			w.held[next-1] += size
			continue
		}
		w.arrivals[to] = append(w.arrivals[to], arrival{w.ends[n], next})
		if to != rank && i+1 < len(tasks) {
			w.held[n+1] += size
		}
	}
}

// wait adds up what has come to a rank, or may come, while each of its tasks runs.
func (w *inputs) wait(rank int) {
	arrivals, first := w.arrivals[rank], w.firsts[rank]
	slices.SortFunc(arrivals, func(a, b arrival) int { return cmp.Compare(a.time, b.time) })
	come := make([]bool, len(w.tasks[rank]))
	var waiting ir.Bytes
	next := 0
	for i := range come {
		n := first + i
		for next < len(arrivals) && (i+1 == len(come) || arrivals[next].time <= w.starts[n+1]) {
			at := arrivals[next].task
			come[at-first] = true
			waiting += w.hidden[w.stops[at].subsequence]
			next++
		}
		if come[i] { // the layer that runs holds its input
			waiting -= w.hidden[w.stops[n].subsequence]
		}
		w.held[n] += waiting
	}
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
