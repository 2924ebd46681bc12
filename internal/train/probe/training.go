package probe

import (
	"fmt"
	"math"
)

// TrainingStep is the result of a training step.
type TrainingStep struct{ Loss, Norm float64 }

// TrainingTolerance returns the largest relative differences of the loss and of the gradient norm in a step, counted
// from 1, that rounding explains. Differences grow with the steps, fastest with bf16 weights.
func TrainingTolerance(step int, bf16 bool) (loss, norm float64) {
	switch {
	case bf16 && step > tightSteps:
		return 4e-2, 4e-1
	case bf16:
		return 2e-3, 1e-2
	case step > tightSteps:
		return 1e-3, 1e-2
	}
	return 1e-4, 1e-3
}

// tightSteps is the number of steps in which differences have not grown yet. Runs of that length must learn: their
// last loss is at most mostLoss of the first.
const (
	tightSteps = 20
	mostLoss   = 0.9
	farOff     = 1e6 // stands for larger differences, and for NaN
)

// SameTraining compares a run with the same run on the cpu device, step by step. The result is the largest difference
// divided by its tolerance. The error names the first step that exceeds a tolerance, or says that the run does not
// learn.
func SameTraining(got, want []TrainingStep, bf16 bool) (worst float64, err error) {
	if len(got) != len(want) || len(want) == 0 {
		return 0, fmt.Errorf("%d steps, want %d", len(got), len(want))
	}
	for i, w := range want {
		g := got[i]
		loss, norm := TrainingTolerance(i+1, bf16)
		off := max(math.Abs(g.Loss-w.Loss)/(loss*math.Abs(w.Loss)), math.Abs(g.Norm-w.Norm)/(norm*math.Abs(w.Norm)))
		if !(off <= 1) && err == nil { // also for NaN
			err = fmt.Errorf("step %d: loss %g and gradient norm %g instead of %g and %g", i+1, g.Loss, g.Norm, w.Loss, w.Norm)
		}
		if !(off <= farOff) {
			off = farOff
		}
		worst = max(worst, off)
	}
	if last := len(got) - 1; err == nil && last+1 >= tightSteps && !(got[last].Loss <= mostLoss*got[0].Loss) {
		err = fmt.Errorf("the loss did not fall: it was %g and is %g after %d steps", got[0].Loss, got[last].Loss, last+1)
	}
	return worst, err
}
