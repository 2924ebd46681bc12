package mux

import (
	"math/big"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
)

// TestMuxMakespans checks the makespan of equal subsequences for each choice of shares. A forward task takes 1,
// a backward task 2.
func TestMuxMakespans(t *testing.T) {
	for _, c := range []struct {
		pp, n             int
		plain, both       int64
		leftOnly, rightly *big.Rat
	}{
		{2, 4, 15, 12, big.NewRat(27, 2), big.NewRat(27, 2)},
		{4, 8, 33, 24, big.NewRat(57, 2), big.NewRat(57, 2)},
		{3, 7, 27, 21, big.NewRat(24, 1), big.NewRat(24, 1)},
		{8, 16, 69, 48, big.NewRat(117, 2), big.NewRat(117, 2)},
	} {
		for _, k := range []struct {
			what   string
			shares plantest.Shares
			want   *big.Rat
		}{
			{"plain", plantest.Shares{}, big.NewRat(c.plain, 1)}, {"both", plantest.Shares{Left: true, Right: true}, big.NewRat(c.both, 1)},
			{"left", plantest.Shares{Left: true}, c.leftOnly}, {"right", plantest.Shares{Right: true}, c.rightly},
		} {
			if got := plantest.Makespan(c.pp, c.n, k.shares, 1, 2); got.Cmp(k.want) != 0 {
				t.Errorf("pp %d, n %d, %s: makespan %s, want %s", c.pp, c.n, k.what, got, k.want)
			}
		}
	}
}

// TestSharesAddUp checks that the shares of every task add up to 1.
func TestSharesAddUp(t *testing.T) {
	one := big.NewRat(1, 1)
	for _, m := range []plantest.Shares{{Left: true, Right: true}, {Left: true}, {}} {
		for _, size := range [][2]int{{2, 4}, {4, 8}, {3, 7}, {8, 8}, {5, 5}} {
			pp, n := size[0], size[1]
			for i := range pp {
				for x := range n {
					sum := new(big.Rat)
					for _, share := range m.Of(pp, n, i, x) {
						sum.Add(sum, share)
					}
					if sum.Cmp(one) != 0 {
						t.Errorf("%+v, pp %d, n %d: shares of (%d, %d) make %s", m, pp, n, i, x, sum)
					}
				}
			}
		}
	}
}

// TestBrokenSharing edits a valid plan and expects the right error from Verify.
func TestBrokenSharing(t *testing.T) {
	for _, c := range []struct {
		want string
		edit func(p *plan.Plan)
	}{
		{"but mux needs", func(p *plan.Plan) { p.Tasks[0] = p.Tasks[0][1:] }},
		{"but mux needs", func(p *plan.Plan) { p.Tasks[1][0], p.Tasks[1][1] = p.Tasks[1][1], p.Tasks[1][0] }},
		{"has 1 pieces for 2 stages", func(p *plan.Plan) { p.Mux.Pieces[0] = p.Mux.Pieces[0][1:] }},
		{"pieces are given for 0 subsequences", func(p *plan.Plan) { p.Mux.Pieces = nil }},
		{"not a multiple of sp", func(p *plan.Plan) { p.Mux.Pieces[0] = []int64{9, 9} }},
		{"add up to 20 tokens, not 18", func(p *plan.Plan) { p.Mux.Pieces[0] = []int64{10, 10} }},
		{"no such microbatch", func(p *plan.Plan) { p.Mux.Left = false }},
		{"virtual stages, because both fill the same", func(p *plan.Plan) {
			p.Parallel.VirtualStages, p.LayersPerStage = 2, []int{1, 1, 1, 1}
			p.Model.Layers = 4
		}},
		{"applied is false", func(p *plan.Plan) { p.Mux.Stages[0].Applied = false }},
	} {
		p := plantest.Plan(t, "tiny.sppo", "schedule.mux=left")
		if !slices.Equal(p.Mux.Pieces[0], []int64{10, 8}) {
			t.Fatalf("18 tokens over two stages of two ranks are cut into %v", p.Mux.Pieces[0])
		}
		c.edit(p)
		if err := plantest.Verify(p); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want it to say %q", err, c.want)
		}
	}
}

// TestMuxRefusals checks that impossible requests are refused with a hint that gives the nearest values that
// work.
func TestMuxRefusals(t *testing.T) {
	for set, hint := range map[string]string{
		"schedule.pp=1":             "mux = off, or pp of at least 2",
		"schedule.subsequences=1":   "subsequences = 2, or mux = off",
		"schedule.strategy=seq1f1b": "strategy = sppo, or mux = off",
		"model.num_experts=4 model.num_experts_per_tok=2 model.moe_intermediate_size=8 model.router_aux_loss_coef=0.1": "router_aux_loss_coef = 0",
	} {
		sp := plantest.Load(t, "tiny.sppo", append(strings.Fields(set), "schedule.mux=left")...)
		if err := plantest.Run(sp, plan.New(sp)); err == nil || !strings.Contains(err.Error(), hint) {
			t.Errorf("%s: %v, want the hint %q", set, err, hint)
		}
	}
}
