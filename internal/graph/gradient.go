package graph

import (
	"fmt"
	"slices"

	"sppo.dev/ir"
)

// gradient is a rule: it appends to the backward pass the nodes that carry the gradients of a node's results to
// its inputs. Rules are called from the last forward node to the first, so every reader of a value has
// contributed to its gradient before the rule of its producer is called.
type gradient func(b *builder, n Node)

var gradients = [ir.NumOps]gradient{
	ir.Embed:         embedGradient,
	ir.PositionEmbed: positionGradient,
	ir.LayerNorm:     layerNormGradient,
	ir.RMSNorm:       rmsNormGradient,
	ir.Matmul:        matmulGradient,
	ir.Rope:          ropeGradient,
	ir.Attention:     attentionGradient,
	ir.AttentionSink: sinkGradient,
	ir.Activation:    activationGradient,
	ir.GLU:           gluGradient,
	ir.Add:           addGradient,
	ir.AllGather:     gatherGradient,
	ir.ReduceScatter: scatterGradient,
	ir.AllToAll:      exchangeGradient,
	ir.Cast:          castGradient,
	ir.Axpby:         scaleGradient,
	ir.Dropout:       dropoutGradient,
	ir.Route:         routeGradient,
	ir.Permute:       permuteGradient,
	ir.Unpermute:     unpermuteGradient,
	ir.MatmulGrouped: groupedGradient,
	ir.ConcatHeads:   concatGradient,
	ir.Scan:          scanGradient,
	ir.Conv:          convGradient,
	ir.Decay:         decayGradient,
	ir.ScaleColumns:  scaleColumnsGradient,
	ir.CopyD2D:       carryGradient,
	ir.Fill:          func(*builder, Node) {},
	ir.ExpertCounts:  func(*builder, Node) {}, // constants; matmul's rule reads them
	ir.ExpertLoad:    func(*builder, Node) {},
	ir.Rotate:        func(*builder, Node) {}, // attention's rule sends keys and their gradients around the ring
	ir.LoadTokens:    func(*builder, Node) {},
}

// saving is how the backward pass gets the results of an opcode.
type saving uint8

const (
	byPlacement    saving = iota // kept, offloaded or recomputed, by the placement of their unit
	cheap                        // like byPlacement, but recompute = selective recomputes them
	never                        // always recomputed: the node only converts data that is kept in another form
	neverIfInverse               // never if the attribute inverse is set, otherwise byPlacement
	always                       // never recomputed, so that a choice cannot differ, or because earlier subsequences computed it
)

// savings has no entry for opcodes whose results are saved according to their placement. Attention's gradient
// needs Q by heads, and nothing needs Q by rows, so the two directions of all_to_all differ.
var savings = [ir.NumOps]saving{
	ir.LayerNorm: cheap, ir.RMSNorm: cheap, ir.Activation: cheap, ir.GLU: cheap,
	ir.AllGather: never, ir.LoadTokens: never, ir.Rotate: never, ir.Dropout: never,
	ir.Permute: never, ir.Fill: never, ir.Route: always, ir.CopyD2D: always,
	ir.Conv: cheap, ir.Decay: cheap, ir.ScaleColumns: cheap,
	ir.AllToAll: neverIfInverse,
}

// differentiate derives the backward pass from the forward pass and the gradient of the output.
func (b *builder) differentiate() {
	b.nodes, b.writers = &b.Backward, map[int][]int{}
	for i := range b.Forward {
		for _, v := range b.Forward[i].Writes() {
			b.writers[v] = append(b.writers[v], i)
		}
	}
	for i := len(b.Forward) - 1; i >= 0; i-- {
		n := b.Forward[i]
		if b.looping = n.Loop > 0; b.looping && n.Attends() {
			b.beginLoop(n)
		}
		rule := gradients[n.Op]
		if rule == nil {
			panic("internal: no gradient rule for " + ir.Ops[n.Op].Name)
		}
		rule(b, n)
	}
	b.looping = false
	if b.Input != Missing {
		b.DInput = b.grads[b.Input].Value
	}
	b.prune()
	b.hoistCollectives(b.Backward)
	b.findUnits()
	b.halve()
}

