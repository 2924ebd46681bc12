package naive

import (
	"fmt"
	"math"
)

// linearTape holds the values of linear attention that its backward pass needs.
type linearTape struct {
	raw              [3][]float64 // q, k and v before their convolutions
	logits, steps    []float64
	operands         ScanOperands
	out, normed, act []float64
	gate             []float64
}

// linear reports whether a layer has linear attention: the gated delta rule as in Qwen3-Next.
func (cfg *Config) linear(layer int) bool {
	n := len(cfg.Mixers)
	return n > 0 && cfg.Mixers[layer%n] == "gated_delta"
}

func (cfg *Config) scan(batch int) Scan {
	return Scan{
		Batch: batch, Heads: cfg.LinearKeyHeads, Shared: cfg.LinearValueHeads / cfg.LinearKeyHeads, KeyDim: cfg.LinearKeyDim, ValueDim: cfg.LinearValueDim,
		Channels: 1, Delta: true, Norm: 1e-6, Scale: 1 / math.Sqrt(float64(cfg.LinearKeyDim)),
	}
}

// linearParameters lists the tensors of linear attention, without prefix.
func linearParameters(cfg Config) (list []tensor) {
	h, heads := cfg.Hidden, cfg.LinearValueHeads
	widths := []int{cfg.LinearKeyHeads * cfg.LinearKeyDim, cfg.LinearKeyHeads * cfg.LinearKeyDim, heads * cfg.LinearValueDim}
	for i, name := range []string{"q", "k", "v"} {
		list = append(list, tensor{"linear.w" + name, []int{h, widths[i]}}, tensor{"linear.conv_" + name, []int{widths[i], cfg.LinearConv}})
	}
	return append(list, tensor{"linear.wb", []int{h, heads}}, tensor{"linear.wa", []int{h, heads}}, tensor{"linear.rate", []int{heads}}, tensor{"linear.b_dt", []int{heads}},
		tensor{"linear.wz", []int{h, widths[2]}}, tensor{"linear.norm.gamma", []int{cfg.LinearValueDim}}, tensor{"linear.wo", []int{widths[2], h}})
}

func (m *model) conv(i int, t *linearTape) Conv {
	return Conv{Width: m.cfg.LinearConv, Batch: m.batch, Cols: len(t.raw[i]) / len(m.inputs)}
}

// linearAttend computes the middle of a layer with linear attention.
func (m *model) linearAttend(l int, t *tape) {
	in, a := fmt.Sprintf("layer.%d.linear.", l), &t.linear
	t.norm1 = m.normBefore(t.x, fmt.Sprintf("layer.%d.ln1", l))
	for i, to := range []*[]float64{&a.operands.Q, &a.operands.K, &a.operands.V} {
		name := "qkv"[i : i+1]
		a.raw[i] = m.linear(t.norm1, in+"w"+name, "")
		*to, _ = m.conv(i, a).Run(a.raw[i], m.w[in+"conv_"+name], nil, nil)
	}
	a.logits, a.steps = m.linear(t.norm1, in+"wb", ""), m.linear(t.norm1, in+"wa", "")
	a.operands.Beta = Activate("sigmoid", a.logits)
	a.operands.Decay, _ = Decay(a.steps, m.w[in+"rate"], m.w[in+"b_dt"])
	a.out, _ = m.cfg.scan(m.batch).Run(a.operands)
	a.normed = RMSNorm(a.out, m.w[in+"norm.gamma"], m.cfg.NormEps)
	a.gate = m.linear(t.norm1, in+"wz", "")
	a.act = GLU("silu", a.gate, a.normed)
	t.attentionOut = m.linear(a.act, in+"wo", "")
	t.mid = add(t.x, m.normAfter(t.attentionOut, fmt.Sprintf("layer.%d.ln1_post", l)))
}

func (m *model) linearAttendGrad(l int, dmid []float64) []float64 {
	t, prefix := &m.tapes[l], fmt.Sprintf("layer.%d.", l)
	in, a := prefix+"linear.", &t.linear
	dact := m.linearGrad(a.act, m.normAfterGrad(t.attentionOut, dmid, prefix+"ln1_post"), in+"wo", "")
	dgate, dnormed := GLUGrad("silu", a.gate, a.normed, dact)
	dout, dgamma := RMSNormGrad(a.out, m.w[in+"norm.gamma"], dnormed, m.cfg.NormEps)
	addTo(m.grads[in+"norm.gamma"], dgamma)
	d := m.cfg.scan(m.batch).Grad(a.operands, dout, nil)
	dnorm1 := m.linearGrad(t.norm1, dgate, in+"wz", "")
	for i, dy := range [][]float64{d.Q, d.K, d.V} {
		name := "qkv"[i : i+1]
		dx, dw := m.conv(i, a).Grad(a.raw[i], m.w[in+"conv_"+name], dy)
		addTo(m.grads[in+"conv_"+name], dw)
		addTo(dnorm1, m.linearGrad(t.norm1, dx, in+"w"+name, ""))
	}
	dsteps, drate, dbias := DecayGrad(a.steps, m.w[in+"rate"], m.w[in+"b_dt"], d.Decay)
	addTo(m.grads[in+"rate"], drate)
	addTo(m.grads[in+"b_dt"], dbias)
	addTo(dnorm1, m.linearGrad(t.norm1, dsteps, in+"wa", ""))
	addTo(dnorm1, m.linearGrad(t.norm1, ActivateGrad("sigmoid", a.logits, d.Beta), in+"wb", ""))
	return add(dmid, m.normBeforeGrad(t.x, dnorm1, prefix+"ln1"))
}

// Grad returns the gradients of a convolution of whole sequences without bias.
func (c Conv) Grad(x, w, dy []float64) (dx, dw []float64) {
	dx, dw = make([]float64, len(x)), make([]float64, len(w))
	for i := range x {
		col, sum := i%c.Cols, 0.0
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
		each(func(from, weight int) {
			dx[from] += z * w[weight]
			dw[weight] += z * x[from]
		})
	}
	return dx, dw
}

// DecayGrad returns the gradients of Decay's operands, given that of its first result.
func DecayGrad(x, rate, bias, dy []float64) (dx, drate, dbias []float64) {
	dx, drate, dbias = make([]float64, len(x)), make([]float64, len(rate)), make([]float64, len(bias))
	y, _ := Decay(x, rate, bias)
	for i := range x {
		c := i % len(bias)
		head := c / (len(bias) / len(rate))
		dx[i] = -math.Exp(rate[head]) * dy[i] / (1 + math.Exp(-x[i]-bias[c]))
		dbias[c] += dx[i]
		drate[head] += dy[i] * y[i]
	}
	return dx, drate, dbias
}
