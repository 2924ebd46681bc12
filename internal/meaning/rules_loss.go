package meaning

import "slices"

// The loss, the norm of the gradient and the updates.

func entropyStatsKey(softcap float64) key { return newKey("cross_entropy_stats").float(softcap) }

// logits returns logits and the labels of their rows, piece by piece.
func (c *call) logits() [][]piece {
	logits, labels := c.operand("logits"), c.operand("labels")
	lists := c.alignBy(rowsOf, logits, labels)
	first := c.int("first")
	for i := range lists[0] {
		p, q := &lists[0][i], lists[1][i].rectangle
		q.first-- // the label of a token is the token after it
		if q.with(full) != p.with(full) {
			c.refuse("takes %s as labels of %s", c.ref.describe(&lists[1][i]), c.ref.describe(p))
		}
		if valid := max(0, min(c.ref.vocabulary, p.cols.hi)-p.cols.lo); p.cols.lo != first || c.int("valid") != valid {
			c.refuse("takes %s for %d entries of the vocabulary from %d on", c.ref.describe(p), c.int("valid"), first)
		}
	}
	return lists
}

func entropyStats(c *call) {
	lists := c.logits()
	var out []piece
	for i := range lists[0] {
		p := &lists[0][i]
		r := p.with(interval{0, 3})
		var over cover // empty if a rank has nothing but padding
		if valid := c.int("valid"); valid > 0 {
			over = cover{nowhere.by(features, interval{p.cols.lo, p.cols.lo + valid})}
		}
		out = made(out, r, c.make(entropyStatsKey(c.float("softcap")), over, r, p.value, lists[1][i].value))
	}
	c.write("stats", out)
}

// joined returns the statistics of rows over the whole vocabulary, from planes of parts of it.
func (c *call) joined() (out []piece) {
	list := c.raw("stats")
	planes := c.in.Arg("stats").Shape[0]
	bytes := total((*piece).length, list) / planes
	var lists [][]piece
	for k := range planes {
		lists = append(lists, between(c, list, k*bytes, (k+1)*bytes))
	}
	lists = c.rows(lists...)
	for i := range lists[0] {
		p := lists[0][i]
		for _, l := range lists[1:] {
			p.content = c.united(&p, &l[i])
		}
		if len(p.parts) > 0 {
			c.refuse("stats are incomplete: %s", p.parts[0].describe(p.rectangle))
		}
		out = join(out, p)
	}
	return out
}

// united returns the statistics over two parts of the vocabulary.
func (c *call) united(p, q *piece) *content {
	if len(p.parts) != 1 || len(q.parts) != 1 || p.parts[0].term != q.parts[0].term || p.parts[0].kind != parallel {
		if len(q.parts) == 1 && len(q.parts[0].cover) == 0 {
			return p.content
		}
		c.refuse("takes statistics of different rows or parts: %s, %s", c.ref.describe(p), c.ref.describe(q))
	}
	over, disjoint := p.parts[0].cover.union(q.parts[0].cover)
	if !disjoint {
		c.refuse("takes a part of the vocabulary twice: %s, %s", c.ref.describe(p), c.ref.describe(q))
	}
	return sumOver(p.parts[0].term, over, 1, p.rectangle)
}

// labelWeight returns what multiplies the loss of a label: an attribute, and an operand that may be absent.
func (c *call) labelWeight(k key) (key, []value) {
	if scale := c.float("scale"); !almost(scale, c.ref.scale) {
		c.refuse("multiplies the loss of each token by %v, not %v", scale, c.ref.scale)
	}
	if c.has("weight") {
		return k, []value{c.only("weight").value}
	}
	return k, nil
}

func almost(x, y float64) bool { return x == y || x-y < 1e-9*y && y-x < 1e-9*y }

func entropy(c *call) {
	stats := c.joined()
	var labels []value
	lists := [][]piece{stats}
	if c.has("labels") {
		lists = c.alignBy(rowsOf, stats, c.operand("labels"))
		for i := range lists[0] {
			q := lists[1][i].rectangle
			if q.first--; q.with(full) != lists[0][i].with(full) {
				c.refuse("takes %s as labels of %s", c.ref.describe(&lists[1][i]), c.ref.describe(&lists[0][i]))
			}
		}
		labels = append(labels, lists[1][0].value)
	}
	var losses []piece
	for _, p := range lists[0] {
		r := p.with(full)
		losses = made(losses, r, c.make(newKey("losses"), nil, r, append([]value{p.value}, labels...)...))
	}
	k, weight := c.labelWeight(newKey("loss"))
	loss := c.overRows(k, lists[:1], func(p []piece) (rectangle, box) { return scalars(1), p[0].tokens() }, append(labels, weight...)...)
	c.write("loss", c.sum(c.raw("loss"), loss))
	c.write("losses", losses)
}

