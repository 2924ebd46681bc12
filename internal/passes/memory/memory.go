// Package memory computes upper bounds on the device and host memory of a plan, before buffers are
// placed. A Meter goes through the actions of a rank and adds up the bytes held.
//
// memory.go goes through the actions; live.go computes the bytes that one block holds while it runs.
package memory

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// This file computes the bound that passes use to choose among plans. After codegen has placed the buffers,
// Plan.Memory has the exact bytes; a test in codegen compares the two.

// Term is a purpose for which a rank uses device memory.
type Term int

// Uses of memory.
const (
	TermWeights    Term = iota
	TermOptimizer       // states and f32 masters
	TermGradients       // gradients of weights, from a step's first addition on
	TermCaches          // K and V
	TermCacheGrads      // dK and dV
	TermLoads           // streamed rows of K, V and their gradients
	TermKept            // units between their forward and their backward
	TermCopies          // units on their way to the host or back
	TermMessages        // messages between stages, and hidden rows that wait for the head
	TermWorking         // the running layer, embedding or chunk of the head
	TermPacking         // gaps that placement may leave
	numTerms
)

var termNames = [numTerms]string{
	"weights", "optimizer state", "gradients", "K and V", "dK and dV", "streamed K and V", "kept activations", "copies in progress",
	"messages", "the running layer", "gaps",
}

// String returns the name that reports use.
func (t Term) String() string { return termNames[t] }

// Peak describes the point at which a stage's ranks hold the most bytes on the device.
type Peak struct {
	Bytes ir.Bytes           // sum of the terms
	Terms [numTerms]ir.Bytes // at that point
	Task  plan.Task          // the task that runs at that point
}

// Footprint holds upper bounds on the sizes of a plan's arenas.
type Footprint struct {
	Device []Peak     // [stage]
	Host   []ir.Bytes // [stage], of one rank
}

// FootprintOf returns an upper bound on the arenas that codegen will place for a plan.
func FootprintOf(p *plan.Plan) Footprint {
	return NewMeter(walk.Must(p), walk.NewShapes(p, p.Graph()), Blocks{}, nil).Footprint()
}

// Fits reports whether the footprint is within the given capacities.
func (f Footprint) Fits(device, host ir.Bytes) bool {
	for s := range f.Device {
		if f.Device[s].Bytes > device || f.Host[s] > host {
			return false
		}
	}
	return true
}

// Meter bounds the memory of one plan.
type Meter struct {
	*walk.Walk
	*walk.Shapes
	blocks Blocks
	recent *[1 << recentBits]heldBytes // [slotOf]: results of recent layers
	work   *walk.Work
}

// recentBits is the number of bits that slotOf returns: enough for all passes of a thousand subsequences.
const recentBits = 12

// heldBytes caches the bytes that a block holds while it runs.
type heldBytes struct {
	workingKey
	bytes ir.Bytes
}

// NewMeter returns a meter for a walk's plan. The meter caches the bytes that blocks hold in b, and counts its
// work in w, unless w is nil.
func NewMeter(r *walk.Walk, s *walk.Shapes, b Blocks, w *walk.Work) *Meter {
	return &Meter{r, s, b, new([1 << recentBits]heldBytes), w}
}

// Of returns a meter for a plan with different tasks of the same sizes.
func (m *Meter) Of(p *plan.Plan) *Meter {
	return &Meter{walk.Must(p), m.Shapes, m.blocks, m.recent, m.work}
}

// Footprint returns the bound on all arenas.
func (m *Meter) Footprint() Footprint {
	f, _ := m.Within(plan.Memory{DeviceCapacityBytes: math.MaxInt64, HostCapacityBytes: math.MaxInt64})
	return f
}

// Within reports whether a plan fits. It stops at the first stage that does not fit, so the
// footprint is then incomplete.
func (m *Meter) Within(limit plan.Memory) (f Footprint, fits bool) {
	p := m.Plan
	if p.Mux.Left {
		return m.leftFootprint(limit)
	}
	f = Footprint{Device: make([]Peak, len(p.Tasks)), Host: make([]ir.Bytes, len(p.Tasks))}
	inputs := m.WaitingInputs()
	for s := range p.Tasks {
		f.Device[s], f.Host[s] = m.Stage(s, inputs[s])
		if f.Device[s].Bytes > limit.DeviceCapacityBytes || f.Host[s] > limit.HostCapacityBytes {
			return f, false
		}
	}
	return f, true
}

