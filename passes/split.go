package passes

import (
	"slices"

	"sppo/graph"
	"sppo/lang"
)

// How the ranks of a stage share a layer.

// Split is the part of the plan that the dataflow of one rank depends on.
func (p *Plan) Split() graph.Split {
	stream := graph.Stream{K: slices.Contains(p.Stream.Caches, "k"), V: slices.Contains(p.Stream.Caches, "v")}
	return graph.Split{SP: p.Parallel.SP, Mode: p.Parallel.SPMode, Whole: p.Subsequences.N == 1, Stream: stream}
}

// Graph builds the dataflow of the plan's model on one rank.
func (p *Plan) Graph() *graph.Model {
	return graph.New(p.Model, p.Split(), p.Train.Sequence)
}

// solveSPMode takes the request; with one rank a stage the modes are the same.
func solveSPMode(p *Plan) {
	p.Parallel.SPMode = graph.ModeMegatron
	if p.Schedule.SPMode != graph.ModeUlysses {
		return
	}
	p.Parallel.SPMode = graph.ModeUlysses
	p.decide("solve", "sp_mode", graph.ModeUlysses, "given: every rank holds the weights of a layer whole, and rows are exchanged for heads around attention")
}

// splitProblems are faults of the split of a layer over the ranks of a stage.
func splitProblems(p *Plan) []problem {
	var found []problem
	sp, m := p.Parallel.SP, p.Model
	switch p.Parallel.SPMode {
	case "", graph.ModeMegatron, graph.ModeUlysses: // empty: megatron, in plans written before there was a choice
	default:
		found = append(found, fault("schedule.sp_mode", lang.UnknownName, graph.ModeMegatron+" or "+graph.ModeUlysses, "there is no %q", p.Parallel.SPMode))
	}
	if m.Heads%sp != 0 {
		return append(found, fault("schedule.sp", lang.Indivisible, "sp = "+nearDivisors(m.Heads, sp), "%d heads do not divide by sp = %d", m.Heads, sp))
	}
	if m.KVHeads%sp != 0 && sp%m.KVHeads != 0 {
		found = append(found, fault("schedule.sp", lang.Indivisible, "kv_heads must divide sp or be divided by it",
			"%d key and value heads cannot be shared evenly by sp = %d", m.KVHeads, sp))
	}
	return found
}
