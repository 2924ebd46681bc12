package field

// Scans are exact, one token after another: a decay is an exponent, and everything else is products and sums. Only the norms of q
// and k, and silu after a convolution, are hashes.

// scanCall is a scan or its gradient.
type scanCall struct {
	*call
	q, k, v, decay, beta                     vector
	batch, heads, shared, dim, width, tokens int
	channels                                 int
	positions                                []int32
}

func scanOf(c *call) *scanCall {
	s := &scanCall{
		call: c, q: c.operand("q"), k: c.operand("k"), v: c.operand("v"), decay: c.operand("decay"), beta: c.operand("beta"), positions: c.ints("positions"),
		batch: c.int("batch"), heads: c.int("heads") * c.int("shared"), shared: c.int("shared"), dim: c.int("key_dim"), width: c.int("value_dim"), channels: c.int("channels"),
	}
	s.tokens = s.beta.len() / s.batch / s.heads
	return s
}

// span returns a copy of n elements.
func (v vector) span(at, n int) []element {
	return vector{v.elements[at*v.step : (at+n)*v.step], v.step}.list()
}

// scanToken is a token of a head of v: where its elements begin in the operands, and what it does to the state.
type scanToken struct {
	value, key, decay, beta int // indices
	q, k, kept, e, error    []element
	decayed, after          []element
	hashQ, hashK            digest
	byQ, byK                element
}

// normal returns a head of q or k once it is normalised, with the factor and the digest of its norm.
func (s *scanCall) normal(x vector, at int, factor element) (y []element, by element, d digest) {
	y, by = x.span(at, s.dim), factor
	if s.float("norm") != 0 {
		d = named("scan").of(s.constant("norm")).of(y...)
		by = by.times(d.element())
	}
	for i := range y {
		y[i] = y[i].times(by)
	}
	return y, by, d
}

// token computes what a token does to a state, whose rows are dim.
func (s *scanCall) token(t, seq, head int, state []element) *scanToken {
	row := t*s.batch + seq
	x := &scanToken{value: (row*s.heads + head) * s.width, key: (row*s.heads + head) / s.shared * s.dim, decay: (row*s.heads + head) * s.channels, beta: row*s.heads + head}
	x.q, x.byQ, x.hashQ = s.normal(s.q, x.key, s.factor("scale"))
	x.k, x.byK, x.hashK = s.normal(s.k, x.key, one)
	x.kept, x.decayed, x.after = make([]element, s.dim), make([]element, len(state)), make([]element, len(state))
	for c := range x.kept {
		if s.positions == nil || s.positions[row] != 0 {
			x.kept[c] = element{value: exp(s.decay.at(x.decay + c%s.channels).exponent)}
		}
		for j := range s.width {
			x.decayed[c*s.width+j] = x.kept[c].times(state[c*s.width+j])
		}
	}
	for j := range s.width {
		rest := s.v.at(x.value + j)
		for c := range s.dim {
			if s.bool("delta") {
				rest = rest.minus(x.decayed[c*s.width+j].times(x.k[c]))
			}
		}
		e := rest.times(s.beta.at(x.beta)).onlyValue()
		x.error, x.e = append(x.error, rest), append(x.e, e)
		for c := range s.dim {
			x.after[c*s.width+j] = x.decayed[c*s.width+j].plus(x.k[c].times(e)).onlyValue()
		}
	}
	return x
}

// run goes through the tokens of every head of v.
func (s *scanCall) run(visit func(at int, tokens []*scanToken, state []element)) {
	before, size := s.operand("state"), s.dim*s.width
	for i := range s.batch * s.heads {
		state := make([]element, size)
		if before.len() > 0 {
			state = before.row(i, size).list()
		}
		var tokens []*scanToken
		for t := range s.tokens {
			x := s.token(t, i/s.heads, i%s.heads, state)
			tokens, state = append(tokens, x), x.after
		}
		visit(i*size, tokens, state)
	}
}

func scan(c *call) {
	s, o, next := scanOf(c), c.operand("o"), c.operand("next")
	s.run(func(at int, tokens []*scanToken, state []element) {
		for _, x := range tokens {
			for j := range s.width {
				sum := zero
				for i := range s.dim {
					sum = sum.plus(x.q[i].times(x.after[i*s.width+j]))
				}
				o.set(x.value+j, sum.onlyValue())
			}
		}
		for i, e := range state {
			next.set(at+i, e)
		}
	})
}