func entropyGrad(c *call) {
	lists := c.logits()
	all := c.alignBy(rowsOf, lists[0], lists[1], c.joined())
	k, weight := c.labelWeight(newKey("cross_entropy_grad").float(c.float("softcap")))
	var out []piece
	for i := range all[0] {
		p := &all[0][i]
		if all[2][i].with(full) != p.with(full) {
			c.refuse("takes statistics of other rows: %s", c.ref.describe(&all[2][i]))
		}
		out = made(out, p.rectangle, c.make(k, nil, p.rectangle, append([]value{p.value, all[2][i].value, all[1][i].value}, weight...)...))
	}
	c.write("dlogits", out)
}

func sumSq(c *call) {
	total := &content{}
	for _, p := range c.operand2("x") {
		if p.anywhere {
			continue // padding
		}
		t := c.term(newKey("sumsq"), p.value)
		sum, why := total.plus(sumOver(t, cover{nowhere.by(tokens, p.rows()).by(features, p.cols)}, c.float("weight"), scalars(1)), scalars(1))
		if why != "" {
			c.refuse("%s", why)
		}
		total = sum
	}
	c.write("y", made(nil, scalars(1), total))
}

// operand2 returns the pieces of an operand, which must be complete, except for padding, which is 0.
func (c *call) operand2(name string) []piece {
	list := c.raw(name)
	for i := range list {
		p := &list[i]
		switch {
		case len(p.parts) > 0:
			c.refuse("%s is incomplete: %s", name, p.parts[0].describe(p.rectangle))
		case p.anywhere && !p.content.value.isZero():
			c.refuse("%s is filled with a number other than 0, which padding has", name)
		}
	}
	return list
}

func gradNorm(c *call) {
	sum := c.total(c.raw("sums"))
	c.number("max_norm", c.ref.run.MaxNorm)
	operands := []value{sum.value}
	if c.has("limit") {
		operands = append(operands, c.only("limit").value)
	}
	switch {
	case len(sum.parts) > 0:
		c.refuse("the sum is incomplete: %s", sum.parts[0].describe(scalars(1)))
	case sum.value != c.ref.squares:
		c.refuse("the sum is not that of the squares of all gradients: a tensor is left out, or counted twice")
	}
	c.write("y", made(nil, scalars(2), c.make(newKey("grad_norm"), nil, scalars(2), operands...)))
}

