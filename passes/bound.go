package passes

import (
	"slices"

	"sppo/graph"
	"sppo/ir"
	"sppo/ir/cost"
	"sppo/lang"
)

// Bounds that hold for every plan of a candidate, and for all candidates of which only the first dimensions are pinned.
//
// Time: a rank does all of its tasks, whatever their order. Its first waits for the first subsequence to come through the
// virtual stages before it, and behind its last the gradient of that subsequence goes back through them. Where a strategy
// takes one microbatch after another, each does so. Copies only add to that. As long as the number of subsequences is
// open, layers take the least time that they take with any of them, and nothing is waited for.
//
// Memory: three moments. At the end of the step there is the state of the parameters with all gradients. When the first
// backward begins there are K and V of a microbatch and, without offload, all that its forwards keep. When the backward of the
// first subsequence begins, which is the longest, there are in any but the shortest pipelines all of K, V, their gradients and
// those of the weights, and what a layer holds while it runs.
type bounds struct {
	space
	request    *Plan
	graphs     map[graph.Split]*graph.Model
	lengths    map[lengthsKey][]int64
	profiles   map[profileKey]*profile
	optimizers map[endKey]end
	known      *catalogue
	timeless   bool // nobody asks for time
}

type lengthsKey struct {
	n     int
	align int64
}

type profileKey struct {
	split     graph.Split
	recompute string
	lengthsKey
	microbatch int
	ranks      int // of the job, where stages do not fill nodes evenly; else 0, for then it makes no difference
	visit      visit
}

type endKey struct {
	parallel Parallel
	n        int
	layers   int // of the stage that has most
}

// end is the time of the optimizer for a layer, the embedding and the head, and that of what else parameters cause.
type end struct {
	layer, embedding, head ir.Seconds
	visit                  visit
}

// visit is the time of collectives of parameters that a layer finds under way.
type visit struct{ forward, backward ir.Seconds }

func newBounds(p *Plan) *bounds {
	return &bounds{
		space: space{p.Model, p.Cluster, p.Train, p.Schedule}, request: p,
		graphs: map[graph.Split]*graph.Model{}, lengths: map[lengthsKey][]int64{}, profiles: map[profileKey]*profile{}, optimizers: map[endKey]end{}, known: newCatalogue(),
	}
}

// context has the dataflow of a plan at hand.
func (b *bounds) context(p *Plan) *Context {
	split := p.Split()
	if b.graphs[split] == nil {
		b.graphs[split] = p.Graph()
	}
	return &Context{model: b.graphs[split], split: split, known: b.known}
}

// sized is a plan of a candidate with its sizes, as far as they are pinned, and the lengths of its subsequences. Stages whose
// number is open count as one. It is nil where the sizes are refused.
func (b *bounds) sized(s lang.Schedule) *Plan {
	p := &Plan{Model: b.model, Cluster: b.cluster, Train: b.train, Schedule: s}
	if s.PP == 0 {
		p.Schedule.PP = 1
	}
	solveParallel(p)
	p.Schedule.PP = s.PP
	p.Recompute = recomputeOf(s)
	solveSubsequences(p)
	if len(sizeProblems(p)) > 0 {
		return nil
	}
	p.Subsequences.Lengths = b.lengthsOf(p)
	return p
}

// lengthsOf cuts the sequence as partition will; where that depends on times, which depend on stages, by operations.
func (b *bounds) lengthsOf(p *Plan) []int64 {
	if given := p.Schedule.Subsequences.Lengths; len(given) > 0 {
		return given
	}
	key := lengthsKey{p.Subsequences.N, p.Subsequences.Align}
	if b.lengths[key] == nil {
		cut := flopsBoundaries
		if p.Schedule.Partition == "length" {
			cut = func(_ lang.Model, seq int64, n int, align int64) []int64 { return evenBoundaries(seq, n, align) }
		}
		b.lengths[key] = lengthsOf(cut(p.Model, p.Train.Sequence, key.n, key.align))
	}
	return b.lengths[key]
}

