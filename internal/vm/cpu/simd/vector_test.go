package simd

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// someLength returns a random length: 0, only a tail, or whole vectors with or without a tail.
func someLength(r *rand.Rand) int { return r.IntN(3) * r.IntN(70) }

// checkClose allows an error relative to the larger of want and floor.
func checkClose(t *testing.T, what string, got, want []float32, relative, floor float64) {
	t.Helper()
	for i := range want {
		d, w := math.Abs(float64(got[i])-float64(want[i])), math.Abs(float64(want[i]))
		if !(d <= relative*max(w, floor)) && got[i] != want[i] {
			t.Fatalf("%s[%d] = %g, want %g (of %d)", what, i, got[i], want[i], len(want))
		}
	}
}

// vectorCase is a kernel that writes its first operands and reads the rest.
type vectorCase struct {
	name          string
	outs, ins     int
	relative      float64
	floor, spread float64
	call          func(k *kernelSet, x [][]float32)
}

var vectorCases = []vectorCase{
	{"add", 1, 2, 0, 0, 1, func(k *kernelSet, x [][]float32) { k.add(x[0], x[1], x[2]) }},
	{"mul", 1, 2, 0, 0, 1, func(k *kernelSet, x [][]float32) { k.mul(x[0], x[1], x[2]) }},
	{"axpy", 1, 1, 0, 0, 1, func(k *kernelSet, x [][]float32) { k.axpy(x[0], x[1], 0.3) }},
	{"scale", 1, 1, 0, 0, 1, func(k *kernelSet, x [][]float32) { k.scale(x[0], x[1], -1.7) }},
	{"gelu", 1, 1, 2e-6, 1e-4, 3, func(k *kernelSet, x [][]float32) { k.gelu(x[0], x[1]) }},
	{"geluBackward", 1, 2, 4e-6, 1, 3, func(k *kernelSet, x [][]float32) { k.geluBackward(x[0], x[1], x[2]) }},
	{"swiglu", 1, 2, 2e-6, 1e-4, 3, func(k *kernelSet, x [][]float32) { k.swiglu(x[0], x[1], x[2]) }},
	{"swigluBackward", 2, 3, 6e-6, 1, 3, func(k *kernelSet, x [][]float32) { k.swigluBackward(x[0], x[1], x[2], x[3], x[4]) }},
	{"expScale", 1, 1, 3e-7, 1e-30, 20, func(k *kernelSet, x [][]float32) { k.expScale(x[0], x[1], 3, 0.7) }},
	{"sumExp", 1, 1, 5e-7, 0, 9, func(k *kernelSet, x [][]float32) { x[0][0] = k.sumExp(x[1], 5) }},
	{"max", 1, 1, 0, 0, 1, func(k *kernelSet, x [][]float32) { x[0][0] = k.max(x[1]) }},
	{"sum", 1, 1, 1e-6, 30, 1, func(k *kernelSet, x [][]float32) { x[0][0] = k.sum(x[1]) }},
	{"dot", 1, 2, 1e-6, 30, 1, func(k *kernelSet, x [][]float32) { x[0][0] = k.dot(x[1], x[2]) }},
	{"sumSquares", 1, 1, 5e-7, 1, 1, func(k *kernelSet, x [][]float32) { x[0][0] = k.sumSquares(x[1], 0.2) }},
	{"norm", 1, 3, 5e-7, 3, 1, func(k *kernelSet, x [][]float32) { k.norm(x[0], x[1], x[2], x[3], 0.2, 1.3) }},
	{"normSums", 2, 3, 1e-6, 30, 1, func(k *kernelSet, x [][]float32) { x[0][0], x[1][0] = k.normSums(x[2], x[3], x[4], 0.2, 1.3) }},
	{"normBackward", 3, 3, 1e-6, 10, 1, func(k *kernelSet, x [][]float32) {
		k.normBackward(x[0], x[1], x[2], x[3], x[4], x[5], 0.2, 1.3, 0.1, -0.2)
	}},
	{"rotate", 1, 3, 0, 0, 1, func(k *kernelSet, x [][]float32) {
		n := len(x[0]) / 2
		k.rotate(x[0], x[1], x[2][:n], x[3][:n], -1)
	}},
	{"adamw", 3, 1, 0, 0, 1, func(k *kernelSet, x [][]float32) {
		for i, v := range x[2] {
			x[2][i] = max(v, -v)
		}
		s := AdamWStep{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: 0.1, GradScale: 0.7, Correction1: 3.7, Correction2: 7.0}
		k.adamw(x[0], x[1], x[2], x[3], s.constants())
	}},
}

