package ir

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// This file interprets instructions that compute, over formulas (see verifyformula.go).

// defining lists, by opcode, the attributes that belong to a formula, and uniformOf those that belong to the job; gradientOf is the opcode of
// which an opcode is the gradient.
var defining, uniformOf, gradientOf = func() (formula, job [NumOps][]int, of [NumOps]Op) {
	for op := range Ops {
		of[op] = NumOps
		for i, a := range Ops[op].Attrs {
			switch a.Scope {
			case ScopeFormula:
				formula[op] = append(formula[op], i)
			case ScopeJob, ScopeJobOrNone:
				job[op] = append(job[op], i)
			}
		}
		if name, ok := strings.CutSuffix(Ops[op].Name, "_grad"); ok {
			name = strings.TrimSuffix(name, "_weight")
			if i := slices.IndexFunc(Ops[:], func(o OpInfo) bool { return o.Name == name }); i >= 0 {
				of[op] = Op(i)
			}
		}
	}
	return formula, job, of
}()

const maxArgs = 15

func (c *interpreted) compute(in *Instr) {
	c.once(in)
	c.uniform(in)
	switch in.Op {
	case Fill:
		c.write(&in.Args[0], meaning{formula: nothing})
		return
	case LoadTokens:
		batch := int64(in.Attr("batch").Bits)
		as := in.Attr("as").Bits
		c.write(&in.Args[0], meaning{formula: formula(mix(uint64(LoadTokens), as)),
			rows: rows{int64(in.Attr("first").Bits), int64(in.Attr("position").Bits), in.Args[0].Elements() / batch}})
		return
	}
	var args [maxArgs]meaning
	known, gradients := true, 0
	for j := range in.Args {
		if reads, _ := in.Access(j); reads {
			args[j] = c.read(&in.Args[j])
			if j < in.Info().Written() && in.Info().Operands[j].Dir != Read {
				continue
			}
			known = known && args[j].formula != 0
			if args[j].of != 0 {
				gradients++
			}
		}
	}
	if in.Op == ExpertBias {
		c.balance(in, &args)
		return
	}
	if in.Info().Updates || in.Op == Nesterov {
		c.update(in, &args)
		return
	}
	if !known {
		for j := range in.Args {
			if reads, _ := in.Access(j); reads && j >= in.Info().Written() && args[j].formula == 0 {
				c.wrong(nil, "%s is put together from values that are computed in different ways", in.Info().Operands[j].Name)
			}
		}
		for j := range in.Info().Written() {
			if in.Args[j].Present() {
				c.write(&in.Args[j], meaning{})
			}
		}
		return
	}
	c.known(in, &args, gradients)
}

// known interprets an instruction whose operands are known, of which some may be gradients.
func (c *interpreted) known(in *Instr, args *[maxArgs]meaning, gradients int) {
	if in.Info().Rule == RulePlaced {
		c.room(in, args[in.Info().operand("places")].formula)
	}
	switch {
	case in.Op == Cast:
		c.write(&in.Args[0], args[1])
	case in.Op == SumSq:
		c.square(in, args)
	case in.Op == AttentionMerge:
		c.write(&in.Args[0], args[2])
		if in.Args[1].Present() {
			c.write(&in.Args[1], args[3])
		}
	case in.Op == AttentionSink:
		c.sink(in, args)
	case in.Op == AttentionSinkGrad:
		c.sinkGradient(in, args)
	case in.Op == Add:
		c.sum(in, args)
	case in.Op == CrossEntropyGrad:
		c.lossGradient(in, args)
	case in.Op == AttentionDelta && gradients > 0:
		c.delta(in, args)
	case in.Op == BiasGrad:
		c.biasGradient(in, args)
	case in.Op == ExpertCounts: // no use of the logits that has a gradient
		m := meaning{formula: formula(mix(uint64(ExpertCounts), in.Attr("top").Bits, args[1].key())), cover: args[1].rows.covered(in.Args[1].Rows())}
		if c.joint() { // those of all layers are one sum
			m.formula, m.cover = formula(mix(uint64(ExpertCounts), in.Attr("top").Bits)), ofLayer(m.cover, args[1].formula)
		}
		c.accumulate(in, 0, m)
	case in.Op == RouterLossGrad:
		c.routerLoss(in, args)
	case in.Op == ExpertLoad: // the gathered rows of ranks are those of all of them
		c.accumulate(in, 0, meaning{formula: loadOf(args[1].formula), moved: args[1].moved, cover: args[1].rows.covered(in.Args[1].Rows())})
	case gradientOf[in.Op] < NumOps:
		c.gradient(in, args)
	case gradients > 0:
		c.linear(in, args)
	default:
		c.forward(in, args)
	}
}

