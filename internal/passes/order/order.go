// Package order implements the pass schedule: it orders the tasks of every pipeline rank.
//
// Input: Parallel, Subsequences. Output: Tasks. Paper: section 3. A stage runs s_0 .. s_{N-1} forward and
// then s_{N-1} .. s_0 backward, because gradients of K and V flow from later to earlier subsequences. Other
// strategies differ in how they interleave several sequences, and in whether weight gradients are separate
// tasks.
package order

import (
	"fmt"
	"slices"

	"sppo.dev/internal/passes/mux"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/passes/walk"
)

// Run orders the tasks according to the plan's strategy.
func Run(c *pass.Context, p *plan.Plan) error {
	c.Forget()
	strategy.Order(p)
	return nil
}

// Check checks that every task occurs exactly once on every stage, in an order that the dataflow
// allows, and that the orders of the stages do not deadlock.
func Check(_ *pass.Context, p *plan.Plan) error {
	if len(p.Tasks) != p.Parallel.PP {
		return fmt.Errorf("tasks are given for %d of %d stages", len(p.Tasks), p.Parallel.PP)
	}
	for rank, tasks := range p.Tasks {
		if p.Streams() && (p.Mux.Left || p.Mux.Right || slices.ContainsFunc(tasks, func(t plan.Task) bool { return t.Kind == plan.WeightGrad || t.Piece > 0 })) {
			return fmt.Errorf("tasks of stage %d: streaming K and V requires undivided tasks on this stage", rank)
		}
		err := checkRank(p, rank, tasks)
		if p.Mux.Left {
			err = checkSharedOrder(p, rank, tasks)
		}
		if err != nil {
			return fmt.Errorf("tasks of stage %d: %w", rank, err)
		}
	}
	return walk.Visit(p, func(int, plan.Task) {})
}

// checkRank checks the tasks of a rank that shares none.
func checkRank(p *plan.Plan, rank int, tasks []plan.Task) error {
	n, microbatches, v, split := p.Subsequences.N, p.Parallel.Microbatches, p.Parallel.VirtualStages, p.Splits(rank)
	if got, want := len(tasks)-len(split), 2*n*microbatches*v; got != want {
		return fmt.Errorf("the list has %d tasks, but forward and backward of %d subsequences of %d microbatches on %d virtual stages need %d", got, n, microbatches, v, want)
	}
	d := done{n, map[place]int{}, map[place]int{}, map[plan.Task]bool{}}
	for _, t := range tasks {
		if t.Microbatch < 0 || t.Microbatch >= microbatches || t.Subsequence < 0 || t.Subsequence >= n || t.Piece != 0 || t.Stage < 0 || t.Stage >= p.Parallel.Stages() {
			return fmt.Errorf("%s: there is no such microbatch, subsequence or virtual stage", t)
		}
		if home := p.Home(t.Stage); home != rank {
			return fmt.Errorf("%s: virtual stage %d belongs to stage %d", t, t.Stage, home)
		}
		if err := d.add(t, split[t]); err != nil {
			return err
		}
	}
	return nil
}

type place struct{ microbatch, stage int }

// done describes the tasks at the start of a rank's list.
type done struct {
	n                 int // number of subsequences
	forward, backward map[place]int
	open              map[plan.Task]bool // weight gradients that can be computed now
}

// add appends a task. It returns an error if the task cannot be the next. split reports whether another task computes
// its weight gradients.
func (d *done) add(t plan.Task, split bool) error {
	at := place{t.Microbatch, t.Stage}
	switch t.Kind {
	case plan.WeightGrad:
		if !d.open[t] {
			return fmt.Errorf("%s comes before %s or is repeated: weight gradients need the gradients of results", t, t.As(plan.Backward))
		}
		delete(d.open, t)
	case plan.Forward:
		if t.Subsequence != d.forward[at] {
			next := plan.Task{Kind: plan.Forward, Microbatch: t.Microbatch, Subsequence: d.forward[at], Stage: t.Stage}
			return fmt.Errorf("%s is out of order: %s must come next, because a forward reads K and V of all earlier subsequences", t, next)
		}
		d.forward[at]++
	case plan.Backward:
		if d.forward[at] < d.n || t.Subsequence != d.n-1-d.backward[at] {
			return fmt.Errorf("%s comes too early or is repeated: gradients of K and V flow from the last subsequence to the first", t)
		}
		d.backward[at]++
		if split {
			d.open[t.As(plan.WeightGrad)] = true
		}
	}
	return nil
}

// checkSharedOrder checks that shared tasks are in the only order possible for them.
func checkSharedOrder(p *plan.Plan, rank int, tasks []plan.Task) error {
	if err := plan.Plain(mux.Problems(p)); err != nil {
		return err
	}
	if err := mux.CheckPieces(p); err != nil {
		return err
	}
	want := mux.Order(p)[rank]
	for i := range max(len(want), len(tasks)) {
		if i >= len(tasks) || i >= len(want) || tasks[i] != want[i] {
			return fmt.Errorf("tasks from number %d on are %v, but mux needs %v", i, tasks[min(i, len(tasks)):], want[min(i, len(want)):])
		}
	}
	return nil
}
