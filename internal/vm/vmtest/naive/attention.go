package naive

import "math"

// AttentionShape is the shape of causal attention from Queries tokens that follow a prefix of Prefix tokens.
// Queries are [Queries*Batch, Heads*HeadDim]. Keys and values, starting with those of the prefix, are
// [Keys*Batch, KVHeads*HeadDim], or KVHeads*ValueDim in the case of values; Keys is their number of tokens per sequence, or 0 for all Prefix+Queries.
// Heads share keys and values in groups of consecutive heads (Ainslie et al., 2023). A query sees the last
// Window keys up to its own position, or all of them if Window is 0. If Positions is set, to each query's
// position in its document, a query sees only keys of its own document. Softcap is the limit that the function
// Softcap applies to the scores.
type AttentionShape struct {
	Queries, Prefix, Batch, Heads, KVHeads, HeadDim, Keys, Window int
	ValueDim                                                      int // of heads of values, if it is not HeadDim
	Softcap                                                       float64
	Positions                                                     []int32 // [Queries*Batch]
}

// Values returns the width of a head of values.
func (s AttentionShape) Values() int {
	if s.ValueDim > 0 {
		return s.ValueDim
	}
	return s.HeadDim
}

// Seen returns the index after the last key that query t sees.
func (s AttentionShape) Seen(t int) int {
	if s.Keys == 0 {
		return s.Prefix + t + 1
	}
	return min(s.Keys, s.Prefix+t+1)
}

// query returns the index at which head h of query t in sequence b starts; key returns the index of the key
// head that h reads.
func (s AttentionShape) query(t, b, h int) int { return s.row(t, b, h) * s.HeadDim }
func (s AttentionShape) key(t, b, h int) int   { return s.keyRow(t, b, h) * s.HeadDim }

// out and value return the same for o and values.
func (s AttentionShape) out(t, b, h int) int   { return s.row(t, b, h) * s.Values() }
func (s AttentionShape) value(t, b, h int) int { return s.keyRow(t, b, h) * s.Values() }

func (s AttentionShape) row(t, b, h int) int { return (t*s.Batch+b)*s.Heads + h }
func (s AttentionShape) keyRow(t, b, h int) int {
	return (t*s.Batch+b)*s.KVHeads + h/(s.Heads/s.KVHeads)
}

// Attention returns softmax(Softcap(q*k^T / sqrt(HeadDim))) * v over the keys that each query sees (Vaswani et
// al., 2017), and the logarithm of every softmax's denominator, [Queries*Batch, Heads].
func Attention(q, k, v []float64, s AttentionShape) (out, logSumExp []float64) {
	weights, logSumExp := attentionWeights(q, k, s)
	out = make([]float64, len(q)/s.HeadDim*s.Values())
	s.each(func(t, b, h, row int) {
		to := out[s.out(t, b, h):][:s.Values()]
		for u, p := range weights[row] {
			for d, x := range v[s.value(u, b, h):][:len(to)] {
				to[d] += p * x
			}
		}
	})
	return out, logSumExp
}

// AttentionGrad returns the gradients of Attention, given its results, to which AttentionSink may have been applied. With p a query's weights, dp =
// dout*v^T and ds = p * (dp - sum(p*dp)), where sum(p*dp) = dout*out^T = delta.
func AttentionGrad(q, k, v, out, logSumExp, dout []float64, s AttentionShape) (dq, dk, dv []float64) {
	delta := make([]float64, len(logSumExp))
	for i := range out {
		delta[i/s.Values()] += dout[i] * out[i]
	}
	return attentionGrad(q, k, v, dout, logSumExp, delta, s, addScaled)
}

// AttentionSink returns the results of Attention after one more key, with the score sinks[h] and the value 0, has been
// added to the softmax of every query of head h.
func AttentionSink(out, logSumExp, sinks []float64, headDim int) (sunk, sunkLogSumExp []float64) {
	for row, lse := range logSumExp {
		joined := logOfSumOfExp([]float64{lse, sinks[row%len(sinks)]})
		sunkLogSumExp = append(sunkLogSumExp, joined)
		for _, x := range out[row*headDim : (row+1)*headDim] {
			sunk = append(sunk, x*math.Exp(lse-joined))
		}
	}
	return sunk, sunkLogSumExp
}

// AttentionSinkGrad returns the gradient of the sinks, given the results of AttentionSink and the gradient of out.
// A sink's share p of a softmax gets the gradient p * (0 - delta), as the key of a value 0 does in AttentionGrad.
func AttentionSinkGrad(out, logSumExp, sinks, dout []float64, headDim int) []float64 {
	dsinks := make([]float64, len(sinks))
	for i := range out {
		row := i / headDim
		dsinks[row%len(sinks)] -= math.Exp(sinks[row%len(sinks)]-logSumExp[row]) * dout[i] * out[i]
	}
	return dsinks
}

// AttentionTerms returns the sums of the absolute values of the terms p*v that Attention sums. logSumExp may
// cover more keys than k holds.
func AttentionTerms(q, k, v, logSumExp []float64, s AttentionShape) []float64 {
	terms := make([]float64, len(q)/s.HeadDim*s.Values())
	s.each(func(t, b, h, row int) {
		for u, score := range s.scores(q, k, t, b, h) {
			if math.IsInf(score, -1) { // masked
				continue
			}
			p, to := math.Exp(score-logSumExp[row]), terms[s.out(t, b, h):][:s.Values()]
			for d, x := range v[s.value(u, b, h):][:len(to)] {
				to[d] += p * math.Abs(x)
			}
		}
	})
	return terms
}

