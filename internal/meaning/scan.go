package meaning

import (
	"math"
	"slices"

	"sppo.dev/ir"
)

// linearAttention is linear attention in the reference, with the values that its backward pass needs.
type linearAttention struct {
	x, y          [3]value // q, k and v before and after their convolutions
	logits, beta  value
	steps, decay  value
	gate, skipped value
	norm          *normalized
	documents     []value
}

// mixer names what comes before the MLP of a layer.
func (l *layer) mixer() string {
	if n := len(l.Mixers); n > 0 {
		return l.Mixers[l.number%n]
	}
	return "attention"
}

func (l *layer) scanner() scanner {
	s := scanner{shared: int64(l.LinearValueHeads / l.LinearKeyHeads), keyDim: int64(l.LinearKeyDim), valueDim: int64(l.LinearValueDim), channels: 1}
	if l.mixer() != "mamba2" {
		s.delta, s.norm, s.scale = true, 1e-6, 1/math.Sqrt(float64(l.LinearKeyDim))
	}
	if l.mixer() == "kimi_delta" {
		s.channels = s.keyDim
	}
	return s
}

// widths returns the widths of q, k and v, and of all others, which have a number for each head.
func (l *layer) widths() (of [3]int64, heads int64) {
	keys, heads := int64(l.LinearKeyHeads*l.LinearKeyDim), int64(l.LinearValueHeads)
	return [3]int64{keys, keys, heads * int64(l.LinearValueDim)}, heads
}

func functionKey(name, function string) key {
	return newKey(name).int(int64(slices.Index(ir.Functions, function)))
}

// linearAttend adds linear attention.
func (l *layer) linearAttend(x value) value {
	a, h := &l.scanned, int64(l.Hidden)
	widths, heads := l.widths()
	if l.documents {
		a.documents = []value{dataKey(ir.AsPositions)}
	}
	for i, name := range []string{"q", "k", "v"} {
		a.x[i] = l.linear("linear.w"+name, "", false, x, h, widths[i])
		a.y[i] = l.plain(l.name("linear."+name), ir.Conv, convKey("conv", int64(l.LinearConv), resultO), append([]value{a.x[i]}, l.convolution(name)...)...)
	}
	if s := l.scanner(); l.mixer() == "kimi_delta" {
		a.steps = l.linear("linear.wa", "", false, l.linear("linear.wa_low", "", false, x, h, s.keyDim), s.keyDim, widths[1])
		a.gate = l.linear("linear.wz", "", false, l.linear("linear.wz_low", "", false, x, h, s.valueDim), s.valueDim, widths[2])
	} else {
		a.steps = l.linear("linear.wa", "", false, x, h, heads)
		a.gate = l.linear("linear.wz", "", false, x, h, widths[2])
	}
	decays := []value{a.steps, l.weight(l.name("linear.rate")), l.weight(l.name("linear.b_dt"))}
	a.decay = l.plain(l.name("linear.decay"), ir.Decay, l.decayKey("decay", resultO), decays...)
	y := value{}
	switch l.mixer() {
	case "gated_delta", "kimi_delta":
		a.logits = l.linear("linear.wb", "", false, x, h, heads)
		a.beta = l.plain(l.name("linear.beta"), ir.Activation, functionKey("activation", "sigmoid"), a.logits)
		a.norm = l.normOf(l.name("linear.norm"), l.scan(), int64(l.LinearValueDim), heads, true, 0)
		y = l.plain(l.name("linear.gated"), ir.GLU, functionKey("glu", l.gating()), a.gate, a.norm.y)
	case "mamba2":
		a.beta = l.plain(l.name("linear.step"), ir.Decay, l.decayKey("decay", resultStep), decays...)
		skip := l.plain(l.name("linear.skip times v"), ir.ScaleColumns, scaleKey("scale_columns", int64(l.LinearValueDim)), a.y[2], l.weight(l.name("linear.skip")))
		a.skipped = l.named(l.name("linear.scan with the skip"), l.scan().plus(skip))
		y = l.plain(l.name("linear.gated"), ir.GLU, functionKey("glu", "silu"), a.gate, a.skipped)
		groups := int64(l.LinearKeyHeads)
		a.norm = l.normalize(&normalized{name: l.name("linear.norm"), x: y, width: widths[2] / groups, groups: groups, rms: true, numbers: 1, gamma: constantOne})
		y = l.plain(l.name("linear.weighted"), ir.ScaleColumns, scaleKey("scale_columns", 1), a.norm.y, l.weight(l.name("linear.norm.gamma")))
	}
	return l.linear("linear.wo", "", false, y, widths[2], h)
}

// gating names the function of the gate that multiplies the result.
func (l *layer) gating() string {
	if l.mixer() == "kimi_delta" {
		return "sigmoid"
	}
	return "silu"
}

// throughLow returns the gradient of a layer's operand through a linear map that may follow another one, of fewer columns.
func (l *layer) throughLow(weight string, dy value) value {
	d := l.linearGradient(weight, dy)
	if l.mixer() == "kimi_delta" {
		d = l.linearGradient(weight+"_low", l.named("the gradient of "+l.name(weight+"_low")+" times its input", d))
	}
	return d
}

