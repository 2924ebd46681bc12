package meaning

import (
	"sppo.dev/ir"
)

// Rotations, dropout and attention: rules for instructions whose attributes say which tokens they work on.

// place is the position of the row of an operand with the attributes batch, chunks and member, in a subsequence that begins at start.
// rows is the number of rows of the operand.
func (c *call) place(row, rows, start int64) int64 {
	token, half := row/c.int("batch"), rows/c.int("batch")/2
	switch chunks := c.int("chunks"); {
	case chunks == 0:
		return start + token
	case token < half:
		return start + c.int("member")*half + token
	default:
		return start + (chunks-1-c.int("member"))*half + token - half
	}
}

// checkPlaces checks that rows are those of the tokens that the attributes name.
func (c *call) checkPlaces(list []piece, start int64) {
	at, rows := int64(0), total(rowsOf, list)
	for i := range list {
		p := &list[i]
		first, last := c.place(at, rows, start), c.place(at+p.count()-1, rows, start)
		if p.batch != c.int("batch") || p.first != first || p.first+p.n-1 != last {
			c.refuse("the attributes are those of tokens %d to %d, but x is %s", first, last, c.ref.describe(p))
		}
		at += p.count()
	}
}

func rotationKey(r ir.Rotation, headDim int64, inverse bool) key {
	k := newKey("rope").int(headDim).float(r.Scale).float(r.Rest).float(r.Beta).int(r.Period)
	if inverse {
		k = k.int(1)
	}
	for _, rate := range r.Rates {
		k = k.float(rate)
	}
	return k
}

func rope(c *call) {
	list, dim := c.linear("x"), c.int("head_dim")
	c.checkPlaces(list, c.int("position"))
	rotation := c.in.Rotation(&c.p.Run)
	if len(rotation.Rates) == 0 {
		c.write("y", c.scaled(c.raw("x"), rotation.Rest))
		return
	}
	k := rotationKey(rotation, dim, c.bool("inverse"))
	var documents []value
	if c.has("positions") {
		p := c.positions()
		if documents = append(documents, p.value); p.first != c.int("position") || p.sequence != list[0].sequence || p.batch != list[0].batch {
			c.refuse("takes positions of other tokens: %s", c.ref.describe(&p))
		}
	}
	var out []piece
	for _, p := range list {
		if p.cols.lo%dim != 0 || p.cols.hi%dim != 0 {
			c.refuse("rotates %s, which are not whole heads", c.ref.describe(&p))
		}
		out = made(out, p.rectangle, c.makeSome(k, nil, p.rectangle, p.part, append([]value{p.value}, documents...)...))
	}
	c.write("y", out)
}

// positions returns the operand of that name.
func (c *call) positions() piece {
	p := c.only("positions")
	if p.value != dataKey(ir.AsPositions) {
		c.refuse("takes %s for positions in documents", c.ref.describe(&p))
	}
	return p
}

func dropout(c *call) {
	list, start := c.linear("x"), c.int("position")
	if c.int("chunks") == 0 {
		start += c.int("member") * total(rowsOf, list) / c.int("batch")
	}
	c.checkPlaces(list, start)
	k, key := dropoutKey(c.int("tensor"), c.float("rate")), c.only("key").value
	var out []piece
	for _, p := range list {
		if p.sequence != c.int("first")+c.int("replica") || p.cols.lo != c.int("col") {
			c.refuse("drops elements of sequence %d from column %d on in %s", c.int("first")+c.int("replica"), c.int("col"), c.ref.describe(&p))
		}
		out = made(out, p.rectangle, c.makeSome(k, nil, p.rectangle, p.part, p.value, key))
	}
	c.write("y", out)
}

func dropoutKey(tensor int64, rate float64) key { return newKey("dropout").int(tensor).float(rate) }

