package naive

import (
	"math"
	"slices"
	"testing"
)

// The values in these tables were computed by hand from the operations' definitions.
func TestKnownValues(t *testing.T) {
	for _, c := range []struct {
		name      string
		got, want []float64
	}{
		// The mean is 3 and the variance, without Bessel's correction, 5; with eps 4 the deviation is sqrt(5+4)
		// = 3.
		{"layernorm", LayerNorm([]float64{0, 2, 4, 6}, []float64{1, 3, 1, 1}, []float64{0, 0, 7, 0}, 4),
			[]float64{-1, -1, 7 + 1.0/3, 1}},
		{"rmsnorm", RMSNorm([]float64{1, 7, 0, 0}, []float64{1, 2}, 11), []float64{1 / 6.0, 14 / 6.0, 0, 0}},
		{"gelu_tanh", Activate("gelu_tanh", []float64{0, 1, -1, 10}), []float64{0, 0.8411919906082768, -0.15880800939172324, 10}},
		{"gelu", Activate("gelu", []float64{0, 1, -1, 10}), []float64{0, 0.8413447460685429, -0.15865525393145707, 10}},
		{"relu2", Activate("relu2", []float64{0, 1.5, -1}), []float64{0, 2.25, 0}},
		{"swiglu", GLU("silu", []float64{0, math.Log(3)}, []float64{5, 2}), []float64{0, math.Log(3) * 0.75 * 2}},
		{"softcap", Softcap([]float64{0, 2 * math.Atanh(0.5)}, 2), []float64{0, 1}},
		{"embed", Embed([]float64{1, 2, 3, 4}, []int32{8, 7, 9, 6}, 2, 7), []float64{3, 4, 1, 2, 0, 0, 0, 0}},
		// Two heads of 4 values. After a prefix of 1, token 1 is at position 2; theta 4 halves the angle of the
		// second pair.
		{"rope", Rope([]float64{9, 9, 9, 9, 1, 0, 0, 0, 1, 2, 0, 0, 0, 1, 0, 0}, 1, 2, 4, 1, Rotation{Rates: Rates(4, 4), Scale: 1, Rest: 1})[8:],
			[]float64{math.Cos(2), 2 * math.Cos(1), math.Sin(2), 2 * math.Sin(1), 0, math.Cos(1), 0, math.Sin(1)}},
		{"matmul", MatMul([]float64{1, 2, 3, 4, 5, 6}, []float64{1, 0, 2, 1, 0, 3}, []float64{10, 20}, 2, 2, 3, false, false),
			[]float64{15, 31, 24, 43}},
		{"numeric", NumericGrad(func(x []float64) float64 { return x[0] * x[0] * x[1] }, []float64{3, 1}), []float64{6, 9}},
	} {
		wantClose(t, c.name, c.got, c.want, 1e-12)
	}
	// One head of 4 values, so products are halved: query 1 has scores 0 and 2*log(3)/2 = log(3), and weights
	// 1/4 and 3/4.
	q, k := []float64{1, 0, 0, 0, 2, 0, 0, 0}, []float64{0, 0, 0, 0, math.Log(3), 0, 0, 0}
	out, lse := Attention(q, k, []float64{4, 0, 0, 0, 0, 4, 0, 0}, AttentionShape{Queries: 2, Batch: 1, Heads: 1, KVHeads: 1, HeadDim: 4})
	wantClose(t, "attention", out, []float64{4, 0, 0, 0, 1, 3, 0, 0}, 1e-15)
	wantClose(t, "logsumexp", lse, []float64{0, math.Log(4)}, 1e-15)

	// A single token attends only to itself, so the output of each head is the value that it reads. Pairs of
	// adjacent heads share a value.
	out, _ = Attention([]float64{1, 2, 3, 4}, []float64{5, 6}, []float64{7, 8}, AttentionShape{Queries: 1, Batch: 1, Heads: 4, KVHeads: 2, HeadDim: 1})
	wantClose(t, "head groups", out, []float64{7, 7, 8, 8}, 1e-15)

	// Softmax of log(1), log(2), log(5) is 1/8, 2/8, 5/8.
	logits, labels := []float64{0, math.Log(2), math.Log(5)}, []int32{1}
	losses, sums := CrossEntropy(logits, labels, 3)
	wantClose(t, "cross entropy", []float64{losses[0], sums[0]}, []float64{math.Log(4), math.Log(8)}, 1e-15)
	wantClose(t, "cross entropy gradient", CrossEntropyGrad(logits, labels, sums, 3, 3, 0, 2),
		[]float64{0.25, -1.5, 1.25}, 1e-15)
	huge, _ := CrossEntropy([]float64{1000, 1000}, []int32{0}, 2)
	wantClose(t, "cross entropy of huge logits", huge, []float64{math.Ln2}, 1e-12)
}

