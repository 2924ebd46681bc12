package cpu

import (
	"math"

	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

var optimizerKernels = kernelTable{
	ir.AdamW:     adamW,
	ir.SGD:       sgd,
	ir.Nesterov:  nesterov,
	ir.Axpby:     axpby,
	ir.Normalize: normalize,

	ir.ExpertBias: expertBias,
}

func adamW(b *binder) func() {
	w, m, v, grad := b.floats("w"), b.mat("m"), b.mat("v"), b.floats("grad")
	step, norm, pool := b.floats("step"), b.floats("norm"), b.device.pool
	update := simd.AdamWStep{Beta1: b.float("beta1"), Beta2: b.float("beta2"), Eps: b.float("eps"), WeightDecay: b.float("weight_decay")}
	rounded := []uint16(nil)
	if b.has("copy") {
		rounded = vm.Uint16s(b.bytes("copy"))
	}
	round := func(lo, hi int) { simd.Narrow(rounded[lo:hi], w[lo:hi]) }
	return func() {
		update.LearningRate, update.Correction1, update.Correction2 = float64(step[0]), float64(step[1]), float64(step[2])
		if update.GradScale = float64(norm[1]); update.GradScale >= 0 {
			if m.BF16 != nil {
				simd.AdamWBF16(pool, w, m.BF16, v.BF16, grad, update)
			} else {
				simd.AdamW(pool, w, m.F32, v.F32, grad, update)
			}
		}
		if rounded != nil {
			pool.Split(len(w), 8192, round)
		}
	}
}

// gradFactor returns a function that returns the factor by which gradients are multiplied: 1 if the instruction
// has no norm.
func (b *binder) gradFactor() func() float32 {
	if !b.has("norm") {
		return func() float32 { return 1 }
	}
	norm := b.floats("norm")
	return func() float32 { return norm[1] } // negative: the step is skipped
}

// sgd rounds every product separately, as other devices do.
func sgd(b *binder) func() {
	_, cols := b.shape("w")
	row := b.int("row")
	rows := int(b.in.UpdatedRows(int64(row)))
	momentum, decay, scale := float32(b.float("momentum")), b.float("weight_decay"), b.float("scale")
	step, factor, pool := b.floats("step"), b.gradFactor(), b.device.pool
	out, in := []simd.Mat{b.mat("w")}, []simd.Mat{b.mat("w"), b.mat("grad")}
	if rows > 0 {
		in[1] = in[1].From(row)
	}
	if b.has("m") {
		out, in = append(out, b.mat("m")), append(in, b.mat("m"))
	}
	padding := []byte(nil) // of the copy
	if b.has("copy") {
		out, padding = append(out, b.mat("copy")), b.bytes("copy")[rows*cols*int(ir.BF16.Bytes()):]
	}
	scaled := b.int("scaled") != 0
	return func() {
		f, rate, keep := factor(), float32(float64(step[0])*scale), float32(1-float64(step[0])*decay)
		skipped := f < 0
		if scaled {
			f = 1
		}
		simd.Map(pool, rows, cols, out, in, func(out, in [][]float32) {
			w, grad := in[0], in[1]
			if skipped {
				copy(out[0], w)
				if len(in) > 2 {
					copy(out[1], in[2])
				}
			}
			for i := 0; i < len(w) && !skipped; i++ {
				m := float32(grad[i] * f)
				if len(in) > 2 {
					m += float32(momentum * in[2][i])
					out[1][i] = m
				}
				out[0][i] = float32(w[i]*keep) - float32(m*rate)
			}
			if rounded := out[len(out)-1]; b.has("copy") {
				copy(rounded, out[0])
			}
		})
		clear(padding)
	}
}

// expertBias compares loads with their mean in f64, which is exact.
func expertBias(b *binder) func() {
	w, load, norm, rate := b.floats("w"), b.floats("load"), b.floats("norm"), float32(b.float("rate"))
	return func() {
		if norm[1] < 0 {
			return
		}
		total := 0.0
		for _, n := range load {
			total += float64(n)
		}
		for e, n := range load {
			switch own := float64(n) * float64(len(load)); {
			case own < total:
				w[e] += rate
			case own > total:
				w[e] -= rate
			}
		}
	}
}

func nesterov(b *binder) func() {
	momentum, factor := float32(b.float("momentum")), b.gradFactor()
	f := float32(0)
	run := b.each([]string{"y", "m"}, []string{"m", "grad"}, func(out, in [][]float32) {
		for i := range in[0] {
			if f < 0 {
				out[1][i], out[0][i] = in[0][i], 0
				continue
			}
			g := float32(in[1][i] * f)
			m := float32(momentum*in[0][i]) + g
			out[1][i] = m
			out[0][i] = g + float32(momentum*m)
		}
	})
	return func() {
		f = factor()
		run()
	}
}

func axpby(b *binder) func() {
	alpha, beta := float32(b.float("alpha")), float32(b.float("beta"))
	if !b.has("b") {
		return b.each([]string{"y"}, []string{"a"}, func(out, in [][]float32) {
			for i, a := range in[0] {
				out[0][i] = alpha * a
			}
		})
	}
	return b.each([]string{"y"}, []string{"a", "b"}, func(out, in [][]float32) {
		for i, a := range in[0] {
			out[0][i] = float32(alpha*a) + float32(beta*in[1][i])
		}
	})
}

func normalize(b *binder) func() {
	sum, eps, factor := b.floats("sum"), b.float("eps"), float32(0)
	run := b.each([]string{"y"}, []string{"x"}, func(out, in [][]float32) {
		for i, x := range in[0] {
			out[0][i] = x * factor
		}
	})
	return func() {
		factor = float32(1 / (math.Sqrt(float64(sum[0])) + eps))
		run()
	}
}
