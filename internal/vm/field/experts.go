package field

import (
	"cmp"
	"math"
	"slices"

	"sppo.dev/ir"
)

// Experts are chosen by comparing residues, so the choice has nothing to do with that of floating-point code; but it is the same
// however the work is divided. Scores are hashes of all logits of a row.

func routeTokens(c *call) {
	weights, experts, places, logits, correction := c.operand("weights"), c.operand("experts"), c.operand("places"), c.operand("logits"), c.operand("correction")
	rows, count := c.shape("logits")
	top := c.int("top")
	taken := make([][]int, count)
	for r := range rows {
		list := logits.row(r, count).list()
		keys := make([]uint64, count)
		for e := range keys {
			keys[e] = uint64(c.routed(list, nil, e).value)
			if correction.len() > 0 {
				keys[e] = uint64(c.routed(list, nil, e).plus(correction.at(e)).value)
			}
		}
		chosen := c.chosen(keys)
		for k, e := range chosen {
			experts.set(r*top+k, element{value: uint32(e)})
			weights.set(r*top+k, c.routed(list, chosen, k))
			taken[e] = append(taken[e], r*top+k)
		}
	}
	for i := range rows * top {
		places.set(i, element{value: noPlace})
	}
	next, ends, first := 0, c.operand("ends"), c.int("first")
	for e := range ends.len() {
		for _, i := range taken[first+e] {
			places.set(i, element{value: uint32(next)})
			next++
		}
		ends.set(e, element{value: uint32(next)})
	}
}

// routed returns the score of an expert or, given the chosen experts, the weight of one of them.
func (c *call) routed(logits []element, chosen []int, i int) element {
	d := c.routing().of(logits...).with(uint64(i))
	for _, e := range chosen {
		d = d.with(uint64(e))
	}
	return d.element()
}

// routing returns the digest of the attributes of route and of its gradient.
func (c *call) routing() digest {
	d := named("route")
	for _, name := range []string{"scores", "renormalize"} {
		d = d.with(uint64(c.int(name)))
	}
	return d.of(c.constant("eps"), c.factor("scale"))
}

// chosen returns the experts with the largest keys, in descending order, of the chosen groups.
func (c *call) chosen(keys []uint64) []int {
	if groups := c.int("groups"); groups > 1 {
		size, sums := len(keys)/groups, make([]uint64, groups)
		for g := range sums {
			own := slices.Clone(keys[g*size : (g+1)*size])
			slices.Sort(own)
			if sums[g] = own[size-1]; c.int("group_scores") == ir.GroupsByTwo {
				sums[g] += own[size-2]
			}
		}
		kept := descending(sums)[:c.int("top_groups")]
		allowed := descending(keys)
		return slices.DeleteFunc(allowed, func(e int) bool { return !slices.Contains(kept, e/size) })[:c.int("top")]
	}
	return descending(keys)[:c.int("top")]
}

// descending returns the indices of the keys, those of larger keys first.
func descending(keys []uint64) []int {
	order := make([]int, len(keys))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(keys[b], keys[a]) })
	return order
}

// routeGrad is linear in the gradients of the weights; the coefficients are hashes.
func routeGrad(c *call) {
	dy, logits, experts := c.operand("dy"), c.operand("logits"), c.ints("experts")
	rows, count := c.shape("logits")
	top := c.int("top")
	for r := range rows {
		d := c.routing().of(logits.row(r, count).list()...)
		for _, e := range experts[r*top:][:top] {
			d = d.with(uint64(e))
		}
		for e := range count {
			sum := zero
			for k := range top {
				sum = sum.plus(d.with(uint64(e)).with(uint64(k)).element().times(dy.at(r*top + k)))
			}
			c.operand("dlogits").set(r*count+e, sum.onlyValue())
		}
	}
}

// expertCounts counts experts by hashes of all logits of a row, so which ones they are has nothing to do with route either.
func expertCounts(c *call) {
	counts, logits := c.operand("counts"), c.operand("logits")
	rows, experts := c.shape("logits")
	batch := c.int("batch")
	if !c.bool("accumulate") {
		counts.clear()
	}
	for r := range rows {
		keys := make([]uint64, experts)
		for e := range keys {
			keys[e] = uint64(named("expert_counts").of(logits.row(r, experts).list()...).with(uint64(e)).element().value)
		}
		for _, e := range descending(keys)[:c.int("top")] {
			counts.put(r%batch*experts+e, element{value: 1}, true)
		}
	}
}

// routerLossGrad is a hash of the logits, and linear in the counts with coefficients that are hashes.
func routerLossGrad(c *call) {
	dlogits, logits, counts := c.operand("dlogits"), c.operand("logits"), c.operand("counts")
	rows, experts := c.shape("logits")
	batch := c.int("batch")
	for r := range rows {
		d := named("router_loss_grad").with(uint64(c.int("scores"))).of(logits.row(r, experts).list()...)
		for e := range experts {
			sum := d.with(uint64(e)).element().times(c.constant("z"))
			for i := range min(experts, counts.len()) {
				weight := d.with(uint64(e)).with(uint64(i)).element().times(c.constant("balance"))
				sum = sum.plus(weight.times(counts.at(r%batch*experts + i)))
			}
			dlogits.set(r*experts+e, sum.onlyValue())
		}
	}
}

