package partition

import (
	"fmt"
	"math/big"
	"slices"
	"testing"

	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/lang"
)

func gptOf(hidden int) lang.Model {
	m, err := lang.ParseModel(fmt.Sprintf("family = gpt layers = 1 hidden = %d heads = %d vocab = 256 dtype = bf16", hidden, hidden/128))
	if err != nil {
		panic(err)
	}
	return m
}

func TestPartitionOfThePaper(t *testing.T) {
	got := Lengths(ByFlops(estimate.FlopsOfLayer(gptOf(8192)), 128<<10, 8, 1))
	want := []int64{29423, 21085, 17345, 15087, 13532, 12378, 11475, 10747}
	if !slices.Equal(got, want) {
		t.Errorf("65B, 128K tokens in 8: %v, want %v", got, want)
	}
}

// TestLayerFlopsIsU compares the operations of a layer with the closed form U(x) = hidden * (g2*x + x*(x+1)).
func TestLayerFlopsIsU(t *testing.T) {
	m := gptOf(4096)
	m.Gated, m.Bias, m.KVHeads, m.FFN = true, nil, 8, 14336
	g2 := int64(2*4096 + 2*8*128 + 3*14336)
	for _, x := range []int64{0, 1, 1000, 1 << 20, 1 << 40} {
		u := new(big.Int).Mul(big.NewInt(x), new(big.Int).Add(big.NewInt(g2), big.NewInt(x+1)))
		if got := estimate.FlopsOfLayer(m).UpTo(x); got.Cmp(u.Mul(u, big.NewInt(4096))) != 0 {
			t.Errorf("up to %d: %s, want %s", x, got, u)
		}
	}
}

// TestFlopsBoundariesProperties draws requests at random and compares each boundary with the best multiple of
// align.
func TestFlopsBoundariesProperties(t *testing.T) {
	r := plantest.Random(t)
	for range 300 {
		m := gptOf(128 * (1 + r.IntN(8)))
		m.FFN = 1 + r.IntN(4096)
		align := int64(1 + r.IntN(16))
		n := 1 + r.IntN(12)
		seq := align*int64(n) + int64(r.IntN(600))
		x := ByFlops(estimate.FlopsOfLayer(m), seq, n, align)
		if x[0] != 0 || x[n] != seq || len(x) != n+1 {
			t.Fatalf("sequence %d in %d on %d: %v does not span it", seq, n, align, x)
		}
		for k := 1; k <= n; k++ {
			if x[k] <= x[k-1] || k < n && x[k]%align != 0 {
				t.Fatalf("sequence %d in %d on %d: %v is not increasing on the grid", seq, n, align, x)
			}
			most := (seq-1)/align*align - int64(n-1-k)*align // leaves room for the later boundaries
			if best := bestBorder(m, seq, n, k, align, x[k-1]+align, most); k < n && x[k] != best {
				t.Fatalf("sequence %d in %d on %d: border %d is %d, and %d is nearer", seq, n, align, k, x[k], best)
			}
		}
	}
}

// bestBorder returns the best boundary in a range, by trying every multiple of align.
func bestBorder(m lang.Model, seq int64, n, k int, align, from, to int64) int64 {
	f := estimate.FlopsOfLayer(m)
	target := new(big.Int).Mul(f.UpTo(seq), big.NewInt(int64(k)))
	best, least := int64(-1), new(big.Int)
	for x := from; x <= to; x += align {
		d := new(big.Int).Mul(f.UpTo(x), big.NewInt(int64(n)))
		if d.Sub(d, target).Abs(d); best < 0 || d.Cmp(least) < 0 {
			best, least = x, d
		}
	}
	return best
}

func TestFlopsBoundariesTieGoesToTheSmaller(t *testing.T) {
	// Without attention U is linear, so the boundaries 3 and 4 are equally far from the middle.
	if x := ByFlops(linear, 7, 2, 1); x[1] != 3 {
		t.Errorf("the border of 7 tokens in 2 is %d, want 3", x[1])
	}
}

func TestEvenBoundaries(t *testing.T) {
	for _, c := range []struct {
		seq   int64
		n     int
		align int64
		want  []int64
	}{
		{1024, 4, 128, []int64{256, 256, 256, 256}},
		{1024, 3, 128, []int64{384, 384, 256}},
		{1030, 3, 128, []int64{384, 384, 262}},
		{9, 4, 1, []int64{3, 2, 2, 2}},
	} {
		got := Lengths(ByLength(c.seq, c.n, c.align))
		slices.Sort(got)
		slices.Sort(c.want)
		if !slices.Equal(got, c.want) {
			t.Errorf("%d tokens in %d on %d: %v, want %v in some order", c.seq, c.n, c.align, got, c.want)
		}
	}
}

// linear is a layer without attention.
var linear = estimate.LayerFlops{Linear: big.NewInt(1), Quadratic: new(big.Int)}

func TestImbalance(t *testing.T) {
	if got := imbalance(linear, []int64{3, 1, 2}); got != 0.5 {
		t.Errorf("3, 1, 2 of a mean of 2: %g above it, want 0.5", got)
	}
}

// TestPartitionByTime checks on a small job, by brute force, that no other boundaries make the longest task
// shorter. On the paper's specs, whose efficiencies do not depend on size, a step may take at most 0.1% longer
// than with equal operations per subsequence.
func TestPartitionByTime(t *testing.T) {
	p := plantest.Plan(t, "gpt-docs.sppo", "schedule.partition=time", "schedule.subsequences=3", "train.sequence=64", "schedule.align=4")
	tt := estimate.NewTaskTime(estimate.NewCache(), p)
	x := []int64{0, p.Subsequences.Lengths[0], p.Subsequences.Lengths[0] + p.Subsequences.Lengths[1], 64}
	got, _ := longest(tt, x)
	for a := int64(4); a < 64; a += 4 {
		for b := a + 4; b < 64; b += 4 {
			if other, _ := longest(tt, []int64{0, a, b, 64}); other < got*0.999 {
				t.Fatalf("lengths %v take %g at most, borders %d and %d %g", p.Subsequences.Lengths, float64(got), a, b, float64(other))
			}
		}
	}
	for _, spec := range []string{"paper/gpt-7b-512k.sppo", "paper/gpt-13b-1280k.sppo", "paper/gpt-65b-1m.sppo"} {
		byFlops, byTime := plantest.Plan(t, spec), plantest.Plan(t, spec, "schedule.partition=time")
		if byTime.Time.StepS > 1.001*byFlops.Time.StepS {
			t.Errorf("%s: %g s by time, %g s by operations", spec, float64(byTime.Time.StepS), float64(byFlops.Time.StepS))
		}
		t.Logf("%s: %g s by time, %g s by operations", spec, float64(byTime.Time.StepS), float64(byFlops.Time.StepS))
	}
}
