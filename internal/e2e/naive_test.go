package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/meaning"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/vmtest/naive"
	"sppo.dev/ir"
)

// yardstick is the tolerance for comparing the plain program with the maths in float64.
var yardstick = map[string]tolerance{
	"f32":  {loss: 2e-6, global: 2e-6, tensor: 1e-5},
	"bf16": {loss: 2e-2, global: 3e-2, tensor: 0.2},
}

// TestPlainEqualsNaive is E4. It covers every family, position encoding, and number of key and value heads,
// with the head tied or not. In every step the plain program must give the same loss, and the same gradient of
// every tensor, as an independent implementation in float64 with the same weights and tokens. Its new weights
// must be those that the optimizer's formula computes from the old weights and these gradients.
//
// Weights are not compared with those of a separate training run. The first steps of AdamW move a weight by the
// learning rate in the direction given by the gradient's sign, however small the gradient is, and the sign of a
// gradient below its rounding error is arbitrary.
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

// TestOptimizersEqualNaive is E4 for the optimizers that TestPlainEqualsNaive does not cover, and for weight
// decay of other groups of tensors.
func TestOptimizersEqualNaive(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	for optimizer, noDecay := range map[string]string{"sgd": "", "muon": "embeddings, norms, attention", "adamw": "head, mlp"} {
		for _, family := range []string{"gpt", "llama"} {
			for _, dtype := range []string{"f32", "bf16"} {
				c := Case{Family: family, Positions: "rope", KVHeads: 2, DType: dtype, Batch: 3, Optimizer: optimizer, NoDecay: noDecay,
					Steps: steps, Layers: 2, Sequence: 20, Vocab: tinyVocab}.plain()
				t.Run(c.String(), func(t *testing.T) {
					t.Parallel()
					checkNaive(t, c)
				})
			}
		}
	}
}

// naiveModel returns a program's model for the naive implementation.
func naiveModel(t testing.TB, p *ir.Program) naive.Config {
	t.Helper()
	model, err := json.Marshal(p.Model)
	if err != nil {
		t.Fatal(err)
	}
	cfg := naive.ConfigOf(model, int(p.Run.Sequence))
	cfg.Seed = p.Run.Seed
	return cfg
}

// TestTraitsEqualNaive is E4 for models with traits beyond those of the two families.
func TestTraitsEqualNaive(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	for _, name := range slices.Sorted(maps.Keys(models)) {
		for i, family := range []string{"gpt", "llama"} {
			for _, dtype := range []string{"f32", "bf16"} {
				c := Case{Family: family, Traits: models[name], Positions: "rope", KVHeads: 4 >> i, Tied: i == 1, DType: dtype, Batch: 3,
					Steps: 5, Layers: 3, Sequence: 20, Vocab: tinyVocab}.plain()
				if strings.Contains(c.Traits, "latent") {
					c.KVHeads = 4 // as many as query heads
				}
				if !c.routesAlike() {
					continue
				}
				t.Run(c.String(), func(t *testing.T) {
					t.Parallel()
					checkNaive(t, c)
				})
			}
		}
	}
}

func checkNaive(t *testing.T, c Case) {
	t.Helper()
	_, p := mustCompile(t, c)
	model := naiveModel(t, p)
	tol, names := yardstick[c.DType], naive.Names(model)
	job := open(t, p, 1, nil)
	if err := job.Init(t.Context()); err != nil {
		t.Fatalf("init: %v", err)
	}
	raiseAdapters(t, p, job)
	all := checkRounded(t, c, p, job)
	if len(all) != len(names) {
		t.Errorf("the program has %d tensors, the model has %d", len(all), len(names))
	}
	names = slices.DeleteFunc(names, func(name string) bool { return !holds(p, name, ir.RoleGrad) })
	weights := only(all, names)
	state := naive.State{Shapes: naive.Shapes(model)}
	for step := 1; step <= c.Steps; step++ {
		when := fmt.Sprintf("step %d", step)
		model.Step = int64(step)
		loss, want := naive.LossAndGrads(model, doubles(tensors(t, p, job, ir.RoleWeight)), tokensOf(t, p, step))
		got, err := job.Step(t.Context())
		if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		grads := tensors(t, p, job, ir.RoleGrad)
		checkRelative(t, "loss of "+when, got.Loss, loss, tol.loss)
		checkGradients(t, c, when, grads, want, names, tol)

		rate := naive.LearningRate(step, c.warmup(), c.Steps, "cosine", lr, minLR)
		before := cloned(weights)
		norm := state.Update(c.naiveOptimizer(), rate, weights, doubles(grads), gradClip)
		checkRelative(t, "gradient norm of "+when, got.GradNorm, norm, 1e-6)
		moved := checkRounded(t, c, p, job)
		checkUnmoved(t, when, moved, all, names)
		moved = only(moved, names)
		if c.Optimizer == "muon" && c.DType == "bf16" {
			checkRoundedSteps(t, when, before, moved, weights, names)
		} else {
			checkUpdate(t, when, moved, weights, names)
		}
		weights = moved
	}
}

