package meaning

import (
	"math"
	"slices"

	"sppo.dev/ir"
)

// linearAttention is linear attention in the reference, with the values that its backward pass needs.
type linearAttention struct {
	x, y         [3]value // q, k and v before and after their convolutions
	logits, beta value
	steps, decay value
	gate         value
	norm         *normalized
	documents    []value
}

// mixer names what comes before the MLP of a layer.
func (l *layer) mixer() string {
	if n := len(l.Mixers); n > 0 {
		return l.Mixers[l.number%n]
	}
	return "attention"
}

func (l *layer) scanner() scanner {
	return scanner{
		shared: int64(l.LinearValueHeads / l.LinearKeyHeads), keyDim: int64(l.LinearKeyDim), valueDim: int64(l.LinearValueDim), channels: 1, delta: true,
		norm: 1e-6, scale: 1 / math.Sqrt(float64(l.LinearKeyDim)),
	}
}

// widths returns the widths of q, k and v, and of all others, which have a number for each head.
func (l *layer) widths() (of [3]int64, heads int64) {
	keys, heads := int64(l.LinearKeyHeads*l.LinearKeyDim), int64(l.LinearValueHeads)
	return [3]int64{keys, keys, heads * int64(l.LinearValueDim)}, heads
}

func functionKey(name, function string) key {
	return newKey(name).int(int64(slices.Index(ir.Functions, function)))
}

// gatedDelta adds linear attention.
func (l *layer) gatedDelta(x value) value {
	a, h := &l.scanned, int64(l.Hidden)
	widths, heads := l.widths()
	if l.documents {
		a.documents = []value{dataKey(ir.AsPositions)}
	}
	for i, name := range []string{"q", "k", "v"} {
		a.x[i] = l.linear("linear.w"+name, "", false, x, h, widths[i])
		a.y[i] = l.plain(l.name("linear."+name), ir.Conv, convKey("conv", int64(l.LinearConv), resultO), append([]value{a.x[i], l.weight(l.name("linear.conv_" + name))}, a.documents...)...)
	}
	a.logits, a.steps = l.linear("linear.wb", "", false, x, h, heads), l.linear("linear.wa", "", false, x, h, heads)
	a.beta = l.plain(l.name("linear.beta"), ir.Activation, functionKey("activation", "sigmoid"), a.logits)
	a.decay = l.plain(l.name("linear.decay"), ir.Decay, decayKey("decay", 1, resultO), a.steps, l.weight(l.name("linear.rate")), l.weight(l.name("linear.b_dt")))
	o := l.plain(l.name("linear.scan"), ir.Scan, l.scanner().key("scan", resultO), a.operands()...)
	l.plain(l.name("linear.state"), ir.Scan, l.scanner().key("scan", resultNext), a.operands()...)
	a.norm = l.normOf(l.name("linear.norm"), o, int64(l.LinearValueDim), heads, true, 0)
	a.gate = l.linear("linear.wz", "", false, x, h, widths[2])
	y := l.plain(l.name("linear.gated"), ir.GLU, functionKey("glu", "silu"), a.gate, a.norm.y)
	return l.linear("linear.wo", "", false, y, widths[2], h)
}

func (a *linearAttention) operands(more ...value) []value {
	return append(append(more, a.y[0], a.y[1], a.y[2], a.decay, a.beta), a.documents...)
}

// gatedDeltaGradient adds its gradients, and returns that of its operand.
func (l *layer) gatedDeltaGradient(dy value) (dx value) {
	a, width := &l.scanned, int64(l.LinearConv)
	g := l.named(l.name("the gradient of linear.gated"), l.linearGradient("linear.wo", dy))
	dx = l.linearGradient("linear.wz", l.plain(l.name("d.linear.gate"), ir.GLUGrad, functionKey("glu_grad_gate", "silu"), g, a.gate, a.norm.y))
	do := l.normGradient(a.norm, l.plain(l.name("d.linear.norm"), ir.GLUGrad, functionKey("glu_grad_up", "silu"), g, a.gate, a.norm.y))
	var d [resultState + 1]value
	for i, name := range map[int64]string{resultQ: "q", resultK: "k", resultV: "v", resultDecay: "decay", resultBeta: "beta", resultState: "state"} {
		d[i] = l.plain(l.name("d.linear."+name), ir.ScanGrad, l.scanner().key("scan_grad", i), a.operands(do)...)
	}
	for i, name := range []string{"q", "k", "v"} {
		w := l.name("linear.conv_" + name)
		operands := append([]value{d[resultQ+i], a.x[i], l.weight(w)}, a.documents...)
		t := term{kind: overQuery, window: width, need: box{full, {0, l.sequence}, full, full}}
		through := l.add("the gradient through "+w, ir.ConvGrad, t, convKey("conv_grad", width, resultO), operands...)
		l.gradient(w, l.overTokens(w+".grad", ir.ConvGrad, convKey("conv_grad", width, resultNext), operands...))
		dx = dx.plus(l.linearGradient("linear.w"+name, through))
	}
	dx = dx.plus(l.linearGradient("linear.wb", l.plain(l.name("d.linear.logits"), ir.ActivationGrad, functionKey("activation_grad", "sigmoid"), d[resultBeta], a.logits)))
	rate, bias := l.name("linear.rate"), l.name("linear.b_dt")
	operands := []value{d[resultDecay], a.steps, l.weight(rate), l.weight(bias)}
	l.gradient(rate, l.overTokens(rate+".grad", ir.DecayGrad, decayKey("decay_grad", 1, resultRate), operands...))
	l.gradient(bias, l.overTokens(bias+".grad", ir.DecayGrad, decayKey("decay_grad", 1, resultBias), operands...))
	return dx.plus(l.linearGradient("linear.wa", l.plain(l.name("d.linear.steps"), ir.DecayGrad, decayKey("decay_grad", 1, resultO), operands...)))
}
