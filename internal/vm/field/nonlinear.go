package field

import "math"

// Norms: the statistics of a row are hashes of the whole row, and y is what it is with real statistics.

// rowHash returns the hash of a row of n elements of a norm's x, and of eps.
func (c *call) rowHash(function string, row vector) digest {
	return named(function).of(c.constant("eps")).of(row.list()...)
}

// gamma returns the weights of a norm plus the offset.
func (c *call) gamma() []element {
	list := c.operand("gamma").list()
	for i := range list {
		list[i] = list[i].plus(c.constant("offset"))
	}
	return list
}

func layerNorm(c *call) {
	x, y, stats, beta, gamma := c.operand("x"), c.operand("y"), c.operand("stats"), c.operand("beta"), c.gamma()
	rows, cols := c.shape("x")
	for r := range rows {
		hash := c.rowHash("layernorm", x.row(r, cols))
		mean, scale := hash.with(0).element(), hash.with(1).element()
		stats.set(2*r, mean)
		stats.set(2*r+1, scale)
		for i := range cols {
			y.set(r*cols+i, x.at(r*cols+i).minus(mean).times(scale).times(gamma[i]).plus(beta.at(i)))
		}
	}
}

func rmsNorm(c *call) {
	x, y, stats, gamma := c.operand("x"), c.operand("y"), c.operand("stats"), c.gamma()
	rows, cols := c.shape("x")
	for r := range rows {
		scale := c.rowHash("rmsnorm", x.row(r, cols)).element()
		stats.set(r, scale)
		for i := range cols {
			y.set(r*cols+i, x.at(r*cols+i).times(scale).times(gamma[i]))
		}
	}
}

func layerNormGrad(c *call) {
	c.normGrad(2, func(stats vector, r int) (mean, scale element) { return stats.at(2 * r), stats.at(2*r + 1) })
}

func rmsNormGrad(c *call) {
	c.normGrad(1, func(stats vector, r int) (mean, scale element) { return zero, stats.at(r) })
}

// normGrad adds to the direct gradient one through the statistics: x times the sum of all gradients of the row, weighted by x,
// times the hash of the statistics.
func (c *call) normGrad(numbers int, statsOf func(stats vector, r int) (mean, scale element)) {
	dx, dgamma, dy, x, stats, residual := c.operand("dx"), c.operand("dgamma"), c.operand("dy"), c.operand("x"), c.operand("stats"), c.operand("residual")
	dbeta, gamma := vector{step: 1}, c.gamma()
	if numbers == 2 {
		dbeta = c.operand("dbeta")
	}
	rows, cols := c.shape("x")
	if !c.bool("accumulate") {
		dgamma.clear()
		dbeta.clear()
	}
	for r := range rows {
		mean, scale := statsOf(stats, r)
		through := zero
		for i := range cols {
			g, normalized := dy.at(r*cols+i), x.at(r*cols+i).minus(mean).times(scale)
			through = through.plus(g.times(gamma[i]).times(x.at(r*cols + i)))
			if dgamma.len() > 0 {
				dgamma.put(i, g.times(normalized), true)
			}
			if dbeta.len() > 0 {
				dbeta.put(i, g, true)
			}
		}
		through = through.times(named("norm_grad").of(mean, scale).element())
		for i := range cols {
			at := r*cols + i
			out := dy.at(at).times(gamma[i]).times(scale).plus(x.at(at).times(through))
			if residual.len() > 0 {
				out = out.plus(residual.at(at))
			}
			dx.set(at, out)
		}
	}
}

// apply returns x times a hash in place of an activation, so that padding stays 0, and slope a hash in place of its derivative.
func (c *call) apply(x element) element {
	return x.times(named("activation").with(uint64(c.int("function"))).of(x).element())
}

func (c *call) slope(x element) element {
	return named("slope").with(uint64(c.int("function"))).of(x).element()
}

