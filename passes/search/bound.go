package search

import (
	"fmt"
	"slices"
	"sync"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/ir/cost"
	"sppo.dev/lang"
	"sppo.dev/passes/estimate"
	"sppo.dev/passes/mux"
	"sppo.dev/passes/partition"
	"sppo.dev/passes/plan"
	"sppo.dev/passes/strategy"
	"sppo.dev/passes/walk"
)

// Bounds that hold for every plan of a candidate, and for all candidates of which only the first dimensions are pinned.
//
// Time: a rank does all of its tasks, whatever their order. Its first waits for the first subsequence to come through the
// virtual stages before it, and behind its last the gradient of that subsequence goes back through them. Where all forwards of
// a microbatch come before what follows, the rank waits once more, between them and the backwards: the last subsequence goes
// through the virtual stages behind the rank and back. Where a strategy takes one microbatch after another, each does so. And
// the first subsequence goes through all of the model and back. Copies only add to that, and what streams is copied one after
// another. As long as the number of subsequences is open, layers take the least time that they take with any of them, and
// nothing is waited for.
//
// Memory: room.go.
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
	cut   string // empty: by operations; "length"; or what the time of tasks depends on, and so the lengths
}

type profileKey struct {
	split     graph.Split
	recompute string
	block     int64 // of K and V that stream
	lengthsKey
	microbatch int
	ranks      int // pricedRanks
	visit      visit
}

type endKey struct {
	parallel plan.Parallel
	lengthsKey
	layers int // of the stage that has most
}

// end is the time of the optimizer for a layer, the embedding and the head, and that of what else parameters cause.
type end struct {
	layer, embedding, head ir.Seconds
	visit                  visit
}

// visit is the time of collectives of parameters that a layer of any task finds under way, of the forward's kind and of what only
// the backward has besides. In layer order not every backward completes gradients, so that is none of them.
type visit struct{ forward, backward ir.Seconds }

func newBounds(c *estimate.Cache, p *plan.Plan) *bounds {
	return &bounds{
		space: space{model: p.Model, cluster: p.Cluster, train: p.Train, asked: p.Schedule}, request: p, cache: c,
		lengths: map[lengthsKey][]int64{}, profiles: map[profileKey]*profile{}, optimizers: map[endKey]end{}, least: map[leastKey]*profile{}, rooms: map[roomKey]room{}, links: map[plan.Parallel]cost.Link{},
	}
}

// sized is a plan of a candidate with its sizes, as far as they are pinned, and the lengths of its subsequences. Stages whose
// number is open count as one. It is nil where the sizes are refused.
func (b *bounds) sized(s lang.Schedule) *plan.Plan {
	p := &plan.Plan{Model: b.model, Cluster: b.cluster, Train: b.train, Schedule: s}
	if s.PP == 0 {
		p.Schedule.PP = 1
	}
	solveParallel(p)
	p.Schedule.PP = s.PP
	p.Recompute = recomputeOf(s)
	solveSubsequences(p)
	solveStream(p)
	if len(sizeProblems(p)) > 0 || s.PP != 0 && len(strategy.BatchProblems(p)) > 0 {
		return nil
	}
	p.Subsequences.Lengths = b.lengthsOf(p)
	return p
}

// staged deals the layers of a sized plan out, and cuts the sequence by times, which depend on stages.
func (b *bounds) staged(p *plan.Plan) {
	p.LayersPerStage = balancedLayers(p, b.profileOf(p))
	p.Subsequences.Lengths = b.lengthsOf(p)
}

