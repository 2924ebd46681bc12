package meaning

import (
	"slices"

	"sppo.dev/ir"
)

// rules has a rule for every opcode except collectives, recv and events.
var rules [ir.NumOps]func(*call)

func init() {
	rules = [ir.NumOps]func(*call){
		ir.LoadTokens: loadTokens, ir.InitNormal: initNormal, ir.Fill: fill,
		ir.Embed: embed, ir.EmbedGrad: embedGrad, ir.PositionEmbed: positionEmbed, ir.PositionEmbedGrad: positionEmbedGrad,
		ir.LayerNorm: norm, ir.LayerNormGrad: normGrad, ir.RMSNorm: norm, ir.RMSNormGrad: normGrad,
		ir.Matmul: matmul, ir.BiasGrad: biasGrad, ir.Rope: rope,
		ir.Attention: attention, ir.AttentionGrad: attentionGrad, ir.AttentionMerge: attentionMerge, ir.AttentionDelta: attentionDelta,
		ir.AttentionSink: attentionSink, ir.AttentionSinkGrad: attentionSinkGrad,
		ir.ConcatHeads: concatHeads, ir.ConcatHeadsGrad: concatHeadsGrad,
		ir.Activation: activation, ir.ActivationGrad: activationGrad, ir.GLU: glu, ir.GLUGrad: gluGrad,
		ir.Route: route, ir.RouteGrad: routeGrad, ir.ExpertCounts: expertCounts, ir.RouterLossGrad: routerLossGrad, ir.ExpertLoad: expertLoad, ir.ExpertBias: expertBias, ir.Permute: permute, ir.PermuteGrad: permuteGrad, ir.Unpermute: unpermute, ir.UnpermuteGrad: unpermuteGrad,
		ir.MatmulGrouped: matmulGrouped, ir.MatmulGroupedWeightGrad: matmulGroupedWeightGrad,
		ir.Scan: scan, ir.ScanGrad: scanGrad, ir.Conv: conv, ir.ConvGrad: convGrad, ir.Decay: decay, ir.DecayGrad: decayGrad,
		ir.ScaleColumns: scaleColumns, ir.ScaleColumnsGrad: scaleColumnsGrad,
		ir.Add: add, ir.Cast: cast, ir.Axpby: axpby, ir.Dropout: dropout,
		ir.CrossEntropyStats: entropyStats, ir.CrossEntropy: entropy, ir.CrossEntropyGrad: entropyGrad,
		ir.SumSq: sumSq, ir.GradNorm: gradNorm, ir.AdamW: adamW, ir.SGD: sgd, ir.Nesterov: nesterov, ir.Normalize: normalize,
		ir.CopyD2H: move, ir.CopyH2D: move, ir.CopyD2D: move, ir.Send: send,
		ir.Record: func(*call) {}, ir.Wait: func(*call) {},
	}
}

// Data and initial values.

func loadTokens(c *call) {
	size, batch, chunks := c.in.Args[0].Elements(), c.int("batch"), c.int("chunks")
	each := size / batch
	if chunks > 0 {
		each /= chunks
	}
	content := &content{value: dataKey(c.int("as"))}
	var out []piece
	for j := range max(1, chunks) {
		at := j
		if chunks > 0 {
			at = ir.ZigzagChunk(j, chunks)
		}
		out = join(out, piece{content: content, size: 4, rectangle: rectangle{
			sequence: c.int("first") + c.int("replica"), batch: batch, first: c.int("position") + at*each, n: each, cols: full,
		}})
	}
	c.write("tokens", out)
}

func dataKey(as int64) value { return newKey("data").int(as).value() }

func fill(c *call) {
	y := c.in.Args[0]
	c.write("y", []piece{uniform(&content{value: constantOne.times(c.float("value"))}, y.Elements(), int64(y.DType.Bytes()))})
}

func initNormal(c *call) {
	y := c.in.Args[0]
	row, col := c.int("row"), c.int("col")
	rows, cols := interval{row, row + y.Rows()}, interval{col, col + y.Cols()}
	if len(y.Dims()) == 1 {
		rows, cols = interval{row, row + y.Cols()}, full
	}
	content := &content{value: normalKey(c.int("tensor"), c.float("std")).value()}
	c.write("w", padded(content, matrix(rows, cols), c.int("end"), int64(y.DType.Bytes())))
}

func normalKey(tensor int64, std float64) key { return newKey("init_normal").int(tensor).float(std) }

