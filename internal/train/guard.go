package train

import (
	"math"
	"slices"
)

// guard is the leader's decision about which gradients a step accepts. It is made in advance, because all ranks
// must skip the same steps.
type guard struct {
	Skipped int64   // number of earlier steps that were skipped
	Limit   float32 // limit on the gradient norm; 0: none
}

// limit returns the value of ResultSpike.
func (g guard) limit() float32 {
	if g.Limit == 0 {
		return math.MaxFloat32
	}
	return g.Limit
}

// norms holds the gradient norms of the last steps that changed weights, oldest first. Checkpoints store them, so
// that a resumed run skips the same steps.
type norms []float32

// A median is meaningful only over a minimum number of norms, and old norms are not representative.
const fewestNorms, mostNorms = 10, 100

// with appends a norm.
func (n norms) with(x float32) norms {
	if len(n) >= mostNorms {
		n = n[len(n)-mostNorms+1:]
	}
	return append(slices.Clone(n), x)
}

// limit returns the largest norm that is not a spike: a multiple of the median. It returns 0 if there is no
// limit.
func (n norms) limit(spikes float64) float32 {
	if spikes <= 0 || len(n) < fewestNorms {
		return 0
	}
	sorted := slices.Sorted(slices.Values(n))
	return float32(min(spikes*float64(sorted[len(sorted)/2]), math.MaxFloat32))
}
