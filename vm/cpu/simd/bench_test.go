package simd

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// The benchmarks run on two threads. Those that compare do so in one run, turn by turn, and report medians: the
// machine's speed changes more from run to run than between the things compared.

// benchPool also brings the caches of scratch up to size.
func benchPool(b *testing.B) *Pool {
	p := NewPool(2)
	b.Cleanup(p.Close)
	return p
}

func benchFloats(n int) []float32 {
	x := Alloc(n)
	for i := range x {
		x[i] = float32(i%17)*0.1 - 0.8
	}
	return x
}

// median calls f often enough to take some time and returns the median of its seconds.
func median(times []float64) float64 {
	slices.Sort(times)
	return times[len(times)/2]
}

func seconds(f func()) float64 {
	start := time.Now()
	f()
	return time.Since(start).Seconds()
}

// BenchmarkMatmulVsOpenBLAS is the floor that the cpu device promises: 0.75 of OpenBLAS on the same two cores.
func BenchmarkMatmulVsOpenBLAS(b *testing.B) {
	if err := UseOpenBLAS(true); err != nil {
		b.Skipf("nothing to compare with: %v", err)
	}
	defer UseOpenBLAS(false)
	p := benchPool(b)
	for _, n := range []int{256, 512, 1024, 2048} {
		b.Run(fmt.Sprint(n), func(b *testing.B) { compareGemm(b, p, false, false, n, n, n) })
	}
}

// compareGemm measures a product with both, at least a second and a half of it.
func compareGemm(b *testing.B, p *Pool, transA, transB bool, m, n, k int) {
	x, y, z := benchFloats(m*k), benchFloats(k*n), Alloc(m*n)
	lda, ldb := k, n
	if transA {
		lda = m
	}
	if transB {
		ldb = k
	}
	run := func(blas bool) float64 {
		if err := UseOpenBLAS(blas); err != nil {
			b.Skip(err)
		}
		return seconds(func() { Gemm(p, transA, transB, m, n, k, x, lda, y, ldb, transA, nil, z, n) })
	}
	run(true)
	run(false)
	var ours, theirs []float64
	for b.Loop() {
		for range 3 {
			ours, theirs = append(ours, run(false)), append(theirs, run(true))
		}
	}
	flops := 2e-9 * float64(m) * float64(n) * float64(k)
	mine, blas := median(ours), median(theirs)
	b.ReportMetric(flops/mine, "gflops")
	b.ReportMetric(flops/blas, "openblas_gflops")
	b.ReportMetric(blas/mine, "ratio")
	b.ReportMetric(flops/ours[0], "best_gflops")
	b.ReportMetric(flops/theirs[0], "openblas_best_gflops")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkMatmulShapes has the products of the training goals, forward, gradient of the input, gradient of the
// weight. OpenBLAS takes part where it is.
func BenchmarkMatmulShapes(b *testing.B) {
	if err := UseOpenBLAS(true); err != nil {
		b.Skipf("nothing to compare with: %v", err)
	}
	defer UseOpenBLAS(false)
	p := benchPool(b)
	for _, s := range []struct {
		name          string
		m, n, k       int
		transA, trans bool
	}{
		{"a/forward", 256, 512, 128, false, false},
		{"a/forward4", 1024, 512, 128, false, false},
		{"a/forwardx", 1024, 128, 128, false, false},
		{"a/dx", 1024, 128, 512, false, true},
		{"a/dw", 128, 512, 1024, true, false},
		{"b/forward", 256, 1536, 384, false, false},
		{"b/forward4", 1024, 1536, 384, false, false},
		{"b/dx", 1024, 384, 1536, false, true},
		{"b/dw", 384, 1536, 1024, true, false},
		{"c/forward", 64, 3072, 768, false, false},
		{"c/forward4", 256, 3072, 768, false, false},
		{"c/dx", 64, 768, 3072, false, true},
		{"c/dx4", 256, 768, 3072, false, true},
		{"c/dw", 768, 3072, 64, true, false},
		{"c/dw4", 768, 3072, 256, true, false},
		{"c/logits", 64, 50257, 768, false, true},
		{"c/dlogits", 64, 768, 50257, false, false},
		{"c/dembedding", 50257, 768, 64, true, false},
	} {
		b.Run(s.name, func(b *testing.B) { compareGemm(b, p, s.transA, s.trans, s.m, s.n, s.k) })
	}
}
