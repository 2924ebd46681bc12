package main

import "strconv"

// The constants of the tanh approximation of gelu, as in the portable kernels.
const (
	geluC = 0.7978845608028654
	geluA = 0.044715
)

const (
	minusInf = 0xff800000
	signBits = 0x80000000
)

// vectorKernels lists all kernels except gemm and the pair kernels.
var vectorKernels = []kernel{
	{name: "add", params: params("dst, a, b []float32"), field: true, body: binary((*fn).add)},
	{name: "mul", params: params("dst, a, b []float32"), field: true, body: binary((*fn).mul)},
	{name: "axpy", params: params("dst, x []float32; alpha float32"), field: true, body: axpy},
	{name: "scale", params: params("dst, x []float32; alpha float32"), field: true, body: scale},
	{name: "gelu", params: params("dst, x []float32"), field: true, body: gelu},
	{name: "geluBackward", params: params("dx, x, dy []float32"), field: true, body: geluBackward},
	{name: "swiglu", params: params("dst, gate, up []float32"), field: true, body: swiglu},
	{name: "swigluBackward", params: params("dgate, dup, gate, up, dy []float32"), field: true, body: swigluBackward},
	{name: "max", params: params("x []float32"), results: "float32", field: true, body: maximum},
	{name: "sumExp", params: params("x []float32; max float32"), results: "float32", field: true, body: sumExp},
	{name: "expScale", params: params("dst, x []float32; max, c float32"), field: true, body: expScale},
	{name: "sum", params: params("x []float32"), results: "float32", field: true, body: sum},
	{name: "dot", params: params("a, b []float32"), results: "float32", field: true, body: dot},
	{name: "sumSquares", params: params("x []float32; mean float32"), results: "float32", field: true, body: sumSquares},
	{name: "norm", params: params("dst, x, gamma, beta []float32; mean, rstd float32"), field: true, body: norm},
	{name: "normSums", params: params("dy, x, gamma []float32; mean, rstd float32"),
		results: "(sumG, sumGX float32)", field: true, body: normSums},
	{name: "normBackward", params: params("dx, dgamma, dbeta, dy, x, gamma []float32; mean, rstd, meanG, meanGX float32"),
		field: true, body: normBackward},
	{name: "columnSums", params: params("dst, x []float32; ld, rows int"), field: true, body: columnSums},
	{name: "rotate", params: params("y, x, cos, sin []float32; sign float32"), field: true, body: rotate},
	{name: "adamw", params: params("w, m, v, g []float32; c *adamwConstants"), field: true, body: adamw},
	{name: "softmaxStrip", params: params("s []float32; ld, rows int; rowMax, sum, alpha []float32; scale float32"),
		field: true, body: softmaxStrip},
	{name: "softmaxGrads", params: params("s, ds []float32; ld, rows int; lse, delta []float32; scale float32"),
		field: true, body: softmaxGrads},
	{name: "copy2D", params: params("dst []float32; dstLd int; src []float32; srcLd, rows, cols int"), field: true, body: copy2D},
	{name: "widen2D", params: params("dst []float32; dstLd int; src []uint16; srcLd, rows, cols int"), field: true, body: widen2D},
	{name: "narrow2D", params: params("dst []uint16; dstLd int; src []float32; srcLd, rows, cols int"), field: true, body: narrow2D},
	{name: "transpose", params: params("dst []float32; dstLd int; src []float32; srcLd, steps int"), body: transpose},
}

// slices loads the addresses of slices, and the length of the first into CX.
func (f *fn) slices(names ...string) []string {
	var regs []string
	for _, name := range names {
		regs = append(regs, f.slice(name))
	}
	f.length(names[0], "CX")
	return regs
}

func binary(op func(f *fn, d, a, b string)) func(f *fn) {
	return func(f *fn) {
		r := f.slices("dst", "a", "b")
		f.each(func() {
			x, y := f.vec(), f.vec()
			f.load(x, at(r[1]))
			f.load(y, at(r[2]))
			op(f, x, x, y)
			f.store(at(r[0]), x)
		})
	}
}

// axpy rounds the product before it adds it, as its definition does.
func axpy(f *fn) {
	r, alpha := f.slices("dst", "x"), f.scalar("alpha")
	f.each(func() {
		d, x := f.vec(), f.vec()
		f.load(d, at(r[0]))
		f.load(x, at(r[1]))
		f.mul(x, alpha, x)
		f.add(d, d, x)
		f.store(at(r[0]), d)
	})
}