// only returns the tensors with the given names.
func only(w naive.Tensors, names []string) naive.Tensors {
	out := naive.Tensors{}
	for _, name := range names {
		out[name] = w[name]
	}
	return out
}

// checkUnmoved checks that no bit of a frozen tensor has changed.
func checkUnmoved(t *testing.T, when string, got, before naive.Tensors, trained []string) {
	t.Helper()
	for name, values := range got {
		if !slices.Contains(trained, name) && !slices.EqualFunc(values, before[name], sameBits) {
			t.Errorf("after %s %s has changed, which is frozen", when, name)
		}
	}
}

// tunings lists lines of the train block that select what is trained.
var tunings = []string{
	`adapter = lora(rank = 4, alpha = 8)`,
	`adapter = lora(rank = 3, targets = [q_proj, v_proj])`,
	`adapter = lora(rank = 2, alpha = 5, targets = [k_proj, down_proj, up_proj])`,
	`adapter = lora(rank = 4, targets = [qkv_proj, o_proj], dropout = 0.4)`,
	`adapter = lora(rank = 3, dropout = 0.1)`,
	`adapter = lora(rank = 4, targets = [c_proj])`,
	`freeze = [embeddings]`,
	`freeze = [norms, biases]`,
	`freeze = [embeddings, "layer.0-1"]`,
	`freeze = [attention, "layer.1.*", "pos"]`,
	`freeze = [embeddings, attention, mlp, biases, "layer.*.ln*"]`,
	`freeze = [embeddings, head, "layer.0", "layer.*.w*"]`,
}

// TestTuningsEqualNaive is E4 for models that are trained only in part.
func TestTuningsEqualNaive(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	for i, tuning := range tunings {
		for k, family := range []string{"gpt", "llama"} {
			for j, dtype := range []string{"f32", "bf16"} {
				c := Case{Family: family, Positions: "rope", Tuning: tuning, KVHeads: 4 >> k, Tied: (i+j)%2 == 1, DType: dtype, Batch: 3,
					Steps: 5, Layers: 3, Sequence: 20, Vocab: tinyVocab}.plain()
				if strings.Contains(tuning, "pos") {
					c.Positions = "learned"
				}
				if strings.Contains(tuning, "head") || strings.HasPrefix(tuning, "freeze = [embeddings, attention") {
					c.Tied = false
				}
				t.Run(c.String(), func(t *testing.T) {
					t.Parallel()
					checkNaive(t, c)
				})
			}
		}
	}
}

// In layers with experts, adapters of the MLP are those of the shared expert. Experts and routers are frozen.
func TestAdaptersOfSharedExperts(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	for _, tuning := range []string{`adapter = lora(rank = 3)`, `adapter = lora(rank = 2, targets = [gate_up_proj, down_proj], dropout = 0.1)`} {
		checkNaive(t, Case{Family: "llama", Positions: "rope", Traits: models["glm"], Tuning: tuning, KVHeads: 2, DType: "f32", Batch: 3,
			Steps: 5, Layers: 3, Sequence: 20, Vocab: tinyVocab}.plain())
	}
}

