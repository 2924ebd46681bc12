package cpu

import (
	"math"

	"sppo/vm"
	"sppo/vm/cpu/simd"
)

func adamW(b *binder) func() {
	w, m, v, grad := b.floats("w"), b.floats("m"), b.floats("v"), b.floats("grad")
	rounded := []uint16(nil)
	if b.has("copy") {
		rounded = vm.Uint16s(b.bytes("copy"))
	}
	step, norm := b.floats("step"), b.floats("norm")
	beta1, beta2 := b.float("beta1"), b.float("beta2")
	keep1, take1 := float32(beta1), float32(1-beta1)
	keep2, take2 := float32(beta2), float32(1-beta2)
	eps, decay, pool := float32(b.float("eps")), float32(b.float("weight_decay")), b.device.pool
	update := func(lo, hi int) {
		lr, c1, c2, factor := step[0], step[1], step[2], norm[1]
		w, m, v, grad := w[lo:hi], m[lo:hi], v[lo:hi], grad[lo:hi]
		for i := range w {
			g := float32(factor * grad[i])
			m[i] = float32(keep1*m[i]) + float32(take1*g)
			v[i] = float32(keep2*v[i]) + float32(take2*float32(g*g))
			root := float32(math.Sqrt(float64(float32(v[i]*c2)))) + eps
			w[i] -= float32(lr * (float32(m[i]*c1)/root + float32(decay*w[i])))
		}
		if rounded != nil {
			simd.Narrow(rounded[lo:hi], w)
		}
	}
	return func() { pool.Split(len(w), 8192, update) }
}