func scanGrad(c *call) {
	s, dout, dnext, dstate := scanOf(c), c.operand("do"), c.operand("dnext"), c.operand("dstate")
	c.operand("dq").clear()
	c.operand("dk").clear()
	s.run(func(at int, tokens []*scanToken, state []element) {
		ds := make([]element, len(state))
		if dnext.len() > 0 {
			ds = dnext.span(at, len(state))
		}
		for t := len(tokens) - 1; t >= 0; t-- {
			s.back(tokens[t], dout.span(tokens[t].value, s.width), ds)
		}
		for i, e := range ds {
			dstate.set(at+i, e.onlyValue())
		}
	})
}

// back computes the gradients of a token, and turns the gradient of the state after it into that of the state before it.
func (s *scanCall) back(x *scanToken, dout, ds []element) {
	dq, dk, de := make([]element, s.dim), make([]element, s.dim), make([]element, s.width)
	s.eachOf(func(i, c, j int) {
		ds[i] = ds[i].plus(x.q[c].times(dout[j]))
		dq[c] = dq[c].plus(x.after[i].times(dout[j]))
		de[j] = de[j].plus(ds[i].times(x.k[c]))
		dk[c] = dk[c].plus(ds[i].times(x.e[j]))
	})
	beta, dbeta := s.beta.at(x.beta), zero
	for j := range de {
		dbeta = dbeta.plus(de[j].times(x.error[j]))
		de[j] = de[j].times(beta)
		s.operand("dv").set(x.value+j, de[j].onlyValue())
	}
	s.operand("dbeta").set(x.beta, dbeta.onlyValue())
	ddecay := make([]element, s.channels)
	s.eachOf(func(i, c, j int) {
		if s.bool("delta") {
			dk[c] = dk[c].minus(x.decayed[i].times(de[j]))
			ds[i] = ds[i].minus(x.k[c].times(de[j]))
		}
		ddecay[c%s.channels] = ddecay[c%s.channels].plus(ds[i].times(x.decayed[i]))
		ds[i] = ds[i].times(x.kept[c])
	})
	for c, e := range ddecay {
		s.operand("ddecay").set(x.decay+c, e.onlyValue())
	}
	s.normalGrad("dq", s.q, x.key, dq, x.byQ, x.hashQ)
	s.normalGrad("dk", s.k, x.key, dk, x.byK, x.hashK)
}

// eachOf visits the elements of a state.
func (s *scanCall) eachOf(visit func(i, c, j int)) {
	for i := range s.dim * s.width {
		visit(i, i/s.width, i%s.width)
	}
}

// normalGrad adds the gradient of a head of q or k, given that of what it becomes: linear in it, as in normGrad.
func (s *scanCall) normalGrad(to string, x vector, at int, dy []element, by element, d digest) {
	through := zero
	if s.float("norm") != 0 {
		through = dot(dy, x.span(at, s.dim)).times(d.with(1).element())
	}
	for i, e := range dy {
		s.operand(to).put(at+i, e.times(by).plus(through.times(x.at(at+i))).onlyValue(), true)
	}
}

// convCall is a convolution or its gradient.
type convCall struct {
	*call
	x, w, bias, tail          vector
	width, batch, cols, count int // count is the number of elements of x
	positions                 []int32
}

func convOf(c *call) *convCall {
	_, cols := c.shape("x")
	x := c.operand("x")
	return &convCall{call: c, x: x, w: c.operand("w"), bias: c.operand("bias"), tail: c.operand("tail"), positions: c.ints("positions"),
		width: c.int("width"), batch: c.int("batch"), cols: cols, count: x.len()}
}

// at returns an element of x or, with a negative index, of tail.
func (c *convCall) at(i int) element {
	switch n := c.width * c.batch * c.cols; {
	case i >= 0:
		return c.x.at(i)
	case c.tail.len() > 0:
		return c.tail.at(n + i)
	}
	return zero
}

// terms visits the elements on which element i of y depends, with the indices of their weights.
func (c *convCall) terms(i int, visit func(from, weight int)) {
	for j := range c.width {
		if c.positions == nil || int(c.positions[i/c.cols]) >= j {
			visit(i-j*c.batch*c.cols, (i%c.cols+1)*c.width-1-j)
		}
	}
}

