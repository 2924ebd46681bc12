package memory

import (
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// gradients holds the gradients of weights that exist, and what visits need if weights or gradients are divided (ZeRO).
type gradients struct {
	*gauge
	whole   []params  // of each layer, of the embedding and of the head: parameters whose whole gradients exist
	adds    addedTo   // parameters that the last backward added to
	reduced []reduced // by layer
	owed    ir.Bytes  // gradients that the previous visit passed to collectives that may still be running, and the results of those collectives
	widens  ir.Bytes  // f32 sums that will replace rounded ones when the previous visit's results are added

	visits  []visitBytes            // by kind of layers, and of the head
	parts   map[partKey]*visitBytes // of visits that reduce some gradients
	lent    []lentHalves            // by gathers in progress
	entered [2]int32                // stage and layer of the current visit
	passing params                  // parameters that are whole only until their last use in this visit, so that they are counted with the running block
}

func newGradients(g *gauge) gradients {
	n := g.plan.LayersOf(g.rank)
	list := gradients{gauge: g, whole: make([]params, n+2), reduced: make([]reduced, n), parts: map[partKey]*visitBytes{}}
	for kind := range g.graph.Kinds() {
		list.visits = append(list.visits, visitBytesOf(g.plan, g.graph, g.graph.LayerOf(kind), everything))
	}
	list.visits = append(list.visits, visitBytesOf(g.plan, g.graph, g.graph.Head, everything))
	return list
}

// addedTo is the set of parameters whose gradients a pass adds to.
type addedTo struct {
	block  *graph.Block
	pass   Direction
	params params
}

// begins returns the gradients of a block that a pass adds to and that do not exist yet.
func (g *gradients) begins(b *graph.Block, own int, pass Direction) params {
	if g.adds.block != b || g.adds.pass != pass {
		g.adds = addedTo{b, pass, addsTo(b, pass)}
	}
	return g.adds.params &^ g.whole[own]
}

// begin counts gradients that exist from now on.
func (g *gradients) begin(b *graph.Block, own int, begins params) {
	g.whole[own] |= begins
	g.now[TermGradients] += wholeGradients(g.plan, b, begins)
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

// gather counts the whole weights of a layer, and the halves of its gathers until the next visit.
func (g *gradients) gather(at [2]int32, v *visitBytes) {
	g.now[TermWeights] += v.weights + v.halves
	if v.halves > 0 {
		g.lent = append(g.lent, lentHalves{at, v.halves})
	}
}

// lentHalves are the bytes between the two steps of the gathers of a layer, given its stage and its number there.
type lentHalves struct {
	at    [2]int32
	bytes ir.Bytes
}

// enter begins a visit. The bytes between the steps of gathers are held until the next visit or, if weights are gathered
// once, until their layer is visited.
func (g *gradients) enter(at [2]int32) {
	before := g.entered
	g.entered = at
	g.lent = slices.DeleteFunc(g.lent, func(l lentHalves) bool {
		through := g.plan.Parallel.Zero >= plan.ZeroWeights || l.at == at || l.at == before
		if through {
			g.now[TermWeights] -= l.bytes
		}
		return through
	})
}

// free counts the weights of a layer with the running block: each is freed after its last use in the visit.
func (g *gradients) free(v *visitBytes) {
	g.now[TermWeights] -= v.weights
	g.passing = v.gathered
}

// reduce passes the gradients of a layer to collectives; those of the previous visit are then complete. Gradients to
// which later visits add stay whole.
func (g *gradients) reduce(t plan.Task, own int, v *visitBytes) {
	of, before := g.whole[own]&v.divided, &g.reduced[own]
	first, second := of&^before.once, of&before.once&^before.twice
	before.twice |= of & before.once
	before.once |= of
	g.whole[own] &^= of
	g.settle(t)
	all, added, widened := g.part(v, of), g.part(v, of&^first), g.part(v, second)
	g.note(t, all.rounding)
	g.now[TermGradients] += g.part(v, first).sums - all.gradients
	g.widens = widened.wide - widened.sums // added to the sums of earlier visits, in f32 from now on
	g.owed = all.passed + all.halfSums + added.sums
	g.now[TermGradients] += g.owed
}

// reduced holds the parameters of a layer whose gradients have been reduced into slices, and those for which it has been done more than
// once.
type reduced struct{ once, twice params }

// partKey identifies some gradients of a visit.
type partKey struct {
	visit *visitBytes
	of    params
}

// part returns the bytes of a visit for some of the gradients that are divided.
func (g *gradients) part(v *visitBytes, of params) *visitBytes {
	switch of {
	case v.divided:
		return v
	case 0:
		return &visitBytes{}
	}
	key := partKey{v, of}
	if g.parts[key] == nil {
		some := visitBytesOf(g.plan, g.graph, v.block, of)
		g.parts[key] = &some
	}
	return g.parts[key]
}

// settle adds reduced gradients to those of earlier visits.
func (g *gradients) settle(t plan.Task) {
	if g.widens > 0 {
		g.note(t, 2*g.widens)
	}
	g.now[TermGradients] += g.widens - g.owed
	g.widens, g.owed = 0, 0
}

// visitOf returns the bytes of a visit to the layer of an action, or to the head.
func (g *gradients) visitOf(a schedule.Action) *visitBytes {
	stage := g.plan.Tasks[g.rank][a.Task].Stage
	if int(a.Layer) == g.plan.LayersPerStage[stage] {
		return &g.visits[len(g.visits)-1]
	}
	return &g.visits[g.graph.KindOf(g.plan.LayerAt(stage, int(a.Layer)))]
}

// visitBytes holds the bytes that a visit to a layer needs temporarily, in addition to the slices.
type visitBytes struct {
	block              *graph.Block
	gathered, divided  params   // parameters of a layer whose weights, and whose gradients, are divided
	weights, gradients ir.Bytes // bytes when whole
	passed             ir.Bytes // the gradients in the type in which they are summed
	halves, halfSums   ir.Bytes // bytes between the two steps of a collective; 0: it has one step
	sums, wide         ir.Bytes // summed slices of the gradients; the same in f32
	beside             ir.Bytes // what is added when whole gradients are summed during the backward pass: slices, the bytes between the steps; what rounding frees
	rounding           ir.Bytes // what it takes to round gradients, of which each is then freed
}

// halvesBeside returns the bytes between the steps of the collectives that sum a gradient and, without ZeRO, gather it.
func halvesBeside(zero int, cut plan.Slicing, param *graph.Param, d ir.DType) ir.Bytes {
	if cut.SP == 1 || cut.DP == 1 {
		return 0
	}
	half := graph.Align(ir.Bytes(cut.Part()*param.Local[1]) * d.Bytes())
	if zero == 0 {
		half *= 2
	}
	return half
}

func visitBytesOf(p *plan.Plan, g *graph.Model, layer *graph.Block, of params) (n visitBytes) {
	n.block = layer
	more := ir.Bytes(0) // bytes that rounding has added, less those that it has freed
	for i := range layer.Params {
		if !of.has(i) {
			continue
		}
		param := &layer.Params[i]
		zero, cut := p.ZeroOf(layer, param), p.Slicing(param)
		elements, d := ir.Bytes(cut.Whole()*param.Local[1]), p.ReducedType(param)
		whole, passed, slice := graph.Align(elements*ir.F32.Bytes()), graph.Align(elements*d.Bytes()), ir.Bytes(cut.Rows*param.Local[1])
		half := ir.Bytes(0) // after the first step, if divided over the ranks of a stage and over replicas
		if cut.SP > 1 && cut.DP > 1 {
			half = ir.Bytes(cut.Part() * param.Local[1])
		}
		if p.KeepsSlice(layer, param) {
			n.gathered |= 1 << i
			n.weights += graph.Align(elements * param.DType(g.DType()).Bytes())
			n.halves += graph.Align(half * param.DType(g.DType()).Bytes())
		}
		if d != ir.F32 {
			n.rounding = max(n.rounding, more+passed)
			more += passed - whole
		}
		if zero >= plan.ZeroGradients && !param.Frozen {
			n.divided |= 1 << i
			n.gradients += whole
			n.passed += passed
			n.halfSums += graph.Align(half * d.Bytes())
			n.sums += graph.Align(slice * d.Bytes())
			n.wide += graph.Align(slice * ir.F32.Bytes())
		}
		if p.SumsBeside(layer, param) && cut.Slices() > 1 {
			n.beside += passed - whole + graph.Align(slice*d.Bytes()) + halvesBeside(zero, cut, param, d)
		}
	}
	return n
}