// hoistCollectives moves each collective of the backward pass up to the node that produces its
// operand. The weight gradients in between do not depend on other ranks, so they are computed during
// the collective.
func (b *builder) hoistCollectives(nodes []Node) {
	for i, n := range nodes {
		if ir.Ops[n.Op].Class != ir.ClassComm {
			continue
		}
		for ; i > 0 && nodes[i-1].Loop == 0 && b.ofWeights(nodes[i-1]); i-- {
			nodes[i], nodes[i-1] = nodes[i-1], nodes[i]
		}
	}
}

// ofWeights reports whether a node writes only gradients of weights.
func (b *builder) ofWeights(n Node) bool {
	return !slices.ContainsFunc(n.Writes(), func(v int) bool { return b.Values[v].Kind != WeightGrad })
}

// Halves of a backward pass.
const (
	InputGradient  = iota // the part that computes the input gradient, for which the previous layer waits
	WeightGradient        // the rest: gradients of weights, and values that only these read, such as inputs gathered again
)

// halve divides the backward pass into its two halves. If the halves run separately, values of the first half
// that the second reads must be kept.
func (b *builder) halve() {
	b.deferNodes()
	// For each value gathered in the first half, gathers holds the node that gathers it, and copies holds its
	// copy in the second half.
	gathers, copies := map[int]Node{}, map[int]int{}
	for _, n := range b.Backward {
		if n.Weights {
			b.deferNode(n, gathers, copies)
			continue
		}
		b.Halves[InputGradient] = append(b.Halves[InputGradient], n)
		if n.Op == ir.AllGather {
			gathers[n.Args[0].Value] = n
		}
	}
	b.hoistCollectives(b.Halves[WeightGradient])
	computed := map[int]bool{}
	for _, n := range b.Halves[WeightGradient] {
		for _, v := range n.Writes() {
			computed[v] = true
		}
		for _, a := range n.Args {
			if a.Value != Missing && b.keptBetween(a.Value) && !computed[a.Value] && !slices.Contains(b.Between, a.Value) {
				b.Between = append(b.Between, a.Value)
			}
		}
	}
}

// keptBetween reports whether a value of the first half must be kept if the second half reads it.
func (b *builder) keptBetween(v int) bool {
	kind := b.Values[v].Kind
	return kind != Weight && kind != Given && kind != Tally
}

// deferNodes marks the nodes of the second half. Norms compute both gradients in the first half, because a single
// kernel computes both. Attention has nothing to defer, and neither do loops: logits exist for only one chunk of rows at a time, and
// the gradients of expanded latents for one piece. The second half reads no weight matrices, because ZeRO may have released the
// gathered matrices by then.
func (b *builder) deferNodes() {
	awaited := map[int]bool{b.DInput: true}
	for i := range slices.Backward(b.Backward) {
		n := &b.Backward[i]
		n.Weights = !n.Chunked && n.Loop == 0 && !b.readsMatrix(n) && !slices.ContainsFunc(n.Writes(), func(v int) bool {
			return awaited[v] || b.Values[v].Kind == CacheGrad || b.Values[v].Kind == CarryGrad || b.Values[v].Kind == Loss
		})
		for _, a := range n.Args {
			awaited[a.Value] = awaited[a.Value] || !n.Weights
		}
	}
}

// readsMatrix reports whether a node reads a parameter that is a matrix.
func (b *builder) readsMatrix(n *Node) bool {
	return slices.ContainsFunc(n.Args, func(a Arg) bool {
		return a.Value != Missing && b.Values[a.Value].Kind == Weight && !b.Params[b.Values[a.Value].Param].Vector
	})
}

// deferNode appends a node to the second half. Values gathered in the first half are gathered again,
// because keeping them would take SP times as many bytes.
func (b *builder) deferNode(n Node, gathers map[int]Node, copies map[int]int) {
	n.Args = slices.Clone(n.Args)
	for k, a := range n.Args {
		gather, ok := gathers[a.Value]
		if !ok {
			continue
		}
		if _, ok := copies[a.Value]; !ok {
			v := b.Values[a.Value]
			v.Name += ".again"
			copies[a.Value] = b.value(v)
			gather.Args = slices.Clone(gather.Args)
			gather.Args[0].Value, gather.Weights = copies[a.Value], true
			b.Halves[WeightGradient] = append(b.Halves[WeightGradient], gather)
		}
		n.Args[k].Value = copies[a.Value]
	}
	b.Halves[WeightGradient] = append(b.Halves[WeightGradient], n)
}

