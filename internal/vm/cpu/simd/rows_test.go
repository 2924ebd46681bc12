package simd

import (
	"math"
	"math/rand/v2"
	"testing"
)

// randomMat returns a random matrix of either type.
func randomMat(r *rand.Rand, rows, cols int, bf16 bool) Mat {
	ld := cols + r.IntN(3)
	x := randomFloats(r, rows*ld)
	if bf16 {
		return BF16(roundedBF16(x), ld)
	}
	return F32(x, ld)
}

func element(m Mat, i, j int) float64 {
	if m.BF16 != nil {
		return float64(FromBF16(m.BF16[i*m.Ld+j]))
	}
	return float64(m.F32[i*m.Ld+j])
}

// checkMat compares a matrix with a function of row and column, allowing for the rounding of bfloat16.
func checkMat(t *testing.T, what string, m Mat, rows, cols int, tolerance float64, want func(i, j int) float64) {
	t.Helper()
	for i := range rows {
		for j := range cols {
			got, w := element(m, i, j), want(i, j)
			allowed := tolerance * max(1, math.Abs(w))
			if m.BF16 != nil {
				allowed += math.Abs(w) / 256
			}
			if !(math.Abs(got-w) <= allowed) {
				t.Fatalf("%s[%d][%d] = %g, want %g", what, i, j, got, w)
			}
		}
	}
}

// eachRowShape runs a test on every instruction set, with random shapes and both types.
func eachRowShape(t *testing.T, f func(t *testing.T, p *Pool, r *rand.Rand, rows, cols int, bf16 bool)) {
	p := NewPool(3)
	defer p.Close()
	eachISA(t, func(t *testing.T) {
		r := testRand(t)
		for range rounds(12) {
			rows, cols := 1+r.IntN(200), 1+r.IntN(300)
			f(t, p, r, rows, cols, r.IntN(3) == 0)
		}
	})
}

// naiveNorm returns the statistics of one row in float64, for layernorm or, if centered is false, for rmsnorm.
func naiveNorm(x Mat, i, cols int, eps float64, centered bool) (mean, rstd float64) {
	for j := range cols {
		mean += element(x, i, j) / float64(cols)
	}
	if !centered {
		mean = 0
	}
	v := 0.0
	for j := range cols {
		d := element(x, i, j) - mean
		v += d * d / float64(cols)
	}
	return mean, 1 / math.Sqrt(v+eps)
}

func TestNorms(t *testing.T) {
	eachRowShape(t, func(t *testing.T, p *Pool, r *rand.Rand, rows, cols int, bf16 bool) {
		cols += 7 // a row with few columns may have almost no variance
		const eps = 1e-5
		for _, centered := range []bool{true, false} {
			x, y, dy, dx := randomMat(r, rows, cols, bf16), randomMat(r, rows, cols, bf16), randomMat(r, rows, cols, bf16), randomMat(r, rows, cols, bf16)
			gamma, beta := randomFloats(r, cols), randomFloats(r, cols)
			dgamma, dbeta := randomFloats(r, cols), randomFloats(r, cols)
			wantG, wantB := doubles(dgamma), doubles(dbeta)
			mean, rstd := make([]float32, rows), make([]float32, rows)
			dxBefore := values(Mat{F32: append([]float32(nil), dx.F32...), BF16: append([]uint16(nil), dx.BF16...), Ld: dx.Ld})
			accumulate := r.IntN(2) == 0
			if centered {
				LayerNorm(p, y, mean, rstd, x, gamma, beta, rows, cols, eps)
				LayerNormBackward(p, dx, dgamma, dbeta, dy, x, mean, rstd, gamma, rows, cols, accumulate)
			} else {
				clear(beta)
				RMSNorm(p, y, rstd, x, gamma, rows, cols, eps)
				RMSNormBackward(p, dx, dgamma, dy, x, rstd, gamma, rows, cols, accumulate)
			}
			wantDX := make([]float64, rows*cols)
			for i := range rows {
				mu, rs := naiveNorm(x, i, cols, eps, centered)
				h := func(j int) float64 { return (element(x, i, j) - mu) * rs }
				checkMat(t, "y", y.at(i, 0), 1, cols, 4e-5, func(_, j int) float64 { return h(j)*float64(gamma[j]) + float64(beta[j]) })
				var g, gx float64
				for j := range cols {
					d := element(dy, i, j)
					wantG[j] += d * h(j)
					wantB[j] += d
					g += d * float64(gamma[j]) / float64(cols)
					gx += d * float64(gamma[j]) * h(j) / float64(cols)
				}
				if !centered {
					g = 0
				}
				for j := range cols {
					wantDX[i*cols+j] = rs * (element(dy, i, j)*float64(gamma[j]) - g - h(j)*gx)
					if accumulate {
						wantDX[i*cols+j] += float64(dxBefore[i*dx.Ld+j])
					}
				}
			}
			checkMat(t, "dx", dx, rows, cols, 2e-3, func(i, j int) float64 { return wantDX[i*cols+j] })
			checkNorm(t, "dx", flat(dx, rows, cols), wantDX, map[bool]float64{false: 1e-5, true: 4e-3}[bf16])
			checkNorm(t, "dgamma", dgamma, wantG, 1e-5)
			if centered {
				checkNorm(t, "dbeta", dbeta, wantB, 1e-5)
			}
		}
	})
}

