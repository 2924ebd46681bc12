package search

import (
	"testing"

	"sppo.dev/internal/passes/plantest"
)

// TestStreamBlocks checks that blocks are as long as an average subsequence, or longer if a step would have too
// many of them.
func TestStreamBlocks(t *testing.T) {
	p := plantest.Plan(t, "gpt-docs.sppo", "schedule.keep=[]")
	if want := p.Train.Sequence / int64(p.Subsequences.N); p.Stream.Block < want || p.Stream.Block >= want+p.Subsequences.Align {
		t.Errorf("blocks of %d tokens, want %d up to the grid", p.Stream.Block, want)
	}
	p.Train.Sequence, p.Subsequences.N, p.Subsequences.Align, p.Model.Layers, p.Parallel.Microbatches = 1<<20, 160, 128, 32, 1
	if solveStream(p); p.Stream.Block != 105*128 { // 1M * 160 * 32 / 400K, rounded up to the grid
		t.Errorf("blocks of %d tokens, want %d", p.Stream.Block, 105*128)
	}
}
