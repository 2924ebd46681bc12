package simd

import (
	"bufio"
	"encoding/json"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"testing"
)

// scanValues are the operands of a scan, in f32, and the gradients of its results.
type scanValues struct {
	ScanOperands
	dout, dnext []float32
}

func drawScan(r *rand.Rand, a Scan, strength float64) scanValues {
	rows, heads := a.Tokens*a.Batch, a.Heads*a.Shared
	draw := func(n int, f func(x float64) float64) []float32 {
		out := make([]float32, n)
		for i := range out {
			out[i] = float32(f(r.NormFloat64()))
		}
		return out
	}
	plain := func(x float64) float64 { return x }
	return scanValues{
		ScanOperands: ScanOperands{
			Q: F32(draw(rows*a.Heads*a.KeyDim, plain), a.Heads*a.KeyDim), K: F32(draw(rows*a.Heads*a.KeyDim, plain), a.Heads*a.KeyDim),
			V:     F32(draw(rows*heads*a.ValueDim, plain), heads*a.ValueDim),
			Decay: draw(rows*heads*a.Channels, func(x float64) float64 { return -strength * math.Abs(x) }),
			Beta:  draw(rows*heads, func(x float64) float64 { return 1 / (1 + math.Exp(-x)) }),
			State: draw(a.Batch*heads*a.KeyDim*a.ValueDim, plain),
		},
		dout: draw(rows*heads*a.ValueDim, plain), dnext: draw(a.Batch*heads*a.KeyDim*a.ValueDim, plain),
	}
}

// scanResults are the results of a scan and its gradients, by operand.
type scanResults map[string][]float32

func (a Scan) both(p *Pool, x scanValues) scanResults {
	rows, heads := a.Tokens*a.Batch, a.Heads*a.Shared
	out := scanResults{"o": Alloc(rows * heads * a.ValueDim), "next": Alloc(a.Batch * heads * a.KeyDim * a.ValueDim)}
	a.Forward(p, F32(out["o"], heads*a.ValueDim), out["next"], x.ScanOperands)
	return a.grads(p, x, out)
}

func (a Scan) grads(p *Pool, x scanValues, out scanResults) scanResults {
	rows, heads := a.Tokens*a.Batch, a.Heads*a.Shared
	for name, n := range map[string]int{"dq": rows * a.Heads * a.KeyDim, "dk": rows * a.Heads * a.KeyDim, "dv": rows * heads * a.ValueDim,
		"ddecay": rows * heads * a.Channels, "dbeta": rows * heads, "dstate": a.Batch * heads * a.KeyDim * a.ValueDim} {
		out[name] = Alloc(n)
	}
	a.Backward(p, ScanGrads{DOut: F32(x.dout, heads*a.ValueDim), DNext: x.dnext, DQ: F32(out["dq"], a.Heads*a.KeyDim), DK: F32(out["dk"], a.Heads*a.KeyDim),
		DV: F32(out["dv"], heads*a.ValueDim), DDecay: out["ddecay"], DBeta: out["dbeta"], DState: out["dstate"]}, x.ScanOperands)
	return out
}

// close compares results, relative to the largest value of each operand.
func (want scanResults) close(t *testing.T, what string, got scanResults, tolerance float64) {
	t.Helper()
	for name, w := range want {
		largest, worst := 0.0, 0.0
		for i := range w {
			largest = max(largest, math.Abs(float64(w[i])))
			worst = max(worst, math.Abs(float64(w[i])-float64(got[name][i])))
			if got[name][i] != got[name][i] {
				worst = math.Inf(1)
			}
		}
		if len(got[name]) != len(w) || !(worst <= tolerance*largest) {
			t.Errorf("%s: %s differs by %g of %g", what, name, worst, largest)
		}
	}
}

