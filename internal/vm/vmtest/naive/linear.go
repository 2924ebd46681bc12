package naive

import (
	"fmt"
	"math"
	"slices"
)

// linearTape holds the values of linear attention that its backward pass needs.
type linearTape struct {
	raw               [3][]float64 // q, k and v before their convolutions
	logits, steps     []float64
	operands          ScanOperands
	out, normed, act  []float64
	gate              []float64
	lowSteps, lowGate []float64 // the input of the linear maps of steps and gate, if it is not that of the layer
}

// mixer returns the name of a layer's mixer, and linear reports whether that is linear attention.
func (cfg *Config) mixer(layer int) string {
	if n := len(cfg.Mixers); n > 0 {
		return cfg.Mixers[layer%n]
	}
	return "attention"
}

func (cfg *Config) linear(layer int) bool {
	mixer := cfg.mixer(layer)
	return mixer == "gated_delta" || mixer == "kimi_delta" || mixer == "mamba2"
}

// scan returns the sizes of a layer's scan: of the gated delta rule as in Qwen3-Next or, by channel, Kimi Linear, or of Mamba-2.
func (cfg *Config) scan(layer, batch int) Scan {
	s := Scan{
		Batch: batch, Heads: cfg.LinearKeyHeads, Shared: cfg.LinearValueHeads / cfg.LinearKeyHeads, KeyDim: cfg.LinearKeyDim, ValueDim: cfg.LinearValueDim,
		Channels: 1, Scale: 1,
	}
	if cfg.mixer(layer) != "mamba2" {
		s.Delta, s.Norm, s.Scale = true, 1e-6, 1/math.Sqrt(float64(cfg.LinearKeyDim))
	}
	if cfg.mixer(layer) == "kimi_delta" {
		s.Channels = cfg.LinearKeyDim
	}
	return s
}

// linearParameters lists the tensors of linear attention, without prefix.
func linearParameters(cfg Config, layer int) (list []tensor) {
	h, heads := cfg.Hidden, cfg.LinearValueHeads
	mamba, values := cfg.mixer(layer) == "mamba2", heads*cfg.LinearValueDim
	widths := []int{cfg.LinearKeyHeads * cfg.LinearKeyDim, cfg.LinearKeyHeads * cfg.LinearKeyDim, values}
	for i, name := range []string{"q", "k", "v"} {
		list = append(list, tensor{"linear.w" + name, []int{h, widths[i]}}, tensor{"linear.conv_" + name, []int{widths[i], cfg.LinearConv}})
		if mamba && cfg.ConvBias {
			list = append(list, tensor{"linear.b_conv_" + name, []int{widths[i]}})
		}
	}
	gamma := cfg.LinearValueDim
	if mamba {
		gamma = values
		list = append(list, tensor{"linear.skip", []int{heads}})
	} else {
		list = append(list, tensor{"linear.wb", []int{h, heads}})
	}
	steps, rows, gates := heads, h, h
	if cfg.mixer(layer) == "kimi_delta" {
		steps, rows, gates = widths[0], cfg.LinearKeyDim, cfg.LinearValueDim
		list = append(list, tensor{"linear.wa_low", []int{h, rows}}, tensor{"linear.wz_low", []int{h, gates}})
	}
	return append(list, tensor{"linear.wa", []int{rows, steps}}, tensor{"linear.rate", []int{heads}}, tensor{"linear.b_dt", []int{steps}},
		tensor{"linear.wz", []int{gates, values}}, tensor{"linear.norm.gamma", []int{gamma}}, tensor{"linear.wo", []int{values, h}})
}

func (m *model) conv(i int, t *linearTape) Conv {
	return Conv{Width: m.cfg.LinearConv, Batch: m.batch, Cols: len(t.raw[i]) / len(m.inputs)}
}