// TestVectorKernels compares every instruction set's kernels in vectorCases with the portable ones. A guard after
// each operand detects writes past the end.
func TestVectorKernels(t *testing.T) {
	r := testRand(t)
	const guard = 20
	for _, k := range kernelSets {
		for _, c := range vectorCases {
			for range 60 {
				n := max(1, someLength(r))
				got, want := make([][]float32, c.outs+c.ins), make([][]float32, c.outs+c.ins)
				for i := range got {
					whole := randomFloats(r, n+guard)
					for j := range whole {
						whole[j] *= float32(c.spread)
					}
					got[i], want[i] = whole, append([]float32(nil), whole...)
				}
				inner := func(x [][]float32) [][]float32 {
					y := make([][]float32, len(x))
					for i := range x {
						y[i] = x[i][:n]
					}
					return y
				}
				c.call(k, inner(got))
				c.call(&portable, inner(want))
				for i := range got {
					checkClose(t, k.name+" "+c.name, got[i][:n], want[i][:n], c.relative, c.floor)
					checkClose(t, k.name+" "+c.name+" guard", got[i][n:], want[i][n:], 0, 0)
				}
			}
		}
	}
}

// TestExp compares exp with math.Exp over nearly all of its range, and checks special values.
func TestExp(t *testing.T) {
	eachISA(t, func(t *testing.T) {
		r := testRand(t)
		x, y := make([]float32, 100000), make([]float32, 100000)
		for i := range x {
			x[i] = float32(r.Float64()*170 - 86)
		}
		active.expScale(y, x, 0, 1)
		worst := 0.0
		for i := range x {
			w := math.Exp(float64(x[i]))
			worst = max(worst, math.Abs(float64(y[i])-w)/w)
		}
		t.Logf("relative error at most %.3g", worst)
		if worst > 2e-7 {
			t.Errorf("exp is off by %.3g", worst)
		}
		inf, nan := float32(math.Inf(1)), float32(math.NaN())
		edges := []float32{-inf, -1e30, -200, -104, 0, nan}
		active.expScale(y[:len(edges)], edges, 0, 1)
		for i, want := range []float32{0, 0, 0, 0, 1, nan} {
			if y[i] != want && !(want != want && y[i] != y[i]) {
				t.Errorf("exp(%g) = %g, want %g", edges[i], y[i], want)
			}
		}
	})
}

// TestSoftcap compares Softcap with a computation in float64, for inputs from far below the limit to far above it.
func TestSoftcap(t *testing.T) {
	eachISA(t, func(t *testing.T) {
		r := testRand(t)
		for _, limit := range []float32{0.3, 1, 50} {
			x, y := make([]float32, 1003), make([]float32, 1003)
			for i := range x {
				x[i] = limit * float32(r.NormFloat64()*math.Pow(10, r.Float64()*8-6))
			}
			Softcap(y, x, limit)
			for i := range x {
				want := float64(limit) * math.Tanh(float64(x[i])/float64(limit))
				if diff := math.Abs(float64(y[i]) - want); !(diff <= 1e-6*math.Abs(want)) {
					t.Fatalf("softcap %g of %g is %g, want %g", limit, x[i], y[i], want)
				}
			}
		}
		y := []float32{float32(math.Inf(-1)), -1e30, 0, 1e30}
		Softcap(y, y, 2)
		if want := []float32{-2, -2, 0, 2}; !slices.Equal(y, want) {
			t.Errorf("at the ends it is %v, want %v", y, want)
		}
	})
}