// profile is what one microbatch takes: of all subsequences together, and of the first.
type profile struct {
	layer, embedding, head ir.Seconds   // forward and backward
	each                   []ir.Seconds // subsequence of a layer
	forward, backward      ir.Seconds   // of a layer, of the first subsequence
	embed, embedGrad       ir.Seconds   // of the first subsequence
	hidden                 ir.Bytes     // of a message, of the first subsequence
	caches, cacheGrads     ir.Bytes     // K and V of a layer, and their gradients
	kept                   ir.Bytes     // by a layer, for the backward
	working                ir.Bytes     // while a layer runs backward, of the first subsequence
}

// profileOf prices the subsequences of a plan.
func (b *bounds) profileOf(p *Plan) *profile {
	key := profileKey{p.Split(), p.Recompute, lengthsKey{p.Subsequences.N, p.Subsequences.Align}, p.Parallel.Microbatch, 0, visit{}}
	if sp, node := p.Parallel.SP, p.Cluster.GPUsPerNode; sp%node != 0 && node%sp != 0 {
		key.ranks = p.Parallel.Ranks()
	}
	if p.LayersPerStage != nil {
		key.visit = b.endOf(p).visit
	}
	if b.profiles[key] == nil {
		b.profiles[key] = b.newProfile(p, key.visit)
	}
	return b.profiles[key]
}

func (b *bounds) newProfile(p *Plan, v visit) *profile {
	c := b.context(p)
	t := newTaskTime(c, p)
	g, out := c.model, &profile{}
	type times struct{ layer, embedding, head ir.Seconds }
	known := map[int64]times{} // by length, of the layer without attention
	forward := func(z graph.Size) ir.Seconds { return t.makespan(t.layer, t.layer.Forward, z, v.forward) }
	backward := func(z graph.Size) ir.Seconds { return t.makespan(t.layer, t.layer.Backward, z, v.backward) }
	prefix := int64(0)
	for _, n := range p.Subsequences.Lengths {
		rest, ok := known[n]
		if !ok {
			z := t.size(p.Train.Sequence-n, n) // behind the longest prefix attention hides most of what runs beside it
			rest = times{forward(z) + backward(z) - t.attentionTime(z), t.both(g.Embedding, z), t.time(g, g.Head, g.Head.Backward, z)}
			known[n] = rest
		}
		z := t.size(prefix, n)
		layer := rest.layer + t.attentionTime(z)
		out.each = append(out.each, layer)
		out.layer += layer
		out.embedding += rest.embedding
		out.head += rest.head
		out.kept += keptBytes(g, p.Recompute, z)
		prefix += n
	}
	z := t.size(0, p.Subsequences.Lengths[0])
	out.forward, out.backward = forward(z), backward(z)
	out.embed, out.embedGrad = t.time(g, g.Embedding, g.Embedding.Forward, z), t.time(g, g.Embedding, g.Embedding.Backward, z)
	out.hidden, out.working = g.Layer.Values[g.Layer.Input].Bytes(z), c.working(g, t.layer, backwardPass, z, false)
	out.caches, out.cacheGrads = cacheBytes(g, graph.Cache, z), cacheBytes(g, graph.CacheGrad, z)
	return out
}

// keptBytes is what one layer keeps of a subsequence for its backward.
func keptBytes(g *graph.Model, recompute string, z graph.Size) (n ir.Bytes) {
	remade := g.RemadeBy(recompute)
	for u, size := range unitSizes(g.Layer, z) {
		if !remade.Has(u) {
			n += size
		}
	}
	return n
}

// cacheBytes is what one layer has of K and V, or of their gradients, for a whole sequence.
func cacheBytes(g *graph.Model, kind graph.Kind, z graph.Size) (n ir.Bytes) {
	for v := range g.Layer.Values {
		if g.Layer.Values[v].Kind == kind {
			n += g.Layer.Values[v].Bytes(z)
		}
	}
	return n
}

