package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/meaning"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm/vmtest/naive"
	"sppo.dev/ir"
)

// Steps count how often each expert is chosen, over all ranks and microbatches, and change what is added to the experts' scores as the
// formula says, exactly.
func TestExpertsAreBalanced(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	const rate = 0.0625
	for _, c := range []Case{
		{Batch: 3, N: 1},
		{Batch: 4, N: 3, Order: "layer", DType: "bf16"},
		{Batch: 2, PP: 2, SP: 2, N: 3, Mux: "left"},
		{Batch: 4, PP: 2, SP: 2, SPMode: "ring", N: 2, DP: 2, Zero: "3", GradReduce: "bf16", DType: "bf16"},
		{Batch: 2, SP: 2, SPMode: "ulysses", N: 2, DP: 2, Zero: "1", Optimizer: "sgd"},
		{Batch: 1, PP: 2, VirtualStages: 2, Strategy: "interleaved-sppo", N: 4, Recompute: "full"},
		{Batch: 2, PP: 3, N: 4, Mux: "right"},
		{Batch: 2, DP: 2, N: 2, Zero: "2"},
		{Batch: 2, PP: 2, SP: 2, SPMode: "ulysses", N: 2, ExpertParallel: "on"},
		{Batch: 2, SP: 4, SPMode: "megatron-ring", N: 2, ExpertParallel: "on"},
	} {
		c.Family, c.Positions, c.KVHeads, c.Layers, c.Steps, c.Traits = "llama", "rope", 2, max(3, 2*c.PP), 2, strings.Replace(models["glm"], "router_aux_loss_coef = 0.2", "", 1)
		c.Tuning = fmt.Sprintf("moe_router_bias_update_rate = %v", rate)
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			p, job, model := proved(t, c)
			moved := false
			for step := 1; step <= c.Steps; step++ {
				before := doubles(tensors(t, p, job, ir.RoleWeight))
				_, grads := naive.LossAndGrads(model, before, tokensOf(t, p, step))
				got, err := job.Step(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				after := doubles(tensors(t, p, job, ir.RoleWeight))
				for layer, load := range got.ExpertLoad {
					name := fmt.Sprintf("layer.%d.router.correction", layer)
					if c.DType != "bf16" && !slices.Equal(load, grads[name]) {
						t.Errorf("step %d: the load of layer %d is %v, not %v", step, layer, load, grads[name])
					}
					if load == nil {
						continue
					}
					want := naive.Balance(before[name], load, rate)
					moved = moved || !slices.Equal(want, before[name])
					if !slices.Equal(after[name], want) {
						t.Errorf("step %d: %s is %v after %v, not %v", step, name, after[name], before[name], want)
					}
				}
			}
			if !moved {
				t.Error("no step has changed anything")
			}
		})
	}
}

// The loss that balances the experts of all layers together is the same however layers, tokens and microbatches are divided.
func TestJointLoss(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	for _, c := range []Case{
		{Batch: 2, N: 3, Order: "layer", Microbatch: 2},
		{Batch: 4, PP: 2, SP: 2, SPMode: "ring", N: 2, DP: 2, Zero: "3", Recompute: "full"},
		{Batch: 3, PP: 3, SP: 2, N: 2, Strategy: "seq1f1b"},
		{Batch: 2, SP: 4, SPMode: "megatron-ring", N: 2},
		{Batch: 2, PP: 2, SP: 2, SPMode: "ring", N: 2, ExpertParallel: "on"},
		{Batch: 2, PP: 2, SP: 2, SPMode: "ulysses", N: 3, Mux: "right"},
		{Batch: 1, PP: 2, VirtualStages: 2, Strategy: "interleaved-sppo", N: 4},
		{Batch: 4, PP: 2, N: 1, VirtualStages: 2, Strategy: "zb-v"},
		{Batch: 2, PP: 2, N: 2, Tuning: `freeze = ["layer.0.router.*"]`},
	} {
		c.Family, c.Positions, c.KVHeads, c.Layers, c.Traits = "llama", "rope", 2, max(3, 2*c.PP), models["joint"]
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			p, job, model := proved(t, c)
			_, want := naive.LossAndGrads(model, doubles(tensors(t, p, job, ir.RoleWeight)), tokensOf(t, p, 1))
			if _, err := job.Step(t.Context()); err != nil {
				t.Fatal(err)
			}
			names := slices.DeleteFunc(naive.Names(model), func(name string) bool { return !holds(p, name, ir.RoleGrad) })
			checkGradients(t, c, "step 1", tensors(t, p, job, ir.RoleGrad), want, names, yardstick["f32"])
		})
	}
}

// proved compiles the small program of a case, proves what it means, and begins a run of it.
func proved(t *testing.T, c Case) (*ir.Program, *train.Job, naive.Config) {
	t.Helper()
	p := smallProgram(t, c, false)
	if _, err := meaning.Prove(p); err != nil {
		t.Fatal(err)
	}
	job := open(t, p, 1, nil)
	if err := job.Init(t.Context()); err != nil {
		t.Fatal(err)
	}
	return p, job, naiveModel(t, p)
}
