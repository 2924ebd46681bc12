package schedule

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestSharing checks Readers and Borrowers against what Runner implies. Readers are the other ranks that run
// later tokens on the stage. Borrowers are the ranks that run pieces of the stage but ran none in the previous
// slot of the pass.
func TestSharing(t *testing.T) {
	for ranks := 2; ranks <= 6; ranks++ {
		n := ranks + 2
		s := Sharing{Ranks: ranks, Pieces: make([][]int64, ranks-1)}
		for x := range s.Pieces {
			s.Pieces[x] = make([]int64, ranks)
		}
		runner := func(t Task) int {
			if t.Slot() < ranks-1 {
				return s.Runner(t)
			}
			return t.Stage
		}
		for slot := range ranks - 1 {
			tasks := s.Tasks(Forward, 0, slot)
			for _, piece := range tasks {
				want := map[Reader]bool{}
				for x := piece.Subsequence; x < n; x++ {
					for _, later := range s.CutInto(Task{Kind: Forward, Subsequence: x, Stage: piece.Stage}) {
						if r := runner(later); (x > piece.Subsequence || later.Piece > piece.Piece) && r != runner(piece) {
							want[Reader{r, false}] = true
							if x == piece.Subsequence && r > runner(piece) {
								want[Reader{r, true}] = true
							}
						}
					}
				}
				var got []string
				for _, r := range s.Readers(piece) {
					got = append(got, fmt.Sprint(r))
					if !want[r] || !r.Waits && want[Reader{r.Rank, true}] {
						t.Errorf("%d ranks, %v: %v reads it, and runners say %v", ranks, piece, r, want)
					}
					delete(want, Reader{r.Rank, false})
					delete(want, Reader{r.Rank, true})
				}
				if len(want) > 0 {
					t.Errorf("%d ranks, %v: %v read it, and so do %v", ranks, piece, got, want)
				}
			}
			for stage := range slot + 1 {
				for kind, other := range map[Kind]int{Forward: slot - 1, Backward: slot + 1} {
					if got, want := s.Borrowers(kind, stage, slot), missing(helpersIn(s, stage, slot), helpersIn(s, stage, other)); !slices.Equal(got, want) {
						t.Errorf("%d ranks, slot %d, %v: %v begin to help stage %d, want %v", ranks, slot, kind, got, stage, want)
					}
				}
			}
		}
	}
}

// helpersIn returns the ranks that run pieces of another rank's stage in a slot.
func helpersIn(s Sharing, stage, slot int) (ranks []int) {
	if slot < stage || slot >= s.Ranks-1 {
		return nil
	}
	for _, t := range s.Tasks(Forward, 0, slot) {
		if r := s.Runner(t); t.Stage == stage && r != stage && !slices.Contains(ranks, r) {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

func missing(all, from []int) (out []int) {
	for _, r := range all {
		if !slices.Contains(from, r) {
			out = append(out, r)
		}
	}
	return out
}

// TestHops checks that the gradients of every layer pass from the last rank to the stage's own, one rank per
// round, with the layers in order.
func TestHops(t *testing.T) {
	for _, c := range []struct{ ranks, stage, layers int }{{2, 0, 1}, {4, 0, 3}, {4, 2, 2}, {5, 1, 4}} {
		s, at := Sharing{Ranks: c.ranks}, make([]int, c.layers)
		for k := range at {
			at[k] = c.ranks - 1
		}
		for round := range c.layers + c.ranks {
			for _, hop := range s.Hops(c.stage, c.layers, round) {
				if hop.From != at[hop.Layer] || hop.Layer > 0 && at[hop.Layer-1] >= hop.From {
					t.Errorf("%+v, round %d: layer %d leaves rank %d, and layers are on %v", c, round, hop.Layer, hop.From, at)
				}
				at[hop.Layer]--
			}
		}
		if diff := cmp.Diff(slices.Repeat([]int{c.stage}, c.layers), at); diff != "" {
			t.Errorf("%+v: layers end (-want +got):\n%s", c, diff)
		}
	}
}
