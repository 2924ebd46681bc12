package graph

import (
	"slices"

	"sppo.dev/ir"
	"sppo.dev/lang"
)

// Kinds of layers differ in the form, which defines the forward dataflow, in the attention window, which is a field
// of Size, and in the role, which defines the part of the backward dataflow that a layer needs.

// kind is a set of layers that take the same time and the same amount of memory.
type kind struct {
	window int64
	role   *role // which has the form
}

// form is a set of layers with the same forward dataflow: the same mixer and the same MLP.
type form struct {
	lang.Form
	plain *Block // trains every parameter that any layer of the form trains, and recomputes no unit
	union *role  // of plain
	made  bool   // plain has its input as a unit although its backward does not read it, because layers can recompute from it
}

// Plain returns the layer of a kind that trains every parameter that any layer of the same form trains, and recomputes
// no unit. All layers of the form have its forward pass and part of its backward pass.
func (g *Model) Plain(kind int) *Block { return g.kinds[kind].role.form.plain }

// WithKV returns Plain of the first kind whose layers have K and V, or of the first kind if none has. All layers with
// K and V have equally large ones.
func (g *Model) WithKV() *Block {
	for kind := range g.kinds {
		if len(g.Plain(kind).KVNodes) > 0 {
			return g.Plain(kind)
		}
	}
	return g.Plain(0)
}

// Gives reports whether any layer reads the value of kind Given with that name.
func (g *Model) Gives(name string) bool {
	return slices.ContainsFunc(g.forms, func(f *form) bool { return f.plain.Given(name) != Missing })
}

// HiddenBytes returns the bytes of the rows that layers pass on.
func (g *Model) HiddenBytes(z Size) ir.Bytes {
	b := g.forms[0].plain
	return b.Values[b.Input].Bytes(z)
}

func (g *Model) kindOf(layer int) kind { return kind{g.windowOf(layer), g.roles[layer]} }

// Kinds returns the number of kinds of layers.
func (g *Model) Kinds() int { return len(g.kinds) }

// KindOf returns the kind of a layer. Kinds are numbered in the order in which they first appear.
func (g *Model) KindOf(layer int) int {
	if len(g.kinds) == 1 {
		return 0
	}
	return slices.Index(g.kinds, g.kindOf(layer))
}

// Mixed reports whether layers have several forms.
func (g *Model) Mixed() bool { return len(g.forms) > 1 }

// LayerOf returns the dataflow of the layers of the given kind, without recomputation.
func (g *Model) LayerOf(kind int) *Block { return g.kinds[kind].role.block }

// Saves returns the units that layers of the given kind may keep for their backward pass.
func (g *Model) Saves(kind int) Units { return g.kinds[kind].role.saved }

// Remakes returns the units of Saves that layers of this kind may recompute instead of saving.
func (g *Model) Remakes(kind int) Units { return g.kinds[kind].role.recomputed }

// LayersOf returns the number of layers of the given kind.
func (g *Model) LayersOf(kind int) (n int) {
	for layer := range g.Layers {
		if g.KindOf(layer) == kind {
			n++
		}
	}
	return n
}

// FullKind returns the first kind of layer whose attention has no window, or -1 if there is none.
func (g *Model) FullKind() int { return slices.IndexFunc(g.kinds, kind.full) }

// Full reports whether a layer has attention without a window.
func (g *Model) Full(layer int) bool { return g.kindOf(layer).full() }

func (k kind) full() bool { return k.window == 0 && k.role.form.Attends() }

// Mean returns the mean, over all layers, of a value that depends only on the layer's kind.
func (g *Model) Mean(of func(kind int) ir.Seconds) ir.Seconds {
	if len(g.kinds) == 1 {
		return of(0)
	}
	var sum ir.Seconds
	for kind := range g.kinds {
		sum += ir.Seconds(g.LayersOf(kind)) * of(kind)
	}
	return sum / ir.Seconds(g.Layers)
}

// OfKind returns s with the attention window of layers of the given kind.
func (g *Model) OfKind(s Size, kind int) Size {
	s.Window = g.kinds[kind].window
	return s
}

// OfLayer returns s with the attention window of a layer.
func (g *Model) OfLayer(s Size, layer int) Size {
	s.Window = g.windowOf(layer)
	return s
}

// windowOf returns the window of a layer's attention, or 0 if there is none or it covers the sequence.
func (g *Model) windowOf(layer int) int64 {
	if w := g.WindowOf(layer); w < g.sequence && g.FormOf(layer).Attends() {
		return w
	}
	return 0
}

// formOf returns the form of a layer. The first layer of a form adds it to those of the model.
func (g *Model) formOf(layer int) *form {
	as := g.FormOf(layer)
	if i := slices.IndexFunc(g.forms, func(f *form) bool { return f.Form == as }); i >= 0 {
		return g.forms[i]
	}
	f := &form{Form: as}
	f.plain = g.layer(&role{form: f, input: true}, nil)
	f.union = &role{form: f, frozen: map[string]bool{}}
	for i := range f.plain.Params {
		f.union.frozen[f.plain.Params[i].Name] = true
	}
	g.forms = append(g.forms, f)
	return f
}

// findKinds lists the kinds of layers.
func (g *Model) findKinds() {
	for layer := range g.Layers {
		if k := g.kindOf(layer); !slices.Contains(g.kinds, k) {
			g.kinds = append(g.kinds, k)
		}
	}
}

// Earliest returns the first token that any query of a subsequence attends to.
func (s Size) Earliest() int64 {
	if s.Window == 0 {
		return 0
	}
	return max(0, s.Prefix-s.Window+1)
}
