package simd

import "math"

// AttentionMerge merges the results of attention (o and lse) for the same queries over several blocks of keys. Row
// r of block b is row b*rows + r of parts and lses. Sums run over the blocks in order.
func AttentionMerge(p *Pool, o Mat, lse []float32, parts Mat, lses []float32, rows, heads, headDim int) {
	blocks := len(lses) / (rows * heads)
	p.Split(rows, rowGrain(blocks*heads*headDim), func(lo, hi int) {
		sum, buf := make([]float32, heads*headDim), make([]float32, heads*headDim)
		for r := lo; r < hi; r++ {
			lse := lse[r*heads:][:heads]
			for h := range lse {
				lse[h] = joinedLSE(lses, r*heads+h, rows*heads)
			}
			clear(sum)
			for b := range blocks {
				part := parts.row(b*rows+r, heads*headDim, buf)
				for h := range lse {
					weight := float32(math.Exp(float64(lses[(b*rows+r)*heads+h] - lse[h])))
					for i := h * headDim; i < (h+1)*headDim; i++ {
						sum[i] += float32(part[i] * weight)
					}
				}
			}
			o.at(r, 0).store(sum, heads*headDim, 1, heads*headDim)
		}
	})
}

// joinedLSE takes every stride-th value, starting at index `at`, and returns the logarithm of the sum of their
// exponentials.
func joinedLSE(values []float32, at, stride int) float32 {
	largest, sum := float32(math.Inf(-1)), 0.0
	for i := at; i < len(values); i += stride {
		largest = max(largest, values[i])
	}
	for i := at; i < len(values); i += stride {
		sum += math.Exp(float64(values[i]) - float64(largest))
	}
	return float32(float64(largest) + math.Log(sum))
}

// AttentionDelta computes, for each head, the inner product of each row of dout with the same row of o.
func AttentionDelta(p *Pool, delta []float32, dout, o Mat, rows, heads, headDim int) {
	p.Split(rows, rowGrain(heads*headDim), func(lo, hi int) {
		a, b := make([]float32, heads*headDim), make([]float32, heads*headDim)
		for r := lo; r < hi; r++ {
			x, y := dout.row(r, heads*headDim, a), o.row(r, heads*headDim, b)
			for h := range heads {
				delta[r*heads+h] = active.dot(x[h*headDim:(h+1)*headDim], y[h*headDim:(h+1)*headDim])
			}
		}
	})
}
