package passes

import (
	"strings"
	"testing"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// TestUlysses checks that a request for sp_mode = ulysses is accepted, that the costs then include updating
// whole weights and summing their gradients, and that a rank keeps the same tensors between the forward and
// backward passes as with divided weights.
func TestUlysses(t *testing.T) {
	megatron, ulysses := plantest.Plan(t, "gpt-docs.sppo"), plantest.Plan(t, "gpt-docs.sppo", "schedule.sp_mode=ulysses")
	if got := megatron.Parallel.SPMode; got != graph.ModeMegatron {
		t.Errorf("without a request the mode is %q", got)
	}
	if got := ulysses.Parallel.SPMode; got != graph.ModeUlysses {
		t.Fatalf("the mode is %q", got)
	}
	if ulysses.Time.OptimizerS <= megatron.Time.OptimizerS {
		t.Errorf("the optimizer of whole weights takes %s, of divided ones %s", ulysses.Time.OptimizerS, megatron.Time.OptimizerS)
	}
	if m, u := plantest.Kept(megatron), plantest.Kept(ulysses); m != u {
		t.Errorf("%g bytes a token are kept, and %g with weights divided", u, m)
	}
}

// TestSlicing checks that matrices are sliced over the ranks that hold the same rows, with padding if the rows do not
// divide evenly. The model has 128 rows in most matrices.
func TestSlicing(t *testing.T) {
	for _, c := range []struct {
		set   []string
		param string
		want  plan.Slicing
	}{
		{nil, "wq", plan.Slicing{SP: 1, DP: 1, Rows: 128}},
		{[]string{"schedule.sp_mode=ulysses"}, "wq", plan.Slicing{SP: 2, DP: 1, Rows: 64}},
		{[]string{"schedule.sp_mode=ulysses"}, "bq", plan.Slicing{SP: 1, DP: 1, Rows: 128}},
		{[]string{"schedule.pp=1", "schedule.dp=2"}, "wq", plan.Slicing{SP: 1, DP: 2, Rows: 64}},
		{[]string{"schedule.pp=1", "schedule.dp=2"}, "ln1.gamma", plan.Slicing{SP: 1, DP: 1, Rows: 128}},
		{[]string{"schedule.pp=1", "schedule.dp=2", "schedule.sp_mode=ulysses"}, "wo", plan.Slicing{SP: 2, DP: 2, Rows: 32}},
		{[]string{"schedule.pp=1", "schedule.dp=2", "schedule.sp_mode=ulysses", "model.ffn=258"}, "w2", plan.Slicing{SP: 2, DP: 2, Rows: 65}},
	} {
		p := plantest.Plan(t, "gpt-docs.sppo", c.set...)
		g := p.Graph()
		for i := range g.Plain(0).Params {
			if param := &g.Plain(0).Params[i]; param.Name == c.param {
				if got := p.Slicing(param); got != c.want {
					t.Errorf("%v: %s in %+v, want %+v", c.set, c.param, got, c.want)
				}
			}
		}
	}
}

func TestZeroSavesStateAndTime(t *testing.T) {
	set := []string{"schedule.pp=1", "schedule.dp=2"}
	divided, whole := plantest.Plan(t, "gpt-docs.sppo", set...), plantest.Plan(t, "gpt-docs.sppo", append(set, "schedule.zero=0")...)
	if divided.Parallel.Zero != 1 || whole.Parallel.Zero != 0 {
		t.Fatalf("zero is %d by itself and %d where 0 is asked for", divided.Parallel.Zero, whole.Parallel.Zero)
	}
	g := divided.Graph()
	_, _, d := divided.StateBytes(g, g.Plain(0))
	if _, _, w := whole.StateBytes(g, g.Plain(0)); d >= w {
		t.Errorf("divided state has %d bytes, whole has %d", d, w)
	}
	if divided.Time.OptimizerS >= whole.Time.OptimizerS {
		t.Errorf("with divided state the optimizer takes %s, with whole %s", divided.Time.OptimizerS, whole.Time.OptimizerS)
	}
}

// Each ZeRO stage keeps less in memory from step to step than the previous one, and leaves less work for the
// end of the step. The time of its additional traffic appears in the layers instead.
func TestZeroTradesMemoryForTraffic(t *testing.T) {
	set := []string{"schedule.pp=1", "schedule.sp=4", "schedule.sp_mode=ulysses", "schedule.align=4", "schedule.subsequences=1", "model.layers=6", "cluster.nvlink_bandwidth=100MB/s"}
	var before *plan.Plan
	for _, zero := range []string{"0", "1", "2", "3"} {
		p := plantest.Plan(t, "gpt-docs.sppo", append(set, "schedule.zero="+zero)...)
		if before != nil && layerState(p) >= layerState(before) {
			t.Errorf("with zero = %s a layer keeps %d bytes, with the stage before %d", zero, layerState(p), layerState(before))
		}
		if before != nil && p.Time.OptimizerS >= before.Time.OptimizerS {
			t.Errorf("with zero = %s a step ends in %s, with the stage before in %s", zero, p.Time.OptimizerS, before.Time.OptimizerS)
		}
		if tasks := p.Time.StepS - p.Time.OptimizerS; zero == "3" && tasks <= before.Time.StepS-before.Time.OptimizerS {
			t.Errorf("bringing weights together costs nothing: %s", tasks)
		}
		before = p
	}
	p := plantest.Plan(t, "gpt-docs.sppo")
	p.Parallel.Zero = 4
	if err := Verify(p); err == nil || !strings.Contains(err.Error(), "or 0 for none, not 4") {
		t.Errorf("an edited plan: %v", err)
	}
}

// Replicas communicate during computation, so ZeRO 1 to 3 leave equal work for the end of the step, and less than no ZeRO.
func TestReplicasCommunicateBesideWork(t *testing.T) {
	set := []string{"schedule.pp=1", "schedule.sp=1", "schedule.dp=4", "train.batch=4", "schedule.subsequences=1", "model.layers=6", "cluster.nvlink_bandwidth=100MB/s"}
	var before *plan.Plan
	for _, zero := range []string{"3", "2", "1", "0"} {
		p := plantest.Plan(t, "gpt-docs.sppo", append(set, "schedule.zero="+zero)...)
		switch {
		case before == nil:
		case zero == "0" && p.Time.OptimizerS <= before.Time.OptimizerS:
			t.Errorf("without ZeRO a step ends in %s, with it in %s", p.Time.OptimizerS, before.Time.OptimizerS)
		case zero != "0" && p.Time.OptimizerS != before.Time.OptimizerS:
			t.Errorf("with zero = %s a step ends in %s, with the next stage in %s", zero, p.Time.OptimizerS, before.Time.OptimizerS)
		}
		before = p
	}
}

func layerState(p *plan.Plan) ir.Bytes {
	g := p.Graph()
	weights, gradients, optimizer := p.StateBytes(g, g.Plain(0))
	return weights + gradients + optimizer
}

func TestUlyssesWantsHeads(t *testing.T) {
	for sequence, hint := range map[int64]string{252: "sp = 2 or 4; or sp_mode = ring", 255: "sp = 1"} {
		sp := plantest.Load(t, "gpt-docs.sppo")
		sp.Schedule.SPMode, sp.Schedule.SP, sp.Schedule.PP, sp.Schedule.Align, sp.Train.Sequence = graph.ModeUlysses, 3, 1, 3, sequence
		err := Run(sp, plan.New(sp), pass.Options{})
		if ds, ok := err.(lang.Diagnostics); !ok || !strings.Contains(ds[0].Message, "4 heads are not divisible by sp = 3") || ds[0].Hint != hint {
			t.Errorf("sequence %d: %v", sequence, err)
		}
	}
	p := plantest.Plan(t, "gpt-docs.sppo")
	p.Parallel.SPMode = "rings"
	if err := Verify(p); err == nil || !strings.Contains(err.Error(), `unknown value "rings"`) {
		t.Errorf("an edited plan: %v", err)
	}
}