// total returns the sum of all elements of a list. Ranks that have gathered the same numbers share it.
func (c *call) total(list []piece) *content {
	var of []*content
	for i := range list {
		of = append(of, slices.Repeat([]*content{list[i].content}, int(list[i].elements()))...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.totaled != nil && slices.Equal(of, c.totaled) {
		return c.totals
	}
	sum, why := &content{}, ""
	for _, x := range of {
		if sum, why = sum.plus(x, scalars(1)); why != "" {
			c.refuse("%s", why)
		}
	}
	c.totaled, c.totals = of, sum
	return sum
}

// number checks an attribute that the header has, too.
func (c *call) number(name string, want float64) {
	if x := c.float(name); x != want {
		c.refuse("%s is %v, and %v in the header", name, x, want)
	}
}

// updated returns the operands of an update, element by element. Padding stays what it is.
func (c *call) updated(names ...string) (lists [][]piece) {
	for _, name := range names {
		lists = append(lists, c.operand2(name))
	}
	return c.alignBy(elementsOf, lists...)
}

// sameElements checks that pieces are the same rectangle of their values. It returns false for padding.
func (c *call) sameElements(lists [][]piece, i int) bool {
	w := &lists[0][i]
	padding, uniform := c.ref.padding(w), w.anywhere
	for _, l := range lists[1:] {
		if padding && c.ref.padding(&l[i]) {
			uniform = uniform || l[i].anywhere
			continue
		}
		if l[i].rectangle != lists[0][i].rectangle || l[i].anywhere {
			c.refuse("updates different elements: %s and %s", c.ref.describe(&lists[0][i]), c.ref.describe(&l[i]))
		}
	}
	return !uniform
}

func adamW(c *call) {
	lists := c.updated("w", "m", "v", "grad")
	step, norm := c.only("step").value, c.only("norm").value
	c.number("beta1", c.ref.run.Beta1)
	c.number("beta2", c.ref.run.Beta2)
	c.number("eps", c.ref.run.Eps)
	var w, m, v []piece
	for i := range lists[0] {
		p := &lists[0][i]
		if !c.sameElements(lists, i) {
			w, m, v = join(w, *p), join(m, lists[1][i]), join(v, lists[2][i])
			continue
		}
		c.decay(p.value)
		operands := []value{p.value, lists[1][i].value, lists[2][i].value, lists[3][i].value, step, norm}
		w = made(w, p.rectangle, c.make(newKey("adamw").int(0), nil, p.rectangle, operands...))
		m = made(m, p.rectangle, c.make(newKey("adamw").int(1), nil, p.rectangle, operands...))
		v = made(v, p.rectangle, c.make(newKey("adamw").int(2), nil, p.rectangle, operands...))
	}
	c.write("w", w)
	c.write("m", m)
	c.write("v", v)
	c.write("copy", w)
}

// decay checks the weight decay of a weight.
func (c *call) decay(w value) {
	c.number("weight_decay", c.ref.decays[w])
}

// sgdKey is the key of an update. scaled says that the gradient has been multiplied by the factor of the norm already.
func sgdKey(result int64, scale float64, scaled int64) key {
	return newKey("sgd").int(result).float(scale).int(scaled)
}

func sgd(c *call) {
	lists := [][]piece{c.operand2("w"), c.operand2("grad")}
	if w, grad := c.in.Arg("w"), c.in.Arg("grad"); grad.Elements() != w.Elements() {
		row := int64(grad.Bytes()) / grad.Rows()
		lo := min(c.int("row")*row, int64(grad.Bytes()))
		hi := min(lo+w.Rows()*row, int64(grad.Bytes()))
		lists[1] = between(c, lists[1], lo, hi)
		if rest := w.Rows() - (hi-lo)/row; rest > 0 {
			lists[1] = append(lists[1], uniform(&content{}, rest*w.Cols(), int64(grad.DType.Bytes())))
		}
	}
	if c.has("m") {
		lists = append(lists, c.operand2("m"))
		c.number("momentum", c.ref.run.Momentum)
	}
	lists = c.alignBy(elementsOf, lists...)
	operands := []value{c.only("step").value}
	if c.has("norm") {
		operands = append(operands, c.only("norm").value)
	}
	var w, m []piece
	for i := range lists[0] {
		p := &lists[0][i]
		if !c.sameElements(lists, i) {
			w = join(w, *p)
			if c.has("m") {
				m = join(m, lists[2][i])
			}
			continue
		}
		c.decay(p.value)
		var of []value
		for _, l := range lists {
			of = append(of, l[i].value)
		}
		w = made(w, p.rectangle, c.make(sgdKey(0, c.float("scale"), c.int("scaled")), nil, p.rectangle, append(of, operands...)...))
		if c.has("m") {
			m = made(m, p.rectangle, c.make(sgdKey(1, c.float("scale"), c.int("scaled")), nil, p.rectangle, append(of, operands...)...))
		}
	}
	c.write("w", w)
	c.write("m", m)
	c.write("copy", w)
}

func nesterov(c *call) {
	lists, norm := c.updated("m", "grad"), c.only("norm").value
	c.number("momentum", c.ref.run.Momentum)
	var y, m []piece
	for i := range lists[0] {
		p := &lists[0][i]
		if !c.sameElements(lists, i) {
			y, m = join(y, *p), join(m, *p)
			continue
		}
		operands := []value{p.value, lists[1][i].value, norm}
		y = made(y, p.rectangle, c.make(newKey("nesterov").int(0), nil, p.rectangle, operands...))
		m = made(m, p.rectangle, c.make(newKey("nesterov").int(1), nil, p.rectangle, operands...))
	}
	c.write("y", y)
	c.write("m", m)
}

func normalize(c *call) {
	sum := c.only("sum").value
	c.number("eps", muonEps)
	var out []piece
	for _, p := range c.operand2("x") {
		if p.anywhere {
			out = join(out, p)
			continue
		}
		out = made(out, p.rectangle, c.make(newKey("normalize"), nil, p.rectangle, p.value, sum))
	}
	c.write("y", out)
}
