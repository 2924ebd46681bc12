package vmtest

import (
	"fmt"
	"math"

	"sppo.dev/internal/vm/vmtest/naive"
	"sppo.dev/ir"
)

// scanCase is a scan of some tokens. Decays are drawn from 0 to -2 times their strength.
type scanCase struct {
	naive.Scan
	tokens        int
	strength      float64
	state, packed bool
	operands      args
}

// scans cover chunks and sub-blocks that are not whole, heads that share q and k, weak and very strong decays, and
// documents that begin in the middle of a chunk.
var scans = []scanCase{
	{Scan: naive.Scan{Batch: 1, Heads: 1, Shared: 1, KeyDim: 16, ValueDim: 16, Channels: 1, Delta: true, Norm: 1e-6}, tokens: 5, strength: 0.1, state: true},
	{Scan: naive.Scan{Batch: 2, Heads: 2, Shared: 2, KeyDim: 24, ValueDim: 10, Channels: 1, Delta: true, Norm: 1e-6, Scale: 0.25}, tokens: 150, strength: 0.1, state: true},
	{Scan: naive.Scan{Batch: 1, Heads: 1, Shared: 3, KeyDim: 8, ValueDim: 40, Channels: 1, Delta: true, Norm: 1e-6}, tokens: 130, strength: 30, packed: true},
	{Scan: naive.Scan{Batch: 1, Heads: 2, Shared: 1, KeyDim: 16, ValueDim: 20, Channels: 16, Delta: true, Norm: 1e-6}, tokens: 140, strength: 0.1, state: true},
	{Scan: naive.Scan{Batch: 2, Heads: 1, Shared: 2, KeyDim: 12, ValueDim: 16, Channels: 12, Delta: true, Norm: 1e-6, Scale: 0.5}, tokens: 90, strength: 30, state: true, packed: true},
	{Scan: naive.Scan{Batch: 1, Heads: 1, Shared: 2, KeyDim: 16, ValueDim: 16, Channels: 1, Scale: 0.25}, tokens: 100, strength: 1, state: true},
	{Scan: naive.Scan{Batch: 2, Heads: 1, Shared: 1, KeyDim: 20, ValueDim: 16, Channels: 20, Scale: 0.25}, tokens: 70, strength: 1, packed: true},
	{Scan: naive.Scan{Batch: 1, Heads: 1, Shared: 1, KeyDim: 128, ValueDim: 128, Channels: 1, Delta: true, Norm: 1e-6, Scale: 0.0884}, tokens: 200, strength: 0.5, state: true},
}

// eachScan runs a case for every scan, with its operands.
func (s *suite) eachScan(f func(s *suite, c scanCase, at attrs, in naive.ScanOperands)) {
	for i, c := range scans {
		s.sub(fmt.Sprintf("scan %d", i), func(s *suite) {
			rows, all := c.tokens*c.Batch, c.Heads*c.Shared
			decay, beta := s.f32(rows, all*c.Channels), s.f32(rows, all)
			for i, x := range decay.data {
				decay.data[i] = stored(-math.Abs(x)*c.strength, ir.F32)
			}
			for i, x := range beta.data {
				beta.data[i] = stored(1/(1+math.Exp(-x)), ir.F32)
			}
			c.operands = args{"q": s.normal(rows, c.Heads*c.KeyDim), "k": s.normal(rows, c.Heads*c.KeyDim), "v": s.normal(rows, all*c.ValueDim), "decay": decay, "beta": beta}
			in := naive.ScanOperands{Q: c.operands["q"].data, K: c.operands["k"].data, V: c.operands["v"].data, Decay: decay.data, Beta: beta.data}
			if c.state {
				c.operands["state"] = s.f32(c.Batch, all, c.KeyDim, c.ValueDim)
				in.State = c.operands["state"].data
			}
			if c.packed {
				c.operands["positions"] = s.packed(c.tokens, c.Batch)
				c.Positions = c.operands["positions"].ints()
			}
			f(s, c, attrs{
				"heads": float64(c.Heads), "shared": float64(c.Shared), "key_dim": float64(c.KeyDim), "value_dim": float64(c.ValueDim), "batch": float64(c.Batch),
				"channels": float64(c.Channels), "delta": truth(c.Delta), "norm": c.Norm, "scale": c.Scale,
			}, in)
		})
	}
}

