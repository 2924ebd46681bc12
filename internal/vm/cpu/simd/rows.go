package simd

import "math"

const (
	// elementGrain is the minimum number of elements per part.
	elementGrain = 8192
	// sumBlock is the number of elements that are added in float32. The sums of blocks are added in float64.
	sumBlock = 4096
	// rowBlock is the number of rows in a block: column sums are first computed for each block, then added in
	// order.
	rowBlock = 64
)

// Split calls f on ranges that cover 0..n, in parallel. The length of each range except the last is a multiple
// of grain.
func (p *Pool) Split(n, grain int, f func(lo, hi int)) {
	if n <= 0 {
		return
	}
	blocks := (n + grain - 1) / grain
	parts := min(blocks, 4*p.Threads())
	if p.Threads() == 1 {
		parts = 1
	}
	if parts == 1 {
		f(0, n)
		return
	}
	p.Run(parts, func(part int) {
		lo, hi := blocks*part/parts*grain, blocks*(part+1)/parts*grain
		f(lo, min(hi, n))
	})
}

// rowGrain returns the minimum number of rows per part.
func rowGrain(cols int) int { return max(1, elementGrain/max(cols, 1)) }

// Map calls f on every row of the operands, in parallel, converting bfloat16 rows before and after each call. An
// operand that is updated must be in both lists. f must write its output rows completely and must not retain the
// slices.
func Map(p *Pool, rows, cols int, out, in []Mat, f func(out, in [][]float32)) {
	p.Split(rows, rowGrain(cols), func(lo, hi int) {
		s := takeScratch()
		defer s.release()
		buf := s.floats(0, (len(out)+len(in))*cols)
		outs, ins := make([][]float32, len(out)), make([][]float32, len(in))
		for i := lo; i < hi; i++ {
			for k, m := range in {
				ins[k] = m.row(i, cols, buf[k*cols:(k+1)*cols])
			}
			for k, m := range out {
				k2 := len(in) + k
				outs[k] = m.target(i, cols, buf[k2*cols:(k2+1)*cols])
			}
			f(outs, ins)
			for k, m := range out {
				m.done(i, outs[k])
			}
		}
	})
}

// LayerNorm computes y = (x - mean)*rstd*gamma + beta for every row and keeps mean and rstd for the backward pass.
func LayerNorm(p *Pool, y Mat, mean, rstd []float32, x Mat, gamma, beta []float32, rows, cols int, eps float32) {
	p.Split(rows, rowGrain(cols), func(lo, hi int) {
		s := takeScratch()
		defer s.release()
		xBuf, yBuf := s.floats(0, cols), s.floats(1, cols)
		for i := lo; i < hi; i++ {
			r := x.row(i, cols, xBuf)
			m := active.sum(r) / float32(cols)
			variance := active.sumSquares(r, m) / float32(cols)
			mean[i], rstd[i] = m, reciprocalRoot(variance+eps)
			out := y.target(i, cols, yBuf)
			active.norm(out, r, gamma[:cols], beta[:cols], m, rstd[i])
			y.done(i, out)
		}
	})
}

// RMSNorm computes y = x*rstd*gamma for every row and keeps rstd for the backward pass.
func RMSNorm(p *Pool, y Mat, rstd []float32, x Mat, gamma []float32, rows, cols int, eps float32) {
	p.Split(rows, rowGrain(cols), func(lo, hi int) {
		s := takeScratch()
		defer s.release()
		xBuf, yBuf, zero := s.floats(0, cols), s.floats(1, cols), s.floats(2, cols)
		clear(zero)
		for i := lo; i < hi; i++ {
			r := x.row(i, cols, xBuf)
			rstd[i] = reciprocalRoot(active.sumSquares(r, 0)/float32(cols) + eps)
			out := y.target(i, cols, yBuf)
			active.norm(out, r, gamma[:cols], zero, 0, rstd[i])
			y.done(i, out)
		}
	})
}

func reciprocalRoot(x float32) float32 { return float32(1 / math.Sqrt(float64(x))) }

// LayerNormBackward computes dx, adding to its contents if accumulate is set, and adds the gradients of gamma and
// beta to dgamma and dbeta, each of which may be nil.
func LayerNormBackward(p *Pool, dx Mat, dgamma, dbeta []float32, dy, x Mat, mean, rstd, gamma []float32,
	rows, cols int, accumulate bool) {
	normBackward(p, dx, dgamma, dbeta, dy, x, mean, rstd, gamma, rows, cols, accumulate)
}

// RMSNormBackward computes dx, adding to its contents if accumulate is set, and adds the gradient of gamma to
// dgamma, which may be nil.
func RMSNormBackward(p *Pool, dx Mat, dgamma []float32, dy, x Mat, rstd, gamma []float32,
	rows, cols int, accumulate bool) {
	normBackward(p, dx, dgamma, nil, dy, x, nil, rstd, gamma, rows, cols, accumulate)
}