// need returns a forward value for use in the backward pass: the value itself if it is saved, or a recomputed
// copy.
func (b *builder) need(v int) Arg {
	i, n := b.producer(v)
	if i < 0 || b.Values[v].Kind == Cache || b.saves(i, &n) {
		return all(v)
	}
	if _, ok := b.remat[v]; !ok {
		b.recompute(n)
	}
	return all(b.remat[v])
}

// saves reports whether the results of a forward node are saved for the backward pass.
func (b *builder) saves(i int, n *Node) bool { return !n.neverSaved() && (b.keep == nil || b.keep[i]) }

// neverSaved reports whether the results of a node are always recomputed.
func (n *Node) neverSaved() bool {
	if n.Loop > 0 && !n.Attends() {
		return true
	}
	switch savings[n.Op] {
	case never:
		return true
	case neverIfInverse:
		return n.Attrs[attrIndex(n.Op, "inverse")].Value.Bits != 0
	}
	return false
}

// recompute appends a copy of a forward node to the backward pass, after copies of earlier nodes
// that write the same values.
func (b *builder) recompute(n Node) {
	var writers []int
	for _, v := range n.Writes() {
		writers = append(writers, b.writers[v]...)
	}
	slices.Sort(writers)
	for _, i := range slices.Compact(writers) {
		b.repeat(b.Forward[i])
	}
}

// repeat makes the values that a node reads available, then appends a copy of the node, which writes to copies
// of its results.
func (b *builder) repeat(n Node) {
	repeated := Node{Op: n.Op, Attrs: n.Attrs, Args: slices.Clone(n.Args), Chunked: b.chunked, Loop: n.Loop}
	for k, a := range n.Args {
		if a.Value == Missing {
			continue
		}
		if ir.Ops[n.Op].Operands[k].Dir == ir.Read {
			repeated.Args[k].Value = b.need(a.Value).Value
			continue
		}
		if _, begun := b.remat[a.Value]; !begun {
			v := b.Values[a.Value]
			switch v.Kind { // its rows are still stored, or replaced; the node is repeated for a different result
			case Cache:
				v.Kind, v.Rows = Activation, Held
			case Carry:
				v.Kind = Activation
			}
			for v.Name += ".again"; b.named[v.Name]; v.Name += "'" {
			}
			b.remat[a.Value] = b.value(v)
		}
		repeated.Args[k].Value = b.remat[a.Value]
		if b.Values[a.Value].Kind == Cache {
			repeated.Args[k].Span = All
		}
	}
	if n.Loop > 0 {
		repeated.Loop = b.loop
	}
	*b.nodes = append(*b.nodes, repeated)
	if n.Loop > 0 && n.Attends() {
		b.endLoop()
	}
}

// producer returns the last forward node that writes a value.
func (b *builder) producer(v int) (int, Node) {
	writers := b.writers[v]
	if len(writers) == 0 {
		return -1, Node{}
	}
	last := writers[len(writers)-1]
	return last, b.Forward[last]
}

// grad returns the gradient of a forward value; there must be one, because every value of a forward pass
// contributes to its output.
func (b *builder) grad(a Arg) Arg {
	g, ok := b.grads[a.Value]
	if !ok {
		panic(fmt.Sprintf("internal: block %s: no gradient reaches %s", b.Name, b.Values[a.Value].Name))
	}
	if a.Span != All {
		g.Span = a.Span
	}
	g.Heads = a.Heads
	return g
}

// newGrad creates the gradient value of a forward value, in the activation type.
func (b *builder) newGrad(v int) int {
	old := b.Values[v]
	name := "d." + old.Name
	for b.named[name] {
		name += "'"
	}
	g := Value{Name: name, Planes: old.Planes, Rows: b.rowsFrom(v), Count: old.Count, Cols: old.Cols, DType: b.act}
	return b.value(g)
}

// contribute adds g to the gradient of v. Rules that can add in place first call takeGrad.
func (b *builder) contribute(v int, g Arg) {
	old, ok := b.grads[v]
	if !ok {
		b.grads[v] = g
		return
	}
	if b.Values[old.Value].Kind == CacheGrad {
		b.node(ir.Add, nil, old, old, g)
		return
	}
	sum := b.newGrad(v)
	b.Values[sum].DType = b.Values[old.Value].DType
	b.node(ir.Add, nil, all(sum), old, g)
	b.grads[v] = all(sum)
}

