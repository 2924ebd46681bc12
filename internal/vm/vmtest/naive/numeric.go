package naive

import "math"

// NumericGrad differentiates f at x by central differences over five points. The error falls with the fourth
// power of the step: in float64, a smooth f of ordinary size gives about ten digits. x is unchanged on return.
func NumericGrad(f func(x []float64) float64, x []float64) []float64 {
	return NumericGradBy(2e-4, f, x)
}

// NumericGradBy is NumericGrad with another step, relative to the numbers of x that exceed 1. Near a kink, or where f is very curved,
// only a small one gives the derivative.
func NumericGradBy(relative float64, f func(x []float64) float64, x []float64) []float64 {
	grad := make([]float64, len(x))
	for i := range x {
		step := relative * math.Max(1, math.Abs(x[i]))
		at := func(steps float64) float64 {
			moved := append([]float64(nil), x...)
			moved[i] += steps * step
			return f(moved)
		}
		grad[i] = (8*(at(1)-at(-1)) - (at(2) - at(-2))) / (12 * step)
	}
	return grad
}
