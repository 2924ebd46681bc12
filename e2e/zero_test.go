package e2e

import "testing"

// TestDividedParameters: where a step goes backward through each layer once, dividing optimizer state, gradients and weights
// changes no bit, and each stage takes less memory than the one before.
func TestDividedParameters(t *testing.T) {
	for _, c := range []Case{
		{Family: "gpt", KVHeads: 2, Positions: "learned", DType: "f32", PP: 1, SP: 2, SPMode: "ulysses", DP: 2, Batch: 2, Recompute: "full"},
		{Family: "llama", KVHeads: 4, Positions: "rope", DType: "bf16", Tied: true, PP: 2, SP: 1, DP: 4, Batch: 4},
		{Family: "gpt", KVHeads: 1, Positions: "none", DType: "bf16", PP: 1, SP: 4, DP: 2, Batch: 2},
		{Family: "gpt", KVHeads: 4, Positions: "rope", DType: "f32", PP: 1, SP: 4, SPMode: "ulysses", DP: 1, Batch: 1, N: 3, Order: "layer"},
	} {
		c.N, c.Microbatch, c.Steps, c.Layers, c.Sequence, c.Vocab = max(1, c.N), 1, 3, 8, 48, tinyVocab
		c.Partition, c.Offload, c.Zero = "flops", "none", "0"
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			want, peak := run(t, c), devicePeak(t, c)
			for _, c.Zero = range []string{"1", "2", "3"} {
				checkSame(t, "zero = "+c.Zero, run(t, c), want)
				least := devicePeak(t, c)
				if least >= peak {
					t.Errorf("zero = %s takes %d bytes, the stage before it %d", c.Zero, least, peak)
				}
				peak = least
			}
		})
	}
}

// devicePeak is of the first stage.
func devicePeak(t *testing.T, c Case) int64 {
	plan, _ := mustCompile(t, c)
	return int64(plan.Memory.DevicePeakBytes[0])
}
