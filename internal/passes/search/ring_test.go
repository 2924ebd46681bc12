package search

import (
	"slices"
	"testing"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/lang"
)

// TestRing checks that a request for a ring is accepted, that a rank then keeps the same tensors between the
// forward and backward passes as with divided weights, and that the number of heads need not be divisible by
// the number of ranks.
func TestRing(t *testing.T) {
	megatron, ring := plantest.Plan(t, "gpt-docs.sppo", "schedule.align=4"), plantest.Plan(t, "gpt-docs.sppo", "schedule.align=4", "schedule.sp_mode=ring")
	if got := ring.Parallel.SPMode; got != graph.ModeRing {
		t.Fatalf("the mode is %q", got)
	}
	if m, r := plantest.Kept(megatron), plantest.Kept(ring); m != r {
		t.Errorf("%g bytes a token are kept, and %g with weights divided", r, m)
	}
	m, _ := kvOf(megatron.Graph(), megatron.Size(0))
	if r, _ := kvOf(ring.Graph(), ring.Size(0)); m != r {
		t.Errorf("K and V of a layer and their gradients take %v, and %v with heads divided", r, m)
	}
	three := plantest.Plan(t, "gpt-docs.sppo", "schedule.sp_mode=ring", "schedule.sp=3", "schedule.pp=1", "schedule.align=6", "train.sequence=258", "cluster.gpus_per_node=3")
	if three.Model.Heads%3 == 0 || three.Parallel.SP != 3 {
		t.Errorf("%d heads over %d ranks", three.Model.Heads, three.Parallel.SP)
	}
	if alone := plantest.Plan(t, "gpt-docs.sppo", "schedule.sp_mode=ring", "schedule.sp=1", "schedule.keep=[]"); alone.Split().Chunks() != 0 {
		t.Error("a ring of one rank is no plain order")
	}
}

// TestRingBeyondHeads checks which numbers of ranks per layer are tried, and with which modes: a ring is tried
// only where more ranks share a layer than its heads allow, and a ring of groups that divide heads also where ranks of
// several nodes share a layer, unless the mode is given.
func TestRingBeyondHeads(t *testing.T) {
	for _, c := range []struct {
		heads, kvHeads, gpus int
		mode                 string
		want, rings          []string
	}{
		{28, 4, 8, "", []string{"1", "2", "4", "8", "[4, 2]"}, []string{"8"}},
		{28, 4, 8, graph.ModeRing, []string{"1", "2", "4", "8"}, []string{"8"}},
		{28, 4, 8, graph.ModeUlysses, []string{"1", "2", "4"}, nil},
		{32, 8, 64, "", []string{"1", "2", "4", "8", "16", "[8, 2]", "32", "[8, 4]", "64", "[8, 8]"}, []string{"64"}},
		{32, 8, 64, graph.ModeMegatron, []string{"1", "2", "4", "8", "16", "32"}, nil},
		{32, 8, 48, "", []string{"1", "2", "4", "8", "16", "[8, 2]", "32", "[8, 4]", "24", "[8, 3]", "48", "[8, 6]"}, []string{"24", "48"}},
		{20, 20, 16, "", []string{"1", "2", "4", "5", "10", "[2, 5]", "8", "[4, 2]", "16", "[4, 4]"}, []string{"8", "16"}},
		{32, 8, 8, "", []string{"1", "2", "4", "8"}, nil},
	} {
		sp := &space{
			model: lang.Model{Heads: c.heads, KVHeads: c.kvHeads}, train: lang.Train{Sequence: 15 << 20},
			cluster: lang.Cluster{Nodes: c.gpus / 8, GPUsPerNode: 8},
		}
		var got, rings []string
		for _, v := range sp.sps(&lang.Schedule{SPMode: c.mode}) {
			s := lang.Schedule{SPMode: c.mode}
			v.set(&s)
			if got = append(got, v.text); slices.Equal(sp.spModes(&s), []string{graph.ModeRing}) {
				rings = append(rings, v.text)
			}
		}
		if !slices.Equal(got, c.want) || !slices.Equal(rings, c.rings) {
			t.Errorf("%+v: sp is %v, of which %v are rings", c, got, rings)
		}
		sp.model.LinearKeyHeads = c.heads
		for _, v := range sp.sps(&lang.Schedule{SPMode: c.mode}) {
			s := lang.Schedule{SPMode: c.mode}
			if v.set(&s); s.Ring > 0 || !sp.dividesHeads(s.SP) {
				t.Errorf("%+v: linear attention in a ring: sp = %s", c, v.text)
			}
		}
	}
}

// TestRingOfPinnedRanks checks that auto chooses a ring for a pinned number of ranks among which the heads
// cannot be divided evenly.
func TestRingOfPinnedRanks(t *testing.T) {
	p := plantest.Plan(t, "gpt-docs.sppo", "schedule.sp=3", "schedule.sp_mode=auto", "schedule.pp=1", "schedule.dp=1", "schedule.align=auto", "train.sequence=384")
	if p.Parallel.SP != 3 || p.Parallel.SPMode != graph.ModeRing {
		t.Errorf("sp is %d, sp_mode %s", p.Parallel.SP, p.Parallel.SPMode)
	}
}

// TestRingConflicts checks that a request that conflicts with a ring is refused with an error at the right key.
func TestRingConflicts(t *testing.T) {
	for _, c := range []struct {
		code       lang.Code
		words, key string
		set        []string
	}{
		{lang.Conflict, "so stages cannot share tasks", "schedule.mux", []string{"schedule.mux=left"}},
		{lang.BadAlign, "align = 2 is not a multiple of 2 * sp = 4", "schedule.align", []string{"schedule.align=2"}},
		{lang.Indivisible, "sequence = 254 is not divisible by 2 * sp = 4", "train.sequence", []string{"train.sequence=254"}},
		{lang.Indivisible, "a subsequence of 126 tokens is not divisible by 2 * sp = 4", "schedule.subsequences[0]", []string{"schedule.subsequences=[126, 130]", "schedule.align=auto", "train.sequence=256"}},
	} {
		set := append([]string{"schedule.sp_mode=ring", "schedule.align=4"}, c.set...)
		plantest.Expect(t, plantest.Load(t, "gpt-docs.sppo", set...), c.code, c.words, c.key, c.words)
	}
}
