package meaning

import "sppo.dev/ir"

// Rules of linear attention. Row t of the value that a scan leaves is the state after token t, so the state before an instruction's first
// token is a row of that value, too. The gradient of a convolution's operand is a sum over the tokens that depend on a row; those of later
// instructions add to it.

// Results of scan and of its gradient, besides resultO. Those of a gradient are named after operands.
const (
	resultNext = iota + 1
	resultQ
	resultK
	resultV
	resultDecay
	resultBeta
	resultState
)

// scanner is what a scan computes.
type scanner struct {
	shared, keyDim, valueDim, channels int64
	delta                              bool
	norm, scale                        float64
}

func (s scanner) key(name string, result int64) key {
	k := newKey(name).int(s.shared).int(s.keyDim).int(s.valueDim).int(s.channels).float(s.norm).float(factor(s.scale)).int(result)
	if s.delta {
		k = k.int(1)
	}
	return k
}

// scanCall is a scan or its gradient.
type scanCall struct {
	*call
	scanner
	operands  []piece // q, k, v, decay, beta
	documents []value
	heads     interval
}

func (c *call) scan() *scanCall {
	s := &scanCall{call: c, scanner: scanner{c.int("shared"), c.int("key_dim"), c.int("value_dim"), c.int("channels"), c.bool("delta"), c.float("norm"), c.float("scale")}}
	s.operands = c.sameTokens("q", "k", "v", "decay", "beta")
	s.documents = c.documentsOf(&s.operands[0])
	keys := interval{s.operands[0].cols.lo / s.keyDim, s.operands[0].cols.hi / s.keyDim}
	s.heads = interval{keys.lo * s.shared, keys.hi * s.shared}
	for i, width := range []int64{s.keyDim, s.keyDim, s.valueDim, s.channels, 1} {
		heads := s.heads
		if i < 2 {
			heads = keys
		}
		if p := &s.operands[i]; p.cols != (interval{heads.lo * width, heads.hi * width}) {
			c.refuse("takes other heads than those of q: %s", c.ref.describe(p))
		}
	}
	return s
}

// sameTokens returns operands, each a single piece, that have the same tokens.
func (c *call) sameTokens(names ...string) (list []piece) {
	for _, name := range names {
		p := c.only(name)
		if list = append(list, p); p.with(full) != list[0].with(full) || p.batch != c.int("batch") {
			c.refuse("%s has other tokens than %s: %s", name, names[0], c.ref.describe(&p))
		}
	}
	return list
}

// documentsOf returns the operand with positions in documents, which must be those of a piece, if there is one.
func (c *call) documentsOf(of *piece) []value {
	if !c.has("positions") {
		return nil
	}
	p := c.positions()
	if p.with(full) != of.with(full) {
		c.refuse("takes positions of other tokens: %s", c.ref.describe(&p))
	}
	return []value{p.value}
}

func (s *scanCall) values(more ...value) []value {
	for i := range s.operands {
		more = append(more, s.operands[i].value)
	}
	return append(more, s.documents...)
}

// after returns the rectangle of the state after a token.
func (s *scanCall) after(token int64) rectangle {
	size := s.keyDim * s.valueDim
	r := s.operands[0].with(interval{s.heads.lo * size, s.heads.hi * size})
	r.first, r.n = token, 1
	return r
}

// require checks that an operand is the state after a token, or a gradient of it. At an end of the sequence, it is 0 or absent.
func (s *scanCall) require(name string, v value, token int64, end bool) {
	if end && (!s.has(name) || zero(s.raw(name))) {
		return
	}
	if !s.has(name) {
		s.refuse("has no %s, although it is not at the end of the sequence", name)
	}
	if p := s.only(name); p.value != v || p.rectangle != s.after(token) {
		s.refuse("%s is %s, not that of token %d and these operands", name, s.ref.describe(&p), token)
	}
}

// zero reports whether all elements are 0.
func zero(list []piece) bool {
	return len(list) == 1 && list[0].anywhere && list[0].content.value.isZero() && len(list[0].parts) == 0
}

func scan(c *call) {
	s, name := c.scan(), c.in.Info().Name
	q := s.operands[0].rectangle
	o, next := s.operands[2].rectangle, s.after(q.first+q.n-1)
	s.require("state", s.key(name, resultNext).of(s.values()...).value(), q.first-1, q.first == 0)
	c.write("o", made(nil, o, c.make(s.key(name, resultO), nil, o, s.values()...)))
	c.write("next", made(nil, next, c.make(s.key(name, resultNext), nil, next, s.values()...)))
}