func scale(f *fn) {
	r, alpha := f.slices("dst", "x"), f.scalar("alpha")
	f.each(func() {
		x := f.vec()
		f.load(x, at(r[1]))
		f.mul(x, alpha, x)
		f.store(at(r[0]), x)
	})
}

// geluExp sets e to exp(-2u), with u as in the tanh approximation of gelu, given x and x*x.
func (f *fn) geluExp(e, x, square, t, u, m string) {
	f.mov(e, f.c(-2*geluC*geluA))
	f.horner(e, square, f.c(-2*geluC))
	f.mul(e, e, x)
	f.exp(e, t, u, m)
}

func gelu(f *fn) {
	r := f.slices("dst", "x")
	f.each(func() {
		x, s, e, t, u, m := f.vec(), f.vec(), f.vec(), f.vec(), f.vec(), f.vec()
		f.load(x, at(r[1]))
		f.mul(s, x, x)
		f.geluExp(e, x, s, t, u, m)
		f.add(e, e, f.c(1))
		f.div(x, x, e)
		f.store(at(r[0]), x)
	})
}

func geluBackward(f *fn) {
	r, one := f.slices("dx", "x", "dy"), f.constant(1)
	f.each(func() {
		x, square, s, t, u, m := f.vec(), f.vec(), f.vec(), f.vec(), f.vec(), f.vec()
		f.load(x, at(r[1]))
		f.mul(square, x, x)
		f.geluExp(s, x, square, t, u, m)
		f.add(s, s, one)
		f.div(s, one, s)
		// dy * (s + x*s*(1-s) * (2c + 6ca*x*x))
		f.mov(t, f.c(6*geluC*geluA))
		f.horner(t, square, f.c(2*geluC))
		f.sub(u, one, s)
		f.mul(u, u, s)
		f.mul(u, u, x)
		f.fma(s, u, t)
		f.load(t, at(r[2]))
		f.mul(s, s, t)
		f.store(at(r[0]), s)
	})
}

// sigmoidDivisor sets e to 1 + exp(-x).
func (f *fn) sigmoidDivisor(e, x, t, u, m string) {
	f.p("%s %s, %s, %s", f.bits("VPXOR"), f.word32(signBits), x, e)
	f.exp(e, t, u, m)
	f.add(e, e, f.c(1))
}

// bits returns the name of a bitwise vector instruction.
func (f *fn) bits(name string) string {
	if f.avx512 {
		return name + "D"
	}
	return name
}

func swiglu(f *fn) {
	r := f.slices("dst", "gate", "up")
	f.each(func() {
		g, e, t, u, m := f.vec(), f.vec(), f.vec(), f.vec(), f.vec()
		f.load(g, at(r[1]))
		f.sigmoidDivisor(e, g, t, u, m)
		f.div(g, g, e)
		f.load(u, at(r[2]))
		f.mul(g, g, u)
		f.store(at(r[0]), g)
	})
}

func swigluBackward(f *fn) {
	r, one := f.slices("dgate", "dup", "gate", "up", "dy"), f.constant(1)
	f.each(func() {
		g, s, d, t, u, m := f.vec(), f.vec(), f.vec(), f.vec(), f.vec(), f.vec()
		f.load(g, at(r[2]))
		f.sigmoidDivisor(s, g, t, u, m)
		f.div(s, one, s)
		f.load(d, at(r[4]))
		f.load(u, at(r[3]))
		f.mul(u, u, d)
		f.mul(g, g, s) // silu
		f.mul(d, d, g)
		f.sub(t, one, s)
		f.fma(s, g, t)
		f.mul(s, s, u)
		f.store(at(r[0]), s)
		f.store(at(r[1]), d)
	})
}

func maximum(f *fn) {
	r := f.slices("x")
	m := f.vec()
	f.mov(m, f.word32(minusInf))
	f.each(func() {
		x := f.vec()
		f.load(x, at(r[0]))
		f.tailFill(x, minusInf)
		f.max(m, m, x)
	})
	f.reduce(f.max, m, f.v(1))
	f.result("ret", 0, m)
}

