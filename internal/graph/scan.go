package graph

import (
	"math"

	"sppo.dev/ir"
	"sppo.dev/lang"
)

// This file builds layers with linear attention. From token to token, such a layer updates a state of a fixed size, and a short
// convolution reads the last few tokens. Both pass from a subsequence to the next: a value of kind Carry holds them, and each
// subsequence replaces it. A copy of what a subsequence begins with is a unit like any other, except that it is never recomputed,
// because that would repeat all earlier subsequences. Ranks divide heads, after the convolution as before it.

// prefixLinear begins the names of the tensors of linear attention.
const prefixLinear = "linear."

// Constants of a rank in models with linear attention.
const (
	ConstLinearKeys   = "linear_k_first"    // first column of its heads of queries and keys
	ConstLinearValues = "linear_v_first"    // first column of its heads of values
	ConstLinearHead   = "linear_head_first" // its first head of values
)

// decayStep is the initial bias of decays: the state loses a share of ln(1 + exp(decayStep)) times the rate from token to token.
const decayStep = -3.5

// scanSizes holds the sizes of linear attention on one rank, or of the whole layer.
type scanSizes struct{ keyHeads, heads, keyDim, valueDim int64 }

func (g *Model) scanSizes(ranks int) scanSizes {
	return scanSizes{int64(g.LinearKeyHeads / ranks), int64(g.LinearValueHeads / ranks), int64(g.LinearKeyDim), int64(g.LinearValueDim)}
}

func (s scanSizes) keys() int64   { return s.keyHeads * s.keyDim }
func (s scanSizes) values() int64 { return s.heads * s.valueDim }

// linearConst returns the value of a constant for the rank with a part of the heads.
func (g *Model) linearConst(name string, part int) int64 {
	s := g.scanSizes(g.HeadRanks())
	return int64(part) * map[string]int64{ConstLinearKeys: s.keys(), ConstLinearValues: s.values(), ConstLinearHead: s.heads}[name]
}

// linearLayer is a layer with linear attention while it is built.
type linearLayer struct {
	*Model
	b          *builder
	rows       int       // of its linear maps
	whole, own scanSizes // of all heads, and of those of this rank
}

func (g *Model) linearLayer(b *builder, in int) *linearLayer {
	return &linearLayer{g, b, g.enter(b, in, "ln1.gathered"), g.scanSizes(1), g.scanSizes(g.HeadRanks())}
}

// gatedDelta appends the gated delta rule of Yang, Kautz, Hatamizadeh 2024, as in Qwen3-Next.
func (g *Model) gatedDelta(b *builder, in int) int { return g.linearLayer(b, in).delta("silu") }

// kimiDelta appends Kimi delta attention of Kimi Team 2025, Kimi Linear. Its decays and its gate are linear maps of fewer columns.
func (g *Model) kimiDelta(b *builder, in int) int { return g.linearLayer(b, in).delta("sigmoid") }

// delta appends attention by a delta rule. A function of the gate multiplies the result.
func (l *linearLayer) delta(gating string) int {
	b := l.b
	q, k, v := l.keys("q"), l.keys("k"), l.values("v")
	logits := l.project("b", ir.F32, l.whole.heads, l.own.heads, ConstLinearHead)
	beta := b.value(b.like(logits, "beta"))
	b.node(ir.Activation, []Attr{function("sigmoid")}, all(beta), all(logits))
	decay := l.decay(Arg{Value: Missing})
	o := l.scan([]int{q, k, v, decay, beta}, truth("delta"), float("norm", 1e-6), float("scale", 1/math.Sqrt(float64(l.own.keyDim))))
	o = l.byRows(o)
	gate := l.gate()
	y := b.value(b.like(o, "scan.gated"))
	b.node(ir.GLU, []Attr{function(gating)}, all(y), all(gate), all(l.scanNorm(b, o)))
	return l.leaves(y)
}

