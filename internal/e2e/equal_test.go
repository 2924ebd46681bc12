package e2e

import (
	"cmp"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"sppo.dev/internal/irtest"
	"sppo.dev/internal/meaning"
)

// TestSchedulesAreEqual runs the covering set. Each case must equal, bitwise, the same case on one stage
// without offload (E1, E2) and, within rounding, the plain program of its model (E3). Every run checks E5.
func TestSchedulesAreEqual(t *testing.T) {
	rows, _, _ := cover()
	for _, r := range rows[:min(len(rows), coverCases)] {
		c := r.toCase()
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			checkCase(t, c)
		})
	}
}

func checkCase(t *testing.T, c Case) {
	t.Helper()
	got := run(t, c)
	if !numbers {
		return
	}
	if c.Mux == "" { // with mux, the order of sums depends on which rank runs a piece
		checkSame(t, "E1 and E2: against one stage without offload", got, run(t, c.unpiped()))
	}
	if c.routesAlike() {
		checkClose(t, c, "E3: against the plain program", got, run(t, c.plain()))
	}
}

// outside lists cases beyond the space: sequences longer than the tiles of attention, a vocabulary so large
// that the head divides a subsequence into several chunks, stages with different numbers of layers, more
// replicas.
var outside = []Case{
	{Family: "gpt", KVHeads: 2, Positions: "learned", DType: "f32", Batch: 2, Layers: 2, Sequence: 640, Vocab: tinyVocab,
		PP: 2, SP: 2, DP: 1, N: 5, Microbatch: 2, Partition: "flops", Offload: "full"},
	{Family: "llama", KVHeads: 1, Positions: "rope", DType: "f32", Batch: 2, Layers: 2, Sequence: 336, Vocab: tinyVocab,
		PP: 2, SP: 4, DP: 2, N: 3, Microbatch: 1, Partition: "length", Offload: "0.5"},
	{Family: "llama", KVHeads: 4, Positions: "rope", DType: "bf16", Batch: 1, Layers: 2, Sequence: 640, Vocab: tinyVocab,
		PP: 2, SP: 1, DP: 1, N: 4, Microbatch: 1, Partition: "flops", Offload: "full"},
	{Family: "gpt", KVHeads: 4, Positions: "none", DType: "f32", Batch: 1, Layers: 2, Sequence: 160, Vocab: 131101, Tied: true, Steps: 1,
		PP: 2, SP: 2, DP: 1, N: 1, Microbatch: 1, Partition: "flops", Offload: "none"},
	{Family: "gpt", KVHeads: 4, Positions: "rope", DType: "f32", Batch: 8, Layers: 5, Sequence: 48, Vocab: tinyVocab, Tied: true,
		PP: 3, SP: 1, DP: 4, Zero: "1", N: 2, Microbatch: 1, Partition: "flops", Offload: "full"},
	{Family: "llama", KVHeads: 4, Positions: "rope", DType: "f32", Batch: 8, Layers: 9, Sequence: 48, Vocab: tinyVocab,
		PP: 2, SP: 2, SPMode: "ulysses", DP: 4, Zero: "3", N: 2, Microbatch: 1, Partition: "flops", Offload: "full", Recompute: "full"},
	{Family: "llama", KVHeads: 2, Positions: "learned", DType: "f32", Batch: 8, Layers: 7, Sequence: 48, Vocab: tinyVocab,
		PP: 5, SP: 2, DP: 1, N: 4, Microbatch: 4, Partition: "flops", Offload: "0.5"},
	{Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", Batch: 2, Layers: 7, Sequence: 48, Vocab: tinyVocab, Tied: true,
		PP: 2, SP: 1, DP: 1, N: 6, Microbatch: 1, VirtualStages: 3, Strategy: "interleaved-sppo", Partition: "flops", Offload: "full"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", Batch: 2, Layers: 3, Sequence: 48, Vocab: tinyVocab, // the last virtual stage has no layers
		PP: 2, SP: 1, DP: 1, N: 4, Microbatch: 1, VirtualStages: 2, Strategy: "interleaved-sppo", Partition: "flops", Offload: "full"},
	{Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", Batch: 4, Layers: 2, Sequence: 48, Vocab: tinyVocab, Tied: true, // nor has the first
		PP: 2, SP: 2, DP: 2, Zero: "3", N: 2, Microbatch: 1, VirtualStages: 2, Strategy: "seq1f1b", Partition: "flops", Offload: "carry", Recompute: "selective"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 4, Layers: 7, Sequence: 48, Vocab: tinyVocab, // very unequal stages
		PP: 2, SP: 2, DP: 1, N: 4, Microbatch: 1, VirtualStages: 2, LayersPerStage: "[0, 4, 1, 2]", Partition: "flops", Offload: "0.5", Recompute: "selective"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 2, Layers: 4, Sequence: 48, Vocab: tinyVocab,
		PP: 3, SP: 1, DP: 1, N: 6, Microbatch: 1, VirtualStages: 2, Keep: "[]", Partition: "length", Offload: "full"},
	{Family: "gpt", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 4, Layers: 3, Sequence: 24, Vocab: tinyVocab,
		Tuning: `freeze = ["embed", "layer.0"]`,
		PP:     2, SP: 1, DP: 1, N: 1, Microbatch: 1, VirtualStages: 2, Strategy: "zb-v", Partition: "flops", Offload: "0.5"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 6, Layers: 7, Sequence: 48, Vocab: tinyVocab,
		PP: 3, SP: 2, DP: 1, N: 3, Microbatch: 1, VirtualStages: 2, Strategy: "seq1f1b", Partition: "flops", Offload: "0.5"},
	{Family: "gpt", KVHeads: 2, Positions: "learned", DType: "f32", Batch: 9, Layers: 7, Sequence: 24, Vocab: tinyVocab, Tied: true,
		PP: 3, SP: 1, DP: 1, N: 1, Microbatch: 1, VirtualStages: 2, Strategy: "zb-v", Partition: "flops", Offload: "full", Recompute: "selective"},
	{Family: "llama", KVHeads: 4, Positions: "rope", DType: "f32", Batch: 14, Layers: 6, Sequence: 24, Vocab: tinyVocab, Tied: true,
		PP: 3, SP: 2, DP: 2, Zero: "1", N: 1, Microbatch: 1, VirtualStages: 2, Strategy: "dualpipe-v", Partition: "flops", Offload: "0.5"},
	{Family: "gpt", KVHeads: 1, Positions: "rope", DType: "f32", Batch: 5, Layers: 9, Sequence: 48, Vocab: tinyVocab,
		PP: 4, SP: 2, SPMode: "ulysses", DP: 1, N: 3, Microbatch: 1, Strategy: "zb-h2", Partition: "flops", Offload: "full", Recompute: "full"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 2, Layers: 2, Sequence: 1200, Vocab: tinyVocab,
		PP: 2, SP: 3, SPMode: "ring", DP: 1, N: 2, Microbatch: 1, Partition: "flops", Offload: "full"},
	{Family: "gpt", KVHeads: 1, Positions: "learned", DType: "bf16", Batch: 4, Layers: 4, Sequence: 192, Vocab: tinyVocab, Tied: true,
		PP: 2, SP: 8, SPMode: "ring", DP: 2, Zero: "3", N: 3, Microbatch: 2, Partition: "length", Offload: "0.5", Recompute: "full"},
	{Family: "llama", KVHeads: 1, Positions: "rope", DType: "bf16", Batch: 4, Layers: 4, Sequence: 192, Vocab: tinyVocab, Tied: true,
		PP: 2, SP: 8, SPMode: "ring", DP: 2, Zero: "3", N: 3, Microbatch: 2, Partition: "length", Offload: "0.5", Recompute: "full"},
	{Family: "gpt", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 6, Layers: 5, Sequence: 100, Vocab: tinyVocab,
		PP: 3, SP: 5, SPMode: "ring", DP: 2, Zero: "1", N: 4, Microbatch: 1, Strategy: "zb-h1", Partition: "flops", Offload: "carry", Recompute: "selective"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 2, Layers: 3, Sequence: 192, Vocab: tinyVocab, // rings of groups in which ranks share key heads
		PP: 2, SP: 8, SPMode: "megatron-ring", DP: 2, Zero: "3", N: 3, Microbatch: 1, Partition: "flops", Offload: "full", Recompute: "selective"},
	{Family: "gpt", KVHeads: 1, Positions: "learned", DType: "bf16", Batch: 4, Layers: 3, Sequence: 192, Vocab: tinyVocab, Tied: true,
		PP: 2, SP: 8, SPMode: "ulysses-ring", DP: 2, Zero: "2", N: 3, Microbatch: 2, Strategy: "seq1f1b", Partition: "length", Offload: "0.5", Recompute: "full"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 2, Layers: 3, Sequence: 96, Vocab: tinyVocab, Optimizer: "muon", OptimizerOffload: "host", Traits: models["gptoss"],
		PP: 1, SP: 8, SPMode: "megatron-ring", DP: 2, Zero: "1", N: 3, Microbatch: 1, Order: "layer", Partition: "flops", Offload: "0.5"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 2, Layers: 3, Sequence: 96, Vocab: tinyVocab, // K and V pass through every member of a ring
		PP: 1, SP: 3, SPMode: "ring", DP: 1, N: 4, Microbatch: 2, Keep: "[]", Partition: "length", Offload: "full", Recompute: "full"},
	{Family: "llama", KVHeads: 1, Positions: "rope", DType: "bf16", Batch: 2, Layers: 3, Sequence: 96, Vocab: tinyVocab,
		PP: 2, SP: 4, SPMode: "megatron-ring", DP: 2, Zero: "2", N: 4, Microbatch: 1, Keep: "[k]", Partition: "flops", Offload: "0.5"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 3, Layers: 4, Sequence: 96, Vocab: tinyVocab, Traits: models["gptoss"],
		PP: 2, SP: 4, SPMode: "ulysses-ring", DP: 1, N: 3, Microbatch: 1, Strategy: "zb-h1", Partition: "flops", Offload: "carry"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 2, Layers: 3, Sequence: 96, Vocab: tinyVocab, Traits: models["glm"], // experts in rings of groups
		PP: 2, SP: 4, SPMode: "megatron-ring", DP: 2, Zero: "3", N: 3, Microbatch: 1, Partition: "flops", Offload: "0.5", Recompute: "full"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 3, Layers: 4, Sequence: 96, Vocab: tinyVocab, Traits: models["ossmoe"],
		PP: 2, SP: 8, SPMode: "megatron-ring", ExpertParallel: "on", DP: 1, N: 3, Microbatch: 1, Partition: "length", Offload: "full"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 2, Layers: 4, Sequence: 96, Vocab: tinyVocab, Traits: models["glm"], // different experts on each rank
		PP: 2, SP: 4, SPMode: "ulysses", ExpertParallel: "on", DP: 2, Zero: "3", N: 3, Microbatch: 1, Partition: "flops", Offload: "0.5", Recompute: "full"},
	{Family: "llama", KVHeads: 1, Positions: "rope", DType: "f32", Batch: 2, Layers: 3, Sequence: 96, Vocab: tinyVocab, Traits: models["qwenmoe"],
		PP: 1, SP: 3, SPMode: "ring", ExpertParallel: "on", DP: 1, N: 2, Microbatch: 2, Partition: "flops", Offload: "full", Recompute: "selective"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 2, Layers: 4, Sequence: 96, Vocab: tinyVocab, Traits: models["qwenmoe"],
		PP: 1, SP: 4, SPMode: "ulysses-ring", DP: 2, Zero: "2", N: 2, Microbatch: 1, Order: "layer", Keep: "[]", Partition: "flops", Offload: "carry", Recompute: "selective"},
	{Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", Batch: 2, Layers: 3, Sequence: 96, Vocab: tinyVocab,
		Tuning: "adapter = lora(rank = 3, targets = all-linear, dropout = 0.2)",
		PP:     2, SP: 4, SPMode: "ulysses-ring", DP: 1, N: 3, Microbatch: 2, Partition: "flops", Offload: "full"},
	{Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", Batch: 2, Layers: 3, Sequence: 96, Vocab: tinyVocab,
		Tuning: "adapter = lora(rank = 3, targets = all-linear, dropout = 0.2)",
		PP:     1, SP: 4, SPMode: "megatron-ring", DP: 2, Zero: "3", N: 2, Microbatch: 1, Partition: "flops", Offload: "none"},
	{Family: "llama", KVHeads: 4, Positions: "rope", DType: "f32", Batch: 8, Layers: 4, Sequence: 48, Vocab: tinyVocab, Traits: models["deepseek"], // the first halves of backwards have divided gradients
		PP: 2, SP: 2, SPMode: "ulysses", DP: 2, Zero: "3", N: 3, Microbatch: 1, Strategy: "zb-h1", Partition: "flops", Offload: "none", LatentCache: "on"},
	{Family: "llama", KVHeads: 4, Positions: "rope", DType: "bf16", GradReduce: "bf16", Batch: 8, Layers: 4, Sequence: 96, Vocab: tinyVocab, Traits: models["latent"],
		PP: 2, SP: 1, DP: 2, Zero: "2", N: 3, Microbatch: 1, Strategy: "zb-h1", Partition: "flops", Offload: "full", Recompute: "full", LatentCache: "on"},
	{Family: "llama", KVHeads: 4, Positions: "none", DType: "bf16", Batch: 8, Layers: 9, Sequence: 24, Vocab: tinyVocab,
		PP: 2, SP: 1, DP: 1, N: 2, Microbatch: 1, VirtualStages: 4, Strategy: "zb-h1", Partition: "flops", Offload: "carry"},
	{Family: "gpt", KVHeads: 4, Positions: "none", DType: "bf16", Batch: 1, Layers: 1, Sequence: 16, Vocab: 270001, Tied: true, Steps: 2,
		PP: 1, SP: 1, DP: 1, N: 2, Microbatch: 1, Partition: "flops", Offload: "none", OptimizerOffload: "host"}, // several blocks
	{Family: "llama", KVHeads: 1, Positions: "rope", DType: "f32", Batch: 2, Layers: 3, Sequence: 48, Vocab: tinyVocab, Optimizer: "muon",
		PP: 1, SP: 4, DP: 2, Zero: "1", N: 3, Microbatch: 1, Partition: "flops", Offload: "none", Steps: steps},
	{Family: "gpt", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 16, Layers: 9, Sequence: 24, Vocab: tinyVocab,
		PP: 4, SP: 1, DP: 1, N: 1, Microbatch: 1, VirtualStages: 2, Strategy: `csv("schedules/v-half-4x16.csv")`, Partition: "flops", Offload: "0.5"},
	{Family: "llama", KVHeads: 2, Positions: "learned", DType: "bf16", Batch: 4, Layers: 8, Sequence: 48, Vocab: tinyVocab, Tied: true,
		PP: 4, SP: 2, DP: 2, Zero: "1", N: 8, Microbatch: 2, VirtualStages: 2, Strategy: `csv("../passes/testdata/torch/LoopedBFS-2-4.csv")`, Partition: "flops", Offload: "full"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", Batch: 2, Layers: 3, Sequence: 48, Vocab: tinyVocab, // the first layer needs no gradient of Q
		Tuning: "adapter = lora(rank = 2, targets = [k_proj, o_proj], dropout = 0.3)",
		PP:     2, SP: 2, SPMode: "ulysses", DP: 1, N: 4, Microbatch: 1, Keep: "[]", Partition: "flops", Offload: "full"},
	{Family: "gpt", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 2, Layers: 3, Sequence: 48, Vocab: tinyVocab, // the first layer needs no gradient of attention
		Tuning: "adapter = lora(rank = 2, alpha = 6, targets = [up_proj, down_proj], dropout = 0.2)",
		PP:     2, SP: 1, DP: 1, N: 4, Microbatch: 1, Keep: "[]", Partition: "flops", Offload: "full", Recompute: "full"},
	{Family: "llama", KVHeads: 1, Positions: "rope", DType: "f32", Batch: 2, Layers: 4, Sequence: 96, Vocab: tinyVocab,
		Tuning: "adapter = lora(rank = 4, alpha = 3, targets = [gate_up_proj])",
		PP:     2, SP: 1, DP: 1, N: 9, Microbatch: 1, Mux: "right", Partition: "flops", Offload: "full", Recompute: "full"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", Batch: 4, Layers: 5, Sequence: 48, Vocab: tinyVocab, // not all layers of a stage have a backward pass
		Tuning: `freeze = [embeddings, "layer.0-1"]`,
		PP:     2, SP: 2, DP: 2, Zero: "3", N: 3, Microbatch: 1, Partition: "flops", Offload: "0.5", Recompute: "full"},
	{Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", Batch: 6, Layers: 6, Sequence: 48, Vocab: tinyVocab, // no layer of the first stage has a backward pass
		Tuning: `freeze = ["pos", "embed", "layer.0-2", "layer.*.w2"]`,
		PP:     3, SP: 2, SPMode: "ring", DP: 1, N: 1, Microbatch: 1, Strategy: "zb-h1", Partition: "flops", Offload: "full"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", Batch: 6, Layers: 5, Sequence: 48, Vocab: tinyVocab, Optimizer: "muon", OptimizerOffload: "host",
		Tuning: "adapter = lora(rank = 3, targets = all-linear, dropout = 0.2)",
		PP:     2, SP: 2, DP: 2, Zero: "2", N: 1, Microbatch: 1, VirtualStages: 2, Strategy: "zb-v", Partition: "flops", Offload: "carry", Recompute: "selective"},
}