// sumExp sums exp(x - max).
func sumExp(f *fn) {
	r, limit, acc := f.slices("x"), f.scalar("max"), f.zero()
	f.each(func() {
		x, t, u, m := f.vec(), f.vec(), f.vec(), f.vec()
		f.load(x, at(r[0]))
		f.sub(x, x, limit)
		f.exp(x, t, u, m)
		f.clearTail(x)
		f.add(acc, acc, x)
	})
	f.reduce(f.add, acc, limit)
	f.result("ret", 0, acc)
}

func expScale(f *fn) {
	r, limit, c := f.slices("dst", "x"), f.scalar("max"), f.scalar("c")
	f.each(func() {
		x, t, u, m := f.vec(), f.vec(), f.vec(), f.vec()
		f.load(x, at(r[1]))
		f.sub(x, x, limit)
		f.exp(x, t, u, m)
		f.mul(x, x, c)
		f.store(at(r[0]), x)
	})
}

func sum(f *fn) {
	r, acc := f.slices("x"), f.zero()
	f.each(func() {
		x := f.vec()
		f.load(x, at(r[0]))
		f.add(acc, acc, x)
	})
	f.reduce(f.add, acc, f.v(1))
	f.result("ret", 0, acc)
}

func dot(f *fn) {
	r, acc := f.slices("a", "b"), f.zero()
	f.each(func() {
		x, y := f.vec(), f.vec()
		f.load(x, at(r[0]))
		f.load(y, at(r[1]))
		f.fma(acc, x, y)
	})
	f.reduce(f.add, acc, f.v(1))
	f.result("ret", 0, acc)
}

func sumSquares(f *fn) {
	r, mean, acc := f.slices("x"), f.scalar("mean"), f.zero()
	f.each(func() {
		x := f.vec()
		f.load(x, at(r[0]))
		f.sub(x, x, mean)
		f.clearTail(x)
		f.fma(acc, x, x)
	})
	f.reduce(f.add, acc, mean)
	f.result("ret", 0, acc)
}

func norm(f *fn) {
	r, mean, rstd := f.slices("dst", "x", "gamma", "beta"), f.scalar("mean"), f.scalar("rstd")
	f.each(func() {
		x, g, b := f.vec(), f.vec(), f.vec()
		f.load(x, at(r[1]))
		f.load(g, at(r[2]))
		f.load(b, at(r[3]))
		f.sub(x, x, mean)
		f.mul(x, x, rstd)
		f.fma(b, x, g)
		f.store(at(r[0]), b)
	})
}

func normSums(f *fn) {
	r, mean, rstd := f.slices("dy", "x", "gamma"), f.scalar("mean"), f.scalar("rstd")
	sumG, sumGX := f.zero(), f.zero()
	f.each(func() {
		d, x, g := f.vec(), f.vec(), f.vec()
		f.load(d, at(r[0]))
		f.load(x, at(r[1]))
		f.load(g, at(r[2]))
		f.sub(x, x, mean)
		f.mul(x, x, rstd)
		f.mul(d, d, g) // zero past the end
		f.add(sumG, sumG, d)
		f.fma(sumGX, d, x)
	})
	f.reduce(f.add, sumG, mean)
	f.reduce(f.add, sumGX, mean)
	f.result("sumG", 0, sumG)
	f.result("sumGX", 1, sumGX)
}

func normBackward(f *fn) {
	r := f.slices("dx", "dgamma", "dbeta", "dy", "x", "gamma")
	mean, rstd, meanG, meanGX := f.scalar("mean"), f.scalar("rstd"), f.scalar("meanG"), f.scalar("meanGX")
	f.each(func() {
		d, x, g, t := f.vec(), f.vec(), f.vec(), f.vec()
		f.load(d, at(r[3]))
		f.load(x, at(r[4]))
		f.load(g, at(r[5]))
		f.sub(x, x, mean)
		f.mul(x, x, rstd)
		f.load(t, at(r[1]))
		f.fma(t, d, x)
		f.store(at(r[1]), t)
		f.load(t, at(r[2]))
		f.add(t, t, d)
		f.store(at(r[2]), t)
		f.mul(d, d, g)
		f.sub(d, d, meanG)
		f.fnma(d, x, meanGX)
		f.mul(d, d, rstd)
		f.store(at(r[0]), d)
	})
}

