package passes

import (
	"fmt"
	"slices"
)

// orderTasks orders the tasks of every pipeline rank.
//
// Input: Parallel, Subsequences. Output: Tasks. Paper: section 3; a stage forwards s_0 .. s_{N-1} and then goes
// backward from s_{N-1} to s_0, since gradients of K and V flow from later to earlier subsequences. Other strategies
// differ in how they weave several sequences, and in whether gradients of weights are tasks of their own.
func orderTasks(c *Context, p *Plan) error {
	c.forget()
	p.decideOrder()
	return nil
}

// checkSchedule: every task once on every stage, in an order that the dataflow allows, the same on all stages where
// messages pass between them.
func checkSchedule(_ *Context, p *Plan) error {
	if len(p.Tasks) != p.Parallel.PP {
		return fmt.Errorf("tasks are given for %d stages of %d", len(p.Tasks), p.Parallel.PP)
	}
	for rank, tasks := range p.Tasks {
		if p.Streams() && (p.Mux.Left || p.Mux.Right || slices.ContainsFunc(tasks, func(t Task) bool { return t.Kind == WeightGrad || t.Piece > 0 })) {
			return fmt.Errorf("tasks of stage %d: K and V stream through whole tasks of their own stage", rank)
		}
		err := p.checkStage(rank, tasks)
		if p.Mux.Left {
			err = p.checkSharedOrder(rank, tasks)
		}
		if err != nil {
			return fmt.Errorf("tasks of stage %d: %w", rank, err)
		}
	}
	return p.Walk(func(int, Task) {})
}

func (p *Plan) checkStage(rank int, tasks []Task) error {
	n, microbatches, v := p.Subsequences.N, p.Parallel.Microbatches, p.Parallel.VirtualStages
	split := p.Splits(rank)
	if got, want := len(tasks)-len(split), 2*n*microbatches*v; got != want {
		return fmt.Errorf("there are %d, and forward and backward of %d subsequences of %d microbatches on %d virtual stages are %d", got, n, microbatches, v, want)
	}
	type place struct{ microbatch, stage int }
	forward, backward := map[place]int{}, map[place]int{} // how many are done
	open := map[Task]bool{}                               // gradients of weights that may be computed
	for _, t := range tasks {
		if t.Microbatch < 0 || t.Microbatch >= microbatches || t.Subsequence < 0 || t.Subsequence >= n || t.Piece != 0 || t.Stage < 0 || t.Stage >= p.Parallel.Stages() {
			return fmt.Errorf("%s: there is no such microbatch, subsequence or virtual stage", t)
		}
		if home := p.Home(t.Stage); home != rank {
			return fmt.Errorf("%s: virtual stage %d belongs to stage %d", t, t.Stage, home)
		}
		at := place{t.Microbatch, t.Stage}
		switch t.Kind {
		case WeightGrad:
			if !open[t] {
				return fmt.Errorf("%s comes before %s or twice: gradients of weights need those of results", t, t.As(Backward))
			}
			delete(open, t)
			continue
		case Forward:
			if t.Subsequence != forward[at] {
				return fmt.Errorf("%s comes where %s is due: it reads K and V of all before it", t, Task{Kind: Forward, Microbatch: t.Microbatch, Subsequence: forward[at], Stage: t.Stage})
			}
			forward[at]++
			continue
		}
		if forward[at] < n || t.Subsequence != n-1-backward[at] {
			return fmt.Errorf("%s comes too early or twice: gradients of K and V flow from the last subsequence to the first", t)
		}
		backward[at]++
		if split[t] {
			open[t.As(WeightGrad)] = true
		}
	}
	return nil
}

// checkSharedOrder: there is one order of tasks that ranks share in.
func (p *Plan) checkSharedOrder(rank int, tasks []Task) error {
	if err := plain(muxProblems(p)); err != nil {
		return err
	}
	if err := p.checkPieces(); err != nil {
		return err
	}
	want := p.borrowedTasks()[rank]
	for i := range max(len(want), len(tasks)) {
		if i >= len(tasks) || i >= len(want) || tasks[i] != want[i] {
			return fmt.Errorf("tasks from number %d on are %v where mux wants %v", i, tasks[min(i, len(tasks)):], want[min(i, len(want)):])
		}
	}
	return nil
}

// Times are when every task of every stage begins and ends in a run of the schedule in which a layer's forward takes one unit
// of time, its backward two, and messages none; where there are pieces, they take that long, and whole tasks as many times as
// there are. All tasks of a shared slot begin and end together, and all of any slot where those at the turn are shared.
func (p *Plan) Times() (starts, ends [][]int) {
	c := p.mustCourse()
	from, to := c.times()
	for rank, tasks := range p.Tasks {
		first := c.firsts[rank]
		starts, ends = append(starts, from[first:first+len(tasks)]), append(ends, to[first:first+len(tasks)])
	}
	return starts, ends
}

// times are those of Times, by number.
func (c *course) times() (starts, ends []int) {
	p := c.plan
	starts, ends = make([]int, len(c.stops)), make([]int, len(c.stops))
	arrives, free := make([]int, len(c.stops)), make([]int, len(p.Tasks))
	most, pieces := slices.Max(p.LayersPerStage), max(1, p.mostPieces())
	began := map[slot]int{} // slots that ranks share in
	for _, n := range c.order {
		s := &c.stops[n]
		start, cost := max(arrives[n], free[s.rank]), int(s.end-s.first)
		if p.Mux.Right {
			cost = most
		}
		if s.kind == Backward && !s.split {
			cost *= 2
		}
		switch t := c.task(n); {
		case s.opens:
			start = slices.Max(free)
			began[slotOf(t)] = start
			cost = (t.Slot() + 1) * 2 * most
			for r := range free {
				free[r] = start + cost
			}
		case s.shared:
			start = began[slotOf(t)]
			cost = free[s.rank] - start
		case t.Piece == 0:
			cost *= pieces
		case t.Piece == len(p.Mux.Pieces[t.Subsequence]): // all together take as long as a whole task
			cost *= pieces - t.Piece + 1
		}
		free[s.rank] = start + cost
		starts[n], ends[n] = start, start+cost
		if s.next >= 0 {
			arrives[s.next] = start + cost
		}
	}
	return starts, ends
}