// once checks that a section changes a value in place in the same way only once.
func (c *interpreted) once(in *Instr) {
	changed := None
	for j := range in.Info().Written() {
		if changed == None && in.Args[j].Present() && in.changes(j) {
			changed = j
		}
	}
	if changed == None {
		return
	}
	var room [4*maxArgs + 20]uint64
	words := append(room[:0], uint64(in.Op))
	for _, v := range in.Args {
		words = append(words, uint64(v.Buffer), uint64(v.Offset), uint64(v.Elements()), uint64(v.DType))
	}
	for _, a := range in.Attrs {
		words = append(words, a.Bits, uint64(a.Const))
	}
	h := mix(words...)
	if _, ok := c.inplace[h]; ok {
		c.wrong(nil, "changes %s a second time with the same operands", c.code.Buffers[in.Args[changed].Buffer].Name)
	}
	c.inplace[h] = struct{}{}
}

// uniform checks that attributes that belong to the job have one value.
func (c *interpreted) uniform(in *Instr) {
	for _, i := range uniformOf[in.Op] {
		info, a := &in.Info().Attrs[i], in.Attrs[i]
		if info.Scope == ScopeJobOrNone && a == (Attr{}) {
			continue
		}
		key := sharedKey{c.section, *info}
		if first, ok := c.shared[key]; !ok {
			c.shared[key] = sharedAttr{a, c.here()}
		} else if first.value != a {
			c.wrong(&first.at, "%s differs between instructions of a section", info.Name)
		}
	}
}

// aligned returns the tokens that the operands of an instruction have rows for, and checks that they agree. Keys and values have other
// tokens than queries, and labels are one token later.
func (c *interpreted) aligned(in *Instr, args *[maxArgs]meaning) rows {
	var r rows
	for j := range in.Args {
		o := &in.Info().Operands[j]
		other := args[j].rows
		if j < in.Info().Written() || other.n == 0 || (in.Op == Attention || in.Op == AttentionGrad) && (o.Name == "k" || o.Name == "v") || o.Name == "positions" || o.Name == "dnext" {
			continue
		}
		if o.Name == "labels" {
			other.position--
		}
		if r.n > 0 && (other.sequence != r.sequence || other.position != r.position) {
			c.wrong(nil, "%s has rows for the tokens from %d of sequence %d on, but an operand before it for those from %d of sequence %d on",
				o.Name, other.position, other.sequence, r.position, r.sequence)
		}
		if r.n == 0 || o.Name != "labels" {
			r = other
		}
	}
	return r
}

// forward gives the results of an instruction their formulas.
func (c *interpreted) forward(in *Instr, args *[maxArgs]meaning) {
	before := carried(in, args)
	var words [2*maxArgs + 16]uint64
	h := append(words[:0], uint64(in.Op))
	for _, i := range defining[in.Op] {
		h = append(h, in.Attrs[i].Bits, uint64(in.Attrs[i].Const))
	}
	var chain formula
	for j := in.Info().Written(); j < len(in.Args); j++ {
		h = append(h, args[j].key())
		switch t := args[j].chain; {
		case t == 0 || t == chain:
		case chain != 0:
			c.wrong(nil, "combines updates of two weights")
		default:
			chain = t
		}
	}
	base := mix(h...)
	r := c.aligned(in, args)
	outs := make([]formula, in.Info().Written())
	for j := range outs {
		outs[j] = formula(mix(base, uint64(j)))
	}
	c.follows(in, before, outs, r)
	switch {
	case in.Op == Route:
		c.place(in, outs[in.Info().operand("places")])
	case in.Info().Rule == RuleSorted && in.Arg("ends").Present():
		c.sorted(in, args)
	}
	if c.nodes[outs[0]] == nil || c.nodes[outs[0]].in == nil {
		formulas := make([]formula, len(in.Args))
		for j := in.Info().Written(); j < len(in.Args); j++ {
			formulas[j] = args[j].formula
		}
		c.add(in, false, formulas, outs)
	}
	for j := range outs {
		if !in.Args[j].Present() {
			continue
		}
		m := meaning{formula: outs[j], rows: r, chain: chain}
		if in.Op == Route {
			m.moved = args[in.Info().operand("logits")].moved
		}
		if in.Op == CrossEntropy && r.n > 0 {
			m.cover = r.covered(in.Arg("stats").Shape[1])
		}
		if reads, _ := in.Access(j); reads {
			old := args[j]
			switch {
			case old.formula == 0:
				m = meaning{}
			case in.Op == CrossEntropy && old.formula != nothing && old.formula != m.formula:
				c.wrong(c.origin(old.formula), "adds to a loss that is computed in another way")
			default:
				m = c.added(old, m, in)
			}
		}
		c.write(&in.Args[j], m)
	}
}