// Gaps that placement may leave, as a share of the bytes of temporary buffers. A test compares these values
// with placed plans. Gaps are larger if activations are woven, so that lifetimes do not end in the order in
// which they begin.
const (
	packing        = 0.03
	packingOfWoven = 0.08
)

// Packed returns the number of bytes that the placement of n bytes may lose to gaps.
func Packed(p *plan.Plan, n ir.Bytes) ir.Bytes {
	if woven(p) {
		return ir.Bytes(float64(n) * packingOfWoven)
	}
	return ir.Bytes(float64(n) * packing)
}

// woven reports whether a rank holds activations of several microbatches on several virtual stages, or of split
// backwards, at the same time.
func woven(p *plan.Plan) bool {
	s := strategy.Of(p)
	return s.Late || p.Parallel.VirtualStages > 1 && !s.Rounds
}

// tracker adds up the bytes that one stage holds while its tasks run.
type tracker struct {
	*Meter
	plan   *plan.Plan
	stage  int
	graph  *graph.Model
	layers []int // [virtual stage]: number of layers
	first  []int // [virtual stage]: index of its first layer among all layers of its rank

	now   [numTerms]ir.Bytes
	host  ir.Bytes
	peak  Peak
	most  ir.Bytes // maximum on the host
	rests ir.Bytes // optimizer state on the host, which is part of the maximum
	whole []params // of each layer, of the embedding and of the head: parameters whose whole gradients exist
	adds  addedTo  // parameters that the last backward added to
	given []bool   // layers whose gradients have been reduced into slices
	owed  ir.Bytes // gradients that the previous visit passed to collectives that may still be running, and the results of those collectives

	units     []*unitsLeft // [i]; nil before the first forward of subsequence i
	leaving   []bool       // [layer of a task, numbered over all tasks as in Walk, minus begun]: its offloaded tensors still hold their device bytes
	begun     int          // number of layers of all tasks of earlier ranks
	streaming []int        // values with the rows of only one subsequence
	spans     spansOf      // last result of the method spanning
	rows      [2]rowsOf    // last results of the method streamed: for K and V, and for their gradients
	queue     *walk.LoadQueue
	held      ir.Bytes     // loads that have been issued and are not used yet, and blocks of dK and dV that are being copied to the host
	visitsOf  []visitBytes // by kind of layers
	halves    ir.Bytes     // bytes between the two steps of the visit's gathers
	passing   params       // parameters that are whole only until their last use in this visit, so that they are counted with the running block

	waits  []bool         // [task]: whether its input is on the host; nil: no task's input is
	inputs ir.Bytes       // inputs of a layer that have been loaded to recompute K and V, and not yet used
	task   int            // the current task
	loans  []plan.Lending // [i]: the keys that stage i lends to this stage
	last   blockOf
}

// blockOf is a dataflow and the placement letters that it was built for.
type blockOf struct {
	kind    int
	letters string
	block   *graph.Block
}

// spansOf holds the values of a block that span an entire sequence.
type spansOf struct {
	block  *graph.Block
	values []int
}

// rowsOf holds the bytes that a given number of streamed tokens take.
type rowsOf struct {
	tokens int64
	bytes  ir.Bytes
}

// addedTo is the set of parameters whose gradients a pass adds to.
type addedTo struct {
	block  *graph.Block
	pass   Direction
	params params
}

// unitsLeft holds the bytes that the forwards of a subsequence leave in memory, for each layer of the rank.
type unitsLeft struct{ kept, offloaded []ir.Bytes }

