package simd

// ConcatHeads puts in each head of a row of y, which has headDim columns, the row of shared and then the head's columns of x. All have
// one type.
func ConcatHeads(p *Pool, y, shared, x Mat, rows, heads, headDim int) {
	p.Split(rows, rowGrain(heads*headDim), func(lo, hi int) {
		for r := lo; r < hi; r++ {
			if y.BF16 != nil {
				concat(y.BF16[r*y.Ld:], shared.BF16[r*shared.Ld:][:shared.Ld], x.BF16[r*x.Ld:], heads, headDim)
			} else {
				concat(y.F32[r*y.Ld:], shared.F32[r*shared.Ld:][:shared.Ld], x.F32[r*x.Ld:], heads, headDim)
			}
		}
	})
}

func concat[T any](y, shared, x []T, heads, headDim int) {
	first, rest := len(shared), headDim-len(shared)
	for h := range heads {
		copy(y[h*headDim:], shared)
		copy(y[h*headDim+first:], x[h*rest:(h+1)*rest])
	}
}

// ConcatHeadsGrad computes the gradients of shared, the sum over heads, and of x from that of y.
func ConcatHeadsGrad(p *Pool, dshared, dx, dy Mat, rows, heads, headDim int) {
	first, rest := dshared.Ld, headDim-dshared.Ld
	p.Split(rows, rowGrain(heads*headDim), func(lo, hi int) {
		in, out, sum := make([]float32, heads*headDim), make([]float32, heads*rest), make([]float32, first)
		for r := lo; r < hi; r++ {
			g, of := dy.row(r, heads*headDim, in), dx.target(r, heads*rest, out)
			clear(sum)
			for h := range heads {
				active.add(sum, sum, g[h*headDim:][:first])
				copy(of[h*rest:(h+1)*rest], g[h*headDim+first:])
			}
			dx.done(r, of)
			dshared.at(r, 0).store(sum, first, 1, first)
		}
	})
}
