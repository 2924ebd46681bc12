package graph

import (
	"math"
	"slices"

	"sppo.dev/ir"
	"sppo.dev/lang"
)

// Before attention, a layer applies one instruction to queries and one to keys. The instruction
// rotates them according to their position, and multiplies queries by a factor if the scale of the
// scores is not 1/sqrt(head_dim).

// In an attribute, RotationQ selects the layer's rotation of queries, and RotationK that of keys.
const (
	RotationQ = "q"
	RotationK = "k"
)

// Special values for rotations that have no number.
const (
	plainNone  = -2 // no layer rotates
	byLayer    = -1 // layers differ
	plainTheta = 0  // whole heads are rotated with base theta
)

// rotation returns the number of the rotation that all layers have in common, or one of the values above.
func (g *Model) rotation(of string) int64 {
	numbers := g.rotationsOf[of]
	for _, n := range numbers {
		if n != numbers[0] {
			return byLayer
		}
	}
	return numbers[0]
}

// Rotation returns the number of a layer's rotation, for instructions of models whose layers differ.
func (g *Model) Rotation(layer int, of string) int64 { return g.rotationsOf[of][layer] }

// findRotations lists the distinct rotations of all layers, and gives each layer the number of its rotation.
func (g *Model) findRotations() {
	g.rotationsOf = map[string][]int64{}
	for _, of := range []string{RotationK, RotationQ} {
		scale := 1.0
		if of == RotationQ {
			scale = queryScale(&g.Model)
		}
		for layer := range g.Layers {
			g.rotationsOf[of] = append(g.rotationsOf[of], g.rotationNumber(layer, scale))
		}
	}
}

// rotationNumber returns the number of a layer's rotation. The rotation also multiplies heads by scale.
func (g *Model) rotationNumber(layer int, scale float64) int64 {
	rotates, local := g.Rotates(layer), g.Local(layer)
	switch {
	case !rotates && scale == 1 && len(g.PositionPattern) == 0:
		return plainNone
	case rotates && scale == 1 && g.RopePartial == 1 && g.RopeScaling == lang.ScalingNone && !local:
		return plainTheta
	}
	r := ir.Rotation{Rates: []float64{}, Scale: scale, Rest: scale}
	if rotates {
		r.Rates = g.Rates(layer, g.sequence)
		if !local {
			r.Scale = scale * g.RopeAmplitude
		}
	}
	same := func(x ir.Rotation) bool {
		return x.Scale == r.Scale && x.Rest == r.Rest && slices.Equal(x.Rates, r.Rates)
	}
	if !slices.ContainsFunc(g.Rotations, same) {
		g.Rotations = append(g.Rotations, r)
	}
	return int64(slices.IndexFunc(g.Rotations, same)) + 1
}

// queryScale returns the factor by which queries must be multiplied, given that attention divides scores by
// sqrt(head_dim).
func queryScale(m *lang.Model) float64 {
	scale := m.AttnScale * math.Sqrt(float64(m.HeadDim))
	if math.Abs(scale-1) < 1e-12 {
		return 1
	}
	return scale
}
