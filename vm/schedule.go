package vm

import (
	"math"

	"sppo.dev/ir"
)

// learningRate returns the rate of step t, counted from 1: linear up to LR over the warm-up, then constant,
// or half a cosine down to MinLR at the last step.
func learningRate(run *ir.Run, t int64) float64 {
	warmup, steps := int64(run.Warmup), int64(run.Steps)
	switch {
	case t <= warmup:
		return run.LR * float64(t) / float64(warmup)
	case run.LRDecay != "cosine":
		return run.LR
	case t >= steps:
		return run.MinLR
	}
	share := float64(t-warmup) / float64(steps-warmup)
	return run.MinLR + 0.5*(run.LR-run.MinLR)*(1+math.Cos(math.Pi*share))
}

// stepParameters returns the contents of ResultStep for step t.
func stepParameters(run *ir.Run, t int64) [3]float32 {
	correction := func(beta float64) float32 { return float32(1 / (1 - math.Pow(beta, float64(t)))) }
	return [3]float32{float32(learningRate(run, t)), correction(run.Beta1), correction(run.Beta2)}
}
