package graph

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"sppo.dev/ir"
	"sppo.dev/lang"
)

// This file handles models that are trained only in part. A frozen parameter has no gradient. The backward pass
// of a block omits all nodes that do not contribute to the gradient of a trained parameter, and the activations
// that only these nodes read. Below the lowest layer with a trained tensor, no gradient is needed at all.

// role defines the part of the backward dataflow that a block needs. Layers with the same role have equal
// blocks.
type role struct {
	form       *form           // for layers
	frozen     map[string]bool // parameters, by their names in the block
	input      bool            // whether the gradient of the block's input is needed
	block      *Block          // for layers: the block that saves everything that its backward pass reads
	saved      Units           // for layers: units that may be kept
	recomputed Units           // those among them that may be recomputed instead
}

// key identifies a role.
func (r *role) key() string {
	return fmt.Sprint(r.form.Form, r.input, slices.Sorted(maps.Keys(r.frozen)))
}

// findRoles builds the blocks of the model, each with the part of its backward pass that is needed.
func (g *Model) findRoles() {
	everything := &role{input: true}
	embedding, below := g.roleOf(g.embedding(g.sequence, everything), "", false)
	g.Untrained = g.Layers
	if below {
		g.Untrained = 0
	}
	byKey := map[string]*role{}
	for layer := range g.Layers {
		f := g.formOf(layer)
		r, trains := g.roleOf(f.plain, LayerPrefix(layer), below)
		r.form = f
		if below = below || trains; below {
			g.Untrained = min(g.Untrained, layer)
		}
		key := r.key()
		if byKey[key] == nil {
			byKey[key] = r
		}
		g.roles = append(g.roles, byKey[key])
		f.union.input = f.union.input || r.input
		maps.DeleteFunc(f.union.frozen, func(name string, _ bool) bool { return !r.frozen[name] })
	}
	head, _ := g.roleOf(g.head(everything), "", below)
	g.Embedding, g.Head = g.embedding(g.sequence, embedding), g.head(head)
	for _, f := range g.forms {
		f.plain = g.layer(f.union, nil)
		f.made = len(f.plain.Units) == 0 || f.plain.Units[0].Producer >= 0
		if b := f.plain; f.made {
			b.Units = slices.Insert(b.Units, 0, Unit{Name: b.Values[b.Input].Name, Producer: Missing, Values: []int{b.Input}, Reader: len(b.Backward)})
		}
		g.nameUnits(f.plain)
	}
	for key, r := range byKey {
		if r.block = r.form.plain; r.form.made || key != r.form.union.key() {
			r.block = g.layer(r, nil)
		}
		r.findSaved()
	}
}

// nameUnits numbers the units of a form's plain layer. Units of several forms that have the same name have the same
// number; the input of a layer is unit 0.
func (g *Model) nameUnits(b *Block) {
	for i := range b.Units {
		u := &b.Units[i]
		if !slices.Contains(g.UnitNames, u.Name) {
			g.UnitNames = append(g.UnitNames, u.Name)
		}
		u.Number = slices.Index(g.UnitNames, u.Name)
	}
}

// findSaved records which units layers of a role may keep, and which of them they may recompute. Layers keep
// the values that their backward pass reads. If that pass computes gradients of K and V, layers may recompute
// all these values from their input, which they keep. Otherwise K and V have already been freed, and layers can
// recompute only values that can be computed from other units.
func (r *role) findSaved() {
	b := r.block
	r.form.number(b)
	for _, u := range b.Units {
		r.saved |= 1 << u.Number
	}
	r.recomputed = b.derivable()
	if b.Attends {
		r.saved |= 1
		r.recomputed = r.saved &^ 1
	}
	for _, u := range b.Units {
		if u.Producer >= 0 && savings[b.Forward[u.Producer].Op] == always {
			r.recomputed &^= 1 << u.Number
		}
	}
}

