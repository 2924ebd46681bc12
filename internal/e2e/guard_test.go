package e2e

import (
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"testing"

	"sppo.dev/internal/train"
	"sppo.dev/ir"
)

// stateOf returns the bits of everything that a checkpoint of the job would hold.
func stateOf(t *testing.T, job *train.Job, p *ir.Program) (bits []uint32) {
	t.Helper()
	for i := range p.Tensors {
		for role := range ir.NumRoles {
			values, _, err := job.Tensor(p.Tensors[i].Name, role)
			if err != nil || role == ir.RoleGrad {
				continue // not part of a checkpoint, or the optimizer has no such state
			}
			for _, v := range values {
				bits = append(bits, math.Float32bits(v))
			}
		}
	}
	return bits
}

// guarded runs steps and checks that a skipped step changes no bit of the state and that every other step
// changes some bits.
func guarded(t *testing.T, job *train.Job, p *ir.Program, steps int) (results []string, skipped int) {
	t.Helper()
	before := stateOf(t, job, p)
	for range steps {
		r, err := job.Step(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		after := stateOf(t, job, p)
		if same := slices.Equal(before, after); same != r.Skipped {
			t.Errorf("step %d: skipped %t, state unchanged %t", r.Step, r.Skipped, same)
		}
		if before = after; r.Skipped {
			skipped++
		}
		results = append(results, fmt.Sprint(r.Loss, r.GradNorm, r.Skipped))
	}
	return results, skipped
}

// Steps whose gradients are too large leave weights and optimizer state unchanged, under every optimizer and
// wherever its state is. All ranks agree, a resumed run skips the same steps, and the division into stages
// changes no bit.
func TestSpikesAreSkipped(t *testing.T) {
	for _, x := range []struct {
		dtype string
		set   []string
	}{
		{"f32", nil},
		{"bf16", []string{"schedule.zero=2", "schedule.dp=2", "train.batch=2"}},
		{"bf16", []string{"train.optimizer=muon(lr = 1e-3)", "schedule.zero=1", "schedule.dp=2", "train.batch=2"}},
		{"f32", []string{"train.optimizer=sgd(lr = 0.01)"}},
		{"bf16", []string{"schedule.optimizer_offload=host"}},
	} {
		t.Run(fmt.Sprint(x), func(t *testing.T) {
			c := Case{Family: "gpt", KVHeads: 4, Positions: "rope", DType: x.dtype, PP: 1, SP: 1, DP: 1, N: 1, Offload: "none",
				Partition: "flops", Batch: 1, Microbatch: 1, Steps: 30, Layers: 2, Sequence: 16, Vocab: tinyVocab}
			set := append([]string{"train.guard.spikes=0.9", "train.data=random()"}, x.set...)
			start := func(more ...string) (*train.Job, *ir.Program) {
				_, p, err := compile(c.Spec(), append(set, more...)...)
				if err != nil {
					t.Fatal(err)
				}
				job := open(t, p, 1, nil)
				if err := job.Init(t.Context()); err != nil {
					t.Fatal(err)
				}
				return job, p
			}
			job, p := start()
			first, _ := guarded(t, job, p, 15)
			path := filepath.Join(t.TempDir(), "checkpoint")
			if err := job.Save(path); err != nil {
				t.Fatal(err)
			}
			second, skipped := guarded(t, job, p, 15)
			if skipped == 0 {
				t.Fatalf("no step was skipped, so nothing was tested: %v", append(first, second...))
			}
			resumed, p := start("schedule.pp=2")
			if err := resumed.Restore(t.Context(), path); err != nil {
				t.Fatal(err)
			}
			if got, _ := guarded(t, resumed, p, 15); !slices.Equal(got, second) {
				t.Errorf("resumed in two stages:\n%v, want\n%v", got, second)
			}
			again, p := start("schedule.pp=2")
			if got, _ := guarded(t, again, p, 15); !slices.Equal(got, first) {
				t.Errorf("in two stages:\n%v, want\n%v", got, first)
			}
		})
	}
}

// With the default guard, a step whose gradients are not finite changes no state.
func TestNonFiniteStepsAreSkipped(t *testing.T) {
	for _, optimizer := range []string{"adamw(lr = 1e9)", "muon(lr = 1e18)", "sgd(lr = 1e18)"} {
		c := Case{Family: "gpt", KVHeads: 4, Positions: "rope", DType: "f32", PP: 1, SP: 1, DP: 1, N: 1, Offload: "none",
			Partition: "flops", Batch: 1, Microbatch: 1, Steps: 30, Layers: 2, Sequence: 16, Vocab: tinyVocab}
		_, p, err := compile(c.Spec(), "schedule.pp=2", "schedule.sp=2", "train.warmup=0", "train.optimizer="+optimizer)
		if err != nil {
			t.Fatal(err)
		}
		job := open(t, p, 1, nil)
		if err := job.Init(t.Context()); err != nil {
			t.Fatal(err)
		}
		if results, skipped := guarded(t, job, p, 6); skipped < 3 {
			t.Errorf("%s: %v: too few skipped to test anything", optimizer, results)
		}
	}
}
