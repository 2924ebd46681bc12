package passes

import (
	"math"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/ir/cost"
)

// predict estimates what the plan leads to: time, throughput, capacities. The exact memory is codegen's to say.
func (e *estimator) predict() {
	p := e.plan
	model := cost.New(ir.Machine(p.Cluster), p.Parallel.Ranks())
	p.Memory = p.capacities()
	e.simulation(e.allCosts(model)).run().report(p)
	p.Time.OptimizerS = optimizerTime(p, e.model, model)
	p.Time.StepS += p.Time.OptimizerS
	p.Time.EstimateS = p.Time.StepS
	p.throughput(model.Peak(e.model.DType()))
}

// capacities are what a rank has.
func (p *Plan) capacities() Memory {
	m := ir.Machine(p.Cluster)
	return Memory{DeviceCapacityBytes: ir.Bytes(m.DeviceMemory), HostCapacityBytes: m.HostMemoryPerRank()}
}

// Predict estimates what a plan leads to, for a plan that was edited.
func Predict(p *Plan) { newEstimator(newCache(), nil, p).predict() }

// costs are the durations of everything that a step is made of. Indices: i a subsequence, s a stage, k a layer of it.
type costs struct {
	forward               []ir.Seconds       // [i], of one layer
	backward              []backwardTime     // [i], of one layer
	again                 [][][]backwardTime // [s][i][k]: what a layer's backward takes longer because it makes units again; nil: nothing
	embed, head           []ir.Seconds       // [i]; all of the head runs in the backward
	embedGrad             []backwardTime     // [i]
	message               []ir.Seconds       // [i], to a neighbour
	d2h, h2d              [][][]ir.Seconds   // [s][i][k]
	link                  cost.HostLink      // of a rank that has copied nothing yet
	hiddenOut, hiddenBack []ir.Seconds       // [i], of a task's input
	cacheOut              []ir.Seconds       // [i], of a layer's K and V
	cacheBack             ir.Seconds         // of K and V of a whole sequence
	left                  *leftCosts         // of tasks that ranks share at the start; nil: there are none
	shared                *sharedCosts       // of tasks with helpers; nil: there are none
	under                 []visitTime        // [i]: collectives of parameters that a layer's backward finds under way
	remaking              map[remadeKey]backwardTime
	lastFate              lastFate
	stream                streamCosts
	graph                 *graph.Model
}

// visitTime is that of the collectives of weights and gradients that run beside a layer.
type visitTime struct{ weights, gradients ir.Seconds }

// backwardTime is that of a block's backward pass, and of its halves where they run apart.
type backwardTime struct{ whole, input, weights ir.Seconds }

// of is the time until the gradient of the input is there.
func (b backwardTime) of(split bool) ir.Seconds {
	if split {
		return b.input
	}
	return b.whole
}

// plus adds so many times another.
func (b backwardTime) plus(o backwardTime, times ir.Seconds) backwardTime {
	return backwardTime{b.whole + times*o.whole, b.input + times*o.input, b.weights + times*o.weights}
}

// remadeKey is what the time to make units of a layer again depends on.
type remadeKey struct {
	i      int
	remade graph.Units
}

// costs are those of the plan as it stands, without shared tasks.
func (e *estimator) costs(m cost.Model) *costs { return taskCosts(e.cache, e.plan, e.shapes, m) }

func taskCosts(c *cache, p *Plan, shapes *shapes, m cost.Model) *costs {
	g, n := shapes.model, p.Subsequences.N
	pr := newPricer(c, p, m)
	weights, gradients := newUpdater(p, g, m).visit()
	between := p.widestLink(m, neighbours)
	stages := p.Parallel.PP
	t := &costs{graph: g, link: m.HostLink(), again: perStage[backwardTime](stages, n), d2h: perStage[ir.Seconds](stages, n), h2d: perStage[ir.Seconds](stages, n)}
	for i, z := range shapes.sizes {
		t.forward = append(t.forward, pr.makespan(g.Layer, g.Layer.Forward, z, weights))
		under := visitTime{weights: weights}
		if p.Completes(Task{Kind: Backward, Subsequence: i}) {
			under.gradients = gradients
		}
		t.under = append(t.under, under)
		t.backward = append(t.backward, pr.layerBackward(g.Layer, z, under))
		t.embed = append(t.embed, pr.time(g, g.Embedding, g.Embedding.Forward, z))
		t.embedGrad = append(t.embedGrad, pr.embedGrad(g, z))
		t.head = append(t.head, pr.time(g, g.Head, g.Head.Backward, z))
		x := g.Layer.Values[g.Layer.Input].Bytes(z)
		t.message = append(t.message, m.Time(ir.Work{Kind: ir.WorkP2P, Bytes: x}, between))
		t.hiddenOut = append(t.hiddenOut, m.Time(ir.Work{Kind: ir.WorkD2H, Bytes: x}, cost.Link{}))
		t.hiddenBack = append(t.hiddenBack, m.Time(ir.Work{Kind: ir.WorkH2D, Bytes: x}, cost.Link{}))
		t.addCaches(m, g.Layer, z)
		if p.Streams() {
			t.addStretches(pr, g, z, weights, under.weights+under.gradients)
		}
		sizes := shapes.saved[i]
		for s := range stages {
			t.setFate(pr, g, s, i, p.Offload.Fate[s][i], sizes, z)
		}
	}
	t.stream.in, t.stream.out = p.copyCosts(g, m)
	return t
}

