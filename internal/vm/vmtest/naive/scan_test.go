package naive

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func scanInputs(r *rand.Rand, s Scan, tokens int, strength float64) ScanOperands {
	rows, heads := tokens*s.Batch, s.Heads*s.Shared
	o := ScanOperands{Q: normals(r, rows*s.Heads*s.KeyDim, 0, 1), K: normals(r, rows*s.Heads*s.KeyDim, 0, 1), V: normals(r, rows*heads*s.ValueDim, 0, 1),
		Decay: normals(r, rows*heads*s.Channels, 0, 1), Beta: normals(r, rows*heads, 0, 1), State: normals(r, s.Batch*heads*s.KeyDim*s.ValueDim, 0, 1)}
	for i, x := range o.Decay {
		o.Decay[i] = -strength * math.Abs(x)
	}
	for i, x := range o.Beta {
		o.Beta[i] = 1 / (1 + math.Exp(-x))
	}
	return o
}

// scanKinds are the recurrences of published models: by head and by channel, with delta and without.
var scanKinds = []Scan{
	{Batch: 2, Heads: 1, Shared: 2, KeyDim: 3, ValueDim: 2, Channels: 1, Delta: true, Norm: 1e-3, Scale: 0.5},
	{Batch: 1, Heads: 2, Shared: 1, KeyDim: 3, ValueDim: 2, Channels: 3, Delta: true, Norm: 1e-3},
	{Batch: 1, Heads: 1, Shared: 2, KeyDim: 3, ValueDim: 2, Channels: 1},
	{Batch: 1, Heads: 1, Shared: 1, KeyDim: 3, ValueDim: 2, Channels: 3, Scale: 2},
}

// TestScanGrad compares the gradients of scans, with respect to every operand, with finite differences.
func TestScanGrad(t *testing.T) {
	r := newRand(t)
	for i, s := range scanKinds {
		for _, packed := range []bool{false, true} {
			const tokens = 6
			if packed {
				s.Positions = slices.Repeat([]int32{3, 4, 0, 0, 1, 2}, s.Batch)
				for j := range s.Positions {
					s.Positions[j] = []int32{3, 4, 0, 0, 1, 2}[j/s.Batch]
				}
			}
			o := scanInputs(r, s, tokens, 0.5)
			dout, dnext := normals(r, len(o.V), 0, 1), normals(r, len(o.State), 0, 1)
			got := s.Grad(o, dout, dnext)
			for _, x := range []struct {
				name    string
				at, got *[]float64
			}{{"q", &o.Q, &got.Q}, {"k", &o.K, &got.K}, {"v", &o.V, &got.V}, {"decay", &o.Decay, &got.Decay}, {"beta", &o.Beta, &got.Beta}, {"state", &o.State, &got.State}} {
				before := *x.at
				want := NumericGrad(func(moved []float64) (sum float64) {
					*x.at = moved
					out, next := s.Run(o)
					for i, y := range out {
						sum += dout[i] * y
					}
					for i, y := range next {
						sum += dnext[i] * y
					}
					return sum
				}, before)
				*x.at = before
				wantClose(t, fmt.Sprintf("kind %d, packed %v: %s", i, packed, x.name), *x.got, want, 1e-8)
			}
		}
	}
}

// TestScanCut cuts 4,096 tokens in two at several places, and passes the state from the first part to the second and its gradient
// from the second to the first. Results and gradients must be those of the whole.
func TestScanCut(t *testing.T) {
	r := newRand(t)
	const tokens = 4096
	for i, s := range scanKinds {
		s.Batch = 1
		for _, strength := range []float64{1e-3, 5} {
			o := scanInputs(r, s, tokens, strength)
			dout, dnext := normals(r, len(o.V), 0, 1), normals(r, len(o.State), 0, 1)
			wantOut, wantNext := s.Run(o)
			want := s.Grad(o, dout, dnext)
			for _, cut := range []int{1, 1000, 2048, 4095} {
				first, second := cutOperands(o, cut, tokens)
				head := cut * len(o.V) / tokens
				out, state := s.Run(first)
				second.State = state
				rest, next := s.Run(second)
				d2 := s.Grad(second, dout[head:], dnext)
				d1 := s.Grad(first, dout[:head], d2.State)
				what := fmt.Sprintf("kind %d, strength %g, cut at %d: ", i, strength, cut)
				wantClose(t, what+"o", append(out, rest...), wantOut, 1e-12)
				wantClose(t, what+"next", next, wantNext, 1e-12)
				wantClose(t, what+"dstate", d1.State, want.State, 1e-12)
				wantClose(t, what+"dk", append(d1.K, d2.K...), want.K, 1e-12)
				wantClose(t, what+"ddecay", append(d1.Decay, d2.Decay...), want.Decay, 1e-12)
			}
		}
	}
}

// cutOperands divides the operands of one sequence after some tokens.
func cutOperands(o ScanOperands, cut, tokens int) (first, second ScanOperands) {
	part := func(x []float64) (a, b []float64) { n := len(x) / tokens * cut; return x[:n], x[n:] }
	first.State = o.State
	first.Q, second.Q = part(o.Q)
	first.K, second.K = part(o.K)
	first.V, second.V = part(o.V)
	first.Decay, second.Decay = part(o.Decay)
	first.Beta, second.Beta = part(o.Beta)
	return first, second
}