// AttentionGradTerms returns the sums of the absolute values of the terms p*dout, ds*k and ds*q that
// AttentionGrad sums. logSumExp and delta may cover more keys than k holds.
func AttentionGradTerms(q, k, v, dout, logSumExp, delta []float64, s AttentionShape) (dq, dk, dv []float64) {
	return attentionGrad(q, k, v, dout, logSumExp, delta, s, addSizes)
}

// addScaled adds a times every element of x to sum; addSizes adds the absolute values of these products.
func addScaled(sum []float64, a float64, x []float64) {
	for i, x := range x[:len(sum)] {
		sum[i] += a * x
	}
}

func addSizes(sum []float64, a float64, x []float64) {
	for i, x := range x[:len(sum)] {
		sum[i] += math.Abs(a * x)
	}
}

func attentionGrad(q, k, v, dout, logSumExp, delta []float64, s AttentionShape, add func(sum []float64, a float64, x []float64)) (dq, dk, dv []float64) {
	dq, dk, dv = make([]float64, len(q)), make([]float64, len(k)), make([]float64, len(v))
	s.each(func(t, b, h, row int) {
		query, out := s.query(t, b, h), dout[s.out(t, b, h):][:s.Values()]
		for u, score := range s.scores(q, k, t, b, h) {
			p, key, value, dp := math.Exp(score-logSumExp[row]), s.key(u, b, h), s.value(u, b, h), 0.0
			for d, x := range v[value:][:len(out)] {
				dp += out[d] * x
			}
			add(dv[value:][:len(out)], p, out)
			if math.IsInf(score, -1) { // masked
				continue
			}
			ds := SoftcapGrad([]float64{score}, []float64{p * (dp - delta[row])}, s.Softcap)[0] / math.Sqrt(float64(s.HeadDim))
			add(dq[query:][:s.HeadDim], ds, k[key:])
			add(dk[key:][:s.HeadDim], ds, q[query:])
		}
	})
	return dq, dk, dv
}

// each visits every query of every head, with its row in logSumExp.
func (s AttentionShape) each(visit func(t, b, h, row int)) {
	for t := range s.Queries {
		for b := range s.Batch {
			for h := range s.Heads {
				visit(t, b, h, (t*s.Batch+b)*s.Heads+h)
			}
		}
	}
}

// scores returns a query's scores for the keys up to its position: minus infinity for keys outside its window
// or document.
func (s AttentionShape) scores(q, k []float64, t, b, h int) []float64 {
	scores := make([]float64, s.Seen(t))
	query, root := q[s.query(t, b, h):][:s.HeadDim], math.Sqrt(float64(s.HeadDim))
	for u := range scores {
		if s.Window > 0 && u <= s.Prefix+t-s.Window || s.Positions != nil && u < s.Prefix+t-int(s.Positions[t*s.Batch+b]) {
			scores[u] = math.Inf(-1)
			continue
		}
		product := 0.0
		for d, x := range k[s.key(u, b, h):][:len(query)] {
			product += query[d] * x
		}
		scores[u] = Softcap([]float64{product / root}, s.Softcap)[0]
	}
	return scores
}

// attentionWeights returns every query's softmax over the keys up to its position.
func attentionWeights(q, k []float64, s AttentionShape) (weights [][]float64, logSumExp []float64) {
	rows := s.Queries * s.Batch * s.Heads
	weights, logSumExp = make([][]float64, rows), make([]float64, rows)
	s.each(func(t, b, h, row int) {
		scores := s.scores(q, k, t, b, h)
		logSumExp[row] = logOfSumOfExp(scores)
		for u := range scores {
			if scores[u] = math.Exp(scores[u] - logSumExp[row]); math.IsInf(logSumExp[row], -1) {
				scores[u] = 0
			}
		}
		weights[row] = scores
	})
	return weights, logSumExp
}

// logOfSumOfExp subtracts the largest value first, so that no exponential overflows.
func logOfSumOfExp(x []float64) float64 {
	largest := math.Inf(-1)
	for _, value := range x {
		largest = math.Max(largest, value)
	}
	if math.IsInf(largest, -1) {
		return largest
	}
	sum := 0.0
	for _, value := range x {
		sum += math.Exp(value - largest)
	}
	return largest + math.Log(sum)
}

// ConcatHeads returns rows of heads, each of which begins with the row of shared and goes on with the head's columns of x: equations 15 and
// 16 of DeepSeek-V2 (DeepSeek-AI, 2024).
func ConcatHeads(shared, x []float64, heads, first, rest int) (y []float64) {
	for row := range len(shared) / first {
		for h := range heads {
			y = append(y, shared[row*first:(row+1)*first]...)
			y = append(y, x[(row*heads+h)*rest:][:rest]...)
		}
	}
	return y
}

// ConcatHeadsGrad returns the gradients of shared and x.
func ConcatHeadsGrad(dy []float64, heads, first, rest int) (dshared, dx []float64) {
	dim := first + rest
	dshared = make([]float64, len(dy)/dim/heads*first)
	for at := range len(dy) / dim {
		for i := range first {
			dshared[at/heads*first+i] += dy[at*dim+i]
		}
		dx = append(dx, dy[at*dim+first:(at+1)*dim]...)
	}
	return dshared, dx
}
