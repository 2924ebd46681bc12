package graph

import (
	"testing"

	"sppo.dev/ir"
	"sppo.dev/lang"
)

// TestExperts compares the sizes of Qwen3-30B-A3B with the published ones, and checks that no policy recomputes the choice of
// experts.
func TestExperts(t *testing.T) {
	m := small("qwen3", lang.PositionsRope)
	m.Layers, m.Hidden, m.Heads, m.KVHeads, m.HeadDim, m.Vocab, m.QKNorm = 48, 2048, 32, 4, 128, 151936, lang.QKNormHead
	m.Experts, m.TopExperts, m.ExpertFFN, m.Scoring, m.NormTop, m.RoutedScale = 128, 8, 768, lang.ScoringSoftmax, true, 1
	for _, split := range splits(1, 4) {
		g := New(m, split, 4096)
		if total, _ := g.Parameters(); total != 30_532_122_624 || g.Active() != 3_353_032_704 {
			t.Errorf("%v: %d parameters, of which a token uses %d", split, total, g.Active())
		}
		b := g.Plain(0)
		for _, u := range b.Units {
			if u.Producer < 0 || b.Forward[u.Producer].Op != ir.Route {
				continue
			}
			if g.Remakes(0).Has(u.Number) || g.RecomputedBy(RecomputeFull).Has(u.Number) || !g.Saves(0).Has(u.Number) {
				t.Errorf("%v: the choice of experts is not kept", split)
			}
			if n := u.Number; len(g.LayerWithout(0, g.RecomputedBy(RecomputeFull)).Units) < 2 {
				t.Errorf("%v: with full recomputation, a layer does not keep unit %d", split, n)
			}
		}
	}
}
