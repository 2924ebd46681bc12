package walk

import (
	"slices"

	"sppo.dev/passes/plan"
)

// Times returns when every task of every stage begins and ends in a run of the schedule in which a layer's
// forward takes one unit of time, its backward two, and messages none. If tasks are cut into pieces, each piece takes
// that long, and a whole task takes as many times that as there are pieces. All tasks of a shared slot begin and end together;
// if tasks are shared at the turnaround, so do those of every slot.
func Times(p *plan.Plan) (starts, ends [][]int) {
	c := Must(p)
	from, to := c.Times()
	for rank, tasks := range p.Tasks {
		first := c.Firsts[rank]
		starts, ends = append(starts, from[first:first+len(tasks)]), append(ends, to[first:first+len(tasks)])
	}
	return starts, ends
}

// Times returns the same, indexed by task number.
func (c *Walk) Times() (starts, ends []int) {
	p := c.Plan
	starts, ends = make([]int, len(c.Nodes)), make([]int, len(c.Nodes))
	arrives, free := make([]int, len(c.Nodes)), make([]int, len(p.Tasks))
	most, pieces := slices.Max(p.LayersPerStage), max(1, p.MostPieces())
	began := map[plan.Slot]int{} // shared slots
	for _, n := range c.Order {
		s := &c.Nodes[n]
		start, cost := max(arrives[n], free[s.Rank]), int(s.End-s.First)
		if p.Mux.Right {
			cost = most
		}
		if s.Kind == plan.Backward && !s.Split {
			cost *= 2
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
		case t.Piece == len(p.Mux.Pieces[t.Subsequence]): // all together take as long as a whole task
			cost *= pieces - t.Piece + 1
		}
		free[s.Rank] = start + cost
		starts[n], ends[n] = start, start+cost
		if s.Next >= 0 {
			arrives[s.Next] = start + cost
		}
	}
	return starts, ends
}
