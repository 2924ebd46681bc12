package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/vm/vmtest/naive"
	"sppo.dev/ir"
)

// TestStatesPass cuts a sequence of 4,096 tokens at several places. With all activations recomputed, and their inputs and the
// states on the host, the gradients must be those of the whole sequence in float64, whether states decay slowly or quickly.
func TestStatesPass(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	for _, mixer := range []string{"gated_delta", "kimi_delta", "mamba2"} {
		t.Run(mixer, func(t *testing.T) { checkStates(t, mixer) })
	}
}

func checkStates(t *testing.T, mixer string) {
	t.Helper()
	const tokens = 4096
	traits, cuts := strings.Replace(models["hybrid"], "[full, gated_delta, full]", "["+mixer+", full]", 1), []string{"subsequences=[1, 2, 1021, 1000, 2071, 1]"}
	if mixer == "gated_delta" {
		cuts = append(cuts, "subsequences=1", "subsequences=[4095, 1]")
	} else {
		traits = strings.Replace(traits, "value_heads = 8", "value_heads = 4", 1)
	}
	c := Case{Family: "llama", Traits: traits, Positions: "rope", KVHeads: 1, DType: "f32", Batch: 1, Steps: 1, Layers: 2, Sequence: tokens, Vocab: tinyVocab}.plain()
	for _, rate := range []float32{-3, 3} { // decays of about 0.0015 and 0.6 from token to token
		var loss float64
		var want naive.Tensors
		for _, cut := range cuts {
			_, p, err := compile(c.Spec(), "schedule."+cut, "schedule.offload=full", "schedule.recompute=full", "schedule.partition=flops", "schedule.align=1")
			if err != nil {
				t.Fatal(err)
			}
			job := open(t, p, 1, nil)
			if err := job.Init(t.Context()); err != nil {
				t.Fatal(err)
			}
			rates := slices.Repeat([]float32{rate}, p.Model.LinearValueHeads)
			if err := job.SetTensor("layer.0.linear.rate", ir.RoleMaster, rates); err != nil {
				t.Fatal(err)
			}
			if want == nil {
				loss, want = naive.LossAndGrads(naiveModel(t, p), doubles(tensors(t, p, job, ir.RoleWeight)), tokensOf(t, p, 1))
			}
			got, err := job.Step(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			when := fmt.Sprintf("rate %g, %s", rate, cut)
			checkRelative(t, "loss with "+when, got.Loss, loss, yardstick["f32"].loss)
			checkGradients(t, c, when, tensors(t, p, job, ir.RoleGrad), want, naive.Names(naiveModel(t, p)), yardstick["f32"])
			job.Close()
		}
	}
}
