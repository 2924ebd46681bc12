package graph

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"sppo.dev/ir"
	"sppo.dev/lang"
)

// TestRoles draws at random which part of a model is trained. The backward pass must compute the gradient of
// every trained parameter, but of no frozen one, and every node must contribute to one of these gradients.
// Whichever units a layer recomputes, it may repeat attention only if gradients of K and V are needed.
func TestRoles(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 150 {
		family := []string{"gpt", "llama", "gemma2", "olmo2"}[r.IntN(4)]
		all := splits(1, 2)
		split := all[r.IntN(len(all))]
		m, freeze := drawTuned(r, small(family, lang.PositionsRope))
		g := NewTuned(m, freeze, split, 64)
		name := fmt.Sprintf("%s, sp %d %s, freeze %v, targets %v", family, split.SP, split.Mode, freeze, m.AdapterTargets)
		below := checkRole(t, name, g.Embedding, "", g, false)
		for layer := range g.Layers {
			if untrained := !below && len(g.LayerOf(g.KindOf(layer)).Backward) == 0; untrained != (layer < g.Untrained) {
				t.Errorf("%s: layer %d has no backward: %v", name, layer, untrained)
			}
			kind := g.KindOf(layer)
			trains := checkRole(t, name, g.LayerOf(kind), LayerPrefix(layer), g, below)
			for range 5 {
				recomputed := Units(r.Uint64()) & g.forms[0].units()
				checkRole(t, name, g.LayerWithout(kind, recomputed), LayerPrefix(layer), g, below)
			}
			below = below || trains
		}
		checkRole(t, name, g.Head, "", g, below)
	}
}

// drawTuned draws adapters, or tensors to freeze.
func drawTuned(r *rand.Rand, m lang.Model) (lang.Model, []string) {
	m.Layers = 4
	if r.IntN(2) == 0 {
		targets := []string{"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"}
		r.Shuffle(len(targets), func(i, k int) { targets[i], targets[k] = targets[k], targets[i] })
		m.Adapter, m.AdapterRank, m.AdapterAlpha, m.AdapterTargets = lang.AdapterLoRA, 2, 3, targets[:1+r.IntN(3)]
		return m, nil
	}
	var freeze []string
	for _, pattern := range append(slices.Clone(lang.TensorGroups), "layer.0", "layer.0-2", "layer.*.wq", "layer.1.*", "layer.*.*.gamma") {
		if r.IntN(3) == 0 {
			freeze = append(freeze, pattern)
		}
	}
	return m, freeze
}

// checkRole checks the backward pass of a block, and reports whether it trains anything.
func checkRole(t *testing.T, name string, b *Block, prefix string, g *Model, below bool) (trains bool) {
	t.Helper()
	fail := func(format string, args ...any) {
		t.Helper()
		t.Fatalf("%s: %s%s: %s", name, prefix, b.Name, fmt.Sprintf(format, args...))
	}
	written, wanted := map[int]bool{}, map[int]bool{b.DInput: b.Input != Missing && below}
	for i, n := range slices.Backward(b.Backward) {
		useful := false
		for k, a := range n.Args {
			if a.Value == Missing || ir.Ops[n.Op].Operands[k].Dir == ir.Read {
				continue
			}
			v := &b.Values[a.Value]
			if v.Kind == WeightGrad {
				written[v.Param] = true
			}
			useful = useful || wanted[a.Value] || v.Kind == WeightGrad || v.Kind == Loss
		}
		if !useful {
			fail("nobody needs what node %d, %s, computes", i, ir.Ops[n.Op].Name)
		}
		if n.Op == ir.Attention && !b.Attends {
			fail("the backward repeats attention for nothing")
		}
		for _, a := range n.Args {
			wanted[a.Value] = a.Value != Missing
		}
	}
	for i := range b.Params {
		p := &b.Params[i]
		if frozen := !p.Adapter && lang.Freezes(&g.Model, g.Freeze, prefix+p.Name, p.Group()); frozen != p.Frozen || frozen == written[i] {
			fail("%s is frozen: %v, %v; it has a gradient: %v", p.Name, frozen, p.Frozen, written[i])
		}
		trains = trains || !p.Frozen
	}
	if b.Input != Missing && (b.DInput != Missing) != below {
		fail("it has a gradient of its input: %v", !below)
	}
	if strings.HasPrefix(prefix, "layer") && !trains && !below && len(b.Backward)+len(b.Units) > 0 {
		fail("it has a backward")
	}
	return trains
}
