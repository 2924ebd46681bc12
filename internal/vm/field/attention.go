package field

import "math"

// Attention keeps, where other devices keep the logarithm of the sum of exponentials, that sum. A query without keys has sum 0
// and output 0.

// attentionCall is an attention instruction or its gradient.
type attentionCall struct {
	*call
	q, k, v                   []element
	batch, heads, shared, dim int // shared is the number of query heads for each head of keys
	wide                      int // width of a head of values
	scale                     element
	positions                 []int32
}

func attentionOf(c *call) *attentionCall {
	a := &attentionCall{
		call: c, q: c.operand("q").list(), k: c.operand("k").list(), v: c.operand("v").list(),
		batch: c.int("batch"), heads: c.int("heads"), shared: c.int("heads") / c.int("kv_heads"), dim: c.int("head_dim"), positions: c.ints("positions"),
	}
	a.wide = int(c.in.Work().ValueDim)
	a.scale = constant(1 / math.Sqrt(float64(a.dim)))
	return a
}

// query is a query of a head: its row among all queries, its index among the values of all heads, and the keys that it sees.
type query struct {
	row, at         int
	batch, head     int
	firstKey, after int
}

// each visits the queries of every head, part by part. first is the start of a part.
func (a *attentionCall) each(visit func(x query)) {
	for _, p := range a.in.AttentionParts(a.consts) {
		for i := range int(p.Queries) * a.batch {
			t, row := i/a.batch, int(p.Query)*a.batch+i
			before := int(p.Window) - 1
			if a.positions != nil {
				before = min(before, int(a.positions[int(p.Place)+i]))
			}
			at := int(p.Prefix) + t
			for h := range a.heads {
				visit(query{row: row, at: row*a.heads + h, batch: i % a.batch, head: h, firstKey: max(0, at-before), after: min(int(p.Keys), at+1)})
			}
		}
	}
}

// key returns the index of a key among those of all heads.
func (a *attentionCall) key(x query, t int) int {
	return (t*a.batch+x.batch)*(a.heads/a.shared) + x.head/a.shared
}

// weight returns the exponential of a score, and the slope of its cap.
func (a *attentionCall) weight(x query, key int) (weight, slope element) {
	score := dot(a.q[x.at*a.dim:][:a.dim], a.k[key*a.dim:][:a.dim]).times(a.scale)
	score, slope = a.capped(score)
	return element{value: exp(score.exponent)}, slope
}

func attention(c *call) {
	a, o, sums := attentionOf(c), c.operand("o"), c.operand("lse")
	weighted := make([]element, a.wide)
	a.each(func(x query) {
		sum := zero
		clear(weighted)
		if c.bool("accumulate") {
			sum = sums.at(x.at)
			for i := range weighted {
				weighted[i] = o.at(x.at*a.wide + i).times(sum).onlyValue()
			}
		}
		for t := x.firstKey; t < x.after; t++ {
			key := a.key(x, t)
			weight, _ := a.weight(x, key)
			sum = sum.plus(weight)
			for i := range weighted {
				weighted[i] = weighted[i].plus(weight.times(a.v[key*a.wide+i]))
			}
		}
		sums.set(x.at, sum)
		share(o.from(x.at*a.wide), weighted, sum)
	})
}

// share divides the weighted sum of values by the sum of weights.
func share(o vector, weighted []element, sum element) {
	normalize := element{value: inverse(sum.value)}
	for i, x := range weighted {
		o.set(i, x.times(normalize))
	}
}

func attentionMerge(c *call) {
	o, sums, parts, partSums := c.operand("o"), c.operand("lse"), c.operand("parts"), c.operand("lses")
	heads, dim := c.int("heads"), c.int("head_dim")
	rows, _ := c.shape("o")
	weighted := make([]element, dim)
	for at := range rows * heads {
		sum := zero
		clear(weighted)
		for p := at; p < partSums.len(); p += rows * heads {
			sum = sum.plus(partSums.at(p))
			for i := range weighted {
				weighted[i] = weighted[i].plus(parts.at(p*dim + i).times(partSums.at(p)))
			}
		}
		sums.set(at, sum)
		share(o.from(at*dim), weighted, sum)
	}
}

