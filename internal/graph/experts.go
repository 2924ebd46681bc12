package graph

import (
	"math"
	"slices"

	"sppo.dev/ir"
	"sppo.dev/lang"
)

// This file builds MLPs with experts. A router chooses experts for each token. The rows of tokens are copied once for each
// choice, and those of an expert are adjacent, so every row is multiplied by its expert's matrices. There are as many rows
// as choices, however unequally tokens choose, and no token is dropped. In mode megatron, the ranks of a stage divide the columns
// of every expert, and in the other modes each rank has all experts for its own tokens, unless Split.Spread is set: then each rank
// has some experts, of which it computes with the rows of all ranks. It has room for all rows that may choose these, and uses as much of
// it as tokens need.

// Names of the tensors of experts begin with these prefixes.
const (
	prefixExperts = "experts."
	prefixShared  = "shared."
)

// scores maps the values of scoring_func to those of the attribute of route.
var scores = map[string]int64{lang.ScoringSoftmax: ir.ScoresSoftmax, lang.ScoringSigmoid: ir.ScoresSigmoid, lang.ScoringTop: ir.ScoresOfChosen}

// choice holds the results of a router: for each row, the experts that it uses and the weights of their results.
type choice struct {
	rows                  Rows
	top                   int64
	weights, places, ends int
	chosen                int
	slots                 int64   // the most places of a row
	share                 float64 // of the rows in the order of experts that there are if all experts have equally many
}

// ExpertRanks returns the number of ranks that can have different experts, and expertGroup their group and the rows that they have together.
func (s Split) ExpertRanks() int {
	if s.HeadRanks() > 1 {
		return s.HeadRanks()
	}
	return s.SP
}

func (s Split) expertGroup() (group int, rows Rows) {
	if s.HeadRanks() == 1 {
		return GroupSP, Full
	}
	return s.headGroup(), Held
}

// expertsLocal returns the number of experts of a rank.
func (g *Model) expertsLocal() int64 {
	if g.Spread {
		return int64(g.Experts / g.ExpertRanks())
	}
	return int64(g.Experts)
}

// gatherRows gathers the rows of all ranks that have different experts, or that divide them, and scatterSums reduces results to the
// rank's own rows.
func (g *Model) gatherRows(b *builder, x int, name string) int {
	if !g.Spread {
		return g.enter(b, x, name)
	}
	group, rows := g.expertGroup()
	return b.regroup(ir.AllGather, group, g.ExpertRanks(), rows, x, name)
}

func (g *Model) scatterSums(b *builder, x int, name string) int {
	if !g.Spread {
		return g.leave(b, x, name)
	}
	group, _ := g.expertGroup()
	return b.regroup(ir.ReduceScatter, group, g.ExpertRanks(), Local, x, name)
}

// ofExperts returns a parameter with a matrix for each expert, of which ranks that do not have different experts divide columns.
func (g *Model) ofExperts(name string, rows, cols int64, std float64) Param {
	p := g.forExperts(name, rows, cols, ConstExpertRow)
	p.Planes, p.Std = int64(g.Experts), std
	return p
}

// forExperts returns a parameter with the given number of rows for each expert.
func (g *Model) forExperts(name string, rows, cols int64, start string) Param {
	p := Param{Name: prefixExperts + name, Shape: [2]int64{int64(g.Experts) * rows, cols}}
	if g.Spread {
		p.Local, p.Shard, p.Start = [2]int64{g.expertsLocal() * rows, cols}, ByRows, start
		if g.HeadRanks() > 1 {
			p = g.onRing(p)
		}
		return p
	}
	p.Local, p.Shard, p.Start = [2]int64{p.Shape[0], g.ffnLocal(int(cols))}, ByCols, g.ffnConst(int(cols))
	return g.divided(p)
}

