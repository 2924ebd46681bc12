package cpu

import (
	"sppo.dev/vm"
	"sppo.dev/vm/cpu/simd"
)

func adamW(b *binder) func() {
	w, m, v, grad := b.floats("w"), b.floats("m"), b.floats("v"), b.floats("grad")
	step, norm, pool := b.floats("step"), b.floats("norm"), b.device.pool
	update := simd.AdamWStep{Beta1: b.float("beta1"), Beta2: b.float("beta2"), Eps: b.float("eps"), WeightDecay: b.float("weight_decay")}
	rounded := []uint16(nil)
	if b.has("copy") {
		rounded = vm.Uint16s(b.bytes("copy"))
	}
	round := func(lo, hi int) { simd.Narrow(rounded[lo:hi], w[lo:hi]) }
	return func() {
		update.LearningRate, update.Correction1, update.Correction2 = float64(step[0]), float64(step[1]), float64(step[2])
		update.GradScale = float64(norm[1])
		simd.AdamW(pool, w, m, v, grad, update)
		if rounded != nil {
			pool.Split(len(w), 8192, round)
		}
	}
}