// mamba2 appends the mixer of Dao, Gu 2024, Mamba-2, as in Nemotron-H: B, C and x are k, q and v of linear attention, of which the steps
// of the decays are the beta. The norm comes after the gate, and each group of heads that share B and C has its own.
func (g *Model) mamba2(b *builder, in int) int {
	l := g.linearLayer(b, in)
	v, k, q := l.values("v"), l.keys("k"), l.keys("q")
	step := b.value(Value{Name: "beta", Rows: Held, Cols: l.own.heads, DType: ir.F32})
	decay := l.decay(all(step))
	o := l.scan([]int{q, k, v, decay, step})
	skipped := b.value(b.like(v, "scan.skipped"))
	factor := b.param(g.perHead(Param{Name: "skip", Fill: 1}, l.whole.heads, 0, ConstLinearHead))
	b.node(ir.ScaleColumns, []Attr{integer("heads", l.own.heads), integer("head_dim", l.own.valueDim)}, all(skipped), all(v), all(factor))
	o = l.byRows(g.sum(b, "scan.skip", o, skipped))
	gate := l.gate()
	y := b.value(b.like(o, "scan.gated"))
	b.node(ir.GLU, []Attr{function("silu")}, all(y), all(gate), all(o))
	return l.leaves(l.groupNorm(y))
}

// keys and values append a linear map with the width of keys or values, and its convolution.
func (l *linearLayer) keys(name string) int {
	return l.convolved(name, l.project(name, l.b.act, l.whole.keys(), l.own.keys(), ConstLinearKeys), l.whole.keys(), ConstLinearKeys)
}

func (l *linearLayer) values(name string) int {
	return l.convolved(name, l.project(name, l.b.act, l.whole.values(), l.own.values(), ConstLinearValues), l.whole.values(), ConstLinearValues)
}

// project appends a linear map, of which it returns the columns of this rank's heads. If ranks hold whole weights, they exchange rows.
func (l *linearLayer) project(name string, t ir.DType, all, own int64, start string) int {
	return l.byHeads(name, l.scanned(name, l.rows, t, l.columns(prefixLinear+"w"+name, int64(l.Hidden), all, own, start)), own)
}

// channels reports whether every channel of a state has its own decay.
func (l *linearLayer) channels() bool { return l.b.role.form.Mixer == lang.MixerKimiDelta }

// lowered appends a linear map of the layer's rows to a few columns, all of which every rank has, if the layer has decays by channel. It
// returns the rows that the next linear map takes, and their width.
func (l *linearLayer) lowered(name string, width int64) (rows int, cols int64) {
	if !l.channels() {
		return l.rows, int64(l.Hidden)
	}
	w := Param{Name: prefixLinear + "w" + name + "_low", Shape: [2]int64{int64(l.Hidden), width}, Local: [2]int64{int64(l.Hidden), width}, Std: l.InitStd}
	return l.scanned(name+".low", l.rows, l.b.act, l.reduced(w)), width
}

// gate appends the linear map whose activation multiplies the result.
func (l *linearLayer) gate() int {
	rows, width := l.lowered("z", l.whole.valueDim)
	return l.scanned("z", rows, l.b.act, l.columns(prefixLinear+"wz", width, l.whole.values(), l.own.values(), ConstLinearValues))
}

// leaves appends the last linear map.
func (l *linearLayer) leaves(y int) int {
	w := l.Model.rows(prefixLinear+"wo", l.whole.values(), l.own.values(), int64(l.Hidden), ConstLinearValues)
	return l.leave(l.b, l.linear(l.b, "scan.proj", l.layerRows(), y, w, Arg{Value: Missing}), "scan.sum")
}

