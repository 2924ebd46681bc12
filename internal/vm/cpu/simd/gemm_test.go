package simd

import (
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"sppo.dev/internal/irtest"
)

// testRand returns a generator whose seed the test prints.
func testRand(t testing.TB) *rand.Rand {
	seed := irtest.Seed(t)
	return rand.New(rand.NewPCG(seed, 1))
}

// eachISA runs the test once with every instruction set of this machine.
func eachISA(t *testing.T, f func(t *testing.T)) {
	was := active
	defer func() { active = was }()
	for _, k := range kernelSets {
		active = k
		t.Run(k.name, f)
	}
}

func randomFloats(r *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

func roundedBF16(x []float32) []uint16 {
	y := make([]uint16, len(x))
	Narrow(y, x)
	Widen(x, y)
	return y
}

type gemmCase struct {
	transA, transB, accumulate, bias, aBF16, bBF16, cBF16 bool
	m, n, k                                               int
}

func randomGemmCase(r *rand.Rand) gemmCase {
	coin := func() bool { return r.IntN(2) == 0 }
	size := func() int {
		if r.IntN(4) == 0 {
			return 1 + r.IntN(400)
		}
		return 1 + r.IntN(70)
	}
	return gemmCase{coin(), coin(), coin(), coin(), r.IntN(4) == 0, r.IntN(4) == 0, r.IntN(4) == 0, size(), size(), size()}
}

// gemmOperands holds the operands of a case, their product in float64, and the sums of absolute products, to
// which the allowed error is proportional.
type gemmOperands struct {
	a, b, c    Mat
	bias       []float32
	want, mass []float64
}

func (c gemmCase) operands(r *rand.Rand) *gemmOperands {
	aRows, aCols, bRows, bCols := c.m, c.k, c.k, c.n
	if c.transA {
		aRows, aCols = aCols, aRows
	}
	if c.transB {
		bRows, bCols = bCols, bRows
	}
	mat := func(rows, cols int, bf16 bool) (Mat, []float32) {
		ld := cols + r.IntN(4)
		x := randomFloats(r, rows*ld)
		if bf16 {
			return BF16(roundedBF16(x), ld), x
		}
		return F32(x, ld), x
	}
	var o gemmOperands
	var av, bv, cv []float32
	o.a, av = mat(aRows, aCols, c.aBF16)
	o.b, bv = mat(bRows, bCols, c.bBF16)
	o.c, cv = mat(c.m, c.n, c.cBF16)
	if c.bias {
		o.bias = randomFloats(r, c.n)
	}
	o.want, o.mass = make([]float64, c.m*c.n), make([]float64, c.m*c.n)
	for i := range c.m {
		for j := range c.n {
			var s, abs float64
			if c.accumulate {
				s = float64(cv[i*o.c.Ld+j])
			}
			if c.bias {
				s += float64(o.bias[j])
			}
			abs = math.Abs(s)
			for k := range c.k {
				ai, bi := i*o.a.Ld+k, k*o.b.Ld+j
				if c.transA {
					ai = k*o.a.Ld + i
				}
				if c.transB {
					bi = j*o.b.Ld + k
				}
				x := float64(av[ai]) * float64(bv[bi])
				s, abs = s+x, abs+math.Abs(x)
			}
			o.want[i*c.n+j], o.mass[i*c.n+j] = s, abs
		}
	}
	return &o
}

func checkGemm(t *testing.T, p *Pool, c gemmCase, r *rand.Rand) {
	t.Helper()
	o := c.operands(r)
	outside := append([]float32(nil), o.c.F32...)
	GemmMat(p, c.transA, c.transB, c.m, c.n, c.k, o.a, o.b, c.accumulate, o.bias, o.c)
	for i := range c.m {
		for j := range c.n {
			var got, tolerance float64
			if c.cBF16 {
				got, tolerance = float64(FromBF16(o.c.BF16[i*o.c.Ld+j])), math.Abs(o.want[i*c.n+j])/256
			} else {
				got = float64(o.c.F32[i*o.c.Ld+j])
			}
			tolerance += 2e-6*o.mass[i*c.n+j] + 1e-6
			if d := math.Abs(got - o.want[i*c.n+j]); !(d <= tolerance) {
				t.Fatalf("%+v: c[%d][%d] = %g, want %g", c, i, j, got, o.want[i*c.n+j])
			}
		}
		for j := c.n; outside != nil && j < o.c.Ld && i*o.c.Ld+j < len(outside); j++ {
			if o.c.F32[i*o.c.Ld+j] != outside[i*o.c.Ld+j] {
				t.Fatalf("%+v: wrote past column %d of row %d", c, c.n, i)
			}
		}
	}
}

func TestGemm(t *testing.T) {
	p := NewPool(3)
	defer p.Close()
	eachISA(t, func(t *testing.T) {
		r := testRand(t)
		for range rounds(120) {
			checkGemm(t, p, randomGemmCase(r), r)
		}
		checkGemm(t, p, gemmCase{m: 1, n: 1, k: 1}, r)
		checkGemm(t, p, gemmCase{m: 600, n: 65, k: 33, transB: true}, r)
		checkGemm(t, p, gemmCase{m: 9, n: 2100, k: 330, transA: true}, r)
		checkGemm(t, p, gemmCase{m: 15, n: 33, k: 0, bias: true}, r)
	})
}

// TestGemmIsTheSameForAnyThreads compares the results of one thread with those of several. It tests products whose
// parts share packed rows of a, and others.
func TestGemmIsTheSameForAnyThreads(t *testing.T) {
	eachISA(t, func(t *testing.T) {
		r := testRand(t)
		for _, shape := range [][3]int{{133, 117, 700}, {220, 320, 160}, {900, 64, 90}, {230, 330, 150}, {220, 320, 1601}} {
			m, n, k := shape[0], shape[1], shape[2]
			x, y := randomFloats(r, m*k), randomFloats(r, n*k)
			transA, lda := k == 150, k
			if transA {
				lda = m
			}
			checkGemmThreads(t, transA, m, n, k, F32(x, lda), F32(y, k))
			checkGemmThreads(t, transA, m, n, k, BF16(roundedBF16(x), lda), BF16(roundedBF16(y), k))
		}
	})
}

func checkGemmThreads(t *testing.T, transA bool, m, n, k int, a, b Mat) {
	t.Helper()
	first := make([]float32, m*n)
	for _, threads := range []int{1, 2, 3, 5} {
		p := NewPool(threads)
		c := make([]float32, m*n)
		GemmMat(p, transA, true, m, n, k, a, b, false, nil, F32(c, n))
		p.Close()
		if threads == 1 {
			copy(first, c)
			continue
		}
		for i := range c {
			if c[i] != first[i] {
				t.Fatalf("%dx%dx%d bf16=%t, %d threads: element %d is %g, with one thread %g", m, n, k, a.BF16 != nil, threads, i, c[i], first[i])
			}
		}
	}
}

func TestOpenBLAS(t *testing.T) {
	if err := UseOpenBLAS(true); err != nil {
		t.Skip(err)
	}
	defer UseOpenBLAS(false)
	p := NewPool(2)
	defer p.Close()
	r := testRand(t)
	for range rounds(60) {
		c := randomGemmCase(r)
		c.aBF16, c.bBF16, c.cBF16 = false, false, false
		checkGemm(t, p, c, r)
	}
	checkGemm(t, p, gemmCase{m: 300, n: 200, k: 20, transA: true}, r)
}

func TestGemmAllocatesNothing(t *testing.T) {
	p := NewPool(2)
	defer p.Close()
	r := testRand(t)
	const n = 128
	a, b, c := randomFloats(r, n*n), randomFloats(r, n*n), make([]float32, n*n)
	multiply := func() { Gemm(p, false, true, n, n, n, a, n, b, n, true, nil, c, n) }
	multiply()
	if allocs := testing.AllocsPerRun(100, multiply); allocs > 1 {
		t.Errorf("a product allocates %v times", allocs)
	}
}

// TestGemmFromManyCallers calls Gemm from several goroutines that share a pool, as ranks do.
func TestGemmFromManyCallers(t *testing.T) {
	p := NewPool(3)
	defer p.Close()
	var callers sync.WaitGroup
	for range 5 {
		r := testRand(t)
		callers.Go(func() {
			for range rounds(20) {
				checkGemm(t, p, gemmCase{m: 1 + r.IntN(200), n: 1 + r.IntN(260), k: 1 + r.IntN(200), transB: true, bias: true}, r)
			}
		})
	}
	callers.Wait()
}