func TestMatMulTransposes(t *testing.T) {
	r := newRand(t)
	const m, n, k = 2, 3, 4
	a, b := normals(r, m*k, 0, 1), normals(r, k*n, 0, 1)
	want := MatMul(a, b, nil, m, n, k, false, false)
	at, bt := transpose(a, m, k), transpose(b, k, n)
	wantClose(t, "trans a", MatMul(at, b, nil, m, n, k, true, false), want, 1e-15)
	wantClose(t, "trans b", MatMul(a, bt, nil, m, n, k, false, true), want, 1e-15)
	wantClose(t, "trans both", MatMul(at, bt, nil, m, n, k, true, true), want, 1e-15)
}

func transpose(x []float64, rows, columns int) []float64 {
	y := make([]float64, len(x))
	for i, value := range x {
		y[i%columns*rows+i/columns] = value
	}
	return y
}

// TestAttentionPrefix checks that queries after a prefix have the same results as in the whole sequence.
func TestAttentionPrefix(t *testing.T) {
	r := newRand(t)
	whole := AttentionShape{Queries: 7, Batch: 2, Heads: 4, KVHeads: 2, HeadDim: 3}
	part := whole
	part.Prefix, part.Queries = 4, 3
	q, k, v := attentionInputs(r.NormFloat64, whole)
	out, lse := Attention(q, k, v, whole)
	cut := part.Prefix * part.Batch * part.Heads
	gotOut, gotLSE := Attention(q[cut*part.HeadDim:], k, v, part)
	if !slices.Equal(gotOut, out[cut*part.HeadDim:]) || !slices.Equal(gotLSE, lse[cut:]) {
		t.Errorf("seed %d: attention after a prefix differs from the same rows of the whole", seed)
	}
}

func attentionInputs(normal func() float64, s AttentionShape) (q, k, v []float64) {
	q = make([]float64, s.Queries*s.Batch*s.Heads*s.HeadDim)
	k = make([]float64, (s.Prefix+s.Queries)*s.Batch*s.KVHeads*s.HeadDim)
	v = make([]float64, len(k))
	for _, x := range [][]float64{q, k, v} {
		for i := range x {
			x[i] = normal()
		}
	}
	return q, k, v
}

// TestVocabularyParts checks that the results for the parts of a vocabulary, of which one is partly and one is
// entirely padding, join to those for the whole vocabulary.
func TestVocabularyParts(t *testing.T) {
	r := newRand(t)
	const vocab, width, rows = 7, 4, 3
	labels := []int32{2, 6, 4}
	logits := normals(r, rows*vocab, 0, 2)
	losses, lse := CrossEntropy(logits, labels, vocab)
	dlogits := CrossEntropyGrad(logits, labels, lse, vocab, vocab, 0, 0.5)
	var stats []float64
	for first := 0; first < 3*width; first += width {
		valid := max(0, min(width, vocab-first))
		part, want := make([]float64, rows*width), make([]float64, rows*width)
		for i := range part {
			part[i] = 100 // the contents of padding must not matter
			if i%width < valid {
				part[i] = logits[i/width*vocab+first+i%width]
				want[i] = dlogits[i/width*vocab+first+i%width]
			}
		}
		stats = append(stats, CrossEntropyStats(part, labels, width, valid, first)...)
		wantClose(t, "dlogits", CrossEntropyGrad(part, labels, lse, width, valid, first, 0.5), want, 1e-15)
	}
	gotLosses, gotLSE := CrossEntropyJoin(stats, rows)
	wantClose(t, "losses", gotLosses, losses, 1e-14)
	wantClose(t, "lse", gotLSE, lse, 1e-14)
}

