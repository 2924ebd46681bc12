// Package mux decides which tasks ranks share when stages would otherwise be idle: at the start of
// the pipeline and at its turnaround.
package mux

import (
	"fmt"

	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/lang"
)

// Run assigns parts of the tasks of busy stages to stages that are idle at the start of the pipeline or at its
// turnaround.
//
// Input: Parallel, Subsequences, Tasks. Output: Mux, Tasks. Paper: section 4.2. The fields Left, Steady and
// Right of a stage follow the table there, which needs at least as many subsequences as stages. The forward of
// subsequence x on stage i is in slot i + x of the forward pass, its backward in slot PP + N - 2 - (i + x) of
// the backward pass. If n stages are active in a slot before PP - 1, each idle stage takes 1/PP of every active
// task and each owner keeps n/PP, so that every rank does n/PP of a task's work. Every subsequence with such a
// task is cut by tokens into PP pieces, in the same way for all stages. In slot t the owner of a task runs the
// task's first t + 1 pieces, and each rank j > t runs the (j+1)-th, so that a helper keeps its piece from stage
// to stage until it owns the stage. The backward of a piece runs on the same rank as its forward, so
// activations are never sent. right.go handles the turnaround.
func Run(c *pass.Context, p *plan.Plan) error {
	Off(c, p)
	if !p.Schedule.SharesTasks() {
		p.Decide("mux", "mux", "off", "every stage runs its own tasks")
		return nil
	}
	if found := Share(p); len(found) > 0 {
		return c.Diagnose(found)
	}
	c.Forget()
	if !c.Candidate {
		p.Decide("mux", "mux", p.Schedule.Mux, "given")
	}
	return nil
}

// Share shares tasks as requested, or returns the reasons why this is impossible.
func Share(p *plan.Plan) []plan.Problem {
	if found := ShareProblems(p); len(found) > 0 {
		return found
	}
	left, right := wantsShared(p)
	if left {
		shareLeft(p)
	}
	if right {
		shareRight(p)
	}
	return nil
}

// ShareProblems returns the reasons why tasks cannot be shared as requested.
func ShareProblems(p *plan.Plan) []plan.Problem {
	if left, right := wantsShared(p); !left && !right {
		return nil
	}
	return Problems(p)
}

// wantsShared reports whether tasks at the start of the pipeline are shared or will be, and whether tasks at
// its turnaround are.
func wantsShared(p *plan.Plan) (left, right bool) {
	m := p.Schedule.Mux
	return p.Mux.Left || m == "left" || m == "on", p.Mux.Right || m == "right" || m == "on"
}

// shareLeft cuts the first subsequences into pieces and assigns their tasks.
func shareLeft(p *plan.Plan) {
	p.Mux.Left = true
	for x := range p.Parallel.PP - 1 {
		p.Mux.Pieces = append(p.Mux.Pieces, cut(p, x))
	}
	for i := range p.Parallel.PP - 1 {
		p.Mux.Stages[i].Applied = true
	}
	p.Tasks = Order(p)
}

// Off counts the tasks of each stage that are next to a bubble, and shares none of them.
func Off(_ *pass.Context, p *plan.Plan) {
	pp, n := p.Parallel.PP, p.Subsequences.N
	p.Mux = plan.Mux{Stages: make([]plan.MuxStage, pp)}
	for i := range p.Mux.Stages {
		s := plan.MuxStage{Steady: n, LeftRange: []int{}, RightRange: []int{}}
		if n >= pp {
			s.Left, s.Steady, s.Right = pp-1-i, n-(pp-1), i
			s.LeftRange, s.RightRange = stagesFromTo(i, pp-1), stagesFromTo(0, i)
		}
		p.Mux.Stages[i] = s
	}
}

// stagesFromTo lists a range of stages. The list is empty if the range is a single stage, which has no helper.
func stagesFromTo(first, last int) []int {
	out := []int{}
	for s := first; s <= last && first < last; s++ {
		out = append(out, s)
	}
	return out
}

// cut divides a shared subsequence into one piece for every stage, as evenly as the grid of SP allows.
func cut(p *plan.Plan, x int) []int64 {
	step, n := int64(p.Parallel.SP), int64(p.Parallel.PP)
	pieces, begin := make([]int64, n), int64(0)
	for k := range pieces {
		end := (p.Subsequences.Lengths[x]*int64(k+1) + step*n/2) / (step * n) * step
		pieces[k], begin = end-begin, end
	}
	return pieces
}