// attentionCall is an attention instruction or its gradient.
type attentionCall struct {
	*call
	q, k, v   []piece
	heads     int64
	dim, wide int64 // widths of heads of q and k, and of v and o
	local     int64 // window; 0: none
	documents []value
	sinks     []value // of a gradient, if the attention has them
	positions piece
	softcap   float64
}

func (c *call) attention() *attentionCall {
	a := &attentionCall{call: c, heads: c.int("heads"), dim: c.int("head_dim"), wide: c.in.Work().ValueDim, local: c.int("window"), softcap: c.float("softcap")}
	kv := c.rows(c.operand("k"), c.operand("v"))
	a.q, a.k, a.v = c.operand("q"), kv[0], kv[1]
	for i := range a.k {
		if p := &a.k[i]; p.value != a.k[0].value || a.v[i].value != a.v[0].value || p.cols != a.k[0].cols || a.v[i].cols != a.ofValues(p.cols) {
			c.refuse("takes keys and values of different kinds: %s, %s", c.ref.describe(p), c.ref.describe(&a.v[i]))
		}
	}
	if c.has("positions") {
		a.positions = c.positions()
		a.documents = append(a.documents, a.positions.value)
	}
	a.checkHeads()
	return a
}

// ofValues returns the columns of v and o for heads whose columns of q or k are given.
func (a *attentionCall) ofValues(cols interval) interval {
	return interval{cols.lo / a.dim * a.wide, cols.hi / a.dim * a.wide}
}

// checkHeads checks that every query head uses the head of keys that it has in the model.
func (a *attentionCall) checkHeads() {
	group, shared := a.ref.group, a.heads/a.int("kv_heads")
	for i := range a.q {
		first, firstKey := a.q[i].cols.lo/a.dim, a.k[0].cols.lo/a.dim
		for h := range a.heads {
			if (first+h)/group != firstKey+h/shared || a.q[i].cols.lo%a.dim != 0 || a.k[0].cols.lo%a.dim != 0 {
				a.refuse("head %d of %s uses head %d of %s", h, a.ref.describe(&a.q[i]), h/shared, a.ref.describe(&a.k[0]))
			}
		}
	}
}

// values returns the operands of the key of attention.
func (a *attentionCall) values(more ...value) []value {
	return append(append(append(more, a.q[0].value, a.k[0].value, a.v[0].value), a.documents...), a.sinks...)
}

func attentionKey(dim, wide, window int64, softcap float64) key {
	return newKey("attention").int(dim).int(wide).int(window).float(softcap)
}

// names of the results of attention and its gradient
const (
	resultO = iota
	resultLSE
	resultDQ
	resultDK
	resultDV
)

func (a *attentionCall) key(result int64) key {
	window := a.local
	if window >= a.ref.sequence {
		window = 0
	}
	return attentionKey(a.dim, a.wide, window, a.softcap).int(result)
}

// block is a set of queries and the keys that they see.
type block struct {
	query   int      // index of the piece of queries
	rows    interval // of that piece
	queries rectangle
	keys    []seen
}

// seen is a piece of keys of which the queries of a block see at least one.
type seen struct {
	piece  int
	tokens interval
}

// blocks divides the queries into those that see the same keys.
func (a *attentionCall) blocks() (out []block) {
	batch, parts := a.int("batch"), a.in.AttentionParts(a.consts)
	at := int64(0) // of the piece's first query, in tokens
	for i := range a.q {
		p := &a.q[i]
		if p.batch != batch {
			a.refuse("has %d sequences, not %d", p.batch, batch)
		}
		for lo := at; lo < at+p.n; {
			part, hi := partAt(parts, lo, at+p.n)
			b := block{query: i, rows: interval{(lo - at) * batch, (hi - at) * batch}, queries: p.rectangle}
			b.queries.first, b.queries.n = p.first+lo-at, hi-lo
			a.find(&b, part, lo)
			out = append(out, b)
			lo = hi
		}
		at += p.n
	}
	return out
}

