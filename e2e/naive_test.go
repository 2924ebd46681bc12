package e2e

import (
	"fmt"
	"testing"

	"sppo/ir"
	"sppo/vm"
	"sppo/vm/vmtest/naive"
)

// yardstick is how far the plain program may be from the maths in float64.
var yardstick = map[string]tolerance{
	"f32":  {loss: 2e-6, global: 2e-6, tensor: 1e-5},
	"bf16": {loss: 2e-2, global: 3e-2, tensor: 0.2},
}

// TestPlainEqualsNaive is E4: over every family, kind of positions, number of key and value heads, tied or not, the plain
// program gives the losses of every step, the gradient of every tensor and the weights after the last step that an
// independent implementation in float64 gives from the same initial weights and tokens.
func TestPlainEqualsNaive(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	for _, family := range []string{"gpt", "llama"} {
		for _, positions := range []string{"learned", "rope", "none"} {
			for _, kvHeads := range []int{4, 2, 1} {
				for _, tied := range []bool{false, true} {
					for _, dtype := range []string{"f32", "bf16"} {
						c := Case{Family: family, Positions: positions, KVHeads: kvHeads, Tied: tied, DType: dtype, Batch: 3,
							Steps: steps, Layers: 2, Sequence: 20, Vocab: tinyVocab}.plain()
						t.Run(c.String(), func(t *testing.T) {
							t.Parallel()
							checkNaive(t, c)
						})
					}
				}
			}
		}
	}
}

func (c Case) naive() naive.Config {
	return naive.Config{Family: c.Family, Layers: c.Layers, Hidden: hidden, Heads: heads, KVHeads: c.KVHeads, HeadDim: hidden / heads,
		FFN: ffn, Vocab: c.Vocab, Tied: c.Tied, Positions: c.Positions, RopeTheta: ropeTheta, NormEps: normEps, Sequence: c.Sequence}
}

func checkNaive(t *testing.T, c Case) {
	t.Helper()
	_, p := mustCompile(t, c)
	tol, names := yardstick[c.DType], naive.Names(c.naive())
	job := open(t, p, 1, nil)
	if err := job.Init(t.Context()); err != nil {
		t.Fatalf("init: %v", err)
	}
	weights := initialWeights(t, p, job)
	if len(weights) != len(names) {
		t.Errorf("the program has %d tensors, the model has %d", len(weights), len(names))
	}
	optimizer := naive.AdamW{LR: lr, Beta1: beta1, Beta2: beta2, Eps: eps, WeightDecay: weightDecay}
	var state naive.State
	for step := 1; step <= c.Steps; step++ {
		loss, grads := naive.LossAndGrads(c.naive(), weights, tokensOf(t, p, step))
		rate := naive.LearningRate(step, c.warmup(), c.Steps, "cosine", lr, minLR)
		norm := state.Update(optimizer, rate, weights, grads, gradClip)

		got, err := job.Step(t.Context())
		if err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
		checkRelative(t, fmt.Sprintf("loss of step %d", step), got.Loss, loss, tol.loss)
		checkRelative(t, fmt.Sprintf("gradient norm of step %d", step), got.GradNorm, norm, 10*tol.global)
		if step == 1 {
			checkGradients(t, c, "step 1", tensors(t, p, job, ir.RoleGrad), grads, names, tol)
		}
	}
	checkWeights(t, c, tensors(t, p, job, ir.RoleMaster), weights, names)
}

// initialWeights are what a job starts from, as the forward pass sees them: also the maths begins there.
func initialWeights(t *testing.T, p *ir.Program, job *vm.Job) naive.Tensors {
	t.Helper()
	weights := naive.Tensors{}
	for name, values := range tensors(t, p, job, ir.RoleMaster) {
		for _, v := range values {
			weights[name] = append(weights[name], float64(v))
		}
	}
	return weights
}

// tokensOf is a step's batch, from the data set that the program names.
func tokensOf(t *testing.T, p *ir.Program, step int) [][]int32 {
	t.Helper()
	data, err := vm.OpenData(&p.Run, "")
	if err != nil {
		t.Fatalf("opening the data: %v", err)
	}
	batch := make([][]int32, p.Run.Batch)
	for i := range batch {
		batch[i] = make([]int32, p.Run.Sequence+1)
		if err := data.Tokens(ir.SectionStep, int64(step), int64(i), 0, batch[i], 1); err != nil {
			t.Fatalf("reading the data: %v", err)
		}
	}
	return batch
}

// checkWeights compares final weights tensor by tensor, in units of how far the optimizer can move one: the moments'
// quotient amplifies what rounding does to a gradient near zero.
func checkWeights(t *testing.T, c Case, got map[string][]float32, want naive.Tensors, names []string) {
	t.Helper()
	share := map[string]float64{"f32": 1e-4, "bf16": 5e-2}[c.DType]
	for _, name := range names {
		if zeroGradient(c, name) {
			continue
		}
		if d, s := distance(got[name], want[name]); !(d <= share*s) {
			t.Errorf("after %d steps %s is off by %.2g of its norm %.2g", c.Steps, name, d/s, s)
		}
	}
}