func (m *Meter) newTracker(stage int) *tracker {
	p := m.Plan
	r := &tracker{Meter: m, plan: p, stage: stage, graph: m.Model, layers: p.LayersPerStage}
	for kind := range r.graph.Kinds() {
		r.visitsOf = append(r.visitsOf, visitBytesOf(p, r.graph, r.graph.LayerOf(kind)))
	}
	r.whole, r.given = make([]params, p.LayersOf(stage)+2), make([]bool, p.LayersOf(stage))
	for j := range r.layers {
		first, _ := p.Span(j)
		r.first = append(r.first, first)
	}
	from, to := r.Firsts[stage], len(r.Nodes)
	if stage+1 < len(r.Firsts) {
		to = r.Firsts[stage+1]
	}
	r.begun = int(r.Nodes[from].Layers)
	end := r.Walk.Layers
	if to < len(r.Nodes) {
		end = int(r.Nodes[to].Layers)
	}
	r.leaving, r.units = make([]bool, end-r.begun), make([]*unitsLeft, len(r.Sizes))
	if p.LayerOrder() || p.Streams() {
		r.waits = make([]bool, len(p.Tasks[stage]))
	}
	for i := range r.graph.Layer.Values {
		if v := &r.graph.Layer.Values[i]; v.Rows == graph.Full && (v.Kind == graph.Cache || v.Kind == graph.CacheGrad) {
			r.streaming = append(r.streaming, i)
		}
	}
	r.queue = walk.NewLoadQueue(p, r.graph, p.Tasks[stage], r.Schedule(stage))
	if p.Mux.Right {
		r.loans = make([]plan.Lending, len(p.Tasks))
		for i := stage + 1; i < len(p.Tasks); i++ {
			r.loans[i] = p.Lent(i, stage)
		}
	}
	return r
}

