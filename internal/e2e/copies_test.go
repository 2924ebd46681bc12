package e2e

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/codegen"
	"sppo.dev/internal/irtest"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// TestWhenCopiesGo checks, for several task orders, that no bit depends on how long copies to the host lag
// behind or how far ahead reloads run. Every such plan must verify, and a run must touch exactly the planned
// peaks. Both numbers are edited into the plan, because the passes choose the numbers by estimated times, and
// tiny jobs give the passes no reason to change them.
func TestWhenCopiesGo(t *testing.T) {
	for _, c := range []Case{
		{Family: "gpt", Positions: "rope", DType: "f32", KVHeads: 4, Batch: 2, PP: 2, SP: 1, DP: 1, N: 5, Microbatch: 1, Offload: "full"},
		{Family: "llama", Positions: "rope", DType: "bf16", KVHeads: 2, Batch: 2, PP: 2, SP: 1, DP: 1, N: 8, Microbatch: 1, VirtualStages: 2, Offload: "0.5"},
		{Family: "gpt", Positions: "rope", DType: "f32", KVHeads: 4, Batch: 4, PP: 2, SP: 1, DP: 1, N: 3, Microbatch: 1, Strategy: "seq1f1b", Offload: "full"},
		{Family: "llama", Positions: "rope", DType: "f32", KVHeads: 4, Batch: 3, PP: 3, SP: 1, DP: 1, N: 6, Microbatch: 1, Strategy: "overlapped-sppo", Offload: "full"},
		{Family: "gpt", Positions: "rope", DType: "f32", KVHeads: 4, Batch: 2, PP: 1, SP: 1, DP: 1, N: 5, Microbatch: 1, Order: "layer", Offload: "full"},
		{Family: "llama", Positions: "rope", DType: "bf16", KVHeads: 2, Batch: 4, PP: 2, SP: 1, DP: 1, N: 3, Microbatch: 1, Strategy: "zb-h1", Offload: "full"},
		{Family: "gpt", Positions: "rope", DType: "f32", KVHeads: 4, Batch: 4, PP: 2, SP: 1, DP: 1, N: 1, Microbatch: 1, VirtualStages: 2, Strategy: "zb-v", Offload: "full"},
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

// TestGradientsPutOff splits backward tasks by hand and moves their weight-gradient halves to random later
// positions. If the halves keep their order, no bit changes, whatever else the plan contains.
func TestGradientsPutOff(t *testing.T) {
	seed := irtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, c := range []Case{
		{Family: "gpt", Positions: "learned", DType: "f32", KVHeads: 2, Batch: 2, PP: 2, SP: 2, DP: 1, N: 5, Microbatch: 1, Offload: "full", Tied: true},
		{Family: "llama", Positions: "rope", DType: "bf16", KVHeads: 2, Batch: 4, PP: 2, SP: 2, SPMode: "ulysses", DP: 2, Zero: "3", N: 1, Microbatch: 1, Strategy: "1f1b", Offload: "none", Recompute: "full"},
		{Family: "gpt", Positions: "rope", DType: "f32", KVHeads: 4, Batch: 3, PP: 2, SP: 1, DP: 1, N: 3, Microbatch: 1, VirtualStages: 2, Strategy: "seq1f1b", Offload: "0.5", Recompute: "selective"},
		{Family: "llama", Positions: "none", DType: "f32", KVHeads: 1, Batch: 2, PP: 1, SP: 2, DP: 2, Zero: "2", N: 4, Microbatch: 1, Offload: "carry"},
	} {
		c.Steps, c.Layers, c.Sequence, c.Vocab, c.Partition = 2, 4, 48, tinyVocab, "flops"
		t.Run(c.String(), func(t *testing.T) {
			want := run(t, c)
			for range 3 {
				plan, _, err := compile(c.Spec())
				if err != nil {
					t.Fatal(err)
				}
				for rank, tasks := range plan.Tasks {
					plan.Tasks[rank] = putOff(r, tasks)
				}
				checkSame(t, "the edited plan", runPlan(t, c, plan), want)
			}
		})
	}
}

// putOff splits a random number of the last backward tasks, and draws later positions for their second halves.
func putOff(r *rand.Rand, tasks []plan.Task) []plan.Task {
	backwards := 0
	for _, t := range tasks {
		if t.Kind == plan.Backward {
			backwards++
		}
	}
	whole := r.IntN(backwards)
	var out, late []plan.Task
	for _, t := range tasks {
		out = append(out, t)
		if t.Kind == plan.Backward {
			if whole--; whole < 0 {
				late = append(late, t.As(plan.WeightGrad))
			}
		}
		for len(late) > 0 && r.IntN(3) == 0 {
			out, late = append(out, late[0]), late[1:]
		}
	}
	return append(out, late...)
}

// TestBlocksOfKeys checks that the time at which blocks of K and V arrive changes no bit, and that the length
// of blocks changes only rounding, even if it does not divide the length of a subsequence or exceeds that of
// the sequence.
func TestBlocksOfKeys(t *testing.T) {
	for _, c := range []Case{
		{Family: "gpt", Positions: "rope", DType: "f32", KVHeads: 4, Batch: 2, PP: 2, SP: 2, DP: 1, N: 5, Microbatch: 2, Offload: "full", Keep: "[]"},
		{Family: "llama", Positions: "rope", DType: "bf16", KVHeads: 2, Batch: 2, PP: 1, SP: 1, DP: 1, N: 4, Microbatch: 1, Offload: "none", Keep: "[v]", Order: "layer", Recompute: "full"},
	} {
		c.Steps, c.Layers, c.Sequence, c.Vocab = 2, 4, 48, tinyVocab
		c.Partition = "flops"
		plain := run(t, c.plain())
		for _, block := range []int64{1, 7, 12, 100} {
			var first *Result
			for _, early := range []int{1, 3} {
				t.Run(fmt.Sprintf("%v blocks of %d, %d early", c, block, early), func(t *testing.T) {
					plan, _, err := compile(c.Spec())
					if err != nil {
						t.Fatal(err)
					}
					plan.Stream.Block, plan.Stream.Early = block, early
					got := runPlan(t, c, plan)
					checkClose(t, c, "against the plain program", got, plain)
					if first != nil {
						checkSame(t, "against blocks that come later", got, first)
					}
					first = got
				})
			}
		}
	}
}

// runPlan builds, verifies and runs a plan.
func runPlan(t *testing.T, c Case, plan *plan.Plan) *Result {
	t.Helper()
	p, err := codegen.Build(plan)
	if err != nil {
		t.Fatal(err)
	}
	if err := ir.Verify(p); err != nil {
		t.Fatal(err)
	}
	job := open(t, p, threadsOf(c), nil)
	result := trained(t, p, job, func() {})
	checkPeaks(t, c, plan, p, job)
	return result
}

// TestMixedPlacements checks that every saved tensor of every layer, subsequence and stage may be kept,
// offloaded or recomputed independently of the others without changing any bit. Placements are drawn at random.
func TestMixedPlacements(t *testing.T) {
	seed := irtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, c := range []Case{
		{Family: "gpt", Positions: "learned", DType: "f32", KVHeads: 4, Batch: 2, PP: 2, SP: 2, DP: 1, N: 5, Microbatch: 1},
		{Family: "llama", Positions: "rope", DType: "bf16", KVHeads: 2, Batch: 2, PP: 2, SP: 2, SPMode: "ulysses", DP: 1, N: 4, Microbatch: 1, VirtualStages: 2},
		{Family: "gpt", Positions: "rope", DType: "f32", KVHeads: 1, Batch: 4, PP: 2, SP: 4, DP: 1, N: 3, Microbatch: 2, Strategy: "seq1f1b"},
	} {
		c.Steps, c.Layers, c.Sequence, c.Vocab, c.Partition, c.Offload = 3, 4, 48, tinyVocab, "flops", "none"
		if c.N > 3 {
			c.Sequence = 64
		}
		want := run(t, c)
		for k := range 3 {
			t.Run(fmt.Sprintf("%v %d", c, k), func(t *testing.T) {
				plan, _, err := compile(c.Spec())
				if err != nil {
					t.Fatal(err)
				}
				drawPlacements(r, plan)
				checkSame(t, "the edited plan", runPlan(t, c, plan), want)
			})
		}
	}
}

// drawPlacements draws a placement for every saved tensor. A layer's first saved tensor, its input, cannot be
// recomputed.
func drawPlacements(r *rand.Rand, p *plan.Plan) {
	units := slices.DeleteFunc(slices.Clone(p.Units), func(u plan.Unit) bool { return u.Block != "layer" || u.Type != plan.Type1 })
	for s := range p.Offload.Placement {
		for i, placement := range p.Offload.Placement[s] {
			letters := []byte(placement)
			for at := range letters {
				letters[at] = "okr"[r.IntN(3)]
				if at%len(units) == 0 && letters[at] == plan.PlacementRecompute {
					letters[at] = plan.PlacementOffload
				}
			}
			p.Offload.Placement[s][i] = string(letters)
		}
	}
	p.Offload.Lag, p.Offload.Ahead = 1+r.IntN(3), 1+r.IntN(2)
}

// TestRecomputedCaches checks that recomputing K and V in the backward pass from the inputs of their layers
// changes no bit, wherever those inputs are and however a layer is divided. K and V are recomputed once in
// every layer except those of the last virtual stage, where they are not recomputed.
func TestRecomputedCaches(t *testing.T) {
	for _, c := range []Case{
		{Family: "llama", Positions: "rope", DType: "f32", KVHeads: 2, Batch: 2, SP: 2, DP: 1, N: 5},
		{Family: "gpt", Positions: "learned", DType: "bf16", KVHeads: 4, Batch: 4, SP: 2, SPMode: "ulysses", DP: 2, Zero: "3", N: 3},
		{Family: "llama", Positions: "rope", DType: "bf16", KVHeads: 1, Batch: 1, SP: 2, SPMode: "ring", DP: 1, Zero: "1", N: 3},
		{Family: "gpt", Positions: "rope", DType: "f32", KVHeads: 2, Batch: 1, SP: 1, DP: 1, N: 8, VirtualStages: 2},
	} {
		c.Steps, c.Layers, c.Sequence, c.Vocab, c.PP, c.Microbatch, c.Order = 3, 4, 96, tinyVocab, 1, 1, "layer"
		c.Partition, c.Offload, c.Recompute = "flops", "none", "full"
		c.VirtualStages = cmp.Or(c.VirtualStages, c.Layers)
		kept := run(t, c)
		for _, offload := range []string{"none", "0.5", "full"} {
			t.Run(fmt.Sprintf("%v offload %s", c, offload), func(t *testing.T) {
				c := c
				c.Offload, c.Recompute = offload, "full_kv"
				plan, p, err := compile(c.Spec())
				if err != nil {
					t.Fatal(err)
				}
				want := (c.VirtualStages - 1) * (c.Layers / c.VirtualStages) * c.N * c.Batch / c.DP
				if got := recomputedRows(p); got != want {
					t.Errorf("the step computes K of %d subsequences of layers again, want %d", got, want)
				}
				checkSame(t, "against K and V that stay on the device", runPlan(t, c, plan), kept)
			})
		}
	}
}

// recomputedRows returns the number of instructions of the first rank's step that recompute K.
func recomputedRows(p *ir.Program) (n int) {
	code := &p.Codes[0]
	for i := range code.Sections[ir.SectionStep] {
		in := &code.Sections[ir.SectionStep][i]
		for k, a := range in.Args {
			if _, writes := in.Access(k); writes && a.Present() && strings.HasSuffix(code.Buffers[a.Buffer].Name, ".k.again") {
				n++
			}
		}
	}
	return n
}
