package vm

import (
	"math"
	"slices"
)

// guard is what the leader decides of a step before it: all ranks must skip alike.
type guard struct {
	Skipped int64   // steps before that changed nothing
	Limit   float32 // of the gradient norm; 0: none
}

// limit returns the value of ResultSpike.
func (g guard) limit() float32 {
	if g.Limit == 0 {
		return math.MaxFloat32
	}
	return g.Limit
}

// norms are those of the last steps that changed weights, oldest first. Checkpoints keep them, so that a resumed run skips the same
// steps.
type norms []float32

// A median needs some norms before it says anything, and old ones say little of the present.
const fewestNorms, mostNorms = 10, 100

// with appends a norm.
func (n norms) with(x float32) norms {
	if len(n) >= mostNorms {
		n = n[len(n)-mostNorms+1:]
	}
	return append(slices.Clone(n), x)
}

// limit returns the largest norm that is no spike: a multiple of the median, or 0 where there is no limit.
func (n norms) limit(spikes float64) float32 {
	if spikes <= 0 || len(n) < fewestNorms {
		return 0
	}
	sorted := slices.Sorted(slices.Values(n))
	return float32(min(spikes*float64(sorted[len(sorted)/2]), math.MaxFloat32))
}