func expertLoad(c *call) {
	load := c.operand("load")
	if !c.bool("accumulate") {
		load.clear()
	}
	for _, e := range c.ints("experts") {
		load.put(int(e), element{value: 1}, true)
	}
}

// expertBias adds hashes of an expert's load and of the sum of all to biases.
func expertBias(c *call) {
	w, load, total := c.operand("w"), c.operand("load"), zero
	for e := range load.len() {
		total = total.plus(load.at(e))
	}
	for e := range load.len() {
		step := named("expert_bias").of(load.at(e), total, c.operand("norm").at(1)).element().times(c.constant("rate"))
		w.set(e, w.at(e).plus(step))
	}
}

// noPlace is the place of a row whose expert is not one of the rank's: -1.
const noPlace = math.MaxUint32

// placed visits the places of each token's rows, with the index of the choice.
func (c *call) placed(visit func(row, at, i int)) {
	top := c.int("top")
	for i, at := range c.ints("places") {
		if at != -1 {
			visit(i/top, int(at), i)
		}
	}
}

func permute(c *call) {
	y, x := c.operand("y"), c.operand("x")
	_, cols := c.shape("x")
	c.placed(func(row, at, _ int) {
		for i := range cols {
			y.set(at*cols+i, x.at(row*cols+i))
		}
	})
}

func permuteGrad(c *call) {
	dx, dy := c.operand("dx"), c.operand("dy")
	_, cols := c.shape("dx")
	dx.clear()
	c.placed(func(row, at, _ int) {
		for i := range cols {
			dx.put(row*cols+i, dy.at(at*cols+i), true)
		}
	})
}

func unpermute(c *call) {
	y, x, weights := c.operand("y"), c.operand("x"), c.operand("weights")
	_, cols := c.shape("y")
	y.clear()
	c.placed(func(row, at, k int) {
		for i := range cols {
			y.put(row*cols+i, x.at(at*cols+i).times(weights.at(k)), true)
		}
	})
}

func unpermuteGrad(c *call) {
	dx, dweights, dy, x, weights := c.operand("dx"), c.operand("dweights"), c.operand("dy"), c.operand("x"), c.operand("weights")
	_, cols := c.shape("dy")
	dweights.clear()
	c.placed(func(row, at, k int) {
		dweights.set(k, dot(dy.row(row, cols).list(), x.row(at, cols).list()).onlyValue())
		for i := range cols {
			dx.set(at*cols+i, dy.at(row*cols+i).times(weights.at(k)).onlyValue())
		}
	})
}

// grouped visits the rows of each expert, with the index of the first element of its matrix of some size.
func (c *call) grouped(size int, visit func(expert, row, matrix int)) {
	row := 0
	for e, end := range c.ints("ends") {
		for ; row < int(end); row++ {
			visit(e, row, e*size)
		}
	}
}

// strides returns the distances between rows and between columns of a matrix.
func (c *call) strides(inner, outer int) (row, col int) {
	if c.bool("trans_b") {
		return 1, inner
	}
	return outer, 1
}

func matmulGrouped(c *call) {
	y, a, b, bias := c.operand("c"), c.operand("a"), c.operand("b"), c.operand("bias")
	_, inner := c.shape("a")
	_, outer := c.shape("c")
	down, right := c.strides(inner, outer)
	c.grouped(inner*outer, func(e, row, matrix int) {
		for o := range outer {
			sum := zero
			if bias.len() > 0 {
				sum = bias.at(e*outer + o)
			}
			for k := range inner {
				sum = sum.plus(a.at(row*inner + k).times(b.at(matrix + k*down + o*right)))
			}
			y.put(row*outer+o, sum, c.bool("accumulate"))
		}
	})
}

func matmulGroupedWeightGrad(c *call) {
	db, dbias, dy, a := c.operand("db"), c.operand("dbias"), c.operand("dy"), c.operand("a")
	_, inner := c.shape("a")
	_, outer := c.shape("dy")
	down, right := c.strides(inner, outer)
	if !c.bool("accumulate") {
		db.clear()
	}
	if !c.bool("accumulate_bias") {
		dbias.clear()
	}
	c.grouped(inner*outer, func(e, row, matrix int) {
		for o := range outer {
			if dbias.len() > 0 {
				dbias.put(e*outer+o, dy.at(row*outer+o).onlyValue(), true)
			}
			for k := range min(inner, db.len()) {
				db.put(matrix+k*down+o*right, a.at(row*inner+k).times(dy.at(row*outer+o)).onlyValue(), true)
			}
		}
	})
}