// experts appends an MLP with experts.
func (g *Model) experts(b *builder, x int) int {
	e, h, f := int64(b.role.form.Experts), g.rowWidth(), int64(b.role.form.FFN)
	logits := g.logits(b, "router", x, e, g.bias(b, lang.BiasRouter, g.replicated("router.b", e, 0)))
	in := x
	if g.LatentSize == 0 || g.SharedFFN > 0 && !g.Replicates() {
		in = g.gatherRows(b, x, "ln2.gathered")
	}
	correction := g.correction(b, e)
	gathered := g.gatherRows(b, logits, "router.gathered")
	g.routerLoss(b, logits, gathered, e)
	to := g.route(b, "route", gathered, correction, e, int64(g.TopExperts), g.expertsLocal(), g.routing())
	b.node(ir.ExpertLoad, []Attr{truth("accumulate")}, all(b.value(Value{Name: "router.load", Kind: Load, Rows: Fixed, Count: e, DType: ir.F32})), all(to.chosen))
	own := in
	if g.LatentSize > 0 {
		own = g.gatherRows(b, g.latent(b, "in", x, int64(g.Hidden), h, g.InitStd), "latent.gathered")
	}
	rows := b.activation("experts.in", to.rows, to.slots*h)
	b.node(ir.Permute, to.attrs(), to.by(rows), all(own), all(to.places))
	act := g.widen(b, prefixExperts, to.rows, &to, func(name, weight, bias string) int {
		p := g.ofExperts(weight, h, f, g.InitStd)
		y, w := b.activation(name, to.rows, to.slots*p.Local[1]), b.param(p)
		b.node(ir.MatmulGrouped, to.loads(), to.by(y), to.by(rows), all(to.ends), all(w), g.bias(b, lang.BiasExperts, g.forExperts(bias, 1, f, ConstExpert)))
		return y
	})
	// The last matrices are stored transposed, so that ranks that divide columns do so as in the others.
	down := g.ofExperts(g.downName(), h, f, g.InitStd/math.Sqrt(2*float64(g.Layers)))
	out := b.activation("experts.out", to.rows, to.slots*h)
	b.node(ir.MatmulGrouped, append(to.loads(), truth("trans_b")), to.by(out), to.by(act), all(to.ends), all(b.param(down)))
	y := g.unpermute(b, "experts.sum", to, out, h)
	if g.Replicates() { // ranks have the whole shared expert, and their own rows for it
		in = x
	}
	if g.LatentSize > 0 {
		y = g.latent(b, "out", g.scatterSums(b, y, "latent.sum"), h, int64(g.Hidden), down.Std)
		if g.SharedFFN > 0 {
			y = g.sum(b, "experts.shared", y, g.leave(b, g.shared(b, x, in), "shared.sum"))
		}
		return y
	}
	early := g.Spread && g.Replicates()
	if early {
		y = g.scatterSums(b, y, "mlp.sum")
	}
	if g.SharedFFN > 0 {
		y = g.sum(b, "experts.shared", y, g.shared(b, x, in))
	}
	if !early {
		y = g.scatterSums(b, y, "mlp.sum")
	}
	if g.HasBias(lang.BiasExperts) {
		y = g.sum(b, "mlp.biased", y, g.downBiases(b, logits, correction, to))
	}
	return y
}

// rowWidth returns the width of the rows that experts take and return.
func (g *Model) rowWidth() int64 {
	if g.LatentSize > 0 {
		return int64(g.LatentSize)
	}
	return int64(g.Hidden)
}

// latent appends a linear map between the rows of the model and those of experts, of which every rank has all columns.
func (g *Model) latent(b *builder, name string, x int, in, out int64, std float64) int {
	w := g.reduced(Param{Name: "latent.w_" + name, Shape: [2]int64{in, out}, Local: [2]int64{in, out}, Std: std})
	return g.linear(b, "latent."+name, Local, x, w, Arg{Value: Missing})
}

// logits appends the logits of a router for the rank's own rows, in f32.
func (g *Model) logits(b *builder, name string, x int, experts int64, bias Arg) int {
	h := int64(g.Hidden)
	w := b.param(g.reduced(Param{Name: name + ".w", Shape: [2]int64{h, experts}, Local: [2]int64{h, experts}, Std: g.InitStd}))
	y := b.value(Value{Name: name + ".logits", Rows: Local, Cols: experts, DType: ir.F32})
	b.node(ir.Matmul, nil, all(y), all(x), all(w), bias)
	return y
}