// decay appends the decays of heads, and their steps unless the operand is absent.
func (l *linearLayer) decay(step Arg) int {
	whole, own, dim, start := l.whole.heads, l.own.heads, int64(1), ConstLinearHead
	if l.channels() {
		whole, own, dim, start = l.whole.keys(), l.own.keys(), l.own.keyDim, ConstLinearKeys
	}
	rows, width := l.lowered("a", l.whole.keyDim)
	x := l.byHeads("a", l.scanned("a", rows, ir.F32, l.columns(prefixLinear+"wa", width, whole, own, start)), own)
	y := l.b.value(l.b.like(x, "decay"))
	attrs := []Attr{integer("heads", l.own.heads), integer("head_dim", dim)}
	if step.Value != Missing && l.StepMin > 0 {
		attrs = append(attrs, float("least", l.StepMin))
	}
	rate := l.b.param(l.perHead(Param{Name: "rate", Std: 1}, l.whole.heads, 0, ConstLinearHead))
	bias := l.b.param(l.perHead(Param{Name: "b_dt", Fill: decayStep}, whole, 0, start))
	l.b.node(ir.Decay, attrs, all(y), step, all(x), all(rate), all(bias))
	return y
}

// scan appends a scan with the operands q, k, v, decay and beta.
func (l *linearLayer) scan(operands []int, attrs ...Attr) int {
	own := l.own
	channels := int64(1)
	if l.channels() {
		channels = own.keyDim
	}
	o := l.b.activation("scan.out", Held, own.values())
	before, after := l.b.carry(l.Whole, Value{Name: "state", Planes: own.heads, Rows: Each, Count: own.keyDim, Cols: own.valueDim, DType: ir.F32})
	args := []Arg{all(o), after}
	for _, v := range operands {
		args = append(args, all(v))
	}
	l.b.node(ir.Scan, append(attrs,
		integer("heads", own.keyHeads), integer("shared", own.heads/own.keyHeads), integer("key_dim", own.keyDim), integer("value_dim", own.valueDim),
		from("batch", FromBatch), integer("channels", channels),
	), append(args, before, l.positions(l.b))...)
	return o
}

// byRows exchanges heads for the rank's own rows, if ranks hold whole weights.
func (l *linearLayer) byRows(o int) int {
	if !l.ulysses() {
		return o
	}
	local := l.b.activation("scan.local", Local, l.whole.values())
	l.b.node(ir.AllToAll, l.exchange(1, true), all(local), all(o))
	return local
}

// scanned appends a linear map of rows.
func (l *linearLayer) scanned(name string, rows int, t ir.DType, w Param) int {
	y := l.b.value(Value{Name: name, Rows: l.layerRows(), Cols: w.Local[1], DType: t})
	l.b.node(ir.Matmul, nil, all(y), all(rows), all(l.b.param(w)))
	l.adapt(l.b, w, all(y), rows)
	return y
}

// byHeads exchanges the rank's own rows for its own heads, if ranks hold whole weights.
func (l *linearLayer) byHeads(name string, x int, cols int64) int {
	if !l.ulysses() {
		return x
	}
	y := l.b.value(Value{Name: name + ".heads", Rows: Held, Cols: cols, DType: l.b.Values[x].DType})
	l.b.node(ir.AllToAll, l.exchange(1, false), all(y), all(x))
	return y
}

// convolved appends the short convolution of x, whose columns are those of this rank's heads.
func (l *linearLayer) convolved(name string, x int, whole int64, start string) int {
	b, width := l.b, int64(l.LinearConv)
	w := b.param(l.perHead(Param{Name: "conv_" + name, Small: true, Std: 1 / math.Sqrt(3*float64(width))}, whole, width, start)) // as PyTorch initialises convolutions
	bias := Arg{Value: Missing}
	if l.ConvBias && b.role.form.Mixer == lang.MixerMamba2 {
		bias = all(b.param(l.perHead(Param{Name: "b_conv_" + name}, whole, 0, start)))
	}
	before, after := b.carry(l.Whole, Value{Name: "tail." + name, Rows: Each, Count: width, Cols: b.Values[x].Cols, DType: b.act})
	y := b.value(b.like(x, name+".conv"))
	b.node(ir.Conv, []Attr{integer("width", width), from("batch", FromBatch)}, all(y), after, all(x), all(w), bias, before, l.positions(b))
	return y
}