// TestGradientsOfOperations compares the gradients of a random weighted sum of each operation's outputs, with
// respect to each input, with numerical gradients.
func TestGradientsOfOperations(t *testing.T) {
	r := newRand(t)
	random := func(n int) []float64 { return normals(r, n, 0.3, 1) }
	check := func(what string, got, at, weigh []float64, op func(x []float64) []float64) {
		t.Helper()
		wantClose(t, what, got, NumericGrad(func(x []float64) float64 {
			sum := 0.0
			for i, y := range op(x) {
				sum += weigh[i] * y
			}
			return sum
		}, at), 1e-8)
	}
	x, gamma, beta, dy := random(15), random(5), random(5), random(15)
	dx, dgamma, dbeta := LayerNormGrad(x, gamma, dy, 0.01)
	check("layernorm x", dx, x, dy, func(x []float64) []float64 { return LayerNorm(x, gamma, beta, 0.01) })
	check("layernorm gamma", dgamma, gamma, dy, func(g []float64) []float64 { return LayerNorm(x, g, beta, 0.01) })
	check("layernorm beta", dbeta, beta, dy, func(b []float64) []float64 { return LayerNorm(x, gamma, b, 0.01) })
	dx, dgamma = RMSNormGrad(x, gamma, dy, 0.01)
	check("rmsnorm x", dx, x, dy, func(x []float64) []float64 { return RMSNorm(x, gamma, 0.01) })
	check("rmsnorm gamma", dgamma, gamma, dy, func(g []float64) []float64 { return RMSNorm(x, g, 0.01) })
	up := random(15)
	for f := range functions {
		check(f, ActivateGrad(f, x, dy), x, dy, func(x []float64) []float64 { return Activate(f, x) })
		dgate, dup := GLUGrad(f, x, up, dy)
		check(f+" gate", dgate, x, dy, func(g []float64) []float64 { return GLU(f, g, up) })
		check(f+" up", dup, up, dy, func(u []float64) []float64 { return GLU(f, x, u) })
	}
	check("softcap", SoftcapGrad(Softcap(x, 1.5), dy, 1.5), x, dy, func(x []float64) []float64 { return Softcap(x, 1.5) })

	x, dy = random(2*3*2*4), random(2*3*2*4)
	for _, turn := range []Rotation{{Rates: Rates(4, 50), Scale: 1, Rest: 1}, {Rates: []float64{0.3}, Scale: 1.25, Rest: 0.5, Beta: 0.4, Period: 6}} {
		check("rope", RopeGrad(dy, 3, 2, 4, 5, turn), x, dy, func(x []float64) []float64 { return Rope(x, 3, 2, 4, 5, turn) })
	}
	table, tokens := random(4*3), []int32{5, 3, 9, 5, 8}
	dy = random(len(tokens) * 3)
	check("embed", EmbedGrad(tokens, dy, 3, 5, 4), table, dy, func(x []float64) []float64 { return Embed(x, tokens, 3, 5) })

	s := AttentionShape{Queries: 3, Prefix: 2, Batch: 2, Heads: 4, KVHeads: 2, HeadDim: 3, Softcap: 0.7}
	q, k, v := attentionInputs(r.NormFloat64, s)
	dout := random(len(q))
	sinks := random(s.Heads)
	results := func(q, k, v, sinks []float64) (out, lse []float64) {
		out, lse = Attention(q, k, v, s)
		return AttentionSink(out, lse, sinks, s.HeadDim)
	}
	attend := func(q, k, v []float64) []float64 { out, _ := results(q, k, v, sinks); return out }
	out, sunk := results(q, k, v, sinks)
	dq, dk, dv := AttentionGrad(q, k, v, out, sunk, dout, s)
	check("attention q", dq, q, dout, func(q []float64) []float64 { return attend(q, k, v) })
	check("attention k", dk, k, dout, func(k []float64) []float64 { return attend(q, k, v) })
	check("attention v", dv, v, dout, func(v []float64) []float64 { return attend(q, k, v) })

	check("attention sinks", AttentionSinkGrad(out, sunk, sinks, dout, s.HeadDim), sinks, dout,
		func(sinks []float64) []float64 { out, _ := results(q, k, v, sinks); return out })

	logits, labels := random(3*5), []int32{4, 0, 2}
	_, lse := CrossEntropy(logits, labels, 5)
	check("cross entropy", CrossEntropyGrad(logits, labels, lse, 5, 5, 0, 0.7), logits, []float64{0.7, 0.7, 0.7},
		func(x []float64) []float64 { losses, _ := CrossEntropy(x, labels, 5); return losses })
}