// Stage returns an upper bound on the arenas of a stage. The argument inputs is the stage's result from
// WaitingInputs.
func (m *Meter) Stage(stage int, inputs []ir.Bytes) (Peak, ir.Bytes) {
	p, r := m.Plan, m.newTracker(stage)
	r.persist()
	persistent := r.now[TermWeights] + r.now[TermOptimizer]
	m.work.Spend(len(r.leaving) + walk.CountLoads(p, p.LayersOf(stage)))
	list := r.Schedule(stage)
	for i, t := range p.Tasks[stage] {
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
func (r *tracker) note(t plan.Task, working ir.Bytes) {
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

func (r *tracker) firstStage() bool { return r.stage == r.plan.Home(0) }

func (r *tracker) lastStage() bool { return r.stage == r.plan.Home(r.plan.Parallel.Stages()-1) }

// persist counts the tensors that exist throughout the run.
func (r *tracker) persist() {
	add := func(b *graph.Block, layers ir.Bytes) {
		weights, _, optimizer := r.plan.StateBytes(r.graph, b)
		r.now[TermWeights] += layers * weights
		r.now[TermOptimizer] += layers * optimizer
		r.rests += layers * r.plan.HostStateBytes(r.graph, b)
	}
	scalars := ir.Bytes(4) // losses, the step's parameters, the norm of the gradients
	if r.graph.Layer.Given(graph.ValueDropout) != graph.Missing {
		scalars++
	}
	if r.graph.Masked {
		scalars += 2 // label weights of steps and validations
	}
	r.now[TermWeights] = scalars * ir.Alignment
	if r.graph.Layer.Given(graph.ValuePositions) != graph.Missing {
		z := r.Sizes[0]
		r.now[TermCaches] = ir.Bytes(r.plan.Parallel.Microbatches) * graph.Align(ir.Bytes(z.Sequence*z.Batch)*ir.I32.Bytes())
	}
	for kind, n := range r.plan.KindsOf(r.graph, r.plan.StagesOf(r.stage)...) {
		add(r.graph.LayerOf(kind), ir.Bytes(n))
	}
	if r.firstStage() {
		add(r.graph.Embedding, 1)
	}
	if r.lastStage() {
		add(r.graph.Head, 1)
	}
	r.host, r.most = r.rests, r.rests
}

// ofEmbedding and ofHead are the indices of the embedding and the head, which follow those of the layers.
func (r *tracker) ofEmbedding() int { return len(r.given) }

func (r *tracker) ofHead() int { return len(r.given) + 1 }

// begins returns the gradients of a block that a pass adds to and that do not exist yet.
func (r *tracker) begins(b *graph.Block, own int, pass Direction) params {
	if r.adds.block != b || r.adds.pass != pass {
		r.adds = addedTo{b, pass, addsTo(b, pass)}
	}
	return r.adds.params &^ r.whole[own]
}

// begin counts gradients that exist from now on.
func (r *tracker) begin(b *graph.Block, own int, begins params) {
	r.whole[own] |= begins
	r.now[TermGradients] += wholeGradients(r.plan, b, begins)
}

// wholeGradients returns the bytes that the whole gradients of the given parameters of a block take.
func wholeGradients(p *plan.Plan, b *graph.Block, of params) (n ir.Bytes) {
	for i := range b.Params {
		if of.has(i) {
			n += graph.Align(ir.Bytes(p.Slicing(&b.Params[i]).Whole()*b.Params[i].Local[1]) * ir.F32.Bytes())
		}
	}
	return n
}

// act counts the bytes that an action of a task takes and frees.
func (r *tracker) act(t plan.Task, a schedule.Action) {
	at := &r.Nodes[r.Firsts[r.stage]+int(a.Task)]
	switch a.Op {
	case schedule.Begin:
		if t.Kind == plan.Forward {
			r.borrow(t)
		}
	case schedule.Embedding:
		r.embedding(t, at)
	case schedule.Head:
		r.touching(t, r.graph.Head, r.ofHead(), BackwardPass, r.plan.HeadSize(r.Sizes[t.Subsequence]))
	case schedule.Enter:
		r.enter()
	case schedule.End, schedule.StageOut:
		r.endStaged(t, a)
		if t.Kind == plan.Forward && t.Subsequence == len(r.Sizes)-1 {
			r.help(t)
		}
	default:
		r.actOn(t, at, a)
	}
}

// actOn counts the bytes that an action on a layer takes and frees.
func (r *tracker) actOn(t plan.Task, at *walk.Node, a schedule.Action) {
	switch a.Op {
	case schedule.CachesIn:
		r.cachesIn(r.plan.Tasks[r.stage][a.Task], int(a.Layer))
	case schedule.Gather:
		r.gather(r.visitOf(a))
	case schedule.Free:
		r.free(r.visitOf(a))
	case schedule.LoadInput, schedule.Recompute:
		r.recompute(t, a)
	case schedule.Visit:
		r.visit(t, at, a)
	case schedule.Reduce:
		r.reduce(r.first[t.Stage]+int(a.Layer), r.visitOf(a))
	case schedule.Release:
		r.release(at, a)
	case schedule.Reload:
		r.reload(at, a)
	}
}

func (r *tracker) embedding(t plan.Task, at *walk.Node) {
	b, z := r.graph.Embedding, r.Sizes[t.Subsequence]
	switch {
	case t.Kind == plan.Forward:
		r.note(t, r.blocks.Bytes(r.plan, r.graph, b, forwardPass, z, 0, 0))
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
	b, own := r.block(t, k), r.first[t.Stage]+k
	switch t.Kind {
	case plan.Forward:
		r.forward(t, at, a, b, own)
	case plan.Backward:
		r.backward(t, at, k, b, own)
	case plan.WeightGrad:
		r.weightGrads(t, k, b)
	}
	r.passing = 0
}

func (r *tracker) forward(t plan.Task, at *walk.Node, a schedule.Action, b *graph.Block, own int) {
	z, u, k := r.Sizes[t.Subsequence], r.leave(t), int(a.Layer)
	if t.Subsequence == 0 {
		r.now[TermCaches] += r.caches(b, graph.Cache, z)
		r.host += r.streamed(graph.Cache, z.Sequence)
	}
	r.now[TermLoads] = r.attend()
	r.note(t, r.working(b, forwardPass, z, 0)+r.sharing(t))
	r.now[TermLoads] = r.held
	r.cachesOut(t, b)
	if !b.Attends && t.Subsequence == len(r.Sizes)-1 { // no backward reads K and V
		r.now[TermCaches] -= r.caches(b, graph.Cache, z)
		r.host -= r.streamed(graph.Cache, z.Sequence)
	}
	r.now[TermKept] += u.kept[own]
	r.host += u.offloaded[own]
	if k == 0 && r.inputWaits() {
		r.host -= r.hidden(z)
	}
	*r.isLeaving(at, k) = true
	r.now[TermCopies] += u.offloaded[own]
}

func (r *tracker) backward(t plan.Task, at *walk.Node, k int, b *graph.Block, own int) {
	z, u, pass := r.Sizes[t.Subsequence], r.units[t.Subsequence], BackwardPass
	if at.Split {
		pass = inputPass
	}
	r.now[TermKept] -= u.kept[own]
	r.now[TermCopies] -= u.offloaded[own]
	r.visiting(t, k, b, pass, z)
	if at.Split {
		r.now[TermKept] += r.between(b, z)
	}
	if !b.Attends {
		return
	}
	if t.Subsequence == len(r.Sizes)-1 {
		r.now[TermCacheGrads] += r.caches(b, graph.CacheGrad, z)
		r.host += r.gradsOnHost(t, k)
		r.most = max(r.most, r.host)
	}
	if t.Subsequence == 0 {
		r.now[TermCacheGrads] -= r.caches(b, graph.CacheGrad, z)
		r.now[TermCaches] -= r.caches(b, graph.Cache, z)
		if at.Split {
			r.now[TermCacheGrads] += r.cachesBetween(b, z)
		}
		r.host -= r.streamed(graph.Cache, z.Sequence) + r.gradsOnHost(t, k)
	}
}

// gradsOnHost returns the bytes of dK and dV that a layer of a task keeps on the host for
// streaming: those of all tokens before the last subsequence, or none if no subsequence attends to
// earlier tokens.
func (r *tracker) gradsOnHost(t plan.Task, k int) ir.Bytes {
	last := r.graph.OfLayer(r.Sizes[len(r.Sizes)-1], r.plan.Layers(t.Stage)[k])
	if last.Earliest() == last.Prefix {
		return 0
	}
	return r.streamed(graph.CacheGrad, last.Prefix)
}

// weightGrads tracks the second half of a backward.
func (r *tracker) weightGrads(t plan.Task, k int, b *graph.Block) {
	z := r.Sizes[t.Subsequence]
	r.now[TermKept] -= r.between(b, z)
	r.visiting(t, k, b, weightPass, z)
	if t.Subsequence == 0 && b.Attends {
		r.now[TermCacheGrads] -= r.cachesBetween(b, z)
	}
}

// isLeaving returns a flag to read or set: whether the tensors that a forward has offloaded from its k-th layer
// still hold their device bytes.
func (r *tracker) isLeaving(t *walk.Node, k int) *bool { return &r.leaving[int(t.Layers)-r.begun+k] }

// release frees the device bytes of a forward's layer after their copy to the host.
func (r *tracker) release(t *walk.Node, a schedule.Action) {
	if is := r.isLeaving(t, int(a.Layer)); *is {
		r.now[TermCopies] -= r.units[t.Subsequence].offloaded[t.First+a.Layer]
		*is = false
	}
}

// reload begins the copies that reload a layer for a backward.
func (r *tracker) reload(t *walk.Node, a schedule.Action) {
	n := r.units[t.Subsequence].offloaded[t.First+a.Layer]
	r.now[TermCopies] += n
	r.most = max(r.most, r.host)
	r.host -= n
}

// between returns the bytes that a block holds between the two halves of its backward.
func (r *tracker) between(b *graph.Block, z graph.Size) ir.Bytes {
	return r.working(b, betweenHalves, z, 0)
}

// cachesBetween returns the bytes of the gradients of K and V that the second half reads.
func (r *tracker) cachesBetween(b *graph.Block, z graph.Size) (n ir.Bytes) {
	for _, v := range b.Between {
		if b.Values[v].Kind == graph.CacheGrad {
			n += graph.Align(b.Values[v].Bytes(z))
		}
	}
	return n
}

// visiting tracks a backward pass through the k-th layer of a task, and the gradients that it creates.
func (r *tracker) visiting(t plan.Task, k int, b *graph.Block, pass Direction, z graph.Size) {
	own := r.first[t.Stage] + k
	begins := r.begins(b, own, pass)
	working := r.working(b, pass, z, begins) + r.sharing(t)
	if r.plan.Streams() {
		if issued := r.queue.Issued; b.Attends && len(issued) > 0 { // its own rows, which are counted with the running layer
			r.now[TermLoads] -= r.loadBytes(issued[0].Load)
		}
		r.note(t, working)
		r.now[TermLoads] = r.attend()
		working = r.working(b, attendingPass, z, begins)
	}
	r.note(t, working)
	r.now[TermLoads] = r.held
	r.begin(b, own, begins)
}

// touching tracks a backward pass through the embedding or the head, and the gradients that it creates.
func (r *tracker) touching(t plan.Task, b *graph.Block, own int, pass Direction, z graph.Size) {
	begins := r.begins(b, own, pass)
	r.note(t, r.working(b, pass, z, begins)+r.sharing(t))
	r.begin(b, own, begins)
}

// block returns the dataflow of the k-th layer of a task.
func (r *tracker) block(t plan.Task, k int) *graph.Block {
	units := len(r.Saved[0])
	at, kind := (r.first[t.Stage]+k)*units, 0
	if r.graph.Kinds() > 1 {
		kind = r.graph.KindOf(r.plan.LayerAt(t.Stage, k))
	}
	if letters := r.plan.Offload.Placement[r.stage][t.Subsequence][at : at+units]; letters != r.last.letters || kind != r.last.kind {
		r.last = blockOf{kind, letters, r.graph.LayerWithout(kind, plan.RecomputedBy(letters))}
	}
	return r.last.block
}

// working returns the bytes that a block holds while it runs. Most layers of a subsequence hold the same number
// of bytes, and comparing with recent keys is faster than looking up such a long key.
func (r *tracker) working(b *graph.Block, pass Direction, z graph.Size, begins params) ir.Bytes {
	key, held := keyOf(r.plan, b, pass, z, begins, r.passing), &r.recent[slotOf(pass, z, begins)]
	if held.workingKey != key {
		*held = heldBytes{key, r.blocks.Bytes(r.plan, r.graph, b, pass, z, begins, r.passing)}
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

// leave returns the bytes that a forward will leave in memory.
func (r *tracker) leave(t plan.Task) *unitsLeft {
	u := r.units[t.Subsequence]
	if u != nil {
		return u
	}
	n := len(r.given)
	u = &unitsLeft{make([]ir.Bytes, n), make([]ir.Bytes, n)}
	placement, sizes, before := r.plan.Offload.Placement[r.stage][t.Subsequence], r.Saved[t.Subsequence], ""
	for k := range n {
		letters := placement[k*len(sizes) : (k+1)*len(sizes)]
		if letters == before {
			u.kept[k], u.offloaded[k] = u.kept[k-1], u.offloaded[k-1]
			continue
		}
		before = letters
		for at, size := range sizes {
			switch letters[at] {
			case plan.PlacementOffload:
				u.offloaded[k] += graph.Align(size)
			case plan.PlacementKeep:
				u.kept[k] += graph.Align(size)
			}
		}
	}
	r.units[t.Subsequence] = u
	return u
}

// inputWaits reports whether the input of the current task is on the host.
func (r *tracker) inputWaits() bool { return r.waits != nil && r.waits[r.task] }

// endStaged counts results that stay on the host until another task reads them, and frees the input of a
// backward. The input of a forward becomes a saved unit of its first layer.
func (r *tracker) endStaged(t plan.Task, a schedule.Action) {
	if t.Kind == plan.Backward && r.inputWaits() {
		r.host -= r.hidden(r.Sizes[t.Subsequence])
	}
	if a.Op != schedule.StageOut {
		return
	}
	if reader := r.plan.Tasks[r.stage][a.Of]; r.plan.StagesOut(t, reader) {
		r.waits[a.Of] = true
		r.host += r.hidden(r.Sizes[t.Subsequence])
	}
}

// cachesOut frees K and V of a layer once the last subsequence has passed through the layer.
func (r *tracker) cachesOut(t plan.Task, b *graph.Block) {
	if !b.Attends {
		return
	}
	caches := r.caches(b, graph.Cache, r.Sizes[0])
	if !r.plan.StagesCaches(t.Stage) {
		if last := t.As(plan.Backward); r.plan.RecomputesCaches(last) {
			r.now[TermCaches] -= caches
		}
		return
	}
	if t.Subsequence == 0 {
		r.host += caches
	}
	if t.Subsequence == len(r.Sizes)-1 {
		r.now[TermCaches] -= caches
	}
}

// recompute tracks the recomputation of K and V of a layer from inputs on the device.
func (r *tracker) recompute(t plan.Task, a schedule.Action) {
	b, z := r.block(t, int(a.Layer)), r.Sizes[a.Of]
	switch {
	case !b.Attends:
	case a.Op == schedule.Recompute:
		r.inputs -= r.hidden(z)
		gradient := r.hidden(r.Sizes[t.Subsequence])
		r.note(t, gradient+r.inputs+r.working(r.graph.Layer, cachingPass, z, 0))
	default:
		r.inputs += r.hidden(z)
		if a.Of == 0 {
			r.now[TermCaches] += r.caches(b, graph.Cache, r.Sizes[0])
		}
	}
}

// cachesIn reloads K and V of a layer for the stage's first backward.
func (r *tracker) cachesIn(next plan.Task, k int) {
	if !r.plan.StagesCaches(next.Stage) {
		return
	}
	if b := r.block(next, k); b.Attends {
		caches := r.caches(b, graph.Cache, r.Sizes[0])
		r.most = max(r.most, r.host)
		r.now[TermCaches] += caches
		r.host -= caches
	}
}

// hidden returns the bytes of the hidden rows that stages pass on.
func (r *tracker) hidden(z graph.Size) ir.Bytes {
	return graph.Align(r.graph.Layer.Values[r.graph.Layer.Input].Bytes(z))
}

// caches returns the bytes of K and V of a layer, or of their gradients.
func (r *tracker) caches(b *graph.Block, kind graph.Kind, z graph.Size) (n ir.Bytes) {
	for _, v := range r.spanning(b) {
		if b.Values[v].Kind == kind {
			n += graph.Align(b.Values[v].Bytes(z))
		}
	}
	return n
}

// spanning returns the values of a block that span an entire sequence. It keeps the last result, because a layer
// of a ring has many values.
func (r *tracker) spanning(b *graph.Block) []int {
	if r.spans.block != b {
		r.spans = spansOf{block: b}
		for v := range b.Values {
			if b.Values[v].Spans() {
				r.spans.values = append(r.spans.values, v)
			}
		}
	}
	return r.spans.values
}

// streamed returns the bytes of the given number of streamed tokens. It keeps the last result, because most
// blocks have the same length.
func (r *tracker) streamed(kind graph.Kind, tokens int64) ir.Bytes {
	if len(r.streaming) == 0 {
		return 0
	}
	of := &r.rows[0]
	if kind == graph.CacheGrad {
		of = &r.rows[1]
	}
	if of.tokens == tokens {
		return of.bytes
	}
	z := r.Sizes[0]
	z.Tokens = tokens
	*of = rowsOf{tokens: tokens}
	for _, i := range r.streaming {
		if v := &r.graph.Layer.Values[i]; v.Kind == kind {
			of.bytes += graph.Align(v.Bytes(z))
		}
	}
	return of.bytes
}

// WaitingInputs returns, for every task of every stage, the bytes of messages that are held while the task
// runs: the result of the previous task, which is being sent, and inputs of later tasks that have arrived or
// might arrive meanwhile.
func (m *Meter) WaitingInputs() [][]ir.Bytes {
	w, p, g := inputs{Meter: m}, m.Plan, m.Model
	for _, z := range w.Sizes {
		w.hidden = append(w.hidden, graph.Align(g.Layer.Values[g.Layer.Input].Bytes(z)))
	}
	w.starts, w.ends = w.Times(g)
	w.held, w.arrivals = make([]ir.Bytes, len(w.Nodes)), make([][]arrival, len(p.Tasks))
	held := make([][]ir.Bytes, len(p.Tasks))
	for rank, tasks := range p.Tasks {
		w.arrivals[rank] = make([]arrival, 0, len(tasks))
	}
	for rank := range p.Tasks {
		w.send(rank)
	}
	for rank, tasks := range p.Tasks {
		w.wait(rank)
		held[rank] = w.held[w.Firsts[rank] : w.Firsts[rank]+len(tasks)]
	}
	return held
}

// inputs holds the messages of a plan's tasks. Lists are indexed by task number, and the lists of arrivals by
// rank.
type inputs struct {
	*Meter
	hidden       []ir.Bytes // [i]
	starts, ends []int
	held         []ir.Bytes
	arrivals     [][]arrival
}

// arrival is the time at which the input of a task, given by its number, arrives.
type arrival struct{ time, task int }

// send records where the results of a rank's tasks go, and the bytes held while they are sent.
func (w *inputs) send(rank int) {
	p, first := w.Plan, w.Firsts[rank]
	tasks := p.Tasks[rank]
	list := w.Schedule(rank)
	for i := range tasks {
		n := first + i
		t := &w.Nodes[n]
		to, next := int(t.To), int(t.Next)
		switch {
		case t.Feeds:
		case t.Kind == plan.Forward: // the result is the input of the backward, which begins with the head
			to, next = rank, int(w.NumberOf(w.Task(int32(n)).As(plan.Backward)))
		default:
			continue
		}
		size := w.hidden[t.Subsequence]
		if a := list.Last(i); a.Op == schedule.StageOut && p.StagesOut(tasks[i], tasks[a.Of]) { // copied to the host, and back
			w.held[n+1] += size
			w.held[next-1] += size
			continue
		}
		if to == rank { // stays on the rank: the task itself holds it until the task ends
			w.arrivals[to] = append(w.arrivals[to], arrival{w.starts[n+1] + 1, next})
			continue
		}
		w.arrivals[to] = append(w.arrivals[to], arrival{w.ends[n], next})
		if i+1 < len(tasks) {
			w.held[n+1] += size
		}
	}
}

// wait adds up, for each task of a rank, the inputs of later tasks that have arrived or might arrive while the
// task runs.
func (w *inputs) wait(rank int) {
	arrivals, first := w.arrivals[rank], w.Firsts[rank]
	slices.SortFunc(arrivals, func(a, b arrival) int { return cmp.Compare(a.time, b.time) })
	come := make([]bool, len(w.Tasks[rank]))
	var waiting ir.Bytes
	next := 0
	for i := range come {
		n := first + i
		for next < len(arrivals) && (i+1 == len(come) || arrivals[next].time <= w.starts[n+1]) {
			at := arrivals[next].task
			come[at-first] = true
			waiting += w.hidden[w.Nodes[at].Subsequence]
			next++
		}
		if come[i] { // counted with the running layer
			waiting -= w.hidden[w.Nodes[n].Subsequence]
		}
		w.held[n] += waiting
	}
}

// InWords lists the terms above one percent of the peak, largest first.
func (k Peak) InWords() string {
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

// Capacities returns the bytes that a rank has in each arena. Host memory reserved for checkpoints is not
// included.
func Capacities(p *plan.Plan) plan.Memory {
	m := ir.Machine(p.Cluster)
	return plan.Memory{DeviceCapacityBytes: ir.Bytes(m.DeviceMemory), HostCapacityBytes: m.HostMemoryPerRank() - CheckpointCopy(p)}
}

// CheckpointCopy returns the host memory per rank that the plan reserves for the copy of a checkpoint: as much
// as a checkpoint saves from a rank of the stage with the most state. The copy may be smaller, because replicas
// share it.
func CheckpointCopy(p *plan.Plan) (most ir.Bytes) {
	if p.Schedule.CheckpointCopy != "on" {
		return 0
	}
	g := p.Graph()
	for s := range p.Parallel.PP {
		var sum ir.Bytes
		for kind, n := range p.KindsOf(g, p.StagesOf(s)...) {
			sum += ir.Bytes(n) * p.SavedBytes(g, g.LayerOf(kind))
		}
		if s == p.Home(0) {
			sum += p.SavedBytes(g, g.Embedding)
		}
		if s == p.Home(p.Parallel.Stages()-1) {
			sum += p.SavedBytes(g, g.Head)
		}
		most = max(most, sum)
	}
	return most
}

// Shortfall returns the largest excess of a footprint over the capacities in m, or nil if it fits.
func (f *Footprint) Shortfall(m plan.Memory) *plan.Shortfall {
	m.DevicePeakBytes, m.HostPeakBytes = make([]ir.Bytes, len(f.Device)), f.Host
	for s := range f.Device {
		m.DevicePeakBytes[s] = f.Device[s].Bytes
	}
	return m.Shortfall()
}

// Slack returns the largest share of a footprint by which the footprint may exceed the placed bytes. A test in
// codegen checks it.
func Slack(p *plan.Plan) float64 {
	if p.Mux.Left { // a footprint assumes that a rank's own and borrowed bytes peak at the same time
		return 0.6
	}
	if woven(p) {
		return 0.1
	}
	return 0.04
}

// WithSlack returns the capacities within which a footprint may still fit after placement, given those of a plan.
func WithSlack(p *plan.Plan, m plan.Memory) plan.Memory {
	placed := 1 - Slack(p)
	m.DeviceCapacityBytes = ir.Bytes(float64(m.DeviceCapacityBytes) / placed)
	m.HostCapacityBytes = ir.Bytes(float64(m.HostCapacityBytes) / placed)
	return m
}

// Peaks returns the peak of the fullest stage on the device, and that of the fullest stage on the host.
func (f *Footprint) Peaks() (device, host ir.Bytes) {
	for s := range f.Device {
		device, host = max(device, f.Device[s].Bytes), max(host, f.Host[s])
	}
	return device, host
}