// leastProfile is at most any profile of a candidate whose number of subsequences is open.
func (b *bounds) leastProfile(s lang.Schedule) *profile {
	var least *profile
	for _, v := range b.subsequences(&s) {
		pinned := s
		v.set(&pinned)
		p := b.sized(pinned)
		if p == nil {
			continue
		}
		of := b.profileOf(p)
		if least == nil {
			least = &profile{layer: of.layer, embedding: of.embedding, head: of.head, caches: of.caches} // which are the same with all
			if b.timeless {
				break
			}
			continue
		}
		least.layer, least.embedding, least.head = min(least.layer, of.layer), min(least.embedding, of.embedding), min(least.head, of.head)
	}
	return least
}

// Levels from which on bounds say something, and those at which they say more.
var (
	levelOfSizes  = levelOf("schedule.microbatch")
	levelOfCounts = levelOf("schedule.subsequences")
	levelOfKept   = levelOf("schedule.mux") // what is left to pin says what is kept
)

// levelOf is how many dimensions are pinned once that of a key is.
func levelOf(key string) int {
	return 1 + slices.IndexFunc(dimensions, func(d dimension) bool { return d.key == key })
}

// of is the bound of a candidate of which that many dimensions are pinned.
func (b *bounds) of(s lang.Schedule, level int) (ir.Seconds, *Lack) {
	switch {
	case level < levelOfSizes:
		return 0, nil
	case level < levelOfCounts && s.Subsequences.Auto:
		return b.coarse(s)
	}
	p := b.sized(s)
	if p == nil {
		return unreachable, nil
	}
	if level < levelOfCounts {
		return b.share(p, b.profileOf(p))
	}
	p.LayersPerStage = balancedLayers(p, b.profileOf(p))
	return b.time(p), b.lack(p)
}

func (b *bounds) coarse(s lang.Schedule) (ir.Seconds, *Lack) {
	least := b.leastProfile(s)
	if least == nil { // no number of subsequences suits: the candidates are none
		return unreachable, nil
	}
	pinned := s
	pinned.Subsequences = lang.Subsequences{Count: 1}
	p := b.sized(pinned)
	if p == nil {
		return unreachable, nil
	}
	return b.share(p, least)
}

// unreachable is the bound of a candidate that is none.
const unreachable ir.Seconds = 1e300

// share is what the busiest stage does and holds at least, whatever its layers are.
func (b *bounds) share(p *Plan, of *profile) (ir.Seconds, *Lack) {
	layers, stages := p.Model.Layers, p.Schedule.PP
	if stages == 0 {
		stages = min(layers, p.Cluster.GPUs()/(p.Parallel.SP*p.Parallel.DP))
	}
	most := (layers + stages - 1) / stages
	busy := max(of.layer*ir.Seconds(most), (of.layer*ir.Seconds(layers)+of.embedding+of.head)/ir.Seconds(stages))
	g := b.context(p).model
	weights, gradients, optimizer := p.stateBytes(g, g.Layer)
	over := ir.Bytes(most)*(weights+optimizer+max(gradients, b.caches(p, of.caches))) - ir.Bytes(p.Cluster.DeviceMemory)
	var lack *Lack
	if over > 0 {
		lack = &Lack{0, "device", over}
	}
	return busy * ir.Seconds(p.Parallel.Microbatches), lack
}

// caches are those of a layer, if it has them on the device for a whole sequence.
func (b *bounds) caches(p *Plan, n ir.Bytes) ir.Bytes {
	if p.Schedule.Keep != nil && len(p.Schedule.Keep) < 2 || p.Schedule.Order == "layer" {
		return 0
	}
	return n
}

// time is the bound of a plan with its stages.
func (b *bounds) time(p *Plan) ir.Seconds {
	layers := make([]int, p.Parallel.PP)
	for rank := range layers {
		layers[rank] = p.layersOf(rank)
	}
	pipeline := b.pipeline
	switch s := &p.Schedule; s.Mux {
	case "", "auto":
		if len(b.muxes(s)) > 1 {
			pipeline = b.shared
		}
	case "off":
	default:
		pipeline = b.shared
	}
	e, optimizer := b.endOf(p), ir.Seconds(0)
	for rank, n := range layers {
		optimizer = max(optimizer, ir.Seconds(n)*e.layer+p.ends(rank, e.embedding, e.head))
	}
	return pipeline(p, b.profileOf(p), layers) + optimizer
}

