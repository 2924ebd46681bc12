package cpu

import (
	"math"
	"sync"

	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

// function is an activation: y = f(x), and dx = f'(x) * dy. Results may overwrite x or dy.
type function struct {
	forward  func(y, x []float32)
	backward func(dx, x, dy []float32)
}

// functions lists the activations in the order of ir.Functions.
var functions = []function{
	ir.GeluTanh: {simd.Gelu, simd.GeluBackward},
	ir.Gelu: {
		func(y, x []float32) {
			for i, v := range x {
				y[i] = float32(float64(v) * normalCDF(float64(v)))
			}
		},
		func(dx, x, dy []float32) {
			for i, v := range x {
				w := float64(v)
				density := math.Exp(-w*w/2) / math.Sqrt(2*math.Pi)
				dx[i] = float32(float64(dy[i]) * (normalCDF(w) + w*density))
			}
		},
	},
	ir.Silu: {
		func(y, x []float32) {
			for i, v := range x {
				y[i] = float32(float64(v) * sigmoid(float64(v)))
			}
		},
		func(dx, x, dy []float32) {
			for i, v := range x {
				w := float64(v)
				s := sigmoid(w)
				dx[i] = float32(float64(dy[i]) * (s + w*s*(1-s)))
			}
		},
	},
	ir.Relu2: {
		func(y, x []float32) {
			for i, v := range x {
				v = max(v, 0)
				y[i] = v * v
			}
		},
		func(dx, x, dy []float32) {
			for i, v := range x {
				dx[i] = dy[i] * (2 * max(v, 0))
			}
		},
	},
	ir.Sigmoid: {
		func(y, x []float32) {
			for i, v := range x {
				y[i] = float32(sigmoid(float64(v)))
			}
		},
		func(dx, x, dy []float32) {
			for i, v := range x {
				s := sigmoid(float64(v))
				dx[i] = float32(float64(dy[i]) * s * (1 - s))
			}
		},
	},
	ir.ClampedSilu: {
		func(y, x []float32) {
			for i, v := range x {
				w := min(float64(v), clamp)
				y[i] = float32(w * sigmoid(clampedSlope*w))
			}
		},
		func(dx, x, dy []float32) {
			for i, v := range x {
				w := float64(v)
				s := sigmoid(clampedSlope * w)
				if dx[i] = float32(float64(dy[i]) * (s + clampedSlope*w*s*(1-s))); w > clamp {
					dx[i] = 0
				}
			}
		},
	},
}

// Numbers of clamped_silu: the bound, and the slope of the sigmoid.
const clamp, clampedSlope = 7, 1.702

// clampUp computes by what glu multiplies with clamped_silu.
func clampUp(out, up []float32) {
	for i, v := range up {
		out[i] = min(max(v, -clamp), clamp) + 1
	}
}

// normalCDF is the cumulative distribution function of the standard normal distribution, without cancellation in
// the lower tail.
func normalCDF(x float64) float64 { return 0.5 * math.Erfc(-x/math.Sqrt2) }

func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }

func (b *binder) function() function { return functions[b.int("function")] }

func activation(b *binder) func() error {
	f := b.function()
	return b.eachUpTo([]string{"y"}, []string{"x"}, func(out, in [][]float32) { f.forward(out[0], in[0]) })
}

func activationGrad(b *binder) func() error {
	f := b.function()
	return b.eachUpTo([]string{"dx"}, []string{"dy", "x"}, func(out, in [][]float32) { f.backward(out[0], in[1], in[0]) })
}

// glu uses a separate kernel for silu, the activation that most current models use.
func glu(b *binder) func() error {
	operands := []string{"gate", "up"}
	if int64(b.int("function")) == ir.Silu {
		return b.eachUpTo([]string{"y"}, operands, func(out, in [][]float32) { simd.SwiGLU(out[0], in[0], in[1]) })
	}
	f, rows, clamped := b.function(), b.rowBuffers(), int64(b.int("function")) == ir.ClampedSilu
	return b.eachUpTo([]string{"y"}, operands, func(out, in [][]float32) {
		n := len(out[0])
		buffer := rows.take(2 * n)
		act, up := buffer[:n], in[1]
		f.forward(act, in[0])
		if clamped {
			up = buffer[n:]
			clampUp(up, in[1])
		}
		simd.Mul(out[0], act, up)
		rows.give(buffer)
	})
}

func gluGrad(b *binder) func() error {
	results, operands := []string{"dgate", "dup"}, []string{"dy", "gate", "up"}
	if int64(b.int("function")) == ir.Silu {
		return b.eachUpTo(results, operands, func(out, in [][]float32) { simd.SwiGLUBackward(out[0], out[1], in[1], in[2], in[0]) })
	}
	f, rows, clamped := b.function(), b.rowBuffers(), int64(b.int("function")) == ir.ClampedSilu
	return b.eachUpTo(results, operands, func(out, in [][]float32) {
		n := len(out[0])
		buffer := rows.take(3 * n)
		act, dact := buffer[:n], buffer[n:2*n]
		dy, gate, up := in[0], in[1], in[2]
		f.forward(act, gate)
		simd.Mul(act, act, dy)
		if clamped {
			for i, v := range up {
				if v < -clamp || v > clamp {
					act[i] = 0
				}
			}
			up = buffer[2*n:]
			clampUp(up, in[2])
		}
		simd.Mul(dact, dy, up)
		f.backward(dact, gate, dact)
		copy(out[0], dact)
		copy(out[1], act)
		rows.give(buffer)
	})
}

// rowBuffers holds buffers for the threads of a kernel.
type rowBuffers struct{ free sync.Pool }

func (b *binder) rowBuffers() *rowBuffers { return &rowBuffers{} }

func (r *rowBuffers) take(n int) []float32 {
	if p, ok := r.free.Get().(*[]float32); ok && cap(*p) >= n {
		return (*p)[:n]
	}
	return make([]float32, n)
}

func (r *rowBuffers) give(buffer []float32) { r.free.Put(&buffer) }