// The linear maps of linear attention have adapters as published models fuse them, and so has the output gate of attention.
func TestAdaptersOfLinearAttention(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	for _, c := range []struct {
		traits, targets string
		kv              int
	}{
		{"hybrid", "all-linear", 2}, {"hybrid", "[in_proj_qkvz, in_proj_ba, q_proj]", 2}, {"nemotron", "all-linear", 2}, {"mamba", "[in_proj_z, in_proj_a, out_proj]", 2},
		{"kimi", "all-linear", 2}, {"kimi", "[q_proj, f_a_proj, g_b_proj, o_proj]", 2}, {"kimilin", "all-linear", 4}, {"kimilin", "[k_proj, o_proj, g_a_proj]", 4},
	} {
		tuning := "adapter = lora(rank = 3, alpha = 4, dropout = 0.1, targets = " + c.targets + ")"
		small := Case{Family: "llama", Positions: "rope", Traits: models[c.traits], Tuning: tuning, KVHeads: c.kv}
		plain := small
		plain.DType, plain.Batch, plain.Steps, plain.Layers, plain.Sequence, plain.Vocab = "f32", 3, 5, 3, 20, tinyVocab
		checkNaive(t, plain.plain())
		for _, mode := range []string{"megatron", "ulysses"} {
			small.Batch, small.SP, small.SPMode, small.N, small.Layers = 1, 2, mode, 2, 3
			if _, err := meaning.Prove(smallProgram(t, small, false)); err != nil {
				t.Errorf("%s, %s: %v", c.traits, mode, err)
			}
		}
	}
}

// Without rotations, only attention itself can tell that heads of keys begin at a wrong column of frozen weights.
func TestHeadsBetweenHeads(t *testing.T) {
	p := smallProgram(t, Case{Family: "llama", Positions: "learned", KVHeads: 1, Batch: 2, DP: 2, N: 2, Tuning: `freeze = ["layer.*", embeddings, "pos"]`}, false)
	p.Ranks[0].Consts[slices.Index(p.Consts, graph.ConstKV)] = 1
	if err := (ir.VerifyOptions{}).Verify(p); err != nil {
		t.Fatal(err)
	}
	if _, err := meaning.Prove(p); err == nil {
		t.Error("accepted")
	}
}

// The first half of a split backward pass computes the gradients of convolutions, which ranks therefore do not divide.
func TestConvolutionsUnderZero(t *testing.T) {
	p := smallProgram(t, Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 8, PP: 3, SP: 2, DP: 2, Zero: "3", Strategy: "zb-h2", N: 4, Layers: 6, Traits: models["hybrid"]}, false)
	if _, err := meaning.Prove(p); err != nil {
		t.Error(err)
	}
}

// One of four ranks has only padding of an expert with six columns, so that its part of an adapter's product is 0.
func TestAdapterOfPadding(t *testing.T) {
	p := smallProgram(t, Case{Family: "llama", Positions: "rope", KVHeads: 4, Batch: 1, SP: 4, N: 1,
		Traits: "num_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 8\nshared_expert_intermediate_size = 6",
		Tuning: "adapter = lora(rank = 2, alpha = 3, targets = all-linear)"}, false)
	if _, err := meaning.Prove(p); err != nil {
		t.Error(err)
	}
}

// Matrices of equal shapes are updated alike, however several ranks would divide them.
func TestEqualShapes(t *testing.T) {
	smallProgram(t, Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, N: 1, Optimizer: "muon",
		Traits: fmt.Sprintf("layer_types = [gated_delta, full]\nlinear_key_head_dim = 8\nlinear_num_key_heads = 1\nlinear_num_value_heads = 1\nlinear_value_head_dim = %d\nlinear_conv_kernel_dim = 1", hidden)}, false)
}

// If the biases of experts are frozen, the gradient of their router remains, and that of the rows to which they are added does not. If
// only their matrices are frozen, the opcode that computes the gradients of both computes only those of biases. Products of ones are
// those of biases, too.
func TestFrozenPartsOfExperts(t *testing.T) {
	for _, freeze := range []string{"biases", "mlp", `mlp, biases`} {
		c := Case{Family: "gpt", Positions: "rope", KVHeads: 2, Batch: 2, DP: 2, Zero: "3", N: 2, Traits: models["ossmoe"], Tuning: "freeze = [" + freeze + "]"}
		p, biases := smallProgram(t, c, false), 0
		if _, err := meaning.Prove(p); err != nil {
			t.Errorf("%s: %v", freeze, err)
		}
		for i := range p.Codes {
			for _, in := range p.Codes[i].Sections[ir.SectionStep] {
				switch {
				case in.Op != ir.MatmulGroupedWeightGrad:
				case !in.Arg("db").Present():
					biases++
				case in.Arg("a").Cols() > 1 && freeze != "biases":
					t.Errorf("%s: a gradient of frozen matrices is computed", freeze)
				}
			}
		}
		if (biases > 0) != (freeze == "mlp") {
			t.Errorf("%s: %d instructions compute only gradients of biases", freeze, biases)
		}
	}
}