// padded returns a rectangle of a tensor whose rows from end on, unless end is 0, are 0.
func padded(c *content, r rectangle, end, size int64) (out []piece) {
	if end == 0 {
		end = r.first + r.n
	}
	if held := r.rows().and(interval{0, end}); held.size() > 0 {
		out = join(out, piece{rectangle: matrix(held, r.cols), content: c, size: int32(size)})
	}
	if rest := r.rows().and(interval{end, r.first + r.n}); rest.size() > 0 {
		out = join(out, uniform(&content{}, rest.size()*r.cols.size(), size))
	}
	return out
}

// Embeddings.

func embed(c *call) {
	list, table := c.operand("tokens"), c.only("table")
	if first := c.int("first"); table.first != first {
		c.refuse("looks up tokens from %d on in table rows from %d on", first, table.first)
	}
	var out []piece
	for _, p := range list {
		r := p.with(table.cols)
		k := newKey("embed").float(c.factor("scale"))
		out = made(out, r, c.make(k, cover{nowhere.by(features, table.rows())}, r, p.value, table.value))
	}
	c.write("y", out)
}

func embedGrad(c *call) {
	lists := c.rows(c.operand("tokens"), c.operand("dy"))
	first := c.int("first")
	c.write("dtable", c.overRows(newKey("embed_grad").float(c.factor("scale")), lists, func(p []piece) (rectangle, box) {
		return matrix(interval{first, first + c.in.Arg("dtable").Rows()}, p[1].cols), p[1].tokens()
	}))
}

// overRows returns a sum over the rows of operands: the same term for all, in the same rectangle.
func (c *call) overRows(k key, lists [][]piece, of func([]piece) (rectangle, box), more ...value) []piece {
	var over cover
	var values []value
	var into rectangle
	var some *share // of one of the operands, the same in all rows
	for i := range lists[0] {
		var row []piece
		var here *share
		for _, l := range lists {
			row = append(row, l[i])
		}
		r, b := of(row)
		var ok bool
		if over, ok = over.with(b); !ok {
			c.refuse("has the same rows twice: %s", c.ref.describe(&row[0]))
		}
		for n := range row {
			switch part := row[n].part; {
			case part == nil:
			case here != nil:
				c.refuse("multiplies two incomplete sums")
			default:
				here = part
			}
			switch {
			case i == 0:
				values, into = append(values, row[n].value), r
			case values[n] != row[n].value || into != r:
				c.refuse("sums rows of different values")
			}
		}
		if i > 0 && !here.equal(some) {
			c.refuse("sums rows of which some lack other parts of a sum: %s", c.ref.describe(&row[0]))
		}
		some = here
	}
	return made(nil, into, c.makeSome(k, over, into, some, append(values, more...)...))
}

func positionEmbed(c *call) {
	x := c.operand("x")
	for i := range x {
		if x[i].batch != c.int("batch") {
			c.refuse("has %d sequences, not %d", x[i].batch, c.int("batch"))
		}
	}
	lists := c.alignBy(func(p *piece) int64 { return p.n }, x, c.operand("table"))
	var out []piece
	for i := range lists[0] {
		p, q := &lists[0][i], &lists[1][i]
		if p.rows() != q.rows() || p.cols != q.cols {
			c.refuse("adds %s to %s", c.ref.describe(q), c.ref.describe(p))
		}
		out = made(out, p.rectangle, c.make(newKey("position_embed"), nil, p.rectangle, p.value, q.value))
	}
	c.write("y", out)
}

func positionEmbedGrad(c *call) {
	var out []piece
	for _, p := range c.operand("dy") {
		if p.batch != c.int("batch") {
			c.refuse("has %d sequences, not %d", p.batch, c.int("batch"))
		}
		r := matrix(p.rows(), p.cols)
		out = made(out, r, c.make(newKey("position_embed_grad"), cover{nowhere.by(sequences, p.tokens()[sequences])}, r, p.value))
	}
	c.write("dtable", out)
}

// made appends a part of a result. Its elements get their type when it is stored.
func made(list []piece, r rectangle, c *content) []piece {
	return join(list, piece{rectangle: r, content: c, size: 4})
}

// Norms. Rows of x are divided into groups of columns, such as heads, each of which is normalised alone.

// norms returns how many columns a norm takes together, and the pieces of x.
func (c *call) norms(list []piece) (width int64) {
	gamma := c.gamma()
	if width = gamma.n; gamma.first != 0 {
		c.refuse("gamma begins at element %d", gamma.first)
	}
	for i := range list {
		if p := &list[i]; p.cols.lo%width != 0 || p.cols.hi%width != 0 {
			c.refuse("normalises %d columns of %s", width, c.ref.describe(p))
		}
	}
	return width
}

