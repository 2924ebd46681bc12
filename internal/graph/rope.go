package graph

import (
	"math"
	"reflect"
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
		r := ir.Rotation{Scale: 1, Rest: 1}
		if of == RotationQ {
			scale := queryScale(&g.Model)
			r = ir.Rotation{Scale: scale, Rest: scale, Beta: g.RopeBeta, Period: int64(g.RopeOriginal)}
		}
		for layer := range g.Layers {
			g.rotationsOf[of] = append(g.rotationsOf[of], g.rotationNumber(layer, r))
		}
	}
}

// rotationNumber returns the number of a layer's rotation, given its factors in layers that rotate without scaled frequencies.
func (g *Model) rotationNumber(layer int, r ir.Rotation) int64 {
	rotates, local := g.Rotates(layer), g.Local(layer)
	switch {
	case !rotates && r.Scale == 1 && len(g.PositionPattern) == 0:
		return plainNone
	case rotates && r.Scale == 1 && g.RopePartial == 1 && g.RopeScaling == lang.ScalingNone && !local:
		return plainTheta
	}
	r.Rates = []float64{}
	if rotates {
		r.Rates = g.Rates(layer, g.sequence)
		if !local {
			r.Scale *= g.RopeAmplitude
		}
	}
	if !rotates || r.Beta == 0 {
		r.Beta, r.Period = 0, 0
	}
	same := func(x ir.Rotation) bool { return reflect.DeepEqual(x, r) }
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