// derivable returns the units that can be computed from other units and weights, without the input.
func (b *Block) derivable() (set Units) {
	unit := map[int]Units{} // the unit that contains a value
	for i := range b.Units {
		u := &b.Units[i]
		for _, v := range u.Values {
			unit[v] |= 1 << u.Number
		}
		if u.Producer >= 0 {
			set |= 1 << u.Number
		}
	}
	lost := map[int]bool{b.Input: unit[b.Input] == 0} // values that are neither saved nor can be computed
	for v := range b.Values {
		lost[v] = lost[v] || b.Values[v].Kind == Carry // replaced by later subsequences
	}
	for i := range b.Forward {
		n := &b.Forward[i]
		if !slices.ContainsFunc(n.Reads(), func(v int) bool { return lost[v] }) {
			continue
		}
		for _, v := range n.Writes() {
			lost[v] = unit[v] == 0
			set &^= unit[v]
		}
	}
	return set
}

// roleOf returns the role of a block whose tensors have names that begin with prefix, and reports whether the
// block trains any tensor. below reports whether a trained tensor needs the gradient of the block's input.
func (g *Model) roleOf(b *Block, prefix string, below bool) (r *role, trains bool) {
	r = &role{frozen: map[string]bool{}, input: below}
	for i := range b.Params {
		p := &b.Params[i]
		if g.frozen(prefix, p) {
			r.frozen[p.Name] = true
		} else {
			trains = true
		}
	}
	return r, trains
}

// frozen reports whether a parameter is not trained.
func (g *Model) frozen(prefix string, p *Param) bool {
	if p.Adapter {
		return false
	}
	if p.Constant {
		return true
	}
	return lang.Freezes(&g.Model, g.Freeze, prefix+p.Name, p.Group())
}

// DType returns the type in which a parameter of a model of the given type is stored. What is added to scores of experts is f32, as
// in transformers, because small differences decide.
func (p *Param) DType(model ir.DType) ir.DType {
	if p.Constant {
		return ir.F32
	}
	return model
}

// Group returns the group of tensors to which a parameter belongs, as it is named in the language.
func (p *Param) Group() string {
	switch {
	case strings.HasSuffix(p.Name, ".gamma"), strings.HasSuffix(p.Name, ".beta"):
		return lang.GroupNorms
	case p.Vector, strings.HasPrefix(p.Name, prefixExperts+"b"):
		return lang.GroupBiases
	case p.Name == "embed" || p.Name == "pos":
		return lang.GroupEmbeddings
	case p.Name == "head":
		return lang.GroupHead
	case slices.Contains([]string{"wq", "wk", "wv", "wo", "wg", "wq_a", "wkv", "wk_rope"}, p.Name), strings.HasPrefix(p.Name, prefixLinear):
		return lang.GroupAttention
	}
	return lang.GroupMLP
}

// adapterStd returns the standard deviation of the initial values of A. It equals that of PEFT's initial values, which
// are uniform between -1/sqrt(rows) and 1/sqrt(rows).
func adapterStd(rows int64) float64 { return 1 / math.Sqrt(3*float64(rows)) }

// prune removes from the backward pass all nodes that contribute to no required gradient. Gradients that earlier subsequences read are
// required if this one reads those of the next.
func (b *builder) prune() {
	for needed := map[int]bool{}; ; {
		n := len(needed)
		kept := b.contributing(needed)
		maps.DeleteFunc(needed, func(v int, _ bool) bool { return b.Values[v].Kind != CarryGrad })
		if len(needed) == n {
			b.Backward = kept
			return
		}
	}
}

// contributing returns the nodes of the backward pass that contribute to required gradients, among them those of some values, to which it
// adds all values that these nodes read.
func (b *builder) contributing(needed map[int]bool) (kept []Node) {
	if b.role.input && b.Input != Missing {
		needed[b.DInput] = true
	} else {
		b.DInput = Missing
	}
	for _, n := range slices.Backward(b.Backward) {
		if !slices.ContainsFunc(n.Writes(), func(v int) bool { return needed[v] || b.isResult(v) }) {
			continue
		}
		n.Args = slices.Clone(n.Args)
		for k, a := range n.Args {
			if a.Value == Missing {
				continue
			}
			row := &ir.Ops[n.Op].Operands[k]
			if v := &b.Values[a.Value]; row.Optional && v.Kind == WeightGrad && !b.isResult(a.Value) {
				n.Args[k] = Arg{Value: Missing}
				continue
			}
			if row.Dir != ir.Write {
				needed[a.Value] = true
			}
		}
		kept = append(kept, n)
	}
	slices.Reverse(kept)
	return kept
}

