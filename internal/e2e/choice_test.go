package e2e

import (
	"fmt"
	"strings"
	"testing"

	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// TestChosenToFit gives devices less memory than a case needs without offload or recomputation, and lets the
// passes choose what to keep, offload and recompute. The program must fit, and its results must be bitwise
// equal to those of the program with enough memory.
func TestChosenToFit(t *testing.T) {
	for _, c := range []Case{
		{Family: "gpt", Positions: "learned", DType: "f32", KVHeads: 4, Batch: 2, PP: 2, SP: 2, DP: 1, N: 6},
		{Family: "llama", Positions: "rope", DType: "bf16", KVHeads: 2, Batch: 2, PP: 2, SP: 2, SPMode: "ulysses", DP: 1, N: 6, VirtualStages: 2},
		{Family: "gpt", Positions: "rope", DType: "f32", KVHeads: 1, Batch: 4, PP: 2, SP: 1, DP: 1, N: 3, Strategy: "seq1f1b"},
		{Family: "gpt", Positions: "rope", DType: "f32", KVHeads: 4, Batch: 1, PP: 1, SP: 2, DP: 1, N: 4, Order: "layer"},
	} {
		c.Steps, c.Layers, c.Sequence, c.Vocab, c.Partition, c.Microbatch, c.Offload = 3, 4, 384, tinyVocab, "flops", 1, "none"
		want := run(t, c)
		for _, choice := range [][2]string{{"auto", "none"}, {"none", "auto"}, {"auto", "auto"}, {"memory", "auto"}} {
			c := c
			c.Offload, c.Recompute = choice[0], choice[1]
			t.Run(c.String(), func(t *testing.T) {
				t.Parallel()
				room := halfway(t, c)
				plan, _, err := compile(c.Spec(), fmt.Sprintf("cluster.device_memory=%dKiB", room>>10))
				if err != nil {
					t.Fatal(err)
				}
				checkSame(t, "where there is little room", runPlan(t, c, plan), want)
				letters := fmt.Sprint(plan.Offload.Placement)
				t.Logf("%d units stay, %d go, %d are recomputed", strings.Count(letters, "k"), strings.Count(letters, "o"), strings.Count(letters, "r"))
				if strings.Count(letters, "o")+strings.Count(letters, "r") == 0 {
					t.Error("all stays: the test is void")
				}
				if !plan.Memory.Fits {
					t.Errorf("%v placed, room for %s", plan.Memory.DevicePeakBytes, room)
				}
			})
		}
	}
}

// halfway returns the mean of two amounts of memory: what a case needs if everything is kept, and what it needs
// if as little stays on the device as its choices allow.
func halfway(t *testing.T, c Case) ir.Bytes {
	t.Helper()
	least, _, err := compile(c.Spec(), "cluster.device_memory=1KiB")
	if err != nil {
		t.Fatal(err)
	}
	c.Offload, c.Recompute = "none", "none"
	most, _, err := compile(c.Spec())
	if err != nil {
		t.Fatal(err)
	}
	var sum ir.Bytes
	for _, p := range []*plan.Plan{least, most} {
		var peak ir.Bytes
		for _, k := range memory.FootprintOf(p).Device {
			peak = max(peak, k.Bytes)
		}
		sum += peak
	}
	return sum / 2
}
