package passes

import (
	"fmt"
	"math"
	"strings"
	"testing"
)

func wantError(t *testing.T, err error, say string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), say) {
		t.Errorf("%v, want it to say %q", err, say)
	}
}

// TestBlocks: every helper's block lies before the tasks that it is for, and makes its part of their attention 1/PP on the
// average, to a step of the grid and to what there is room for.
func TestBlocks(t *testing.T) {
	for _, c := range []struct{ pp, n int }{{2, 4}, {3, 7}, {4, 8}, {8, 16}, {4, 4}, {8, 8}} {
		for _, partition := range []string{"flops", "length"} {
			p := planOf(t, "gpt-docs.sppo", fmt.Sprintf("schedule.pp=%d", c.pp), "schedule.sp=1", "model.layers=8", "train.sequence=16K", "schedule.align=16",
				fmt.Sprintf("schedule.subsequences=%d", c.n), "schedule.partition="+partition, "cluster.nodes=8", "schedule.mux=right")
			for i := 1; i < c.pp; i++ {
				borders := p.Mux.Stages[i].Blocks
				for j := range i {
					first := c.n - i + j
					queries, pairs := 0.0, 0.0
					for x := first; x < c.n; x++ {
						if got := p.Helpers(Task{Kind: Forward, Subsequence: x, Stage: i}); got <= j {
							t.Errorf("%v: %d stages help stage %d with subsequence %d", c, got, i, x)
						}
						z := p.Size(x)
						queries += float64(z.Tokens)
						pairs += float64(z.Tokens) * (float64(z.Prefix) + float64(z.Tokens+1)/2)
					}
					ideal := pairs / queries / float64(c.pp)
					rows := float64(borders[j+1] - borders[j])
					full := borders[j+1] == p.Size(first).Prefix
					if math.Abs(rows-ideal) > float64(p.Subsequences.Align) && !(full && rows < ideal) {
						t.Errorf("%v %s: stage %d, block %d has %v rows where %v are 1/PP", c, partition, i, j, rows, ideal)
					}
					if borders[j+1] > p.Size(first).Prefix {
						t.Errorf("%v %s: stage %d, block %d ends behind the first row of the task that it is for", c, partition, i, j)
					}
				}
				if got := p.Helpers(Task{Kind: Backward, Subsequence: c.n - i - 1, Stage: i}); got != 0 {
					t.Errorf("%v: %d stages help stage %d in the steady part", c, got, i)
				}
			}
		}
	}
}

// TestEditedBlocks: what an edited plan says of blocks is held to the same.
func TestEditedBlocks(t *testing.T) {
	for _, c := range []struct {
		say  string
		edit func(*Plan)
	}{
		{"nobody who holds them", func(p *Plan) { p.Mux.Stages[0].Blocks = []int64{0} }},
		{"borders from 0 on", func(p *Plan) { p.Mux.Stages[1].Blocks = nil }},
		{"is not behind its start", func(p *Plan) { p.Mux.Stages[1].Blocks[1] = 0 }},
		{"where the first task begins", func(p *Plan) { p.Mux.Stages[1].Blocks[1] = p.Train.Sequence }},
		{"applied is true", func(p *Plan) { p.Mux.Right = false }},
	} {
		p := planOf(t, "tiny.sppo", "schedule.mux=right")
		c.edit(p)
		wantError(t, Verify(p), c.say)
	}
}

// TestMuxRequests: what cannot be shared is refused where it is asked for, with what can.
func TestMuxRequests(t *testing.T) {
	for _, c := range []struct{ set, say string }{
		{"schedule.subsequences=1", "as many subsequences as stages"},
		{"schedule.strategy=terapipe", "strategy = terapipe does not have"},
		{"schedule.pp=1", "nobody to share"},
	} {
		sp := load(t, "tiny.sppo", "schedule.mux=right", c.set)
		wantError(t, Run(sp, New(sp), Options{}), c.say)
	}
}