// place records how many rows of a token the experts of route may have: each at most one. room checks that there is room for as many.
func (c *interpreted) place(in *Instr, places formula) {
	n := min(int64(in.Attr("top").Bits), in.Arg("ends").Elements())
	if known, ok := c.slots[places]; ok && known != n {
		c.wrong(nil, "ends has another number of experts than elsewhere")
	}
	c.slots[places] = n
}

func (c *interpreted) room(in *Instr, places formula) {
	if rows, n := in.sorted().Rows(), in.Arg("places").Rows()*c.slots[places]; rows != n {
		c.wrong(nil, "has %d rows in the order of experts, but tokens may have up to %d", rows, n)
	}
}

// sorted checks that an elementwise function of rows in the order of experts has as many rows as the products that it is applied to.
func (c *interpreted) sorted(in *Instr, args *[maxArgs]meaning) {
	ends := in.Info().operand("ends")
	for j := in.Info().Written(); j < ends; j++ {
		if n := c.nodes[args[j].formula]; n == nil || n.op != MatmulGrouped || n.args[Ops[MatmulGrouped].operand("ends")] != args[ends].formula {
			c.wrong(c.origin(args[j].formula), "ends are not those of the product that is %s", in.Info().Operands[j].Name)
		}
	}
}

// square interprets sumsq, which may read a gradient only once.
func (c *interpreted) square(in *Instr, args *[maxArgs]meaning) {
	if a := in.Attr("weight"); a.Const == 0 && a.Float(nil) != 0 && a.Float(nil) != 1 {
		c.wrong(nil, "weight is %g, not 0 or 1", a.Float(nil))
	}
	switch v := in.Args[1]; {
	case args[1].chain != 0:
		c.forward(in, args)
		return
	case args[1].of == 0:
		c.wrong(nil, "x is no gradient")
	default:
		h := mix(uint64(SumSq), uint64(v.Buffer), uint64(v.Offset))
		if _, ok := c.inplace[h]; ok {
			c.wrong(nil, "counts %s a second time", c.code.Buffers[v.Buffer].Name)
		}
		c.inplace[h] = struct{}{}
	}
	c.write(&in.Args[0], meaning{formula: formula(mix(uint64(SumSq)))})
}

// sum interprets an addition.
func (c *interpreted) sum(in *Instr, args *[maxArgs]meaning) {
	c.aligned(in, args)
	m := c.added(args[1], args[2], in)
	if in.Args[3].Present() && m.formula != 0 {
		m = c.added(m, args[3], in)
	}
	m.chain = args[1].chain
	c.write(&in.Args[0], m)
}

// need checks that an operand is the complete gradient of its value, summed over the same groups whenever it is used.
func (c *interpreted) need(in *Instr, j int, m meaning) {
	if !c.whole(m) {
		c.wrong(c.origin(m.of), "%s is only a part of the gradient of its value: not all uses of that value have contributed", in.Info().Operands[j].Name)
	}
	if first, ok := c.bare[m.of]; !ok {
		c.bare[m.of] = m.summed
	} else if first != m.summed {
		c.wrong(c.origin(m.of), "%s is summed over other groups than elsewhere", in.Info().Operands[j].Name)
	}
}

// put writes, or adds, the contribution of a use of a value to the value's gradient, which has the rows of g. For a weight, it is a sum
// over n rows.
func (c *interpreted) put(in *Instr, j int, value, by formula, g meaning, n int64) {
	if !in.Args[j].Present() {
		return
	}
	m := meaning{formula: gradient(value), of: value, terms: c.use(value, by), rows: g.rows, apart: g.apart}
	if _, weight := c.tensors[value]; weight && g.rows.n > 0 && in.Op != PositionEmbedGrad {
		m.cover = g.rows.covered(n)
		m.rows = rows{}
	}
	if _, weight := c.tensors[value]; weight && g.apart {
		m.cover, m.rows, m.apart = coverNone, rows{}, false
	}
	c.accumulate(in, j, m)
}

// accumulate writes a contribution, or adds it if the instruction does.
func (c *interpreted) accumulate(in *Instr, j int, m meaning) {
	if reads, _ := in.Access(j); reads {
		m = c.onto(&in.Args[j], m, in)
	}
	c.write(&in.Args[j], m)
}

// lossGradient interprets cross_entropy_grad.
func (c *interpreted) lossGradient(in *Instr, args *[maxArgs]meaning) {
	r := c.aligned(in, args)
	n := c.nodes[args[2].formula]
	if n == nil || n.in == nil || n.op != CrossEntropyStats || n.in.Attr("first") != in.Attr("first") || n.in.Attr("valid") != in.Attr("valid") ||
		n.in.Attr("softcap") != in.Attr("softcap") || n.args[1] != args[1].formula || n.args[2] != args[3].formula {
		c.wrong(c.origin(args[2].formula), "stats are not those of these logits and labels")
		return
	}
	c.put(in, 0, args[1].formula, args[2].formula, meaning{rows: r}, 0)
}