// TestOutsideTheSpace checks hand-picked cases for E1, E2 and E3, their meaning, and their plain programs for E4.
func TestOutsideTheSpace(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	for _, c := range outside {
		c.Steps = cmp.Or(c.Steps, 3)
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			checkCase(t, c)
			_, p := mustCompile(t, c)
			if _, err := meaning.Prove(p); err != nil {
				t.Error(err)
			}
			plain := c.plain()
			plain.Steps = 1 // the naive model is slow at these sizes, and TestPlainEqualsNaive checks later steps
			checkNaive(t, plain)
		})
	}
}

// TestProduct runs the full product of the settings that determine arithmetic and order: family, key and value
// heads, storage, pp, sp, dp, subsequences, offload, batch. The other settings are drawn once for each group of
// cases that differ only in pp and offload, so that the group shares its references. It runs with SPPO_LONG=1
// and ends after 25 minutes, or after the number of minutes in SPPO_LONG. It prints the number of cases;
// SPPO_SEED repeats a run.
func TestProduct(t *testing.T) {
	minutes, _ := strconv.Atoi(os.Getenv("SPPO_LONG"))
	switch minutes {
	case 0:
		t.Skip("make long runs it: SPPO_LONG is not set")
	case 1:
		minutes = 25
	}
	seed := irtest.Seed(t) // a new seed each time, in the long form
	random := rand.New(rand.NewPCG(seed, 0))
	groups := productGroups(random)
	var total, done atomic.Int64
	t.Cleanup(func() { t.Logf("%d of %d cases, SPPO_SEED=%d", done.Load(), total.Load(), seed) })
	end := time.Now().Add(time.Duration(minutes) * time.Minute)
	for _, group := range groups {
		total.Add(int64(len(group)))
		t.Run(group[0].toCase().unpiped().String(), func(t *testing.T) {
			t.Parallel()
			for _, r := range group {
				if c := r.toCase(); time.Now().Before(end) {
					t.Run(c.String(), func(t *testing.T) { checkCase(t, c) })
					forget(c)
					done.Add(1)
				}
			}
			forget(group[0].toCase().unpiped())
		})
	}
}