// partAt returns the part that has a query, or nil, and where it ends.
func partAt(parts []ir.AttentionPart, query, end int64) (*ir.AttentionPart, int64) {
	for i := range parts {
		switch p := &parts[i]; {
		case query >= p.Query && query < p.Query+p.Queries:
			return p, min(end, p.Query+p.Queries)
		case query < p.Query:
			end = min(end, p.Query)
		}
	}
	return nil, end
}

// find finds the keys that a block's queries see, and checks that they are those that they see in the model.
func (a *attentionCall) find(b *block, part *ir.AttentionPart, query int64) {
	off, q := int64(0), b.queries
	if part != nil && len(a.documents) > 0 {
		row := part.Place/q.batch + query - part.Query
		if a.positions.first+row != q.first || a.positions.sequence != q.sequence || a.positions.batch != q.batch {
			a.refuse("takes the positions of other tokens: %s", a.ref.describe(&a.positions))
		}
	}
	for i := range a.k {
		k := &a.k[i]
		if k.sequence != q.sequence || k.batch != q.batch {
			a.refuse("takes keys of other sequences: %s", a.ref.describe(k))
		}
		visible := a.visible(k, part, query, off, q)
		if visible.size() > 0 {
			b.keys = append(b.keys, seen{i, visible})
		}
		off += k.n
	}
}

// visible returns the tokens of a piece of keys that a block's queries see, of which the first is key off of the instruction.
func (a *attentionCall) visible(k *piece, part *ir.AttentionPart, query, off int64, q rectangle) interval {
	window := a.local
	if window == 0 {
		window = a.ref.sequence
	}
	last := q.first + q.n - 1
	all, none := q.first >= k.first+k.n-1 && last-window < k.first, last < k.first || q.first-window >= k.first+k.n-1
	if part == nil || off >= part.Keys {
		if !none {
			a.refuse("hides %s from queries %d to %d", a.ref.describe(k), q.first, last)
		}
		return interval{}
	}
	at := part.Prefix + query - part.Query - off // first query, counted from the first of these keys
	n := min(k.n, part.Keys-off)
	seesAll := at >= n-1 && at+q.n-1-part.Window < 0 && n == k.n
	seesNone := at+q.n-1 < 0 || at-part.Window >= n-1
	aligned := at == q.first-k.first && (part.Window == window || at+q.n-1-part.Window < 0 && last-window < k.first) && (n == k.n || last < k.first+n)
	switch {
	case none && seesNone:
		return interval{}
	case aligned && (len(a.documents) == 0 || at == q.first-k.first), all && seesAll && len(a.documents) == 0:
		return k.rows().and(interval{max(0, q.first-window+1), last + 1})
	case len(a.documents) > 0 && all && seesAll:
		a.unknown("attention inside documents over keys that are not in order has no rule")
	}
	a.refuse("queries %d to %d of the model see other keys of %s than those of the instruction do", q.first, last, a.ref.describe(k))
	return interval{}
}

// covers returns the keys that a block's queries see.
func (a *attentionCall) covers(b *block) (c cover) {
	for _, s := range b.keys {
		var ok bool
		if c, ok = c.with(nowhere.by(tokens, s.tokens)); !ok {
			a.refuse("sees the same keys twice: %s", a.ref.describe(&a.k[s.piece]))
		}
	}
	return c
}

func attention(c *call) {
	a := c.attention()
	var o, lse []piece
	for _, b := range a.blocks() {
		values := a.values()
		values[0] = a.q[b.query].value
		over := a.covers(&b)
		to := b.queries.with(a.ofValues(b.queries.cols))
		o = made(o, to, a.make(a.key(resultO), over, to, values...))
		r := b.queries.with(interval{b.queries.cols.lo / a.dim, b.queries.cols.hi / a.dim})
		lse = made(lse, r, a.make(a.key(resultLSE), over, r, values...))
	}
	if c.bool("accumulate") {
		o, lse = a.continued(c.raw("o"), c.raw("lse"), o, lse)
	}
	c.store(viewOf(c.in.Arg("o")), o)
	c.store(viewOf(c.in.Arg("lse")), lse)
}

