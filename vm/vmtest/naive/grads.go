package naive

import "math"

// LayerNormGrad returns the gradients of LayerNorm. With xhat the normalised row and g = dy*gamma, dx = rstd * (g
// - mean(g) - xhat*mean(g*xhat)).
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

// RopeGrad rotates backwards: the inverse of a rotation is its transpose.
func RopeGrad(dy []float64, batch, heads, headDim, prefix int, r Rotation) []float64 {
	return rotate(dy, batch, heads, headDim, prefix, r, -1)
}

// AttentionGrad returns the gradients of Attention, given its result out. With p a query's weights, dp = dout*v^T
// and ds = p * (dp - sum(p*dp)), where sum(p*dp) = dout*out^T = delta.
func AttentionGrad(q, k, v, out, dout []float64, s AttentionShape) (dq, dk, dv []float64) {
	_, logSumExp := attentionWeights(q, k, s)
	delta := make([]float64, len(logSumExp))
	for i := range q {
		delta[i/s.HeadDim] += dout[i] * out[i]
	}
	return attentionGrad(q, k, v, dout, logSumExp, delta, s, func(term float64) float64 { return term })
}

// AttentionGradTerms returns the sums of the absolute values of the terms p*dout, ds*k and ds*q that AttentionGrad
// sums. logSumExp and delta may cover more keys than these.
func AttentionGradTerms(q, k, v, dout, logSumExp, delta []float64, s AttentionShape) (dq, dk, dv []float64) {
	return attentionGrad(q, k, v, dout, logSumExp, delta, s, math.Abs)
}

func attentionGrad(q, k, v, dout, logSumExp, delta []float64, s AttentionShape, of func(term float64) float64) (dq, dk, dv []float64) {
	dq, dk, dv = make([]float64, len(q)), make([]float64, len(k)), make([]float64, len(v))
	s.each(func(t, b, h, row int) {
		query := s.query(t, b, h)
		for u, score := range s.scores(q, k, t, b, h) {
			p, key, dp := math.Exp(score-logSumExp[row]), s.key(u, b, h), 0.0
			for d := range s.HeadDim {
				dp += dout[query+d] * v[key+d]
				dv[key+d] += of(p * dout[query+d])
			}
			if math.IsInf(score, -1) { // masked
				continue
			}
			ds := SoftcapGrad([]float64{score}, []float64{p * (dp - delta[row])}, s.Softcap)[0] / math.Sqrt(float64(s.HeadDim))
			for d := range s.HeadDim {
				dq[query+d] += of(ds * k[key+d])
				dk[key+d] += of(ds * q[query+d])
			}
		}
	})
	return dq, dk, dv
}

// ActivateGrad returns the gradient of Activate.
func ActivateGrad(function string, x, dy []float64) []float64 {
	dx := make([]float64, len(x))
	for i, v := range x {
		slope := 0.0
		switch function {
		case "gelu":
			slope = normalCDF(v) + v*math.Exp(-v*v/2)/math.Sqrt(2*math.Pi)
		case "gelu_tanh":
			tanh := geluTanh(v)
			slope = 0.5*(1+tanh) + 0.5*v*(1-tanh*tanh)*math.Sqrt(2/math.Pi)*(1+3*geluCubic*v*v)
		case "silu":
			slope = sigmoid(v) + v*sigmoid(v)*(1-sigmoid(v))
		case "relu2":
			slope = 2 * math.Max(v, 0)
		default:
			demand(false, "function %q", function)
		}
		dx[i] = dy[i] * slope
	}
	return dx
}

// GLUGrad returns the gradients of GLU.
func GLUGrad(function string, gate, up, dy []float64) (dgate, dup []float64) {
	return ActivateGrad(function, gate, times(dy, up)), times(dy, Activate(function, gate))
}

// SoftcapGrad returns the gradient of Softcap, given its result y.
func SoftcapGrad(y, dy []float64, limit float64) []float64 {
	if limit == 0 {
		return dy
	}
	dx := make([]float64, len(y))
	for i, v := range y {
		dx[i] = dy[i] * (1 - v/limit*v/limit)
	}
	return dx
}

// EmbedGrad returns the gradient of Embed with respect to its table, which holds tokens first .. first+rows-1.
func EmbedGrad(tokens []int32, dy []float64, hidden, first, rows int) []float64 {
	dtable := make([]float64, rows*hidden)
	for row, token := range tokens {
		if at := int(token) - first; at >= 0 && at < rows {
			addTo(dtable[at*hidden:][:hidden], dy[row*hidden:][:hidden])
		}
	}
	return dtable
}

// CrossEntropyGrad returns the gradient of scale * (sum of the rows' losses) with respect to logits over a part of
// the vocabulary, laid out as for CrossEntropyStats. It is softmax, minus one at the label, and 0 for padding and
// for rows with a negative label. logSumExp is that of whole rows.
func CrossEntropyGrad(logits []float64, labels []int32, logSumExp []float64, width, valid, first int, scale float64) []float64 {
	dlogits := make([]float64, len(logits))
	for i, value := range logits {
		row, column := i/width, i%width
		if column >= valid || labels[row] < 0 {
			continue
		}
		dlogits[i] = scale * math.Exp(value-logSumExp[row])
		if int(labels[row])-first == column {
			dlogits[i] -= scale
		}
	}
	return dlogits
}