// columnSums keeps up to four vectors of sums in registers while it goes down the rows.
func columnSums(f *fn) {
	r := f.slices("dst", "x")
	ld, rows := f.word("ld"), f.word("rows")
	f.p("SHLQ $2, %s", ld)
	const x, left = "R10", "R11"
	column := func(vectors int) {
		var acc []string
		for i := range vectors {
			acc = append(acc, f.v(i))
			f.load(f.v(i), offset(4*f.lanes*i, r[0]))
		}
		loop, done := f.fresh("row"), f.fresh("rows")
		f.p("MOVQ %s, %s", r[1], x)
		f.p("MOVQ %s, %s", rows, left)
		f.label(loop)
		f.p("SUBQ $1, %s", left)
		f.p("JLT %s", done)
		for i := range vectors {
			if f.masked {
				f.load(f.v(4), "("+x+")")
				f.add(acc[i], acc[i], f.v(4))
			} else {
				f.add(acc[i], acc[i], offset(4*f.lanes*i, x))
			}
		}
		f.p("ADDQ %s, %s", ld, x)
		f.p("JMP %s", loop)
		f.label(done)
		for i := range vectors {
			f.store(offset(4*f.lanes*i, r[0]), acc[i])
		}
		f.p("ADDQ $%d, %s", 4*f.lanes*vectors, r[0])
		f.p("ADDQ $%d, %s", 4*f.lanes*vectors, r[1])
	}
	for _, vectors := range []int{4, 1} {
		loop, done := f.fresh("columns"), f.fresh("narrower")
		f.label(loop)
		f.p("CMPQ CX, $%d", vectors*f.lanes)
		f.p("JLT %s", done)
		column(vectors)
		f.p("SUBQ $%d, CX", vectors*f.lanes)
		f.p("JMP %s", loop)
		f.label(done)
	}
	f.p("TESTQ CX, CX")
	f.p("JLE end")
	f.tailMask("CX")
	f.masked = true
	column(1)
	f.masked = false
	f.label("end")
}

// rotate rotates pairs: an element of the first half and the corresponding element of the second. It rounds every
// product separately, as its definition does.
func rotate(f *fn) {
	y, x, cos, sin, sign := f.slice("y"), f.slice("x"), f.slice("cos"), f.slice("sin"), f.scalar("sign")
	f.length("cos", "CX")
	y2, x2 := f.integer(), f.integer()
	f.p("LEAQ (%s)(CX*4), %s", y, y2)
	f.p("LEAQ (%s)(CX*4), %s", x, x2)
	f.each(func() {
		a, b, c, s, t := f.vec(), f.vec(), f.vec(), f.vec(), f.vec()
		f.load(a, at(x))
		f.load(b, at(x2))
		f.load(c, at(cos))
		f.load(s, at(sin))
		f.mul(s, s, sign)
		f.mul(t, b, s)
		f.mul(s, a, s)
		f.mul(a, a, c)
		f.mul(b, b, c)
		f.sub(a, a, t)
		f.add(b, s, b)
		f.store(at(y), a)
		f.store(at(y2), b)
	})
}

// adamw rounds every product separately, in the order of its definition, so that all instruction sets agree bit
// for bit.
func adamw(f *fn) {
	r := f.slices("w", "m", "v", "g")
	c := f.word("c")
	var k [9]string
	for i := range k {
		k[i] = f.vec()
		f.p("VBROADCASTSS %d(%s), %s", 4*i, c, k[i])
	}
	gradScale, beta1, oneMinusBeta1, beta2, oneMinusBeta2 := k[0], k[1], k[2], k[3], k[4]
	correction2, keep, step, eps := k[5], k[6], k[7], k[8]
	f.each(func() {
		g, m, v, t := f.vec(), f.vec(), f.vec(), f.vec()
		f.load(g, at(r[3]))
		f.mul(g, g, gradScale)
		f.load(m, at(r[1]))
		f.mul(m, beta1, m)
		f.mul(t, oneMinusBeta1, g)
		f.add(m, m, t)
		f.store(at(r[1]), m)
		f.load(v, at(r[2]))
		f.mul(v, beta2, v)
		f.mul(t, oneMinusBeta2, g)
		f.mul(t, t, g)
		f.add(v, v, t)
		f.store(at(r[2]), v)
		f.mul(v, v, correction2)
		f.p("VSQRTPS %s, %s", v, v)
		f.add(v, v, eps)
		f.mul(m, m, step)
		f.div(m, m, v)
		f.load(t, at(r[0]))
		f.mul(t, t, keep)
		f.sub(t, t, m)
		f.store(at(r[0]), t)
	})
}