// flat copies a matrix without the gaps between its rows.
func flat(m Mat, rows, cols int) []float32 {
	x := make([]float32, rows*cols)
	m.load(x, cols, rows, cols)
	return x
}

func TestColumnSums(t *testing.T) {
	eachRowShape(t, func(t *testing.T, p *Pool, r *rand.Rand, rows, cols int, bf16 bool) {
		x, dst := randomMat(r, rows, cols, bf16), randomFloats(r, cols)
		before, accumulate := doubles(dst), r.IntN(2) == 0
		ColumnSums(p, dst, x, rows, cols, accumulate)
		checkMat(t, "sum", F32(dst, cols), 1, cols, 1e-5, func(_, j int) (s float64) {
			if accumulate {
				s = before[j]
			}
			for i := range rows {
				s += element(x, i, j)
			}
			return s
		})
	})
}

func TestCrossEntropyRows(t *testing.T) {
	eachRowShape(t, func(t *testing.T, p *Pool, r *rand.Rand, rows, cols int, bf16 bool) {
		if r.IntN(3) == 0 {
			cols += 9000 // more than one block
			rows = 1 + rows%8
		}
		x := randomMat(r, rows, cols, bf16)
		before := doubles(values(x))
		top, sum, target := make([]float32, rows), make([]float32, rows), make([]int32, rows)
		for i := range target {
			target[i] = int32(r.IntN(cols+2) - 1)
		}
		RowMax(p, top, x, rows, cols)
		RowSumExp(p, sum, x, top, rows, cols)
		SoftmaxGradient(p, x, top, sum, target, 0.25, rows, cols)
		for i := range rows {
			row := before[i*x.Ld : i*x.Ld+cols]
			m, s := math.Inf(-1), 0.0
			for _, v := range row {
				m = max(m, v)
			}
			for _, v := range row {
				s += math.Exp(v - m)
			}
			if float64(top[i]) != m || math.Abs(float64(sum[i])-s) > 1e-6*s {
				t.Fatalf("row %d has maximum %g, sum %g, want %g, %g", i, top[i], sum[i], m, s)
			}
			checkMat(t, "gradient", x.at(i, 0), 1, cols, 1e-7, func(_, j int) float64 {
				g := math.Exp(row[j]-m) / s
				if j == int(target[i]) {
					g--
				}
				return g * 0.25
			})
		}
	})
}

func TestMap(t *testing.T) {
	eachRowShape(t, func(t *testing.T, p *Pool, r *rand.Rand, rows, cols int, bf16 bool) {
		a, b, c := randomMat(r, rows, cols, bf16), randomMat(r, rows, cols, !bf16), randomMat(r, rows, cols, bf16)
		Map(p, rows, cols, []Mat{c}, []Mat{a, b}, func(out, in [][]float32) { Add(out[0], in[0], in[1]) })
		checkMat(t, "a+b", c, rows, cols, 1e-6, func(i, j int) float64 { return element(a, i, j) + element(b, i, j) })
	})
}

func TestSumSquares(t *testing.T) {
	r := testRand(t)
	for _, n := range []int{0, 1, 4096, 100001} {
		x, want := randomFloats(r, n), 0.0
		for _, v := range x {
			want += float64(v) * float64(v)
		}
		one := NewPool(1)
		first := SumSquares(one, x)
		for _, threads := range []int{2, 5} {
			p := NewPool(threads)
			if got := SumSquares(p, x); got != first {
				t.Errorf("%d threads give %g, one gives %g", threads, got, first)
			}
			p.Close()
		}
		if math.Abs(first-want) > 1e-6*want {
			t.Errorf("sum of squares of %d is %g, want %g", n, first, want)
		}
	}
}

// TestAdamWIsTheSameEverywhere compares the results of every instruction set, on one thread and on three, with
// the portable result, bit by bit.
func TestAdamWIsTheSameEverywhere(t *testing.T) {
	r := testRand(t)
	const n = 3*elementGrain + 77
	start := [][]float32{randomFloats(r, n), randomFloats(r, n), randomFloats(r, n), randomFloats(r, n)}
	for i, v := range start[2] {
		start[2][i] = v * v
	}
	step := AdamWStep{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: 0.1, GradScale: 0.7, Correction1: 3, Correction2: 7}
	update := func(threads int) []float32 {
		p := NewPool(threads)
		defer p.Close()
		x := make([][]float32, len(start))
		for i := range x {
			x[i] = append([]float32(nil), start[i]...)
		}
		AdamW(p, x[0], x[1], x[2], x[3], step)
		return append(append(x[0], x[1]...), x[2]...)
	}
	was := active
	defer func() { active = was }()
	active = &portable
	want := update(1)
	for _, active = range kernelSets {
		for _, threads := range []int{1, 3} {
			checkClose(t, active.name+" adamw", update(threads), want, 0, 0)
		}
	}
}