// TestScanCut cuts 4,096 tokens in two, anywhere, and passes the state on and its gradient back.
func TestScanCut(t *testing.T) {
	p := NewPool(2)
	defer p.Close()
	const tokens = 4096
	for _, a := range []Scan{
		{Tokens: tokens, Batch: 1, Heads: 1, Shared: 2, KeyDim: 32, ValueDim: 24, Channels: 1, Delta: true, Norm: 1e-6, Scale: 0.2},
		{Tokens: tokens, Batch: 1, Heads: 1, Shared: 1, KeyDim: 16, ValueDim: 24, Channels: 16, Delta: true, Norm: 1e-6},
		{Tokens: tokens, Batch: 1, Heads: 1, Shared: 2, KeyDim: 16, ValueDim: 16, Channels: 1, Norm: 1e-6},
	} {
		for _, strength := range []float64{1e-3, 0.5, 40} {
			r := rand.New(rand.NewPCG(1, 2))
			x := drawScan(r, a, strength)
			want := a.both(p, x)
			for _, cut := range []int{2077, 1, 63, 64, 1000, tokens - 1}[:rounds(6)] {
				first, second, x1, x2 := a, a, x, x
				first.Tokens, second.Tokens = cut, tokens-cut
				heads := a.Heads * a.Shared
				x2.Q, x2.K, x2.V = x.Q.From(cut), x.K.From(cut), x.V.From(cut)
				x2.Decay, x2.Beta, x2.dout = x.Decay[cut*heads*a.Channels:], x.Beta[cut*heads:], x.dout[cut*heads*a.ValueDim:]
				one := scanResults{"o": Alloc(cut * heads * a.ValueDim), "next": Alloc(len(x.State))}
				first.Forward(p, F32(one["o"], heads*a.ValueDim), one["next"], x1.ScanOperands)
				x2.State = one["next"]
				two := second.both(p, x2)
				x1.dnext = two["dstate"]
				one = first.grads(p, x1, one)
				got := scanResults{"next": two["next"], "dstate": one["dstate"]}
				for _, name := range []string{"o", "dq", "dk", "dv", "ddecay", "dbeta"} {
					got[name] = slices.Concat(one[name], two[name])
				}
				want.close(t, "cut", got, 2e-5)
			}
		}
	}
}

// peer is a process that computes scans as transformers does, if SPPO_PYTHON names a Python that has it.
type peer struct {
	in  io.WriteCloser
	out *bufio.Reader
}

func startPeer(t testing.TB, threads string) *peer {
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		t.Skip("SPPO_PYTHON is not set: a Python with transformers and PyTorch is needed")
	}
	cmd := exec.Command(python, "../../../../bench/peers/torch_scan.py", threads)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	return &peer{in, bufio.NewReaderSize(out, 1<<20)}
}

func (p *peer) ask(t testing.TB, question, answer any) {
	t.Helper()
	if err := json.NewEncoder(p.in).Encode(question); err != nil {
		t.Fatal(err)
	}
	line, err := p.out.ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(line, answer); err != nil {
		t.Fatal(err)
	}
}

// TestScanLikeTransformers compares results and gradients with those of transformers' chunks.
func TestScanLikeTransformers(t *testing.T) {
	peer := startPeer(t, "1")
	p := NewPool(1)
	defer p.Close()
	a := Scan{Tokens: 150, Batch: 2, Heads: 2, Shared: 2, KeyDim: 32, ValueDim: 24, Channels: 1, Delta: true, Norm: 1e-6, Scale: float32(1 / math.Sqrt(32))}
	for _, strength := range []float64{0.01, 0.3} {
		x := drawScan(rand.New(rand.NewPCG(3, 4)), a, strength)
		var want scanResults
		peer.ask(t, map[string]any{
			"tokens": a.Tokens, "batch": a.Batch, "heads": a.Heads, "shared": a.Shared, "key_dim": a.KeyDim, "value_dim": a.ValueDim,
			"q": x.Q.F32, "k": x.K.F32, "v": x.V.F32, "decay": x.Decay, "beta": x.Beta, "state": x.State, "dout": x.dout, "dnext": x.dnext,
		}, &want)
		want.close(t, "transformers", a.both(p, x), 2e-5)
	}
}
