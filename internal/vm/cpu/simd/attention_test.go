package simd

import (
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
)

// naiveAttention computes attention and its gradients in float64, directly from the definition.
type naiveAttention struct {
	Attention
	q, k, v, dout  []float64
	o, lse         []float64
	dq, dk, dv     []float64
	probs, dscores []float64
	slopes         []float64
	terms          float64 // sum of squared terms of dq and dk, with |a|+|b| for every difference a-b
	// Bounds on rounding errors; see roundings.
	delta                             []float64
	oBound, dqBound, dkBound, dvBound []float64
}

func (a *naiveAttention) qAt(t, b, h int) int { return ((t*a.Batch+b)*a.Heads + h) * a.HeadDim }

func (a *naiveAttention) kAt(t, b, h int) int {
	return ((t*a.Batch+b)*a.KVHeads + h/(a.Heads/a.KVHeads)) * a.HeadDim
}

// oAt and vAt return the same for o and values.
func (a *naiveAttention) oAt(t, b, h int) int { return a.qAt(t, b, h) / a.HeadDim * a.values() }
func (a *naiveAttention) vAt(t, b, h int) int { return a.kAt(t, b, h) / a.HeadDim * a.values() }

func (a *naiveAttention) run() {
	a.o, a.dq = make([]float64, len(a.dout)), make([]float64, len(a.q))
	a.dk, a.dv = make([]float64, len(a.k)), make([]float64, len(a.v))
	a.oBound, a.dqBound = make([]float64, len(a.dout)), make([]float64, len(a.q))
	a.dkBound, a.dvBound = make([]float64, len(a.k)), make([]float64, len(a.v))
	a.lse, a.delta = make([]float64, a.Tokens*a.Batch*a.Heads), make([]float64, a.Tokens*a.Batch*a.Heads)
	a.probs, a.dscores, a.slopes = make([]float64, a.Keys), make([]float64, a.Keys), make([]float64, a.Keys)
	for t := range a.Tokens {
		for b := range a.Batch {
			for h := range a.Heads {
				a.row(t, b, h)
			}
		}
	}
}

func (a *naiveAttention) row(t, b, h int) {
	first, seen, qi, oi := max(0, a.Prefix+t-a.Window+1), min(a.Keys, a.Prefix+t+1), a.qAt(t, b, h), a.oAt(t, b, h)
	scale := 1 / math.Sqrt(float64(a.HeadDim))
	inner := func(x, y []float64) (s float64) {
		for i := range x {
			s += x[i] * y[i]
		}
		return s
	}
	sum := 0.0
	for j := first; j < seen; j++ {
		score := inner(a.q[qi:qi+a.HeadDim], a.k[a.kAt(j, b, h):]) * scale
		a.slopes[j] = scale
		if limit := float64(a.Softcap); limit > 0 {
			y := math.Tanh(score / limit)
			score, a.slopes[j] = limit*y, scale*(1-y*y)
		}
		a.probs[j] = math.Exp(score)
		sum += a.probs[j]
	}
	a.lse[(t*a.Batch+b)*a.Heads+h] = math.Log(sum)
	mean := 0.0
	for j := first; j < seen; j++ {
		a.probs[j] /= sum
		for i := range a.values() {
			a.o[oi+i] += a.probs[j] * a.v[a.vAt(j, b, h)+i]
		}
		a.dscores[j] = inner(a.dout[oi:oi+a.values()], a.v[a.vAt(j, b, h):])
		mean += a.probs[j] * a.dscores[j]
	}
	a.delta[(t*a.Batch+b)*a.Heads+h] = mean
	for j := first; j < seen; j++ {
		d, ki := a.probs[j]*(a.dscores[j]-mean)*a.slopes[j], a.kAt(j, b, h)
		of := a.probs[j] * (math.Abs(a.dscores[j]) + math.Abs(mean)) * a.slopes[j]
		for i := range a.HeadDim {
			a.terms += of * of * (a.k[ki+i]*a.k[ki+i] + a.q[qi+i]*a.q[qi+i])
			a.dq[qi+i] += d * a.k[ki+i]
			a.dk[ki+i] += d * a.q[qi+i]
		}
		for i := range a.values() {
			a.dv[a.vAt(j, b, h)+i] += a.probs[j] * a.dout[oi+i]
		}
		a.roundings(qi, ki, oi, a.vAt(j, b, h), a.probs[j], of)
	}
}

