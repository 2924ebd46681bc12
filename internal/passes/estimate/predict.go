package estimate

import (
	"math"
	"slices"

	"sppo.dev/internal/cost"
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
)

// CostModel returns the cost model of a plan's cluster for the ranks that the plan uses.
func CostModel(p *plan.Plan) cost.Model { return cost.New(ir.Machine(p.Cluster), p.Parallel.Ranks()) }

// Predict writes the estimated time and throughput into the plan, and its memory capacities. The exact memory
// use comes from codegen.
func (e *Estimator) Predict() {
	p := e.Plan
	model := cost.New(ir.Machine(p.Cluster), p.Parallel.Ranks())
	p.Memory = memory.Capacities(p)
	e.Simulation(e.allCosts(model)).Run().Report(p)
	p.Time.OptimizerS = optimizerTime(p, e.Model, model)
	p.Time.StepS += p.Time.OptimizerS
	p.Time.EstimateS = p.Time.StepS
	throughput(e.cache, p, model.Peak(e.Model.DType()))
	p.ExpertsS = expertsTime(p, e.Model, model)
}

// expertsTime returns the time per step of instructions that take as long as a rank's experts have rows, on the stage where it is longest.
func expertsTime(p *plan.Plan, g *graph.Model, model cost.Model) (longest ir.Seconds) {
	if !p.Parallel.ExpertParallel {
		return 0
	}
	stages := make([]ir.Seconds, p.Parallel.PP)
	for stage := range p.LayersPerStage {
		for _, layer := range p.Layers(stage) {
			b, z := g.LayerOf(g.KindOf(layer)), p.Split().Size()
			z.Sequence, z.Batch = p.Train.Sequence, int64(p.Parallel.Microbatch)
			for _, z.Tokens = range p.Subsequences.Lengths {
				for _, n := range slices.Concat(b.Forward, b.Backward) {
					if n.OfLoads() {
						stages[p.Home(stage)] += ir.Seconds(p.Parallel.Microbatches) * model.Time(b.Work(&n, z), cost.Link{})
					}
				}
			}
		}
	}
	return slices.Max(stages)
}

// Predict calls the method of the same name for a plan without an estimator, such as an edited one.
func Predict(p *plan.Plan) { New(NewCache(), nil, p).Predict() }

// Costs holds the durations of all parts of a step. Index i is a subsequence, s a stage, k a layer of the stage.
type Costs struct {
	kinds                 []layerCosts       // of each kind of layer
	kindOf                [][]int            // [virtual stage][k]; nil: all layers are of one kind
	recompute             [][][]backwardTime // [s][i][k]: time that recomputing a layer's units adds; nil: none
	embed, head           []ir.Seconds       // [i]; the whole head runs in the backward pass
	embedGrad             []backwardTime     // [i]
	message               []ir.Seconds       // [i], to a neighbour
	d2h, h2d              [][][]ir.Seconds   // [s][i][k]
	link                  cost.HostLink      // link of one device, before any copy
	shareOfCopies         float64            // of their speed that kernels lose beside copies
	hiddenOut, hiddenBack []ir.Seconds       // [i], copies of hidden states to the host and back
	lend                  lendCosts          // of tasks shared at the start
	shared                *sharedCosts       // of tasks with helpers; nil: there are none
	params                paramCosts
	recomputing           map[recomputedKey]backwardTime
	lastPlacement         lastPlacement
	stream                streamCosts
	graph                 *graph.Model
}

// layerCosts holds the durations of a layer of one kind.
type layerCosts struct {
	Forward  []ir.Seconds   // [i]
	backward []backwardTime // [i]
	under    []VisitTime    // [i], collectives that run during the backward pass
	stream   stretches
	left     leftCosts

	kvOut       []ir.Seconds // [i], copies of K and V
	kvBack      ir.Seconds   // copy of K and V for a whole sequence
	kvRecompute []ir.Seconds // [i], to compute K and V from the input
}

// Forward returns the time of a subsequence's forward pass through a layer, averaged over all layers.
func (t *Costs) Forward(i int) ir.Seconds {
	return t.graph.Mean(func(kind int) ir.Seconds { return t.kinds[kind].Forward[i] })
}

