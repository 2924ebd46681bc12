package simd

import (
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"
)

// flushed returns x, or zero with the sign of x if x is denormal.
func flushed(x float32) float32 {
	if math.Abs(float64(x)) < 0x1p-126 {
		return float32(math.Copysign(0, float64(x)))
	}
	return x
}

// fusedBF16 returns a*b + c rounded once, for a and b in bfloat16, as the documentation of VDPBF16PS defines
// it: denormal operands and results are flushed to zero.
func fusedBF16(a, b uint16, c float32) float32 {
	product := float64(flushed(FromBF16(a))) * float64(flushed(FromBF16(b))) // exact
	x := float64(flushed(c))
	sum := product + x
	// Rounding to odd ensures that the second rounding, to float32, gives the exact sum rounded once.
	if big, small := product, x; !math.IsInf(sum, 0) && sum == sum {
		if math.Abs(big) < math.Abs(small) {
			big, small = small, big
		}
		if lost := small - (sum - big); lost != 0 && math.Float64bits(sum)&1 == 0 {
			if (lost > 0) == (sum > 0) {
				sum = math.Float64frombits(math.Float64bits(sum) + 1)
			} else {
				sum = math.Float64frombits(math.Float64bits(sum) - 1)
			}
		}
	}
	return flushed(float32(sum))
}

// gemmPairsPortable defines what gemm computes for tiles of pairs.
func gemmPairsPortable(t *tile) {
	for i := range t.rows {
		c := unsafe.Slice((*float32)(unsafe.Add(t.c, i*t.cRow)), t.cols)
		for j := range c {
			sum := float32(0)
			for k := range t.k {
				a := (*[2]uint16)(unsafe.Add(t.a, i*t.aRow+k*t.aK))
				b := (*[2]uint16)(unsafe.Add(t.b, k*t.bK+4*j))
				sum = fusedBF16(a[0], b[0], fusedBF16(a[1], b[1], sum))
			}
			if t.bias != nil {
				sum += *(*float32)(unsafe.Add(t.bias, 4*j))
			}
			if t.accumulate != 0 {
				sum += c[j]
			}
			c[j] = sum
		}
	}
}

// eachPairs runs the test on every instruction set of this machine that multiplies pairs.
func eachPairs(t *testing.T, f func(t *testing.T)) {
	any := false
	eachISA(t, func(t *testing.T) {
		if active.interleave != nil {
			any = true
			f(t)
		}
	})
	if !any {
		t.Skip("this processor does not multiply bfloat16")
	}
}

// randomBF16 returns values of various magnitudes. If wide is set, some are denormal, and some products
// overflow.
func randomBF16(r *rand.Rand, n int, wide bool) []uint16 {
	out := make([]uint16, n)
	for i := range out {
		x := r.NormFloat64() * math.Exp2(float64(r.IntN(24)-12))
		if wide {
			x = r.NormFloat64() * math.Exp2(float64(r.IntN(264)-136))
		}
		out[i] = ToBF16(float32(x))
	}
	return out
}

// TestPairProductsAreTheDefinition compares gemm with gemmPairsPortable bit by bit, for every panel height.
func TestPairProductsAreTheDefinition(t *testing.T) {
	eachPairs(t, func(t *testing.T) {
		r := testRand(t)
		for round := range rounds(200) {
			m, n, k := 1+round%45, 1+r.IntN(active.nr), 1+r.IntN(40)
			a, b := randomBF16(r, 2*m*k, round%2 == 0), randomBF16(r, 2*k*active.nr, round%2 == 0)
			c, bias := randomFloats(r, m*n), randomFloats(r, n)
			want := append([]float32(nil), c...)
			x := tile{
				a: unsafe.Pointer(&a[0]), aRow: 4 * k, aK: 4, b: unsafe.Pointer(&b[0]), bK: 4 * active.nr,
				k: k, rows: m, cols: n, cRow: 4 * n, accumulate: r.IntN(2), pairs: 1,
			}
			if r.IntN(2) == 0 {
				x.bias = unsafe.Pointer(&bias[0])
			}
			x.c = unsafe.Pointer(&want[0])
			gemmPairsPortable(&x)
			x.c = unsafe.Pointer(&c[0])
			x.noAhead()
			active.gemm(&x)
			for i := range c {
				if math.Float32bits(c[i]) != math.Float32bits(want[i]) && (c[i] == c[i] || want[i] == want[i]) {
					t.Fatalf("%dx%dx%d: element %d is %g (%x), want %g (%x)", m, n, k, i, c[i], math.Float32bits(c[i]), want[i], math.Float32bits(want[i]))
				}
			}
		}
	})
}

func TestMakingPairs(t *testing.T) {
	eachPairs(t, func(t *testing.T) {
		r := testRand(t)
		for range rounds(200) {
			rows, cols := 1+r.IntN(9), 1+r.IntN(70)
			if r.IntN(3) == 0 {
				cols = active.nr
			}
			m := BF16(randomBF16(r, rows*(cols+3), true), cols+r.IntN(4))
			at := func(i, j int) uint16 {
				if i >= rows || j >= cols {
					return 0
				}
				return m.BF16[i*m.Ld+j]
			}
			words := (cols + 1) / 2
			along, across := randomFloats(r, rows*(words+2)), randomFloats(r, (rows+1)/2*(cols+2))
			m.pairsAlong(along, words+2, rows, cols)
			m.pairsAcross(across, cols+2, rows, cols)
			for i := range rows {
				for j := range 2 * words {
					if got := halves(along)[2*i*(words+2)+j]; got != at(i, j) {
						t.Fatalf("%dx%d along: %x at %d, %d, want %x", rows, cols, got, i, j, at(i, j))
					}
				}
			}
			for i := range rows + rows%2 {
				for j := range cols {
					if got := halves(across)[2*(i/2*(cols+2)+j)+i%2]; got != at(i, j) {
						t.Fatalf("%dx%d across: %x at %d, %d, want %x", rows, cols, got, i, j, at(i, j))
					}
				}
			}
		}
	})
}