// attentionSink adds the exponential of a head's sink to the sum of the exponentials of its scores.
func attentionSink(c *call) {
	o, sums, sink, dim := c.operand("o"), c.operand("lse"), c.operand("sink"), c.int("head_dim")
	weighted := make([]element, dim)
	for at := range sums.len() {
		old := sums.at(at)
		for i := range weighted {
			weighted[i] = o.at(at*dim + i).times(old).onlyValue()
		}
		sum := old.plus(element{value: exp(sink.at(at % sink.len()).exponent)})
		sums.set(at, sum)
		share(o.from(at*dim), weighted, sum)
	}
}

func attentionSinkGrad(c *call) {
	do, o, sums, sink, dim := c.operand("do").list(), c.operand("o").list(), c.operand("lse"), c.operand("sink"), c.int("head_dim")
	dsink := c.operand("dsink")
	if !c.bool("accumulate") {
		dsink.clear()
	}
	for at := range sums.len() {
		h := at % sink.len()
		share := element{value: exp(sink.at(h).exponent)}.times(element{value: inverse(sums.at(at).value)})
		dsink.put(h, zero.minus(share.times(dot(do[at*dim:][:dim], o[at*dim:][:dim]))).onlyValue(), true)
	}
}

func attentionDelta(c *call) {
	do, o, dim := c.operand("do").list(), c.operand("o").list(), c.int("head_dim")
	c.operand("delta").setAll(func(i int) element { return dot(do[i*dim:][:dim], o[i*dim:][:dim]).onlyValue() })
}

func attentionGrad(c *call) {
	a, dq, dk, dv := attentionOf(c), c.operand("dq"), c.operand("dk"), c.operand("dv")
	do, o, sums, deltas := c.operand("do").list(), c.operand("o").list(), c.operand("lse"), c.operand("delta")
	if !c.bool("accumulate") {
		dk.clear()
		dv.clear()
	}
	own := make([]element, a.dim)
	a.each(func(x query) {
		out := do[x.at*a.wide:][:a.wide]
		var delta element
		if deltas.len() > 0 {
			delta = deltas.at(x.at)
		} else {
			delta = dot(out, o[x.at*a.wide:][:a.wide]).onlyValue()
		}
		normalize := element{value: inverse(sums.at(x.at).value)}
		clear(own)
		for t := x.firstKey; t < x.after; t++ {
			key := a.key(x, t)
			weight, slope := a.weight(x, key)
			share := weight.times(normalize)
			grad := share.times(dot(out, a.v[key*a.wide:][:a.wide]).minus(delta)).times(slope).times(a.scale)
			for i := range a.dim {
				at := key*a.dim + i
				own[i] = own[i].plus(grad.times(a.k[at]).onlyValue())
				dk.put(at, grad.times(a.q[x.at*a.dim+i]).onlyValue(), true)
			}
			for i := range out {
				dv.put(key*a.wide+i, share.times(out[i]).onlyValue(), true)
			}
		}
		for i, e := range own {
			dq.put(x.at*a.dim+i, e, c.bool("accumulate_q"))
		}
	})
}

// concatenated visits the elements of the heads of y, with the index of each in shared or, if it is negative, in x.
func (c *call) concatenated(shared string, visit func(y, shared, x int)) {
	heads, dim := c.int("heads"), c.int("head_dim")
	rows, first := c.shape(shared)
	for at := range rows * heads {
		for i := range dim {
			if i < first {
				visit(at*dim+i, at/heads*first+i, -1)
			} else {
				visit(at*dim+i, -1, at*(dim-first)+i-first)
			}
		}
	}
}

func concatHeads(c *call) {
	y, shared, x := c.operand("y"), c.operand("shared"), c.operand("x")
	c.concatenated("shared", func(at, s, i int) {
		if s >= 0 {
			y.set(at, shared.at(s))
		} else {
			y.set(at, x.at(i))
		}
	})
}

func concatHeadsGrad(c *call) {
	dshared, dx, dy := c.operand("dshared"), c.operand("dx"), c.operand("dy")
	dshared.clear()
	c.concatenated("dshared", func(at, s, i int) {
		if s >= 0 {
			dshared.put(s, dy.at(at), true)
		} else {
			dx.set(i, dy.at(at))
		}
	})
}
