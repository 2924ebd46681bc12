package meaning

import "slices"

// This file has the rules of MLPs with experts. A choice of experts puts rows into another order, which depends on the data, and thus
// also on which rows a rank has. Rectangles in that order have the number of an order, which stands for the rows that were put into it.

// order is what rows have been put into the order of experts. A rank may have only some of the experts; the sum over the experts of a
// token is then incomplete.
type order struct {
	number       int64
	rows         []rectangle // in the order of tokens, with all columns
	experts, top int64
	own          interval // the experts of the rank
}

// same reports whether the order is that of the rows themselves.
func (o *order) same() bool { return o.experts == 1 && o.top == 1 }

// rectangles returns the rows, each as often as the rank's experts may choose it, with some columns.
func (o *order) rectangles(cols interval) []rectangle {
	if o.same() {
		return o.tokens(cols)
	}
	n := int64(0)
	for _, r := range o.rows {
		n += r.count() * min(o.top, o.own.size())
	}
	r := matrix(interval{0, n}, cols)
	r.order = o.number
	return []rectangle{r}
}

// tokens returns the rows in the order of tokens, with some columns.
func (o *order) tokens(cols interval) (list []rectangle) {
	for _, r := range o.rows {
		list = append(list, r.with(cols))
	}
	return list
}

// rowsIn returns the rows of a list, of which adjacent ones are merged.
func rowsIn(list []piece) (rows []rectangle) {
	for i := range list {
		r := list[i].with(full)
		r.order = 0
		if n := len(rows) - 1; n >= 0 && rows[n].sequence == r.sequence && rows[n].batch == r.batch && rows[n].first+rows[n].n == r.first {
			rows[n].n += r.n
			continue
		}
		rows = append(rows, r)
	}
	return rows
}

// some returns which of the experts the rank has, or nil if it has all of them.
func (o *order) some() *share {
	if o.own.size() == o.experts {
		return nil
	}
	return &share{[]interval{o.own}, o.experts}
}

// summed returns what a sum over the experts of a token lacks if an operand lacks something: only one of the two may.
func (c *call) summed(o *order, operand *share) *share {
	if operand == nil {
		return o.some()
	}
	if o.some() != nil {
		c.refuse("adds up incomplete sums of only some experts")
	}
	return operand
}

// newOrder returns the order into which a choice of experts puts the rows of a list.
func (c *call) newOrder(list []piece, experts, top int64, own interval) *order {
	o := &order{rows: rowsIn(list), experts: experts, top: top, own: own}
	k := newKey("order").int(experts).int(top).int(own.lo).int(own.hi)
	for _, r := range o.rows {
		k = k.int(r.sequence).int(r.batch).int(r.first).int(r.n)
	}
	o.number = int64(k.value()[0])
	c.mu.Lock()
	defer c.mu.Unlock()
	c.orders[o.number] = o
	return o
}

// chosen returns the order in which places, or ends, are given, and their value.
func (c *call) chosen(name string) (*order, value) {
	list := c.operand(name)
	c.mu.Lock()
	o := c.orders[list[0].order]
	c.mu.Unlock()
	if o == nil {
		c.refuse("%s is not from a choice of experts", name)
	}
	if name == "places" && !slices.Equal(rowsIn(list), o.rows) {
		c.refuse("places are not all of a choice of experts")
	}
	if p := &list[0]; name == "ends" && p.rectangle != ends(o) {
		c.refuse("ends are not all of a choice of experts")
	}
	for i := range list {
		if list[i].value != list[0].value || list[i].order != o.number {
			c.refuse("%s are of several choices", name)
		}
	}
	return o, list[0].value
}

func ends(o *order) rectangle {
	r := matrix(o.own, full)
	r.order = o.number
	return r
}

// part of a value: all rows that were put into an order, with some columns.
type rowsOfValue struct {
	value value
	cols  interval
	some  *share
}

