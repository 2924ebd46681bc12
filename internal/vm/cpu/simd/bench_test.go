package simd

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// The benchmarks run on two threads. Comparisons alternate between the functions within one run, and report
// medians or best times, because the machine's speed varies more between runs than between the compared
// functions.

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

// median sorts times and returns their median.
func median(times []float64) float64 {
	slices.Sort(times)
	return times[len(times)/2]
}

func seconds(f func()) float64 {
	start := time.Now()
	f()
	return time.Since(start).Seconds()
}

// BenchmarkMatmulVsOpenBLAS measures the speed relative to that of OpenBLAS on the same two cores. The ratio must
// be at least 0.75.
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

// compareGemm measures a product, alternating between the two implementations.
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

// BenchmarkMatmulShapes compares Gemm with OpenBLAS for the products of the training goals: forward pass, gradient
// of the input and gradient of the weight.
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

// BenchmarkPairs compares bfloat16 products and attention computed in pairs with the same operations computed
// in float32. The two alternate, and the best times are reported.
func BenchmarkPairs(b *testing.B) {
	if active.interleave == nil {
		b.Skip("this processor does not multiply bfloat16")
	}
	p := benchPool(b)
	half := func(n int) []uint16 { x := make([]uint16, n); Narrow(x, benchFloats(n)); return x }
	for _, s := range []struct {
		name           string
		m, n, k        int
		transA, transB bool
	}{
		{"forward", 1024, 1536, 384, false, false},
		{"dx", 1024, 384, 1536, false, true},
		{"dw", 384, 1536, 1024, true, false},
		{"logits", 256, 50257, 768, false, true},
		{"dlogits", 256, 768, 50257, false, false},
		{"dembedding", 50257, 768, 256, true, false},
	} {
		lda, ldb := s.k, s.n
		if s.transA {
			lda = s.m
		}
		if s.transB {
			ldb = s.k
		}
		x, y, z := BF16(half(s.m*s.k), lda), BF16(half(s.k*s.n), ldb), F32(Alloc(s.m*s.n), s.n)
		b.Run(s.name, func(b *testing.B) {
			comparePairs(b, 2e-9*float64(s.m)*float64(s.n)*float64(s.k), func() {
				GemmMat(p, s.transA, s.transB, s.m, s.n, s.k, x, y, false, nil, z)
			})
		})
	}
	for _, a := range []Attention{
		{Tokens: 256, Batch: 4, Heads: 6, KVHeads: 6, HeadDim: 64},
		{Tokens: 2048, Batch: 1, Heads: 4, KVHeads: 4, HeadDim: 32},
		{Tokens: 512, Prefix: 3584, Batch: 1, Heads: 4, KVHeads: 1, HeadDim: 128},
	} {
		a.Keys = a.Prefix + a.Tokens
		a.Window = a.Keys
		ld, kvLd, keys := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim, a.Keys*a.Batch
		query := func() Mat { return BF16(half(a.Tokens*a.Batch*ld), ld) }
		q, o, dq, dout, k, v := query(), query(), query(), query(), BF16(half(keys*kvLd), kvLd), BF16(half(keys*kvLd), kvLd)
		dk, dv, lse := F32(Alloc(keys*kvLd), kvLd), F32(Alloc(keys*kvLd), kvLd), make([]float32, a.Tokens*a.Batch*a.Heads)
		pairs := float64(a.Tokens) * (float64(a.Prefix) + float64(a.Tokens+1)/2) * float64(a.Batch*a.Heads*a.HeadDim)
		name := fmt.Sprintf("%dx%dx%dx%d", a.Keys, a.Batch, a.Heads, a.HeadDim)
		b.Run(name+"/forward", func(b *testing.B) {
			comparePairs(b, 4e-9*pairs, func() { a.Forward(p, o, lse, false, q, k, v) })
		})
		b.Run(name+"/backward", func(b *testing.B) {
			comparePairs(b, 10e-9*pairs, func() {
				a.Backward(p, AttentionGrads{DQ: dq, DK: dk, DV: dv, DOut: dout, Q: q, K: k, V: v, O: o, LSE: lse})
			})
		})
	}
}