// message is the time of the first subsequence from stage to stage.
func (b *bounds) message(p *Plan, of *profile) ir.Seconds {
	m := cost.New(ir.Machine(p.Cluster), p.Parallel.Ranks())
	return m.Time(ir.Work{Kind: ir.WorkP2P, Bytes: of.hidden}, p.widestLink(m, p.neighbours))
}

// pipeline is where every rank does its own tasks.
func (b *bounds) pipeline(p *Plan, of *profile, layers []int) ir.Seconds {
	message := b.message(p, of)
	before := make([]ir.Seconds, len(layers)) // there and back to the first virtual stage of a rank, with the first subsequence
	seen, way := make([]bool, len(layers)), ir.Seconds(0)
	for j, n := range p.LayersPerStage {
		home := p.Home(j)
		if !seen[home] {
			seen[home], before[home] = true, way
		}
		if j == 0 {
			way += of.embed + of.embedGrad
		}
		way += ir.Seconds(n) * (of.forward + of.backward)
		if j+1 < len(p.LayersPerStage) && p.Home(j+1) != home {
			way += 2 * message
		}
	}
	if p.chosenStrategy().late { // there is work for the way back
		clear(before)
	}
	times, waits := ir.Seconds(p.Parallel.Microbatches), ir.Seconds(1)
	if p.chosenStrategy().name == strategies[0].name {
		waits = times
	}
	var longest ir.Seconds
	for rank, n := range layers {
		longest = max(longest, times*(ir.Seconds(n)*of.layer+p.ends(rank, of.embedding, of.head))+waits*before[rank])
	}
	return longest
}

// shared is where ranks take parts of each other's tasks at the start: there is as much to do in all. The first rank besides
// waits at the turn while the last subsequence goes through all others. Of subsequence x it does at least the first
// (x+1)/PP tokens, and so at least the square of that of the work, for attention looks back.
func (b *bounds) shared(p *Plan, of *profile, layers []int) ir.Seconds {
	var all, turn ir.Seconds
	for rank, n := range layers {
		all += ir.Seconds(n)*of.layer + p.ends(rank, of.embedding, of.head)
		if rank > 0 {
			turn += ir.Seconds(n) * of.each[len(of.each)-1]
		}
	}
	stages := float64(len(layers))
	least := all / ir.Seconds(stages) * ir.Seconds(p.Parallel.Microbatches)
	if mux := p.Schedule.Mux; mux == "right" || mux == "on" { // the turn is shared, too
		return least
	}
	first := of.layer
	for x, t := range of.each[:min(len(layers)-1, len(of.each))] {
		part := float64(x+1) / stages
		first -= ir.Seconds(1-part*part) * t
	}
	return max(least, ir.Seconds(p.Parallel.Microbatches)*(ir.Seconds(layers[0])*first+turn))
}

// ends is what a rank has of the embedding and of the head.
func (p *Plan) ends(rank int, embedding, head ir.Seconds) (t ir.Seconds) {
	if rank == p.Home(0) {
		t += embedding
	}
	if rank == p.Home(p.Parallel.Stages()-1) {
		t += head
	}
	return t
}

func (b *bounds) endOf(p *Plan) end {
	most := 0
	for rank := range p.Parallel.PP {
		most = max(most, p.layersOf(rank))
	}
	key := endKey{p.Parallel, p.Subsequences.N, most}
	key.parallel.Microbatch, key.parallel.Microbatches, key.parallel.VirtualStages = 0, 0, 0
	if e, ok := b.optimizers[key]; ok {
		return e
	}
	g := b.context(p).model
	u := newUpdater(p, g, cost.New(ir.Machine(p.Cluster), p.Parallel.Ranks()))
	e := end{layer: u.block(g.Layer), embedding: u.block(g.Embedding)}
	if !g.Tied {
		e.head = u.block(g.Head)
	}
	e.visit.forward, e.visit.backward = u.visit()
	b.optimizers[key] = e
	return e
}

