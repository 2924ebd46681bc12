package simd

import "math"

// The serial primitives. Every operand is at least as long as the destination, which may be one of the sources.

// Add computes dst = a + b.
func Add(dst, a, b []float32) { n := len(dst); active.add(dst, a[:n], b[:n]) }

// Mul computes dst = a * b, element by element.
func Mul(dst, a, b []float32) { n := len(dst); active.mul(dst, a[:n], b[:n]) }

// Axpy computes dst += alpha * x.
func Axpy(dst, x []float32, alpha float32) { active.axpy(dst, x[:len(dst)], alpha) }

// Scale computes dst = alpha * x.
func Scale(dst, x []float32, alpha float32) { active.scale(dst, x[:len(dst)], alpha) }

// Fill sets every element to v.
func Fill(dst []float32, v float32) {
	if v == 0 && !math.Signbit(float64(v)) {
		clear(dst)
		return
	}
	head := dst[:min(len(dst), 1024)]
	for i := range head {
		head[i] = v
	}
	for done := len(head); done < len(dst); {
		done += copy(dst[done:], head)
	}
}

// Gelu computes the tanh approximation of gelu, as in GPT-2.
func Gelu(dst, x []float32) { active.gelu(dst, x[:len(dst)]) }

// GeluBackward computes dx = dy * gelu'(x).
func GeluBackward(dx, x, dy []float32) { n := len(dx); active.geluBackward(dx, x[:n], dy[:n]) }

// Softcap computes dst = limit * tanh(x / limit).
func Softcap(dst, x []float32, limit float32) { softcap(dst, x, 1, limit) }

// softcap computes dst = limit * tanh(scale * x / limit) with a relative error of 2^-20, as limit * (1 - 2 /
// (exp(2y) + 1)) with y = scale * x / limit. Where the subtraction would lose precision, it uses the first terms
// of tanh's power series.
func softcap(dst, x []float32, scale, limit float32) {
	var ys [tileQueries]float32
	scale /= limit
	for len(dst) > 0 {
		n := min(len(dst), len(ys))
		y := ys[:n]
		active.scale(y, x[:n], scale)
		active.scale(dst[:n], y, 2)
		active.expScale(dst[:n], dst[:n], 0, 1)
		for i, e := range dst[:n] {
			t := y[i]
			if square := t * t; square < 1.0/16 {
				t *= 1 + square*(-1.0/3+square*(2.0/15+square*(-17.0/315+square*(62.0/2835))))
			} else {
				t = 1 - 2/(1+e)
			}
			dst[i] = limit * t
		}
		dst, x = dst[n:], x[n:]
	}
}

// SwiGLU computes dst = silu(gate) * up.
func SwiGLU(dst, gate, up []float32) { n := len(dst); active.swiglu(dst, gate[:n], up[:n]) }

// SwiGLUBackward computes the gradients of gate and up.
func SwiGLUBackward(dgate, dup, gate, up, dy []float32) {
	n := len(dgate)
	active.swigluBackward(dgate, dup[:n], gate[:n], up[:n], dy[:n])
}

// Rotate computes the rotary position embedding of one head. It rotates the pairs (x[i], x[len(cos)+i]) by the
// angles with the given cosines and sines, in the opposite direction if sign is -1. The result is the same on
// every instruction set.
func Rotate(y, x, cos, sin []float32, sign float32) {
	n := len(cos)
	active.rotate(y[:2*n], x[:2*n], cos, sin[:n], sign)
}

// AdamWStep holds the parameters of one optimizer step. Every weight is updated by
//
//	g = gradScale*grad;  m = beta1*m + (1-beta1)*g;  v = beta2*v + (1-beta2)*g*g
//	w = w*(1 - lr*weightDecay) - lr * m*correction1 / (sqrt(v*correction2) + eps)
type AdamWStep struct {
	LearningRate, Beta1, Beta2, Eps, WeightDecay float64
	GradScale                                    float64 // the clipping factor; 1: no clipping
	Correction1, Correction2                     float64 // 1/(1 - beta^step) for each beta
}

// adamwConstants holds the numbers that the kernels use, each rounded once. The assembly depends on their order.
type adamwConstants struct {
	gradScale, beta1, oneMinusBeta1, beta2, oneMinusBeta2 float32
	correction2, keep, step, eps                          float32
}

func (s AdamWStep) constants() *adamwConstants {
	return &adamwConstants{
		gradScale: float32(s.GradScale),
		beta1:     float32(s.Beta1), oneMinusBeta1: float32(1 - s.Beta1),
		beta2: float32(s.Beta2), oneMinusBeta2: float32(1 - s.Beta2),
		correction2: float32(s.Correction2),
		keep:        float32(1 - s.LearningRate*s.WeightDecay),
		step:        float32(s.LearningRate * s.Correction1),
		eps:         float32(s.Eps),
	}
}

// AdamW updates weights and moments. The result is the same on every instruction set.
func AdamW(p *Pool, w, m, v, g []float32, s AdamWStep) {
	c := s.constants()
	p.Split(len(w), elementGrain, func(lo, hi int) {
		// The runtime cannot interrupt a kernel, so none may run for long.
		for ; lo < hi; lo += elementGrain {
			end := min(lo+elementGrain, hi)
			active.adamw(w[lo:end], m[lo:end], v[lo:end], g[lo:end], c)
		}
	})
}

// AdamWBF16 is AdamW with moments stored as bf16. The moments are rounded after the weights have been updated
// with them.
func AdamWBF16(p *Pool, w []float32, m, v []uint16, g []float32, s AdamWStep) {
	c := s.constants()
	p.Split(len(w), elementGrain, func(lo, hi int) {
		scratch := takeScratch()
		defer scratch.release()
		wide := scratch.floats(0, 2*elementGrain)
		for ; lo < hi; lo += elementGrain {
			end := min(lo+elementGrain, hi)
			ms, vs := wide[:end-lo], wide[elementGrain:][:end-lo]
			Widen(ms, m[lo:end])
			Widen(vs, v[lo:end])
			active.adamw(w[lo:end], ms, vs, g[lo:end], c)
			Narrow(m[lo:end], ms)
			Narrow(v[lo:end], vs)
		}
	})
}