// delta interprets attention_delta, which stands for o in attention_grad.
func (c *interpreted) delta(in *Instr, args *[maxArgs]meaning) {
	c.need(in, 1, args[1])
	c.write(&in.Args[0], meaning{formula: deltaOf(args[2].formula), rows: c.aligned(in, args)})
}

func deltaOf(o formula) formula { return formula(mix(uint64(o), 13)) }

// sink interprets attention_sink. Its results are those of an attention with one more operand, and take the place of those without.
func (c *interpreted) sink(in *Instr, args *[maxArgs]meaning) {
	n := c.nodes[args[0].formula]
	if n == nil || n.op != Attention || n.sinks() || n.outs[0] != args[0].formula || n.outs[1] != args[1].formula {
		c.wrong(c.origin(args[0].formula), "o and lse are not the results of one attention without a sink")
		return
	}
	outs := make([]formula, len(n.outs))
	for j := range outs {
		outs[j] = formula(mix(uint64(AttentionSink), uint64(n.outs[j]), args[2].key()))
		m := args[j]
		m.formula = outs[j]
		c.write(&in.Args[j], m)
	}
	for _, arg := range n.args {
		if v := c.nodes[arg]; v != nil {
			if i := slices.Index(v.uses, n.outs[0]); i >= 0 {
				v.uses[i] = outs[0]
			}
		}
	}
	c.add(n.in, false, append(slices.Clone(n.args), args[2].formula), outs)
}

// sinks reports whether a node is an attention with a sink, the last of its operands.
func (n *node) sinks() bool { return n.op == Attention && len(n.args) > len(n.in.Args) }

// sinkGradient interprets attention_sink_grad.
func (c *interpreted) sinkGradient(in *Instr, args *[maxArgs]meaning) {
	g, n := args[1], c.nodes[args[1].of]
	switch {
	case n == nil || n.in == nil || !n.sinks():
		c.wrong(c.origin(g.of), "do is not the gradient of a result of attention_sink")
	case args[2].formula != n.outs[0] || args[3].formula != n.outs[1] || args[4].formula != n.args[len(n.args)-1]:
		c.wrong(&n.at, "o, lse or sink is not that of the attention whose gradient it computes")
	default:
		c.need(in, 1, g)
		g.rows = c.aligned(in, args)
		c.put(in, 0, args[4].formula, n.outs[0], g, in.Args[1].Rows())
	}
}

// biasGradient interprets bias_grad.
func (c *interpreted) biasGradient(in *Instr, args *[maxArgs]meaning) {
	g := args[1]
	if g.of == 0 {
		c.wrong(nil, "dy is no gradient")
		return
	}
	c.need(in, 1, g)
	var bias, by formula
	c.find(g.of, 8, func(n *node) bool {
		if j := len(n.args) - 1; n.op == Matmul && n.args[j] > nothing && j == 3 {
			bias, by = n.args[j], n.outs[0]
			return true
		}
		return false
	})
	if bias == 0 {
		bias, by = c.addedBias(g.of, 8)
	}
	if bias == 0 {
		c.wrong(c.origin(g.of), "dy is no gradient of a value to which a bias is added")
		return
	}
	c.put(in, 0, bias, by, g, in.Args[1].Rows())
}

// routerLoss interprets router_loss_grad: a contribution to the gradient of logits that is the gradient of no other result.
func (c *interpreted) routerLoss(in *Instr, args *[maxArgs]meaning) {
	logits, r := args[1].formula, c.aligned(in, args)
	if in.Args[2].Present() {
		c.count(logits, args[2], r, in.Args[1].Rows())
	}
	loss := formula(mix(uint64(RouterLossGrad), in.Attr("scores").Bits, uint64(logits)))
	c.add(in, false, []formula{0, logits}, []formula{loss})
	c.put(in, 0, logits, loss, meaning{rows: r}, 0)
}

// joint reports whether the loss that balances experts is that of all layers together.
func (x *interpreter) joint() bool { return x.p.Model.AuxLoss == "joint" }

// ofLayer returns the cover of a layer's tokens among those of all layers. The layer is that of a router's logits.
func ofLayer(cover [2]uint64, logits formula) [2]uint64 {
	return [2]uint64{cover[0] * (uint64(logits)>>32 | 1), cover[1] * (uint64(logits)&math.MaxUint32 | 1)}
}