// upTo returns how many elements of an operand are in rows up to the last of ends, and eachUpTo sets as many.
func (c *call) upTo(operand string) int {
	ends, n := c.ints("ends"), c.operand(operand).len()
	if len(ends) == 0 {
		return n
	}
	_, cols := c.shape(operand)
	return min(n, int(ends[len(ends)-1])*cols)
}

func (c *call) eachUpTo(y string, f func(i int) element) {
	for i := range c.upTo(y) {
		c.operand(y).set(i, f(i))
	}
}

func activation(c *call) {
	x := c.operand("x")
	c.eachUpTo("y", func(i int) element { return c.apply(x.at(i)) })
}

func activationGrad(c *call) {
	dy, x := c.operand("dy"), c.operand("x")
	c.eachUpTo("dx", func(i int) element { return dy.at(i).times(c.slope(x.at(i))) })
}

func glu(c *call) {
	gate, up := c.operand("gate"), c.operand("up")
	c.eachUpTo("y", func(i int) element { return c.apply(gate.at(i)).times(up.at(i)) })
}

func gluGrad(c *call) {
	dgate, dup, dy, gate, up := c.operand("dgate"), c.operand("dup"), c.operand("dy"), c.operand("gate"), c.operand("up")
	for i := range c.upTo("dy") {
		g, x, u := dy.at(i), gate.at(i), up.at(i)
		dgate.set(i, g.times(u).times(c.slope(x)))
		dup.set(i, g.times(c.apply(x)))
	}
}

// capped returns a score or logit, hashed if it is capped, and its slope.
func (c *call) capped(x element) (y, slope element) {
	limit := c.float("softcap")
	if limit == 0 {
		return x, one
	}
	hash := named("softcap").of(constant(limit), x)
	return x.times(hash.with(0).element()), hash.with(1).element()
}

// crossEntropyStats stores no maximum: the second number is the sum of all exponentials.
func crossEntropyStats(c *call) {
	stats, logits, labels := c.operand("stats"), c.operand("logits"), c.ints("labels")
	rows, cols := c.shape("logits")
	for r := range rows {
		sum, own := uint64(0), zero
		for i := range c.int("valid") {
			logit, _ := c.capped(logits.at(r*cols + i))
			sum += uint64(exp(logit.exponent))
			if int(labels[r]) == c.int("first")+i {
				own = logit
			}
		}
		stats.set(3*r, zero)
		stats.set(3*r+1, element{value: uint32(sum % modulus)})
		stats.set(3*r+2, own)
	}
}

// joined adds the statistics of a row over the parts of the vocabulary.
func (c *call) joined(stats vector, row int) (sum, label element) {
	rows := int(c.in.Arg("stats").Shape[1])
	for at := 3 * row; at < stats.len(); at += 3 * rows {
		sum, label = sum.plus(stats.at(at+1)), label.plus(stats.at(at+2))
	}
	return sum, label
}

// labelScale returns the factor by which every label's loss is multiplied.
func (c *call) labelScale() element {
	scale := c.constant("scale")
	if c.has("weight") {
		scale = scale.times(c.operand("weight").at(0))
	}
	return scale
}

func crossEntropy(c *call) {
	loss, losses, stats, labels := c.operand("loss"), c.operand("losses"), c.operand("stats"), c.ints("labels")
	total := zero
	for r := range int(c.in.Arg("stats").Shape[1]) {
		own := missing
		if labels == nil || labels[r] >= 0 {
			sum, label := c.joined(stats, r)
			own = named("loss").of(sum, label).element()
			total = total.plus(own)
		}
		if losses.len() > 0 {
			losses.set(r, own)
		}
	}
	loss.put(0, total.times(c.labelScale()), true)
}