// roundings adds the contribution of one query-key pair to the error bounds. p is the pair's probability, and
// terms is the sum of the absolute terms of its score gradient. The kernels compute both in float32.
func (a *naiveAttention) roundings(qi, ki, oi, vi int, p, terms float64) {
	p, terms = p*float32Error, terms*float32Error
	for i := range a.values() {
		a.oBound[oi+i] += p * math.Abs(a.v[vi+i])
		a.dvBound[vi+i] += p * math.Abs(a.dout[oi+i])
	}
	for i := range a.HeadDim {
		a.dqBound[qi+i] += terms * math.Abs(a.k[ki+i])
		a.dkBound[ki+i] += terms * math.Abs(a.q[qi+i])
	}
}

const (
	bf16Error    = 1.0 / (1 << 8)  // rounding to nearest with 8 bits
	float32Error = 1.0 / (1 << 14) // a few hundred roundings with 24 bits
)

// checkBound compares got with want element by element; stored is the relative error of storing a result.
func checkBound(t *testing.T, what string, got []float32, want, bound []float64, stored float64) {
	t.Helper()
	for i, w := range want {
		if d := math.Abs(float64(got[i]) - w); !(d <= bound[i]+stored*(math.Abs(w)+bound[i])+1e-30) {
			t.Fatalf("%s[%d] is %g, want %g within %g", what, i, got[i], w, bound[i]+stored*math.Abs(w))
		}
	}
}

// TestAttentionRoundsToBF16Last checks that bfloat16 adds no error except that of storing results.
func TestAttentionRoundsToBF16Last(t *testing.T) {
	p := NewPool(3)
	defer p.Close()
	eachISA(t, func(t *testing.T) {
		r := testRand(t)
		for range rounds(25) {
			a := Attention{Tokens: 1 + r.IntN(90), Prefix: r.IntN(250), Batch: 1 + r.IntN(2), KVHeads: 1 + r.IntN(3), HeadDim: 1 + r.IntN(70)}
			a.Heads, a.Keys, a.Window = a.KVHeads*(1+r.IntN(3)), a.Prefix+a.Tokens, 1+r.IntN(a.Prefix+a.Tokens)
			a.Softcap, a.ValueDim = []float32{0, 0, 3}[r.IntN(3)], []int{0, 1 + r.IntN(70)}[r.IntN(2)]
			mat := func(tokens, cols int) Mat {
				return BF16(roundedBF16(randomFloats(r, tokens*a.Batch*cols)), cols)
			}
			width, wide := a.Heads*a.HeadDim, a.Heads*a.values()
			q, o, dout, dq := mat(a.Tokens, width), mat(a.Tokens, wide), mat(a.Tokens, wide), mat(a.Tokens, width)
			k, v := mat(a.Keys, a.KVHeads*a.HeadDim), mat(a.Keys, a.KVHeads*a.values())
			dk, dv := F32(make([]float32, len(k.BF16)), k.Ld), F32(make([]float32, len(v.BF16)), v.Ld)
			n := naiveAttention{Attention: a, q: doubles(values(q)), k: doubles(values(k)), v: doubles(values(v)), dout: doubles(values(dout))}
			n.run()
			lse, delta := make([]float32, len(n.lse)), make([]float32, len(n.delta))
			for i, d := range n.delta {
				delta[i] = float32(d)
			}
			a.Forward(p, o, lse, false, q, k, v)
			a.Backward(p, AttentionGrads{DQ: dq, DK: dk, DV: dv, DOut: dout, Q: q, K: k, V: v, LSE: lse, Delta: delta})
			t.Logf("%+v", a)
			checkBound(t, "o", values(o), n.o, n.oBound, bf16Error)
			checkBound(t, "dq", values(dq), n.dq, n.dqBound, bf16Error)
			checkBound(t, "dk", dk.F32, n.dk, n.dkBound, 0)
			checkBound(t, "dv", dv.F32, n.dv, n.dvBound, 0)
		}
	})
}