// count records that the losses of n rows take counts, and checks that counts are made alike wherever losses of the same logits take them.
func (c *interpreted) count(logits formula, counts meaning, r rows, n int64) {
	var of *counted
	code, cover := c.number, r.covered(n)
	if c.joint() {
		cover, code, logits = ofLayer(cover, logits), 0, 0
	}
	for _, other := range c.counted {
		if other.code != code || other.logits != logits {
			continue
		}
		if first := other.counts; first.formula != counts.formula || first.summed != counts.summed {
			c.wrong(&other.at, "counts are computed in another way than elsewhere, or summed over other groups")
		}
		if other.sequence == r.sequence {
			of = other
		}
	}
	if of == nil {
		of = &counted{code: code, logits: logits, sequence: r.sequence, counts: counts, at: c.here()}
		c.counted = append(c.counted, of)
	}
	if of.counts.cover != counts.cover {
		c.wrong(&of.at, "counts are of other tokens than elsewhere")
	}
	for i, x := range cover {
		of.rows[i] += x
	}
}

// counted is what a code's losses of a router take for some sequences.
type counted struct {
	code     int32
	logits   formula
	sequence int64 // the first
	counts   meaning
	rows     [2]uint64 // the cover of all rows whose losses take the counts
	at       place
}

// checkCounts checks that counts are of the rows whose losses take them.
func (x *interpreter) checkCounts() {
	for _, of := range x.counted {
		if cover := of.counts.cover; cover[0]*of.rows[1] != cover[1]*of.rows[0] && !x.stop {
			x.stop = true
			x.found.add(Finding{Kind: FindFormula, At: siteOf(x.p, &x.p.Codes[of.at.code], of.at.section, int(of.at.index)),
				Msg: "counts are of other tokens than those whose losses take them"})
		}
	}
	x.counted = nil
}

// addedBias looks for a weight among the terms of a sum.
func (c *interpreted) addedBias(value formula, depth int) (bias, by formula) {
	n := c.nodes[value]
	if n == nil || !n.sum || depth == 0 {
		return 0, 0
	}
	for _, arg := range n.args {
		if _, weight := c.tensors[arg]; weight {
			return arg, value
		}
	}
	for _, arg := range n.args {
		if term := c.nodes[arg]; term != nil && len(term.uses) == 1 {
			if bias, by = c.addedBias(arg, depth-1); bias != 0 {
				return bias, by
			}
		}
	}
	return 0, 0
}

// gradient interprets an instruction whose opcode is the gradient of another.
func (c *interpreted) gradient(in *Instr, args *[maxArgs]meaning) {
	row, op := in.Info(), gradientOf[in.Op]
	forward := &Ops[op]
	dy := None
	for j := row.Written(); j < len(in.Args); j++ {
		if name := row.Operands[j].Name; name == "dy" || name == "do" {
			dy = j
		}
	}
	g := args[dy]
	if g.of == 0 {
		c.wrong(nil, "%s is no gradient", row.Operands[dy].Name)
		return
	}
	c.need(in, dy, g)
	n := c.find(g.of, 8, func(n *node) bool { return n.op == op && misfit(in, args, n) == "" })
	if n == nil { // none fits: name one that does not
		n = c.find(g.of, 8, func(n *node) bool { return n.op == op })
	}
	if n == nil {
		c.wrong(c.origin(g.of), "%s is not the gradient of a result of %s", row.Operands[dy].Name, forward.Name)
		return
	}
	if why := misfit(in, args, n); why != "" {
		c.wrong(&n.at, "%s", why)
		return
	}
	before := carried(in, args)
	g.rows = c.aligned(in, args)
	c.follows(in, before, n.outs, g.rows)
	c.precedes(in, args, n.outs, g.rows)
	c.gradients(in, args, n, g, in.Args[dy].Rows())
}

// misfit returns how operands and attributes of an instruction differ from those of the one whose gradient it computes, or "".
func misfit(in *Instr, args *[maxArgs]meaning, n *node) string {
	row, forward := in.Info(), n.in.Info()
	for j := row.Written(); j < len(in.Args); j++ {
		if name := row.Operands[j].Name; !in.Args[j].Present() || name == "dy" || name == "do" || name == "residual" {
			continue
		}
		name, want := row.Operands[j].Name, formula(0)
		for k := range forward.Operands {
			switch {
			case forward.Operands[k].Name != name:
			case k < len(n.outs):
				want = n.outs[k]
			default:
				want = n.args[k]
			}
		}
		if name == "delta" {
			want = deltaOf(n.outs[0])
		}
		if want != 0 && want != args[j].formula {
			return fmt.Sprintf("%s is not the %s of the instruction whose gradient it computes", name, name)
		}
	}
	for _, i := range defining[in.Op] {
		if k := slices.IndexFunc(forward.Attrs, func(a AttrInfo) bool { return a.Name == row.Attrs[i].Name }); k >= 0 && in.Attrs[i] != n.in.Attrs[k] {
			return fmt.Sprintf("%s differs from that of the instruction whose gradient it computes", row.Attrs[i].Name)
		}
	}
	return ""
}