func TestBF16(t *testing.T) {
	eachISA(t, func(t *testing.T) {
		r := testRand(t)
		for range 200 {
			x := randomFloats(r, someLength(r))
			for i := range x {
				if r.IntN(4) == 0 {
					x[i] = math.Float32frombits(r.Uint32())
				}
				if r.IntN(8) == 0 {
					x[i] = math.Float32frombits(r.Uint32()&0xffff0000 | 0x8000)
				}
			}
			y, z := make([]uint16, len(x)+3), make([]float32, len(x)+3)
			Narrow(y, x)
			Widen(z[:len(x)], y)
			for i := range x {
				if want := ToBF16(x[i]); y[i] != want {
					t.Fatalf("%x narrows to %x, want %x", math.Float32bits(x[i]), y[i], want)
				}
				if math.Float32bits(z[i]) != uint32(y[i])<<16 {
					t.Fatalf("%x widens to %x", y[i], math.Float32bits(z[i]))
				}
			}
			if n := len(x); y[n] != 0 || z[n] != 0 {
				t.Fatalf("wrote past the end of %d", n)
			}
		}
	})
}

func TestFill(t *testing.T) {
	for _, n := range []int{0, 1, 5, 1024, 3001} {
		x := make([]float32, n)
		Fill(x, 2.5)
		for i := range x {
			if x[i] != 2.5 {
				t.Fatalf("element %d of %d is %g", i, n, x[i])
			}
		}
	}
}

func TestSoftmaxStrips(t *testing.T) {
	r := testRand(t)
	was := active
	defer func() { active = was }()
	for _, k := range kernelSets {
		active = k
		rows, ld := 1+r.IntN(120), k.nr+r.IntN(40)
		s, ds := randomFloats(r, rows*ld), randomFloats(r, rows*ld)
		state := randomFloats(r, 3*k.nr)
		rowMax, sum, alpha := state[:k.nr], state[k.nr:2*k.nr], state[2*k.nr:]
		const scale = 0.3
		for j := range k.nr {
			lse, delta := float64(rowMax[j]), float64(sum[j])
			for i := range rows {
				p := math.Exp(float64(s[i*ld+j])*scale - lse)
				wantDS := p * (float64(ds[i*ld+j]) - delta) * scale
				gotS, gotDS := append([]float32(nil), s...), append([]float32(nil), ds...)
				if i == 0 && j == 0 {
					k.softmaxGrads(gotS, gotDS, ld, rows, rowMax, sum, scale)
					checkClose(t, k.name+" softmaxGrads p", gotS[:1], []float32{float32(p)}, 1e-6, 0)
					checkClose(t, k.name+" softmaxGrads ds", gotDS[:1], []float32{float32(wantDS)}, 1e-6, 1)
				}
			}
		}
		before := append([]float32(nil), s...)
		first, sums := append([]float32(nil), rowMax...), append([]float32(nil), sum...)
		k.softmaxStrip(s, ld, rows, rowMax, sum, alpha, scale)
		for j := range k.nr {
			m := first[j]
			for i := range rows {
				m = max(m, before[i*ld+j]*scale)
			}
			want := float64(sums[j]) * math.Exp(float64(first[j]-m))
			for i := range rows {
				p := math.Exp(float64(before[i*ld+j])*scale - float64(m))
				want += p
				checkClose(t, k.name+" softmaxStrip", s[i*ld+j:][:1], []float32{float32(p)}, 1e-6, 0)
			}
			checkClose(t, k.name+" softmaxStrip sum", sum[j:][:1], []float32{float32(want)}, 1e-6, 1)
			if rowMax[j] != m {
				t.Fatalf("%s: maximum %g, want %g", k.name, rowMax[j], m)
			}
		}
	}
}