// all returns an operand that has all rows of an order: in that order, or in the order of tokens.
func (c *call) all(name string, list []piece, rows func(interval) []rectangle) rowsOfValue {
	out := rowsOfValue{list[0].value, list[0].cols, list[0].part}
	want := rows(out.cols)
	merged := rowsIn(list)
	for i := range list {
		if p := &list[i]; p.value != out.value || p.cols != out.cols || !p.part.equal(out.some) || p.order != want[0].order {
			c.refuse("%s has rows of several values, or in another order: %s and %s", name, c.ref.describe(&list[0]), c.ref.describe(p))
		}
	}
	for i := range want {
		want[i] = want[i].with(full)
		want[i].order = 0
	}
	if !slices.Equal(merged, want) {
		c.refuse("%s has other rows than the choice of experts: %s", name, c.ref.describe(&list[0]))
	}
	return out
}

// spread returns a result in rectangles.
func (c *call) spread(rows []rectangle, k key, some *share, operands ...value) (out []piece) {
	for _, r := range rows {
		out = made(out, r, c.makeSome(k, nil, r, some, operands...))
	}
	return out
}

// spreadLinear returns a result that is linear in its first operand, and thus 0 if that is 0, as padding makes it.
func (c *call) spreadLinear(rows []rectangle, k key, some *share, operands ...value) (out []piece) {
	if !operands[0].isZero() {
		return c.spread(rows, k, some, operands...)
	}
	for _, r := range rows {
		out = made(out, r, &content{})
	}
	return out
}

// Results of route.
const (
	routeWeights = iota
	routeExperts
	routePlaces
	routeEnds
)

// router is what determines the choice of experts and the weights of their results.
type router struct {
	top, scores int64
	renormalize bool
	eps, scale  float64
}

func (r router) key(name string) key {
	k := newKey(name).int(r.top).int(r.scores).float(r.eps).float(factor(r.scale))
	if r.renormalize {
		k = k.int(1)
	}
	return k
}

// groups is which groups of experts a token may use.
type groups struct{ count, top, scores int64 }

func routeKey(r router, g groups, result int64) key {
	return r.key("route").int(g.count).int(g.top).int(g.scores).int(result)
}

func (c *call) router() router {
	return router{c.int("top"), c.int("scores"), c.bool("renormalize"), c.float("eps"), c.float("scale")}
}

func (c *call) groups() groups {
	return groups{c.int("groups"), c.int("top_groups"), c.int("group_scores")}
}

func route(c *call) {
	list := c.operand("logits")
	experts := list[0].cols
	if experts.lo != 0 {
		c.refuse("has the logits of only some experts")
	}
	first := c.int("first")
	o := c.newOrder(list, experts.hi, c.int("top"), interval{first, first + c.in.Arg("ends").Elements()})
	operands := []value{c.all("logits", list, o.tokens).value}
	if c.has("correction") {
		p := c.only("correction")
		if p.rows() != experts {
			c.refuse("corrects the scores of other experts: %s", c.ref.describe(&p))
		}
		operands = append(operands, p.value)
	}
	k := func(result int64) key { return routeKey(c.router(), c.groups(), result) }
	tokens, places := o.tokens(interval{0, o.top}), o.tokens(interval{0, o.top})
	for i := range places {
		places[i].order = o.number
	}
	c.write("weights", c.spread(tokens, k(routeWeights), nil, operands...))
	c.write("experts", c.spread(tokens, k(routeExperts), nil, operands...))
	c.write("places", c.spread(places, k(routePlaces), nil, operands...))
	c.write("ends", c.spread([]rectangle{ends(o)}, k(routeEnds), nil, operands...))
}

func routeGradKey(r router) key { return r.key("route_grad") }

func routeGrad(c *call) {
	list := c.operand("logits")
	o := order{rows: rowsIn(list)}
	logits, experts, dy := c.all("logits", list, o.tokens), c.all("experts", c.operand("experts"), o.tokens), c.all("dy", c.linear("dy"), o.tokens)
	c.write("dlogits", c.spreadLinear(o.tokens(logits.cols), routeGradKey(c.router()), dy.some, dy.value, logits.value, experts.value))
}

func countsKey(top int64) key { return newKey("expert_counts").int(top) }

