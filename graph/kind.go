package graph

import (
	"slices"

	"sppo.dev/ir"
)

// Layers of several kinds. All layers have one forward dataflow. What tells kinds apart is the window of attention, which is part of
// the size that work and shapes depend on, and the role, which says how much of the backward dataflow there is.

// kind is what layers have in common that take equally long and hold equally many bytes.
type kind struct {
	window int64
	role   *role
}

func (g *Model) kindOf(layer int) kind { return kind{g.windowOf(layer), g.roles[layer]} }

// Kinds is the number of kinds of layers.
func (g *Model) Kinds() int { return len(g.kinds) }

// KindOf is the kind of a layer. Kinds are numbered in the order in which they appear.
func (g *Model) KindOf(layer int) int {
	if len(g.kinds) == 1 {
		return 0
	}
	return slices.Index(g.kinds, g.kindOf(layer))
}

// LayerOf is the dataflow of the layers of a kind, which makes no unit again.
func (g *Model) LayerOf(kind int) *Block { return g.kinds[kind].role.block }

// Saves returns the units that layers of a kind may keep for their backward pass.
func (g *Model) Saves(kind int) Units { return g.kinds[kind].role.saved }

// Remakes returns the units of these that they may recompute instead.
func (g *Model) Remakes(kind int) Units { return g.kinds[kind].role.remade }

// LayersOf is the number of layers of a kind.
func (g *Model) LayersOf(kind int) (n int) {
	for layer := range g.Layers {
		if g.KindOf(layer) == kind {
			n++
		}
	}
	return n
}

// FullKind is the first kind of layers whose attention sees all earlier tokens, and -1 where there are none.
func (g *Model) FullKind() int {
	return slices.IndexFunc(g.kinds, func(k kind) bool { return k.window == 0 })
}

// Full reports whether attention of a layer sees all earlier tokens.
func (g *Model) Full(layer int) bool { return g.windowOf(layer) == 0 }

// Mean is the mean over layers of what each takes, by kinds.
func (g *Model) Mean(of func(kind int) ir.Seconds) ir.Seconds {
	if len(g.kinds) == 1 {
		return of(0)
	}
	var sum ir.Seconds
	for kind := range g.kinds {
		sum += ir.Seconds(g.LayersOf(kind)) * of(kind)
	}
	return sum / ir.Seconds(g.Layers)
}

// OfKind is a size for layers of a kind.
func (g *Model) OfKind(s Size, kind int) Size {
	s.Window = g.kinds[kind].window
	return s
}

// OfLayer is a size for a layer.
func (g *Model) OfLayer(s Size, layer int) Size {
	s.Window = g.windowOf(layer)
	return s
}

// windowOf is the window of a layer; 0 also where it covers the sequence.
func (g *Model) windowOf(layer int) int64 {
	if w := g.WindowOf(layer); w < g.sequence {
		return w
	}
	return 0
}

// findKinds lists the kinds of layers.
func (g *Model) findKinds() {
	for layer := range g.Layers {
		if k := g.kindOf(layer); !slices.Contains(g.kinds, k) {
			g.kinds = append(g.kinds, k)
		}
	}
}

// Earliest is the first token that attention of a subsequence sees.
func (s Size) Earliest() int64 {
	if s.Window == 0 {
		return 0
	}
	return max(0, s.Prefix-s.Window+1)
}