// gamma returns the weights of a norm, which may be a number that fills them.
func (c *call) gamma() piece {
	if list := c.raw("gamma"); len(list) == 1 && list[0].anywhere && len(list[0].parts) == 0 {
		return list[0]
	}
	return c.only("gamma")
}

func (c *call) weights() []value {
	out := []value{c.gamma().value}
	if c.in.Op == ir.LayerNorm {
		out = append(out, c.only("beta").value)
	}
	return out
}

func grouped(cols interval, width, numbers int64) interval {
	return interval{cols.lo / width * numbers, cols.hi / width * numbers}
}

// statistics is the number of statistics of a row.
func statistics(op ir.Op) int64 {
	if op == ir.LayerNorm || op == ir.LayerNormGrad {
		return 2
	}
	return 1
}

func statsKey(numbers, width int64, eps float64) key {
	return newKey("stats").int(numbers).int(width).float(eps)
}

func normKey(numbers, width int64, eps, offset float64) key {
	return newKey("norm").int(numbers).int(width).float(eps).float(offset)
}

func norm(c *call) {
	list := c.operand("x")
	width, numbers := c.norms(list), statistics(c.in.Op)
	var y, stats []piece
	for _, p := range list {
		k := normKey(numbers, width, c.float("eps"), c.float("offset"))
		y = made(y, p.rectangle, c.make(k, nil, p.rectangle, append([]value{p.value}, c.weights()...)...))
		r := p.with(grouped(p.cols, width, numbers))
		stats = made(stats, r, c.make(statsKey(numbers, width, c.float("eps")), nil, r, p.value))
	}
	c.write("y", y)
	c.write("stats", stats)
}

func normGrad(c *call) {
	dy, x, stats := c.linear("dy"), c.operand("x"), c.operand("stats")
	width, numbers, gamma := c.norms(x), statistics(c.in.Op), c.gamma().value
	lists := c.rows(dy, x, stats)
	var dx []piece
	for i := range lists[0] {
		g, p, s := &lists[0][i], &lists[1][i], &lists[2][i]
		if g.cols != p.cols || s.cols != grouped(p.cols, width, numbers) {
			c.refuse("takes different columns: %s and %s", c.ref.describe(g), c.ref.describe(p))
		}
		k := newKey("norm_grad").int(numbers).int(width).float(c.float("offset"))
		dx = made(dx, p.rectangle, c.makeSome(k, nil, p.rectangle, g.part, g.value, p.value, s.value, gamma))
	}
	at := func(p []piece) (rectangle, box) {
		b := p[0].tokens()
		b[features] = grouped(p[0].cols, width, 1)
		return matrix(interval{0, width}, full), b
	}
	if c.has("dgamma") {
		c.write("dgamma", c.overRows(newKey("norm_grad_gamma").int(numbers).int(width), lists, at))
	}
	if numbers == 2 && c.has("dbeta") {
		c.write("dbeta", c.overRows(newKey("bias_grad"), lists[:1], at))
	}
	if c.has("residual") {
		dx = c.sum(dx, c.raw("residual"))
	}
	c.write("dx", dx)
}

// Products.

func productKey(transA, transB bool) key {
	k := newKey("matmul").int(0)
	if transA {
		k = k.int(1)
	}
	if transB {
		k = k.int(2)
	}
	return k
}

func matmul(c *call) {
	if c.bool("trans_a") {
		productOverRows(c)
		return
	}
	b := c.only("b")
	inner, outer := b.rows(), b.cols
	if c.bool("trans_b") {
		inner, outer = outer, inner
	}
	if b.batch != 1 {
		c.unknown("a product with rows of several sequences on the right has no rule")
	}
	var bias *piece
	if c.has("bias") {
		p := c.only("bias")
		if bias = &p; p.rows() != outer {
			c.refuse("adds %s to columns %d to %d", c.ref.describe(bias), outer.lo, outer.hi-1)
		}
	}
	var out []piece
	for _, a := range c.linear("a") {
		if a.cols != inner {
			c.refuse("multiplies columns %d to %d by rows %d to %d", a.cols.lo, a.cols.hi-1, inner.lo, inner.hi-1)
		}
		r := a.with(outer)
		y := &content{} // of rows that are 0, such as sums over nothing but padding
		if !a.value.isZero() {
			y = c.makeSome(productKey(false, c.bool("trans_b")), cover{nowhere.by(features, inner)}, r, a.part, a.value, b.value)
		}
		if bias != nil {
			y = c.biased(y, bias, r)
		}
		out = made(out, r, y)
	}
	c.write("c", out)
}

