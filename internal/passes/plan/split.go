package plan

import (
	"fmt"
	"slices"

	"sppo.dev/internal/graph"
)

// This file describes how the ranks of a stage share a layer.

// Split returns the part of the plan on which the dataflow of one rank depends.
func (p *Plan) Split() graph.Split {
	stream := graph.Stream{K: slices.Contains(p.Stream.Caches, "k"), V: slices.Contains(p.Stream.Caches, "v")}
	split := graph.Split{SP: p.Parallel.SP, Mode: p.Parallel.SPMode, Ring: p.Parallel.Ring, Spread: p.Parallel.ExpertParallel, Whole: p.Subsequences.N == 1, Stream: stream, Latents: p.Stream.Latents}
	data := p.Train.Data.Options
	split.Documents, split.Masked = data.Packs(), data.Marked()
	all, full := p.Model.AttentionLayers(p.Train.Sequence)
	split.Gathers = split.Chunks() > 0 && (split.Documents || p.Streams() || split.Latents || full < all)
	return split
}

// RowGrid returns the number by which the lengths of subsequences must be divisible, so that all
// ranks have the same number of rows.
func (p *Plan) RowGrid() int64 { return p.Split().Grid() }

// GridInWords describes RowGrid for messages.
func (p *Plan) GridInWords() string {
	if p.Split().Chunks() > 0 {
		return fmt.Sprintf("2 * sp = %d, the chunks of zigzag order", p.RowGrid())
	}
	return fmt.Sprintf("sp = %d", p.Parallel.SP)
}

// Graph builds the dataflow of the plan's model on one rank.
func (p *Plan) Graph() *graph.Model {
	return graph.NewTuned(p.Model, p.Train.Freeze, p.Split(), p.Train.Sequence)
}