func cloned(w naive.Tensors) naive.Tensors {
	out := naive.Tensors{}
	for name, values := range w {
		out[name] = slices.Clone(values)
	}
	return out
}

// checkRoundedSteps compares steps that the optimizer computes in bf16 with those of the formula, by the norm
// of each tensor's difference. The Newton-Schulz iterations amplify rounding of 2^-9 by up to 3.4^5 where
// singular values are small, but few of them are.
func checkRoundedSteps(t *testing.T, when string, before, got, want naive.Tensors, names []string) {
	t.Helper()
	for _, name := range names {
		difference, size := 0.0, 0.0
		for i, w := range want[name] {
			difference, size = difference+(got[name][i]-w)*(got[name][i]-w), size+(w-before[name][i])*(w-before[name][i])
		}
		if !(difference <= 0.1*0.1*size) {
			t.Errorf("%s: the step of %s is off by %.2g of its norm", when, name, math.Sqrt(difference/size))
		}
	}
}

// checkRounded compares the weights that the forward pass reads with the f32 masters, which it returns.
func checkRounded(t *testing.T, c Case, p *ir.Program, job *train.Job) naive.Tensors {
	t.Helper()
	truth, read := tensors(t, p, job, ir.RoleMaster), tensors(t, p, job, ir.RoleWeight)
	for name := range truth {
		for i, w := range truth[name] {
			if c.DType == "bf16" {
				w = vm.FromBF16(vm.BF16(w))
			}
			if read[name][i] != w {
				t.Fatalf("%s[%d] is read as %v, its f32 truth is %v", name, i, read[name][i], truth[name][i])
			}
		}
	}
	return doubles(truth)
}

func doubles(tensors map[string][]float32) naive.Tensors {
	out := naive.Tensors{}
	for name, values := range tensors {
		for _, v := range values {
			out[name] = append(out[name], float64(v))
		}
	}
	return out
}

// checkUpdate compares weights after an optimizer step. In f32 the decay factor, just below 1, is off by up to
// half a unit in its last place; multiplying by it and subtracting the step add half a unit each. The step
// itself, of the order of the rate, has the error of a dozen operations on its moments.
func checkUpdate(t *testing.T, when string, got, want naive.Tensors, names []string) {
	t.Helper()
	const unit = 1.0 / (1 << 23)
	for _, name := range names {
		for i, w := range want[name] {
			if tolerance := 1.25*unit*math.Abs(w) + 16*unit*lr; !(math.Abs(got[name][i]-w) <= tolerance) {
				t.Errorf("after %s %s[%d] is %.9g, not %.9g within %.2g", when, name, i, got[name][i], w, tolerance)
				break
			}
		}
	}
}

// tokensOf returns a step's batch from the program's data set.
func tokensOf(t *testing.T, p *ir.Program, step int) [][]int32 {
	t.Helper()
	return sequencesOf(t, p, ir.SectionStep, step, p.Run.Batch)
}

// sequencesOf returns the first sequences of a round of a section from the program's data set.
func sequencesOf(t *testing.T, p *ir.Program, section ir.Section, round, count int) [][]int32 {
	t.Helper()
	data, err := train.OpenData(&p.Run, "")
	if err != nil {
		t.Fatalf("opening the data: %v", err)
	}
	batch := make([][]int32, count)
	for i := range batch {
		batch[i] = make([]int32, p.Run.Sequence+1)
		if err := data.Tokens(section, int64(round), int64(i), 0, batch[i], 1); err != nil {
			t.Fatalf("reading the data: %v", err)
		}
	}
	return batch
}
