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

// Len returns the number of units in the set.
func (s Units) Len() int { return bits.OnesCount64(uint64(s)) }

// Named recomputation policies. Each selects the units of a layer that the backward pass recomputes.
const (
	RecomputeNone          = "none"
	RecomputeSelective     = "selective"      // results of norms and activation functions: no matmul is repeated
	RecomputeKeepAttention = "keep_attention" // everything except the layer's input and attention's result
	RecomputeFull          = "full"           // everything except the layer's input
	RecomputeFullKV        = "full_kv"        // like full, but also recomputes K and V of a layer, once for all subsequences
)

// recomputes selects, for each policy, the nodes whose results are recomputed.
var recomputes = map[string]func(*Node) bool{
	RecomputeNone:          func(*Node) bool { return false },
	RecomputeSelective:     func(n *Node) bool { return savings[n.Op] == cheap },
	RecomputeKeepAttention: func(n *Node) bool { return !slices.Contains(attending, n.Op) },
	RecomputeFull:          func(*Node) bool { return true },
	RecomputeFullKV:        func(*Node) bool { return true },
}

// attending lists what computes the result of attention: a sink changes it, and in a ring, a cast rounds it.
var attending = []ir.Op{ir.Attention, ir.AttentionSink, ir.Scan, ir.Cast}

// findKVNodes collects, in order, the forward nodes that compute K and V from the input.
func (b *builder) findKVNodes() {
	wanted := map[int]bool{}
	for v := range b.Values {
		wanted[v] = b.Values[v].Kind == Cache
	}
	for _, n := range slices.Backward(b.Forward) {
		if !slices.ContainsFunc(n.Writes(), func(v int) bool { return wanted[v] }) {
			continue
		}
		b.KVNodes = append(b.KVNodes, n)
		for _, a := range n.Args {
			wanted[a.Value] = true
		}
	}
	slices.Reverse(b.KVNodes)
}

// RecomputedBy returns the units that a policy recomputes. The layer's input is never among them,
// because no node of the layer computes it, and neither are choices of experts.
func (g *Model) RecomputedBy(policy string) (recomputed Units) {
	made := recomputes[policy]
	if made == nil {
		return 0
	}
	for _, f := range g.forms {
		b := f.plain
		for _, u := range b.Units {
			if u.Producer >= 0 && made(&b.Forward[u.Producer]) && savings[b.Forward[u.Producer].Op] != always && !(policy == RecomputeSelective && b.isStatistics(&u)) {
				recomputed |= 1 << u.Number
			}
		}
	}
	return recomputed
}

// isStatistics reports whether a unit holds only the statistics of a norm whose result the backward pass does
// not read. Recomputing them would repeat the whole norm.
func (b *Block) isStatistics(u *Unit) bool {
	n := &b.Forward[u.Producer]
	return (n.Op == ir.RMSNorm || n.Op == ir.LayerNorm) && !slices.Contains(u.Values, n.Args[0].Value)
}

// recomputeKey identifies a layer by its role and the units that it recomputes.
type recomputeKey struct {
	role       *role
	recomputed Units
}

// LayerWithout returns a layer of the given kind whose backward pass recomputes those of the given units that
// this kind may recompute. Its forward pass is the same as in every layer. It saves only the other units, which
// keep their original numbers.
func (g *Model) LayerWithout(kind int, recomputed Units) *Block {
	return g.layerWithout(g.kinds[kind].role, recomputed)
}

func (g *Model) layerWithout(r *role, recomputed Units) *Block {
	if recomputed &= r.recomputed; recomputed == 0 {
		return r.block
	}
	recomputed |= r.form.units() &^ r.saved
	g.mutex.Lock()
	defer g.mutex.Unlock()
	key := recomputeKey{r, recomputed}
	if b := g.recomputing[key]; b != nil {
		return b
	}
	for {
		b := g.layer(r, r.form.keepers(recomputed))
		r.form.number(b)
		more := r.form.larger(b)
		if more == 0 {
			g.recomputing[key] = b
			return b
		}
		recomputed |= more
	}
}

// larger returns the units of a layer that hold more values than the same units of the plain layer, which
// recomputes nothing. If the backward pass of the plain layer does not read the result of a norm, the plain
// layer keeps only the norm's statistics. Values that depend on the result cannot be recomputed from the
// statistics, so the norm is recomputed as well.
func (f *form) larger(b *Block) (units Units) {
	for i := range b.Units {
		u := &b.Units[i]
		if at := slices.IndexFunc(f.plain.Units, func(plain Unit) bool { return plain.Number == u.Number }); len(u.Values) > len(f.plain.Units[at].Values) {
			units |= 1 << u.Number
		}
	}
	return units
}

// units returns the units of the form's plain layer. The units of any layer of the form are a subset of these.
func (f *form) units() (units Units) {
	for i := range f.plain.Units {
		units |= 1 << f.plain.Units[i].Number
	}
	return units
}

// number assigns numbers to the units of a layer.
func (f *form) number(b *Block) {
	for i := range b.Units {
		b.Units[i].Number = f.numberOf(b.Units[i].Producer)
	}
}

// keepers returns the forward nodes whose results are kept: those of units that are not recomputed.
// Values that belong to no unit are needed only to compute other values, and are recomputed with
// them.
func (f *form) keepers(recomputed Units) map[int]bool {
	keep := map[int]bool{}
	for _, u := range f.plain.Units {
		if !recomputed.Has(u.Number) {
			keep[u.Producer] = true
		}
	}
	return keep
}

func (f *form) numberOf(producer int) int {
	for _, u := range f.plain.Units {
		if u.Producer == producer {
			return u.Number
		}
	}
	panic("internal: a layer that recomputes units keeps a value that the plain layer does not")
}