// takeGrad removes and returns the gradient accumulated so far, for a rule that adds to it in
// place. It returns Missing if there is none.
func (b *builder) takeGrad(v int) Arg {
	g, ok := b.grads[v]
	if !ok {
		return Arg{Value: Missing}
	}
	delete(b.grads, v)
	return g
}

// linear appends the gradient of a function that is linear in x: one instruction, applied to the gradient of
// the result.
func (b *builder) linear(n Node, op ir.Op, attrs []Attr, dy Arg, more ...Arg) {
	x := n.Args[1].Value
	dx := b.newGrad(x)
	b.node(op, attrs, append([]Arg{all(dx), dy}, more...)...)
	b.contribute(x, all(dx))
}

func embedGradient(b *builder, n Node) {
	dy := b.grad(n.Args[0])
	attrs := append(slices.Clone(n.Attrs), from("accumulate", NotFirst))
	b.node(ir.EmbedGrad, attrs, all(b.weightGrad(n.Args[2].Value)), b.need(n.Args[1].Value), dy)
}

func positionGradient(b *builder, n Node) {
	dy := b.grad(n.Args[0])
	table := Arg{Value: b.weightGrad(n.Args[2].Value), Span: n.Args[2].Span}
	b.node(ir.PositionEmbedGrad, []Attr{from("batch", FromBatch), from("accumulate", NotFirst)}, table, dy)
	b.contribute(n.Args[1].Value, dy)
}

func layerNormGradient(b *builder, n Node) {
	x, gamma, beta := n.Args[2].Value, n.Args[3].Value, n.Args[4].Value
	dy, residual := b.grad(n.Args[0]), b.takeGrad(x)
	dx := b.newGrad(x)
	b.node(ir.LayerNormGrad, []Attr{from("accumulate", NotFirst), n.Attrs[attrIndex(n.Op, "offset")]},
		all(dx), all(b.weightGrad(gamma)), all(b.weightGrad(beta)), dy, b.need(x), b.need(n.Args[1].Value), all(gamma), residual)
	b.contribute(x, all(dx))
}

func rmsNormGradient(b *builder, n Node) {
	x, gamma, heads := n.Args[2].Value, n.Args[3].Value, n.Args[2].Heads
	dy, residual, dgamma := b.inActivationType(b.grad(n.Args[0])), b.takeGrad(x), Arg{Value: Missing}
	if b.Values[gamma].Kind == Weight {
		dgamma = all(b.weightGrad(gamma))
	}
	dx := b.newGrad(x)
	b.node(ir.RMSNormGrad, []Attr{from("accumulate", NotFirst), n.Attrs[attrIndex(n.Op, "offset")]},
		by(heads, all(dx)), dgamma, dy, by(heads, b.need(x)), by(heads, b.need(n.Args[1].Value)), b.need(gamma), by(heads, residual))
	b.contribute(x, all(dx))
}

// matmulGradient is the rule for y = x w + bias, where w is stored untransposed.
func matmulGradient(b *builder, n Node) {
	x, w, bias := n.Args[1].Value, n.Args[2].Value, n.Args[3].Value
	b.penalize(n.Args[0].Value)
	dy := b.inActivationType(b.grad(n.Args[0]))
	if dx, ok := b.grads[x]; ok && (b.Values[dx.Value].Kind == CacheGrad || b.writtenBy(ir.Matmul, dx.Value)) {
		b.node(ir.Matmul, []Attr{truth("trans_b"), truth("accumulate")}, dx, dy, all(w))
	} else {
		dx := b.newGrad(x)
		b.node(ir.Matmul, []Attr{truth("trans_b")}, all(dx), dy, all(w))
		b.contribute(x, all(dx))
	}
	b.node(ir.Matmul, []Attr{truth("trans_a"), from("accumulate", NotFirst)}, all(b.weightGrad(w)), b.need(x), dy)
	if bias != Missing {
		b.node(ir.BiasGrad, []Attr{from("accumulate", NotFirst)}, all(b.weightGrad(bias)), dy)
	}
}

// writtenBy reports whether a product wrote a gradient, so that no other value shares it.
func (b *builder) writtenBy(product ir.Op, g int) bool {
	return slices.ContainsFunc(b.Backward, func(n Node) bool { return n.Op == product && n.Args[0].Value == g })
}

