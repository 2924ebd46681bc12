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

// AttentionSink adds to the softmax of each row and head a key with the score of the head's sink and the value 0: it
// updates lse, and multiplies o by the share that the other keys keep.
func AttentionSink(p *Pool, o Mat, lse, sink []float32, rows, heads, headDim int) {
	p.Split(rows, rowGrain(heads*headDim), func(lo, hi int) {
		buf := make([]float32, heads*headDim)
		for r := lo; r < hi; r++ {
			row := o.row(r, heads*headDim, buf)
			for h, s := range sink {
				old := lse[r*heads+h]
				joined := joinedLSE([]float32{old, s}, 0, 1)
				kept := float32(math.Exp(float64(old) - float64(joined)))
				for i := h * headDim; i < (h+1)*headDim; i++ {
					row[i] *= kept
				}
				lse[r*heads+h] = joined
			}
			o.done(r, row)
		}
	})
}

// AttentionSinkGrad computes the gradients of sinks: each is minus the sum over rows, in order, of exp(sink - lse)
// times the inner product of the head's parts of dout and o.
func AttentionSinkGrad(p *Pool, dsink []float32, accumulate bool, dout, o Mat, lse, sink []float32, rows, heads, headDim int) {
	blocks := (rows + rowBlock - 1) / rowBlock
	sums := make([]float64, blocks*heads)
	p.Split(blocks, 1, func(lo, hi int) {
		a, b := make([]float32, heads*headDim), make([]float32, heads*headDim)
		for block := lo; block < hi; block++ {
			for r := block * rowBlock; r < min(rows, (block+1)*rowBlock); r++ {
				x, y := dout.row(r, heads*headDim, a), o.row(r, heads*headDim, b)
				for h, s := range sink {
					share := math.Exp(float64(s) - float64(lse[r*heads+h]))
					sums[block*heads+h] -= share * float64(active.dot(x[h*headDim:(h+1)*headDim], y[h*headDim:(h+1)*headDim]))
				}
			}
		}
	})
	for h := range dsink {
		sum := 0.0
		if accumulate {
			sum = float64(dsink[h])
		}
		for block := range blocks {
			sum += sums[block*heads+h]
		}
		dsink[h] = float32(sum)
	}
}