// perHead returns a parameter with a row, or with several, for each head. Ranks divide it as they divide heads, even if they
// hold whole matrices.
func (g *Model) perHead(p Param, rows, cols int64, start string) Param {
	p.Name, p.Vector, p.Shape = prefixLinear+p.Name, cols == 0, [2]int64{rows, max(cols, 1)}
	if p.Local = p.Shape; g.HeadRanks() == 1 {
		return g.reduced(p)
	}
	p.Local[0], p.Shard, p.Start = rows/int64(g.HeadRanks()), ByRows, start
	return g.onRing(p)
}

// scanNorm appends RMSNorm of each head of the result of a scan. Its weights have no offset.
func (g *Model) scanNorm(b *builder, o int) int {
	v, width := b.Values[o], int64(g.LinearValueDim)
	heads := v.Cols / width
	y, stats := b.activation("scan.normed", v.Rows, v.Cols), b.value(Value{Name: "scan.stats", Rows: v.Rows, Cols: heads, DType: ir.F32})
	gamma := b.param(g.replicated(prefixLinear+"norm.gamma", width, 1))
	b.node(ir.RMSNorm, []Attr{float("eps", g.NormEps)}, by(heads, all(y)), by(heads, all(stats)), by(heads, all(o)), all(gamma))
	return y
}

// groupNorm appends RMSNorm of each group of heads, and multiplies its columns by their weights.
func (l *linearLayer) groupNorm(x int) int {
	b, v := l.b, l.b.Values[x]
	width := l.whole.values() / l.whole.keyHeads
	groups := v.Cols / width
	normed, stats := b.value(b.like(x, "scan.normed")), b.value(Value{Name: "scan.stats", Rows: v.Rows, Cols: groups, DType: ir.F32})
	ones := b.value(Value{Name: "scan.ones", Rows: Fixed, Count: width, DType: b.act})
	b.node(ir.Fill, []Attr{float("value", 1)}, all(ones))
	b.node(ir.RMSNorm, []Attr{float("eps", l.NormEps)}, by(groups, all(normed)), by(groups, all(stats)), by(groups, all(x)), all(ones))
	gamma := l.slicedBias(prefixLinear+"norm.gamma", l.whole.values(), l.own.values(), ConstLinearValues)
	gamma.Fill = 1
	y := b.value(b.like(x, "scan.weighted"))
	b.node(ir.ScaleColumns, []Attr{integer("heads", v.Cols), integer("head_dim", 1)}, all(y), all(normed), all(b.param(gamma)))
	return y
}

// carry adds what passes from a subsequence to the next. It returns the copy of what the subsequence begins with, and the value that its
// end replaces. Nothing precedes an undivided sequence.
func (b *builder) carry(undivided bool, v Value) (before, after Arg) {
	next := v
	next.Name += ".next"
	if undivided {
		return Arg{Value: Missing}, all(b.value(next))
	}
	next.Kind = Carry
	x, y := b.value(v), b.value(next)
	b.node(ir.CopyD2D, nil, elements(x), elements(y))
	return all(x), all(y)
}

// Carries reports whether a value passes from a subsequence to the next, or its gradient back.
func (v *Value) Carries() bool { return v.Kind == Carry || v.Kind == CarryGrad }

// The gradients of these operations. A gradient of kind CarryGrad comes from the next subsequence, and is replaced by that of what this
// subsequence begins with.