func comparePairs(b *testing.B, gflops float64, f func()) {
	with := active
	without := *active
	without.interleave = nil
	defer func() { active = with }()
	var best [2]float64
	for b.Loop() {
		for i, k := range []*kernelSet{with, &without} {
			active = k
			f()
			for range 5 {
				if took := seconds(f); best[i] == 0 || took < best[i] {
					best[i] = took
				}
			}
		}
	}
	b.ReportMetric(gflops/best[0], "gflops")
	b.ReportMetric(gflops/best[1], "float32_gflops")
	b.ReportMetric(best[1]/best[0], "ratio")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkVector measures the serial primitives and AdamW on operands larger than the second-level cache.
func BenchmarkVector(b *testing.B) {
	const n = 1 << 20
	p := benchPool(b)
	x, y, z, u, v := benchFloats(n), benchFloats(n), benchFloats(n), Alloc(n), Alloc(n)
	h := make([]uint16, n)
	for _, c := range []struct {
		name    string
		streams int // number of float32 operands that pass through memory
		f       func(lo, hi int)
	}{
		{"add", 3, func(lo, hi int) { Add(u[lo:hi], x[lo:hi], y[lo:hi]) }},
		{"axpy", 3, func(lo, hi int) { Axpy(u[lo:hi], x[lo:hi], 0.5) }},
		{"fill", 1, func(lo, hi int) { Fill(u[lo:hi], 0) }},
		{"gelu", 2, func(lo, hi int) { Gelu(u[lo:hi], x[lo:hi]) }},
		{"geluBackward", 3, func(lo, hi int) { GeluBackward(u[lo:hi], x[lo:hi], y[lo:hi]) }},
		{"swiglu", 3, func(lo, hi int) { SwiGLU(u[lo:hi], x[lo:hi], y[lo:hi]) }},
		{"swigluBackward", 5, func(lo, hi int) { SwiGLUBackward(u[lo:hi], v[lo:hi], x[lo:hi], y[lo:hi], z[lo:hi]) }},
		{"sumExp", 1, func(lo, hi int) { active.sumExp(x[lo:hi], 1) }},
		{"max", 1, func(lo, hi int) { active.max(x[lo:hi]) }},
		{"narrow", 2, func(lo, hi int) { Narrow(h[lo:hi], x[lo:hi]) }},
		{"widen", 2, func(lo, hi int) { Widen(u[lo:hi], h[lo:hi]) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				p.Split(n, elementGrain, c.f)
			}
			report(b, 4*n*c.streams, n)
		})
	}
	step := AdamWStep{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: 0.1, GradScale: 1, Correction1: 5, Correction2: 10}
	b.Run("adamw", func(b *testing.B) {
		for b.Loop() {
			AdamW(p, x, u, v, y, step)
		}
		report(b, 28*n, n)
	})
	b.Run("sumSquares", func(b *testing.B) {
		for b.Loop() {
			SumSquares(p, x)
		}
		report(b, 4*n, n)
	})
}

// report reports the bytes moved per second and the time per element.
func report(b *testing.B, bytes, elements int) {
	each := b.Elapsed().Seconds() / float64(b.N)
	b.ReportMetric(float64(bytes)/each/1e9, "GB/s")
	b.ReportMetric(each/float64(elements)*1e9, "ns/element")
}

// BenchmarkRows measures the row operations: on 1024 rows of 768 elements, or on 64 rows of logits for a
// vocabulary of GPT-2's size.
func BenchmarkRows(b *testing.B) {
	const rows, cols, vocabulary, tokens = 1024, 768, 50257, 64
	p := benchPool(b)
	x, y, z := F32(benchFloats(rows*cols), cols), F32(benchFloats(rows*cols), cols), F32(Alloc(rows*cols), cols)
	gamma, beta, dgamma, dbeta := benchFloats(cols), benchFloats(cols), Alloc(cols), Alloc(cols)
	mean, rstd := make([]float32, rows), make([]float32, rows)
	logits, target := F32(benchFloats(tokens*vocabulary), vocabulary), make([]int32, tokens)
	for _, c := range []struct {
		name     string
		elements int
		streams  int
		f        func()
	}{
		{"layerNorm", rows * cols, 2, func() { LayerNorm(p, z, mean, rstd, x, gamma, beta, rows, cols, 1e-5) }},
		{"layerNormBackward", rows * cols, 3, func() { LayerNormBackward(p, z, dgamma, dbeta, y, x, mean, rstd, gamma, rows, cols, false) }},
		{"rmsNorm", rows * cols, 2, func() { RMSNorm(p, z, rstd, x, gamma, rows, cols, 1e-5) }},
		{"rmsNormBackward", rows * cols, 3, func() { RMSNormBackward(p, z, dgamma, y, x, rstd, gamma, rows, cols, false) }},
		{"columnSums", rows * cols, 1, func() { ColumnSums(p, dbeta, x, rows, cols, true) }},
		{"rowMax", tokens * vocabulary, 1, func() { RowMax(p, mean, logits, tokens, vocabulary) }},
		{"rowSumExp", tokens * vocabulary, 1, func() { RowSumExp(p, rstd, logits, mean, tokens, vocabulary) }},
		{"softmaxGradient", tokens * vocabulary, 2, func() { SoftmaxGradient(p, logits, mean, rstd, target, 1e-3, tokens, vocabulary) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				c.f()
			}
			report(b, 4*c.elements*c.streams, c.elements)
		})
	}
}

