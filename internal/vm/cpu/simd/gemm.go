package simd

import (
	"sync"
	"sync/atomic"
	"unsafe"
)

// Block sizes of the matrix product. A block of op(a), mc by kc, stays in the second-level cache while slivers of
// op(b), kc by nr, pass through the first-level cache. The block sizes are part of the definition of the result:
// each element of c is the sum of one partial sum per block of k. The partial sums are added in order, each is
// computed in the order of k, and no element depends on another. The split among threads therefore does not affect
// the result.
const (
	kcMax = 384
	mcMax = 420
	ncMax = 2048
)

// tile is the argument of a micro-kernel, which computes rows by cols elements of c = [c +] a*b [+ bias]. b is in
// slivers of nr columns; a may have any strides. Strides are in bytes. a and b have k words along the summed
// dimension. The assembly depends on the offsets of the fields.
type tile struct {
	a          unsafe.Pointer
	aRow, aK   int
	b          unsafe.Pointer
	bK         int
	c          unsafe.Pointer
	cRow       int
	k          int
	rows, cols int
	bias       unsafe.Pointer
	accumulate int // 0: c is overwritten
	// Memory to prefetch for later calls: offsets from aheadBase, one for every second step of k. The list runs
	// from ahead to aheadEnd and is followed by as many zeros.
	ahead, aheadBase, aheadEnd unsafe.Pointer
	// If pairs is not zero, the words of a and b are pairs. For each pair, an element of c becomes
	// RN(RN(c + high*high) + low*low), where RN rounds to nearest even. Products are not rounded;
	// denormal operands and results are flushed to zero.
	pairs int
}

// gemmJob is the job of computing one product; it is kept and reused for later products.
type gemmJob struct {
	transA, transB bool
	m, n, k        int
	a, b, c        Mat
	accumulate     bool
	bias           []float32
	perWord        int // elements along k in a packed word: 2 if a and b are multiplied in bfloat16, else 1
	rowParts       int
	colParts       int
	number         uint64         // number of the product if its parts share packed rows of a; else 0
	run            func(part int) // the method part, as a bound function
}

// products is the number of products so far whose parts share packed rows of a.
var products atomic.Uint64

var gemmJobs = sync.Pool{New: func() any {
	g := new(gemmJob)
	g.run = g.part
	return g
}}

// Gemm computes c = [c +] op(a)*op(b) [+ bias] on row-major float32 matrices. op is the identity or a
// transposition. op(a) is m by k, op(b) k by n; bias is nil or has n elements, which are added to every row.
func Gemm(p *Pool, transA, transB bool, m, n, k int, a []float32, lda int, b []float32, ldb int,
	accumulate bool, bias []float32, c []float32, ldc int) {
	GemmMat(p, transA, transB, m, n, k, F32(a, lda), F32(b, ldb), accumulate, bias, F32(c, ldc))
}

// GemmMat is Gemm with each operand stored as float32 or bfloat16. Sums run in float32; a bfloat16 c is rounded once,
// at the end.
func GemmMat(p *Pool, transA, transB bool, m, n, k int, a, b Mat, accumulate bool, bias []float32, c Mat) {
	if m <= 0 || n <= 0 {
		return
	}
	if openBLAS.gemm(p, transA, transB, m, n, k, a, b, accumulate, bias, c) {
		return
	}
	g := gemmJobs.Get().(*gemmJob)
	g.transA, g.transB, g.m, g.n, g.k = transA, transB, m, n, k
	g.a, g.b, g.c, g.accumulate, g.bias = a, b, c, accumulate, bias
	g.perWord = perWord(a, b)
	g.split(p.Threads())
	p.Run(g.rowParts*g.colParts, g.run)
	g.a, g.b, g.c, g.bias = Mat{}, Mat{}, Mat{}, nil
	gemmJobs.Put(g)
}

// split chooses the grid of parts: one part per thread if there is enough work, divided so that as little data
// as possible is packed twice.
func (g *gemmJob) split(threads int) {
	const flopsPerPart = 1 << 20
	parts := max(1, min(threads, int(2*float64(g.m)*float64(g.n)*float64(g.k)/flopsPerPart)))
	g.rowParts, g.colParts = 1, 1
	best := -1.0
	for rows := 1; rows <= min(parts, max(1, g.m/active.mr)); rows++ {
		cols := min(parts/rows, max(1, g.n/active.nr))
		// The work of one part, including padding at its edges, and the data that it packs.
		h, w := ceilDiv(g.m, rows), roundUp(ceilDiv(g.n, cols), active.nr)
		cost := float64(h)*float64(w) + 12*float64(h) + 12*float64(w)
		if best < 0 || cost < best {
			best, g.rowParts, g.colParts = cost, rows, cols
		}
	}
	g.number = 0
	if g.rowParts*g.colParts > 1 {
		g.refine()
	}
}

// If a thread has several parts, others can take over those that it has not started. Therefore each thread gets
// up to finestParts parts, each with at least finestFlops operations.
const (
	finestParts = 4
	finestFlops = 4 << 20
	keptWords   = 1 << 18 // limit on the packed words of op(a) that parts share: half of a second-level cache
)