// packed returns the positions of tokens in documents of random lengths, of which the first have begun before.
func (s *suite) packed(tokens, batch int) *value {
	v := &value{dtype: ir.I32, shape: []int{tokens * batch}, data: make([]float64, tokens*batch)}
	for b := range batch {
		at := s.rng.IntN(4)
		for t := range tokens {
			if s.rng.IntN(9) == 0 {
				at = 0
			}
			v.data[t*batch+b] = float64(at)
			at++
		}
	}
	return v
}

func (c *scanCase) shape() []int { return []int{c.Batch, c.Heads * c.Shared, c.KeyDim, c.ValueDim} }

func caseScan(s *suite) {
	s.eachScan(func(s *suite, c scanCase, at attrs, in naive.ScanOperands) {
		o, next := s.out(c.operands["v"].shape...), s.outF32(c.shape()...)
		c.operands["o"], c.operands["next"] = o, next
		out := s.run(call{op: ir.Scan, attrs: at, args: c.operands})
		wantO, wantNext := c.Run(in)
		s.equal("o", out["o"], wantO, s.dtype)
		s.split("next", out["next"], wantNext)
	})
}

func caseScanGrad(s *suite) {
	s.eachScan(func(s *suite, c scanCase, at attrs, in naive.ScanOperands) {
		do, dnext := s.normal(c.operands["v"].shape...), s.f32(c.shape()...)
		if c.strength == 1 {
			dnext = &value{}
		} else {
			c.operands["dnext"] = dnext
		}
		c.operands["do"], c.operands["dstate"] = do, s.outF32(c.shape()...)
		for _, name := range []string{"q", "k", "v", "decay", "beta"} {
			c.operands["d"+name] = nothing(c.operands[name].dtype, c.operands[name].shape)
		}
		out := s.run(call{op: ir.ScanGrad, attrs: at, args: c.operands})
		want := c.Grad(in, do.data, dnext.data)
		s.equal("dq", out["dq"], want.Q, s.dtype)
		s.equal("dk", out["dk"], want.K, s.dtype)
		s.equal("dv", out["dv"], want.V, s.dtype)
		s.split("ddecay", out["ddecay"], want.Decay)
		s.split("dbeta", out["dbeta"], want.Beta)
		s.split("dstate", out["dstate"], want.State)
	})
}

// eachConv runs a case for convolutions: of fewer tokens than the width, with and without rows before them, and packed.
func (s *suite) eachConv(f func(s *suite, c naive.Conv, in args)) {
	for i, size := range [][4]int{{4, 1, 30, 9}, {4, 2, 2, 20}, {4, 1, 20, 37}, {3, 2, 12, 8}} {
		s.sub(fmt.Sprintf("conv %d", i), func(s *suite) {
			c := naive.Conv{Width: size[0], Batch: size[1], Cols: size[3]}
			in := args{"x": s.normal(size[2]*c.Batch, c.Cols), "w": s.normal(c.Cols, c.Width), "bias": nil, "tail": nil}
			if i%2 == 1 {
				in["tail"] = s.normal(c.Width*c.Batch, c.Cols)
			}
			if i > 1 {
				in["bias"] = s.normal(c.Cols)
				in["positions"] = s.packed(size[2], c.Batch)
				c.Positions = in["positions"].ints()
			}
			f(s, c, in)
		})
	}
}

// dataOf returns the values of an operand, or nil if it is absent.
func dataOf(v *value) []float64 {
	if v == nil {
		return nil
	}
	return v.data
}

