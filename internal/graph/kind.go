package graph

import (
	"slices"

	"sppo.dev/ir"
)

// Kinds of layers. All layers have the same forward dataflow. Kinds differ in the attention window, which is a
// field of Size, and in the role, which defines the part of the backward dataflow that a layer needs.

// kind is a set of layers that take the same time and the same amount of memory.
type kind struct {
	window int64
	role   *role
}

func (g *Model) kindOf(layer int) kind { return kind{g.windowOf(layer), g.roles[layer]} }

// Kinds returns the number of kinds of layers.
func (g *Model) Kinds() int { return len(g.kinds) }

// KindOf returns the kind of a layer. Kinds are numbered in the order in which they first appear.
func (g *Model) KindOf(layer int) int {
	if len(g.kinds) == 1 {
		return 0
	}
	return slices.Index(g.kinds, g.kindOf(layer))
}

// LayerOf returns the dataflow of the layers of the given kind, without recomputation.
func (g *Model) LayerOf(kind int) *Block { return g.kinds[kind].role.block }

// Saves returns the units that layers of the given kind may keep for their backward pass.
func (g *Model) Saves(kind int) Units { return g.kinds[kind].role.saved }

// Remakes returns the units of Saves that layers of this kind may recompute instead of saving.
func (g *Model) Remakes(kind int) Units { return g.kinds[kind].role.recomputed }

// LayersOf returns the number of layers of the given kind.
func (g *Model) LayersOf(kind int) (n int) {
	for layer := range g.Layers {
		if g.KindOf(layer) == kind {
			n++
		}
	}
	return n
}

// FullKind returns the first kind of layer that has no window, or -1 if there is none.
func (g *Model) FullKind() int {
	return slices.IndexFunc(g.kinds, func(k kind) bool { return k.window == 0 })
}

// Full reports whether a layer has no window.
func (g *Model) Full(layer int) bool { return g.windowOf(layer) == 0 }

// Mean returns the mean, over all layers, of a value that depends only on the layer's kind.
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

// OfKind returns s with the attention window of layers of the given kind.
func (g *Model) OfKind(s Size, kind int) Size {
	s.Window = g.kinds[kind].window
	return s
}

// OfLayer returns s with the attention window of a layer.
func (g *Model) OfLayer(s Size, layer int) Size {
	s.Window = g.windowOf(layer)
	return s
}

// windowOf returns the window of a layer, or 0 if there is none or it covers the sequence.
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

// Earliest returns the first token that any query of a subsequence attends to.
func (s Size) Earliest() int64 {
	if s.Window == 0 {
		return 0
	}
	return max(0, s.Prefix-s.Window+1)
}