// lack is what the fullest rank lacks at least.
func (b *bounds) lack(p *Plan) *Lack {
	of, g := b.profileOf(p), b.context(p).model
	caches, cacheGrads, kept, working := b.caches(p, of.caches), b.caches(p, of.cacheGrads), ir.Bytes(0), of.working
	switch {
	case p.Schedule.Recompute == "auto" || p.Schedule.Recompute == "": // and with it what is kept
		working = 0
	case p.Schedule.Offload.Policy == "none":
		kept = of.kept
	}
	group, strategy := 1, p.chosenStrategy() // of subsequences that go backward through one virtual stage before the next
	switch {
	case p.Parallel.VirtualStages > 1 && strategy.rounds:
		group = 2 * p.Parallel.PP
	case p.Parallel.VirtualStages > 1:
		group = p.Subsequences.N
	}
	if strategy.late { // the first half of a backward has less at work
		working = 0
	}
	var worst *Lack
	for rank := range p.Parallel.PP {
		state, gradients := b.state(p, g, rank)
		layers := ir.Bytes(p.layersOf(rank))
		most := max(state+gradients, state+layers*(caches+kept), state+working)
		if p.Subsequences.N > group && !p.layerOrder() {
			most = max(most, state+gradients+layers*(caches+cacheGrads)+working)
		}
		if over := most - ir.Bytes(p.Cluster.DeviceMemory); over > 0 && (worst == nil || over > worst.Bytes) {
			worst = &Lack{rank, "device", over}
		}
	}
	return worst
}

// state is what a rank holds from step to step, and the gradients that it ends a step with.
func (b *bounds) state(p *Plan, g *graph.Model, rank int) (state, gradients ir.Bytes) {
	first, last := rank == p.Home(0), rank == p.Home(p.Parallel.Stages()-1)
	for _, part := range []struct {
		block *graph.Block
		times int
	}{{g.Layer, p.layersOf(rank)}, {g.Embedding, count(first)}, {g.Head, count(last && !(first && g.Tied))}} {
		weights, grads, optimizer := p.stateBytes(g, part.block)
		state += ir.Bytes(part.times) * (weights + optimizer)
		gradients += ir.Bytes(part.times) * grads
	}
	return state, gradients
}

func count(is bool) int {
	if is {
		return 1
	}
	return 0
}

// balancedLayers deals the layers out so that the busiest rank is done soonest: embedding and loss cost time, too. Where
// that makes no difference they are dealt out evenly.
func balancedLayers(p *Plan, of *profile) []int {
	even := evenLayers(p.Model.Layers, p.Parallel.Stages())
	busiest := func(layers []int) (most ir.Seconds) {
		busy := make([]ir.Seconds, p.Parallel.PP)
		busy[p.Home(0)] += of.embedding
		busy[p.Home(len(layers)-1)] += of.head
		for j, n := range layers {
			busy[p.Home(j)] += ir.Seconds(n) * of.layer
		}
		return slices.Max(busy)
	}
	balanced := dealLayers(p, of)
	const difference = 0.999
	if busiest(balanced) < difference*busiest(even) {
		return balanced
	}
	return even
}

// dealLayers gives every layer in turn to the rank that will be done soonest, and of its virtual stages to the shortest.
func dealLayers(p *Plan, of *profile) []int {
	layers := slices.Repeat([]int{1}, p.Parallel.Stages())
	rank, stage := make([]ir.Seconds, p.Parallel.PP), make([]ir.Seconds, len(layers))
	add := func(j int, t ir.Seconds) {
		stage[j] += t
		rank[p.Home(j)] += t
	}
	add(0, of.embedding)
	add(len(layers)-1, of.head)
	for j := range layers {
		add(j, of.layer)
	}
	for range p.Model.Layers - len(layers) {
		best := 0
		for j := range layers {
			if r, b := rank[p.Home(j)], rank[p.Home(best)]; r < b || r == b && stage[j] < stage[best] {
				best = j
			}
		}
		layers[best]++
		add(best, of.layer)
	}
	return layers
}
