package estimate_test

import (
	"math/big"
	"testing"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/estimate"
	"sppo.dev/lang"
)

// TestFlopsOfScans checks that the work of layers with linear attention is counted as proportional to the number of tokens.
func TestFlopsOfScans(t *testing.T) {
	m, err := lang.ParseModel("family = qwen3_next\ndtype = bf16\nlayers = 2\nhidden = 64\nheads = 4\nhead_dim = 16\nvocab = 100\nffn = 96\nlayer_types = [gated_delta, full]\n" +
		"linear_num_key_heads = 2\nlinear_num_value_heads = 4\nlinear_key_head_dim = 16\nlinear_value_head_dim = 8\nlinear_conv_kernel_dim = 4\n")
	if err != nil {
		t.Fatal(err)
	}
	const n = 8192
	g, want := graph.New(m, graph.Split{SP: 1}, n), int64(0)
	for layer := range m.Layers {
		for _, flops := range g.Plain(g.KindOf(layer)).ForwardFlops(graph.Size{Sequence: n, Tokens: n, Batch: 1, SP: 1}) {
			want += int64(flops)
		}
	}
	if got := estimate.FlopsOfLayer(m).UpTo(n); got.Cmp(big.NewInt(want/2)) != 0 {
		t.Errorf("%d multiply-adds, want %d", got, want/2)
	}
}
