package field

import (
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

func initNormal(c *call) {
	w, tensor := c.operand("w"), &c.program.Tensors[c.int("tensor")]
	rows, cols := c.shape("w")
	random := digest(vm.InitialValues(c.program.Run.Seed, tensor.Name).Key())
	std, end := c.constant("std"), tensor.EndOf(int64(c.int("end")))
	for i := range rows * cols {
		row, col := int64(c.int("row")+i/cols), int64(c.int("col")+i%cols)
		if row < end && col < tensor.Shape[1] {
			w.set(i, random.with(uint64(row*tensor.Shape[1]+col)).element().times(std))
		} else {
			w.set(i, zero)
		}
	}
}

func fill(c *call) {
	value := c.constant("value")
	if c.in.Arg("y").DType == ir.I32 {
		value = element{value: uint32(int32(c.float("value")))}
	}
	c.each("y", func(int) element { return value })
}

func cast(c *call) { c.each("y", c.operand("x").at) }

func add(c *call) {
	a, b, bias := c.operand("a"), c.operand("b"), c.operand("bias")
	_, cols := c.shape("y")
	c.each("y", func(i int) element {
		sum := a.at(i).plus(b.at(i))
		if bias.len() > 0 {
			sum = sum.plus(bias.at(i % cols))
		}
		return sum
	})
}

func axpby(c *call) {
	a, b, alpha, beta := c.operand("a"), c.operand("b"), c.constant("alpha"), c.constant("beta")
	c.each("y", func(i int) element {
		sum := a.at(i).times(alpha)
		if b.len() > 0 {
			sum = sum.plus(b.at(i).times(beta))
		}
		return sum
	})
}

func sumSq(c *call) {
	x, sum := c.operand("x"), zero
	for i := range x.len() {
		sum = sum.plus(x.at(i).times(x.at(i)))
	}
	c.operand("y").set(0, sum.times(c.constant("weight")))
}

func embed(c *call) {
	y, table, scale := c.operand("y"), c.operand("table"), c.factor("scale")
	rows, cols := c.shape("table")
	for r, token := range c.ints("tokens") {
		at := int(token) - c.int("first")
		for i := range cols {
			if at >= 0 && at < rows {
				y.set(r*cols+i, table.at(at*cols+i).times(scale))
			} else {
				y.set(r*cols+i, zero)
			}
		}
	}
}

func embedGrad(c *call) {
	dtable, dy, scale := c.operand("dtable"), c.operand("dy"), c.factor("scale")
	rows, cols := c.shape("dtable")
	if !c.bool("accumulate") {
		dtable.clear()
	}
	for r, token := range c.ints("tokens") {
		if at := int(token) - c.int("first"); at >= 0 && at < rows {
			for i := range cols {
				dtable.put(at*cols+i, dy.at(r*cols+i).times(scale), true)
			}
		}
	}
}

func positionEmbed(c *call) {
	x, table, batch := c.operand("x"), c.operand("table"), c.int("batch")
	_, cols := c.shape("table")
	c.each("y", func(i int) element { return x.at(i).plus(table.at(i/cols/batch*cols + i%cols)) })
}

func positionEmbedGrad(c *call) {
	dtable, dy, batch := c.operand("dtable"), c.operand("dy"), c.int("batch")
	_, cols := c.shape("dtable")
	if !c.bool("accumulate") {
		dtable.clear()
	}
	for i := range dy.len() {
		dtable.put(i/cols/batch*cols+i%cols, dy.at(i), true)
	}
}

func biasGrad(c *call) {
	db, dy := c.operand("db"), c.operand("dy")
	_, cols := c.shape("dy")
	if !c.bool("accumulate") {
		db.clear()
	}
	for i := range dy.len() {
		db.put(i%cols, dy.at(i), true)
	}
}

func matmul(c *call) {
	y, bias := c.operand("c"), c.operand("bias")
	m, n := c.shape("c")
	a, k := c.lines("a", c.bool("trans_a"))
	b, _ := c.lines("b", !c.bool("trans_b"))
	for i := range m {
		for j := range n {
			sum := dot(a[i*k:][:k], b[j*k:][:k])
			if bias.len() > 0 {
				sum = sum.plus(bias.at(j))
			}
			y.put(i*n+j, sum, c.bool("accumulate"))
		}
	}
}

// lines returns the rows of a matrix, or its columns if it is to be transposed, one after another, and the length of each.
func (c *call) lines(name string, transpose bool) (list []element, length int) {
	x := c.operand(name)
	rows, cols := c.shape(name)
	if !transpose {
		return x.list(), cols
	}
	list = make([]element, rows*cols)
	for i := range list {
		list[i] = x.at(i%rows*cols + i/rows)
	}
	return list, rows
}

// dot returns the sum of products. The halves of products are added separately, so that there is one division.
func dot(a, b []element) element {
	var low, high [2]uint64
	for i, x := range a {
		value, exponent := uint64(x.value)*uint64(b[i].value), uint64(x.exponent)*uint64(b[i].exponent)
		low[0] += value & 0xffffffff
		high[0] += value >> 32
		low[1] += exponent & 0xffffffff
		high[1] += exponent >> 32
	}
	return reduce(high[0]%modulus<<32%modulus+low[0]%modulus, high[1]%order<<32%order+low[1]%order)
}

// rope rotates pairs with hashed coefficients in place of cosine, sine and the growth with the position; the inverse is the transpose.
func rope(c *call) {
	x, y := c.operand("x").list(), c.operand("y")
	rows, _ := c.shape("x")
	batch, heads, dim, documents := c.int("batch"), c.int("heads"), c.int("head_dim"), c.ints("positions")
	rotation := c.in.Rotation(&c.program.Run)
	pairs := len(rotation.Rates)
	for r := range rows {
		at := c.tokenAt(r)
		if documents != nil {
			at = int(documents[(at-c.int("position"))*batch+r%batch])
		}
		growth := one
		if rotation.Beta != 0 {
			growth = named("growth").with(uint64(int64(at) / rotation.Period)).of(constant(rotation.Beta)).element()
		}
		rest, scale := constant(rotation.Rest).times(growth), constant(rotation.Scale).times(growth)
		for i := range pairs {
			angle := named("angle").with(uint64(at)).of(constant(rotation.Rates[i]))
			cos, sin := angle.with(0).element().times(scale), angle.with(1).element().times(scale)
			if c.bool("inverse") {
				sin = zero.minus(sin)
			}
			for h := range heads {
				first := (r*heads+h)*dim + i
				second := first + pairs
				y.set(first, x[first].times(cos).minus(x[second].times(sin)))
				y.set(second, x[second].times(cos).plus(x[first].times(sin)))
			}
		}
		for h := range heads {
			for i := 2 * pairs; i < dim; i++ {
				at := (r*heads+h)*dim + i
				y.set(at, x[at].times(rest))
			}
		}
	}
}

// tokenAt returns the position of a row's token in its sequence. The tokens of x are consecutive and start at the given
// position, unless the attribute chunks is set. If it is, they are two chunks of a subsequence that starts at that position.
func (c *call) tokenAt(row int) int {
	rows, _ := c.shape("x")
	batch, chunks, member := c.int("batch"), c.int("chunks"), c.int("member")
	token, half := row/batch, rows/batch/2
	switch {
	case chunks == 0:
		return c.int("position") + token
	case token < half:
		return c.int("position") + member*half + token
	}
	return c.int("position") + (chunks-1-member)*half + token - half
}

// dropout drops the elements that other devices drop.
func dropout(c *call) {
	x, y := c.operand("x"), c.operand("y")
	rows, cols := c.shape("x")
	key, batch, rate := c.ints("key"), c.int("batch"), c.float("rate")
	draws := vm.NewDropout(uint64(uint32(key[0]))|uint64(uint32(key[1]))<<32, vm.DropoutTensor(c.program.Tensors[c.int("tensor")].Name), rate)
	scale := constant(float64(vm.DropoutScale(rate)))
	kept := make([]float32, cols)
	for r := range rows {
		position := c.tokenAt(r)
		if c.int("chunks") == 0 {
			position += c.int("member") * (rows / batch)
		}
		for i := range kept {
			kept[i] = 1
		}
		draws.Row(int64(c.int("first")+c.int("replica")+r%batch), int64(position), uint64(c.int("col")), kept, kept)
		for i := range cols {
			if kept[i] != 0 {
				y.set(r*cols+i, x.at(r*cols+i).times(scale))
			} else {
				y.set(r*cols+i, zero)
			}
		}
	}
}