// strip loads two values that both softmax kernels need: the row stride in bytes, into the register that it
// returns, and the number of rows, into CX.
func (f *fn) strip() (ld string) {
	ld = f.word("ld")
	f.p("SHLQ $2, %s", ld)
	f.p("MOVQ rows+%d(FP), CX", f.kernel.offset("rows"))
	return ld
}

// rowLoop runs body CX times.
func (f *fn) rowLoop(body func()) {
	loop, done := f.fresh("row"), f.fresh("rows")
	f.label(loop)
	f.p("SUBQ $1, CX")
	f.p("JLT %s", done)
	body()
	f.p("JMP %s", loop)
	f.label(done)
}

func offset(bytes int, base string) string {
	if bytes == 0 {
		return "(" + base + ")"
	}
	return strconv.Itoa(bytes) + "(" + base + ")"
}

func softmaxStrip(f *fn) {
	s, rowMax, sums, alpha := f.slice("s"), f.slice("rowMax"), f.slice("sum"), f.slice("alpha")
	ld, row, scale := f.strip(), "R10", f.scalar("scale")
	max, acc := [2]string{f.vec(), f.vec()}, [2]string{f.vec(), f.vec()}
	x, t, u, m := f.vec(), f.vec(), f.vec(), f.vec()
	for j := range 2 {
		f.mov(max[j], offset(4*f.lanes*j, rowMax))
	}
	f.p("MOVQ %s, %s", s, row)
	f.rowLoop(func() {
		for j := range 2 {
			f.mul(x, scale, offset(4*f.lanes*j, row))
			f.max(max[j], max[j], x)
		}
		f.p("ADDQ %s, %s", ld, row)
	})
	for j := range 2 {
		f.mov(x, offset(4*f.lanes*j, rowMax))
		f.mov(offset(4*f.lanes*j, rowMax), max[j])
		f.sub(x, x, max[j])
		f.exp(x, t, u, m)
		f.mov(offset(4*f.lanes*j, alpha), x)
		f.p("VXORPS %s, %s, %s", acc[j], acc[j], acc[j])
	}
	f.p("MOVQ rows+%d(FP), CX", f.kernel.offset("rows"))
	f.p("MOVQ %s, %s", s, row)
	f.rowLoop(func() {
		for j := range 2 {
			f.mov(x, offset(4*f.lanes*j, row))
			f.fms(x, scale, max[j])
			f.exp(x, t, u, m)
			f.mov(offset(4*f.lanes*j, row), x)
			f.add(acc[j], acc[j], x)
		}
		f.p("ADDQ %s, %s", ld, row)
	})
	for j := range 2 {
		f.mov(x, offset(4*f.lanes*j, sums))
		f.mov(t, offset(4*f.lanes*j, alpha))
		f.horner(x, t, acc[j])
		f.mov(offset(4*f.lanes*j, sums), x)
	}
}

func softmaxGrads(f *fn) {
	s, ds, lse, delta := f.slice("s"), f.slice("ds"), f.slice("lse"), f.slice("delta")
	ld, scale := f.strip(), f.scalar("scale")
	var lses, deltas [2]string
	for j := range 2 {
		lses[j], deltas[j] = f.vec(), f.vec()
		f.mov(lses[j], offset(4*f.lanes*j, lse))
		f.mov(deltas[j], offset(4*f.lanes*j, delta))
	}
	x, t, u, m := f.vec(), f.vec(), f.vec(), f.vec()
	f.rowLoop(func() {
		for j := range 2 {
			f.mov(x, offset(4*f.lanes*j, s))
			f.fms(x, scale, lses[j])
			f.exp(x, t, u, m)
			f.mov(offset(4*f.lanes*j, s), x)
			f.mov(t, offset(4*f.lanes*j, ds))
			f.sub(t, t, deltas[j])
			f.mul(t, t, x)
			f.mul(t, t, scale)
			f.mov(offset(4*f.lanes*j, ds), t)
		}
		f.p("ADDQ %s, %s", ld, s)
		f.p("ADDQ %s, %s", ld, ds)
	})
}

