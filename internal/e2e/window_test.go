package e2e

import (
	"cmp"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"sppo.dev/ir"
)

// windowed lists schedules of models whose layers alternate between attention windows. Some windows are shorter
// than a subsequence, some longer, some reach exactly to a boundary, and some are longer than the sequence.
var windowed = []Case{
	{Family: "gpt", Window: "[5, 20]", KVHeads: 2, Positions: "learned", DType: "f32", Batch: 2, PP: 2, SP: 2, DP: 1, N: 5, Microbatch: 2, Offload: "full"},
	{Family: "llama", Window: "[8, 0]", KVHeads: 1, Positions: "rope", DType: "f32", Batch: 2, PP: 2, SP: 4, SPMode: "ulysses", DP: 2, Zero: "3", N: 3, Partition: "length", Offload: "0.5"},
	{Family: "llama", Window: "[2, 13, 500]", KVHeads: 4, Positions: "rope", DType: "bf16", Batch: 1, PP: 2, SP: 1, DP: 1, N: 6, Offload: "full", Recompute: "full"},
	{Family: "gpt", Window: "[5, 20]", KVHeads: 4, Positions: "rope", DType: "f32", Batch: 4, PP: 2, SP: 1, DP: 2, Zero: "1", N: 4, VirtualStages: 2, Strategy: "interleaved-sppo", Offload: "carry", Layers: 5},
	{Family: "llama", Window: "[3, 16]", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 3, PP: 2, SP: 2, DP: 1, N: 3, Strategy: "seq1f1b", Offload: "0.5", Recompute: "selective"},
	{Family: "gpt", Window: "[6, 24]", KVHeads: 4, Positions: "none", DType: "f32", Batch: 4, PP: 2, SP: 1, DP: 1, N: 3, Strategy: "zb-h1", Offload: "full"},
	{Family: "gpt", Window: "[5, 20]", KVHeads: 4, Positions: "rope", DType: "f32", Batch: 2, PP: 1, SP: 2, DP: 1, N: 4, Order: "layer", Offload: "full", Recompute: "keep_attention"},
	{Family: "llama", Window: "[100, 7]", KVHeads: 1, Positions: "rope", DType: "f32", Batch: 1, PP: 2, SP: 1, DP: 1, N: 4, Sequence: 640, Offload: "auto", Layers: 2, Steps: 3},
	{Family: "gpt", Window: "[5, 20]", KVHeads: 2, Positions: "learned", DType: "f32", Batch: 1, PP: 3, SP: 2, DP: 1, N: 6, Mux: "left", Offload: "0.5"},
	{Family: "gpt", Window: "[5, 20]", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 2, PP: 2, SP: 2, DP: 1, N: 5, Keep: "[]", Offload: "full"},
	{Family: "llama", Window: "[8, 0]", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 1, PP: 1, SP: 2, SPMode: "ulysses", DP: 1, N: 6, Keep: "[k]", Offload: "none", Order: "layer"},
	{Family: "gpt", Window: "[9, 3, 40]", KVHeads: 4, Positions: "none", DType: "bf16", Batch: 2, PP: 2, SP: 1, DP: 1, N: 8, Keep: "[]", Offload: "0.5", Recompute: "full"},
	{Family: "gpt", Window: "[2, 17]", KVHeads: 4, Positions: "learned", DType: "f32", Batch: 1, PP: 2, SP: 1, DP: 1, N: 3, VirtualStages: 2, Strategy: "interleaved-sppo", Keep: "[v]", Partition: "list", Offload: "none", Recompute: "auto"},
	{Family: "gpt", Window: "[5, 0]", KVHeads: 2, Positions: "learned", DType: "f32", Batch: 1, PP: 3, SP: 2, DP: 1, N: 6, Mux: "right", Offload: "0.5", Layers: 6},
	{Family: "llama", Window: "[0, 7, 7]", KVHeads: 4, Positions: "rope", DType: "f32", Batch: 2, PP: 3, SP: 1, DP: 1, N: 5, Mux: "on", Offload: "full", Layers: 7},
	{Family: "llama", Window: "[5, 0]", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 2, PP: 2, SP: 3, SPMode: "ring", DP: 1, N: 4, Offload: "full"},
	{Family: "gpt", Window: "[5, 20]", KVHeads: 1, Positions: "learned", DType: "bf16", Batch: 4, PP: 2, SP: 4, SPMode: "ring", DP: 2, Zero: "3", N: 3, Microbatch: 2, Partition: "length", Offload: "0.5", Recompute: "full"},
	{Family: "gpt", Window: "[30, 3]", KVHeads: 4, Positions: "none", DType: "f32", Batch: 1, PP: 1, SP: 2, SPMode: "ring", DP: 1, N: 1, Offload: "full"},
	{Family: "llama", Window: "[7]", KVHeads: 4, Positions: "rope", DType: "f32", Batch: 2, PP: 2, SP: 2, SPMode: "ring", DP: 1, N: 4, Strategy: "zb-h1", Offload: "carry"},
	{Family: "llama", Window: "[7, 0]", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 2, PP: 1, SP: 2, SPMode: "ring", DP: 1, N: 4, Microbatch: 2, Order: "layer", Offload: "full"},
	{Family: "llama", Window: "[7, 0]", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 2, PP: 2, SP: 4, SPMode: "megatron-ring", DP: 1, N: 3, Offload: "full"},
	{Family: "gpt", Window: "[5, 20]", KVHeads: 1, Positions: "learned", DType: "f32", Batch: 2, PP: 1, SP: 8, SPMode: "ulysses-ring", DP: 1, N: 3, Offload: "0.5", Recompute: "full"},
	{Family: "llama", Window: "[3, 0]", KVHeads: 2, Positions: "rope", DType: "f32", Batch: 2, PP: 2, SP: 2, SPMode: "ring", DP: 1, N: 5, Sequence: 80, Keep: "[]", Offload: "full"},
	{Family: "gpt", Window: "[4, 30]", KVHeads: 4, Positions: "learned", DType: "bf16", Batch: 1, PP: 1, SP: 8, SPMode: "ulysses-ring", DP: 1, N: 4, Sequence: 128, Keep: "[v]", Offload: "none", Recompute: "full"},
	{Family: "gpt", Window: "[5, 20]", KVHeads: 4, Positions: "rope", DType: "bf16", Batch: 2, PP: 1, SP: 1, DP: 1, N: 1, Offload: "none"},
}