// correction appends what is added to the scores for the choice of experts, in f32, or returns an absent operand.
func (g *Model) correction(b *builder, experts int64) Arg {
	if !g.Correction {
		return Arg{Value: Missing}
	}
	p := Param{Name: "router.correction", Vector: true, Shape: [2]int64{experts, 1}, Local: [2]int64{experts, 1}, Planes: 1, Constant: true}
	return flat(b.param(p))
}

// routing returns the attributes of the model's router.
func (g *Model) routing() []Attr {
	attrs := []Attr{integer("scores", scores[g.Scoring]), integer("groups", int64(g.ExpertGroups)), integer("top_groups", int64(g.TopGroups))}
	if g.TopMethod == lang.GroupLimited {
		attrs = append(attrs, integer("group_scores", ir.GroupsByMax))
	}
	if g.NormTop {
		attrs = append(attrs, truth("renormalize"))
	}
	if g.Scoring == lang.ScoringSigmoid {
		attrs = append(attrs, float("eps", 1e-20))
	}
	if g.RoutedScale != 1 {
		attrs = append(attrs, float("scale", g.RoutedScale))
	}
	return attrs
}

// routerLoss is what the backward pass needs for the losses of a router besides its logits.
type routerLoss struct {
	counts  int // of the rank's rows of whole sequences, or Missing
	of      int // the group over which they are summed
	members int
	attrs   []Attr
}

// routerLoss records that the gradient of the logits has that of the router's losses, and appends the counts that it needs. The
// number of tokens by expert is a constant of the losses, but complete only when the last subsequence has passed, before any
// backward pass. gathered holds the logits of all ranks that divide heads.
func (g *Model) routerLoss(b *builder, logits, gathered int, experts int64) {
	balance, probability, name := g.RouterAuxLoss*float64(experts)/float64(g.sequence), scores[g.Scoring], "router.counts"
	if g.Joint() {
		balance /= float64(g.sparse() * g.sparse())
		probability, name = ir.ScoresSoftmax, ValueJoint
	} else {
		balance /= float64(g.TopExperts)
	}
	if g.RouterZLoss == 0 && balance == 0 {
		return
	}
	l := routerLoss{counts: Missing, attrs: []Attr{
		integer("scores", probability), from("batch", FromBatch),
		{Name: "z", Source: PerToken, Value: ir.Float(2 * g.RouterZLoss)}, {Name: "balance", Source: PerToken, Value: ir.Float(balance)},
	}}
	if balance > 0 {
		l.counts = b.value(Value{Name: name, Kind: Tally, Rows: PerSequence, Cols: experts, DType: ir.F32})
		b.node(ir.ExpertCounts, []Attr{integer("top", int64(g.TopExperts)), from("batch", FromBatch), from("accumulate", NotFirst)}, all(l.counts), all(gathered))
		if !g.Joint() { // otherwise ranks sum the counts of all layers together
			l.of, l.members = g.Counters()
		}
	}
	b.losses[logits] = l
}

// ValueJoint names the tally of the tokens of each expert in all layers, which they share.
const ValueJoint = "router.joint"

// Joint reports whether the loss that balances experts is that of all layers together.
func (g *Model) Joint() bool { return g.AuxLoss == lang.AuxJoint }

// TalliesJoint reports whether the backward pass of any layer reads ValueJoint.
func (g *Model) TalliesJoint() bool {
	return g.Joint() && slices.ContainsFunc(g.roles, func(r *role) bool {
		v := slices.IndexFunc(r.block.Values, func(v Value) bool { return v.Name == ValueJoint })
		return v >= 0 && r.block.ReadsBack(v)
	})
}

// sparse returns the number of layers with experts.
func (g *Model) sparse() (n int) {
	for layer := range g.Layers {
		if g.FormOf(layer).Experts > 0 {
			n++
		}
	}
	return n
}

// Counters returns the group of ranks of a stage that count the choices of different tokens, and the number of its members. Ranks that
// divide experts, or have different ones, count those of the same tokens.
func (g *Model) Counters() (group, members int) {
	if g.Replicates() && !g.Spread {
		return GroupSP, g.SP
	}
	return GroupRing, g.SP / g.ExpertRanks()
}

