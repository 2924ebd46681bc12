package passes

import (
	"strings"
	"testing"

	"sppo/graph"
	"sppo/ir"
	"sppo/ir/cost"
	"sppo/lang"
)

// TestUlysses: the request is taken, weights and their gradients' sums are priced whole, and what a rank keeps between
// forward and backward is what it keeps with weights divided.
func TestUlysses(t *testing.T) {
	megatron, ulysses := planOf(t, "gpt-docs.sppo"), planOf(t, "gpt-docs.sppo", "schedule.sp_mode=ulysses")
	if got := megatron.Parallel.SPMode; got != graph.ModeMegatron {
		t.Errorf("without a request the mode is %q", got)
	}
	if got := ulysses.Parallel.SPMode; got != graph.ModeUlysses {
		t.Fatalf("the mode is %q", got)
	}
	if ulysses.Time.OptimizerS <= megatron.Time.OptimizerS {
		t.Errorf("the optimizer of whole weights takes %s, of divided ones %s", ulysses.Time.OptimizerS, megatron.Time.OptimizerS)
	}
	if m, u := kept(megatron), kept(ulysses); m != u {
		t.Errorf("%g bytes a token are kept, and %g with weights divided", u, m)
	}
}

func kept(p *Plan) (bytes float64) {
	for _, u := range p.Units {
		if u.Block == layerBlock && u.Type != Type2 {
			bytes += u.BytesPerToken
		}
	}
	return bytes
}

func TestSumTime(t *testing.T) {
	p := planOf(t, "gpt-docs.sppo", "schedule.sp_mode=ulysses")
	g, m := p.Graph(), cost.New(ir.Machine(p.Cluster), p.Parallel.Ranks())
	for i := range g.Layer.Params {
		param := &g.Layer.Params[i]
		if got := p.sumTime(param, g, m); (got > 0) != (param.Shape[1] > 1) {
			t.Errorf("%s: %s", param.Name, got)
		}
	}
}

func TestUlyssesWantsHeads(t *testing.T) {
	sp := load(t, "gpt-docs.sppo")
	sp.Schedule.SPMode, sp.Schedule.SP, sp.Schedule.PP, sp.Schedule.Align, sp.Train.Sequence = graph.ModeUlysses, 3, 1, 3, 255
	err := Run(sp, New(sp), Options{})
	if ds, ok := err.(lang.Diagnostics); !ok || !strings.Contains(ds[0].Message, "4 heads do not divide by sp = 3") || !strings.Contains(ds[0].Hint, "sp = 2 or 4") {
		t.Errorf("%v", err)
	}
	p := planOf(t, "gpt-docs.sppo")
	p.Parallel.SPMode = "rings"
	if err := Verify(p); err == nil || !strings.Contains(err.Error(), `there is no "rings"`) {
		t.Errorf("an edited plan: %v", err)
	}
}
