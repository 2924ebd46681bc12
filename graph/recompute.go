package graph

import (
	"math/bits"
	"slices"

	"sppo.dev/ir"
)

// Units is a set of units of a layer, by their numbers.
type Units uint64

// Has reports whether a unit is in the set.
func (s Units) Has(number int) bool { return s>>number&1 != 0 }

// Len is the number of units in the set.
func (s Units) Len() int { return bits.OnesCount64(uint64(s)) }

// Named policies of recomputation: the units of a layer that the backward pass recomputes instead of keeping.
const (
	RecomputeNone          = "none"
	RecomputeSelective     = "selective"      // results of norms and activation functions: no matmul is repeated
	RecomputeKeepAttention = "keep_attention" // all but the layer's input and attention's result
	RecomputeFull          = "full"           // all but the layer's input
	RecomputeFullKV        = "full_kv"        // the same, and K and V of a layer once for all subsequences
)

// recomputes lists for each policy the results that are recomputed.
var recomputes = map[string]func(*Node) bool{
	RecomputeNone:          func(*Node) bool { return false },
	RecomputeSelective:     elementwise,
	RecomputeKeepAttention: func(n *Node) bool { return n.Op != ir.Attention && n.Op != ir.Cast }, // which rounds its result in a ring
	RecomputeFull:          func(*Node) bool { return true },
	RecomputeFullKV:        func(*Node) bool { return true },
}

// findCaching collects the forward nodes that lead from the input to K and V, in their order.
func (b *builder) findCaching() {
	wanted := map[int]bool{}
	for v := range b.Values {
		wanted[v] = b.Values[v].Kind == Cache
	}
	for _, n := range slices.Backward(b.Forward) {
		if !slices.ContainsFunc(b.writes(&n), func(v int) bool { return wanted[v] }) {
			continue
		}
		b.Caching = append(b.Caching, n)
		for _, a := range n.Args {
			wanted[a.Value] = true
		}
	}
	slices.Reverse(b.Caching)
}

// RemadeBy returns the units that a policy recomputes. The layer's input is never among them: nothing in the
// layer makes it.
func (g *Model) RemadeBy(policy string) (remade Units) {
	made := recomputes[policy]
	if made == nil {
		return 0
	}
	for _, u := range g.Layer.Units {
		if u.Producer >= 0 && made(&g.Layer.Forward[u.Producer]) && !(policy == RecomputeSelective && g.Layer.isStatistics(&u)) {
			remade |= 1 << u.Number
		}
	}
	return remade
}

// isStatistics reports whether a unit is nothing but the statistics of a norm whose result the backward pass does not read: to recompute
// them would repeat the whole norm.
func (b *Block) isStatistics(u *Unit) bool {
	n := &b.Forward[u.Producer]
	return (n.Op == ir.RMSNorm || n.Op == ir.LayerNorm) && !slices.Contains(u.Values, n.Args[0].Value)
}

// remakeKey is a layer of a role that makes units again.
type remakeKey struct {
	role   *role
	remade Units
}

// LayerWithout is a layer of a kind whose backward pass makes some of its units again. Its forward is that of every layer; its units
// are those that are left, under their numbers.
func (g *Model) LayerWithout(kind int, remade Units) *Block {
	return g.layerWithout(g.kinds[kind].role, remade)
}

func (g *Model) layerWithout(r *role, remade Units) *Block {
	if remade &= r.remade; remade == 0 {
		return r.block
	}
	remade |= g.allUnits() &^ r.saved
	g.mutex.Lock()
	defer g.mutex.Unlock()
	key := remakeKey{r, remade}
	if b := g.remaking[key]; b != nil {
		return b
	}
	for {
		b := g.layer(r, g.keepers(remade))
		g.number(b)
		more := g.larger(b)
		if more == 0 {
			g.remaking[key] = b
			return b
		}
		remade |= more
	}
}

// larger returns the units of a layer that keep more than those of the plain one: from the statistics of a norm alone, which the plain
// one keeps where its backward pass does not read the norm's result, what the result leads to cannot be computed again. Such
// a norm is computed again as well.
func (g *Model) larger(b *Block) (units Units) {
	for i := range b.Units {
		u := &b.Units[i]
		if at := slices.IndexFunc(g.Layer.Units, func(plain Unit) bool { return plain.Number == u.Number }); len(u.Values) > len(g.Layer.Units[at].Values) {
			units |= 1 << u.Number
		}
	}
	return units
}

// allUnits are those of the layer that any layer is part of.
func (g *Model) allUnits() Units { return 1<<len(g.Layer.Units) - 1 }

// number gives the units of a layer their numbers.
func (g *Model) number(b *Block) {
	for i := range b.Units {
		b.Units[i].Number = g.numberOf(b.Units[i].Producer)
	}
}

// keepers returns the forward nodes whose results stay: those of units that are not recomputed. What belongs to no unit is needed only
// to make others, and goes with them.
func (g *Model) keepers(remade Units) map[int]bool {
	keep := map[int]bool{}
	for _, u := range g.Layer.Units {
		if !remade.Has(u.Number) {
			keep[u.Producer] = true
		}
	}
	return keep
}

func (g *Model) numberOf(producer int) int {
	for _, u := range g.Layer.Units {
		if u.Producer == producer {
			return u.Number
		}
	}
	panic("internal: a layer that makes units again keeps what the plain one does not")
}

// moves are the nodes that bring data in another form which is kept anyway. An exchange of rows for heads is not among
// them: attention's gradient needs Q by heads, and nothing needs it by rows.
func moves(n *Node) bool {
	switch n.Op {
	case ir.AllGather, ir.LoadTokens, ir.Rotate:
		return true
	case ir.AllToAll:
		return n.Attrs[attrIndex(n.Op, "inverse")].Value.Bits != 0
	}
	return false
}

func elementwise(n *Node) bool {
	switch n.Op {
	case ir.LayerNorm, ir.RMSNorm, ir.Activation, ir.GLU:
		return true
	}
	return false
}
