// Package order implements the pass schedule: it orders the tasks of every pipeline rank.
//
// Input: Parallel, Subsequences. Output: Tasks. Paper: section 3. A stage runs s_0 .. s_{N-1} forward and
// then s_{N-1} .. s_0 backward, because gradients of K and V flow from later to earlier subsequences. Other
// strategies differ in how they interleave several sequences, and in whether weight gradients are separate
// tasks.
package order

import (
	"errors"
	"fmt"
	"slices"

	"sppo.dev/internal/passes/mux"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/lang"
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
	for i, t := range tasks {
		if t.Microbatch < 0 || t.Microbatch >= microbatches || t.Subsequence < 0 || t.Subsequence >= n || t.Piece != 0 || t.Stage < 0 || t.Stage >= p.Parallel.Stages() {
			return fmt.Errorf("%s: there is no such microbatch, subsequence or virtual stage", t)
		}
		if home := p.Home(t.Stage); home != rank {
			return fmt.Errorf("%s: virtual stage %d belongs to stage %d", t, t.Stage, home)
		}
		if first, why := d.add(t, split[t]); why != "" {
			return &plan.Misplaced{Rank: rank, Index: i, Task: t, First: first, Why: why}
		}
	}
	return nil
}

// FileProblems returns a problem at the first task of a file that cannot run where the file has it.
func FileProblems(p *plan.Plan) []plan.Problem {
	file := p.Schedule.Tasks
	if file == nil {
		return nil
	}
	q := plan.Plan{Schedule: p.Schedule, LayersPerStage: make([]int, file.Stages)}
	q.Subsequences.N = p.Schedule.Subsequences.Count
	q.Parallel = plan.Parallel{PP: len(file.Ranks), VirtualStages: file.Stages / len(file.Ranks), Placement: strategy.Of(p).Placed, Microbatches: file.Microbatches / q.Subsequences.N}
	strategy.Order(&q)
	var wrong *plan.Misplaced
	if !errors.As(Check(nil, &q), &wrong) {
		return nil
	}
	name := strategy.Namer(&q)
	hint := fmt.Sprintf("move %s after %s", name(wrong.Task), name(wrong.First))
	if wrong.Stuck != (plan.Task{}) {
		hint = fmt.Sprintf("move %s before %s, on line %d, or %s further back", name(wrong.First), name(wrong.Stuck), q.Runner(wrong.First)+1, name(wrong.Task))
	}
	return []plan.Problem{plan.Fault(fmt.Sprintf("schedule.strategy[%d][%d]", wrong.Rank, wrong.Index), lang.BadSchedule, hint, "%s", wrong.Text(name))}
}

type place struct{ microbatch, stage int }

// done describes the tasks at the start of a rank's list.
type done struct {
	n                 int // number of subsequences
	forward, backward map[place]int
	open              map[plan.Task]bool // weight gradients that can be computed now
}

// add appends a task. If the task cannot be the next, add returns the task that must come first, if there is one, and why.
// split reports whether another task computes its weight gradients.
func (d *done) add(t plan.Task, split bool) (first plan.Task, why string) {
	at, first := place{t.Microbatch, t.Stage}, t
	next := d.n - 1 - d.backward[at] // the subsequence whose backward is next
	switch {
	case t.Kind == plan.Forward && t.Subsequence < d.forward[at], t.Kind == plan.Backward && t.Subsequence > next, t.Kind == plan.WeightGrad && t.Subsequence > next && !d.open[t]:
		return plan.Task{}, "it is repeated"
	case t.Kind == plan.Forward && t.Subsequence > d.forward[at]:
		first.Subsequence = d.forward[at]
		return first, "a forward reads K and V of all earlier subsequences"
	case t.Kind == plan.Forward:
		d.forward[at]++
	case t.Kind == plan.WeightGrad && !d.open[t]:
		return t.As(plan.Backward), "weight gradients need the gradients of results"
	case t.Kind == plan.WeightGrad:
		delete(d.open, t)
	case d.forward[at] < d.n:
		first.Kind, first.Subsequence = plan.Forward, d.n-1
		return first, "a backward needs the forwards of all subsequences"
	case t.Subsequence < next:
		first.Subsequence = next
		return first, "gradients of K and V flow from the last subsequence to the first"
	default:
		d.backward[at]++
		d.open[t.As(plan.WeightGrad)] = split
	}
	return plan.Task{}, ""
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