func scanGrad(c *call) {
	s, do := c.scan(), c.only("do")
	q := s.operands[0].rectangle
	if do.rectangle != s.operands[2].rectangle {
		c.refuse("do has other tokens or heads than v: %s", c.ref.describe(&do))
	}
	key := func(result int64) key { return s.key("scan_grad", result) }
	s.require("state", s.key("scan", resultNext).of(s.values()...).value(), q.first-1, q.first == 0)
	s.require("dnext", key(resultState).of(s.values(do.value)...).value(), q.first+q.n-1, q.first+q.n == c.ref.sequence)
	for i, name := range []string{"dq", "dk", "dv", "ddecay", "dbeta"} {
		r := s.operands[i].rectangle
		c.write(name, made(nil, r, c.make(key(resultQ+int64(i)), nil, r, s.values(do.value)...)))
	}
	before := s.after(q.first - 1)
	c.write("dstate", made(nil, before, c.make(key(resultState), nil, before, s.values(do.value)...)))
}

// resultConvBias is the gradient of a convolution's bias.
const resultConvBias = resultNext + 1

func convKey(name string, width, result int64) key { return newKey(name).int(width).int(result) }

// convCall is a convolution or its gradient.
type convCall struct {
	*call
	x, w  piece
	width int64
	more  []value // operands after w
	tail  []piece // the rows before those of x
}

func (c *call) conv() *convCall {
	v := &convCall{call: c, x: c.sameTokens("x")[0], w: c.only("w"), width: c.int("width")}
	if v.w.rows() != v.x.cols {
		c.refuse("convolves %s with %s", c.ref.describe(&v.x), c.ref.describe(&v.w))
	}
	if c.has("bias") {
		bias := c.only("bias")
		if v.more = []value{bias.value}; bias.rows() != v.x.cols {
			c.refuse("convolves %s with the bias %s", c.ref.describe(&v.x), c.ref.describe(&bias))
		}
	}
	v.more = append(v.more, c.documentsOf(&v.x)...)
	v.tail = v.before()
	if !c.has("tail") && !zero(v.tail) {
		c.refuse("has no rows before those of x, although these are not the first of the sequence")
	}
	if given := c.raw("tail"); given != nil && !same(given, v.tail) {
		c.refuse("tail is %s, not the rows before those of x", c.ref.describe(&given[0]))
	}
	return v
}

// before returns the rows that come before those of x. Rows before the first token of the sequence are 0.
func (v *convCall) before() (list []piece) {
	p := v.x
	missing := max(0, v.width-p.first)
	if missing > 0 {
		list = join(list, uniform(&content{}, missing*p.batch*p.cols.size(), int64(p.size)))
	}
	p.first, p.n = p.first-v.width+missing, v.width-missing
	return join(list, p)
}

// same reports whether two lists have the same contents.
func same(a, b []piece) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if p, q := &a[i], &b[i]; p.anywhere != q.anywhere || p.rectangle != q.rectangle || !p.equal(q.content) {
			return false
		}
	}
	return true
}

// split cuts a list of rows like those of x before some number of them.
func (v *convCall) split(list []piece, rows int64) (head, rest []piece) {
	all := total((*piece).length, list)
	at := all / total(elementsOf, list) * rows * v.x.batch * v.x.cols.size()
	return between(v.call, list, 0, at), between(v.call, list, at, all)
}

func conv(c *call) {
	v := c.conv()
	y := c.make(convKey("conv", v.width, resultO), nil, v.x.rectangle, append([]value{v.x.value, v.w.value}, v.more...)...)
	_, next := v.split(join(v.tail, v.x), v.x.n)
	c.write("y", made(nil, v.x.rectangle, y))
	c.write("next", next)
}

func convGrad(c *call) {
	v, dy := c.conv(), c.only("dy")
	if dy.rectangle != v.x.rectangle {
		c.refuse("dy has other rows or columns than x: %s", c.ref.describe(&dy))
	}
	operands := append([]value{dy.value, v.x.value, v.w.value}, v.more...)
	over := cover{nowhere.by(tokens, v.x.rows())}
	before := v.x.rectangle
	before.first, before.n = before.first-v.width, v.width
	var rows []piece
	for _, r := range []rectangle{before, v.x.rectangle} {
		rows = append(rows, piece{rectangle: r, content: c.make(convKey("conv_grad", v.width, resultO), over, r, operands...), size: int32(ir.F32.Bytes())})
	}
	if c.has("dnext") {
		head, last := v.split(rows, v.x.n)
		rows = append(head, c.sum(last, c.raw("dnext"))...)
	}
	dtail, dx := v.split(rows, v.width)
	c.write("dx", dx)
	c.write("dtail", dtail)
	for name, of := range map[string]struct {
		result int64
		cols   interval
	}{"dw": {resultNext, interval{0, v.width}}, "dbias": {resultConvBias, full}} {
		if !c.has(name) {
			continue
		}
		c.write(name, c.overRows(convKey("conv_grad", v.width, of.result), [][]piece{{dy}, {v.x}}, func(p []piece) (rectangle, box) {
			return matrix(p[1].cols, of.cols), p[1].tokens()
		}, operands[2:]...))
	}
}

