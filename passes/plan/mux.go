package plan

import (
	"slices"

	"sppo.dev/graph"
)

// Slot is where a task stands in the pipeline of equal tasks: those of a slot run at the same time.
type Slot struct {
	kind               TaskKind
	microbatch, number int
}

// SlotOf returns the slot of a task.
func SlotOf(t Task) Slot { return Slot{t.Kind, t.Microbatch, t.Slot()} }

// Shared reports whether the ranks of all stages share in a task's slot, so that they run it layer by layer together.
func (p *Plan) Shared(t Task) bool { return t.Slot() < p.SharedSlots() }

// SharedSlots is the number of slots, from the first on, that the ranks of all stages share.
func (p *Plan) SharedSlots() int {
	if !p.Mux.Left {
		return 0
	}
	return p.Parallel.PP - 1
}

// Runner is the pipeline rank that does a task: the one that has its stage, or the one that helps it.
func (p *Plan) Runner(t Task) int {
	if helper := t.Piece - 1; p.Shared(t) && helper > t.Slot() {
		return helper
	}
	return p.Home(t.Stage)
}

// helps reports whether a rank has a part of the tasks that a stage, another rank's, has in a shared slot. Those who do are the
// last, and their parts come behind the owner's, in the order of ranks.
func (p *Plan) helps(rank, stage, slot int) bool {
	return rank > stage && rank > slot && slot < p.Parallel.PP-1
}

// Begins reports whether a slot is the first, in the order of its pass, in which a rank helps a stage.
func (p *Plan) Begins(kind TaskKind, rank, stage, slot int) bool {
	before := slot - 1
	if kind == Backward {
		before = slot + 1
	}
	return p.helps(rank, stage, slot) && (before < stage || !p.helps(rank, stage, before))
}

// ParamSet is a set of a layer's parameters, a bit for each.
type ParamSet uint64

// paramsRead are the parameters that a layer reads in a pass.
func paramsRead(b *graph.Block, kind TaskKind) (set ParamSet) {
	nodes := b.Forward
	if kind == Backward {
		nodes = b.Backward
	}
	for i := range nodes {
		for _, a := range nodes[i].Args {
			if a.Value != graph.Missing && b.Values[a.Value].Kind == graph.Weight {
				set |= 1 << b.Values[a.Value].Param
			}
		}
	}
	return set
}

// Borrows are the parameters of the k-th layer of another rank's stage that a rank reads in its tasks on that stage: all that
// they have to be lent.
func (p *Plan) Borrows(g *graph.Model, kind TaskKind, rank, stage, k int) (set ParamSet) {
	for _, t := range p.Tasks[rank] {
		if t.Kind == kind && t.Stage == stage && t.Microbatch == 0 && p.Home(stage) != rank {
			set |= paramsRead(p.LayerOf(g, t, k), kind)
		}
	}
	return set
}

// Pieces are the tasks that a task is cut into: itself, where it is whole.
func (p *Plan) Pieces(t Task) []Task {
	if t.Subsequence >= len(p.Mux.Pieces) {
		return []Task{t}
	}
	tasks := make([]Task, len(p.Mux.Pieces[t.Subsequence]))
	for k := range tasks {
		tasks[k] = t
		tasks[k].Piece = k + 1
	}
	return tasks
}

// MostPieces is into how many a subsequence is cut at most, 0 where none is.
func (p *Plan) MostPieces() (most int) {
	for _, pieces := range p.Mux.Pieces {
		most = max(most, len(pieces))
	}
	return most
}

// SlotTasks are all tasks of a shared slot on all stages, in the order of stages and of the sequence, which a backward
// turns round.
func (p *Plan) SlotTasks(kind TaskKind, microbatch, slot int) []Task {
	var tasks []Task
	for i := range slot + 1 {
		tasks = append(tasks, p.Pieces(Task{Kind: kind, Microbatch: microbatch, Subsequence: slot - i, Stage: i})...)
	}
	if kind == Backward {
		slices.Reverse(tasks)
	}
	return tasks
}

// Sees reports whether a rank has a later part of the sequence than a task's to do on the task's stage: in the forward pass it
// then needs K and V of the task, in the backward pass it adds to their gradients.
func (p *Plan) Sees(rank int, t Task) bool { return p.SeesFrom(rank, t, p.Runner(t)) }

// SeesFrom is Sees for a task whose runner is known.
func (p *Plan) SeesFrom(rank int, t Task, runner int) bool {
	return rank == p.Home(t.Stage) || p.helps(rank, t.Stage, t.Slot()+1) || p.WaitsFor(rank, t, runner)
}

// WaitsFor reports whether a rank that helps a task's stage sees the task, which a runner does, in its own slot.
func (p *Plan) WaitsFor(rank int, t Task, runner int) bool {
	return p.helps(rank, t.Stage, t.Slot()) && rank > runner
}

// OwnTasks are the forwards of a stage from a subsequence on.
func (p *Plan) OwnTasks(microbatch, stage, first int) []Task {
	var tasks []Task
	for x := first; x < p.Subsequences.N; x++ {
		tasks = append(tasks, p.Pieces(Task{Kind: Forward, Microbatch: microbatch, Subsequence: x, Stage: stage})...)
	}
	return tasks
}

// Unshared is the plan of a validation: the forwards of the first microbatch, each on the rank that has its stage. Pieces
// stay pieces, since the ranks of a stage divide rows by them.
func (p *Plan) Unshared() *Plan {
	u := *p
	u.Mux.Left, u.Mux.Right = false, false
	u.Tasks = make([][]Task, p.Parallel.PP)
	for rank := range u.Tasks {
		u.Tasks[rank] = u.OwnTasks(0, rank, 0)
	}
	return &u
}