// rows2D loops over the rows of dst and src, with their strides in bytes in DX and BX; body processes one row
// of CX elements. Rows of exactly two vectors, as in slivers of a matrix product, have a separate loop.
func rows2D(f *fn, dstSize, srcSize int, vector func(dst, src string), row func(dst, src string)) {
	dst, src := f.slice("dst"), f.slice("src")
	dstLd, srcLd, rows, cols := f.word("dstLd"), f.word("srcLd"), f.word("rows"), f.word("cols")
	f.p("IMULQ $%d, %s", dstSize, dstLd)
	f.p("IMULQ $%d, %s", srcSize, srcLd)
	next := func() {
		f.p("ADDQ %s, %s", dstLd, dst)
		f.p("ADDQ %s, %s", srcLd, src)
	}
	f.p("CMPQ %s, $%d", cols, 2*f.lanes)
	f.p("JNE general")
	f.p("MOVQ %s, CX", rows)
	f.rowLoop(func() {
		f.p("PREFETCHT0 (%s)(%s*8)", src, srcLd)
		f.p("PREFETCHT0 %d(%s)(%s*8)", 2*f.lanes*srcSize-1, src, srcLd)
		for j := range 2 {
			vector(offset(dstSize*f.lanes*j, dst), offset(srcSize*f.lanes*j, src))
		}
		next()
	})
	f.p("JMP end")
	f.label("general")
	f.p("SUBQ $1, %s", rows)
	f.p("JLT end")
	f.p("MOVQ %s, CX", cols)
	row(dst, src)
	next()
	f.p("JMP general")
	f.label("end")
}

func copy2D(f *fn) {
	vector := func(dst, src string) {
		x := f.v(0)
		f.load(x, src)
		f.store(dst, x)
	}
	rows2D(f, 4, 4, vector, func(dst, src string) {
		f.each(func() { vector(at(dst), at(src)) })
	})
}

func widen2D(f *fn) {
	vector := func(dst, src string) {
		x := f.v(0)
		if f.masked {
			f.p("VPMOVZXWD.Z %s, K1, %s", src, x)
		} else {
			f.p("VPMOVZXWD %s, %s", src, x)
		}
		f.p("VPSLLD $16, %s, %s", x, x)
		f.store(dst, x)
	}
	rows2D(f, 4, 2, vector, func(dst, src string) {
		f.each(func() {
			if f.masked && !f.avx512 {
				f.oneByOne(func() {
					f.p("MOVWLZX (%s)(AX*2), R15", src)
					f.p("SHLL $16, R15")
					f.p("MOVL R15, %s", at(dst))
				})
				return
			}
			vector(at(dst), "("+src+")(AX*2)")
		})
	})
}

// oneByOne runs body for each of the last CX elements.
func (f *fn) oneByOne(body func()) {
	loop := f.fresh("one")
	f.label(loop)
	body()
	f.p("ADDQ $1, AX")
	f.p("SUBQ $1, CX")
	f.p("JGT %s", loop)
}

func narrow2D(f *fn) {
	vector := func(dst, src string) {
		x, t, s, n := f.v(0), f.v(1), f.v(2), f.v(3)
		f.load(x, src)
		f.p("VPSRLD $16, %s, %s", x, t)
		f.p("%s %s, %s, %s", f.bits("VPAND"), f.word32(1), t, s)
		f.p("VPADDD %s, %s, %s", x, s, s)
		f.p("VPADDD %s, %s, %s", f.word32(0x7fff), s, s)
		f.p("VPSRLD $16, %s, %s", s, s)
		f.p("%s %s, %s, %s", f.bits("VPOR"), f.word32(0x40), t, t)
		switch {
		case f.avx512:
			f.p("VCMPPS $3, %s, %s, K3", x, x)
			f.p("VMOVDQA32 %s, K3, %s", t, s)
			if f.masked {
				f.p("VPMOVDW %s, K1, %s", s, dst)
			} else {
				f.p("VPMOVDW %s, %s", s, dst)
			}
		default:
			f.p("VCMPPS $3, %s, %s, %s", x, x, n)
			f.p("VBLENDVPS %s, %s, %s, %s", n, t, s, s)
			f.p("VPACKUSDW %s, %s, %s", s, s, s)
			f.p("VPERMQ $8, %s, %s", s, s)
			f.p("VMOVUPS %s, %s", low(s), dst)
		}
	}
	rows2D(f, 2, 4, vector, func(dst, src string) {
		f.each(func() {
			if f.masked && !f.avx512 {
				f.oneByOne(func() { f.narrowOne(dst, src) })
				return
			}
			vector("("+dst+")(AX*2)", at(src))
		})
	})
}