// gradients writes the results of an instruction that computes the gradient of a node.
func (c *interpreted) gradients(in *Instr, args *[maxArgs]meaning, n *node, g meaning, count int64) {
	row := in.Info()
	for j := range row.Written() {
		if !in.Args[j].Present() {
			continue
		}
		name := row.Operands[j].Name[1:]
		k := slices.IndexFunc(n.in.Info().Operands, func(o Operand) bool { return o.Name == name })
		if k < 0 {
			c.write(&in.Args[j], meaning{})
			continue
		}
		if name == carriers[in.Op] {
			c.write(&in.Args[j], meaning{formula: gradient(n.outs[nextResult]), of: n.outs[nextResult], rows: g.rows})
			continue
		}
		if in.Op == AttentionGrad && j > 0 {
			c.putKeys(in, j, n.args[k], n.outs[0], g.rows)
			continue
		}
		residual := slices.IndexFunc(row.Operands, func(o Operand) bool { return o.Name == "residual" })
		if j > 0 || residual < 0 || !in.Args[residual].Present() {
			c.put(in, j, n.args[k], n.outs[0], g, count)
			continue
		}
		m := meaning{formula: gradient(n.args[k]), of: n.args[k], terms: c.use(n.args[k], n.outs[0]), rows: g.rows}
		c.write(&in.Args[j], c.added(m, args[residual], in))
	}
}

// putKeys adds contributions to the gradients of keys or values, part by part: each has the tokens of its keys.
func (c *interpreted) putKeys(in *Instr, j int, value, by formula, queries rows) {
	keys, to := in.Arg(in.Info().Operands[j].Name[1:]), in.Args[j]
	lo, hi := keys.Offset, keys.Offset+keys.Bytes()
	reads, _ := in.Access(j)
	term := c.use(value, by)
	if reads {
		c.lasting(&to)
	}
	if reads && c.contains(&to, value, term) {
		return
	}
	for _, p := range slices.Clone(c.buffers[keys.Buffer]) {
		if p.hi <= lo || p.lo >= hi {
			continue
		}
		v := to
		scale := func(x Bytes) Bytes { return (x - lo) / keys.DType.Bytes() * to.DType.Bytes() }
		v.Offset = to.Offset + scale(max(p.lo, lo))
		v.Shape = [MaxDims]int64{int64((scale(min(p.hi, hi)) - scale(max(p.lo, lo))) / to.DType.Bytes())}
		m := meaning{formula: gradient(value), of: value, terms: term, rows: p.rows}
		m.apart = !reads && queries.n > 0 && p.rows != queries
		if reads && c.contains(&v, value, term) {
			continue
		}
		if reads {
			m = c.onto(&v, m, in)
		}
		c.write(&v, m)
	}
}

// lasting records that gradients to which an instruction adds are sums, of which all contributions come before they are used.
func (c *interpreted) lasting(v *View) {
	for i := range c.buffers[v.Buffer] {
		if p := &c.buffers[v.Buffer][i]; p.hi > v.Offset && p.lo < v.Offset+v.Bytes() {
			p.apart = false
		}
	}
}

// contains reports whether all that is known about a view is that it holds gradients of a value with a contribution.
func (c *interpreted) contains(v *View, value formula, term uint64) bool {
	lo, hi, n := v.Offset, v.Offset+v.Bytes(), Bytes(0)
	for i := range c.buffers[v.Buffer] {
		if p := &c.buffers[v.Buffer][i]; p.hi > lo && p.lo < hi {
			if p.of != value || p.terms&term != term {
				return false
			}
			n += min(p.hi, hi) - max(p.lo, lo)
		}
	}
	return n == hi-lo
}

// onto returns the meaning of a view after an instruction has added a value to it.
func (c *interpreted) onto(v *View, m meaning, in *Instr) meaning {
	if old := c.read(v); old.formula != 0 {
		return c.added(old, m, in)
	}
	return meaning{}
}

