package train

import (
	"math"

	"sppo.dev/ir"
)

// learningRate returns the rate of step t, counted from 1. It rises linearly to LR during the warm-up, stays at
// LR, then falls to MinLR at the last step. It equals the rate that the corresponding scheduler of the
// transformers library reports after t steps.
func learningRate(run *ir.Run, t int64) float64 {
	warmup, steps := int64(run.Warmup), int64(run.Steps)
	decay, shape := decayOf(run)
	start := steps - decay
	switch {
	case t <= warmup:
		low := 0.0
		if run.LRSchedule == ir.LRStableDecay {
			low = run.MinLR
		}
		return low + (run.LR-low)*float64(t)/float64(warmup)
	case shape == nil || t <= start:
		return run.LR
	case t >= steps:
		return run.MinLR
	}
	return run.MinLR + (run.LR-run.MinLR)*shape(float64(t-start)/float64(decay))
}

// decayOf returns the number of steps, at the end of the run, during which the learning rate falls, and the
// curve: the fraction of LR-MinLR that remains after a given share of these steps. A constant rate has no
// curve.
func decayOf(run *ir.Run) (steps int64, shape func(share float64) float64) {
	steps, name := int64(run.Steps-run.Warmup), run.LRSchedule
	if name == ir.LRStableDecay {
		steps, name = int64(run.DecaySteps), run.DecayType
	}
	switch name {
	case "linear":
		return steps, func(share float64) float64 { return 1 - share }
	case "cosine":
		return steps, func(share float64) float64 { return 0.5 * (1 + math.Cos(math.Pi*share)) }
	case "sqrt":
		return steps, func(share float64) float64 { return 1 - math.Sqrt(share) }
	}
	return 0, nil
}

// stepParameters returns the contents of ResultStep for step t. Unless the step is skipped, it is update number
// `updates` of the weights, counted from 1.
func stepParameters(run *ir.Run, t, updates int64) [3]float32 {
	correction := func(beta float64) float32 { return float32(1 / (1 - math.Pow(beta, float64(updates)))) }
	return [3]float32{float32(learningRate(run, t)), correction(run.Beta1), correction(run.Beta2)}
}