// layer returns the costs of the k-th layer of a virtual stage.
func (t *Costs) layer(stage int32, k int) *layerCosts {
	if t.kindOf == nil {
		return &t.kinds[0]
	}
	return &t.kinds[t.kindOf[stage][k]]
}

// VisitTime is the time of the collectives on weights and gradients that run during a layer.
type VisitTime struct{ Weights, Gradients ir.Seconds }

// backwardTime is the time of a block's backward pass, and the times of its halves if they run separately.
type backwardTime struct{ Whole, input, weights ir.Seconds }

// of returns the time until the gradient of the input is ready: that of the first half if the halves run
// separately.
func (b backwardTime) of(split bool) ir.Seconds {
	if split {
		return b.input
	}
	return b.Whole
}

// plus adds a multiple of another backwardTime.
func (b backwardTime) plus(o backwardTime, times ir.Seconds) backwardTime {
	return backwardTime{b.Whole + times*o.Whole, b.input + times*o.input, b.weights + times*o.weights}
}

// recomputedKey is everything that the time to recompute units of a layer depends on.
type recomputedKey struct {
	i, kind    int
	recomputed graph.Units
}

// Costs returns the costs that the plan would have if no tasks were shared.
func (e *Estimator) Costs(m cost.Model) *Costs { return taskCosts(e.cache, e.Plan, e.Shapes, m) }

func taskCosts(c *Cache, p *plan.Plan, shapes *walk.Shapes, m cost.Model) *Costs {
	g, n := shapes.Model, p.Subsequences.N
	pr := NewPricer(c, p, m)
	u := NewUpdater(p, g, m)
	between := WidestLink(p, m, Neighbours)
	stages := p.Parallel.PP
	t := &Costs{graph: g, link: m.HostLink(), shareOfCopies: m.ShareOfCopies(), recompute: perStage[backwardTime](stages, n), d2h: perStage[ir.Seconds](stages, n), h2d: perStage[ir.Seconds](stages, n)}
	t.kinds, t.params = make([]layerCosts, g.Kinds()), u.params()
	t.findKinds(p)
	for i, z := range shapes.Sizes {
		forward, backward := plan.Task{Kind: plan.Forward, Subsequence: i}, plan.Task{Kind: plan.Backward, Subsequence: i}
		for kind := range t.kinds {
			k, b, z := &t.kinds[kind], g.LayerOf(kind), g.OfKind(z, kind)
			weights, gradients := u.Beside(kind)
			beside := timeIf(p.GathersBeside(forward), weights)
			under := VisitTime{timeIf(p.GathersBeside(backward), weights), timeIf(p.Completes(backward), gradients)}
			k.under = append(k.under, under)
			k.Forward = append(k.Forward, pr.Makespan(b, b.Forward, z, beside))
			k.backward = append(k.backward, pr.layerBackward(b, z, under))
			if p.Streams() {
				k.stream.add(pr, b, z, beside, under.Weights+under.Gradients)
			}
			plain := g.Plain(kind)
			k.addKV(m, plain, z)
			k.kvRecompute = append(k.kvRecompute, pr.abreast(plain, plain.KVNodes, z, 0))
		}
		t.embed = append(t.embed, pr.Time(g, g.Embedding, g.Embedding.Forward, z))
		t.embedGrad = append(t.embedGrad, pr.embedGrad(g, z))
		t.head = append(t.head, pr.Time(g, g.Head, g.Head.Backward, p.HeadSize(z)))
		x := g.HiddenBytes(z)
		t.message = append(t.message, m.Time(ir.Work{Kind: ir.WorkP2P, Bytes: x}, between))
		t.hiddenOut = append(t.hiddenOut, m.Time(ir.Work{Kind: ir.WorkD2H, Bytes: x}, cost.Link{}))
		t.hiddenBack = append(t.hiddenBack, m.Time(ir.Work{Kind: ir.WorkH2D, Bytes: x}, cost.Link{}))
		for s := range stages {
			t.SetPlacement(pr, p, s, i, p.Offload.Placement[s][i], shapes.Saved[i], z)
		}
	}
	t.stream.in, t.stream.out = CopyCosts(p, g, m)
	return t
}

func timeIf(is bool, t ir.Seconds) ir.Seconds {
	if is {
		return t
	}
	return 0
}

