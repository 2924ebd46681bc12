package e2e

import "testing"

// muxCases are pipelines of several sizes that share their first tasks, with every other setting that these meet.
var muxCases = []Case{
	{PP: 2, N: 4, SP: 1, DP: 1, Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", Offload: "none", Layers: 4},
	{PP: 2, N: 4, SP: 2, DP: 2, Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Offload: "full", Layers: 3, Zero: "1"},
	{PP: 4, N: 8, SP: 1, DP: 1, Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Offload: "full", Layers: 5, Recompute: "selective"},
	{PP: 4, N: 8, SP: 2, DP: 1, Family: "gpt", KVHeads: 4, Positions: "learned", DType: "bf16", Offload: "full", Layers: 4, Tied: true},
	{PP: 4, N: 4, SP: 4, DP: 1, Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Offload: "none", Layers: 4},
	{PP: 4, N: 8, SP: 2, DP: 1, Family: "gpt", KVHeads: 2, Positions: "learned", DType: "f32", Offload: "0.5", Layers: 6, SPMode: "ulysses", Batch: 2},
	{PP: 3, N: 7, SP: 2, DP: 1, Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", Offload: "carry", Layers: 4, Recompute: "full", Batch: 2},
	{PP: 3, N: 7, SP: 1, DP: 2, Family: "llama", KVHeads: 4, Positions: "learned", DType: "bf16", Offload: "adaptive", Layers: 3, Batch: 4, Microbatch: 2},
	{PP: 8, N: 16, SP: 1, DP: 1, Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", Offload: "full", Layers: 8},
	{PP: 8, N: 16, SP: 2, DP: 1, Family: "llama", KVHeads: 1, Positions: "rope", DType: "f32", Offload: "none", Layers: 9, Recompute: "selective"},
}

// TestMuxIsEqual holds shared tasks to the plain program within rounding, and offload and recomputation to the last bit.
func TestMuxIsEqual(t *testing.T) {
	for _, c := range muxCases {
		c.Mux, c.Batch, c.Microbatch, c.Partition = "left", max(c.Batch, c.DP), max(1, c.Microbatch), "flops"
		c.Sequence, c.Vocab, c.Steps = 32*c.N*c.SP, tinyVocab, steps
		if c.PP == 8 || c.SP == 4 {
			c.Sequence, c.Steps = 16*c.N*c.SP, 3
		}
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			got := run(t, c)
			checkClose(t, c, "E3: against the plain program", got, run(t, c.plain()))
			kept := c
			kept.Offload, kept.Recompute, kept.Zero = "none", "none", "0"
			checkSame(t, "E1: against nothing offloaded", got, run(t, kept))
		})
	}
}
