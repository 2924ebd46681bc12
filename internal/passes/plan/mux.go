package plan

import (
	"sppo.dev/internal/graph"
	"sppo.dev/internal/schedule"
	"sppo.dev/lang"
)

// Slot identifies a time slot of a pipeline. If all tasks take the same time, the tasks of one slot run at the
// same time.
type Slot struct {
	kind               TaskKind
	microbatch, number int
}

// SlotOf returns the slot of a task.
func SlotOf(t Task) Slot { return Slot{t.Kind, t.Microbatch, t.Slot()} }

// Shared reports whether the ranks of all stages share a task's slot, so that they run its tasks together,
// layer by layer.
func (p *Plan) Shared(t Task) bool { return t.Slot() < p.SharedSlots() }

// SharedSlots returns how many of the first slots the ranks of all stages share.
func (p *Plan) SharedSlots() int {
	if !p.Mux.Left {
		return 0
	}
	return p.Parallel.PP - 1
}

// Sharing returns the assignment of pieces to ranks in shared slots, which also determines the
// messages between ranks.
func (p *Plan) Sharing() schedule.Sharing {
	return schedule.Sharing{Ranks: p.Parallel.PP, Pieces: p.Mux.Pieces}
}

// Runner returns the pipeline rank that runs a task: the rank that has its stage, or a helper.
func (p *Plan) Runner(t Task) int {
	if p.Shared(t) {
		return p.Sharing().Runner(t)
	}
	return p.Home(t.Stage)
}

// ParamSet is a set of a layer's parameters, with one bit for each.
type ParamSet uint64

// ParamsRead returns the parameters that a layer reads in its forward or its backward.
func ParamsRead(b *graph.Block, kind TaskKind) (set ParamSet) {
	nodes := b.Forward
	if kind == Backward {
		nodes = b.Backward
	}
	return paramsOf(b, nodes)
}

// KVReads returns the parameters that a layer reads only to compute K and V.
func KVReads(b *graph.Block) ParamSet { return paramsOf(b, b.KVNodes) }

func paramsOf(b *graph.Block, nodes []graph.Node) (set ParamSet) {
	for i := range nodes {
		for _, a := range nodes[i].Args {
			if a.Value != graph.Missing && b.Values[a.Value].Kind == graph.Weight {
				set |= 1 << b.Values[a.Value].Param
			}
		}
	}
	return set
}

// Has reports whether a parameter is in the set.
func (s ParamSet) Has(param int) bool { return s>>param&1 == 1 }

// Borrows returns the parameters that a rank must receive for the k-th layer of another rank's stage, because
// its own tasks on that stage read them.
func (p *Plan) Borrows(g *graph.Model, kind TaskKind, rank, stage, k int) (set ParamSet) {
	for _, t := range p.Tasks[rank] {
		if t.Kind == kind && t.Stage == stage && t.Microbatch == 0 && p.Home(stage) != rank {
			set |= ParamsRead(p.LayerOf(g, t, k), kind)
		}
	}
	return set
}

// Pieces returns the pieces of a task, or the task itself if it is whole.
func (p *Plan) Pieces(t Task) []Task { return p.Sharing().CutInto(t) }

// MostPieces returns the largest number of pieces into which a subsequence is cut, or 0 if none is cut.
func (p *Plan) MostPieces() (most int) {
	for _, pieces := range p.Mux.Pieces {
		most = max(most, len(pieces))
	}
	return most
}

// OwnTasks returns the forwards of a stage for one microbatch, starting at the given subsequence.
func (p *Plan) OwnTasks(microbatch, stage, first int) []Task {
	var tasks []Task
	for x := first; x < p.Subsequences.N; x++ {
		tasks = append(tasks, p.Pieces(Task{Kind: Forward, Microbatch: microbatch, Subsequence: x, Stage: stage})...)
	}
	return tasks
}

// Unshared returns the plan that validation runs: the forwards of the first microbatch, each on the rank that
// has its stage. Subsequences stay cut into pieces, because the pieces determine how the ranks of a stage
// divide rows.
func (p *Plan) Unshared() *Plan {
	u := *p
	u.Mux.Left, u.Mux.Right = false, false
	u.Tasks = make([][]Task, p.Parallel.PP)
	for rank := range u.Tasks {
		u.Tasks[rank] = u.OwnTasks(0, rank, 0)
	}
	return &u
}

// Indivisible returns why stages cannot divide the subsequences of a model, as mux = left does, and what is possible instead. Both are
// empty if they can.
func Indivisible(m *lang.Model) (why, hint string) {
	switch {
	case m.LinearKeyHeads > 0:
		return "the states of linear attention pass from token to token", "mux = right or off"
	case m.RouterAuxLoss > 0:
		return "aux_loss counts the tokens of a whole sequence for each expert", "mux = right or off, or router_aux_loss_coef = 0"
	}
	return "", ""
}