// linearAttend computes the middle of a layer with linear attention.
func (m *model) linearAttend(l int, t *tape) {
	in, a, cfg := fmt.Sprintf("layer.%d.linear.", l), &t.linear, &m.cfg
	t.norm1 = m.normBefore(t.x, fmt.Sprintf("layer.%d.ln1", l))
	for i, to := range []*[]float64{&a.operands.Q, &a.operands.K, &a.operands.V} {
		name := "qkv"[i : i+1]
		a.raw[i] = m.linear(t.norm1, in+"w"+name, "")
		*to, _ = m.conv(i, a).Run(a.raw[i], m.w[in+"conv_"+name], m.w[in+"b_conv_"+name], nil)
	}
	if a.lowSteps, a.lowGate = t.norm1, t.norm1; cfg.mixer(l) == "kimi_delta" {
		a.lowSteps, a.lowGate = m.linear(t.norm1, in+"wa_low", ""), m.linear(t.norm1, in+"wz_low", "")
	}
	a.steps, a.gate = m.linear(a.lowSteps, in+"wa", ""), m.linear(a.lowGate, in+"wz", "")
	if cfg.mixer(l) == "mamba2" {
		a.operands.Decay, a.operands.Beta = Decay(a.steps, m.w[in+"rate"], m.w[in+"b_dt"], cfg.StepMin)
		a.out, _ = cfg.scan(l, m.batch).Run(a.operands)
		a.out = add(a.out, ScaleColumns(a.operands.V, m.w[in+"skip"], cfg.LinearValueDim))
		a.normed = RMSNorm(GLU("silu", a.gate, a.out), ones(cfg.groupWidth()), cfg.NormEps)
		a.act = ScaleColumns(a.normed, m.w[in+"norm.gamma"], 1)
	} else {
		a.logits = m.linear(t.norm1, in+"wb", "")
		a.operands.Beta = Activate("sigmoid", a.logits)
		a.operands.Decay, _ = Decay(a.steps, m.w[in+"rate"], m.w[in+"b_dt"], 0)
		a.out, _ = cfg.scan(l, m.batch).Run(a.operands)
		a.normed = RMSNorm(a.out, m.w[in+"norm.gamma"], cfg.NormEps)
		a.act = GLU(cfg.gating(l), a.gate, a.normed)
	}
	t.attentionOut = m.linear(a.act, in+"wo", "")
	t.mid = add(t.x, m.normAfter(t.attentionOut, fmt.Sprintf("layer.%d.ln1_post", l)))
}

// gating names the function of the gate that multiplies the result of linear attention.
func (cfg *Config) gating(layer int) string {
	if cfg.mixer(layer) == "kimi_delta" {
		return "sigmoid"
	}
	return "silu"
}

// throughLow returns the gradient of a layer's operand through a linear map that may follow another one, of fewer columns.
func (m *model) throughLow(l int, t *tape, low, dy []float64, weight string) []float64 {
	d := m.linearGrad(low, dy, weight, "")
	if m.cfg.mixer(l) == "kimi_delta" {
		d = m.linearGrad(t.norm1, d, weight+"_low", "")
	}
	return d
}

// groupWidth returns the width of the groups that Mamba-2 normalises: that of all heads of values with the same keys.
func (cfg *Config) groupWidth() int {
	return cfg.LinearValueHeads / cfg.LinearKeyHeads * cfg.LinearValueDim
}

func ones(n int) []float64 { return slices.Repeat([]float64{1}, n) }