// refine divides parts further if that costs nothing. It divides rows at the boundaries of blocks, and columns if
// a thread can keep its packed rows of op(a) from one part to the next.
func (g *gemmJob) refine() {
	g.rowParts *= ceilDiv(ceilDiv(g.m, g.rowParts), mcMax)
	rows, cols := ceilDiv(g.m, g.rowParts), ceilDiv(g.n, g.colParts)
	if rows > mcMax || rows*g.words(g.k) > keptWords {
		return
	}
	if finer := min(finestParts, cols/active.nr, int(2*float64(rows)*float64(cols)*float64(g.k)/finestFlops)); finer > 1 {
		g.colParts *= finer
		g.number = products.Add(1)
	}
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }

func roundUp(a, b int) int { return ceilDiv(a, b) * b }

// words returns the number of packed words for n elements along k.
func (g *gemmJob) words(n int) int { return ceilDiv(n, g.perWord) }

// even divides n into equal pieces that are at most `most` long, and returns their length, rounded up to a
// multiple of unit.
func even(n, most, unit int) int { return max(unit, roundUp(ceilDiv(n, ceilDiv(n, most)), unit)) }

// part computes one rectangle of c.
func (g *gemmJob) part(part int) {
	i0, i1 := cut(g.m, g.rowParts, part/g.colParts, 1)
	j0, j1 := cut(g.n, g.colParts, part%g.colParts, active.nr)
	if i0 == i1 || j0 == j1 {
		return
	}
	s := takePacked()
	defer s.release()
	mc, nc := even(i1-i0, mcMax, active.mr), even(j1-j0, ncMax, active.nr)
	for j := j0; j < j1; j += nc {
		for i := i0; i < i1; i += mc {
			g.block(s, i, min(mc, i1-i), j, min(nc, j1-j))
		}
	}
}

// cut returns the bounds of range number `part` when 0..n is divided into `parts` nearly equal ranges at multiples
// of unit.
func cut(n, parts, part, unit int) (lo, hi int) {
	units := ceilDiv(n, unit)
	return min(n, units*part/parts*unit), min(n, units*(part+1)/parts*unit)
}

// block computes a rectangle of c that is small enough for its part of op(a) to stay in cache. The limit kcMax
// counts packed words.
func (g *gemmJob) block(s *scratch, i, m, j, n int) {
	c, cLd, accumulate := g.c.F32, g.c.Ld, g.accumulate
	if g.c.BF16 != nil {
		c, cLd = s.floats(2, m*n), n
		if accumulate {
			g.c.at(i, j).load(c, n, m, n)
		}
	} else {
		c = c[i*cLd+j:]
	}
	kc := even(max(g.k, 1), kcMax*g.perWord, 8)
	t := &s.tile
	t.pairs = g.perWord - 1
	s.ahead.plan(g.b, g.transB, kc)
	for k := 0; k == 0 || k < g.k; k += kc {
		kn := min(kc, g.k-k)
		g.packA(s, i, m, k, kn)
		t.k, t.rows, t.cRow, t.accumulate = g.words(kn), m, 4*cLd, 0
		if accumulate || k > 0 {
			t.accumulate = 1
		}
		for jj := 0; jj < n; jj += active.nr {
			t.cols = min(active.nr, n-jj)
			t.c, t.bias = unsafe.Pointer(&c[jj]), nil
			if g.bias != nil && k == 0 {
				t.bias = unsafe.Pointer(&g.bias[j+jj])
			}
			g.packB(s, j+jj, t.cols, k, kn)
			if kn > 0 && jj+2*active.nr <= n {
				s.ahead.point(t, rowsAndColumns(g.b, g.transB, k, j+jj+active.nr))
			} else {
				t.noAhead()
			}
			active.gemm(t)
		}
	}
	if g.c.BF16 != nil {
		g.c.at(i, j).store(c, n, m, n)
	}
}

// multiply computes c = [c +] a*b with the micro-kernel, one strip of columns after another. Consecutive rows are bLd words apart
// in b, with room for whole vectors, and cLd in c; a may have any strides. a and b have k words along the summed dimension.
func (s *scratch) multiply(perWord, rows, cols, k int, a []float32, aRow, aK int, b []float32, bLd int, c []float32, cLd int, accumulate bool) {
	t := &s.tile
	t.pairs = perWord - 1
	t.a, t.aRow, t.aK = unsafe.Pointer(&a[0]), 4*aRow, 4*aK
	t.bK, t.cRow, t.k, t.rows, t.bias, t.accumulate = 4*bLd, 4*cLd, k, rows, nil, 0
	if accumulate {
		t.accumulate = 1
	}
	for j := 0; j < cols; j += active.nr {
		t.b, t.c, t.cols = unsafe.Pointer(&b[j]), unsafe.Pointer(&c[j]), min(active.nr, cols-j)
		t.noAhead()
		active.gemm(t)
	}
}