// BenchmarkAttention reports operations per second. For each element of a head, it counts 4 operations per
// query and visible key in the forward pass, and 10 in the backward pass.
func BenchmarkAttention(b *testing.B) {
	p := benchPool(b)
	for _, a := range []Attention{
		{Tokens: 256, Batch: 4, Heads: 4, KVHeads: 4, HeadDim: 32},
		{Tokens: 256, Batch: 4, Heads: 6, KVHeads: 6, HeadDim: 64},
		{Tokens: 64, Batch: 4, Heads: 12, KVHeads: 12, HeadDim: 64},
		{Tokens: 512, Prefix: 3584, Batch: 1, Heads: 4, KVHeads: 1, HeadDim: 128},
	} {
		a.Keys = a.Prefix + a.Tokens
		a.Window = a.Keys
		name := fmt.Sprintf("%dx%dx%dx%d", a.Keys, a.Batch, a.Heads, a.HeadDim)
		ld, kvLd, keys := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim, a.Keys*a.Batch
		query := func() Mat { return F32(benchFloats(a.Tokens*a.Batch*ld), ld) }
		key := func() Mat { return F32(benchFloats(keys*kvLd), kvLd) }
		q, o, dq, dout, k, v, dk, dv := query(), query(), query(), query(), key(), key(), key(), key()
		lse := make([]float32, a.Tokens*a.Batch*a.Heads)
		pairs := float64(a.Tokens) * (float64(a.Prefix) + float64(a.Tokens+1)/2) * float64(a.Batch*a.Heads*a.HeadDim)
		b.Run(name+"/forward", func(b *testing.B) {
			for b.Loop() {
				a.Forward(p, o, lse, false, q, k, v)
			}
			b.ReportMetric(4e-9*pairs*float64(b.N)/b.Elapsed().Seconds(), "gflops")
		})
		b.Run(name+"/backward", func(b *testing.B) {
			for b.Loop() {
				a.Backward(p, AttentionGrads{DQ: dq, DK: dk, DV: dv, DOut: dout, Q: q, K: k, V: v, O: o, LSE: lse})
			}
			b.ReportMetric(10e-9*pairs*float64(b.N)/b.Elapsed().Seconds(), "gflops")
		})
	}
}

// BenchmarkScanVsTransformers compares the scan of a layer with two heads of v for each of q and k, at 8,192 tokens, with the path
// that transformers takes on the CPU. The ratios must be at least 1.5.
func BenchmarkScanVsTransformers(b *testing.B) {
	const heads, shared, dim = 2, 2, 128
	peer, p := startPeer(b, "2"), benchPool(b)
	a := Scan{Tokens: 8192, Batch: 1, Heads: heads, Shared: shared, KeyDim: dim, ValueDim: dim, Channels: 1, Delta: true, Norm: 1e-6, Scale: 0.088}
	x := drawScan(rand.New(rand.NewPCG(1, 2)), a, 0.5)
	x.State = make([]float32, len(x.State))
	out := a.both(p, x)
	var forward, both, times []float64
	for range b.N {
		var theirs [2]float64
		peer.ask(b, map[string]any{"time": []int{a.Tokens, heads, shared, dim}}, &theirs)
		own := seconds(func() { a.Forward(p, F32(out["o"], heads*shared*dim), out["next"], x.ScanOperands) })
		grads := seconds(func() { a.grads(p, x, out) })
		forward, both, times = append(forward, theirs[0]/own), append(both, theirs[1]/(own+grads)), append(times, own+grads)
	}
	b.ReportMetric(median(forward), "forward-ratio")
	b.ReportMetric(median(both), "ratio")
	b.ReportMetric(median(times), "s/scan")
}