// sum returns what silu is applied to.
func (c *convCall) sum(i int) element {
	sum := zero
	if c.bias.len() > 0 {
		sum = c.bias.at(i % c.cols)
	}
	c.terms(i, func(from, weight int) { sum = sum.plus(c.w.at(weight).times(c.at(from))) })
	return sum
}

// silu and its slope are hashes, as in activation; padding stays 0.
func silu(x element) element      { return x.times(named("conv").of(x).element()) }
func siluSlope(x element) element { return named("conv_grad").of(x).element() }

func conv(call *call) {
	c, next := convOf(call), call.operand("next")
	call.each("y", func(i int) element { return silu(c.sum(i)) })
	for i := range next.len() {
		next.set(i, c.at(c.count-next.len()+i))
	}
}

func convGrad(call *call) {
	c, dw, dbias, dy, dnext := convOf(call), call.operand("dw"), call.operand("dbias"), call.operand("dy"), call.operand("dnext")
	if !call.bool("accumulate") {
		dw.clear()
		dbias.clear()
	}
	n := c.width * c.batch * c.cols
	all := make([]element, n+c.count) // the gradients of tail and x
	for i := range dnext.len() {
		all[c.count+i] = dnext.at(i)
	}
	for i := range c.count {
		g := dy.at(i).times(siluSlope(c.sum(i)))
		if dbias.len() > 0 {
			dbias.put(i%c.cols, g, true)
		}
		c.terms(i, func(from, weight int) {
			all[n+from] = all[n+from].plus(g.times(c.w.at(weight)))
			if dw.len() > 0 {
				dw.put(weight, g.times(c.at(from)), true)
			}
		})
	}
	call.each("dtail", func(i int) element { return all[i] })
	call.each("dx", func(i int) element { return all[n+i] })
}

// decays visits the elements of a decay, with the column, the head and a digest of all operands. Decays and steps are hashes, and
// their gradients are linear, with hashed coefficients.
func (c *call) decays(visit func(at, col, head int, d digest)) {
	x, rate, bias := c.operand("x"), c.operand("rate"), c.operand("bias")
	for i := range x.len() {
		col := i % bias.len()
		head := col / c.int("head_dim")
		visit(i, col, head, named("decay").of(c.constant("least"), x.at(i), rate.at(head), bias.at(col)))
	}
}

func decay(c *call) {
	y, step := c.operand("y"), c.operand("step")
	c.decays(func(at, _, _ int, d digest) {
		y.set(at, d.with(0).element())
		if step.len() > 0 {
			step.set(at, d.with(1).element())
		}
	})
}

func decayGrad(c *call) {
	dx, drate, dbias, dy, dstep := c.operand("dx"), c.operand("drate"), c.operand("dbias"), c.operand("dy"), c.operand("dstep")
	if !c.bool("accumulate") {
		drate.clear()
		dbias.clear()
	}
	c.decays(func(at, col, head int, d digest) {
		g := dy.at(at).times(d.with(2).element())
		if dstep.len() > 0 {
			g = g.plus(dstep.at(at).times(d.with(3).element()))
		}
		dx.set(at, g)
		if drate.len() > 0 {
			drate.put(head, dy.at(at).times(d.with(0).element()), true)
		}
		if dbias.len() > 0 {
			dbias.put(col, g, true)
		}
	})
}

// scaled returns the product of an element of an operand and the factor of its head.
func (c *call) scaled(name string) func(i int) element {
	x, factor, dim := c.operand(name), c.operand("factor"), c.int("head_dim")
	return func(i int) element { return x.at(i).times(factor.at(i / dim % factor.len())) }
}

func scaleColumns(c *call) { c.each("y", c.scaled("x")) }

func scaleColumnsGrad(c *call) {
	dfactor, dy, x, dim := c.operand("dfactor"), c.operand("dy"), c.operand("x"), c.int("head_dim")
	if !c.bool("accumulate") {
		dfactor.clear()
	}
	c.each("dx", c.scaled("dy"))
	for i := range x.len() {
		if dfactor.len() > 0 {
			dfactor.put(i/dim%dfactor.len(), dy.at(i).times(x.at(i)), true)
		}
	}
}
