package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/train"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// TestResume is E6. A run that stops at a checkpoint and continues in a new job is bitwise equal to an
// uninterrupted run, even when it continues under another schedule that E1 and E2 declare equal.
func TestResume(t *testing.T) {
	for i, c := range []Case{
		{Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", PP: 2, SP: 2, DP: 2, N: 3, Offload: "0.5"},
		{Family: "gpt", KVHeads: 2, Positions: "learned", DType: "f32", PP: 2, SP: 2, SPMode: "ulysses", DP: 2, Zero: "1", N: 3, Offload: "full"},
		{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", PP: 1, SP: 4, SPMode: "ulysses", DP: 1, Zero: "1", N: 3, Offload: "none"},
		{Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", PP: 1, SP: 2, SPMode: "ulysses", DP: 2, Zero: "3", N: 3, Offload: "full"},
		{Family: "gpt", KVHeads: 2, Positions: "learned", DType: "f32", PP: 2, SP: 4, SPMode: "ring", DP: 2, Zero: "1", N: 3, Offload: "full"},
		{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", PP: 2, SP: 1, DP: 2, Zero: "3", N: 1, Offload: "none"},
		{Family: "llama", KVHeads: 1, Positions: "rope", DType: "bf16", Tied: true, PP: 4, SP: 4, DP: 1, N: 8, Offload: "full"},
		{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", PP: 2, SP: 2, DP: 2, Zero: "1", N: 3, Offload: "none", Optimizer: "sgd"},
		{Family: "llama", KVHeads: 2, Positions: "learned", DType: "bf16", PP: 1, SP: 2, DP: 2, Zero: "1", N: 3, Offload: "full", OptimizerOffload: "host"},
		{Family: "gpt", KVHeads: 1, Positions: "learned", DType: "f32", PP: 2, SP: 4, DP: 2, Zero: "1", N: 3, Offload: "0.5", Optimizer: "muon", OptimizerOffload: "host"},
		{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", PP: 2, SP: 2, DP: 2, Zero: "1", N: 3, Offload: "0.5", Moments: "bf16"},
		{Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", PP: 2, SP: 2, SPMode: "ulysses", DP: 2, Zero: "1", N: 3, Offload: "full", OptimizerOffload: "host", Moments: "bf16"},
		{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", PP: 2, SP: 1, DP: 2, Zero: "3", N: 1, Offload: "none", Moments: "bf16"},
		{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", PP: 2, SP: 2, DP: 2, Zero: "1", N: 3, Offload: "none", Optimizer: "sgd", Moments: "bf16"},
		{Family: "gpt", KVHeads: 1, Positions: "learned", DType: "bf16", PP: 2, SP: 4, DP: 2, Zero: "1", N: 3, Offload: "0.5", Optimizer: "muon", OptimizerOffload: "host", Moments: "bf16"},
		{Family: "gpt", Window: "[5, 20]", KVHeads: 2, Positions: "learned", DType: "f32", PP: 2, SP: 2, DP: 2, Zero: "1", N: 3, Offload: "full"},
		{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", PP: 1, SP: 4, SPMode: "megatron-ring", DP: 2, Zero: "3", N: 2, Offload: "full"},
		{Family: "llama", Window: "[8, 0]", KVHeads: 1, Positions: "rope", DType: "bf16", PP: 2, SP: 2, SPMode: "ring", DP: 1, N: 3, Offload: "0.5", Recompute: "full"},
		{Family: "llama", Window: "[3, 16, 0]", KVHeads: 2, Positions: "rope", DType: "f32", PP: 2, SP: 1, DP: 1, N: 8, Keep: "[]", Offload: "full"},
		{Family: "llama", Tuning: "adapter = lora(rank = 3, alpha = 6, dropout = 0.2)", KVHeads: 2, Positions: "rope", DType: "bf16", PP: 2, SP: 2, DP: 2, Zero: "1", N: 3, Offload: "full", OptimizerOffload: "host"},
		{Family: "gpt", Tuning: `freeze = [embeddings, biases, "layer.0-2"]`, KVHeads: 4, Positions: "learned", DType: "bf16", PP: 2, SP: 2, SPMode: "ring", DP: 2, Zero: "1", N: 3, Offload: "0.5"},
	} {
		if !numbers && i%4 != 0 { // under the race detector, TestSchedulesAreEqual runs all kinds of steps; how checkpoints are written differs less
			continue
		}
		c.Partition, c.Batch, c.Microbatch, c.Steps, c.Layers, c.Sequence, c.Vocab = "flops", 4, 2, min(steps, 8), 4, 48, tinyVocab
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			_, p := mustCompile(t, c)
			whole := trained(t, p, open(t, p, 1, nil), func() {})

			path := filepath.Join(t.TempDir(), "checkpoint")
			save(t, p, path, 3)
			checkResumed(t, "the same program", p, path, whole)
			if !numbers {
				return
			}
			_, other := mustCompile(t, c.unpiped())
			checkResumed(t, "one stage without offload, nothing divided among replicas", other, path, whole)
		})
	}
}

// TestResumeOnOtherRanks checks that a checkpoint moves between numbers of ranks that do not divide the rows of
// matrices: masters and optimizer states are the same to the bit, and the run continues with the same losses, up to
// rounding.
func TestResumeOnOtherRanks(t *testing.T) {
	base := Case{Family: "gpt", Positions: "learned", KVHeads: 2, DType: "f32", PP: 1, SP: 1, DP: 1, N: 1, Partition: "flops", Offload: "none",
		Batch: 15, Microbatch: 1, Steps: 4, Layers: 2, Sequence: 24, Vocab: tinyVocab}
	three, five, six := base, base, base
	three.DP, three.Zero = 3, "3"
	five.DP, five.Zero = 5, "1"
	six.DP, six.SP, six.Zero, six.PP = 3, 2, "2", 2
	four := base
	four.SP, four.SPMode, four.Zero = 4, "megatron-ring", "3"
	for _, c := range []struct{ from, to Case }{{three, five}, {five, three}, {three, base}, {base, six}, {six, five}, {three, four}, {four, six}} {
		t.Run(fmt.Sprint(c.from, " to ", c.to), func(t *testing.T) {
			t.Parallel()
			_, from := mustCompile(t, c.from)
			whole := trained(t, from, open(t, from, 1, nil), func() {})
			saved := open(t, from, 1, nil)
			if err := saved.Init(t.Context()); err != nil {
				t.Fatal(err)
			}
			doSteps(t, saved, 2)
			path := filepath.Join(t.TempDir(), "checkpoint")
			if err := saved.Save(path); err != nil {
				t.Fatal(err)
			}
			_, to := mustCompile(t, c.to)
			restored := open(t, to, 1, nil)
			if err := restored.Init(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := restored.Restore(t.Context(), path); err != nil {
				t.Fatal(err)
			}
			for _, role := range []ir.Role{ir.RoleMaster, ir.RoleMoment1, ir.RoleMoment2} {
				if d := differing(tensors(t, to, restored, role), tensors(t, from, saved, role), whole.Names); len(d) > 0 {
					t.Errorf("%s differs in %v", role, d)
				}
			}
			checkResumedClosely(t, "other ranks", to, path, whole)
		})
	}
}

// TestResumeOnLearningRates checks, for every learning-rate schedule, that a run continues as if it had not
// stopped, even with a different number of stages.
func TestResumeOnLearningRates(t *testing.T) {
	words := lang.FindKey("train.lr_schedule").Words()
	slices.Sort(words)
	if want := slices.Sorted(slices.Values(ir.LRSchedules)); !slices.Equal(words, want) {
		t.Fatalf("the language has the schedules %v, programs have %v", words, want)
	}
	c := Case{Family: "llama", KVHeads: 4, Positions: "rope", DType: "f32", PP: 1, SP: 1, DP: 1, N: 2, Offload: "none",
		Partition: "flops", Batch: 1, Microbatch: 1, Steps: 8, Layers: 2, Sequence: 16, Vocab: tinyVocab}
	other := c
	other.PP = 2
	losses := map[float64]string{}
	for _, name := range words {
		set := []string{"train.lr_schedule=" + name, "train.warmup=1"}
		if name == ir.LRStableDecay {
			set = append(set, "train.decay_steps=4")
		}
		_, p, err := compile(c.Spec(), set...)
		if err != nil {
			t.Fatal(err)
		}
		whole := trained(t, p, open(t, p, 1, nil), func() {})
		path := filepath.Join(t.TempDir(), "checkpoint")
		save(t, p, path, 4)
		_, piped, err := compile(other.Spec(), set...)
		if err != nil {
			t.Fatal(err)
		}
		checkResumed(t, name+" over two stages", piped, path, whole)
		last := whole.Losses[len(whole.Losses)-1]
		if losses[last] != "" {
			t.Errorf("%s and %s end alike", name, losses[last])
		}
		losses[last] = name
	}
}

// A run resumes from a checkpoint only with the same model. Another model is refused even if its tensors have
// the same names and shapes, and the error names the difference. Data and optimizer settings may change.
func TestResumeOfAnotherModel(t *testing.T) {
	c := Case{Family: "llama", KVHeads: 4, Positions: "rope", DType: "bf16", PP: 1, SP: 1, DP: 1, N: 1, Offload: "none",
		Partition: "flops", Batch: 1, Microbatch: 1, Steps: 2, Layers: 1, Sequence: 16, Vocab: tinyVocab}
	_, p := mustCompile(t, c)
	path := filepath.Join(t.TempDir(), "checkpoint")
	save(t, p, path, 1)
	for _, x := range []struct{ set, want string }{
		{"model.heads=2 model.kv_heads=2 model.head_dim=16", "has heads = 4, kv_heads = 4, head_dim = 8, attn_scale = 0.35355339059327373, but this program has heads = 2, kv_heads = 2, head_dim = 16, attn_scale = 0.25"},
		{"model.rope_theta=500000", "has rope_theta = 100, but this program has rope_theta = 500000"},
		{"model.norm_eps=1e-6", "has norm_eps = 1e-05, but this program has norm_eps = 1e-06"},
		{"model.positions=none", "has positions = rope, rope_theta = 100, rope_partial = 1, rope_amplitude = 1, but this program has positions = none, rope_theta = none, rope_partial = none"},
		{"model.dtype=f32", "has dtype = bf16, but this program has dtype = f32"},
		{"train.optimizer.lr=1e-5 train.optimizer.weight_decay=0 train.lr_schedule=constant train.holdout=0.3 model.init_std=0.5", ""},
	} {
		_, other, err := compile(c.Spec(), strings.Fields(x.set)...)
		if err != nil {
			t.Fatalf("%s: %v", x.set, err)
		}
		job := open(t, other, 1, nil)
		if err := job.Init(t.Context()); err != nil {
			t.Fatal(err)
		}
		err = job.Restore(t.Context(), path)
		if x.want == "" && err != nil || x.want != "" && (err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "is of a different model: it "+x.want)) {
			t.Errorf("%s: %v, want %s", x.set, err, x.want)
		}
	}
}

// A run resumes from a checkpoint only with an optimizer that has the same states.
func TestResumeUnderAnotherOptimizer(t *testing.T) {
	c := Case{Family: "gpt", KVHeads: 4, Positions: "rope", DType: "bf16", PP: 1, SP: 1, DP: 1, N: 1, Offload: "none",
		Partition: "flops", Batch: 1, Microbatch: 1, Steps: 2, Layers: 1, Sequence: 16, Vocab: tinyVocab}
	_, p := mustCompile(t, c)
	path := filepath.Join(t.TempDir(), "checkpoint")
	save(t, p, path, 1)
	for _, x := range []struct{ optimizer, want string }{
		{"sgd", "was saved with a different optimizer: it has moment1, moment2, but this program has momentum"},
		{"muon", "was saved with a different optimizer: it has moment1, moment2, but this program has moment1, moment2, momentum"},
	} {
		other := c
		other.Optimizer = x.optimizer
		_, p := mustCompile(t, other)
		job := open(t, p, 1, nil)
		if err := job.Init(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := job.Restore(t.Context(), path); err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %s", x.optimizer, err, x.want)
		}
	}
}

// save runs some steps, saves, and runs one more step, which must not affect the checkpoint.
func save(t *testing.T, p *ir.Program, path string, steps int) {
	t.Helper()
	job := open(t, p, 1, nil)
	if err := job.Init(t.Context()); err != nil {
		t.Fatalf("init: %v", err)
	}
	raiseAdapters(t, p, job)
	doSteps(t, job, steps)
	os.RemoveAll(path)
	if err := job.Save(path); err != nil {
		t.Fatalf("saving: %v", err)
	}
	doSteps(t, job, 1)
}

func doSteps(t testing.TB, job *train.Job, n int) (last train.StepResult) {
	t.Helper()
	for range n {
		var err error
		if last, err = job.Step(t.Context()); err != nil {
			t.Fatalf("step: %v", err)
		}
	}
	return last
}

func checkResumed(t *testing.T, what string, p *ir.Program, path string, whole *Result) {
	t.Helper()
	job := open(t, p, 2, nil)
	if err := job.Init(t.Context()); err != nil {
		t.Fatalf("init: %v", err)
	}
	if err := job.Restore(t.Context(), path); err != nil {
		t.Fatalf("%s: restoring: %v", what, err)
	}
	for job.Steps() < p.Run.Steps {
		step := doSteps(t, job, 1)
		if want := whole.Losses[step.Step-1]; !sameBits(step.Loss, want) {
			t.Errorf("%s: step %d has loss %v, not %v", what, step.Step, step.Loss, want)
		}
	}
	if d := differing(tensors(t, p, job, ir.RoleMaster), whole.Weights, whole.Names); len(d) > 0 {
		t.Errorf("%s: final weights differ in %v", what, d)
	}
}