func scanGradient(b *builder, n Node) {
	dstate, dnext := b.carryGrads(n.Args[7], n.Args[1])
	args := []Arg{}
	for i := 2; i < 7; i++ {
		d := b.newGrad(n.Args[i].Value)
		b.Values[d].DType = b.Values[n.Args[i].Value].DType
		args = append(args, all(d))
	}
	args = append(args, dstate, b.grad(n.Args[0]), dnext)
	for i := 2; i < 7; i++ {
		args = append(args, b.need(n.Args[i].Value))
	}
	b.node(ir.ScanGrad, n.Attrs, append(args, b.needOptional(n.Args[7]), n.Args[8])...)
	for i := 2; i < 7; i++ {
		b.contribute(n.Args[i].Value, args[i-2])
	}
}

func convGradient(b *builder, n Node) {
	dtail, dnext := b.carryGrads(n.Args[5], n.Args[1])
	x, w, bias, dbias := n.Args[2].Value, n.Args[3].Value, n.Args[4], Arg{Value: Missing}
	if bias.Value != Missing {
		dbias = all(b.weightGrad(bias.Value))
	}
	dx := b.newGrad(x)
	b.node(ir.ConvGrad, append(n.Attrs[:2:2], from("accumulate", NotFirst)), all(dx), all(b.weightGrad(w)), dbias, dtail,
		b.grad(n.Args[0]), dnext, b.need(x), all(w), bias, b.needOptional(n.Args[5]), n.Args[6])
	b.contribute(x, all(dx))
}

// carryGrads returns the gradients of what a subsequence begins with and of what it leaves to the next, which is absent if the sequence is
// undivided.
func (b *builder) carryGrads(before, after Arg) (dbefore, dafter Arg) {
	v := b.Values[after.Value]
	v.Name, v.DType = "d."+v.Name, ir.F32
	d := b.value(v)
	if before.Value == Missing {
		return all(d), Arg{Value: Missing}
	}
	b.Values[d].Kind = CarryGrad
	b.grads[after.Value] = all(d)
	begins := b.newGrad(before.Value)
	b.Values[begins].DType = ir.F32
	b.grads[before.Value] = all(begins)
	return all(begins), all(d)
}

// carryGradient replaces the gradient of a carried value.
func carryGradient(b *builder, n Node) {
	b.node(ir.CopyD2D, nil, elements(b.grads[n.Args[1].Value].Value), elements(b.grads[n.Args[0].Value].Value))
}

func decayGradient(b *builder, n Node) {
	x, rate, bias, dstep := n.Args[2].Value, n.Args[3].Value, n.Args[4].Value, Arg{Value: Missing}
	if n.Args[1].Value != Missing {
		dstep = b.grad(n.Args[1])
	}
	dx := b.newGrad(x)
	b.Values[dx].DType = b.Values[x].DType
	b.node(ir.DecayGrad, append(n.Attrs[:3:3], from("accumulate", NotFirst)), all(dx), all(b.weightGrad(rate)), all(b.weightGrad(bias)),
		b.grad(n.Args[0]), dstep, b.need(x), all(rate), all(bias))
	b.contribute(x, all(dx))
}

func scaleColumnsGradient(b *builder, n Node) {
	x, factor := n.Args[1].Value, n.Args[2].Value
	dx := b.newGrad(x)
	b.node(ir.ScaleColumnsGrad, append(n.Attrs[:2:2], from("accumulate", NotFirst)), all(dx), all(b.weightGrad(factor)), b.grad(n.Args[0]), b.need(x), all(factor))
	b.contribute(x, all(dx))
}

// needOptional is need, but for an operand that may be absent.
func (b *builder) needOptional(a Arg) Arg {
	if a.Value == Missing {
		return a
	}
	return b.need(a.Value)
}

// like returns a value like another, with another name.
func (b *builder) like(v int, name string) Value {
	return Value{Name: name, Rows: b.Values[v].Rows, Cols: b.Values[v].Cols, DType: b.Values[v].DType}
}

// scans reports whether layers of the form have linear attention.
func (f *form) scans() bool { return !f.Attends() && f.Mixer != lang.MixerNone }