// The settings that a group shares and those in which its cases differ are tested in all combinations; the rest
// are drawn.
var (
	groupSettings = settingIndexes("family", "kv_heads", "dtype", "sp", "dp", "subsequences", "batch")
	caseSettings  = settingIndexes("pp", "offload")
	drawnSettings = settingIndexes("tied", "positions", "partition", "microbatch", "sp_mode", "recompute", "strategy", "virtual_stages", "order", "keep", "zero", "optimizer", "traits")
)

func settingIndexes(names ...string) []int {
	var list []int
	for _, name := range names {
		list = append(list, settingIndex(name))
	}
	return list
}

func productGroups(random *rand.Rand) [][]row {
	var groups [][]row
	for _, shared := range combine([]row{openRow()}, groupSettings) {
		if !shared.allowed() {
			continue
		}
		for _, i := range drawnSettings {
			for shared[i] < 0 || !shared.allowed() {
				shared[i] = random.IntN(space[i].size)
			}
		}
		groups = append(groups, slices.DeleteFunc(combine([]row{shared}, caseSettings), func(r row) bool { return !r.allowed() }))
	}
	random.Shuffle(len(groups), func(i, j int) { groups[i], groups[j] = groups[j], groups[i] })
	return groups
}

// combine extends each row by every combination of values of the given settings.
func combine(rows []row, settings []int) []row {
	for _, i := range settings {
		var more []row
		for _, r := range rows {
			for value := range space[i].size {
				next := slices.Clone(r)
				next[i] = value
				more = append(more, next)
			}
		}
		rows = more
	}
	return rows
}
