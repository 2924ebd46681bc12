package search

import (
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// This file computes lower bounds on the memory of a rank. They do not depend on copy times or on
// the cost of any node.
//
// The bounds consider four points in a step. At the end of the step, a rank holds the state of the parameters
// with all gradients. When the first backward begins, it holds K and V of a microbatch and, without offload,
// all tensors that its forwards save. When the backward of the first and longest subsequence begins, it holds
// the working memory of a layer, and K and V. If the subsequences run backward through the virtual stages in
// several groups, one group after another, it also holds all gradients of K and V and all weight gradients. If
// they form a single group, it holds gradients of K and V for one virtual stage only; in layer order, the same
// is true of K and V if they may be recomputed. At that point, the last rank may instead hold the working
// memory of the head, which runs just before. The fourth point concerns device and host together: when the
// first backward begins, K, V and all tensors that forwards save are on one or the other.

// roomKey contains everything that a room depends on.
type roomKey struct {
	split     graph.Split
	recompute string
	lengthsKey
	microbatch, lossChunk int
}

// room is the memory that does not depend on the placements of units.
type room struct {
	all, resident  kvBytes  // of a layer: all, and those that are not streamed
	kept, inputs   ir.Bytes // bytes that a layer saves for the backward pass; those of its inputs, which cannot be recomputed
	working        ir.Bytes // while a layer runs backward, for the first subsequence
	head, lastHead ir.Bytes // while the head runs, for the first and for the last subsequence
}

// kvBytes holds the bytes of a layer's K and V for an entire sequence, and those of their gradients.
type kvBytes struct{ values, grads ir.Bytes }

// roomOf returns the room of a plan whose subsequence lengths are known.
func (b *bounds) roomOf(p *plan.Plan) room {
	key := roomKey{p.Split(), p.Recompute, b.lengthsKey(p), p.Parallel.Microbatch, p.Schedule.LossChunk}
	of, known := b.rooms[key]
	if known {
		return of
	}
	g, sizes := b.cache.Model(p), p.Sizes()
	b.work.Spend(4 * len(sizes))
	first, last := sizes[0], sizes[len(sizes)-1]
	of.kept, of.inputs = leastKept(g, p.Recompute, sizes)
	of.all, of.resident = kvOf(g, first)
	of.working = b.workingOf(p, p.Recompute)
	head := func(z graph.Size) ir.Bytes { // with the shortest chunks, if their length is open
		return b.cache.Blocks.Bytes(p, g, g.Head, memory.BackwardPass, p.HeadSize(z), 0, 0)
	}
	of.head, of.lastHead = head(first), head(last)
	b.rooms[key] = of
	return of
}

// workingOf returns the memory that a layer uses while its backward runs with a recomputation policy, for the
// first subsequence. It is the minimum over all kinds of layers.
func (b *bounds) workingOf(p *plan.Plan, policy string) ir.Bytes {
	g := b.cache.Model(p)
	return leastOf(g, func(kind int) ir.Bytes {
		return b.cache.Blocks.Bytes(p, g, g.LayerWithout(kind, g.RecomputedBy(policy)), memory.BackwardPass, p.Size(0), 0, 0)
	})
}

// frugalPolicies returns the last policy, which recomputes the most, and the policies under which a layer needs
// even less memory while its backward runs. All other policies keep more and need at least as much.
func (b *bounds) frugalPolicies(s *lang.Schedule, policies []string) (frugal []string) {
	most := policies[len(policies)-1]
	if p := b.sized(*s); p != nil {
		least := b.workingOf(p, most)
		for _, policy := range policies[:len(policies)-1] {
			if strategy.Of(p).Late || b.workingOf(p, policy) < least {
				frugal = append(frugal, policy)
			}
		}
	}
	return append(frugal, most)
}

// leastWorking returns the minimum memory of a layer while its backward runs, over all named recomputation policies.
func (b *bounds) leastWorking(p *plan.Plan) ir.Bytes {
	least := b.workingOf(p, graph.RecomputeNone)
	for _, policy := range recomputing {
		least = min(least, b.workingOf(p, policy))
	}
	return least
}

// leastOf returns the minimum of a value over all kinds of layers.
func leastOf(g *graph.Model, of func(kind int) ir.Bytes) ir.Bytes {
	least := of(0)
	for kind := 1; kind < g.Kinds(); kind++ {
		least = min(least, of(kind))
	}
	return least
}

// leastKept returns a lower bound on the bytes that each layer saves for its backward, for all subsequences,
// and the bytes of its inputs among them.
func leastKept(g *graph.Model, recompute string, sizes []graph.Size) (kept, inputs ir.Bytes) {
	units := make([][]ir.Bytes, g.Kinds()) // of all subsequences
	for _, z := range sizes {
		for kind, sizes := range plan.UnitSizes(g, z) {
			units[kind] = slices.Grow(units[kind], len(sizes))[:len(sizes)]
			for u, size := range sizes {
				units[kind][u] += size
			}
		}
	}
	of := func(kind int, recomputed graph.Units) (n ir.Bytes) {
		for u, size := range units[kind] {
			if g.Saves(kind).Has(u) && !(recomputed & g.Remakes(kind)).Has(u) {
				n += size
			}
		}
		return n
	}
	recomputed := g.RecomputedBy(recompute)
	return leastOf(g, func(kind int) ir.Bytes { return of(kind, recomputed) }),
		leastOf(g, func(kind int) ir.Bytes { return of(kind, ^graph.Units(1<<plan.InputUnit)) })
}

// leastState returns the minimum of each part of StateBytes over all layers.
func leastState(p *plan.Plan, g *graph.Model) (weights, gradients, optimizer ir.Bytes) {
	weights, gradients, optimizer = p.StateBytes(g, g.LayerOf(0))
	for kind := 1; kind < g.Kinds(); kind++ {
		w, d, o := p.StateBytes(g, g.LayerOf(kind))
		weights, gradients, optimizer = min(weights, w), min(gradients, d), min(optimizer, o)
	}
	return weights, gradients, optimizer
}

// kvOf returns the bytes of K and V of a layer, and of those that are not streamed. Both are zero if
// some layer's backward computes no gradients of K and V, because that layer frees K and V after its last
// forward.
func kvOf(g *graph.Model, z graph.Size) (all, resident kvBytes) {
	for kind := range g.Kinds() {
		if !g.LayerOf(kind).Attends {
			return kvBytes{}, kvBytes{}
		}
	}
	z.Tokens = z.Sequence
	b := g.WithKV()
	for i := range b.Values {
		v, n := &b.Values[i], kvBytes{}
		switch v.Kind {
		case graph.Cache:
			n.values = v.Bytes(z)
		case graph.CacheGrad:
			n.grads = v.Bytes(z)
		}
		all = kvBytes{all.values + n.values, all.grads + n.grads}
		if v.Rows != graph.Full {
			resident = kvBytes{resident.values + n.values, resident.grads + n.grads}
		}
	}
	return all, resident
}

// holding is the memory of a rank.
type holding struct {
	rank   int
	device ir.Bytes
	both   ir.Bytes // on device and host together
}

func (h holding) fuller(o holding) holding {
	if o.device > h.device {
		h.rank = o.rank
	}
	return holding{h.rank, max(h.device, o.device), max(h.both, o.both)}
}

// lackOf returns the shortfall of a rank that needs the given memory, or nil if the memory suffices.
func (b *bounds) lackOf(h holding) *plan.Shortfall {
	device := ir.Bytes(b.cluster.DeviceMemory)
	switch over, overBoth := h.device-device, h.both-device-ir.Machine(b.cluster).HostMemoryPerRank(); {
	case over > 0 && over >= overBoth:
		return &plan.Shortfall{Stage: h.rank, Arena: "device", Bytes: over}
	case overBoth > 0:
		return &plan.Shortfall{Stage: h.rank, Arena: "host", Bytes: overBoth}
	}
	return nil
}

// heldByShare returns the bound for an open number of subsequences.
func (b *bounds) heldByShare(p *plan.Plan) holding {
	g := b.cache.Model(p)
	weights, gradients, optimizer := leastState(p, g)
	of, layers := b.roomOf(p), ir.Bytes(b.layersOfMost(p))
	return holding{
		device: layers * (weights + optimizer + max(gradients, b.stays(p, of).values)),
		both:   layers * (weights + optimizer + of.inputs),
	}
}

// heldByMost returns the bound for a plan whose layers are not assigned to stages yet: some rank has at least
// an equal share of the layers, and the last rank has at least one in each virtual stage that may not be empty.
func (b *bounds) heldByMost(p *plan.Plan) holding {
	most := b.holds(p, rankOf{0, b.layersOfMost(p), 1, false, false})
	empty := max(0, p.Parallel.Stages()-p.Model.Layers)
	return most.fuller(b.holds(p, rankOf{p.Home(p.Parallel.Stages() - 1), p.Parallel.VirtualStages - empty, 1 - min(1, empty), false, true}))
}

// heldAtLeast returns the bound for a plan whose stages are assigned.
func (b *bounds) heldAtLeast(p *plan.Plan) (most holding) {
	fewest := slices.Repeat([]int{p.Model.Layers}, p.Parallel.PP)
	for j, n := range p.LayersPerStage {
		home := p.Home(j)
		fewest[home] = min(fewest[home], n)
	}
	for rank := range fewest {
		most = most.fuller(b.holds(p, rankOf{rank, p.LayersOf(rank), fewest[rank], rank == p.Home(0), rank == p.Home(p.Parallel.Stages()-1)}))
	}
	return most
}

// rankOf is a rank's part of the model.
type rankOf struct {
	rank, layers int
	fewest       int // number of layers of its smallest virtual stage
	first, last  bool
}

// holds returns the memory of a rank at the fullest of the four points.
func (b *bounds) holds(p *plan.Plan, r rankOf) holding {
	of := b.roomOn(p, r.last)
	state, gradients := b.state(p, r)
	layers := ir.Bytes(r.layers)
	turnaround := func(c kvBytes) ir.Bytes {
		switch {
		case p.LayerOrder() && mayRecomputeKV(p):
			return ir.Bytes(r.fewest) * (c.values + c.grads)
		case p.LayerOrder():
			return layers*c.values + ir.Bytes(r.fewest)*c.grads
		case p.Subsequences.N <= backwardGroup(p):
			return layers*c.values + ir.Bytes(r.fewest)*c.grads
		}
		return layers*(c.values+c.grads) + gradients
	}
	stays, group := b.stays(p, of), kvBytes{} // of a layer: outside layer order, in layer order
	if p.LayerOrder() && p.Schedule.Keep != nil {
		group = of.resident
	}
	held := layers * of.all.values // K and V when the first backward begins
	if p.LayerOrder() && mayRecomputeKV(p) {
		held = ir.Bytes(r.fewest) * of.all.values
	}
	both := max(layers*of.kept+held+max(of.lastHead, of.resident.grads), turnaround(of.all))
	if p.Schedule.Offload.Policy != "none" {
		of.kept = 0
	}
	most := max(gradients, layers*(stays.values+of.kept)+of.lastHead, turnaround(stays)+max(of.working, of.head),
		ir.Bytes(r.fewest)*(group.values+group.grads)+of.working+b.othersGradients(p))
	return holding{r.rank, state + most, state + both}
}

// roomOn returns the room of a layer, and of the head if the rank has it, for the policies that a plan leaves open.
func (b *bounds) roomOn(p *plan.Plan, last bool) room {
	of, late := b.roomOf(p), strategy.Of(p).Late
	switch open := opensRecompute(p.Schedule); { // an open policy also leaves the saved tensors open
	case open && b.fitting:
		of.kept, of.working = of.inputs, b.leastWorking(p)
	case open:
		of.kept, of.working = of.inputs, 0
	}
	if late { // the first half of a backward uses less working memory
		of.working = 0
	}
	if late || !last {
		of.head, of.lastHead = 0, 0
	}
	return of
}

// mayRecomputeKV reports whether K and V of a layer may be recomputed rather than stored
// between its forwards and its backward.
func mayRecomputeKV(p *plan.Plan) bool {
	return p.Schedule.Recompute == graph.RecomputeFullKV || opensRecompute(p.Schedule) && !p.Streams()
}

// othersGradients returns the bytes of the weight gradients of all groups of layers except the largest. In
// layer order, the rank holds them during the backward of the first group, which runs last.
func (b *bounds) othersGradients(p *plan.Plan) ir.Bytes {
	if !p.LayerOrder() || p.LayersPerStage == nil {
		return 0
	}
	g := b.cache.Model(p)
	_, gradients, _ := leastState(p, g)
	return ir.Bytes(p.Model.Layers-slices.Max(p.LayersPerStage)) * gradients
}

// backwardGroup returns the number of subsequences that run backward through one virtual stage before the next.
func backwardGroup(p *plan.Plan) int {
	switch {
	case p.Parallel.VirtualStages == 1:
		return 1
	case strategy.Of(p).Rounds:
		return 2 * p.Parallel.PP
	}
	return p.Subsequences.N
}

// stays returns the bytes of a layer's K and V, and of their gradients, that stay on the device for an entire
// sequence.
func (b *bounds) stays(p *plan.Plan, of room) kvBytes {
	if p.Schedule.Keep == nil || p.Schedule.Order != plan.OrderSequence {
		return kvBytes{}
	}
	return of.resident
}

// state returns the bytes that a rank holds from step to step, and those of the gradients at the end of a step.
func (b *bounds) state(p *plan.Plan, r rankOf) (state, gradients ir.Bytes) {
	g := b.cache.Model(p)
	weights, gradients, optimizer := leastState(p, g)
	state, gradients = ir.Bytes(r.layers)*(weights+optimizer), ir.Bytes(r.layers)*gradients
	for _, part := range []struct {
		block *graph.Block
		there bool
	}{{g.Embedding, r.first}, {g.Head, r.last && !(r.first && g.Tied)}} {
		if part.there {
			weights, grads, optimizer := p.StateBytes(g, part.block)
			state, gradients = state+weights+optimizer, gradients+grads
		}
	}
	return state, gradients
}
