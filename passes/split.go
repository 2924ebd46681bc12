package passes

import (
	"fmt"
	"slices"
	"strings"

	"sppo.dev/graph"
	"sppo.dev/lang"
)

// How the ranks of a stage share a layer.

// Split is the part of the plan that the dataflow of one rank depends on.
func (p *Plan) Split() graph.Split {
	stream := graph.Stream{K: slices.Contains(p.Stream.Caches, "k"), V: slices.Contains(p.Stream.Caches, "v")}
	return graph.Split{SP: p.Parallel.SP, Mode: p.Parallel.SPMode, Whole: p.Subsequences.N == 1, Stream: stream}
}

// rowGrid is what lengths of subsequences are multiples of, so that each rank has as many rows.
func (p *Plan) rowGrid() int64 { return p.Split().Grid() }

// gridInWords says why.
func (p *Plan) gridInWords() string {
	if p.Split().Chunks() > 0 {
		return fmt.Sprintf("2 * sp = %d, the chunks of zigzag order", p.rowGrid())
	}
	return fmt.Sprintf("sp = %d", p.Parallel.SP)
}

// Graph builds the dataflow of the plan's model on one rank.
func (p *Plan) Graph() *graph.Model {
	return graph.New(p.Model, p.Split(), p.Train.Sequence)
}

// solveSPMode takes the request; with one rank a stage the modes are the same.
func solveSPMode(p *Plan) {
	p.Parallel.SPMode = graph.ModeMegatron
	if why, ok := splitDocs[p.Schedule.SPMode]; ok {
		p.Parallel.SPMode = p.Schedule.SPMode
		p.decide("solve", "sp_mode", p.Schedule.SPMode, "given: "+why)
	}
}

// splitDocs are the reasons of modes other than the plainest.
var splitDocs = map[string]string{
	graph.ModeUlysses: "every rank holds the weights of a layer whole, and rows are exchanged for heads around attention",
	graph.ModeRing:    "every rank holds the weights of a layer whole and two chunks of each subsequence in zigzag order, and keys and values go round for attention",
}

// splitProblems are faults of the split of a layer over the ranks of a stage.
func splitProblems(p *Plan) []problem {
	var found []problem
	sp, m := p.Parallel.SP, p.Model
	if mode := p.Parallel.SPMode; mode != "" && !slices.Contains(graph.SPModes, mode) { // empty: megatron, in plans written before there was a choice
		return []problem{fault("schedule.sp_mode", lang.UnknownName, strings.Join(graph.SPModes, " or "), "there is no %q", mode)}
	}
	if p.Split().Chunks() > 0 {
		return ringProblems(p)
	}
	if m.Heads%sp != 0 {
		return append(found, fault("schedule.sp", lang.Indivisible, "sp = "+nearDivisors(m.Heads, sp)+", or sp_mode = ring", "%d heads do not divide by sp = %d", m.Heads, sp))
	}
	if m.KVHeads%sp != 0 && sp%m.KVHeads != 0 {
		found = append(found, fault("schedule.sp", lang.Indivisible, "kv_heads must divide sp or be divided by it; or sp_mode = ring",
			"%d key and value heads cannot be shared evenly by sp = %d", m.KVHeads, sp))
	}
	return found
}

// ringProblems are what else asks for K and V that ranks of a stage pass round, each with the nearest thing that does not.
func ringProblems(p *Plan) []problem {
	if p.Streams() {
		return []problem{fault("schedule.keep", lang.NotYet, "for now keep = [k, v], or sp_mode = ulysses", "a ring of K and V that stream from the host is not implemented yet")}
	}
	if m := p.Schedule.Mux; p.Mux.Left || p.Mux.Right || m == "on" || m == "left" || m == "right" {
		return []problem{fault("schedule.mux", lang.NotYet, "for now mux = off, or sp_mode = ulysses", "sharing the tasks of stages whose K and V go round is not implemented yet")}
	}
	return nil
}
