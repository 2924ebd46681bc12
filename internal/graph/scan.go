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

// gatedDelta appends the gated delta rule of Yang, Kautz, Hatamizadeh 2024, as in Qwen3-Next.
func (g *Model) gatedDelta(b *builder, in int) int {
	whole, own := g.scanSizes(1), g.scanSizes(g.HeadRanks())
	rows := g.enter(b, in, "ln1.gathered")
	project := func(name string, t ir.DType, all, local int64, start string) int {
		return g.byHeads(b, name, g.scanned(b, name, rows, t, g.columns(prefixLinear+"w"+name, int64(g.Hidden), all, local, start)), local)
	}
	q := g.convolved(b, "q", project("q", b.act, whole.keys(), own.keys(), ConstLinearKeys), whole.keys(), ConstLinearKeys)
	k := g.convolved(b, "k", project("k", b.act, whole.keys(), own.keys(), ConstLinearKeys), whole.keys(), ConstLinearKeys)
	v := g.convolved(b, "v", project("v", b.act, whole.values(), own.values(), ConstLinearValues), whole.values(), ConstLinearValues)
	logits, steps := project("b", ir.F32, whole.heads, own.heads, ConstLinearHead), project("a", ir.F32, whole.heads, own.heads, ConstLinearHead)
	beta, decay := b.value(b.like(logits, "beta")), b.value(b.like(logits, "decay"))
	b.node(ir.Activation, []Attr{function("sigmoid")}, all(beta), all(logits))
	rate, bias := Param{Name: "rate", Std: 1}, Param{Name: "b_dt", Fill: decayStep}
	b.node(ir.Decay, []Attr{integer("heads", own.heads), integer("head_dim", 1)}, all(decay), Arg{Value: Missing}, all(steps),
		all(b.param(g.perHead(rate, whole.heads, 0, ConstLinearHead))), all(b.param(g.perHead(bias, whole.heads, 0, ConstLinearHead))))
	o := b.activation("scan.out", Held, own.values())
	before, after := b.carry(g.Whole, Value{Name: "state", Planes: own.heads, Rows: Each, Count: own.keyDim, Cols: own.valueDim, DType: ir.F32})
	b.node(ir.Scan, []Attr{
		integer("heads", own.keyHeads), integer("shared", own.heads/own.keyHeads), integer("key_dim", own.keyDim), integer("value_dim", own.valueDim),
		from("batch", FromBatch), integer("channels", 1), truth("delta"), float("norm", 1e-6), float("scale", 1/math.Sqrt(float64(own.keyDim))),
	}, all(o), after, all(q), all(k), all(v), all(decay), all(beta), before, g.positions(b))
	if g.ulysses() {
		local := b.activation("scan.local", Local, whole.values())
		b.node(ir.AllToAll, g.exchange(1, true), all(local), all(o))
		o = local
	}
	gate := g.scanned(b, "z", rows, b.act, g.columns(prefixLinear+"wz", int64(g.Hidden), whole.values(), own.values(), ConstLinearValues))
	y := b.activation("scan.gated", g.layerRows(), b.Values[o].Cols)
	b.node(ir.GLU, []Attr{function("silu")}, all(y), all(gate), all(g.scanNorm(b, o)))
	part := g.linear(b, "scan.proj", g.layerRows(), y, g.rows(prefixLinear+"wo", whole.values(), own.values(), int64(g.Hidden), ConstLinearValues), Arg{Value: Missing})
	return g.leave(b, part, "scan.sum")
}

// scanned appends a linear map of a layer's rows.
func (g *Model) scanned(b *builder, name string, rows int, t ir.DType, w Param) int {
	y := b.value(Value{Name: name, Rows: g.layerRows(), Cols: w.Local[1], DType: t})
	b.node(ir.Matmul, nil, all(y), all(rows), all(b.param(w)))
	return y
}

// byHeads exchanges the rank's own rows for its own heads, if ranks hold whole weights.
func (g *Model) byHeads(b *builder, name string, x int, cols int64) int {
	if !g.ulysses() {
		return x
	}
	y := b.value(Value{Name: name + ".heads", Rows: Held, Cols: cols, DType: b.Values[x].DType})
	b.node(ir.AllToAll, g.exchange(1, false), all(y), all(x))
	return y
}

// convolved appends the short convolution of x, whose columns are those of this rank's heads.
func (g *Model) convolved(b *builder, name string, x int, whole int64, start string) int {
	width := int64(g.LinearConv)
	w := b.param(g.perHead(Param{Name: "conv_" + name, Small: true, Std: 1 / math.Sqrt(3*float64(width))}, whole, width, start)) // as PyTorch initialises convolutions
	before, after := b.carry(g.Whole, Value{Name: "tail." + name, Rows: Each, Count: width, Cols: b.Values[x].Cols, DType: b.act})
	y := b.value(b.like(x, name+".conv"))
	b.node(ir.Conv, []Attr{integer("width", width), from("batch", FromBatch)}, all(y), after, all(x), all(w), Arg{Value: Missing}, before, g.positions(b))
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
	x, w := n.Args[2].Value, n.Args[3].Value
	dx := b.newGrad(x)
	b.node(ir.ConvGrad, append(n.Attrs[:2:2], from("accumulate", NotFirst)), all(dx), all(b.weightGrad(w)), Arg{Value: Missing}, dtail,
		b.grad(n.Args[0]), dnext, b.need(x), all(w), Arg{Value: Missing}, b.needOptional(n.Args[5]), n.Args[6])
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
	x, rate, bias := n.Args[2].Value, n.Args[3].Value, n.Args[4].Value
	dx := b.newGrad(x)
	b.Values[dx].DType = b.Values[x].DType
	b.node(ir.DecayGrad, append(n.Attrs[:2:2], from("accumulate", NotFirst)), all(dx), all(b.weightGrad(rate)), all(b.weightGrad(bias)),
		b.grad(n.Args[0]), Arg{Value: Missing}, b.need(x), all(rate), all(bias))
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
func (f *form) scans() bool { return f.Mixer == lang.MixerGatedDelta }