// inActivationType casts the f32 gradient of K or V for kernels that need one type for all operands.
func (b *builder) inActivationType(g Arg) Arg {
	v := b.Values[g.Value]
	if v.DType == b.act {
		return g
	}
	from := Arg{Value: g.Value, Span: g.Span}
	to, done := b.casts[from]
	if !done {
		rows := Held
		if v.Rows == Piece || v.Rows == Local {
			rows = v.Rows
		}
		y := b.value(Value{Name: v.Name + "." + b.act.String(), Rows: rows, Cols: v.Cols, DType: b.act})
		to = all(y)
		b.node(ir.Cast, nil, to, from)
		b.casts[from] = to
	}
	return by(g.Heads, to)
}

// scaleGradient is the rule for y = alpha * x.
func scaleGradient(b *builder, n Node) { b.linear(n, ir.Axpby, n.Attrs, b.grad(n.Args[0])) }

// dropoutGradient drops the elements of the gradient that correspond to the elements of x dropped in the
// forward pass.
func dropoutGradient(b *builder, n Node) {
	b.linear(n, ir.Dropout, n.Attrs, b.grad(n.Args[0]), n.Args[2])
}

func ropeGradient(b *builder, n Node) {
	attrs := append([]Attr(nil), n.Attrs...)
	attrs[attrIndex(ir.Rope, "inverse")] = truth("inverse")
	b.linear(n, ir.Rope, attrs, b.grad(n.Args[0]), n.Args[2])
}

func attentionGradient(b *builder, n Node) {
	if b.split.rotates() {
		ringGradient(b, n)
		return
	}
	o, lse, q, k, v := n.Args[0], n.Args[1], n.Args[2], n.Args[3], n.Args[4]
	dq, keys, values := b.newGrad(q.Value), b.need(k.Value), b.need(v.Value)
	keys.Span, values.Span = k.Span, v.Span
	dkv := b.kvGrads(k.Value, v.Value)
	attrs := slices.Clone(n.Attrs)
	if n.Loop == 0 {
		attrs = append(attrs, from("accumulate", NotFirst))
	}
	b.node(ir.AttentionGrad, attrs, all(dq), Arg{Value: dkv[0], Span: k.Span}, Arg{Value: dkv[1], Span: v.Span},
		b.grad(o), b.need(q.Value), keys, values, b.need(o.Value), b.need(lse.Value), Arg{Value: Missing}, n.Args[5])
	b.contribute(q.Value, all(dq))
}

// sinkGradient adds the gradient of the sinks. The gradient of attention reads the results with sinks, so it needs
// no rule of its own.
func sinkGradient(b *builder, n Node) {
	o, lse, sinks := n.Args[0].Value, n.Args[1].Value, n.Args[2].Value
	b.node(ir.AttentionSinkGrad, append(slices.Clone(n.Attrs), from("accumulate", NotFirst)),
		all(b.weightGrad(sinks)), b.grad(n.Args[0]), b.need(b.rounded(o)), b.need(lse), all(sinks))
}

// beginLoop begins the loop over pieces of the keys that computes the gradients of an attention: what all pieces need is ready, and the
// gradients of the latents, which are 0 at first, are sums.
func (b *builder) beginLoop(attention Node) {
	for _, v := range append(attention.Writes(), attention.Args[2].Value) {
		b.need(v)
	}
	for v := range b.Values {
		if b.Values[v].Kind == Cache {
			b.kvGrad(v)
		}
	}
}

// kvGrads creates the gradients of K and V.
func (b *builder) kvGrads(k, v int) (d [2]int) { return [2]int{b.kvGrad(k), b.kvGrad(v)} }

// kvGrad creates the gradient of K, V or a latent, which is a sum in f32.
func (b *builder) kvGrad(v int) int {
	g := b.Values[v]
	if g.Name, g.DType = "d."+g.Name, ir.F32; g.Kind == Cache {
		g.Kind = CacheGrad
	}
	d := b.value(g)
	b.grads[v] = all(d)
	return d
}

// castGradient passes the gradient on without converting it, unless only a choice of experts depends on the result.
func castGradient(b *builder, n Node) {
	if _, ok := b.grads[n.Args[0].Value]; ok {
		b.contribute(n.Args[1].Value, b.grad(n.Args[0]))
	}
}

