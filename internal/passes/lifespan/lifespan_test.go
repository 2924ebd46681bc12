package lifespan_test

import (
	"math"
	"slices"
	"testing"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	_ "sppo.dev/internal/passes/plantest/wired"
	"sppo.dev/ir"
)

func names(p *plan.Plan, t plan.UnitType) []string {
	var out []string
	for _, u := range p.Units {
		if u.Block == graph.BlockLayer && u.Type == t {
			out = append(out, u.Name)
		}
	}
	return out
}

func TestUnitsOfGPT(t *testing.T) {
	p := plantest.Plan(t, "tiny.sppo")
	if got := names(p, plan.Type0); !slices.Equal(got, []string{"k", "v"}) {
		t.Errorf("type 0: %v", got)
	}
	want := []string{"ln1.in", "ln1.out", "q", "attn.out", "ln2.in", "ln2.out", "fc1.out", "gelu.out"}
	if got := names(p, plan.Type1); !slices.Equal(got, want) {
		t.Errorf("type 1: %v, want %v", got, want)
	}
	for _, u := range p.Units {
		saved := u.Type != plan.Type2
		if saved != (u.FirstBackward != "") || u.Written == "" || u.LastForward == "" {
			t.Errorf("%+v: a unit is written and read in forward, and read in backward unless transient", u)
		}
	}
}

func TestUnitsOfLlama(t *testing.T) {
	p := plantest.Plan(t, "llama-docs.sppo")
	for _, want := range []string{"ln1.in", "q", "attn.out", "gate", "up"} {
		if !slices.Contains(names(p, plan.Type1), want) {
			t.Errorf("type 1 lacks %s: %v", want, names(p, plan.Type1))
		}
	}
	if got := names(p, plan.Type0); !slices.Equal(got, []string{"k", "v"}) {
		t.Errorf("type 0: %v", got)
	}
}

// TestBytesOfThePaper checks that a GPT layer saves 32 bytes per token and hidden feature, as in the paper,
// plus at most 0.1 for statistics.
func TestBytesOfThePaper(t *testing.T) {
	p := plantest.Plan(t, "paper/gpt-7b-1m.sppo")
	sum := 0.0
	for _, u := range p.Units {
		if u.Block == graph.BlockLayer && u.Type != plan.Type2 {
			sum += u.BytesPerToken
		}
	}
	got := sum * float64(p.Parallel.SP) / float64(p.Model.Hidden)
	if math.Abs(got-32) > 0.1 {
		t.Errorf("%.3f bytes for every token and feature, want 32", got)
	}
}

// TestRecomputeSavesLess checks that each recomputation policy saves fewer bytes between forward and backward
// than the previous one, and takes longer.
func TestRecomputeSavesLess(t *testing.T) {
	var bytes ir.Bytes
	var busy ir.Seconds
	for i, policy := range []string{"none", "selective", "keep_attention", "full"} {
		p := plantest.Plan(t, "paper/gpt-7b-512k.sppo", "schedule.recompute="+policy)
		sum := ir.Bytes(0)
		for u, n := range plan.UnitSizes(p.Graph(), p.Size(0))[0] {
			if p.PlacementOf(p.Tasks[0][0], 0)[u] != plan.PlacementRecompute {
				sum += n
			}
		}
		if i > 0 && (sum >= bytes || p.Time.BusyS[0] <= busy) {
			t.Errorf("recompute = %s: %d bytes a layer, busy %s; the policy before: %d, %s", policy, sum, p.Time.BusyS[0], bytes, busy)
		}
		if err := passes.Verify(p); err != nil {
			t.Error(err)
		}
		bytes, busy = sum, p.Time.BusyS[0]
	}
}