// addCaches prices the copies of K and V, out by subsequence, back as a whole.
func (t *costs) addCaches(m cost.Model, b *graph.Block, z graph.Size) {
	var out, back ir.Seconds
	for v := range b.Values {
		if b.Values[v].Kind != graph.Cache || !b.Values[v].Spans() {
			continue
		}
		whole := b.Values[v].Bytes(z)
		out += m.Time(ir.Work{Kind: ir.WorkD2H, Bytes: whole * ir.Bytes(z.Tokens) / ir.Bytes(z.Sequence)}, cost.Link{})
		back += m.Time(ir.Work{Kind: ir.WorkH2D, Bytes: whole}, cost.Link{})
	}
	t.cacheOut, t.cacheBack = append(t.cacheOut, out), back
}

func perStage[T any](stages, n int) [][][]T {
	out := make([][][]T, stages)
	for s := range out {
		out[s] = make([][]T, n)
	}
	return out
}

// fateTimes is what the fate of a stage's units of a subsequence adds to each of its layers: copies, one instruction a unit, and
// what its backward makes again.
type fateTimes struct {
	out, back []ir.Seconds
	again     []backwardTime
}

// setFate prices the fate of a stage's units of a subsequence. Stages often have one fate, and layers of a stage.
func (t *costs) setFate(pr pricer, g *graph.Model, stage, i int, fate string, sizes []ir.Bytes, z graph.Size) {
	if last := &t.lastFate; last.i != i || last.fate != fate {
		*last = lastFate{i, fate, t.timesOf(pr, g, i, fate, sizes, z)}
	}
	of := &t.lastFate.times
	t.d2h[stage][i], t.h2d[stage][i], t.again[stage][i] = of.out, of.back, of.again
}

// lastFate is the one that was priced last.
type lastFate struct {
	i     int
	fate  string
	times fateTimes
}

func (t *costs) timesOf(pr pricer, g *graph.Model, i int, fate string, sizes []ir.Bytes, z graph.Size) fateTimes {
	units := len(sizes)
	layers := len(fate) / units
	of := fateTimes{make([]ir.Seconds, layers), make([]ir.Seconds, layers), make([]backwardTime, layers)}
	before := ""
	for k := range layers {
		letters := fate[k*units : (k+1)*units]
		if letters == before {
			of.out[k], of.back[k], of.again[k] = of.out[k-1], of.back[k-1], of.again[k-1]
			continue
		}
		before = letters
		for u, n := range sizes {
			if letters[u] == FateOffload {
				o, b := pr.copies(n)
				of.out[k], of.back[k] = of.out[k]+o, of.back[k]+b
			}
		}
		of.again[k] = t.timeAgain(pr, g, i, remadeBy(letters), z)
	}
	return of
}

// timeAgain is how much longer the backward of a layer takes that makes units again.
func (t *costs) timeAgain(pr pricer, g *graph.Model, i int, remade graph.Units, z graph.Size) backwardTime {
	if remade == 0 {
		return backwardTime{}
	}
	key := remadeKey{i, remade}
	d, known := t.remaking[key]
	if !known {
		if t.remaking == nil {
			t.remaking = map[remadeKey]backwardTime{}
		}
		d = pr.layerBackward(g.LayerWithout(remade), z, t.under[i]).plus(t.backward[i], -1)
		t.remaking[key] = d
	}
	return d
}

// rank is a rank of the first replica.
func (p *Plan) rank(stage, k int) int32 { return int32(stage*p.Parallel.SP + k) }

func stageRanks(p *Plan, s, _ int) []int32 {
	ranks := make([]int32, p.Parallel.SP)
	for k := range ranks {
		ranks[k] = p.rank(s, k)
	}
	return ranks
}

// farthest are the ranks of a stage and of the first, which is farthest.
func farthest(p *Plan, s, k int) []int32 { return []int32{p.rank(0, k), p.rank(s, k)} }

func neighbours(p *Plan, s, k int) []int32 {
	return []int32{p.rank(s, k), p.rank((s+1)%p.Parallel.PP, k)}
}

// widestLink is the worst link among groups of the first replica.
func (p *Plan) widestLink(m cost.Model, group func(p *Plan, s, k int) []int32) cost.Link {
	var worst cost.Link
	for s := range p.Parallel.PP {
		for k := range p.Parallel.SP {
			if l := m.LinkOf(group(p, s, k)); l.Nodes >= worst.Nodes {
				worst = l
			}
		}
	}
	return worst
}

// optimizerTime is from the last gradient to the last new weight on the slowest stage.
func optimizerTime(p *Plan, g *graph.Model, m cost.Model) ir.Seconds {
	u := newUpdater(p, g, m)
	layer, embedding, head := u.block(g.Layer), u.block(g.Embedding), u.block(g.Head)
	var slowest ir.Seconds
	for s := range p.Parallel.PP {
		t := layer * ir.Seconds(p.layersOf(s))
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

// throughput counts model FLOPs: three times the forward, attention causal, recomputation and padding left out.
func (p *Plan) throughput(peak float64) {
	tokens := float64(p.Train.Sequence) * float64(p.Train.Batch)
	head := 2 * float64(p.Model.Hidden) * float64(p.Model.Vocab) * tokens
	layers := flopsOfLayer(p.Model).of(p.Train.Sequence) * float64(p.Model.Layers) * float64(p.Train.Batch)
	p.Throughput = Throughput{ModelFlops: 3 * (layers + head)}
	if seconds := float64(p.Time.StepS); seconds > 0 && !math.IsInf(seconds, 0) {
		p.Throughput.TGS = tokens / (seconds * float64(p.Parallel.Ranks()))
		p.Throughput.MFU = p.Throughput.ModelFlops / (seconds * cost.Devices(ir.Machine(p.Cluster), p.Parallel.Ranks()) * peak)
	}
}