func caseConv(s *suite) {
	s.eachConv(func(s *suite, c naive.Conv, in args) {
		in["y"], in["next"] = s.out(in["x"].shape...), s.out(c.Width*c.Batch, c.Cols)
		out := s.run(call{op: ir.Conv, attrs: attrs{"width": float64(c.Width), "batch": float64(c.Batch)}, args: in})
		y, next := c.Run(in["x"].data, in["w"].data, dataOf(in["bias"]), dataOf(in["tail"]))
		s.equal("y", out["y"], y, s.dtype)
		s.equal("next", out["next"], next, s.dtype)
	})
}

func caseConvGrad(s *suite) {
	s.eachConv(func(s *suite, c naive.Conv, in args) {
		s.onOff(func(s *suite, accumulate bool) {
			dy, dnext := s.normal(in["x"].shape...), s.f32(c.Width*c.Batch, c.Cols)
			all := args{"dy": dy, "dnext": dnext, "dx": s.out(in["x"].shape...), "dw": s.sum(accumulate, c.Cols, c.Width), "dtail": s.outF32(c.Width*c.Batch, c.Cols)}
			for name, v := range in {
				all[name] = v
			}
			x, w, bias, tail := in["x"].data, in["w"].data, dataOf(in["bias"]), dataOf(in["tail"])
			if bias != nil {
				all["dbias"] = s.sum(accumulate, c.Cols)
			} else {
				bias = make([]float64, c.Cols)
			}
			if tail == nil {
				tail = make([]float64, c.Width*c.Batch*c.Cols)
			}
			if len(x) == 12*2*8 { // the last rows are not used afterwards
				all["dnext"], dnext = nil, &value{data: make([]float64, len(dnext.data))}
			}
			out := s.run(call{op: ir.ConvGrad, attrs: attrs{"width": float64(c.Width), "batch": float64(c.Batch), "accumulate": truth(accumulate)}, args: all})
			grads := append(append([]float64(nil), dy.data...), dnext.data...)
			run := func(x, w, bias, tail []float64) []float64 {
				y, next := c.Run(x, w, bias, tail)
				return append(y, next...)
			}
			s.equal("dx", out["dx"], derivative(x, grads, func(x []float64) []float64 { return run(x, w, bias, tail) }), s.dtype)
			s.equal("dw", out["dw"], plus(accumulate, all["dw"], derivative(w, grads, func(w []float64) []float64 { return run(x, w, bias, tail) })), ir.F32)
			s.equal("dtail", out["dtail"], derivative(tail, grads, func(tail []float64) []float64 { return run(x, w, bias, tail) }), ir.F32)
			if all["dbias"] != nil {
				s.equal("dbias", out["dbias"], plus(accumulate, all["dbias"], derivative(bias, grads, func(bias []float64) []float64 { return run(x, w, bias, tail) })), ir.F32)
			}
		})
	})
}

// split compares an f32 result of a scan. If its operands are bf16, tensor cores may multiply f32 factors as sums of two bf16
// numbers, which have 16 significant bits.
func (s *suite) split(what string, got, want []float64) {
	s.Helper()
	if s.dtype != ir.BF16 {
		s.equal(what, got, want, ir.F32)
		return
	}
	slack, largest := make([]float64, len(want)), 1.0
	for _, x := range want {
		largest = max(largest, math.Abs(x))
	}
	for i := range slack {
		slack[i] = 0x1p-15 * largest
	}
	s.within(what, got, want, ir.F32, slack)
}

// eachDecay runs a case for heads of one column and of several.
func (s *suite) eachDecay(f func(s *suite, x, rate, bias *value, at attrs)) {
	for _, size := range []struct {
		rows, heads, dim int
		least            float64
	}{{70, 5, 1, 0}, {9, 2, 20, 0}, {70, 5, 1, 0.5}} {
		s.sub(fmt.Sprint(size), func(s *suite) {
			width := size.heads * size.dim
			f(s, s.normal(size.rows, width), s.f32(size.heads), s.typed(s.otherType(), width),
				attrs{"heads": float64(size.heads), "head_dim": float64(size.dim), "least": size.least})
		})
	}
}