// Results of decay and of its gradient.
const (
	resultStep = iota + 1
	resultRate
	resultBias
)

func decayKey(name string, headDim int64, least float64, result int64) key {
	return newKey(name).int(headDim).float(least).int(result)
}

// decaying returns the operands of decay, which have the same heads, and the key of a result.
func (c *call) decaying(name string) (x, rate, bias piece, of func(result int64) key) {
	x, rate, bias = c.only("x"), c.only("rate"), c.only("bias")
	if bias.rows() != x.cols || !c.ofHeads(&x, &rate) {
		c.refuse("takes different heads: %s, %s and %s", c.ref.describe(&x), c.ref.describe(&rate), c.ref.describe(&bias))
	}
	return x, rate, bias, func(result int64) key { return decayKey(name, c.int("head_dim"), c.float("least"), result) }
}

// ofHeads reports whether a vector has a number for each head of x.
func (c *call) ofHeads(x, vector *piece) bool {
	dim := c.int("head_dim")
	return x.cols == interval{vector.first * dim, (vector.first + vector.n) * dim}
}

func decay(c *call) {
	x, rate, bias, key := c.decaying("decay")
	for name, result := range map[string]int64{"y": resultO, "step": resultStep} {
		if c.has(name) {
			c.write(name, made(nil, x.rectangle, c.make(key(result), nil, x.rectangle, x.value, rate.value, bias.value)))
		}
	}
}

// decayGrad computes the gradients of x and bias from those of both results, and that of rate from that of the first.
func decayGrad(c *call) {
	x, rate, bias, key := c.decaying("decay_grad")
	rows, operands := [][]piece{{c.only("dy")}, {x}}, []value{rate.value, bias.value}
	given := rows
	if c.has("dstep") {
		given = [][]piece{{c.only("dy")}, {c.only("dstep")}, {x}}
	}
	var values []value
	for _, p := range given {
		if p[0].rectangle != x.rectangle {
			c.refuse("takes other rows or columns than x: %s", c.ref.describe(&p[0]))
		}
		values = append(values, p[0].value)
	}
	c.write("dx", made(nil, x.rectangle, c.make(key(resultO), nil, x.rectangle, append(values, operands...)...)))
	for name, of := range map[string]struct {
		result int64
		from   [][]piece
		rows   interval
	}{"drate": {resultRate, rows, rate.rows()}, "dbias": {resultBias, given, bias.rows()}} {
		c.write(name, c.overRows(key(of.result), of.from, func(p []piece) (rectangle, box) {
			return matrix(of.rows, full), p[0].tokens()
		}, operands...))
	}
}

func scaleKey(name string, headDim int64) key { return newKey(name).int(headDim) }

// scaling returns the operands of scale_columns, which have the same heads.
func (c *call) scaling() (x, factor piece) {
	x, factor = c.only("x"), c.only("factor")
	if !c.ofHeads(&x, &factor) {
		c.refuse("takes different heads: %s and %s", c.ref.describe(&x), c.ref.describe(&factor))
	}
	return x, factor
}

func scaleColumns(c *call) {
	x, factor := c.scaling()
	c.write("y", made(nil, x.rectangle, c.make(scaleKey("scale_columns", c.int("head_dim")), nil, x.rectangle, x.value, factor.value)))
}

func scaleColumnsGrad(c *call) {
	x, factor := c.scaling()
	dy, dim := c.only("dy"), c.int("head_dim")
	if dy.rectangle != x.rectangle {
		c.refuse("dy has other rows or columns than x: %s", c.ref.describe(&dy))
	}
	c.write("dx", made(nil, x.rectangle, c.make(scaleKey("scale_columns", dim), nil, x.rectangle, dy.value, factor.value)))
	c.write("dfactor", c.overRows(scaleKey("scale_columns_grad", dim), [][]piece{{dy}, {x}}, func(p []piece) (rectangle, box) {
		return matrix(factor.rows(), full), p[1].tokens()
	}))
}
