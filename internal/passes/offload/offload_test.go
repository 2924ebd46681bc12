package offload

import (
	"bytes"
	"math"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/cost"
	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/ir"
)

// TestChooseUnits draws units and shares at random. The offloaded bytes must be within half a unit of the
// target.
func TestChooseUnits(t *testing.T) {
	r := plantest.Random(t)
	for range 500 {
		sizes := make([]ir.Bytes, 1+r.IntN(8))
		var layer, largest ir.Bytes
		for u := range sizes {
			sizes[u] = ir.Bytes(1+r.IntN(64)) * ir.Alignment
			largest, layer = max(largest, sizes[u]), layer+sizes[u]
		}
		layers, share := 1+r.IntN(6), r.Float64()
		placement := bytes.Repeat([]byte{plan.PlacementKeep}, layers*len(sizes))
		total := float64(layer) * float64(layers)
		for at := range placement {
			if r.IntN(4) == 0 {
				placement[at] = plan.PlacementRecompute
				total -= float64(sizes[at%len(sizes)])
			}
		}
		if total == 0 {
			continue
		}
		before := bytes.Count(placement, []byte{plan.PlacementRecompute})
		all := slices.Repeat(sizes, layers)
		chooseUnits(placement, len(sizes), all, share)
		placed := placedShare(placement, all)
		if after := bytes.Count(placement, []byte{plan.PlacementRecompute}); after != before {
			t.Fatalf("%d units were to be recomputed, %d are", before, after)
		}
		var gone ir.Bytes
		for at := range placement {
			if placement[at] == plan.PlacementOffload {
				gone += sizes[at%len(sizes)]
			}
		}
		if placed != float64(gone)/total {
			t.Fatalf("alpha %g is reported for %d of %g bytes", placed, gone, total)
		}
		bound := float64(largest) / 2
		if off := math.Abs(float64(gone) - share*total); off > bound {
			t.Fatalf("sizes %v, %d layers, share %g: %d bytes go, %g off the target, more than %g", sizes, layers, share, gone, off, bound)
		}
	}
}

func TestChooseUnitsAtTheEnds(t *testing.T) {
	sizes := []ir.Bytes{512, 256, 1024}
	for share, want := range map[float64]string{0: strings.Repeat("k", 6), 1: strings.Repeat("o", 6), 0.5: "oookkk"} {
		got := []byte("kkkkkk")
		all := slices.Repeat(sizes, 2)
		chooseUnits(got, len(sizes), all, share)
		if alpha := placedShare(got, all); string(got) != want || alpha != share {
			t.Errorf("share %g: %s, %g; want %s", share, got, alpha, want)
		}
	}
}

func TestOffloadPolicies(t *testing.T) {
	for _, c := range []struct {
		set  string
		want []float64 // by subsequence
	}{
		{"none", []float64{0, 0, 0, 0}},
		{"full", []float64{1, 1, 1, 1}},
		{"auto", []float64{0, 0, 0, 0}},
		{"0.5", []float64{0.5, 0.5, 0.5, 0.5}},
		{"[1, 0.7, 0.2, 0]", []float64{1, 0.7, 0.2, 0}},
	} {
		p := plantest.Plan(t, "tiny.sppo", "schedule.offload="+c.set)
		for s := range p.Offload.Alpha {
			for i, a := range p.Offload.Alpha[s] {
				if math.Abs(a-c.want[i]) > 0.05 || (c.want[i] == 0 || c.want[i] == 1) && a != c.want[i] {
					t.Errorf("offload = %s, stage %d, subsequence %d: %g, want %g", c.set, s, i, a, c.want[i])
				}
			}
		}
	}
}

func TestOffloadListSetsTheNumberOfSubsequences(t *testing.T) {
	p := plantest.Plan(t, "tiny.sppo", "schedule.subsequences=auto", "schedule.offload=[1, 0.5, 0]")
	if p.Subsequences.N != 3 {
		t.Errorf("three shares make %d subsequences", p.Subsequences.N)
	}
}