func caseDecay(s *suite) {
	s.eachDecay(func(s *suite, x, rate, bias *value, at attrs) {
		in := args{"y": s.outF32(x.shape...), "step": s.outF32(x.shape...), "x": x, "rate": rate, "bias": bias}
		if at["head_dim"] > 1 {
			in["step"] = nil
		}
		out := s.run(call{op: ir.Decay, attrs: at, args: in})
		y, step := naive.Decay(x.data, rate.data, bias.data, at["least"])
		s.equal("y", out["y"], y, ir.F32)
		if in["step"] != nil {
			s.equal("step", out["step"], step, ir.F32)
		}
	})
}

func caseDecayGrad(s *suite) {
	s.eachDecay(func(s *suite, x, rate, bias *value, at attrs) {
		s.onOff(func(s *suite, accumulate bool) {
			dy, dstep := s.f32(x.shape...), s.f32(x.shape...)
			in := args{"dx": s.out(x.shape...), "drate": s.sum(accumulate, rate.shape...), "dbias": s.sum(accumulate, bias.shape...),
				"dy": dy, "dstep": dstep, "x": x, "rate": rate, "bias": bias}
			if at["head_dim"] > 1 {
				in["dstep"], dstep = nil, &value{data: make([]float64, len(dy.data))}
			}
			at["accumulate"] = truth(accumulate)
			out := s.run(call{op: ir.DecayGrad, attrs: at, args: in})
			grads := append(append([]float64(nil), dy.data...), dstep.data...)
			run := func(x, rate, bias []float64) []float64 {
				y, step := naive.Decay(x, rate, bias, at["least"])
				return append(y, step...)
			}
			s.equal("dx", out["dx"], derivative(x.data, grads, func(x []float64) []float64 { return run(x, rate.data, bias.data) }), s.dtype)
			s.equal("drate", out["drate"], plus(accumulate, in["drate"], derivative(rate.data, grads, func(r []float64) []float64 { return run(x.data, r, bias.data) })), ir.F32)
			s.equal("dbias", out["dbias"], plus(accumulate, in["dbias"], derivative(bias.data, grads, func(b []float64) []float64 { return run(x.data, rate.data, b) })), ir.F32)
		})
	})
}

// eachScaled runs a case for heads of one column and of several.
func (s *suite) eachScaled(f func(s *suite, x, factor *value, at attrs)) {
	for _, size := range [][3]int{{33, 20, 1}, {9, 2, 20}, {130, 2, 3}} {
		s.sub(fmt.Sprint(size), func(s *suite) {
			heads, dim := size[1], size[2]
			f(s, s.normal(size[0], heads*dim), s.typed(s.otherType(), heads), attrs{"heads": float64(heads), "head_dim": float64(dim)})
		})
	}
}

func caseScaleColumns(s *suite) {
	s.eachScaled(func(s *suite, x, factor *value, at attrs) {
		out := s.run(call{op: ir.ScaleColumns, attrs: at, args: args{"y": s.out(x.shape...), "x": x, "factor": factor}})
		s.equal("y", out["y"], naive.ScaleColumns(x.data, factor.data, int(at["head_dim"])), s.dtype)
	})
}

func caseScaleColumnsGrad(s *suite) {
	s.eachScaled(func(s *suite, x, factor *value, at attrs) {
		s.onOff(func(s *suite, accumulate bool) {
			dy := s.normal(x.shape...)
			in := args{"dx": s.out(x.shape...), "dfactor": s.sum(accumulate, factor.shape...), "dy": dy, "x": x, "factor": factor}
			at["accumulate"] = truth(accumulate)
			out := s.run(call{op: ir.ScaleColumnsGrad, attrs: at, args: in})
			dim := int(at["head_dim"])
			s.equal("dx", out["dx"], derivative(x.data, dy.data, func(x []float64) []float64 { return naive.ScaleColumns(x, factor.data, dim) }), s.dtype)
			s.equal("dfactor", out["dfactor"], plus(accumulate, in["dfactor"], derivative(factor.data, dy.data, func(f []float64) []float64 { return naive.ScaleColumns(x.data, f, dim) })), ir.F32)
		})
	})
}
