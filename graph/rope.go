package graph

import (
	"math"

	"sppo.dev/ir"
	"sppo.dev/lang"
)

// The operation on queries and keys before attention is one instruction: it rotates them by their positions,
// and scales the queries if scores are to have another scale than 1/sqrt(head_dim).

// RotationQ and RotationK select the rotation of queries or of keys in an attribute.
const (
	RotationQ = "q"
	RotationK = "k"
)

// Rotations without a number of their own.
const (
	plainNone  = -2 // no layer rotates
	byLayer    = -1 // layers differ
	plainTheta = 0  // whole heads by theta
)

// rotation returns the rotation that the rope instructions of all layers have in common, or one of the
// constants above.
func (g *Model) rotation(of string) int64 {
	first := g.rotationOf(0, of)
	for l := range g.Layers {
		if g.rotationOf(l, of) != first {
			return byLayer
		}
	}
	return first
}

// Rotation returns the number of a layer's rotation if layers differ.
func (g *Model) Rotation(layer int, of string) int64 { return g.rotationOf(layer, of) }

// rotationOf finds what a layer needs among the rotations of the model.
func (g *Model) rotationOf(layer int, of string) int64 {
	turns, scale := g.Rotates(layer), 1.0
	if of == RotationQ {
		scale = queryScale(&g.Model)
	}
	switch {
	case !turns && scale == 1 && len(g.PositionPattern) == 0:
		return plainNone
	case turns && scale == 1 && isPlain(&g.Model):
		return plainTheta
	}
	for i, r := range g.Rotations {
		if r.Rest == scale && (len(r.Rates) > 0) == turns {
			return int64(i) + 1
		}
	}
	panic("internal: a layer without its rotation")
}

// rotationsOf returns the rotations that layers may need: with and without positions, for queries and for keys.
func rotationsOf(m *lang.Model, sequence int64) (list []ir.Rotation) {
	scales := []float64{1}
	if s := queryScale(m); s != 1 {
		scales = append(scales, s)
	}
	for _, scale := range scales {
		if m.Positions == lang.PositionsRope && !(scale == 1 && isPlain(m)) {
			list = append(list, ir.Rotation{Rates: m.Rates(sequence), Scale: scale * m.RopeAmplitude, Rest: scale})
		}
		if m.Positions != lang.PositionsRope && scale != 1 || len(m.PositionPattern) > 0 {
			list = append(list, ir.Rotation{Rates: []float64{}, Scale: scale, Rest: scale})
		}
	}
	return list
}

// isPlain reports whether positions rotate whole heads by powers of theta.
func isPlain(m *lang.Model) bool {
	return m.RopePartial == 1 && m.RopeScaling == lang.ScalingNone
}

// queryScale returns the factor for queries, since attention divides scores by sqrt(head_dim).
func queryScale(m *lang.Model) float64 {
	scale := m.AttnScale * math.Sqrt(float64(m.HeadDim))
	if math.Abs(scale-1) < 1e-12 {
		return 1
	}
	return scale
}