// biased adds a vector to every row.
func (c *call) biased(x *content, bias *piece, r rectangle) *content {
	sum, why := x.plus(c.make(newKey("bias"), nil, r, bias.value), r)
	if why != "" {
		c.refuse("%s", why)
	}
	return sum
}

// productOverRows is the product of the transpose of a with b, as for the gradient of a matrix: a sum over rows.
func productOverRows(c *call) {
	if c.bool("trans_b") {
		c.unknown("a product of two transposes has no rule")
	}
	t := c.term
	lists := c.rows(c.linear("a"), c.linear("b"))
	if slices.ContainsFunc(lists, allZero) {
		c.write("c", made(nil, matrix(lists[0][0].cols, lists[1][0].cols), &content{}))
		return
	}
	c.write("c", c.overRows(productKey(true, false), lists, func(p []piece) (rectangle, box) {
		over := p[0].tokens()
		if t(productKey(true, false), p[0].value, p[1].value).kind == overCols {
			over = nowhere.by(features, p[0].rows())
		}
		return matrix(p[0].cols, p[1].cols), over
	}))
}

// allZero reports whether all rows are 0.
func allZero(list []piece) bool {
	return !slices.ContainsFunc(list, func(p piece) bool { return !p.value.isZero() })
}

func biasGrad(c *call) {
	c.write("db", c.overRows(newKey("bias_grad"), [][]piece{c.linear("dy")}, func(p []piece) (rectangle, box) {
		return matrix(p[0].cols, full), p[0].tokens()
	}))
}

// Functions of elements.

// elementwise returns a function of operands that have the same rows and columns. With ends, the rows are all those that a choice of
// experts has put into an order.
func (c *call) elementwise(k key, operands ...string) (out []piece) {
	var in [][]piece
	for _, name := range operands {
		in = append(in, c.operand(name))
	}
	in = c.rows(in...)
	var ends value
	if c.has("ends") {
		o, is := c.chosen("ends")
		c.all(operands[0], in[0], o.rectangles)
		ends = is
	}
	for i := range in[0] {
		var values []value
		for _, l := range in {
			if l[i].cols != in[0][i].cols {
				c.refuse("takes different columns: %s and %s", c.ref.describe(&in[0][i]), c.ref.describe(&l[i]))
			}
			values = append(values, l[i].value)
		}
		if t := c.term(k, values...); c.has("ends") && t.ends != ends {
			c.refuse("ends are not those of the rows")
		}
		out = made(out, in[0][i].rectangle, c.make(k, nil, in[0][i].rectangle, values...))
	}
	return out
}

func activation(c *call) {
	c.write("y", c.elementwise(newKey("activation").int(c.int("function")), "x"))
}

func activationGrad(c *call) {
	c.write("dx", c.elementwise(newKey("activation_grad").int(c.int("function")), "dy", "x"))
}

func glu(c *call) { c.write("y", c.elementwise(newKey("glu").int(c.int("function")), "gate", "up")) }

func gluGrad(c *call) {
	f := c.int("function")
	dgate := c.elementwise(newKey("glu_grad_gate").int(f), "dy", "gate", "up")
	dup := c.elementwise(newKey("glu_grad_up").int(f), "dy", "gate", "up")
	c.write("dgate", dgate)
	c.write("dup", dup)
}

// Sums.

func add(c *call) {
	out := c.sum(c.raw("a"), c.raw("b"))
	if c.has("bias") {
		bias := c.only("bias")
		for i := range out {
			p := &out[i]
			if p.cols != bias.rows() {
				c.refuse("adds %s to %s", c.ref.describe(&bias), c.ref.describe(p))
			}
			p.content = c.biased(p.content, &bias, p.rectangle)
		}
	}
	c.write("y", out)
}

func cast(c *call) { c.write("y", c.raw("x")) }

func axpby(c *call) {
	out := c.scaled(c.raw("a"), c.float("alpha"))
	if c.has("b") {
		out = c.sum(out, c.scaled(c.raw("b"), c.float("beta")))
	}
	c.write("y", out)
}

func (c *call) scaled(list []piece, by float64) []piece {
	for i := range list {
		p := &list[i]
		for k := range p.parts {
			if !p.parts[k].linear() {
				c.refuse("%s cannot be multiplied before it is complete", p.parts[k].describe(p.rectangle))
			}
		}
		p.content = p.content.times(by)
	}
	return list
}
