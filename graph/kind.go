package graph

import (
	"slices"

	"sppo.dev/ir"
)

// Layers of several kinds. All layers have one dataflow. What tells kinds apart is part of the size that work and shapes depend
// on: so far the window of attention.

// Kinds is the number of kinds of layers.
func (g *Model) Kinds() int { return len(g.kinds) }

// KindOf is the kind of a layer. Kinds are numbered in the order in which they appear.
func (g *Model) KindOf(layer int) int { return slices.Index(g.kinds, g.windowOf(layer)) }

// LayersOf is the number of layers of a kind.
func (g *Model) LayersOf(kind int) (n int) {
	for layer := range g.Layers {
		if g.KindOf(layer) == kind {
			n++
		}
	}
	return n
}

// FullKind is the kind of layers whose attention sees all earlier tokens, and -1 where there are none.
func (g *Model) FullKind() int { return slices.Index(g.kinds, 0) }

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
	s.Window = g.kinds[kind]
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

// findKinds lists the windows of layers.
func (g *Model) findKinds() {
	for layer := range g.Layers {
		if w := g.windowOf(layer); !slices.Contains(g.kinds, w) {
			g.kinds = append(g.kinds, w)
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