func (m *model) linearAttendGrad(l int, dmid []float64) []float64 {
	t, prefix, cfg := &m.tapes[l], fmt.Sprintf("layer.%d.", l), &m.cfg
	in, a := prefix+"linear.", &t.linear
	dact := m.linearGrad(a.act, m.normAfterGrad(t.attentionOut, dmid, prefix+"ln1_post"), in+"wo", "")
	var dgate, dout, skip, dgamma []float64
	if cfg.mixer(l) == "mamba2" {
		var dnormed, dfactor []float64
		dnormed, dgamma = ScaleColumnsGrad(a.normed, m.w[in+"norm.gamma"], dact, 1)
		dgated, _ := RMSNormGrad(GLU("silu", a.gate, a.out), ones(cfg.groupWidth()), dnormed, cfg.NormEps)
		dgate, dout = GLUGrad("silu", a.gate, a.out, dgated)
		skip, dfactor = ScaleColumnsGrad(a.operands.V, m.w[in+"skip"], dout, cfg.LinearValueDim)
		addTo(m.grads[in+"skip"], dfactor)
	} else {
		var dnormed []float64
		dgate, dnormed = GLUGrad(cfg.gating(l), a.gate, a.normed, dact)
		dout, dgamma = RMSNormGrad(a.out, m.w[in+"norm.gamma"], dnormed, cfg.NormEps)
	}
	addTo(m.grads[in+"norm.gamma"], dgamma)
	d := cfg.scan(l, m.batch).Grad(a.operands, dout, nil)
	addTo(d.V, skip)
	dnorm1 := m.throughLow(l, t, a.lowGate, dgate, in+"wz")
	for i, dy := range [][]float64{d.Q, d.K, d.V} {
		name := "qkv"[i : i+1]
		dx, dw, dbias := m.conv(i, a).Grad(a.raw[i], m.w[in+"conv_"+name], m.w[in+"b_conv_"+name], dy)
		addTo(m.grads[in+"conv_"+name], dw)
		if m.w[in+"b_conv_"+name] != nil {
			addTo(m.grads[in+"b_conv_"+name], dbias)
		}
		addTo(dnorm1, m.linearGrad(t.norm1, dx, in+"w"+name, ""))
	}
	var dstep []float64
	least := 0.0
	if cfg.mixer(l) == "mamba2" {
		dstep, least = d.Beta, cfg.StepMin
	} else {
		addTo(dnorm1, m.linearGrad(t.norm1, ActivateGrad("sigmoid", a.logits, d.Beta), in+"wb", ""))
	}
	dsteps, drate, dbias := DecayGrad(a.steps, m.w[in+"rate"], m.w[in+"b_dt"], d.Decay, dstep, least)
	addTo(m.grads[in+"rate"], drate)
	addTo(m.grads[in+"b_dt"], dbias)
	addTo(dnorm1, m.throughLow(l, t, a.lowSteps, dsteps, in+"wa"))
	return add(dmid, m.normBeforeGrad(t.x, dnorm1, prefix+"ln1"))
}

// Grad returns the gradients of a convolution of whole sequences. The bias may be nil.
func (c Conv) Grad(x, w, bias, dy []float64) (dx, dw, dbias []float64) {
	dx, dw, dbias = make([]float64, len(x)), make([]float64, len(w)), make([]float64, c.Cols)
	for i := range x {
		col, sum := i%c.Cols, 0.0
		if bias != nil {
			sum = bias[col]
		}
		each := func(visit func(from, weight int)) {
			for j := range c.Width {
				if from := i - j*c.Batch*c.Cols; from >= 0 {
					visit(from, (col+1)*c.Width-1-j)
				}
			}
		}
		each(func(from, weight int) { sum += w[weight] * x[from] })
		s := 1 / (1 + math.Exp(-sum))
		z := dy[i] * (s + sum*s*(1-s))
		dbias[col] += z
		each(func(from, weight int) {
			dx[from] += z * w[weight]
			dw[weight] += z * x[from]
		})
	}
	return dx, dw, dbias
}

// DecayGrad returns the gradients of Decay's operands, given those of its results. That of the second may be nil.
func DecayGrad(x, rate, bias, dy, dstep []float64, least float64) (dx, drate, dbias []float64) {
	dx, drate, dbias = make([]float64, len(x)), make([]float64, len(rate)), make([]float64, len(bias))
	y, step := Decay(x, rate, bias, least)
	for i := range x {
		c := i % len(bias)
		head := c / (len(bias) / len(rate))
		d := -math.Exp(rate[head]) * dy[i]
		if dstep != nil {
			d += dstep[i]
		}
		if step[i] > least {
			dx[i] = d / (1 + math.Exp(-x[i]-bias[c]))
		}
		dbias[c] += dx[i]
		drate[head] += dy[i] * y[i]
	}
	return dx, drate, dbias
}
