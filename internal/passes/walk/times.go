package walk

import (
	"math"
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// layerTime is the time of a layer's forward pass in the schedule that Times runs, for a subsequence of average work.
const layerTime = 8

// Times returns when every task of every stage begins and ends in a simplified run of the schedule. In this
// run, a layer takes layerTime forward and twice that backward; if the work of the subsequences differs
// clearly, these times are proportional to it. A task without layers takes one unit of time. The head runs its FLOPs at the speed of a layer, and messages
// take no time. If tasks are cut into pieces, these are the times of one piece, and those of an undivided task
// are multiplied by the number of pieces. All tasks of a shared slot begin and end together; if tasks are
// shared at the turnaround, so do the tasks of every other slot.
func Times(p *plan.Plan, g *graph.Model) (starts, ends [][]int) {
	c := Must(p)
	from, to := c.Times(g)
	for rank, tasks := range p.Tasks {
		first := c.Firsts[rank]
		starts, ends = append(starts, from[first:first+len(tasks)]), append(ends, to[first:first+len(tasks)])
	}
	return starts, ends
}

// Times returns the result of the function Times, indexed by task number.
func (c *Walk) Times(g *graph.Model) (starts, ends []int) {
	p, head, layers := c.Plan, headTime(c.Plan, g), layerTimes(c.Plan, g)
	starts, ends = make([]int, len(c.Nodes)), make([]int, len(c.Nodes))
	arrives, free := make([]int, len(c.Nodes)), make([]int, len(p.Tasks))
	most, pieces := slices.Max(p.LayersPerStage)*layerTime, max(1, p.MostPieces())
	began := map[plan.Slot]int{} // shared slots
	for _, n := range c.Order {
		s := &c.Nodes[n]
		start, cost := max(arrives[n], free[s.Rank]), int(s.End-s.First)*layers[s.Subsequence]
		if p.Mux.Right {
			cost = most
		}
		if s.Kind == plan.Backward && !s.Split {
			cost *= 2
		}
		if s.Kind == plan.Backward && int(s.Stage) == p.Parallel.Stages()-1 && !p.Mux.Right {
			cost += head
		}
		switch t := c.Task(n); {
		case s.Opens:
			start = slices.Max(free)
			began[plan.SlotOf(t)] = start
			cost = (t.Slot() + 1) * 2 * most
			for r := range free {
				free[r] = start + cost
			}
		case s.Shared:
			start = began[plan.SlotOf(t)]
			cost = free[s.Rank] - start
		case t.Piece == 0:
			cost *= pieces
		case t.Piece == len(p.Mux.Pieces[t.Subsequence]): // all pieces together take as long as an undivided task
			cost *= pieces - t.Piece + 1
		}
		cost = max(1, cost)
		free[s.Rank] = start + cost
		starts[n], ends[n] = start, start+cost
		if s.Next >= 0 {
			arrives[s.Next] = start + cost
		}
	}
	return starts, ends
}

// layerTimes returns the time of a layer's forward pass for each subsequence. If no subsequence has much more
// work than the average, all take the same time.
func layerTimes(p *plan.Plan, g *graph.Model) []int {
	const clearly = 4.0 / 3
	n := p.Subsequences.N
	work, times, sum := make([]float64, n), slices.Repeat([]int{layerTime}, n), float64(0)
	for kind := range g.Kinds() {
		addWork(work, p.Sizes(), g, kind)
	}
	for _, w := range work {
		sum += w
	}
	if mean := sum / float64(n); slices.Max(work) > clearly*mean {
		for i, w := range work {
			times[i] = max(1, int(math.Round(layerTime*w/mean)))
		}
	}
	return times
}

// addWork adds the FLOPs of the layers of a kind to the work of each subsequence. It derives them from the first
// subsequence: the work of attention is the same for every query-key pair, that of the other nodes of its loop for every token so far,
// and the rest of the work for every token.
func addWork(work []float64, sizes []graph.Size, g *graph.Model, kind int) {
	pairs := func(z graph.Size) float64 {
		if z.Window > 0 {
			z.Prefix = min(z.Prefix, z.Window)
		}
		return float64(z.Tokens) * (float64(z.Prefix) + float64(z.Tokens+1)/2)
	}
	b, first := g.LayerOf(kind), g.OfKind(sizes[0], kind)
	var attention, rest, expands float64
	first.Piece = 0
	for i := range b.Forward {
		switch flops := float64(b.Work(&b.Forward[i], first).Flops); {
		case b.Forward[i].Op == ir.Attention:
			attention += flops
		case b.Forward[i].Loop > 0:
			expands += flops
		default:
			rest += flops
		}
	}
	for i, z := range sizes {
		z = g.OfKind(z, kind)
		work[i] += float64(g.LayersOf(kind)) * ((rest*float64(z.Tokens)+expands*float64(z.Prefix+z.Tokens))/float64(first.Tokens) + attention*pairs(z)/pairs(first))
	}
}

// headTime returns the time of the head, forward and backward, for an average subsequence.
func headTime(p *plan.Plan, g *graph.Model) int {
	s := p.Train.Sequence
	z := p.Split().Size()
	z.Sequence, z.Tokens, z.Rows, z.Batch = s, s, s, 1
	var head ir.Flops
	for i := range g.Head.Backward {
		head += g.Head.Work(&g.Head.Backward[i], z).Flops
	}
	layer := g.Mean(func(kind int) ir.Seconds {
		var sum ir.Flops
		for _, flops := range g.LayerOf(kind).ForwardFlops(g.OfKind(z, kind)) {
			sum += flops
		}
		return ir.Seconds(sum)
	})
	return int(math.Round(layerTime * float64(head) / float64(layer)))
}