// convolution returns the operands of a convolution besides x.
func (l *layer) convolution(name string) []value {
	operands := []value{l.weight(l.name("linear.conv_" + name))}
	if l.convBias() {
		operands = append(operands, l.weight(l.name("linear.b_conv_"+name)))
	}
	return append(operands, l.scanned.documents...)
}

func (l *layer) convBias() bool { return l.ConvBias && l.mixer() == "mamba2" }

func (l *layer) decayKey(name string, result int64) key {
	least := 0.0
	if l.mixer() == "mamba2" {
		least = l.StepMin
	}
	return decayKey(name, l.scanner().channels, least, result)
}

// scan adds the scan, and returns its result.
func (l *layer) scan() value {
	operands := l.scanned.operands()
	l.plain(l.name("linear.state"), ir.Scan, l.scanner().key("scan", resultNext), operands...)
	return l.plain(l.name("linear.scan"), ir.Scan, l.scanner().key("scan", resultO), operands...)
}

func (a *linearAttention) operands(more ...value) []value {
	return append(append(more, a.y[0], a.y[1], a.y[2], a.decay, a.beta), a.documents...)
}

// linearAttendGradient adds its gradients, and returns that of its operand.
func (l *layer) linearAttendGradient(dy value) (dx value) {
	a, width := &l.scanned, int64(l.LinearConv)
	g := l.named(l.name("the gradient of linear.wo"), l.linearGradient("linear.wo", dy))
	gated := a.norm.y // what the gate multiplies
	if l.mixer() == "mamba2" {
		gated = a.skipped
		gamma := l.name("linear.norm.gamma")
		l.gradient(gamma, l.overTokens(gamma+".grad", ir.ScaleColumnsGrad, scaleKey("scale_columns_grad", 1), g, a.norm.y))
		g = l.normGradient(a.norm, l.plain("the gradient of "+l.name("linear.norm"), ir.ScaleColumnsGrad, scaleKey("scale_columns", 1), g, l.weight(gamma)))
	}
	dx = l.throughLow("linear.wz", l.plain(l.name("d.linear.gate"), ir.GLUGrad, functionKey("glu_grad_gate", l.gating()), g, a.gate, gated))
	do := l.plain(l.name("d.linear.up"), ir.GLUGrad, functionKey("glu_grad_up", l.gating()), g, a.gate, gated)
	var skip value // the gradient of v through the skip
	if l.mixer() != "mamba2" {
		do = l.normGradient(a.norm, do)
	} else {
		w, dim := l.name("linear.skip"), int64(l.LinearValueDim)
		l.gradient(w, l.overTokens(w+".grad", ir.ScaleColumnsGrad, scaleKey("scale_columns_grad", dim), do, a.y[2]))
		skip = l.plain("the gradient through "+w, ir.ScaleColumnsGrad, scaleKey("scale_columns", dim), do, l.weight(w))
	}
	var d [resultState + 1]value
	for i, name := range map[int64]string{resultQ: "q", resultK: "k", resultV: "v", resultDecay: "decay", resultBeta: "beta", resultState: "state"} {
		d[i] = l.plain(l.name("d.linear."+name), ir.ScanGrad, l.scanner().key("scan_grad", i), a.operands(do)...)
	}
	d[resultV] = l.named(l.name("d.linear.v, with the skip"), d[resultV].plus(skip))
	for i, name := range []string{"q", "k", "v"} {
		operands := append([]value{d[resultQ+i], a.x[i]}, l.convolution(name)...)
		t, w := term{kind: overQuery, window: width, need: box{full, {0, l.sequence}, full, full}}, l.name("linear.conv_"+name)
		through := l.add("the gradient through "+w, ir.ConvGrad, t, convKey("conv_grad", width, resultO), operands...)
		l.gradient(w, l.overTokens(w+".grad", ir.ConvGrad, convKey("conv_grad", width, resultNext), operands...))
		if bias := l.name("linear.b_conv_" + name); l.convBias() {
			l.gradient(bias, l.overTokens(bias+".grad", ir.ConvGrad, convKey("conv_grad", width, resultConvBias), operands...))
		}
		dx = dx.plus(l.linearGradient("linear.w"+name, through))
	}
	given := []value{d[resultDecay]}
	if !a.logits.isZero() {
		dx = dx.plus(l.linearGradient("linear.wb", l.plain(l.name("d.linear.logits"), ir.ActivationGrad, functionKey("activation_grad", "sigmoid"), d[resultBeta], a.logits)))
	} else {
		given = append(given, d[resultBeta])
	}
	rate, bias := l.name("linear.rate"), l.name("linear.b_dt")
	operands := []value{a.steps, l.weight(rate), l.weight(bias)}
	l.gradient(rate, l.overTokens(rate+".grad", ir.DecayGrad, l.decayKey("decay_grad", resultRate), append(given[:1:1], operands...)...))
	l.gradient(bias, l.overTokens(bias+".grad", ir.DecayGrad, l.decayKey("decay_grad", resultBias), append(slices.Clip(given), operands...)...))
	return dx.plus(l.throughLow("linear.wa", l.plain(l.name("d.linear.steps"), ir.DecayGrad, l.decayKey("decay_grad", resultO), append(slices.Clip(given), operands...)...)))
}
