package cpu

import (
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

var normKernels = kernelTable{
	ir.LayerNorm:     layerNorm,
	ir.LayerNormGrad: layerNormGrad,
	ir.RMSNorm:       rmsNorm,
	ir.RMSNormGrad:   rmsNormGrad,
}

func layerNorm(b *binder) func() {
	y, stats, x := b.mat("y"), b.floats("stats"), b.mat("x")
	gamma, beta := b.vector("gamma"), b.vector("beta")
	rows, cols := b.shape("x")
	eps, pool := float32(b.float("eps")), b.device.pool
	columns := b.scratch(2 * rows)
	shifted := b.shifted(gamma)
	return func() {
		both := columns.floats()
		mean, rstd := both[:rows], both[rows:]
		simd.LayerNorm(pool, y, mean, rstd, x, shifted(), beta.values(), rows, cols, eps)
		for i := range rows {
			stats[2*i], stats[2*i+1] = mean[i], rstd[i]
		}
	}
}

func layerNormGrad(b *binder) func() {
	dx, dgamma, dbeta := b.mat("dx"), b.ifFloats("dgamma"), b.ifFloats("dbeta")
	dy, x, stats, gamma := b.mat("dy"), b.mat("x"), b.floats("stats"), b.vector("gamma")
	rows, cols := b.shape("x")
	pool, residual := b.device.pool, b.residual()
	columns, accumulate := b.scratch(2*rows), b.bool("accumulate")
	shifted := b.shifted(gamma)
	return func() {
		both := columns.floats()
		mean, rstd := both[:rows], both[rows:]
		for i := range rows {
			mean[i], rstd[i] = stats[2*i], stats[2*i+1]
		}
		if !accumulate {
			clear(dgamma)
			clear(dbeta)
		}
		added := residual()
		simd.LayerNormBackward(pool, dx, dgamma, dbeta, dy, x, mean, rstd, shifted(), rows, cols, added)
	}
}

// shifted returns a function that returns the values of gamma plus the offset.
func (b *binder) shifted(gamma vector) func() []float32 {
	offset := float32(b.float("offset"))
	if offset == 0 {
		return gamma.values
	}
	_, cols := b.shape("x")
	sums := b.scratch(cols)
	return func() []float32 {
		out := sums.floats()
		for i, v := range gamma.values() {
			out[i] = offset + v
		}
		return out
	}
}

// residual returns a function that copies the residual path's gradient, if there is one, into dx, and reports
// whether there is one. The norm then adds its own gradient to dx.
func (b *binder) residual() func() bool {
	if !b.has("residual") {
		return func() bool { return false }
	}
	dx, residual := b.bytes("dx"), b.bytes("residual")
	return func() bool {
		copy(dx, residual)
		return true
	}
}

func rmsNorm(b *binder) func() {
	y, stats, x, gamma := b.mat("y"), b.floats("stats"), b.mat("x"), b.vector("gamma")
	rows, cols := b.shape("x")
	eps, pool := float32(b.float("eps")), b.device.pool
	shifted := b.shifted(gamma)
	return func() { simd.RMSNorm(pool, y, stats, x, shifted(), rows, cols, eps) }
}

func rmsNormGrad(b *binder) func() {
	dx, dgamma := b.mat("dx"), b.ifFloats("dgamma")
	dy, x, stats, gamma := b.mat("dy"), b.mat("x"), b.floats("stats"), b.vector("gamma")
	rows, cols := b.shape("x")
	pool, residual, accumulate := b.device.pool, b.residual(), b.bool("accumulate")
	shifted := b.shifted(gamma)
	return func() {
		if !accumulate {
			clear(dgamma)
		}
		added := residual()
		simd.RMSNormBackward(pool, dx, dgamma, dy, x, stats, shifted(), rows, cols, added)
	}
}