func (c Case) completed() Case {
	c.Microbatch, c.Partition, c.Vocab = max(1, c.Microbatch), cmp.Or(c.Partition, "flops"), tinyVocab
	c.Steps, c.Layers, c.Sequence = cmp.Or(c.Steps, 6), cmp.Or(c.Layers, 4), cmp.Or(c.Sequence, 48)
	return c
}

// TestWindows checks E1, E2, E3 and E5 for models with several kinds of layers, and E4 for their plain
// programs.
func TestWindows(t *testing.T) {
	for _, c := range windowed {
		c = c.completed()
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			checkCase(t, c)
			checkNaive(t, c.plain())
		})
	}
}

// TestWindowOfAll checks that a window that covers the whole sequence changes no instruction of the program.
func TestWindowOfAll(t *testing.T) {
	c := windowed[0].completed()
	c.Window = ""
	_, want := mustCompile(t, c)
	for _, window := range []string{"48", "[48, 1M]", "[0, 0]"} {
		c.Window = window
		_, got := mustCompile(t, c)
		if diff := gocmp.Diff(instructions(want), instructions(got)); diff != "" {
			t.Errorf("window = %s changes the program: %s", window, diff)
		}
	}
	c.Window = "[47, 48]"
	if _, got := mustCompile(t, c); !strings.Contains(strings.Join(instructions(got), "\n"), "window=47") {
		t.Error("window = [47, 48] does not arrive in the program")
	}
}

// instructions returns the instructions of a program, one per line.
func instructions(p *ir.Program) (lines []string) {
	for i := range p.Codes {
		for s := range p.Codes[i].Sections {
			for j := range p.Codes[i].Sections[s] {
				lines = append(lines, p.Text(&p.Codes[i], &p.Codes[i].Sections[s][j]))
			}
		}
	}
	return lines
}