// expertCounts counts over tokens; its rows are sequences.
func expertCounts(c *call) {
	c.write("counts", c.overRows(countsKey(c.int("top")), [][]piece{c.operand("logits")}, func(p []piece) (rectangle, box) {
		return rectangle{sequence: p[0].sequence, batch: p[0].batch, n: 1, cols: p[0].cols}, nowhere.by(tokens, p[0].rows())
	}))
}

func routerLossKey(scores int64) key { return newKey("router_loss_grad").int(scores) }

func routerLossGrad(c *call) {
	z, balance := c.ref.routerLosses()
	if !almost(c.float("z"), z) || !almost(c.float("balance"), balance) {
		c.refuse("multiplies the losses of a router by %v and %v, not %v and %v", c.float("z"), c.float("balance"), z, balance)
	}
	var counts []value
	list := c.operand("logits")
	if c.has("counts") {
		p := c.only("counts")
		if r := (rectangle{sequence: list[0].sequence, batch: list[0].batch, n: 1, cols: list[0].cols}); p.rectangle != r {
			c.refuse("takes %s as counts of %s", c.ref.describe(&p), c.ref.describe(&list[0]))
		}
		counts = append(counts, p.value)
	} else if balance != 0 {
		c.refuse("has no counts")
	}
	var out []piece
	for _, p := range list {
		if p.sequence != list[0].sequence || p.batch != list[0].batch || p.cols != list[0].cols {
			c.refuse("takes rows of several batches: %s", c.ref.describe(&p))
		}
		out = made(out, p.rectangle, c.make(routerLossKey(c.int("scores")), nil, p.rectangle, append([]value{p.value}, counts...)...))
	}
	c.write("dlogits", out)
}

// expertLoad counts over tokens.
func expertLoad(c *call) {
	c.write("load", c.overRows(newKey("expert_load"), [][]piece{c.operand("experts")}, func(p []piece) (rectangle, box) {
		return matrix(interval{0, c.in.Arg("load").Elements()}, full), p[0].tokens()
	}))
}

func expertBias(c *call) {
	w, load, norm := c.only("w"), c.only("load"), c.only("norm")
	c.number("rate", c.ref.run.BiasRate)
	if w.rows() != load.rows() {
		c.refuse("changes %s by %s", c.ref.describe(&w), c.ref.describe(&load))
	}
	c.write("w", made(nil, w.rectangle, c.make(newKey("expert_bias"), nil, w.rectangle, w.value, load.value, norm.value)))
}

func permuteKey(top int64) key       { return newKey("permute").int(top) }
func permuteGradKey(top int64) key   { return newKey("permute_grad").int(top) }
func unpermuteKey(top int64) key     { return newKey("unpermute").int(top) }
func unpermuteRowsKey(top int64) key { return newKey("unpermute_grad_rows").int(top) }
func weightsGradKey(top int64) key   { return newKey("unpermute_grad_weights").int(top) }

func permute(c *call) {
	o, places := c.chosen("places")
	x := c.all("x", c.operand("x"), o.tokens)
	c.write("y", c.spreadLinear(o.rectangles(x.cols), permuteKey(o.top), nil, x.value, places))
}

func permuteGrad(c *call) {
	o, places := c.chosen("places")
	dy := c.all("dy", c.linear("dy"), o.rectangles)
	c.write("dx", c.spreadLinear(o.tokens(dy.cols), permuteGradKey(o.top), c.summed(o, dy.some), dy.value, places))
}

func unpermute(c *call) {
	o, places := c.chosen("places")
	x, weights := c.all("x", c.linear("x"), o.rectangles), c.all("weights", c.operand("weights"), o.tokens)
	c.write("y", c.spreadLinear(o.tokens(x.cols), unpermuteKey(o.top), c.summed(o, x.some), x.value, places, weights.value))
}