// Problems returns the reasons why a requested mux is impossible, each with the nearest possible values.
func Problems(p *plan.Plan) []plan.Problem {
	par, n := p.Parallel, p.Subsequences.N
	switch {
	case par.PP < 2:
		return []plan.Problem{plan.Fault("schedule.mux", lang.Infeasible, "mux = off, or pp of at least 2", "with a single stage, there is no other stage to share tasks with")}
	case p.Untrained > 0:
		return []plan.Problem{plan.Fault("schedule.mux", lang.Infeasible, "mux = off, or train the embedding",
			"%d layers have no backward tasks that other stages could share", p.Untrained)}
	case strategy.Of(p).Name != strategy.All[0].Name:
		return []plan.Problem{plan.Fault("schedule.mux", lang.Infeasible, "strategy = sppo, or mux = off", "mux fills the bubbles of a single sequence, which do not occur with strategy = %s", strategy.Of(p).Name)}
	case par.VirtualStages > 1:
		return []plan.Problem{plan.Fault("schedule.mux", lang.Infeasible, "virtual_stages = 1, or mux = off", "mux cannot be combined with %d virtual stages, because both fill the same bubbles", par.VirtualStages)}
	case n < par.PP:
		return []plan.Problem{plan.Fault("schedule.mux", lang.Infeasible, fmt.Sprintf("subsequences = %d, or mux = off", par.PP),
			"mux needs at least as many subsequences as stages, but there are %d for %d stages", n, par.PP)}
	}
	left, right := wantsShared(p)
	if _, full := p.Model.AttentionLayers(p.Train.Sequence); right && full == 0 {
		return []plan.Problem{plan.Fault("schedule.mux", lang.Infeasible, "mux = left or off", "mux = %s shares attention "+
			"over all earlier tokens, but every layer has a window", p.Schedule.Mux)}
	}
	if why, hint := plan.Indivisible(&p.Model); left && why != "" {
		return []plan.Problem{plan.Fault("schedule.mux", lang.Infeasible, hint, "mux = %s divides subsequences among stages, but %s", p.Schedule.Mux, why)}
	}
	if left {
		return leftProblems(p)
	}
	return nil
}

func leftProblems(p *plan.Plan) []plan.Problem {
	par := p.Parallel
	for x, tokens := range p.Subsequences.Lengths[:par.PP-1] {
		if least := int64(par.PP * par.SP); tokens < least {
			return []plan.Problem{plan.Fault("schedule.mux", lang.Infeasible, "fewer subsequences, or mux = off",
				"subsequence %d has %d tokens, but %d pieces for sp = %d need at least %d", x, tokens, par.PP, par.SP, least)}
		}
	}
	return nil
}

// Order returns the tasks of every rank when ranks share tasks: first the shared slots at the start, then the
// tasks of the rank's own stage; the backward pass mirrors this.
func Order(p *plan.Plan) [][]plan.Task {
	pp := p.Parallel.PP
	orders := make([][]plan.Task, pp)
	for m := range p.Parallel.Microbatches {
		forward := make([][]plan.Task, pp)
		for slot := range pp - 1 {
			for _, t := range p.Sharing().Tasks(plan.Forward, m, slot) {
				rank := p.Runner(t)
				forward[rank] = append(forward[rank], t)
			}
		}
		for rank := range orders {
			all := append(forward[rank], p.OwnTasks(m, rank, pp-1-rank)...)
			orders[rank] = append(append(orders[rank], all...), strategy.Mirrored(all)...)
		}
	}
	return orders
}

// Check checks that the counts of each stage add up to the number of subsequences, that exactly the stages with
// shared tasks are marked as such, and that blocks and pieces are valid.
func Check(_ *pass.Context, p *plan.Plan) error {
	if len(p.Mux.Stages) != p.Parallel.PP {
		return fmt.Errorf("mux is given for %d of %d stages", len(p.Mux.Stages), p.Parallel.PP)
	}
	for i, s := range p.Mux.Stages {
		if s.Left+s.Steady+s.Right != p.Subsequences.N {
			return fmt.Errorf("mux of stage %d covers %d of %d subsequences", i, s.Left+s.Steady+s.Right, p.Subsequences.N)
		}
		if s.Applied != (p.Mux.Left && i < p.Parallel.PP-1 || p.Mux.Right && i > 0) {
			return fmt.Errorf("mux of stage %d: applied is %t, left %t and right %t", i, s.Applied, p.Mux.Left, p.Mux.Right)
		}
	}
	if p.Mux.Left || p.Mux.Right {
		if err := plan.Plain(Problems(p)); err != nil {
			return err
		}
	}
	if err := checkBlocks(p); err != nil {
		return err
	}
	if p.Mux.Left {
		return CheckPieces(p)
	}
	if len(p.Mux.Pieces) > 0 {
		return fmt.Errorf("mux: the plan has pieces, but no task is shared")
	}
	return nil
}

// CheckPieces checks that every shared subsequence has one piece per stage, and that the pieces are
// on the grid of SP and add up to the subsequence.
func CheckPieces(p *plan.Plan) error {
	pp, sp := p.Parallel.PP, int64(p.Parallel.SP)
	if len(p.Mux.Pieces) != pp-1 {
		return fmt.Errorf("mux: pieces are given for %d subsequences, but %d are shared", len(p.Mux.Pieces), pp-1)
	}
	for x, pieces := range p.Mux.Pieces {
		if len(pieces) != pp {
			return fmt.Errorf("mux: subsequence %d has %d pieces for %d stages", x, len(pieces), pp)
		}
		sum := int64(0)
		for _, n := range pieces {
			if n < sp || n%sp != 0 {
				return fmt.Errorf("mux: a piece of subsequence %d has %d tokens, which is not a multiple of sp = %d", x, n, sp)
			}
			sum += n
		}
		if want := p.Subsequences.Lengths[x]; sum != want {
			return fmt.Errorf("mux: the pieces of subsequence %d add up to %d tokens, not %d", x, sum, want)
		}
	}
	return nil
}