// lengthsOf cuts the sequence as partition will; where that depends on times, which depend on stages, by operations.
func (b *bounds) lengthsOf(p *plan.Plan) []int64 {
	if given := p.Schedule.Subsequences.Lengths; len(given) > 0 {
		return given
	}
	key := b.lengthsKey(p)
	if b.lengths[key] == nil {
		var x []int64
		switch key.cut {
		case "":
			x = partition.ByFlops(p.Model, p.Train.Sequence, key.n, key.align)
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

// profile is what one microbatch takes: of all subsequences together, and of the first.
type profile struct {
	layer, leastLayer ir.Seconds // forward and backward: on the average of all layers, and of the kind that takes least
	embedding, head   ir.Seconds // the same
	kinds             []*layerProfile
	embed, embedGrad  ir.Seconds // of the first subsequence
	hidden            ir.Bytes   // of a message, of the first subsequence
}

// layerProfile is what one microbatch takes in a layer of one kind.
type layerProfile struct {
	all             ir.Seconds        // forward and backward
	halved          func() ir.Seconds // the same, where backwards may run in two halves
	each, attention []ir.Seconds      // subsequences, and their attention
	first, last     crossing          // the first subsequence and the last
	shares          [2]share          // of the last subsequence: forward and backward
	streaming       ir.Seconds        // in which the blocks of K and V come, one after another
}

func (k *layerProfile) whole() ir.Seconds { return k.all }

// layers adds up what layers take, of which there are some of each kind.
func (of *profile) layers(counts []int, takes func(k *layerProfile) ir.Seconds) (t ir.Seconds) {
	for kind, n := range counts {
		if n > 0 {
			t += ir.Seconds(n) * takes(of.kinds[kind])
		}
	}
	return t
}

// crossing is the time of a layer until its result is there, and until the gradient of its input is: with its weights' or without.
type crossing struct {
	forward, backward, input ir.Seconds
}

// both is there and back.
func (c crossing) both(late bool) ir.Seconds {
	if late {
		return c.forward + min(c.backward, c.input)
	}
	return c.forward + c.backward
}

// share is attention that other ranks may take a part of: its time, and what travels to each of them and back.
type share struct {
	whole   ir.Seconds
	travels []ir.Bytes
}

// profileOf prices the subsequences of a plan.
func (b *bounds) profileOf(p *plan.Plan) *profile {
	key := profileKey{p.Split(), p.Recompute, p.Stream.Block, b.lengthsKey(p), p.Parallel.Microbatch, pricedRanks(p), visit{}}
	if p.LayersPerStage != nil {
		key.visit = b.endOf(p).visit
	}
	if b.profiles[key] == nil {
		b.profiles[key] = b.newProfile(p, key.visit)
	}
	return b.profiles[key]
}

// pricedRanks are the ranks of the job as far as layers' prices depend on them: all, where stages do not fill nodes evenly; those of a
// node, where they share its processors, or the way to the host that K and V stream by; else 0, for then it makes no difference.
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

func (b *bounds) newProfile(p *plan.Plan, v visit) *profile {
	t := estimate.NewTaskTime(b.cache, p)
	g, out := t.Model, &profile{}
	b.work.Spend(8 * len(p.Subsequences.Lengths))
	known := map[graph.Size]endTimes{}
	prefix := int64(0)
	for _, n := range p.Subsequences.Lengths {
		ends := memo(known, leastRest(t, t.Size(prefix, n)), func(z graph.Size) endTimes {
			return endTimes{t.Both(g.Embedding, z), t.Time(g, g.Head, g.Head.Backward, z)}
		})
		out.embedding += ends.embedding
		out.head += ends.head
		prefix += n
	}
	for kind := range g.Kinds() {
		out.kinds = append(out.kinds, newLayerProfile(t, kind, v))
	}
	out.layer, out.leastLayer = g.Mean(func(kind int) ir.Seconds { return out.kinds[kind].all }), out.kinds[0].all
	for _, k := range out.kinds {
		out.leastLayer = min(out.leastLayer, k.all)
	}
	z := t.Size(0, p.Subsequences.Lengths[0])
	out.embed, out.embedGrad = t.Time(g, g.Embedding, g.Embedding.Forward, z), t.Time(g, g.Embedding, g.Embedding.Backward, z)
	out.hidden = g.Layer.Values[g.Layer.Input].Bytes(z)
	return out
}

// endTimes are those of the embedding and the head for a subsequence of some length.
type endTimes struct{ embedding, head ir.Seconds }

func newLayerProfile(t *estimate.TaskTime, kind int, v visit) *layerProfile {
	p, g, out := t.Plan, t.Model, &layerProfile{}
	size := func(prefix, tokens int64) graph.Size { return g.OfKind(t.Size(prefix, tokens), kind) }
	forward := func(z graph.Size) ir.Seconds { return t.Makespan(t.Layer, t.Layer.Forward, z, v.forward) }
	backward := func(z graph.Size) ir.Seconds { return t.Makespan(t.Layer, t.Layer.Backward, z, v.forward+v.backward) }
	known := map[graph.Size]ir.Seconds{}
	var sizes []graph.Size // at which all but attention is priced
	prefix := int64(0)
	for _, n := range p.Subsequences.Lengths {
		z := size(prefix, n)
		sizes = append(sizes, leastRest(t, z))
		rest := memo(known, sizes[len(sizes)-1], func(z graph.Size) ir.Seconds { return forward(z) - t.AttentionTime(z) + backward(z) })
		attention := t.AttentionTime(z)
		out.each, out.attention = append(out.each, rest+attention), append(out.attention, attention)
		out.all += rest + attention
		prefix += n
	}
	out.halved = sync.OnceValue(func() (sum ir.Seconds) {
		known := map[graph.Size]ir.Seconds{}
		for i, z := range sizes {
			sum += out.attention[i] + memo(known, z, func(z graph.Size) ir.Seconds {
				input, weights := t.Halves(t.Layer, z, estimate.VisitTime{Weights: v.forward, Gradients: v.backward})
				return forward(z) - t.AttentionTime(z) + min(backward(z), input+weights)
			})
		}
		return sum
	})
	crossing := func(z graph.Size) crossing {
		return crossing{forward(z), backward(z), t.Makespan(t.Layer, t.Layer.Halves[graph.InputGradient], z, v.forward)}
	}
	n := p.Subsequences.Lengths[len(p.Subsequences.Lengths)-1]
	z := size(p.Train.Sequence-n, n)
	out.last, out.shares = crossing(z), shares(t, z)
	out.first = crossing(size(0, p.Subsequences.Lengths[0]))
	out.streaming = streamingTime(p, g, kind)
	return out
}

// memo finds a value once.
func memo[K comparable, V any](known map[K]V, key K, find func(K) V) V {
	v, ok := known[key]
	if !ok {
		v = find(key)
		known[key] = v
	}
	return v
}

// leastRest is the size, of as many tokens, at which what a layer takes besides attention is least: behind the longest prefix, where
// attention hides most of what runs beside it. In a ring that grows with the prefix, too, and every subsequence has its own.
func leastRest(t *estimate.TaskTime, z graph.Size) graph.Size {
	if t.Plan.Parallel.SPMode != graph.ModeRing {
		z.Prefix = z.Sequence - z.Tokens
	}
	return z
}

// shares are what the attention of a layer would take from other ranks.
func shares(t *estimate.TaskTime, z graph.Size) (out [2]share) {
	for _, n := range t.Attends {
		in, d := graph.BlockInstr(t.Layer, n, z), t.Back(t.Layer, n, z)
		q, stats := in.Arg("q").Bytes(), in.Arg("lse").Bytes()
		if n.Op == ir.Attention {
			out[0] = share{d, []ir.Bytes{q, in.Arg("o").Bytes(), stats}}
		} else {
			out[1] = share{d, []ir.Bytes{q, q, q, stats, stats}}
		}
	}
	return out
}

// streamingTime is how long all blocks of K and V of a layer of some kind take to come.
func streamingTime(p *plan.Plan, g *graph.Model, layerKind int) (t ir.Seconds) {
	if !p.Streams() {
		return 0
	}
	in, _ := estimate.CopyCosts(p, g, estimate.CostModel(p))
	for i := range p.Subsequences.N {
		for _, kind := range []plan.TaskKind{plan.Forward, plan.Backward} {
			for _, l := range walk.VisitLoads(p, g, walk.VisitKind{Kind: kind, Subsequence: i, LayerKind: layerKind}) {
				t += in(l)
			}
		}
	}
	return t
}

// leastKey is what tells the profiles of a number of subsequences apart, as long as only what comes before that number is pinned.
type leastKey struct {
	parallel                   plan.Parallel // but for stages: they refuse candidates whatever the number is
	strategy, partition, count string
	ranks                      int
}

// cutByLength reports whether the lengths of so many subsequences are known, whatever the stages are.
func cutByLength(s *lang.Schedule) bool {
	return s.Partition == "flops" || s.Partition == "length" || len(s.Subsequences.Lengths) > 0
}

// leastProfile is at most any profile of a candidate whose number of subsequences is open, or how they are cut. Where the latter is,
// the sequence in one piece is among them: kernels are the slower the shorter pieces are.
func (b *bounds) leastProfile(s lang.Schedule, whole *plan.Plan) *profile {
	var least *profile
	key := leastKey{parallel: whole.Parallel, strategy: s.Strategy, partition: s.Partition, ranks: pricedRanks(whole)}
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

// of bounds a candidate of which that many dimensions are pinned: its time, and what its fullest rank holds. Where nobody asks for
// time it is 0, and nothing is priced but to deal out the layers.
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

// remakings are the policies of recomputation that may be pinned yet, besides none, where tasks that take longer by them may be
// balanced otherwise: in a cut by times, or where layers would be dealt out otherwise if each took twice as long, which is more than
// any that makes results again.
func (b *bounds) remakings(p *plan.Plan) (policies []string) {
	if p.Schedule.Recompute != "" && p.Schedule.Recompute != plan.PolicyAuto {
		return nil
	}
	if p.Schedule.Partition != "time" {
		of := b.profileOf(p)
		twice := &profile{layer: 2 * of.layer, embedding: of.embedding, head: of.head}
		if slices.Equal(balancedLayers(p, of), balancedLayers(p, twice)) {
			return nil
		}
	}
	return []string{graph.RecomputeSelective, graph.RecomputeKeepAttention, graph.RecomputeFull}
}

// dealt bounds a sized plan with its layers dealt out.
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

// coarse is where the number of subsequences is open.
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
	if least == nil { // no number of subsequences suits: the candidates are none
		return unreachable, holding{}
	}
	return b.share(p, least), b.heldByShare(p)
}

// unreachable is the bound of a candidate that is none.
const unreachable ir.Seconds = 1e300

// share is what the busiest stage does at least, whatever its layers are.
func (b *bounds) share(p *plan.Plan, of *profile) ir.Seconds {
	busy := (of.layer*ir.Seconds(p.Model.Layers) + of.embedding + of.head) / ir.Seconds(b.mostStages(p))
	if !b.mayShare(&p.Schedule) {
		busy = max(busy, of.leastLayer*ir.Seconds(b.layersOfMost(p)))
	}
	return busy * ir.Seconds(p.Parallel.Microbatches)
}

// mostStages are those of a plan whose stages may be open.
func (b *bounds) mostStages(p *plan.Plan) int {
	if p.Schedule.PP > 0 {
		return p.Schedule.PP
	}
	return min(p.Model.Layers, p.Cluster.GPUs()/(p.Parallel.SP*p.Parallel.DP))
}

// layersOfMost are those of the rank that has most, at least.
func (b *bounds) layersOfMost(p *plan.Plan) int {
	stages := b.mostStages(p)
	return (p.Model.Layers + stages - 1) / stages
}

// mayShare reports whether ranks may take parts of each other's tasks.
func (b *bounds) mayShare(s *lang.Schedule) bool {
	if s.SharesTasks() || s.Mux == "off" {
		return s.SharesTasks()
	}
	st := strategy.Find(s.Strategy)
	return s.PP != 1 && s.VirtualStages <= 1 && (st == nil || st == &strategy.All[0])
}

// time is the bound of a plan with its stages.
func (b *bounds) time(p *plan.Plan) ir.Seconds {
	layers := make([]int, p.Parallel.PP)
	for rank := range layers {
		layers[rank] = p.LayersOf(rank)
	}
	of, e, optimizer := b.profileOf(p), b.endOf(p), ir.Seconds(0)
	for rank, n := range layers {
		optimizer = max(optimizer, ir.Seconds(n)*e.layer+ends(p, rank, e.embedding, e.head))
	}
	sides := b.muxes(&p.Schedule)
	if mux := p.Schedule.Mux; mux != "" && mux != plan.PolicyAuto {
		sides = []string{mux}
	}
	least := b.pipeline(p, of)
	for _, side := range sides {
		if side != "off" {
			least = min(least, b.shared(p, of, layers, side))
		}
	}
	var streaming ir.Seconds
	for _, counts := range b.kindsByRank(p) {
		streaming = max(streaming, of.layers(counts, func(k *layerProfile) ir.Seconds { return k.streaming }))
	}
	return max(least, streaming*ir.Seconds(p.Parallel.Microbatches)) + optimizer
}

// message is the time of the first subsequence from stage to stage.
func (b *bounds) message(p *plan.Plan, of *profile) ir.Seconds {
	m, key := estimate.CostModel(p), plan.Parallel{SP: p.Parallel.SP, PP: p.Parallel.PP, DP: p.Parallel.DP}
	link, known := b.links[key]
	if !known {
		link = estimate.WidestLink(p, m, estimate.Neighbours)
		b.links[key] = link
	}
	return m.Time(ir.Work{Kind: ir.WorkP2P, Bytes: of.hidden}, link)
}

// pipeline is where every rank does its own tasks.
func (b *bounds) pipeline(p *plan.Plan, of *profile) ir.Seconds {
	chosen := strategy.Of(p)
	times, waits, turns := ir.Seconds(p.Parallel.Microbatches), ir.Seconds(1), ir.Seconds(0)
	switch {
	case chosen.Turns == strategy.EachTurn:
		waits, turns = times, times
	case chosen.Turns == strategy.LastTurn || times == 1:
		turns = 1
	}
	before, after, longest := b.ways(p, of, chosen.Late)
	layer := (*layerProfile).whole
	if chosen.Late {
		layer = func(k *layerProfile) ir.Seconds { return k.halved() }
	}
	for rank, counts := range b.kindsByRank(p) {
		longest = max(longest, times*(of.layers(counts, layer)+ends(p, rank, of.embedding, of.head))+waits*before[rank]+turns*after[rank])
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

// ways are those of the first subsequence to the first virtual stage of a rank and back, of the last from its last virtual stage to
// the end and back, and of the first through all of them. While gradients of weights are put off a rank has work for the way back.
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

// shared is where ranks take parts of each other's tasks, at the start and the end of the pipeline (left), at its turn (right), or
// both (on): there is as much to do in all.
//
// At the turn the last subsequence goes through the ranks behind one, each of which shares its attention with those before it, for
// messages that come one by one. The rank waits meanwhile, and, where the start is not shared, for the way of the first
// subsequence to it and back, as ever.
//
// Where the start is shared, the first rank does of subsequence x at least the first (x+1)/PP tokens, and so at
// least the square of that of the work, for attention looks back. The last does all of its own tasks, and before and behind them
// helps all others. For that it receives, one by one, their layers' weights, K and V, and sends back what is to be added to the
// gradients of both.
func (b *bounds) shared(p *plan.Plan, of *profile, layers []int, side string) ir.Seconds {
	m := estimate.CostModel(p)
	far := estimate.WidestLink(p, m, estimate.Farthest)
	message := func(n ir.Bytes) ir.Seconds { return m.Time(ir.Work{Kind: ir.WorkP2P, Bytes: n}, far) }
	own, crossed := make([]ir.Seconds, len(layers)), make([]ir.Seconds, len(layers)) // of a rank: all of its tasks, the last subsequence
	var all, turn, least ir.Seconds
	stays := attentionThatStays(p)
	kinds := b.kindsByRank(p)
	for rank, counts := range kinds {
		own[rank] = of.layers(counts, (*layerProfile).whole) + ends(p, rank, of.embedding, of.head)
		crossed[rank] = of.layers(counts, func(k *layerProfile) ir.Seconds { return k.last.both(false) })
		if side != "left" {
			crossed[rank] -= of.layers(counts, func(k *layerProfile) ir.Seconds {
				return k.given(rank, stays(p.Subsequences.N-1, rank), message)
			})
		}
		all += own[rank]
	}
	stages := len(layers)
	before, _, _ := b.ways(p, of, false)
	for rank := stages - 1; rank >= 0; rank-- {
		if side != "left" {
			for k := range rank {
				x := p.Subsequences.N - rank + k
				own[rank] -= of.layers(kinds[rank], func(l *layerProfile) ir.Seconds { return (1 - stays(x, k+1)) * l.attention[x] })
			}
		}
		if side == "right" {
			least = max(least, before[rank]+own[rank]+turn)
		}
		if rank > 0 {
			turn += crossed[rank]
		}
	}
	if side != "right" {
		first := of.layers(kinds[0], func(k *layerProfile) ir.Seconds {
			first := k.all
			for x, t := range k.each[:min(stages-1, len(k.each))] {
				part := float64(x+1) / float64(stages)
				first -= ir.Seconds(1-part*part) * t
			}
			return first
		})
		least = max(first+turn, own[stages-1]+b.helping(p, of, layers, message))
	}
	return ir.Seconds(p.Parallel.Microbatches) * max(least, all/ir.Seconds(stages))
}

// attentionThatStays is the part of a subsequence's attention with a number of helpers that one of those who share in it has at least:
// the mean, or what is left to the owner, whose helpers take the PP-th part of the keys each, to half a step of the grid.
func attentionThatStays(p *plan.Plan) func(x, helpers int) ir.Seconds {
	keys, end, stages, grid := make([]float64, p.Subsequences.N), float64(0), float64(p.Parallel.PP), float64(p.Subsequences.Align)
	for x, n := range p.Subsequences.Lengths {
		keys[x], end = end+float64(n+1)/2, end+float64(n)
	}
	return func(x, helpers int) ir.Seconds {
		least := 1 / float64(helpers+1)
		if keys[x] >= stages*grid {
			least = max(least, 1-float64(helpers)/stages-grid/2/keys[x])
		}
		return ir.Seconds(least)
	}
}

// given is what a layer of the last subsequence is shorter at most because a number of helpers share its attention, of which a part
// stays.
func (of *layerProfile) given(helpers int, stays ir.Seconds, message func(ir.Bytes) ir.Seconds) (t ir.Seconds) {
	for _, share := range of.shares {
		var messages ir.Seconds
		for _, bytes := range share.travels {
			messages += message(bytes)
		}
		t += max(0, share.whole-max(share.whole*stays, messages*ir.Seconds(helpers)))
	}
	return t
}

// helping is what the last rank takes where it helps all others: weights, K and V come, one by one, and gradients of both go.
func (b *bounds) helping(p *plan.Plan, of *profile, layers []int, message func(ir.Bytes) ir.Seconds) ir.Seconds {
	g := b.cache.Model(p)
	fewest := ir.Seconds(slices.Min(layers))
	var lent, rows, gradients ir.Seconds
	for x := range p.Parallel.PP - 1 {
		z, times := p.Size(x), ir.Seconds(p.Parallel.PP-1-x)*fewest // stages that it helps with the subsequence
		part := func(v *graph.Value) ir.Seconds {
			others := ir.Bytes(z.Tokens) * ir.Bytes(p.Parallel.PP-1) / ir.Bytes(p.Parallel.PP)
			return times * message(v.Bytes(z)*others/ir.Bytes(z.Sequence))
		}
		for v := range g.Layer.Values {
			switch v := &g.Layer.Values[v]; v.Kind {
			case graph.Cache:
				rows += part(v)
			case graph.CacheGrad:
				gradients += part(v)
			}
		}
	}
	for i := range g.Layer.Params {
		n, times := ir.Bytes(g.Layer.Params[i].Local[0]*g.Layer.Params[i].Local[1]), ir.Seconds(p.Parallel.PP-1)*fewest
		lent += times * message(n*g.DType().Bytes())
		gradients += times * message(n*ir.F32.Bytes())
	}
	return lent + rows + max(lent, gradients, b.givingBack(p, layers, message))
}

// givingBack is how long gradients of weights that the last rank has borrowed are on their way home where the start is shared. In
// every slot those of a stage come by all ranks behind it, one after another, each of which adds its own, and no rank begins the
// next slot's before the last has come home: of the rank that then got them, the last rank helps to make those of keys.
func (b *bounds) givingBack(p *plan.Plan, layers []int, message func(ir.Bytes) ir.Seconds) (t ir.Seconds) {
	g, m := b.cache.Model(p), estimate.CostModel(p)
	var hop ir.Seconds
	for i := range g.Layer.Params {
		n := ir.Bytes(g.Layer.Params[i].Local[0] * g.Layer.Params[i].Local[1])
		hop += message(n*ir.F32.Bytes()) + m.Time(ir.Work{Kind: ir.WorkMemory, Bytes: 3 * n * ir.F32.Bytes()}, cost.Link{})
	}
	for stage, n := range layers[:len(layers)-1] {
		t += ir.Seconds(len(layers)-1-stage+n-1) * hop
	}
	return t
}

// ends is what a rank has of the embedding and of the head.
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
	e := end{layer: u.Block(g.Layer), embedding: u.Block(g.Embedding)}
	if !g.Tied {
		e.head = u.Block(g.Head)
	}
	if e.visit.forward, e.visit.backward = u.Visit(); p.LayerOrder() {
		e.visit.backward = 0
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

// balancedLayers deals the layers out so that the busiest rank is done soonest: embedding and loss cost time, too. Where
// that makes no difference they are dealt out evenly.
func balancedLayers(p *plan.Plan, of *profile) []int {
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
func dealLayers(p *plan.Plan, of *profile) []int {
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
