package cpu

import (
	"sppo.dev/vm/cpu/simd"
)

func layerNorm(b *binder) func() {
	y, stats, x := b.mat("y"), b.floats("stats"), b.mat("x")
	gamma, beta := b.vector("gamma"), b.vector("beta")
	rows, cols := b.shape("x")
	eps, pool := float32(b.float("eps")), b.device.pool
	columns := b.scratch(2 * rows)
	return func() {
		both := columns.floats()
		mean, rstd := both[:rows], both[rows:]
		simd.LayerNorm(pool, y, mean, rstd, x, gamma.values(), beta.values(), rows, cols, eps)
		for i := range rows {
			stats[2*i], stats[2*i+1] = mean[i], rstd[i]
		}
	}
}

func layerNormGrad(b *binder) func() {
	dx, dgamma, dbeta := b.mat("dx"), b.floats("dgamma"), b.floats("dbeta")
	dy, x, stats, gamma := b.mat("dy"), b.mat("x"), b.floats("stats"), b.vector("gamma")
	rows, cols := b.shape("x")
	pool, residual := b.device.pool, b.residual()
	columns, accumulate := b.scratch(2*rows), b.bool("accumulate")
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
		simd.LayerNormBackward(pool, dx, dgamma, dbeta, dy, x, mean, rstd, gamma.values(), rows, cols, added)
	}
}

// residual puts the gradient that comes by another way into dx, for the norm to add to, and says whether there is one.
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
	return func() { simd.RMSNorm(pool, y, stats, x, gamma.values(), rows, cols, eps) }
}

func rmsNormGrad(b *binder) func() {
	dx, dgamma := b.mat("dx"), b.floats("dgamma")
	dy, x, stats, gamma := b.mat("dy"), b.mat("x"), b.floats("stats"), b.vector("gamma")
	rows, cols := b.shape("x")
	pool, residual, accumulate := b.device.pool, b.residual(), b.bool("accumulate")
	return func() {
		if !accumulate {
			clear(dgamma)
		}
		added := residual()
		simd.RMSNormBackward(pool, dx, dgamma, dy, x, stats, gamma.values(), rows, cols, added)
	}
}