func viewOf(v ir.View) *ir.View { return &v }

// continued returns the softmax over the keys of two lists of results.
func (c *call) continued(o1, lse1, o2, lse2 []piece) (o, lse []piece) {
	lists := c.rows(o1, lse1, o2, lse2)
	for i := range lists[0] {
		a, b := c.softmaxOf(&lists[0][i], &lists[1][i]), c.softmaxOf(&lists[2][i], &lists[3][i])
		if a[0].term != b[0].term || lists[0][i].rectangle != lists[2][i].rectangle {
			c.refuse("continues %s with %s", c.ref.describe(&lists[0][i]), c.ref.describe(&lists[2][i]))
		}
		over, disjoint := a[0].cover.union(b[0].cover)
		if !disjoint {
			c.refuse("takes keys twice: %s, %s", c.ref.describe(&lists[0][i]), c.ref.describe(&lists[2][i]))
		}
		o = made(o, lists[0][i].rectangle, sumOver(a[0].term, over, 1, lists[0][i].rectangle))
		lse = made(lse, lists[1][i].rectangle, sumOver(a[1].term, over, 1, lists[1][i].rectangle))
	}
	return o, lse
}

// softmaxOf checks that a result of attention and its lse are those over the same keys, and returns both.
func (c *call) softmaxOf(o, lse *piece) [2]*part {
	if p, q := c.softmax(o), c.softmax(lse); p != nil && q != nil && p.value != q.value && len(p.cover) == len(q.cover) && p.cover.same(q.cover) {
		if p.term.partner == q.term.value {
			return [2]*part{p, q}
		}
	}
	c.refuse("%s and %s do not belong together", c.ref.describe(o), c.ref.describe(lse))
	return [2]*part{}
}

// softmax returns a piece as a sum over keys, even if it is complete.
func (c *call) softmax(p *piece) *part {
	switch {
	case len(p.parts) == 1 && p.content.value.isZero() && p.parts[0].kind == softmax:
		return &p.parts[0]
	case len(p.parts) == 0 && c.ref.terms[p.content.value] != nil && c.ref.terms[p.content.value].kind == softmax:
		t := c.ref.terms[p.content.value]
		return &part{t, cover{t.needs(p.rectangle)}, 1}
	}
	return nil
}

func attentionMerge(c *call) {
	planes := c.in.Arg("parts").Shape[0]
	o, lse := c.raw("parts"), c.raw("lses")
	plane := func(list []piece, k int64) []piece {
		bytes := total((*piece).length, list) / planes
		return between(c, list, k*bytes, (k+1)*bytes)
	}
	os, lses := plane(o, 0), plane(lse, 0)
	for k := int64(1); k < planes; k++ {
		os, lses = c.continued(os, lses, plane(o, k), plane(lse, k))
	}
	c.write("o", os)
	c.write("lse", lses)
}

// deltaValues returns the operands of attention_delta in ascending order, because products commute.
func deltaValues(x, y value) []value {
	if x[0] > y[0] {
		x, y = y, x
	}
	return []value{x, y}
}

func deltaKey(dim int64) key { return newKey("attention_delta").int(dim) }

func attentionDelta(c *call) {
	dim := c.int("head_dim")
	lists := c.rows(c.operand("do"), c.operand("o"))
	var out []piece
	for i := range lists[0] {
		g, o := &lists[0][i], &lists[1][i]
		if g.cols != o.cols || g.cols.lo%dim != 0 {
			c.refuse("takes different heads: %s and %s", c.ref.describe(g), c.ref.describe(o))
		}
		r := g.with(interval{g.cols.lo / dim, g.cols.hi / dim})
		out = made(out, r, c.make(deltaKey(dim), nil, r, deltaValues(g.value, o.value)...))
	}
	c.write("delta", out)
}

