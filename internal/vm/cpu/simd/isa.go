package simd

// kernelSet holds the kernels of one instruction set. The kernels use no threads and check no arguments. Tests
// check the kernels of every set.
type kernelSet struct {
	name   string
	mr, nr int // maximum number of rows, and number of columns, of a micro-kernel's panel

	gemm     func(t *tile)
	copy2D   func(dst []float32, dstLd int, src []float32, srcLd, rows, cols int)
	widen2D  func(dst []float32, dstLd int, src []uint16, srcLd, rows, cols int)
	narrow2D func(dst []uint16, dstLd int, src []float32, srcLd, rows, cols int)
	packT    func(dst, src []float32, srcLd, rows, cols int) // dst[c*nr+r] = src[r*srcLd+c], rows <= nr

	add   func(dst, a, b []float32)
	mul   func(dst, a, b []float32)
	axpy  func(dst, x []float32, alpha float32)
	scale func(dst, x []float32, alpha float32)

	gelu           func(dst, x []float32)
	geluBackward   func(dx, x, dy []float32)
	swiglu         func(dst, gate, up []float32)
	swigluBackward func(dgate, dup, gate, up, dy []float32)

	max      func(x []float32) float32
	sumExp   func(x []float32, max float32) float32
	expScale func(dst, x []float32, max, c float32)

	sum        func(x []float32) float32
	dot        func(a, b []float32) float32
	sumSquares func(x []float32, mean float32) float32

	norm         func(dst, x, gamma, beta []float32, mean, rstd float32)
	normSums     func(dy, x, gamma []float32, mean, rstd float32) (sumG, sumGX float32)
	normBackward func(dx, dgamma, dbeta, dy, x, gamma []float32, mean, rstd, meanG, meanGX float32)
	columnSums   func(dst, x []float32, ld, rows int)

	rotate func(y, x, cos, sin []float32, sign float32)

	adamw func(w, m, v, g []float32, c *adamwConstants)

	softmaxStrip func(s []float32, ld, rows int, max, sum, alpha []float32, scale float32)
	softmaxGrads func(s, ds []float32, ld, rows int, lse, delta []float32, scale float32)

	// interleave makes row i of dst, which has cols words, from rows 2i and 2i+1 of src. A word is a pair of
	// bfloat16; gemm multiplies pairs if the tile requests it. interleave is nil if gemm cannot multiply pairs.
	interleave func(dst []float32, dstLd int, src []uint16, srcLd, pairs, cols int)
}

// active is the set in use. Unless a test changes it, it is the last of kernelSets, which are in ascending order
// of preference.
var active = kernelSets[len(kernelSets)-1]

// kernelSets lists the sets that this machine can run.
var kernelSets = append([]*kernelSet{&portable}, detect()...)

// ISA returns the name of the instruction set in use: portable, avx2, avx512 or avx512_bf16.
func ISA() string { return active.name }