// linear interprets an instruction that is its own gradient: products, rotations, dropout.
func (c *interpreted) linear(in *Instr, args *[maxArgs]meaning) {
	switch in.Op {
	case Matmul:
		c.product(in, args)
		return
	case MatmulGrouped:
		c.groupedProduct(in, args)
		return
	}
	g := args[1]
	if g.of == 0 || in.Op != Rope && in.Op != Dropout && in.Op != Axpby {
		c.wrong(nil, "reads a gradient as if it were a value")
		return
	}
	c.need(in, 1, g)
	n := c.find(g.of, 8, func(n *node) bool { return n.op == in.Op })
	if n == nil {
		c.wrong(c.origin(g.of), "its operand is not the gradient of a result of %s", in.Info().Name)
		return
	}
	for _, i := range defining[in.Op] {
		a, b := in.Attrs[i], n.in.Attrs[i]
		if in.Info().Attrs[i].Name == "inverse" {
			b.Bits ^= 1
		}
		if a != b {
			c.wrong(&n.at, "%s does not fit the instruction whose gradient it computes", in.Info().Attrs[i].Name)
			return
		}
	}
	for j := 2; j < len(in.Args); j++ {
		if in.Args[j].Present() && args[j].formula != n.args[j] {
			c.wrong(&n.at, "%s is not that of the instruction whose gradient it computes", in.Info().Operands[j].Name)
			return
		}
	}
	g.rows = c.aligned(in, args)
	c.put(in, 0, n.args[1], n.outs[0], g, 0)
}

// product interprets a product of a gradient and a factor of the product that it is the gradient of. The result is the gradient of the
// other factor.
func (c *interpreted) product(in *Instr, args *[maxArgs]meaning) {
	at, other := 1, 2
	if args[1].of == 0 {
		at, other = 2, 1
	}
	g, factor := args[at], args[other].formula
	if args[other].of != 0 {
		c.wrong(nil, "multiplies two gradients")
		return
	}
	c.need(in, at, g)
	n := c.find(g.of, 8, func(n *node) bool {
		return n.op == Matmul && (n.args[1] == factor || n.args[2] == factor)
	})
	if n == nil {
		c.wrong(c.origin(g.of), "%s is the gradient of a product that does not have the factor %s", in.Info().Operands[at].Name, in.Info().Operands[other].Name)
		return
	}
	value, ta, tb := n.args[2], n.in.Attr("trans_a").Bits, n.in.Attr("trans_b").Bits
	first, transA, transB := 2-tb, 1-ta, uint64(0)
	if tb != 0 {
		transA, transB = 1, ta
	}
	if n.args[2] == factor {
		value, first, transA, transB = n.args[1], 1+ta, 0, 1-tb
	}
	if n.args[1] != n.args[2] && (uint64(at) != first || in.Attr("trans_a").Bits != transA || in.Attr("trans_b").Bits != transB) {
		c.wrong(&n.at, "the order of its factors, or their transposition, is not that of the gradient of the other product")
	}
	g.rows = c.aligned(in, args)
	c.put(in, 0, value, n.outs[0], g, in.Args[at].Rows())
}

// groupedProduct interprets a grouped product of a gradient. The result is the gradient of the rows that were multiplied by the same
// matrices.
func (c *interpreted) groupedProduct(in *Instr, args *[maxArgs]meaning) {
	ends, matrices := in.Info().operand("ends"), in.Info().operand("b")
	g := args[1]
	if g.of == 0 {
		c.wrong(nil, "reads a gradient as if it were a value")
		return
	}
	c.need(in, 1, g)
	n := c.find(g.of, 8, func(n *node) bool { return n.op == MatmulGrouped && n.args[matrices] == args[matrices].formula })
	switch {
	case n == nil:
		c.wrong(c.origin(g.of), "a is not the gradient of a product with these matrices")
	case n.args[ends] != args[ends].formula:
		c.wrong(&n.at, "ends are not those of the product whose gradient it computes")
	case in.Attr("trans_b").Bits == n.in.Attr("trans_b").Bits || in.Arg("bias").Present():
		c.wrong(&n.at, "it has a bias, or its matrices are transposed as in the product whose gradient it computes")
	default:
		g.rows = c.aligned(in, args)
		c.put(in, 0, n.args[1], n.outs[0], g, 0)
	}
}

// update interprets an update of a weight, or of its momentum.
func (c *interpreted) update(in *Instr, args *[maxArgs]meaning) {
	w := args[0].formula
	if in.Op == Nesterov {
		if t, ok := c.tensors[args[1].formula]; ok {
			w = c.state(t, RoleWeight)
		}
	}
	j := in.Info().operand("grad")
	g := args[j]
	if t, ok := c.tensors[w]; ok && g.formula > nothing {
		switch {
		case g.of == w:
			c.need(in, j, g)
			c.compareCovers(c, g.cover, c.next)
			c.reduced(in, t, g)
		case g.of == 0 && g.chain == w && in.Op == SGD:
			c.orthogonal(in, t, g)
		default:
			c.wrong(c.origin(g.of), "grad is not the gradient of %s", c.p.Tensors[t].Name)
		}
		for k := range in.Info().Written() {
			name := in.Info().Operands[k].Name
			if !in.Args[k].Present() || name != "m" && name != "v" {
				continue
			}
			if f := args[k].formula; name == "v" && f != c.state(t, RoleMoment2) || name == "m" && f != c.state(t, RoleMoment1) && f != c.state(t, RoleMomentum) {
				c.wrong(nil, "%s belongs to another weight than %s", name, c.p.Tensors[t].Name)
			}
		}
	}
	for k := range in.Info().Written() {
		if in.Args[k].Present() && !in.changes(k) {
			m := meaning{formula: w}
			if in.Op == Nesterov {
				m = meaning{formula: formula(mix(uint64(Nesterov))), chain: w}
			}
			c.write(&in.Args[k], m)
		}
	}
}