// normBackward implements the backward pass of both norms. RMSNorm uses a mean of zero and has no beta. Each block
// of rows has its own sums for gamma and beta, and the sums of all blocks are then added in order.
func normBackward(p *Pool, dx Mat, dgamma, dbeta []float32, dy, x Mat, mean, rstd, gamma []float32,
	rows, cols int, accumulate bool) {
	blocks := (rows + rowBlock - 1) / rowBlock
	shared := takeScratch()
	defer shared.release()
	partial := shared.floats(0, 2*cols*blocks)
	clear(partial)
	p.Run(blocks, func(block int) {
		s := takeScratch()
		defer s.release()
		dyBuf, xBuf, dxBuf := s.floats(0, cols), s.floats(1, cols), s.floats(2, 2*cols)
		dg, db := partial[2*cols*block:][:cols], partial[2*cols*block+cols:][:cols]
		for i := block * rowBlock; i < min((block+1)*rowBlock, rows); i++ {
			var mu, meanG float32
			d, r := dy.row(i, cols, dyBuf), x.row(i, cols, xBuf)
			if mean != nil {
				mu = mean[i]
			}
			sumG, sumGX := active.normSums(d, r, gamma[:cols], mu, rstd[i])
			if mean != nil {
				meanG = sumG / float32(cols)
			}
			// The result goes to a buffer first: dx may share memory with x or dy, or may be added to.
			out := dxBuf[:cols]
			active.normBackward(out, dg, db, d, r, gamma[:cols], mu, rstd[i], meanG, sumGX/float32(cols))
			if accumulate {
				active.add(out, out, dx.row(i, cols, dxBuf[cols:]))
			}
			dx.at(i, 0).store(out, cols, 1, cols)
		}
	})
	for block := range blocks {
		if dgamma != nil {
			active.add(dgamma[:cols], dgamma[:cols], partial[2*cols*block:][:cols])
		}
		if dbeta != nil {
			active.add(dbeta[:cols], dbeta[:cols], partial[2*cols*block+cols:][:cols])
		}
	}
}

// ColumnSums computes the sum of each column, such as the gradient of a bias, adding to dst if accumulate is
// set.
func ColumnSums(p *Pool, dst []float32, x Mat, rows, cols int, accumulate bool) {
	const stripe = 128
	p.Split(cols, stripe, func(lo, hi int) {
		s := takeScratch()
		defer s.release()
		part, buf := s.floats(0, stripe), s.floats(1, stripe*rowBlock)
		for c := lo; c < hi; c += stripe {
			w := min(stripe, hi-c)
			out := dst[c : c+w]
			if !accumulate {
				clear(out)
			}
			for r := 0; r < rows; r += rowBlock {
				h := min(rowBlock, rows-r)
				block, ld := x.at(r, c).F32, x.Ld
				if x.BF16 != nil {
					x.at(r, c).load(buf, stripe, h, w)
					block, ld = buf, stripe
				}
				clear(part[:w])
				active.columnSums(part[:w], block, ld, h)
				active.add(out, out, part[:w])
			}
		}
	})
}

// SumSquares returns the sum of the squares of all elements, adding the sums of blocks in float64.
func SumSquares(p *Pool, x []float32) float64 {
	blocks := (len(x) + sumBlock - 1) / sumBlock
	s := takeScratch()
	defer s.release()
	partial := s.floats(0, blocks)
	p.Split(blocks, elementGrain/sumBlock, func(lo, hi int) {
		for b := lo; b < hi; b++ {
			partial[b] = active.sumSquares(x[b*sumBlock:min((b+1)*sumBlock, len(x))], 0)
		}
	})
	var sum float64
	for _, v := range partial {
		sum += float64(v)
	}
	return sum
}

// RowMax computes the maximum of each row.
func RowMax(p *Pool, max []float32, x Mat, rows, cols int) {
	eachRow(p, x, rows, cols, func(i int, row []float32) { max[i] = active.max(row) })
}

// RowSumExp computes the sum of exp(x - max) of each row.
func RowSumExp(p *Pool, sum []float32, x Mat, max []float32, rows, cols int) {
	eachRow(p, x, rows, cols, func(i int, row []float32) { sum[i] = sumExpBlocked(row, max[i]) })
}

// sumExpBlocked sums long rows in blocks, so that the sum over a vocabulary stays precise.
func sumExpBlocked(row []float32, max float32) float32 {
	var sum float64
	for len(row) > sumBlock {
		sum += float64(active.sumExp(row[:sumBlock], max))
		row = row[sumBlock:]
	}
	return float32(sum + float64(active.sumExp(row, max)))
}

// eachRow calls f on every row, in parallel.
func eachRow(p *Pool, x Mat, rows, cols int, f func(i int, row []float32)) {
	p.Split(rows, rowGrain(cols), func(lo, hi int) {
		s := takeScratch()
		defer s.release()
		buf := s.floats(0, cols)
		for i := lo; i < hi; i++ {
			f(i, x.row(i, cols, buf))
		}
	})
}

// SoftmaxGradient converts rows of logits to gradients of the cross-entropy, in place: x = (exp(x -
// max)/sum - onehot(target)) * scale. For a target outside 0..cols, such as a token of another
// shard of the vocabulary, nothing is subtracted.
func SoftmaxGradient(p *Pool, x Mat, max, sum []float32, target []int32, scale float32, rows, cols int) {
	p.Split(rows, rowGrain(cols), func(lo, hi int) {
		s := takeScratch()
		defer s.release()
		buf := s.floats(0, cols)
		for i := lo; i < hi; i++ {
			row := x.row(i, cols, buf)
			active.expScale(row, row, max[i], scale/sum[i])
			if t := int(target[i]); t >= 0 && t < cols {
				row[t] -= scale
			}
			x.done(i, row)
		}
	})
}