func TestBrokenPlacements(t *testing.T) {
	for _, c := range []struct {
		want string
		edit func(o *plan.Offload)
	}{
		{"3 subsequences", func(o *plan.Offload) { o.Placement[0] = o.Placement[0][:3] }},
		{"letters", func(o *plan.Offload) { o.Placement[1][2] += "o" }},
		{`letter 'x'`, func(o *plan.Offload) { o.Placement[1][2] = "x" + o.Placement[1][2][1:] }},
		{"cannot be computed from the values that the layer keeps", func(o *plan.Offload) { o.Placement[1][2] = "r" + o.Placement[1][2][1:] }},
		{"from 0 to 1", func(o *plan.Offload) { o.Alpha[0][0] = 1.5 }},
		{"for 1 stages", func(o *plan.Offload) { o.Placement = o.Placement[:1] }},
	} {
		p := plantest.Plan(t, "tiny.sppo")
		c.edit(&p.Offload)
		if err := plantest.Verify(p); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want it to say %q", err, c.want)
		}
	}
}

// TestAdaptive checks that the shares of `adaptive` agree with the formula, to within a unit, at the
// bandwidth that the paper's measured transfer times imply. They rise along the sequence, because the number
// of bytes falls while the time per task stays the same, so the first must be below 1. The last subsequence
// is kept.
func TestAdaptive(t *testing.T) {
	p := plantest.Plan(t, "paper/gpt-7b-1m.sppo", "schedule.offload=adaptive", "cluster.d2h_bandwidth=13.6GB/s", "cluster.h2d_bandwidth=13.6GB/s")
	n := p.Subsequences.N
	m := cost.New(ir.Machine(p.Cluster), p.Parallel.Ranks())
	costs := estimate.New(estimate.NewCache(), nil, p).Costs(m)
	sizes := make([]float64, n)
	for i := range n {
		for _, b := range plan.UnitSizes(p.Graph(), p.Size(i))[0] {
			sizes[i] += float64(b)
		}
	}
	for s := range p.Tasks {
		for i, got := range p.Offload.Alpha[s] {
			want := 0.0
			if i < n-1 {
				want = min(1, 13.6e9*float64(costs.Forward(i+1))/sizes[i])
			}
			if math.Abs(got-want) > 0.02 || i == 0 && got == 1 { // half a unit is less than 0.02 of the bytes of eight layers
				t.Errorf("stage %d, subsequence %d: alpha %g, want %g", s, i, got, want)
			}
		}
	}
}

// TestCarry checks that, if copies are slow, offload = carry lets them lag, and waits for them less than half
// as long as offload = full does. If copies are fast, they do not lag, and nothing waits.
func TestCarry(t *testing.T) {
	slow := []string{"cluster.d2h_bandwidth=8GB/s", "cluster.h2d_bandwidth=32GB/s"}
	full := plantest.Plan(t, "paper/gpt-7b-512k.sppo", append(slow, "schedule.offload=full")...)
	carry := plantest.Plan(t, "paper/gpt-7b-512k.sppo", append(slow, "schedule.offload=carry")...)
	if full.Time.ExposedTransferS == 0 || carry.Time.ExposedTransferS >= full.Time.ExposedTransferS/2 || carry.Offload.Lag < 2 {
		t.Errorf("slow copies: %g s exposed with full, %g s with carry and a lag of %d", full.Time.ExposedTransferS, carry.Time.ExposedTransferS, carry.Offload.Lag)
	}
	t.Logf("%g s exposed with full, %g s with carry and a lag of %d", full.Time.ExposedTransferS, carry.Time.ExposedTransferS, carry.Offload.Lag)
	if fast := plantest.Plan(t, "paper/gpt-7b-512k.sppo", "schedule.offload=carry"); fast.Offload.Lag != 1 || fast.Time.ExposedTransferS > 0 {
		t.Errorf("fast copies lag %d tasks, %g s exposed", fast.Offload.Lag, fast.Time.ExposedTransferS)
	}
}
