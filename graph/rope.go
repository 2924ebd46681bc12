package graph

import (
	"math"
	"slices"

	"sppo.dev/ir"
	"sppo.dev/lang"
)

// What a layer does to queries and to keys before attention is one instruction: it turns them by their position, and multiplies queries
// where scores are to have another scale than 1/sqrt(head_dim).

// RotationQ and RotationK say whose rotation an attribute is.
const (
	RotationQ = "q"
	RotationK = "k"
)

// Rotations that have no number of their own.
const (
	plainNone  = -2 // nothing is turned, in no layer
	byLayer    = -1 // layers differ
	plainTheta = 0  // whole heads by theta
)

// rotation is the number that the rope instructions of all layers have, or one of the above.
func (g *Model) rotation(of string) int64 {
	numbers := g.turns[of]
	for _, n := range numbers {
		if n != numbers[0] {
			return byLayer
		}
	}
	return numbers[0]
}

// Rotation is the number of a layer's rotation where layers differ.
func (g *Model) Rotation(layer int, of string) int64 { return g.turns[of][layer] }

// findRotations lists what the layers need, each rotation once, and gives each layer the number of its own.
func (g *Model) findRotations() {
	g.turns = map[string][]int64{}
	for _, of := range []string{RotationK, RotationQ} {
		scale := 1.0
		if of == RotationQ {
			scale = queryScale(&g.Model)
		}
		for layer := range g.Layers {
			g.turns[of] = append(g.turns[of], g.rotationNumber(layer, scale))
		}
	}
}

// rotationNumber is the number of what a layer does to heads that are multiplied by a scale, too.
func (g *Model) rotationNumber(layer int, scale float64) int64 {
	turns, local := g.Rotates(layer), g.Local(layer)
	switch {
	case !turns && scale == 1 && len(g.PositionPattern) == 0:
		return plainNone
	case turns && scale == 1 && g.RopePartial == 1 && g.RopeScaling == lang.ScalingNone && !local:
		return plainTheta
	}
	r := ir.Rotation{Rates: []float64{}, Scale: scale, Rest: scale}
	if turns {
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

// queryScale is what queries are multiplied by, since attention divides scores by sqrt(head_dim).
func queryScale(m *lang.Model) float64 {
	scale := m.AttnScale * math.Sqrt(float64(m.HeadDim))
	if math.Abs(scale-1) < 1e-12 {
		return 1
	}
	return scale
}
