package e2e

import (
	"testing"

	"sppo.dev/ir"
)

// TestDividedParameters checks that dividing optimizer state, gradients and weights changes no bit if a step
// has only one backward pass through each layer. State is live throughout, and weights almost throughout, so
// dividing them lowers the peak of live bytes, unless state is in host memory. Gradients are not always live at the
// peak, so dividing them may leave it unchanged.
func TestDividedParameters(t *testing.T) {
	for _, c := range []Case{
		{Family: "gpt", KVHeads: 2, Positions: "learned", DType: "f32", PP: 1, SP: 2, SPMode: "ulysses", DP: 2, Batch: 2, Recompute: "full"},
		{Family: "llama", KVHeads: 4, Positions: "rope", DType: "bf16", Tied: true, PP: 2, SP: 1, DP: 4, Batch: 4},
		{Family: "gpt", KVHeads: 1, Positions: "none", DType: "bf16", PP: 1, SP: 4, DP: 2, Batch: 2},
		{Family: "gpt", KVHeads: 4, Positions: "rope", DType: "f32", PP: 1, SP: 4, SPMode: "ulysses", DP: 1, Batch: 1, N: 3, Order: "layer", VirtualStages: 8},
		{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", PP: 1, SP: 2, SPMode: "ulysses", DP: 2, Batch: 2, Optimizer: "muon"},
		// Rows that the ranks do not divide evenly: slices have padding.
		{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", PP: 1, SP: 1, DP: 3, Batch: 3},
		{Family: "gpt", KVHeads: 2, Positions: "learned", DType: "f32", PP: 1, SP: 1, DP: 5, Batch: 5, N: 2, Order: "layer"},
		{Family: "llama", KVHeads: 4, Positions: "rope", DType: "f32", Tied: true, PP: 2, SP: 2, SPMode: "ulysses", DP: 3, Batch: 3},
		{Family: "gpt", KVHeads: 1, Positions: "learned", DType: "bf16", PP: 1, SP: 2, DP: 3, Batch: 3},
		{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", PP: 1, SP: 4, DP: 7, Batch: 7, OptimizerOffload: "host"},
		{Family: "llama", KVHeads: 1, Positions: "none", DType: "bf16", PP: 1, SP: 1, DP: 7, Batch: 7, Optimizer: "sgd"},
		{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", PP: 1, SP: 2, DP: 3, Batch: 3, Optimizer: "muon"},
		{Family: "gpt", KVHeads: 4, Positions: "rope", DType: "f32", PP: 1, SP: 2, SPMode: "ulysses", DP: 3, Batch: 3, Optimizer: "muon", OptimizerOffload: "host"},
		{Family: "llama", KVHeads: 4, Positions: "rope", DType: "bf16", PP: 1, SP: 4, SPMode: "megatron-ring", DP: 1, Batch: 1},
		{Family: "gpt", KVHeads: 1, Positions: "learned", DType: "f32", PP: 1, SP: 8, SPMode: "megatron-ring", DP: 2, Batch: 2},
		{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", PP: 1, SP: 4, SPMode: "ulysses-ring", DP: 3, Batch: 3, Optimizer: "muon"},
		{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", PP: 1, SP: 1, DP: 5, Batch: 5, Tuning: "adapter = lora(rank = 7, alpha = 6)"},
	} {
		c.N, c.Microbatch, c.Steps, c.Layers, c.Sequence, c.Vocab = max(1, c.N), 1, 3, 8, 48, tinyVocab
		c.Partition, c.Offload, c.Zero = "flops", "none", "0"
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			want, peak := run(t, c), mostOnDevice(t, c)
			for _, c.Zero = range []string{"1", "2", "3"} {
				checkSame(t, "zero = "+c.Zero, run(t, c), want)
				most := mostOnDevice(t, c)
				if c.OptimizerOffload == "" && (most > peak || most == peak && c.Zero != "2") {
					t.Errorf("zero = %s holds %d bytes at once, the stage before it %d", c.Zero, most, peak)
				}
				peak = most
			}
		})
	}
}

// mostOnDevice returns the largest number of live bytes on a rank of the first stage.
func mostOnDevice(t *testing.T, c Case) ir.Bytes {
	_, p := mustCompile(t, c)
	return mostLive(&p.Codes[0], ir.Device)
}
