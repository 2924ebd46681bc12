package naive

import "math"

// Plus returns a vector with a number added to each element.
func Plus(x []float64, offset float64) []float64 {
	y := make([]float64, len(x))
	for i := range x {
		y[i] = x[i] + offset
	}
	return y
}

// LayerNorm (Ba et al., 2016) normalises every row to mean 0 and variance 1, then scales and shifts each
// column. Rows are as wide as gamma. The variance is the sum of squared deviations divided by the width, not by
// the width minus 1.
func LayerNorm(x, gamma, beta []float64, eps float64) []float64 {
	y := make([]float64, len(x))
	for start := 0; start < len(x); start += len(gamma) {
		row := x[start:][:len(gamma)]
		mean, rstd := Moments(row, eps)
		for i := range row {
			y[start+i] = (row[i]-mean)*rstd*gamma[i] + beta[i]
		}
	}
	return y
}

// LayerNormGrad returns the gradients of LayerNorm. With xhat the normalised row and g = dy*gamma, dx = rstd *
// (g - mean(g) - xhat*mean(g*xhat)).
func LayerNormGrad(x, gamma, dy []float64, eps float64) (dx, dgamma, dbeta []float64) {
	width := len(gamma)
	dx, dgamma = make([]float64, len(x)), make([]float64, width)
	for start := 0; start < len(x); start += width {
		row := x[start:][:width]
		mean, rstd := Moments(row, eps)
		meanG, meanGX := 0.0, 0.0
		for i := range row {
			xhat, g := (row[i]-mean)*rstd, dy[start+i]*gamma[i]
			meanG += g / float64(width)
			meanGX += g * xhat / float64(width)
			dgamma[i] += dy[start+i] * xhat
		}
		for i := range row {
			xhat, g := (row[i]-mean)*rstd, dy[start+i]*gamma[i]
			dx[start+i] = rstd * (g - meanG - xhat*meanGX)
		}
	}
	return dx, dgamma, columnSums(dy, width)
}

// Moments returns a row's mean and the reciprocal of its standard deviation.
func Moments(row []float64, eps float64) (mean, rstd float64) {
	n := float64(len(row))
	for _, value := range row {
		mean += value / n
	}
	variance := 0.0
	for _, value := range row {
		variance += (value - mean) * (value - mean) / n
	}
	return mean, 1 / math.Sqrt(variance+eps)
}

// RMSNorm (Zhang and Sennrich, 2019) divides every row by its root mean square, then scales each column.
func RMSNorm(x, gamma []float64, eps float64) []float64 {
	y := make([]float64, len(x))
	for start := 0; start < len(x); start += len(gamma) {
		row := x[start:][:len(gamma)]
		r := ReciprocalRMS(row, eps)
		for i := range row {
			y[start+i] = row[i] * r * gamma[i]
		}
	}
	return y
}

// RMSNormGrad returns the gradients of RMSNorm: LayerNorm's formula without the terms that come from centring.
func RMSNormGrad(x, gamma, dy []float64, eps float64) (dx, dgamma []float64) {
	width := len(gamma)
	dx, dgamma = make([]float64, len(x)), make([]float64, width)
	for start := 0; start < len(x); start += width {
		row := x[start:][:width]
		r := ReciprocalRMS(row, eps)
		meanGX := 0.0
		for i := range row {
			meanGX += dy[start+i] * gamma[i] * row[i] * r / float64(width)
			dgamma[i] += dy[start+i] * row[i] * r
		}
		for i := range row {
			dx[start+i] = r * (dy[start+i]*gamma[i] - row[i]*r*meanGX)
		}
	}
	return dx, dgamma
}

// ReciprocalRMS returns the reciprocal of a row's root mean square.
func ReciprocalRMS(row []float64, eps float64) float64 {
	sum := 0.0
	for _, value := range row {
		sum += value * value
	}
	return 1 / math.Sqrt(sum/float64(len(row))+eps)
}