func crossEntropyGrad(c *call) {
	dlogits, logits, stats, labels := c.operand("dlogits"), c.operand("logits"), c.operand("stats"), c.ints("labels")
	rows, cols := c.shape("logits")
	scale := c.labelScale()
	for r := range rows {
		sum, _ := c.joined(stats, r)
		normalize := element{value: inverse(sum.value)}
		for i := range cols {
			grad := zero
			if i < c.int("valid") && labels[r] >= 0 {
				logit, slope := c.capped(logits.at(r*cols + i))
				if grad = (element{value: exp(logit.exponent)}).times(normalize); int(labels[r]) == c.int("first")+i {
					grad = grad.minus(one)
				}
				grad = grad.times(scale).times(slope).onlyValue()
			}
			dlogits.set(r*cols+i, grad)
		}
	}
}

// gradNorm's factor is never negative, so no step is skipped.
func gradNorm(c *call) {
	sums, y, sum, factor := c.operand("sums"), c.operand("y"), zero, one
	for i := range sums.len() {
		sum = sum.plus(sums.at(i))
	}
	if c.float("max_norm") > 0 {
		factor = named("clip").of(sum, c.constant("max_norm")).element()
	}
	y.set(0, named("norm").of(sum).element())
	y.set(1, factor)
}

// adamW multiplies the first moment by a hash of both in place of the root of the second. So padding stays 0.
func adamW(c *call) {
	w, m, v, grad, rounded := c.operand("w"), c.operand("m"), c.operand("v"), c.operand("grad"), c.operand("copy")
	step, factor := c.operand("step").list(), c.operand("norm").at(1)
	beta1, beta2, eps, decay := c.constant("beta1"), c.constant("beta2"), c.constant("eps"), c.constant("weight_decay")
	for i := range w.len() {
		g := grad.at(i).times(factor)
		m.set(i, m.at(i).times(beta1).plus(g.times(one.minus(beta1))))
		v.set(i, v.at(i).times(beta2).plus(g.times(g).times(one.minus(beta2))))
		quotient := m.at(i).times(named("adamw").of(m.at(i), v.at(i), step[1], step[2], eps).element())
		w.set(i, w.at(i).minus(step[0].times(quotient.plus(decay.times(w.at(i))))))
		if rounded.len() > 0 {
			rounded.set(i, w.at(i))
		}
	}
}

func sgd(c *call) {
	w, m, rounded := c.operand("w"), c.operand("m"), c.operand("copy")
	_, cols := c.shape("w")
	updated := int(c.in.UpdatedRows(int64(c.int("row")))) * cols
	grad := c.operand("grad")
	if updated > 0 {
		grad = grad.from(c.int("row") * cols)
	}
	momentum, decay, rate, factor := c.constant("momentum"), c.constant("weight_decay"), c.operand("step").at(0), one
	if c.has("norm") && c.int("scaled") == 0 {
		factor = c.operand("norm").at(1)
	}
	for i := range rounded.len() {
		rounded.set(i, zero)
	}
	for i := range updated {
		g := grad.at(i).times(factor)
		if m.len() > 0 {
			g = g.plus(m.at(i).times(momentum))
			m.set(i, g)
		}
		w.set(i, w.at(i).minus(rate.times(g.times(c.constant("scale")).plus(decay.times(w.at(i))))))
		if rounded.len() > 0 {
			rounded.set(i, w.at(i))
		}
	}
}

func nesterov(c *call) {
	y, m, grad, momentum, factor := c.operand("y"), c.operand("m"), c.operand("grad"), c.constant("momentum"), c.operand("norm").at(1)
	for i := range m.len() {
		g := grad.at(i).times(factor)
		m.set(i, m.at(i).times(momentum).plus(g))
		y.set(i, g.plus(m.at(i).times(momentum)))
	}
}

func normalize(c *call) {
	x := c.operand("x")
	factor := named("normalize").of(c.operand("sum").at(0), c.constant("eps")).element()
	c.each("y", func(i int) element { return x.at(i).times(factor) })
}

// float returns the upper 24 bits of an element's value as a number in [0, 1), or NaN for a missing one.
func (a element) float() float32 {
	if a == missing {
		return float32(math.NaN())
	}
	return float32(a.value>>8) * 0x1p-24
}
