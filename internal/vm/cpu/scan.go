package cpu

import (
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

var scanKernels = kernelTable{ir.Scan: scan, ir.ScanGrad: scanGrad, ir.Conv: conv, ir.ConvGrad: convGrad, ir.Decay: decay, ir.DecayGrad: decayGrad,
	ir.ScaleColumns: scaleColumns, ir.ScaleColumnsGrad: scaleColumnsGrad}

func (b *binder) scan() (simd.Scan, simd.ScanOperands) {
	rows, _ := b.shape("q")
	batch := b.int("batch")
	return simd.Scan{
			Tokens: rows / batch, Batch: batch, Heads: b.int("heads"), Shared: b.int("shared"), KeyDim: b.int("key_dim"), ValueDim: b.int("value_dim"),
			Channels: b.int("channels"), Delta: b.bool("delta"), Norm: float32(b.float("norm")), Scale: float32(b.float("scale")), Positions: b.ints("positions"),
		}, simd.ScanOperands{
			Q: b.mat("q"), K: b.mat("k"), V: b.mat("v"), Decay: b.floats("decay"), Beta: b.floats("beta"), State: b.ifFloats("state"),
		}
}

func scan(b *binder) func() {
	a, in := b.scan()
	pool, o, next := b.device.pool, b.mat("o"), b.floats("next")
	return func() { a.Forward(pool, o, next, in) }
}

func scanGrad(b *binder) func() {
	a, in := b.scan()
	pool := b.device.pool
	g := simd.ScanGrads{
		DOut: b.mat("do"), DNext: b.ifFloats("dnext"), DQ: b.mat("dq"), DK: b.mat("dk"), DV: b.mat("dv"),
		DDecay: b.floats("ddecay"), DBeta: b.floats("dbeta"), DState: b.floats("dstate"),
	}
	return func() { a.Backward(pool, g, in) }
}

func (b *binder) conv() (simd.Conv, vector) {
	rows, cols := b.shape("x")
	c := simd.Conv{Tokens: rows / b.int("batch"), Width: b.int("width"), Batch: b.int("batch"), Cols: cols, Positions: b.ints("positions"), W: b.mat("w"), X: b.mat("x")}
	if b.has("tail") {
		c.Tail = b.mat("tail")
	}
	var bias vector
	if b.has("bias") {
		bias = b.vector("bias")
	}
	return c, bias
}

func conv(b *binder) func() {
	c, bias := b.conv()
	pool, y, next := b.device.pool, b.mat("y"), b.mat("next")
	return func() {
		c.Bias = bias.values()
		c.Forward(pool, y, next)
	}
}

func convGrad(b *binder) func() {
	c, bias := b.conv()
	pool := b.device.pool
	g := simd.ConvGrads{
		DY: b.mat("dy"), DNext: b.ifFloats("dnext"), DTail: b.floats("dtail"), DX: b.mat("dx"), DW: b.ifFloats("dw"), DBias: b.ifFloats("dbias"), Add: b.bool("accumulate"),
	}
	return func() {
		c.Bias = bias.values()
		c.Backward(pool, g)
	}
}

// decay returns what a kernel of decays needs once it runs.
func (b *binder) decay() func() *simd.Decay {
	rows, _ := b.shape("x")
	d := &simd.Decay{Rows: rows, Heads: b.int("heads"), HeadDim: b.int("head_dim"), X: b.mat("x"), Least: b.float("least")}
	rate, bias := b.vector("rate"), b.vector("bias")
	return func() *simd.Decay {
		d.Rate, d.Bias = rate.values(), bias.values()
		return d
	}
}

func decay(b *binder) func() {
	d, pool, y, step := b.decay(), b.device.pool, b.floats("y"), b.ifFloats("step")
	return func() { d().Forward(pool, y, step) }
}

func decayGrad(b *binder) func() {
	d, pool := b.decay(), b.device.pool
	g := simd.DecayGrads{DY: b.floats("dy"), DStep: b.ifFloats("dstep"), DX: b.mat("dx"), DRate: b.ifFloats("drate"), DBias: b.ifFloats("dbias"), Add: b.bool("accumulate")}
	return func() { d().Backward(pool, g) }
}

// scaled returns what a kernel that scales columns needs once it runs.
func (b *binder) scaled() func() *simd.ColumnScale {
	rows, _ := b.shape("x")
	s := &simd.ColumnScale{Rows: rows, Heads: b.int("heads"), HeadDim: b.int("head_dim"), X: b.mat("x")}
	factor := b.vector("factor")
	return func() *simd.ColumnScale {
		s.Factor = factor.values()
		return s
	}
}

func scaleColumns(b *binder) func() {
	s, pool, y := b.scaled(), b.device.pool, b.mat("y")
	return func() { s().Forward(pool, y) }
}

func scaleColumnsGrad(b *binder) func() {
	s, pool, dx, dfactor, dy, add := b.scaled(), b.device.pool, b.mat("dx"), b.ifFloats("dfactor"), b.mat("dy"), b.bool("accumulate")
	return func() { s().Backward(pool, dx, dfactor, dy, add) }
}
