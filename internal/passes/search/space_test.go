package search

import (
	"slices"
	"testing"

	"sppo.dev/lang"
)

// TestCounts checks which numbers of subsequences are tried. Numbers that make a step slow to place must be
// tried only if bubbles would otherwise be large. While the number of stages is open, all numbers that are
// tried for any number of stages must be included. With a large batch, at least one number must remain.
func TestCounts(t *testing.T) {
	of := func(batch, stages, virtual int, timeless bool) []int {
		sp := &space{model: lang.Model{Layers: 32}, train: lang.Train{Sequence: 16 << 20, Batch: batch}, timeless: timeless}
		s := lang.Schedule{SP: 1, DP: 1, Microbatch: 1, PP: stages, VirtualStages: virtual, Align: 128, Subsequences: lang.Subsequences{Auto: true}}
		return sp.counts(&s)
	}
	open := of(1, 0, 0, false)
	for _, c := range []struct {
		stages, virtual int
		timeless, few   bool
	}{{1, 1, false, true}, {8, 4, false, true}, {8, 1, false, false}, {16, 1, false, false}, {16, 1, true, true}} {
		counts := of(1, c.stages, c.virtual, c.timeless)
		most := counts[len(counts)-1]
		if few := most*32 <= fewVisits; few != c.few {
			t.Errorf("%+v: up to %d subsequences", c, most)
		}
		for _, n := range counts {
			if c.virtual == 1 && !slices.Contains(open, n) {
				t.Errorf("%+v: %d subsequences are missing if the number of stages is open", c, n)
			}
		}
	}
	for _, timeless := range []bool{false, true} {
		if got := of(4000, 1, 1, timeless); !slices.Equal(got, []int{1}) {
			t.Errorf("a batch of 4000: %v subsequences", got)
		}
	}
}