func sinkKey(dim, result int64) key { return newKey("attention_sink").int(dim).int(result) }

// sunk returns the values of the results of attention with sinks.
func sunk(dim int64, o, lse, sinks value) (value, value) {
	return sinkKey(dim, resultO).of(o, lse, sinks).value(), sinkKey(dim, resultLSE).of(o, lse, sinks).value()
}

// withSinks returns operands, given for the same rows, in pieces; each piece of o or its gradient, of lse and of the sinks must have
// the same heads.
func (c *call) withSinks(names ...string) (lists [][]piece, sinks piece) {
	for _, name := range names {
		lists = append(lists, c.operand(name))
	}
	lists, sinks = c.rows(lists...), c.only("sink")
	for _, list := range lists {
		for i := range list {
			heads := lists[len(lists)-1][i].cols // of lse
			if p := &list[i]; p.cols != heads && p.cols != (interval{heads.lo * c.int("head_dim"), heads.hi * c.int("head_dim")}) || heads != sinks.rows() {
				c.refuse("takes different heads: %s, with %s", c.ref.describe(p), c.ref.describe(&sinks))
			}
		}
	}
	return lists, sinks
}

func attentionSink(c *call) {
	lists, sinks := c.withSinks("o", "lse")
	var o, lse []piece
	for i := range lists[0] {
		p, q := &lists[0][i], &lists[1][i]
		o = made(o, p.rectangle, c.make(sinkKey(c.int("head_dim"), resultO), nil, p.rectangle, p.value, q.value, sinks.value))
		lse = made(lse, q.rectangle, c.make(sinkKey(c.int("head_dim"), resultLSE), nil, q.rectangle, p.value, q.value, sinks.value))
	}
	c.write("o", o)
	c.write("lse", lse)
}

func sinkGradKey(dim int64) key { return newKey("attention_sink_grad").int(dim) }

func attentionSinkGrad(c *call) {
	lists, sinks := c.withSinks("do", "o", "lse")
	c.write("dsink", c.overRows(sinkGradKey(c.int("head_dim")), lists, func(p []piece) (rectangle, box) {
		return matrix(p[2].cols, full), p[2].tokens()
	}, sinks.value))
}

func attentionGrad(c *call) {
	a := c.attention()
	do := a.operands()
	blocks := a.blocks()
	var dq []piece
	over := make([]cover, len(a.k)) // queries that see each piece of keys
	for _, b := range blocks {
		if len(b.keys) == 0 {
			dq = made(dq, b.queries, &content{})
			continue
		}
		dq = made(dq, b.queries, a.make(a.key(resultDQ), a.covers(&b), b.queries, a.values(do)...))
		for _, s := range b.keys {
			var ok bool
			if over[s.piece], ok = over[s.piece].with(nowhere.by(tokens, b.queries.rows()).by(shares, a.shares(&b))); !ok {
				c.refuse("has the same queries twice: %s", c.ref.describe(&a.q[b.query]))
			}
		}
	}
	var dk, dv []piece
	for i := range a.k {
		if len(over[i]) == 0 {
			dk, dv = made(dk, a.k[i].rectangle, &content{}), made(dv, a.v[i].rectangle, &content{})
			continue
		}
		dk = made(dk, a.k[i].rectangle, a.make(a.key(resultDK), over[i], a.k[i].rectangle, a.values(do)...))
		dv = made(dv, a.v[i].rectangle, a.make(a.key(resultDV), over[i], a.v[i].rectangle, a.values(do)...))
	}
	c.write("dq", dq)
	c.write("dk", dk)
	c.write("dv", dv)
}

// shares returns the part of the query heads that share a head of keys to which those of a block belong.
func (a *attentionCall) shares(b *block) interval {
	group, heads, keys := a.ref.group, interval{b.queries.cols.lo / a.dim, b.queries.cols.hi / a.dim}, interval{a.k[0].cols.lo / a.dim, a.k[0].cols.hi / a.dim}
	switch {
	case heads.lo == keys.lo*group && heads.hi == keys.hi*group:
		return interval{0, group}
	case keys.size() != 1:
		a.refuse("%d query heads share %d heads of keys", heads.size(), keys.size())
	}
	return interval{heads.lo - keys.lo*group, heads.hi - keys.lo*group}
}