// findKinds records the kinds of the layers of each virtual stage, if there are several kinds.
func (t *Costs) findKinds(p *plan.Plan) {
	if t.graph.Kinds() == 1 {
		return
	}
	for j := range p.LayersPerStage {
		var kinds []int
		for _, layer := range p.Layers(j) {
			kinds = append(kinds, t.graph.KindOf(layer))
		}
		t.kindOf = append(t.kindOf, kinds)
	}
}

// kindsOn returns the kinds of a pipeline rank's layers, in the order of Offload.Placement.
func (t *Costs) kindsOn(p *plan.Plan, rank int) (kinds []int) {
	if t.kindOf != nil {
		for _, j := range p.StagesOf(rank) {
			kinds = append(kinds, t.kindOf[j]...)
		}
	}
	return kinds
}

// addKV computes the times to copy a layer's K and V: to the host one subsequence at a time, back all at
// once.
func (k *layerCosts) addKV(m cost.Model, b *graph.Block, z graph.Size) {
	var out, back ir.Seconds
	for v := range b.Values {
		if b.Values[v].Kind != graph.Cache || !b.Values[v].Spans() {
			continue
		}
		whole := b.Values[v].Bytes(z)
		out += m.Time(ir.Work{Kind: ir.WorkD2H, Bytes: whole * ir.Bytes(z.Tokens) / ir.Bytes(z.Sequence)}, cost.Link{})
		back += m.Time(ir.Work{Kind: ir.WorkH2D, Bytes: whole}, cost.Link{})
	}
	k.kvOut, k.kvBack = append(k.kvOut, out), back
}

func perStage[T any](stages, n int) [][][]T {
	out := make([][][]T, stages)
	for s := range out {
		out[s] = make([][]T, n)
	}
	return out
}

// placementTimes holds the times that the placement of one subsequence's units adds to each layer of a stage:
// copies, with one instruction per unit, and recomputation in the backward pass.
type placementTimes struct {
	out, back []ir.Seconds
	recompute []backwardTime
}

// SetPlacement sets the times of a subsequence on a stage for the given placement of its units. Stages often
// have equal placements, so the last result is reused.
func (t *Costs) SetPlacement(pr Pricer, p *plan.Plan, stage, i int, placement string, sizes [][]ir.Bytes, z graph.Size) {
	kinds := t.kindsOn(p, stage)
	if last := &t.lastPlacement; last.i != i || last.placement != placement || !slices.Equal(last.kinds, kinds) {
		*last = lastPlacement{i, placement, kinds, t.timesOf(pr, i, placement, kinds, sizes, z)}
	}
	of := &t.lastPlacement.times
	t.d2h[stage][i], t.h2d[stage][i], t.recompute[stage][i] = of.out, of.back, of.recompute
}

// lastPlacement is the last result of SetPlacement, with everything that it depends on.
type lastPlacement struct {
	i         int
	placement string
	kinds     []int
	times     placementTimes
}

func (t *Costs) timesOf(pr Pricer, i int, placement string, kinds []int, sizes [][]ir.Bytes, z graph.Size) placementTimes {
	units := len(sizes[0])
	layers := len(placement) / units
	of := placementTimes{make([]ir.Seconds, layers), make([]ir.Seconds, layers), make([]backwardTime, layers)}
	before, kindBefore, kind := "", 0, 0
	for k := range layers {
		letters := placement[k*units : (k+1)*units]
		if kinds != nil {
			kind = kinds[k]
		}
		if letters == before && kind == kindBefore {
			of.out[k], of.back[k], of.recompute[k] = of.out[k-1], of.back[k-1], of.recompute[k-1]
			continue
		}
		before, kindBefore = letters, kind
		for u, n := range sizes[kind] {
			if letters[u] == plan.PlacementOffload {
				o, b := pr.Copies(n)
				of.out[k], of.back[k] = of.out[k]+o, of.back[k]+b
			}
		}
		of.recompute[k] = t.recomputeTime(pr, i, kind, plan.RecomputedBy(letters), z)
	}
	return of
}

// RecomputeTime returns the time that recomputing units adds to a layer's backward pass, averaged over all layers.
func (t *Costs) RecomputeTime(pr Pricer, i int, recomputed graph.Units, z graph.Size) ir.Seconds {
	return t.graph.Mean(func(kind int) ir.Seconds { return t.recomputeTime(pr, i, kind, recomputed, z).Whole })
}