func unpermuteGrad(c *call) {
	o, places := c.chosen("places")
	x, weights := c.all("x", c.linear("x"), o.rectangles), c.all("weights", c.operand("weights"), o.tokens)
	dy := c.all("dy", c.operand("dy"), o.tokens)
	if x.cols != dy.cols {
		c.refuse("multiplies columns %v by columns %v", x.cols, dy.cols)
	}
	c.write("dx", c.spreadLinear(o.rectangles(dy.cols), unpermuteRowsKey(o.top), nil, dy.value, places, weights.value))
	c.write("dweights", c.spreadLinear(o.tokens(interval{0, o.top}), weightsGradKey(o.top), c.summed(o, x.some), x.value, dy.value, places))
}

func groupedKey(name string, transposed bool) key {
	if transposed {
		return newKey(name).int(1)
	}
	return newKey(name)
}

// sorted returns an operand whose rows are in an order, or which is a number everywhere.
func (c *call) sorted(name string, o *order) rowsOfValue {
	if list := c.raw(name); len(list) == 1 && list[0].anywhere && len(list[0].parts) == 0 {
		return rowsOfValue{list[0].value, interval{0, c.in.Arg(name).Cols()}, nil}
	}
	return c.all(name, c.linear(name), o.rectangles)
}

func matmulGrouped(c *call) {
	o, ends := c.chosen("ends")
	a, b := c.sorted("a", o), c.only("b")
	each := b.n / o.own.size()
	if b.n%o.own.size() != 0 || b.first != each*o.own.lo {
		c.refuse("b does not have the matrices of experts %d to %d: %s", o.own.lo, o.own.hi-1, c.ref.describe(&b))
	}
	inner, outer := interval{0, each}, b.cols
	if c.bool("trans_b") {
		inner, outer = outer, inner
	}
	if a.cols != inner {
		c.refuse("multiplies columns %d to %d by rows %d to %d", a.cols.lo, a.cols.hi-1, inner.lo, inner.hi-1)
	}
	var out []piece
	for _, r := range o.rectangles(outer) {
		y := &content{}
		if !a.value.isZero() {
			y = c.makeSome(groupedKey("matmul_grouped", c.bool("trans_b")), cover{nowhere.by(features, inner)}, r, a.some, a.value, b.value, ends)
		}
		if c.has("bias") {
			y = c.groupedBias(y, o, r, ends)
		}
		out = made(out, r, y)
	}
	c.write("c", out)
}

func (c *call) groupedBias(y *content, o *order, r rectangle, ends value) *content {
	bias := c.only("bias")
	if bias.rows() != o.own || bias.cols != r.cols {
		c.refuse("adds %s to columns %d to %d", c.ref.describe(&bias), r.cols.lo, r.cols.hi-1)
	}
	sum, why := y.plus(c.make(newKey("grouped_bias"), nil, r, bias.value, ends), r)
	if why != "" {
		c.refuse("%s", why)
	}
	return sum
}

func matmulGroupedWeightGrad(c *call) {
	o, ends := c.chosen("ends")
	dy := c.sorted("dy", o)
	var over cover
	for _, r := range o.rows {
		over, _ = over.with(r.tokens())
	}
	sum := func(operand string, into rectangle, k key, some *share, operands ...value) {
		total := &content{}
		if !operands[0].isZero() && !operands[1].isZero() {
			total = c.makeSome(k, over, into, some, operands...)
		}
		c.write(operand, made(nil, into, total))
	}
	if c.has("db") {
		a := c.sorted("a", o)
		some := a.some
		if some == nil {
			some = dy.some
		} else if dy.some != nil {
			c.refuse("multiplies two incomplete sums")
		}
		inner, outer := a.cols, dy.cols
		if c.bool("trans_b") {
			inner, outer = outer, inner
		}
		if inner.lo != 0 {
			c.refuse("has columns %d to %d as rows of every matrix", inner.lo, inner.hi-1)
		}
		sum("db", matrix(interval{inner.hi * o.own.lo, inner.hi * o.own.hi}, outer), groupedKey("grouped_outer", c.bool("trans_b")), some, a.value, dy.value, ends)
	}
	if c.has("dbias") {
		sum("dbias", matrix(o.own, dy.cols), newKey("grouped_bias_grad"), dy.some, dy.value, ends)
	}
}