// operands checks the other operands of a gradient of attention, and returns the gradient of its result.
func (a *attentionCall) operands() value {
	names := []string{"q", "do", "lse", "o", "delta"}
	lists := [][]piece{a.q}
	for _, name := range names[1:] {
		if a.has(name) {
			lists = append(lists, a.operand(name))
		} else {
			lists = append(lists, a.q)
		}
	}
	lists = a.rows(lists...)
	q, do := a.q[0].value, lists[1][0].value
	o, lse := a.key(resultO).of(a.values()...).value(), a.key(resultLSE).of(a.values()...).value()
	if t := a.ref.terms[lists[2][0].value]; t != nil && t.op == ir.AttentionSink {
		a.sinks = t.operands[2:]
		o, lse = sunk(a.wide, o, lse, a.sinks[0])
	}
	for i := range lists[0] {
		p, heads := &lists[0][i], interval{lists[0][i].cols.lo / a.dim, lists[0][i].cols.hi / a.dim}
		want := map[string]struct {
			value
			interval
		}{"q": {q, p.cols}, "do": {do, a.ofValues(p.cols)}, "lse": {lse, heads}, "o": {o, a.ofValues(p.cols)}, "delta": {deltaKey(a.wide).of(deltaValues(do, o)...).value(), heads}}
		for k, name := range names {
			if l := &lists[k][i]; a.has(name) && (l.value != want[name].value || l.cols != want[name].interval) {
				a.refuse("%s is %s, not %s of these queries and keys", name, a.ref.describe(l), name)
			}
		}
	}
	return do
}

// Heads of two parts, of which all heads share the first.

func concatKey(first, rest int64) key { return newKey("concat_heads").int(first).int(rest) }

// concatGradKey is the key of the gradient of the shared part, or of the other.
func concatGradKey(name string, first, rest int64) key {
	return newKey("concat_heads_grad_" + name).int(first).int(rest)
}

// heads returns the interval of heads of the columns of an operand.
func (c *call) headsOf(p *piece, width int64) interval {
	if p.cols.lo%width != 0 || p.cols.hi%width != 0 {
		c.refuse("takes %s, which are not whole heads", c.ref.describe(p))
	}
	return interval{p.cols.lo / width, p.cols.hi / width}
}

func concatHeads(c *call) {
	first := c.in.Arg("shared").Cols()
	rest := c.int("head_dim") - first
	lists := c.rows(c.operand("shared"), c.operand("x"))
	var out []piece
	for i := range lists[0] {
		p, q := &lists[0][i], &lists[1][i]
		if p.cols != (interval{0, first}) {
			c.refuse("shares %s", c.ref.describe(p))
		}
		heads := c.headsOf(q, rest)
		r := q.with(interval{heads.lo * (first + rest), heads.hi * (first + rest)})
		out = made(out, r, c.make(concatKey(first, rest), nil, r, p.value, q.value))
	}
	c.write("y", out)
}

func concatHeadsGrad(c *call) {
	first := c.in.Arg("dshared").Cols()
	rest := c.int("head_dim") - first
	var shared, own []piece
	for _, p := range c.linear("dy") {
		heads := c.headsOf(&p, first+rest)
		r := p.with(interval{0, first})
		shared = made(shared, r, c.makeSome(concatGradKey("shared", first, rest), cover{nowhere.by(features, heads)}, r, p.part, p.value))
		r = p.with(interval{heads.lo * rest, heads.hi * rest})
		own = made(own, r, c.makeSome(concatGradKey("x", first, rest), nil, r, p.part, p.value))
	}
	c.write("dshared", shared)
	c.write("dx", own)
}