func doubles(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

// checkNorm allows a difference proportional to the norm of the entire result. It also allows the errors listed in
// `rounding`, for results in which terms nearly cancel.
func checkNorm(t *testing.T, what string, got []float32, want []float64, tolerance float64, rounding ...float64) {
	t.Helper()
	var diff, norm float64
	for i := range want {
		diff += (float64(got[i]) - want[i]) * (float64(got[i]) - want[i])
		norm += want[i] * want[i]
	}
	allowed := tolerance * (math.Sqrt(norm) + 1e-3)
	for _, r := range rounding {
		allowed += r
	}
	if !(math.Sqrt(diff) <= allowed) {
		t.Fatalf("%s is off by %.3g of its norm of %.3g, more than %.3g", what, math.Sqrt(diff/norm), math.Sqrt(norm), tolerance)
	}
}

// values returns a matrix as float32.
func values(m Mat) []float32 {
	if m.BF16 == nil {
		return m.F32
	}
	x := make([]float32, len(m.BF16))
	Widen(x, m.BF16)
	return x
}

func checkAttention(t *testing.T, p *Pool, a Attention, bf16, accumulate bool, r *rand.Rand) {
	t.Helper()
	t.Logf("%+v bf16=%v accumulate=%v", a, bf16, accumulate)
	mat := func(tokens, cols int) Mat {
		x := randomFloats(r, tokens*a.Batch*cols)
		if bf16 {
			return BF16(roundedBF16(x), cols)
		}
		return F32(x, cols)
	}
	width, wide := a.Heads*a.HeadDim, a.Heads*a.values()
	q, o, dout, dq := mat(a.Tokens, width), mat(a.Tokens, wide), mat(a.Tokens, wide), mat(a.Tokens, width)
	k, v := mat(a.Keys, a.KVHeads*a.HeadDim), mat(a.Keys, a.KVHeads*a.values())
	dk, dv := F32(randomFloats(r, len(values(k))), k.Ld), F32(randomFloats(r, len(values(v))), v.Ld)
	lse := make([]float32, a.Tokens*a.Batch*a.Heads)
	n := naiveAttention{Attention: a, q: doubles(values(q)), k: doubles(values(k)), v: doubles(values(v)), dout: doubles(values(dout))}
	n.run()
	if accumulate {
		for i := range n.dk {
			n.dk[i] += float64(dk.F32[i])
		}
		for i := range n.dv {
			n.dv[i] += float64(dv.F32[i])
		}
	}
	tolerance, gradTolerance := 2e-6, 4e-6
	if bf16 {
		tolerance, gradTolerance = 4e-3, 2e-2 // o is rounded before the backward pass reads it
	}
	a.Forward(p, o, lse, false, q, k, v)
	checkNorm(t, "o", values(o), n.o, tolerance)
	checkNorm(t, "lse", lse, n.lse, 2e-6)
	a.Backward(p, AttentionGrads{DQ: dq, DK: dk, DV: dv, AddKV: accumulate, DOut: dout, Q: q, K: k, V: v, O: o, LSE: lse})
	rounding := float64(max(n.HeadDim, n.values())) * 0x1p-24 * math.Sqrt(n.terms) // of the inner products in dq and dk
	checkNorm(t, "dq", values(dq), n.dq, gradTolerance, rounding)
	checkNorm(t, "dk", dk.F32, n.dk, gradTolerance, rounding)
	checkNorm(t, "dv", dv.F32, n.dv, gradTolerance)
}

func TestAttention(t *testing.T) {
	p := NewPool(3)
	defer p.Close()
	eachISA(t, func(t *testing.T) {
		r := testRand(t)
		for range rounds(25) {
			kv := 1 + r.IntN(3)
			a := Attention{Tokens: 1 + r.IntN(90), Prefix: r.IntN(150), Batch: 1 + r.IntN(3), KVHeads: kv, Heads: kv * (1 + r.IntN(3)), HeadDim: 1 + r.IntN(70)}
			a.Keys = a.Prefix + a.Tokens
			a.Window = a.Keys
			switch r.IntN(4) {
			case 0:
				a.Keys = min(a.Keys, 4+r.IntN(a.Keys)) // with a single key, dq would be 0
			case 1, 2:
				a.Window = 2 + r.IntN(a.Keys+1)
			}
			a.Softcap, a.ValueDim = []float32{0, 0, 0.4, 3, 50}[r.IntN(5)], []int{0, 1 + r.IntN(70)}[r.IntN(2)]
			checkAttention(t, p, a, r.IntN(4) == 0, r.IntN(2) == 0, r)
		}
		checkAttention(t, p, Attention{Tokens: 300, Keys: 300, Window: 300, Batch: 1, Heads: 1, KVHeads: 1, HeadDim: 16}, false, false, r)
		checkAttention(t, p, Attention{Tokens: 1, Keys: 1, Window: 1, Batch: 1, Heads: 1, KVHeads: 1, HeadDim: 1}, false, false, r)
	})
}

// TestAttentionIsTheSameForAnyThreads compares the results of one thread with those of several. It uses several
// chunks of queries and panels of keys, and both fewer heads than threads and more.
func TestAttentionIsTheSameForAnyThreads(t *testing.T) {
	eachISA(t, func(t *testing.T) {
		r := testRand(t)
		for _, heads := range [][]int{{1, 2, 1}, {1, 6, 3}, {3, 4, 2}}[:rounds(3)] {
			for i, window := range []int{1000, 1, 100, 300} {
				a := Attention{Tokens: 270, Keys: 1000, Prefix: 730, Window: window, Batch: heads[0], Heads: heads[1], KVHeads: heads[2], HeadDim: 5}
				checkThreads(t, a, i%2 == 0, r)
				a.Softcap, a.ValueDim = 1.5, 9
				checkThreads(t, a, i%2 == 1, r)
				a.Positions = randomPositions(r, a)
				checkThreads(t, a, i%2 == 0, r)
			}
		}
	})
}

// randomPositions returns positions in documents of random lengths. The first document may have begun before the
// first query.
func randomPositions(r *rand.Rand, a Attention) []int32 {
	out := make([]int32, a.Tokens*a.Batch)
	for b := range a.Batch {
		at := int32(r.IntN(a.Prefix + 1))
		for t := range a.Tokens {
			if r.IntN(50) == 0 {
				at = 0
			}
			out[t*a.Batch+b] = at
			at++
		}
	}
	return out
}

func checkThreads(t *testing.T, a Attention, bf16 bool, r *rand.Rand) {
	t.Helper()
	mat := func(tokens, cols int) Mat {
		x := randomFloats(r, tokens*a.Batch*cols)
		if bf16 {
			return BF16(roundedBF16(x), cols)
		}
		return F32(x, cols)
	}
	width, wide := a.Heads*a.HeadDim, a.Heads*a.values()
	q, dout, dq0, k, v := mat(a.Tokens, width), mat(a.Tokens, wide), mat(a.Tokens, width), mat(a.Keys, a.KVHeads*a.HeadDim), mat(a.Keys, a.KVHeads*a.values())
	var first [][]float32
	for _, threads := range []int{1, 2, 3, 5} {
		p := NewPool(threads)
		o, dq := mat(a.Tokens, wide), Mat{F32: slices.Clone(dq0.F32), BF16: slices.Clone(dq0.BF16), Ld: dq0.Ld}
		dk, dv := F32(make([]float32, len(values(k))), k.Ld), F32(make([]float32, len(values(v))), v.Ld)
		lse := make([]float32, a.Tokens*a.Batch*a.Heads)
		a.Forward(p, o, lse, false, q, k, v)
		a.Backward(p, AttentionGrads{DQ: dq, DK: dk, DV: dv, DOut: dout, Q: q, K: k, V: v, O: o, LSE: lse, AddQ: true})
		p.Close()
		results := [][]float32{values(o), lse, values(dq), dk.F32, dv.F32}
		if threads == 1 {
			first = results
			continue
		}
		for i, x := range results {
			for j := range x {
				if x[j] != first[i][j] {
					t.Fatalf("%+v bf16=%v, %d threads: result %d differs at %d: %g, with one thread %g", a, bf16, threads, i, j, x[j], first[i][j])
				}
			}
		}
	}
}

// TestTurns checks that every task runs exactly once, and that the tasks of a list run in order and one at a time,
// whichever threads run them.
func TestTurns(t *testing.T) {
	r := testRand(t)
	for range rounds(200) {
		lists, each, threads := 1+r.IntN(6), 1+r.IntN(9), 1+r.IntN(5)
		turns := turns{each: each, done: make([]int, lists), busy: make([]bool, lists)}
		next, inside := make([]int, lists), make([]atomic.Int32, lists)
		p := NewPool(threads)
		p.Run(lists*each, func(part int) {
			turns.take(part/each, func(list, task int) {
				if inside[list].Add(1) != 1 {
					t.Errorf("two tasks of list %d at a time", list)
				}
				if next[list] != task { // under the race detector, concurrent tasks of a list fail here
					t.Errorf("list %d: task %d comes before task %d", list, task, next[list])
				}
				next[list]++
				runtime.Gosched()
				inside[list].Add(-1)
			})
		})
		p.Close()
		for list, n := range next {
			if n != each {
				t.Fatalf("%d lists, %d threads: %d of list %d's %d tasks were done", lists, threads, n, list, each)
			}
		}
	}
}
