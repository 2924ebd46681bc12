package cpu

import (
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

var matmulKernels = kernelTable{
	ir.Matmul:   matmul,
	ir.BiasGrad: biasGrad,
}

func matmul(b *binder) func() {
	c, x, y, bias := b.mat("c"), b.mat("a"), b.mat("b"), b.vector("bias")
	m, n := b.shape("c")
	k, cols := b.shape("a")
	transA, transB, accumulate := b.bool("trans_a"), b.bool("trans_b"), b.bool("accumulate")
	if !transA {
		k = cols
	}
	pool := b.device.pool
	return func() { simd.GemmMat(pool, transA, transB, m, n, k, x, y, accumulate, bias.values(), c) }
}

func biasGrad(b *binder) func() {
	db, dy := b.floats("db"), b.mat("dy")
	rows, cols := b.shape("dy")
	pool, accumulate := b.device.pool, b.bool("accumulate")
	return func() { simd.ColumnSums(pool, db, dy, rows, cols, accumulate) }
}
