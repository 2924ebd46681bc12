package mux

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
)

func wantError(t *testing.T, err error, say string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), say) {
		t.Errorf("%v, want it to say %q", err, say)
	}
}

// TestBlocks checks that every helper's block ends before the first task in which the helper takes part, and
// that, to within a step of the grid, it is the helper's share of the keys that the queries of each task see on
// average.
func TestBlocks(t *testing.T) {
	for _, c := range []struct {
		pp, n int
	}{
		{2, 4}, {3, 7}, {4, 8}, {8, 16}, {4, 4}, {8, 8},
	} {
		for _, partition := range []string{"flops", "length"} {
			p := plantest.Plan(t, "gpt-docs.sppo", fmt.Sprintf("schedule.pp=%d", c.pp), "schedule.sp=1", "model.layers=8", "train.sequence=16K", "schedule.align=16",
				fmt.Sprintf("schedule.subsequences=%d", c.n), "schedule.partition="+partition, "cluster.nodes=8", "schedule.mux=right")
			for i := 1; i < c.pp; i++ {
				for x := c.n - i; x < c.n; x++ {
					task := plan.Task{Kind: plan.Forward, Subsequence: x, Stage: i}
					borders, shares := p.HelpedBlocks(task), plantest.SharesOf(p.Mux).Of(c.pp, c.n, i, x)
					if len(borders) != len(shares) {
						t.Fatalf("%v: %d blocks in %s, for %d who share it", c, len(borders), task, len(shares))
					}
					for j := range len(borders) - 1 {
						ideal, _ := shares[j].Float64()
						ideal *= meanKeys(p, x)
						rows := float64(borders[j+1] - borders[j])
						if off := math.Abs(rows - ideal); off > float64(p.Subsequences.Align) {
							t.Errorf("%v %s: in %s block %d has %v keys where its share is %v", c, partition, task, j, rows, ideal)
						}
						if room := p.Size(p.FirstHelped(i, j)).Prefix; borders[j+1] > room {
							t.Errorf("%v %s: in %s block %d ends after token %d, where the first task that its helper shares begins", c, partition, task, j, room)
						}
					}
				}
				if got := p.Helpers(plan.Task{Kind: plan.Backward, Subsequence: c.n - i - 1, Stage: i}); got != 0 {
					t.Errorf("%v: %d stages help stage %d in the steady part", c, got, i)
				}
			}
		}
	}
}

// TestEditedBlocks edits the blocks of a valid plan and expects the right error from Verify.
func TestEditedBlocks(t *testing.T) {
	for _, c := range []struct {
		say  string
		edit func(*plan.Plan)
	}{
		{"no stage to hold them", func(p *plan.Plan) { p.Mux.Stages[0].Blocks = [][]int64{{0}} }},
		{"for 0 tasks, but 1 have helpers", func(p *plan.Plan) { p.Mux.Stages[1].Blocks = nil }},
		{"boundaries, starting with 0", func(p *plan.Plan) { p.Mux.Stages[1].Blocks[0] = nil }},
		{"must end after its start", func(p *plan.Plan) { p.Mux.Stages[1].Blocks[0][1] = 0 }},
		{"where the first task that its helper shares begins", func(p *plan.Plan) { p.Mux.Stages[1].Blocks[0][1] = p.Train.Sequence }},
		{"applied is true", func(p *plan.Plan) { p.Mux.Right = false }},
	} {
		p := plantest.Plan(t, "tiny.sppo", "schedule.mux=right")
		c.edit(p)
		wantError(t, plantest.Verify(p), c.say)
	}
}

// TestMuxRequests checks that impossible requests for sharing are refused with the reason.
func TestMuxRequests(t *testing.T) {
	for _, c := range []struct{ set, say string }{
		{"schedule.subsequences=1", "as many subsequences as stages"},
		{"schedule.strategy=terapipe", "which do not occur with strategy = terapipe"},
		{"schedule.pp=1", "no other stage to share"},
	} {
		sp := plantest.Load(t, "tiny.sppo", append(strings.Fields(c.set), "schedule.mux=right")...)
		wantError(t, plantest.Run(sp, plan.New(sp)), c.say)
	}
}
