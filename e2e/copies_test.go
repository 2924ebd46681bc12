package e2e

import (
	"fmt"
	"testing"

	"sppo/codegen"
	"sppo/ir"
	"sppo/passes"
)

// TestWhenCopiesGo: how long copies out may lag and how early copies back are issued changes no bit, whatever the order of
// tasks; every such plan verifies, and its peaks are what a run touches. Lags and distances are put into the plan by hand,
// for the passes choose them by time, and tiny jobs give them no reason to.
func TestWhenCopiesGo(t *testing.T) {
	for _, c := range []Case{
		{Family: "gpt", Positions: "rope", DType: "f32", KVHeads: 4, Batch: 2, PP: 2, SP: 1, DP: 1, N: 5, Microbatch: 1, Offload: "full"},
		{Family: "llama", Positions: "rope", DType: "bf16", KVHeads: 2, Batch: 2, PP: 2, SP: 1, DP: 1, N: 8, Microbatch: 1, VirtualStages: 2, Offload: "0.5"},
		{Family: "gpt", Positions: "rope", DType: "f32", KVHeads: 4, Batch: 4, PP: 2, SP: 1, DP: 1, N: 3, Microbatch: 1, Strategy: "seq1f1b", Offload: "full"},
	} {
		c.Steps, c.Layers, c.Sequence, c.Vocab = 2, 4, 48, tinyVocab
		c.Partition = "flops"
		want := run(t, c)
		for _, timing := range [][2]int{{1, 2}, {2, 1}, {3, 2}, {8, 4}} {
			t.Run(fmt.Sprintf("%v lag %d ahead %d", c, timing[0], timing[1]), func(t *testing.T) {
				plan, _, err := compile(c.Spec())
				if err != nil {
					t.Fatal(err)
				}
				plan.Offload.Lag, plan.Offload.Ahead = timing[0], timing[1]
				checkSame(t, "the edited plan", runPlan(t, c, plan), want)
			})
		}
	}
}

// runPlan builds, verifies and runs a plan.
func runPlan(t *testing.T, c Case, plan *passes.Plan) *Result {
	t.Helper()
	p, err := codegen.Build(plan)
	if err != nil {
		t.Fatal(err)
	}
	if err := ir.Verify(p); err != nil {
		t.Fatal(err)
	}
	job := open(t, p, threadsOf(c), nil)
	result := train(t, p, job, func() {})
	checkPeaks(t, c, plan, p, job)
	return result
}