// Balances reports whether a step changes a parameter, whose tensor has the given name, at some rate according to the load of experts.
func (g *Model) Balances(p *Param, tensor string, rate float64) bool {
	return p.Constant && rate > 0 && !lang.Freezes(&g.Model, g.Freeze, tensor, p.Group())
}

// penalize adds the gradient of the losses of a router, if the value is its logits.
func (b *builder) penalize(logits int) {
	l, ok := b.losses[logits]
	if !ok {
		return
	}
	counts := Arg{Value: l.counts}
	if counts.Value != Missing && l.members > 1 {
		v := b.Values[l.counts]
		v.Name, v.Kind = v.Name+".sum", Activation
		counts = all(b.value(v))
		b.node(ir.Axpby, []Attr{float("alpha", 1), float("beta", 0)}, counts, all(l.counts))
		b.node(ir.AllReduce, []Attr{group(l.of)}, counts)
	}
	d := b.newGrad(logits)
	b.node(ir.RouterLossGrad, l.attrs, all(d), b.need(logits), counts)
	b.contribute(logits, all(d))
}

// route appends the choice of experts for the rows of logits. The rank has all of them, or as many as own.
func (g *Model) route(b *builder, name string, logits int, correction Arg, experts, top, own int64, attrs []Attr) choice {
	rows, slots := b.Values[logits].Rows, min(top, own)
	if own < experts {
		attrs = append(attrs, constant("first", ConstExpert))
	}
	to := choice{
		rows: rows, top: top, slots: slots, share: float64(top*own) / float64(experts*slots),
		weights: b.value(Value{Name: name + ".weights", Rows: rows, Cols: top, DType: ir.F32}),
		places:  b.value(Value{Name: name + ".places", Rows: rows, Cols: top, DType: ir.I32}),
		ends:    b.value(Value{Name: name + ".ends", Rows: Fixed, Count: own, DType: ir.I32}),
	}
	to.chosen = b.value(Value{Name: name + ".experts", Rows: rows, Cols: top, DType: ir.I32})
	b.node(ir.Route, append(attrs, integer("top", top)), all(to.weights), all(to.chosen), all(to.places), all(to.ends), all(logits), correction)
	return to
}

// attrs returns the attributes of instructions that put rows into the order of experts, or back, and loads those of products.
func (c *choice) attrs() []Attr { return append(c.loads(), integer("top", c.top)) }

func (c *choice) loads() (attrs []Attr) {
	if c.share < 1 {
		attrs = append(attrs, float("share", c.share))
	}
	return attrs
}

// by returns an operand with a row for each slot.
func (c *choice) by(v int) Arg { return by(c.slots, all(v)) }

// unpermute appends the sums of the rows of each token, times their weights.
func (g *Model) unpermute(b *builder, name string, to choice, x int, cols int64) int {
	y := b.activation(name, to.rows, cols)
	b.node(ir.Unpermute, to.attrs(), all(y), to.by(x), all(to.places), all(to.weights))
	return y
}

func (g *Model) sum(b *builder, name string, x, y int) int {
	sum := b.activation(name, b.Values[x].Rows, b.Values[x].Cols)
	b.node(ir.Add, nil, all(sum), all(x), all(y))
	return sum
}

// shared appends the expert that all tokens use. A router with one expert, whose score is a sigmoid, multiplies its result.
func (g *Model) shared(b *builder, x, in int) int {
	y := g.dense(b, prefixShared, g.SharedFFN, in, "")
	if !g.SharedGate {
		return y
	}
	logits := g.enter(b, g.logits(b, "shared.router", x, 1, Arg{Value: Missing}), "shared.router.gathered")
	to := g.route(b, "shared.route", logits, Arg{Value: Missing}, 1, 1, 1, []Attr{integer("scores", ir.ScoresSigmoid)})
	return g.unpermute(b, "shared.out", to, y, int64(g.Hidden))
}