func activationGradient(b *builder, n Node) {
	dx, heads := b.newGrad(n.Args[1].Value), n.Args[1].Heads
	b.Values[dx].DType = b.Values[n.Args[1].Value].DType
	b.node(ir.ActivationGrad, n.Attrs, by(heads, all(dx)), b.grad(n.Args[0]), by(heads, b.need(n.Args[1].Value)), b.need(n.Args[2].Value))
	b.contribute(n.Args[1].Value, all(dx))
}

func gluGradient(b *builder, n Node) {
	gate, up, heads := n.Args[1].Value, n.Args[2].Value, n.Args[1].Heads
	dgate, dup := b.newGrad(gate), b.newGrad(up)
	b.node(ir.GLUGrad, n.Attrs, by(heads, all(dgate)), by(heads, all(dup)), b.grad(n.Args[0]), by(heads, b.need(gate)), by(heads, b.need(up)), b.need(n.Args[3].Value))
	b.contribute(gate, all(dgate))
	b.contribute(up, all(dup))
}

func addGradient(b *builder, n Node) {
	dy := b.grad(n.Args[0])
	b.contribute(n.Args[1].Value, dy)
	b.contribute(n.Args[2].Value, dy)
	if bias := n.Args[3].Value; bias != Missing {
		b.node(ir.BiasGrad, []Attr{from("accumulate", NotFirst)}, all(b.weightGrad(bias)), dy)
	}
}

func gatherGradient(b *builder, n Node) {
	if n.Args[1].Span != All {
		chunksGradient(b, n)
		return
	}
	x, dy := n.Args[1].Value, b.grad(n.Args[0])
	dx := b.newGrad(x)
	b.Values[dx].DType = b.Values[dy.Value].DType
	b.node(ir.ReduceScatter, n.Attrs, all(dx), dy)
	b.contribute(x, all(dx))
}

func scatterGradient(b *builder, n Node) { b.linear(n, ir.AllGather, n.Attrs, b.grad(n.Args[0])) }

// exchangeGradient is the rule for an exchange; it appends the inverse exchange. Gradients of K and V
// are rounded before they are sent. Gradients of heads that several ranks hold are summed by the
// exchange.
func exchangeGradient(b *builder, n Node) {
	dy := b.inActivationType(b.grad(n.Args[0]))
	attrs, inverse := slices.Clone(n.Attrs), attrIndex(ir.AllToAll, "inverse")
	attrs[inverse].Value = ir.Bool(attrs[inverse].Value.Bits == 0)
	b.linear(n, ir.AllToAll, attrs, dy)
}

// findUnits collects the values that the forward pass writes and the backward pass reads, and groups them by
// the node that writes them.
func (b *builder) findUnits() {
	producers := map[int]int{} // producer -> index into Units
	made := map[int]bool{}     // computed in the backward pass itself
	for r, n := range b.Backward {
		for k, a := range n.Args {
			if a.Value != Missing && ir.Ops[n.Op].Operands[k].Dir != ir.Read {
				made[a.Value] = true
				continue
			}
			if a.Value == Missing || made[a.Value] || a.Value == b.DOutput || !b.savable(a.Value) {
				continue
			}
			p, _ := b.producer(a.Value)
			u, ok := producers[p]
			if !ok {
				u = len(b.Units)
				producers[p] = u
				b.Units = append(b.Units, Unit{Producer: p, Reader: r})
			}
			b.Units[u].addValue(a.Value)
		}
	}
	b.orderUnits()
	b.Attends = slices.ContainsFunc(b.Backward, func(n Node) bool { return n.Op == ir.AttentionGrad })
}

func (b *builder) savable(v int) bool { k := b.Values[v].Kind; return k == Activation || k == Input }

func (u *Unit) addValue(v int) {
	if !slices.Contains(u.Values, v) {
		u.Values = append(u.Values, v)
	}
}

// orderUnits sorts units by producer and their values by number. It names each unit after its first value and
// numbers the units.
func (b *builder) orderUnits() {
	slices.SortFunc(b.Units, func(x, y Unit) int { return x.Producer - y.Producer })
	for i := range b.Units {
		u := &b.Units[i]
		slices.Sort(u.Values)
		u.Name, u.Number = b.Values[u.Values[0]].Name, i
	}
}