// isResult reports whether a value is a final result of the backward pass: the gradient of a trained parameter,
// or a loss.
func (b *builder) isResult(v int) bool {
	switch value := &b.Values[v]; value.Kind {
	case WeightGrad:
		return !b.Params[value.Param].Frozen
	case Loss:
		return true
	}
	return false
}

// adapt adds the contribution of a weight's adapter to the product of x and the weight: scale * (x A) B, from
// Hu et al. 2021. If the ranks of a stage divide the columns of the weight, they divide those of B in the same
// way; if they divide its rows, they divide those of A.
func (g *Model) adapt(b *builder, w Param, into Arg, x int) {
	prefix, name := "", w.Name // a layer has a dense MLP or a shared expert, and the same adapters for both
	if own, ok := strings.CutPrefix(name, prefixShared); ok {
		prefix, name = prefixShared, own
	}
	i := slices.IndexFunc(g.maps, func(m lang.LinearMap) bool { return slices.Contains(m.Weights, name) })
	if i < 0 {
		return
	}
	rank := int64(g.AdapterRank)
	a := prefix + g.maps[i].Tensor()
	down, ok := b.downs[a]
	if !ok {
		down = g.lower(b, a, w, x)
		b.downs[a] = down
	}
	up := Param{Name: w.Name + ".lora_b", Shape: [2]int64{rank, w.Shape[1]}, Local: [2]int64{rank, w.Local[1]}, Adapter: true}
	if w.Shard == ByCols {
		up.Shard, up.Start, up.Reduce, up.Once = ByCols, w.Start, w.Reduce, w.Once
	} else {
		up = g.reduced(up)
	}
	b.node(ir.Matmul, []Attr{truth("accumulate")}, into, all(down), all(b.param(up)))
}

// lower appends scale * (x A) of an adapter, after dropout of x. The name is that of A, without its suffix.
func (g *Model) lower(b *builder, name string, w Param, x int) int {
	rank := int64(g.AdapterRank)
	a := Param{
		Name: name + ".lora_a", Shape: [2]int64{w.Shape[0], rank}, Local: [2]int64{w.Local[0], rank},
		Std: adapterStd(w.Shape[0]), Adapter: true,
	}
	if w.Shard == ByRows {
		a.Shard, a.Start, a.Reduce, a.Once = ByRows, w.Start, w.Reduce, w.Once
	} else {
		a = g.reduced(a)
	}
	if g.AdapterDropout > 0 {
		x = g.dropout(b, x, a)
	}
	rows := b.rowsFrom(x)
	y := b.activation(name+".lora", rows, rank)
	b.node(ir.Matmul, nil, all(y), all(x), all(b.param(a)))
	if scale := g.AdapterAlpha / float64(rank); scale != 1 {
		z := b.activation(name+".lora.scaled", rows, rank)
		b.node(ir.Axpby, []Attr{float("alpha", scale), float("beta", 0)}, all(z), all(y))
		y = z
	}
	return y
}

// dropout appends dropout of x, the input of an adapter's first matrix.
func (g *Model) dropout(b *builder, x int, a Param) int {
	v := b.Values[x]
	y := b.activation(strings.TrimSuffix(a.Name, "_a")+".dropped", b.rowsFrom(x), v.Cols)
	attrs := []Attr{
		{Name: "tensor", Source: FromTensor, Const: a.Name}, float("rate", g.AdapterDropout),
		from("first", FromFirst), constant("replica", ConstReplica), from("position", FromPrefix), from("batch", FromBatch),
	}
	if a.Start != "" {
		attrs = append(attrs, constant("col", a.Start))
	}
	switch {
	case v.Rows == Local && g.HeadRanks() > 1:
		attrs = append(attrs, constant("member", ConstBlock))
	case g.rings() > 1 && !b.looping:
		attrs = append(attrs, integer("chunks", g.Chunks()), constant("member", ConstMember))
	}
	b.node(ir.Dropout, attrs, all(y), all(x), all(b.given(Value{Name: ValueDropout, Rows: Fixed, Count: 2, DType: ir.I32})))
	return y
}
