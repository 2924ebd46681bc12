package search

import (
	"fmt"
	"slices"
	"sync"

	"sppo.dev/internal/cost"
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/mux"
	"sppo.dev/internal/passes/partition"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// This file computes lower bounds that hold for every plan of a candidate, even if only the candidate's first
// dimensions are pinned.
//
// Time: a rank runs all of its tasks, in any order. Before its first task, it waits until the first subsequence
// has passed through the earlier virtual stages; after its last task, the gradient of that subsequence passes
// back through them. If all forwards of a microbatch precede all of its backwards, the rank also waits between
// them, while the last subsequence passes through the later virtual stages and back. If a strategy runs one
// microbatch after another, this wait occurs once per microbatch. The first subsequence also passes through the
// whole model and back. Copies only add to these times, and streamed blocks are copied one after another. While
// the number of subsequences is open, the bound uses the minimum time of a layer over all possible numbers and
// assumes no waits.
//
// Memory: see room.go.
type bounds struct {
	space
	request    *plan.Plan
	cache      *estimate.Cache
	lengths    map[lengthsKey][]int64
	profiles   map[profileKey]*profile
	optimizers map[endKey]end
	least      map[leastKey]*profile // nil: refused
	rooms      map[roomKey]room
	links      map[plan.Parallel]cost.Link // between neighbours
	work       walk.Work
}

type lengthsKey struct {
	n     int
	align int64
	cut   string // how the sequence is cut: "" by operations, "length" by length; any other text means by time, and contains everything that task times depend on
}

type profileKey struct {
	split     graph.Split
	recompute string
	block     int64 // block length of streamed K and V
	lengthsKey
	microbatch int
	lossChunk  int
	ranks      int // pricedRanks
	visit      visit
}

type endKey struct {
	parallel plan.Parallel
	lengthsKey
	layers int // number of layers of the rank with the most
}

// end holds the times of the optimizer for a layer, the embedding and the head, and the times of collectives on
// parameters.
type end struct {
	layer, embedding, head ir.Seconds
	visit                  visit
}

// visit holds the times of the collectives on parameters that run while a task is in a layer: those of the
// forward pass, and the additional ones of the backward pass. In layer order a task may run none of these
// collectives, so both times are 0.
type visit struct{ forward, backward ir.Seconds }

func newBounds(c *estimate.Cache, p *plan.Plan) *bounds {
	b := &bounds{
		space: space{model: p.Model, cluster: p.Cluster, train: p.Train, asked: p.Schedule}, request: p, cache: c,
		lengths: map[lengthsKey][]int64{}, profiles: map[profileKey]*profile{}, optimizers: map[endKey]end{}, least: map[leastKey]*profile{}, rooms: map[roomKey]room{}, links: map[plan.Parallel]cost.Link{},
	}
	b.frugal = b.frugalPolicies
	return b
}

// sized returns a plan of a candidate with the pinned sizes and the lengths of its subsequences. An
// open number of stages is treated as one. It returns nil if the sizes are invalid.
func (b *bounds) sized(s lang.Schedule) *plan.Plan {
	p := &plan.Plan{Model: b.model, Cluster: b.cluster, Train: b.train, Schedule: s}
	if s.PP == 0 {
		p.Schedule.PP = 1
	}
	solveParallel(p)
	p.Schedule.PP = s.PP
	if p.Recompute = recomputeOf(s); b.fitting && opensRecompute(s) { // the policy that keeps the least
		p.Recompute = graph.RecomputeFull
	}
	solveSubsequences(b.cache, p)
	solveStream(p)
	if len(sizeProblems(p)) > 0 || s.PP != 0 && len(strategy.BatchProblems(p)) > 0 {
		return nil
	}
	p.Subsequences.Lengths = b.lengthsOf(p)
	return p
}

// staged assigns the layers of a sized plan to stages. If the sequence is cut by time, which
// depends on the stages, it also cuts the sequence.
func (b *bounds) staged(p *plan.Plan) {
	p.LayersPerStage = balancedLayers(p, b.profileOf(p))
	p.Subsequences.Lengths = b.lengthsOf(p)
}

// lengthsOf cuts the sequence in the same way as the partition pass. A cut by time depends on the stages: until
// layers are assigned to them, lengthsOf cuts by operations instead.
func (b *bounds) lengthsOf(p *plan.Plan) []int64 {
	if given := p.Schedule.Subsequences.Lengths; len(given) > 0 {
		return given
	}
	key := b.lengthsKey(p)
	if b.lengths[key] == nil {
		var x []int64
		switch key.cut {
		case "":
			x = partition.ByFlops(b.cache.FlopsOfLayer(p), p.Train.Sequence, key.n, key.align)
		case "length":
			x = partition.ByLength(p.Train.Sequence, key.n, key.align)
		default:
			x = partition.ByTime(b.cache, p)
		}
		b.lengths[key] = partition.Lengths(x)
	}
	return b.lengths[key]
}

func (b *bounds) lengthsKey(p *plan.Plan) lengthsKey {
	key := lengthsKey{n: p.Subsequences.N, align: p.Subsequences.Align}
	switch {
	case p.Schedule.Partition == "length":
		key.cut = p.Schedule.Partition
	case p.Schedule.Partition == "time" && p.LayersPerStage != nil:
		key.cut = fmt.Sprint(p.Split(), p.Parallel, p.Stream.Block, p.LayersPerStage, p.Recompute)
	}
	return key
}

// profile holds the times of one microbatch: those of all subsequences together, and those of the first.
type profile struct {
	layer, leastLayer ir.Seconds // forward and backward: averaged over all layers, and of the fastest kind
	embedding, head   ir.Seconds // the same
	kinds             []*layerProfile
	each              []ir.Seconds // forward and backward of each layer, if some of the first have no backward pass or forms differ
	embed, embedGrad  ir.Seconds   // of the first subsequence
	hidden            ir.Bytes     // bytes of a message for the first subsequence
}

// layerProfile holds the times of one microbatch in a layer of one kind.
type layerProfile struct {
	all         ir.Seconds        // forward and backward
	halved      func() ir.Seconds // the same, if backward tasks may run in two halves
	first, last crossing          // the first subsequence and the last
	streaming   ir.Seconds        // time to load all blocks of K and V, one after another
}

func (k *layerProfile) whole() ir.Seconds { return k.all }

// layers adds up the times of layers, given how many there are of each kind.
func (of *profile) layers(counts []int, takes func(k *layerProfile) ir.Seconds) (t ir.Seconds) {
	for kind, n := range counts {
		if n > 0 {
			t += ir.Seconds(n) * takes(of.kinds[kind])
		}
	}
	return t
}

// crossing is the latency of a layer: the time until its result is ready, and the time until the
// gradient of its input is ready, with or without its weight gradients.
type crossing struct {
	forward, backward, input ir.Seconds
}

// both returns the sum of the forward and the backward latency. If weight gradients may run late, the latter
// omits them if that makes it shorter.
func (c crossing) both(late bool) ir.Seconds {
	if late {
		return c.forward + min(c.backward, c.input)
	}
	return c.forward + c.backward
}

// profileOf computes the costs of a plan's subsequences.
func (b *bounds) profileOf(p *plan.Plan) *profile {
	key := profileKey{p.Split(), p.Recompute, p.Stream.Block, b.lengthsKey(p), p.Parallel.Microbatch, p.Schedule.LossChunk, pricedRanks(p), visit{}}
	if p.LayersPerStage != nil {
		key.visit = b.endOf(p).visit
	}
	if b.profiles[key] == nil {
		b.profiles[key] = b.newProfile(p, key.visit)
	}
	return b.profiles[key]
}

// pricedRanks returns the number of ranks on which the costs of layers depend: all ranks of the job
// if stages do not fill nodes evenly; the ranks of a node if they share its processors, or the host
// link over which K and V are streamed; otherwise 0.
func pricedRanks(p *plan.Plan) int {
	ranks, sp, node := p.Parallel.Ranks(), p.Parallel.SP, p.Cluster.GPUsPerNode
	switch {
	case sp%node != 0 && node%sp != 0:
		return ranks
	case p.Cluster.Parallelism > 0, p.Streams() && p.Cluster.NodeCopyBandwidth > 0:
		return min(ranks, node)
	}
	return 0
}

// nodesOfLayer is the number of nodes of a layer that count as one unit of work when they are costed; most
// layers have fewer.
const nodesOfLayer = 100

func (b *bounds) newProfile(p *plan.Plan, v visit) *profile {
	t := estimate.NewTaskTime(b.cache, p)
	g, out := t.Model, &profile{}
	known := map[graph.Size]endTimes{}
	prefix := int64(0)
	for _, n := range p.Subsequences.Lengths {
		ends := memo(known, leastRest(t, t.Size(prefix, n)), func(z graph.Size) endTimes {
			return endTimes{t.Both(g.Embedding, z), t.Time(g, g.Head, g.Head.Backward, b.fastestHead(p, z))}
		})
		out.embedding += ends.embedding
		out.head += ends.head
		prefix += n
	}
	layer := g.WithKV()
	steps := (len(layer.Forward) + len(layer.Backward)) / nodesOfLayer // a ring has many
	b.work.Spend(8*(len(known)*max(1, steps)+walk.CountLoads(p, 1)) + len(p.Subsequences.Lengths))
	for kind := range g.Kinds() {
		out.kinds = append(out.kinds, newLayerProfile(t, kind, v))
	}
	out.layer, out.leastLayer = g.Mean(func(kind int) ir.Seconds { return out.kinds[kind].all }), out.kinds[0].all
	for _, k := range out.kinds {
		out.leastLayer = min(out.leastLayer, k.all)
	}
	for layer := 0; (g.Untrained > 0 || g.Mixed()) && layer < g.Layers; layer++ {
		out.each = append(out.each, out.kinds[g.KindOf(layer)].all)
	}
	z := t.Size(0, p.Subsequences.Lengths[0])
	out.embed, out.embedGrad = t.Time(g, g.Embedding, g.Embedding.Forward, z), t.Time(g, g.Embedding, g.Embedding.Backward, z)
	out.hidden = g.HiddenBytes(z)
	return out
}

// fastestHead returns the size of the head of a subsequence with the longest chunks to try, unless their length is
// pinned.
func (b *bounds) fastestHead(p *plan.Plan, z graph.Size) graph.Size {
	if p.Schedule.LossChunk == 0 {
		z.Chunks = int64(b.lossChunks(&p.Schedule)[0])
		return z
	}
	return p.HeadSize(z)
}

// endTimes are the times of the embedding and the head for a subsequence of one length.
type endTimes struct{ embedding, head ir.Seconds }

func newLayerProfile(t *estimate.TaskTime, kind int, v visit) *layerProfile {
	p, g, layer, out := t.Plan, t.Model, t.Layers[kind], &layerProfile{}
	back := estimate.VisitTime{Weights: v.forward, Gradients: v.backward}
	if layer.DInput == graph.Missing { // the lowest layer with a backward pass, whose backward reads few weights, or a layer without a backward pass
		back = estimate.VisitTime{}
	}
	size := func(prefix, tokens int64) graph.Size { return g.OfKind(t.Size(prefix, tokens), kind) }
	forward := func(z graph.Size) ir.Seconds { return t.Makespan(layer, layer.Forward, z, v.forward) }
	backward := func(z graph.Size) ir.Seconds {
		return t.Makespan(layer, layer.Backward, z, back.Weights+back.Gradients)
	}
	known := map[graph.Size]ir.Seconds{}
	var (
		sizes      []graph.Size // for which all nodes except attention are costed
		attentions []ir.Seconds
	)
	prefix := int64(0)
	for _, n := range p.Subsequences.Lengths {
		z := size(prefix, n)
		sizes = append(sizes, leastRest(t, z))
		rest := memo(known, sizes[len(sizes)-1], func(z graph.Size) ir.Seconds { return forward(z) - t.AttentionTime(kind, z) + backward(z) })
		attention := t.AttentionAfter(kind, prefix, n)
		attentions = append(attentions, attention)
		out.all += rest + attention
		prefix += n
	}
	out.halved = sync.OnceValue(func() (sum ir.Seconds) {
		known := map[graph.Size]ir.Seconds{}
		for i, z := range sizes {
			sum += attentions[i] + memo(known, z, func(z graph.Size) ir.Seconds {
				input, weights := t.Halves(layer, z, back)
				return forward(z) - t.AttentionTime(kind, z) + min(backward(z), input+weights)
			})
		}
		return sum
	})
	crossing := func(z graph.Size) crossing {
		return crossing{forward(z), backward(z), t.Makespan(layer, layer.Halves[graph.InputGradient], z, back.Weights)}
	}
	n := p.Subsequences.Lengths[len(p.Subsequences.Lengths)-1]
	z := size(p.Train.Sequence-n, n)
	out.last = crossing(z)
	out.first = crossing(size(0, p.Subsequences.Lengths[0]))
	out.streaming = streamingTime(p, g, kind)
	return out
}

// memo returns the value of a key, which it computes only once.
func memo[K comparable, V any](known map[K]V, key K, find func(K) V) V {
	v, ok := known[key]
	if !ok {
		v = find(key)
		known[key] = v
	}
	return v
}

// leastRest returns, for a given number of tokens, the size at which the part of a layer outside attention
// takes the least time: the one with the longest prefix, because attention then hides the most concurrent work.
// In a ring, this part itself takes longer with a longer prefix, so every subsequence keeps its own size.
func leastRest(t *estimate.TaskTime, z graph.Size) graph.Size {
	if t.Plan.Split().Chunks() == 0 {
		z.Prefix = z.Sequence - z.Tokens
	}
	return z
}

// streamingTime is the time to load all blocks of K and V for a layer of a certain kind.
func streamingTime(p *plan.Plan, g *graph.Model, layerKind int) (t ir.Seconds) {
	if !p.Streams() {
		return 0
	}
	in, _ := estimate.CopyCosts(p, g, estimate.CostModel(p))
	kinds := []plan.TaskKind{plan.Forward, plan.Backward}
	if g.LayerOf(layerKind).DInput == graph.Missing { // its backward may need only one of dK and dV, or neither
		kinds = kinds[:1]
	}
	for i := range p.Subsequences.N {
		for _, kind := range kinds {
			for _, l := range walk.VisitLoads(p, g, walk.VisitKind{Kind: kind, Subsequence: i, LayerKind: layerKind}) {
				t += in(l)
			}
		}
	}
	return t
}

// leastKey identifies a profile while the number of subsequences is open.
type leastKey struct {
	parallel                   plan.Parallel // except the number of stages, which may make candidates invalid
	strategy, partition, count string
	lossChunk, ranks           int
}

// cutByLength reports whether the lengths of the subsequences are independent of the stages.
func cutByLength(s *lang.Schedule) bool {
	return s.Partition == "flops" || s.Partition == "length" || len(s.Subsequences.Lengths) > 0
}

// leastProfile returns a lower bound on the profiles of a candidate for which the number of subsequences, or
// the way they are cut, is open. In the latter case, the bound includes the undivided sequence, because kernels
// are slower on shorter subsequences.
func (b *bounds) leastProfile(s lang.Schedule, whole *plan.Plan) *profile {
	var least *profile
	key := leastKey{parallel: whole.Parallel, strategy: s.Strategy, partition: s.Partition, lossChunk: s.LossChunk, ranks: pricedRanks(whole)}
	key.parallel.PP, key.parallel.VirtualStages = 0, 0
	var counts []value
	if s.Subsequences.Auto {
		if counts = b.subsequences(&s); len(counts) == 0 {
			return nil
		}
	}
	if !cutByLength(&s) {
		counts = append(counts, value{"1", func(s *lang.Schedule) { s.Subsequences = lang.Subsequences{Count: 1} }})
	}
	for _, v := range counts {
		key.count = v.text
		of, known := b.least[key]
		if !known {
			pinned := s
			v.set(&pinned)
			if p := b.sized(pinned); p != nil {
				of = b.profileOf(p)
			}
			b.least[key] = of
		}
		if of == nil {
			continue
		}
		if least == nil {
			least = &profile{layer: of.layer, leastLayer: of.leastLayer, embedding: of.embedding, head: of.head}
			continue
		}
		least.layer, least.leastLayer = min(least.layer, of.layer), min(least.leastLayer, of.leastLayer)
		least.embedding, least.head = min(least.embedding, of.embedding), min(least.head, of.head)
	}
	return least
}

// Levels at which bounds improve; a level is a number of pinned dimensions. Below the first of them, candidates
// have no bounds.
var (
	levelOfSizes  = levelOf("schedule.microbatch")
	levelOfStages = levelOf("schedule.pp")
	levelOfCounts = levelOf("schedule.subsequences")
	levelOfKept   = levelOf("schedule.mux") // the remaining dimensions decide placements
)

// levelOf returns how many dimensions are pinned once the dimension of a key is pinned.
func levelOf(key string) int {
	return 1 + slices.IndexFunc(dimensions, func(d dimension) bool { return d.key == key })
}

// of returns lower bounds on step time and memory over all completions of a partial candidate with the given
// number of pinned dimensions. If time does not matter, the returned time is 0, and only the costs that the
// assignment of layers needs are computed.
func (b *bounds) of(s lang.Schedule, level int) (ir.Seconds, holding) {
	switch {
	case level < levelOfSizes:
		return 0, holding{}
	case level < levelOfCounts && s.Subsequences.Auto:
		return b.coarse(s)
	}
	p := b.sized(s)
	if p == nil {
		return unreachable, holding{}
	}
	if level < levelOfCounts {
		switch {
		case b.timeless:
			return 0, b.heldByShare(p)
		case !cutByLength(&s):
			least, _ := b.coarse(s)
			return least, b.heldByShare(p)
		}
		return b.share(p, b.profileOf(p)), b.heldByShare(p)
	}
	if b.timeless && p.Schedule.Partition != "time" {
		if least := b.heldByMost(p); b.lackOf(least) != nil {
			return 0, least
		}
	}
	times, held := b.dealt(p)
	for _, policy := range b.remakings(p) {
		q := *p
		q.Recompute = policy
		t, h := b.dealt(&q)
		if times = min(times, t); h.device < held.device {
			held.rank = h.rank
		}
		held.device, held.both = min(held.device, h.device), min(held.both, h.both)
	}
	return times, held
}

// remakings returns the recomputation policies, except the policy none, that are still possible and that may
// lead to a different balance because tasks take longer. They may do so if the sequence is cut by time, or if
// layers would be assigned differently if each layer took twice as long, which is more than any recomputation
// adds.
func (b *bounds) remakings(p *plan.Plan) (policies []string) {
	if !opensRecompute(p.Schedule) || b.fitting {
		return nil
	}
	if p.Schedule.Partition != "time" {
		of := b.profileOf(p)
		twice := &profile{layer: 2 * of.layer, embedding: of.embedding, head: of.head}
		for _, t := range of.each {
			twice.each = append(twice.each, 2*t)
		}
		if slices.Equal(balancedLayers(p, of), balancedLayers(p, twice)) {
			return nil
		}
	}
	return recomputing
}

// dealt assigns the layers of a sized plan to stages and returns the bounds of the result.
func (b *bounds) dealt(sized *plan.Plan) (ir.Seconds, holding) {
	p := &plan.Plan{}
	*p = *sized
	b.staged(p)
	switch {
	case len(mux.ShareProblems(p)) > 0:
		return unreachable, holding{}
	case b.timeless:
		return 0, b.heldAtLeast(p)
	}
	return b.time(p), b.heldAtLeast(p)
}

// coarse returns the bounds while the number of subsequences is open.
func (b *bounds) coarse(s lang.Schedule) (ir.Seconds, holding) {
	pinned := s
	pinned.Subsequences = lang.Subsequences{Count: 1}
	p := b.sized(pinned)
	switch {
	case p == nil:
		return unreachable, holding{}
	case b.timeless:
		return 0, b.heldByShare(p)
	}
	least := b.leastProfile(s, p)
	if least == nil { // no number of subsequences is possible: there are no candidates
		return unreachable, holding{}
	}
	return b.share(p, least), b.heldByShare(p)
}

// unreachable is the bound for a set without candidates.
const unreachable ir.Seconds = 1e300

// share returns a lower bound on the work of the busiest stage for any assignment of layers.
func (b *bounds) share(p *plan.Plan, of *profile) ir.Seconds {
	busy := (of.layer*ir.Seconds(p.Model.Layers) + of.embedding + of.head) / ir.Seconds(b.mostStages(p))
	if !p.Schedule.SharesTasks() {
		busy = max(busy, of.leastLayer*ir.Seconds(b.layersOfMost(p)))
	}
	return busy * ir.Seconds(p.Parallel.Microbatches)
}

// mostStages returns the number of stages of a plan, or the maximum if the number is open.
func (b *bounds) mostStages(p *plan.Plan) int {
	if p.Schedule.PP > 0 {
		return p.Schedule.PP
	}
	return min(p.Model.Layers, p.Cluster.GPUs()/(p.Parallel.SP*p.Parallel.DP))
}

// layersOfMost returns a lower bound on the number of layers of the rank with the most layers.
func (b *bounds) layersOfMost(p *plan.Plan) int {
	stages := b.mostStages(p)
	return (p.Model.Layers + stages - 1) / stages
}

// time returns the bound on the time of a plan whose layers have been assigned to stages.
func (b *bounds) time(p *plan.Plan) ir.Seconds {
	layers := make([]int, p.Parallel.PP)
	for rank := range layers {
		layers[rank] = p.LayersOf(rank)
	}
	of, e, optimizer := b.profileOf(p), b.endOf(p), ir.Seconds(0)
	for rank, n := range layers {
		optimizer = max(optimizer, ir.Seconds(n)*e.layer+ends(p, rank, e.embedding, e.head))
	}
	least := b.pipeline(p, of)
	if p.Schedule.SharesTasks() {
		least = b.shared(p, of)
	}
	var streaming ir.Seconds
	for _, counts := range b.kindsByRank(p) {
		streaming = max(streaming, of.layers(counts, func(k *layerProfile) ir.Seconds { return k.streaming }))
	}
	return max(least, streaming*ir.Seconds(p.Parallel.Microbatches)) + optimizer
}

// message returns the time to send the first subsequence from one stage to the next.
func (b *bounds) message(p *plan.Plan, of *profile) ir.Seconds {
	m, key := estimate.CostModel(p), plan.Parallel{SP: p.Parallel.SP, PP: p.Parallel.PP, DP: p.Parallel.DP}
	link, known := b.links[key]
	if !known {
		link = estimate.WidestLink(p, m, estimate.Neighbours)
		b.links[key] = link
	}
	return m.Time(ir.Work{Kind: ir.WorkP2P, Bytes: of.hidden}, link)
}

// pipeline returns the bound for ranks that do not share tasks.
func (b *bounds) pipeline(p *plan.Plan, of *profile) ir.Seconds {
	chosen := strategy.Of(p)
	times, waits, turnarounds := ir.Seconds(p.Parallel.Microbatches), ir.Seconds(1), ir.Seconds(0)
	switch {
	case chosen.Turns == strategy.EachTurn:
		waits, turnarounds = times, times
	case chosen.Turns == strategy.LastTurn || times == 1:
		turnarounds = 1
	}
	before, after, longest := b.ways(p, of, chosen.Late)
	layer := (*layerProfile).whole
	if chosen.Late {
		layer = func(k *layerProfile) ir.Seconds { return k.halved() }
	}
	for rank, counts := range b.kindsByRank(p) {
		longest = max(longest, times*(of.layers(counts, layer)+ends(p, rank, of.embedding, of.head))+waits*before[rank]+turnarounds*after[rank])
	}
	return longest
}

// kindsByRank counts the layers of each kind on each rank.
func (b *bounds) kindsByRank(p *plan.Plan) (counts [][]int) {
	g := b.cache.Model(p)
	for rank := range p.Parallel.PP {
		counts = append(counts, p.KindsOf(g, p.StagesOf(rank)...))
	}
	return counts
}

// ways returns three latencies: `before`, of the first subsequence on its way to a rank's first virtual stage
// and back; `after`, of the last subsequence from the rank's last virtual stage to the end and back; and `all`,
// of the first subsequence through all virtual stages and back. With deferred weight gradients, `before` omits
// the way back, during which the rank has work.
func (b *bounds) ways(p *plan.Plan, of *profile, late bool) (before, after []ir.Seconds, all ir.Seconds) {
	before, after = make([]ir.Seconds, p.Parallel.PP), make([]ir.Seconds, p.Parallel.PP)
	message, seen := b.message(p, of), make([]bool, p.Parallel.PP)
	var there ir.Seconds // without the way back
	for j := range p.LayersPerStage {
		home, counts := p.Home(j), p.KindsOf(b.cache.Model(p), j)
		if !seen[home] {
			seen[home], before[home] = true, all
			if late {
				before[home] = there
			}
		}
		for rank := range after {
			after[rank] += of.layers(counts, func(k *layerProfile) ir.Seconds { return k.last.both(late) })
		}
		after[home] = 0
		if j == 0 {
			there += of.embed
			all += of.embed
			if !late {
				all += of.embedGrad
			}
		}
		there += of.layers(counts, func(k *layerProfile) ir.Seconds { return k.first.forward })
		all += of.layers(counts, func(k *layerProfile) ir.Seconds { return k.first.both(late) })
		if j+1 < len(p.LayersPerStage) && p.Home(j+1) != home {
			there += message
			all += 2 * message
		}
	}
	return before, after, all
}

// shared returns the bound for ranks that take over parts of each other's tasks: the mean of their work.
func (b *bounds) shared(p *plan.Plan, of *profile) (mean ir.Seconds) {
	for _, counts := range b.kindsByRank(p) {
		mean += of.layers(counts, (*layerProfile).whole)
	}
	return (mean + of.embedding + of.head) * ir.Seconds(p.Parallel.Microbatches) / ir.Seconds(p.Parallel.PP)
}

// ends returns a rank's time for the embedding and the head.
func ends(p *plan.Plan, rank int, embedding, head ir.Seconds) (t ir.Seconds) {
	if rank == p.Home(0) {
		t += embedding
	}
	if rank == p.Home(p.Parallel.Stages()-1) {
		t += head
	}
	return t
}

func (b *bounds) endOf(p *plan.Plan) end {
	most := 0
	for rank := range p.Parallel.PP {
		most = max(most, p.LayersOf(rank))
	}
	key := endKey{p.Parallel, b.lengthsKey(p), most}
	key.parallel.Microbatch, key.parallel.Microbatches, key.parallel.VirtualStages = 0, 0, 0
	if e, ok := b.optimizers[key]; ok {
		return e
	}
	g := b.cache.Model(p)
	u := estimate.NewUpdater(p, g, cost.New(ir.Machine(p.Cluster), p.Parallel.Ranks()))
	e := end{layer: u.Block(g.LayerOf(0)), embedding: u.Block(g.Embedding)}
	for kind := range g.Kinds() {
		e.layer = min(e.layer, u.Block(g.LayerOf(kind)))
	}
	if !g.Tied {
		e.head = u.Block(g.Head)
	}
	if !p.LayerOrder() { // in layer order, a task may have none of this traffic
		e.visit.forward, e.visit.backward = u.Beside(0)
		for kind := range g.Kinds() {
			weights, gradients := u.Beside(kind)
			e.visit = visit{min(e.visit.forward, weights), min(e.visit.backward, gradients)}
		}
	}
	b.optimizers[key] = e
	return e
}

func count(is bool) int {
	if is {
		return 1
	}
	return 0
}

// balancedLayers assigns the layers so that the busiest rank, including embedding and loss, finishes as early
// as possible. If this gains less than 0.1%, layers are distributed evenly. A list in the request overrides this.
func balancedLayers(p *plan.Plan, of *profile) []int {
	if given := p.Schedule.LayersPerStage; len(given) == p.Parallel.Stages() {
		return slices.Clone(given)
	}
	even := evenLayers(p.Model.Layers, p.Parallel.Stages())
	if p.Model.Layers <= len(even) {
		return even
	}
	balanced := dealLayers(p, of)
	if of.each != nil {
		balanced = moveLayers(p, of, balanced)
	}
	const difference = 0.999
	if slices.Max(busyOf(p, of, balanced)) < difference*slices.Max(busyOf(p, of, even)) {
		return balanced
	}
	return even
}

// busyOf returns the time of each rank, including embedding and loss, given the number of layers of each stage.
func busyOf(p *plan.Plan, of *profile, layers []int) []ir.Seconds {
	busy := make([]ir.Seconds, p.Parallel.PP)
	busy[p.Home(0)] += of.embedding
	busy[p.Home(len(layers)-1)] += of.head
	first := 0
	for j, n := range layers {
		if of.each == nil {
			busy[p.Home(j)] += ir.Seconds(n) * of.layer
			continue
		}
		for _, t := range of.each[first : first+n] {
			busy[p.Home(j)] += t
		}
		first += n
	}
	return busy
}

// moveLayers moves layers between neighbouring stages as long as that makes the times of ranks more equal, that
// is, as long as the sum of their squares falls.
func moveLayers(p *plan.Plan, of *profile, layers []int) []int {
	unequal := func() (sum float64) {
		for _, t := range busyOf(p, of, layers) {
			sum += float64(t) * float64(t)
		}
		return sum
	}
	for least, moved := unequal(), true; moved; {
		moved = false
		for j := range len(layers) - 1 {
			for _, way := range []int{1, -1} {
				layers[j], layers[j+1] = layers[j]+way, layers[j+1]-way
				if now := unequal(); min(layers[j], layers[j+1]) > 0 && now < least*(1-1e-9) {
					least, moved = now, true
					continue
				}
				layers[j], layers[j+1] = layers[j]-way, layers[j+1]+way
			}
		}
	}
	return layers
}

// dealLayers assigns one layer after another, each to the rank that finishes earliest and, within that rank, to
// the virtual stage with the least work.
func dealLayers(p *plan.Plan, of *profile) []int {
	layers := slices.Repeat([]int{1}, p.Parallel.Stages())
	rank, stage := make([]ir.Seconds, p.Parallel.PP), make([]ir.Seconds, len(layers))
	home := make([]int, len(layers))
	for j := range home {
		home[j] = p.Home(j)
	}
	add := func(j int, t ir.Seconds) {
		stage[j] += t
		rank[home[j]] += t
	}
	add(0, of.embedding)
	add(len(layers)-1, of.head)
	for j := range layers {
		add(j, of.layer)
	}
	for range p.Model.Layers - len(layers) {
		best := 0
		for j := range layers {
			if r, b := rank[home[j]], rank[home[best]]; r < b || r == b && stage[j] < stage[best] {
				best = j
			}
		}
		layers[best]++
		add(best, of.layer)
	}
	return layers
}