func (t *Costs) recomputeTime(pr Pricer, i, kind int, recomputed graph.Units, z graph.Size) backwardTime {
	if recomputed == 0 {
		return backwardTime{}
	}
	key := recomputedKey{i, kind, recomputed}
	d, known := t.recomputing[key]
	if !known {
		if t.recomputing == nil {
			t.recomputing = map[recomputedKey]backwardTime{}
		}
		d = pr.layerBackward(t.graph.LayerWithout(kind, recomputed), t.graph.OfKind(z, kind), t.kinds[kind].under[i]).plus(t.kinds[kind].backward[i], -1)
		t.recomputing[key] = d
	}
	return d
}

// rank returns the number of the k-th rank of a stage in the first replica.
func rank(p *plan.Plan, stage, k int) int32 { return int32(stage*p.Parallel.SP + k) }

// groupOf returns a function that returns the ranks of stage s that form a group of which rank k is the first, if there is one.
func groupOf(p *plan.Plan, group int) func(p *plan.Plan, s, k int) []int32 {
	split := p.Split()
	groups := make([][]int, split.SP)
	for k := range groups {
		if of := split.Members(group, k); of[0] == k {
			groups[k] = of
		}
	}
	return func(p *plan.Plan, s, k int) (ranks []int32) {
		for _, j := range groups[k] {
			ranks = append(ranks, rank(p, s, j))
		}
		return ranks
	}
}

// Farthest returns the k-th ranks of the first stage and of stage s. No two stages are farther apart than the
// first and the last.
func Farthest(p *plan.Plan, s, k int) []int32 { return []int32{rank(p, 0, k), rank(p, s, k)} }

// Neighbours returns the k-th ranks of a stage and of the next one.
func Neighbours(p *plan.Plan, s, k int) []int32 {
	return []int32{rank(p, s, k), rank(p, (s+1)%p.Parallel.PP, k)}
}

// WidestLink returns the link that spans the most nodes, among those of the groups of ranks that the given
// function returns for the first replica.
func WidestLink(p *plan.Plan, m cost.Model, group func(p *plan.Plan, s, k int) []int32) cost.Link {
	var worst cost.Link
	for s := range p.Parallel.PP {
		for k := range p.Parallel.SP {
			if ranks := group(p, s, k); len(ranks) > 0 {
				if l := m.LinkOf(ranks); l.Nodes >= worst.Nodes {
					worst = l
				}
			}
		}
	}
	return worst
}

// optimizerTime returns the time from the last gradient to the last new weight on the slowest stage.
func optimizerTime(p *plan.Plan, g *graph.Model, m cost.Model) ir.Seconds {
	u := NewUpdater(p, g, m)
	embedding, head := u.Block(g.Embedding), u.Block(g.Head)
	var slowest ir.Seconds
	for s := range p.Parallel.PP {
		var t ir.Seconds
		for kind, n := range p.KindsOf(g, p.StagesOf(s)...) {
			t += u.Block(g.LayerOf(kind)) * ir.Seconds(n)
		}
		if s == p.Home(0) {
			t += embedding
		}
		if s == p.Home(p.Parallel.Stages()-1) && !g.Tied {
			t += head
		}
		slowest = max(slowest, t)
	}
	return slowest
}

// throughput computes throughput and MFU. Model FLOPs are three times those of the forward pass, with causal
// attention and without recomputation or padding. If only part of the model is trained, only the part of the
// backward pass that this needs is counted.
func throughput(c *Cache, p *plan.Plan, peak float64) {
	tokens := float64(p.Train.Sequence) * float64(p.Train.Batch)
	layers := c.FlopsOfLayer(p).inModel(p.Train.Sequence, p.Model.Layers) * float64(p.Train.Batch)
	p.Throughput = plan.Throughput{ModelFlops: 3 * (layers + float64(c.head)*tokens)}
	if p.Tuned() {
		p.Throughput.ModelFlops = c.tunedFlops(p)
	}
	if seconds := float64(p.Time.StepS); seconds > 0 && !math.IsInf(seconds, 0) {
		p.Throughput.TGS = tokens / (seconds * float64(p.Parallel.Ranks()))
		p.Throughput.MFU = p.Throughput.ModelFlops / (seconds * cost.Devices(ir.Machine(p.Cluster), p.Parallel.Ranks()) * peak)
	}
}