// loadOf returns the formula of the load of experts that a route has chosen.
func loadOf(experts formula) formula { return formula(mix(uint64(ExpertLoad), uint64(experts))) }

// balance interprets expert_bias, which reads the load of the experts that it is added to the scores of.
func (c *interpreted) balance(in *Instr, args *[maxArgs]meaning) {
	w, load := args[0].formula, args[1]
	t, ok := c.tensors[w]
	if !ok {
		return
	}
	corrects := slices.ContainsFunc(c.nodes[w].uses, func(use formula) bool {
		n := c.nodes[use]
		return n != nil && n.op == Route && n.args[Ops[Route].operand("correction")] == w && loadOf(n.outs[Ops[Route].operand("experts")]) == load.formula
	})
	if !corrects {
		c.wrong(c.origin(load.formula), "load is not that of the experts to whose scores %s is added", c.p.Tensors[t].Name)
		return
	}
	c.compareCovers(c, load.cover, c.next)
	load.summed |= load.moved
	c.reduced(in, t, load)
}

// orthogonal checks that the updates of matrices of equal shapes are computed alike.
func (c *interpreted) orthogonal(in *Instr, tensor int32, g meaning) {
	v := in.Arg("grad")
	kind := [4]int64{c.p.Tensors[tensor].Shape[0], c.p.Tensors[tensor].Shape[1], v.Rows(), v.Cols()}
	if first, ok := c.muon[kind]; !ok {
		c.muon[kind] = g.formula
	} else if first != g.formula {
		c.wrong(nil, "grad is computed in another way than that of other matrices")
	}
}

// reduced checks that a gradient is summed over all ranks that hold a part of its weight that this rank updates.
func (c *interpreted) reduced(in *Instr, tensor int32, g meaning) {
	consts := c.p.Ranks[c.rank].Consts
	own := slices.IndexFunc(c.code.States, func(s State) bool {
		return s.Tensor == tensor && s.Role <= RoleMaster && s.View.Buffer == in.Args[0].Buffer
	})
	if own < 0 {
		return
	}
	if c.divisions == nil {
		c.divisions = divide(c.p)
	}
	d, mine := c.divisions[tensorRole{tensor, RoleWeight}], c.code.States[own].share()
	sum := reduction{c.number, d, mine.padded(consts), g.summed}
	r, known := c.left[sum]
	if !known {
		r = c.leftOut(d, sum.part, c.reach(g.summed))
		c.left[sum] = r
	}
	if r != None {
		c.wrong(nil, "grad is not summed over rank %d, which holds the weight, too", r)
	}
}

// reduction is a sum of a gradient over groups, for a part of a weight that a code updates.
type reduction struct {
	code   int32
	weight *division
	part   rectangle
	groups uint64
}

// leftOut returns the first rank that holds elements of a part of a weight, but does not take part in a sum; None: all of them do.
func (x *interpreter) leftOut(d *division, part rectangle, summed map[int32]bool) int {
	if d == nil {
		return None
	}
	for r := range x.p.Ranks {
		rank := &x.p.Ranks[r]
		for i := range d.shares[rank.Code] {
			if part.overlaps(d.shares[rank.Code][i].padded(rank.Consts)) && !summed[int32(r)] {
				return r
			}
		}
	}
	return None
}

// reach returns the ranks whose values have been added up by sums over some groups.
func (c *interpreted) reach(groups uint64) map[int32]bool {
	if c.reached[groups] != nil {
		return c.reached[groups]
	}
	found := map[int32]bool{int32(c.rank): true}
	for list := []int32{int32(c.rank)}; len(list) > 0; list = list[1:] {
		for g, members := range c.p.Ranks[list[0]].Groups {
			if groups>>min(g, 63)&1 == 0 {
				continue
			}
			for _, m := range members {
				if !found[m] {
					found[m] = true
					list = append(list, m)
				}
			}
		}
	}
	if c.reached == nil {
		c.reached = map[uint64]map[int32]bool{}
	}
	c.reached[groups] = found
	return found
}