// downBiases appends the biases of the last linear maps of experts, times the weights, for the rank's own rows: ranks that
// divide an expert must not all add them. To multiply rows of ones by the biases puts them in the order of experts.
func (g *Model) downBiases(b *builder, logits int, correction Arg, to choice) int {
	e, h := int64(b.role.form.Experts), int64(g.Hidden)
	if to.rows != Local {
		to = g.route(b, "route.own", logits, correction, e, to.top, e, g.routing())
	}
	ones, rows := b.activation("experts.ones", Local, to.top), b.activation("experts.biases", Local, to.top*h)
	name := "b_down"
	if !g.Gated {
		name = "b2"
	}
	p := g.reduced(Param{Name: prefixExperts + name, Shape: [2]int64{e, h}, Local: [2]int64{e, h}, Planes: e})
	b.node(ir.Fill, []Attr{float("value", 1)}, to.by(ones))
	b.node(ir.MatmulGrouped, nil, to.by(rows), to.by(ones), all(to.ends), all(b.param(p)))
	return g.unpermute(b, "experts.bias", to, rows, h)
}

// The gradients of these operations.

func routeGradient(b *builder, n Node) {
	logits := n.Args[4].Value
	var attrs []Attr
	for _, a := range n.Attrs {
		if slices.ContainsFunc(ir.Ops[ir.RouteGrad].Attrs, func(row ir.AttrInfo) bool { return row.Name == a.Name }) {
			attrs = append(attrs, a)
		}
	}
	dlogits := b.newGrad(logits)
	b.node(ir.RouteGrad, attrs, all(dlogits), b.grad(n.Args[0]), b.need(logits), b.need(n.Args[1].Value))
	b.contribute(logits, all(dlogits))
}

func permuteGradient(b *builder, n Node) {
	b.linear(n, ir.PermuteGrad, n.Attrs, b.grad(n.Args[0]), b.need(n.Args[2].Value))
}

func unpermuteGradient(b *builder, n Node) {
	x, places, weights := n.Args[1], n.Args[2].Value, n.Args[3].Value
	dx, dweights := b.newGrad(x.Value), b.newGrad(weights)
	b.Values[dweights].DType = ir.F32
	b.node(ir.UnpermuteGrad, n.Attrs, by(x.Heads, all(dx)), all(dweights), b.grad(n.Args[0]), by(x.Heads, b.need(x.Value)), b.need(places), b.need(weights))
	b.contribute(x.Value, all(dx))
	b.contribute(weights, all(dweights))
}

// groupedGradient is the rule for y = x w + bias, where w has a matrix for each expert, stored transposed or not.
func groupedGradient(b *builder, n Node) {
	x, ends, w, bias, transposed := n.Args[1], b.need(n.Args[2].Value), n.Args[3].Value, n.Args[4].Value, n.Attrs[attrIndex(n.Op, "trans_b")]
	dy, dbias, share := b.grad(n.Args[0]), Arg{Value: Missing}, n.Attrs[attrIndex(n.Op, "share")]
	if bias != Missing {
		dbias = all(b.weightGrad(bias))
	}
	back := transposed
	back.Value = ir.Bool(transposed.Value.Bits == 0)
	if dx, ok := b.grads[x.Value]; ok && b.writtenBy(n.Op, dx.Value) {
		b.node(ir.MatmulGrouped, []Attr{back, share, truth("accumulate")}, by(x.Heads, dx), dy, ends, all(w))
	} else {
		dx := b.newGrad(x.Value)
		b.node(ir.MatmulGrouped, []Attr{back, share}, by(x.Heads, all(dx)), dy, ends, all(w))
		b.contribute(x.Value, all(dx))
	}
	db, a := all(b.weightGrad(w)), Arg{Value: Missing}
	if b.isResult(db.Value) {
		a = by(x.Heads, b.need(x.Value))
	} else { // its matrices are frozen
		db = a
	}
	if db.Value != Missing || bias != Missing {
		b.node(ir.MatmulGroupedWeightGrad, []Attr{transposed, share, from("accumulate", NotFirst), from("accumulate_bias", NotFirst)}, db, dbias, dy, ends, a)
	}
}
