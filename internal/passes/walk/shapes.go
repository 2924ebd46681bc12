package walk

import (
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// Shapes holds the sizes of a plan's subsequences on one rank, independent of the placement of saved tensors.
type Shapes struct {
	Model *graph.Model
	Sizes []graph.Size
	Saved [][][]ir.Bytes // [i][kind][unit]
}

// NewShapes computes the sizes of a plan whose subsequence lengths have been decided; g is its model on one
// rank.
func NewShapes(p *plan.Plan, g *graph.Model) *Shapes {
	s := &Shapes{Model: g, Sizes: p.Sizes()}
	for _, z := range s.Sizes {
		s.Saved = append(s.Saved, plan.UnitSizes(g, z))
	}
	return s
}