// narrowOne rounds one element with integer instructions.
func (f *fn) narrowOne(dst, src string) {
	number, done := f.fresh("number"), f.fresh("narrowed")
	f.p("MOVL %s, R10", at(src))
	f.p("MOVL R10, R15")
	f.p("ANDL $0x7fffffff, R15")
	f.p("CMPL R15, $0x7f800000")
	f.p("JLE %s", number)
	f.p("SHRL $16, R10")
	f.p("ORL $0x40, R10")
	f.p("JMP %s", done)
	f.label(number)
	f.p("MOVL R10, R15")
	f.p("SHRL $16, R15")
	f.p("ANDL $1, R15")
	f.p("ADDL $0x7fff, R15")
	f.p("ADDL R15, R10")
	f.p("SHRL $16, R10")
	f.label(done)
	f.p("MOVW R10, (%s)(AX*2)", dst)
}

// transpose turns rows, one for each lane of a vector, into columns: dst[c*dstLd+r] = src[r*srcLd+c], four
// columns per step. Each register gathers four columns of rows i, i+4, i+8 and so on, so that the transposition
// stays within 128-bit lanes.
func transpose(f *fn) {
	dst, src := f.slice("dst"), f.slice("src")
	dstLd, srcLd := f.word("dstLd"), f.word("srcLd")
	f.p("MOVQ steps+%d(FP), CX", f.kernel.offset("steps"))
	f.p("SHLQ $2, %s", dstLd)
	f.p("SHLQ $2, %s", srcLd)
	three, dstThree := f.integer(), f.integer()
	f.p("LEAQ (%s)(%s*2), %s", srcLd, srcLd, three)
	f.p("LEAQ (%s)(%s*2), %s", dstLd, dstLd, dstThree)
	bases := []string{src}
	for i := range f.lanes/4 - 1 {
		bases = append(bases, f.integer())
		f.p("LEAQ (%s)(%s*4), %s", bases[i], srcLd, bases[i+1])
	}
	fourRows := func(base, ld, three string, i int) string {
		return []string{"(" + base + ")", "(" + base + ")(" + ld + "*1)", "(" + base + ")(" + ld + "*2)", "(" + base + ")(" + three + "*1)"}[i]
	}
	var a, t [4]string
	for i := range 4 {
		a[i], t[i] = f.vec(), f.vec()
	}
	f.rowLoop(func() {
		for i := range 4 {
			f.p("VMOVUPS %s, %s", fourRows(bases[0], srcLd, three, i), low(a[i]))
			for l, base := range bases[1:] {
				insert := "VINSERTF128"
				if f.avx512 {
					insert = "VINSERTF32X4"
				}
				f.p("%s $%d, %s, %s, %s", insert, l+1, fourRows(base, srcLd, three, i), a[i], a[i])
			}
		}
		f.p("VUNPCKLPS %s, %s, %s", a[1], a[0], t[0])
		f.p("VUNPCKHPS %s, %s, %s", a[1], a[0], t[1])
		f.p("VUNPCKLPS %s, %s, %s", a[3], a[2], t[2])
		f.p("VUNPCKHPS %s, %s, %s", a[3], a[2], t[3])
		for i, op := range []string{"VUNPCKLPD", "VUNPCKHPD"} {
			for j := range 2 {
				f.p("%s %s, %s, %s", op, t[2+j], t[j], a[2*j+i])
			}
		}
		for i := range 4 {
			f.mov(fourRows(dst, dstLd, dstThree, i), a[i])
		}
		f.p("LEAQ (%s)(%s*4), %s", dst, dstLd, dst)
		for _, base := range bases {
			f.p("ADDQ $16, %s", base)
		}
	})
}
