package graph

import (
	"cmp"
	"slices"

	"sppo.dev/ir"
	"sppo.dev/lang"
)

// This file builds layers with latent attention: DeepSeek-AI 2024, DeepSeek-V2, section 2.1. Each rank computes the latents of its own
// rows. Where ranks divide weights, they gather latents, which are narrower than the layer's input, and compute queries, keys and values
// of their own heads from them; where they hold whole weights, they compute those of all heads and exchange rows for heads. All heads of
// keys begin with the same rotated elements. Heads of queries and keys begin with the rotated elements, too, unlike those of published
// models, whose weights change places where folders are read and written.

// latentEps is the epsilon of the norms of latents: in transformers, the default of their class, which no config changes.
const latentEps = 1e-6

// latents reports whether any layer has latent attention.
func (g *Model) latents() bool { return slices.Contains(g.Mixers, lang.MixerLatent) }

func (g *Model) latentAttention(b *builder, in int) int {
	h, heads := int64(g.Hidden), int64(g.Heads)
	d, wide, nope, turned := int64(g.HeadDim), int64(g.ValueHeadDim), int64(g.NopeDim), int64(g.RopeDim)
	own := g.headsLocal()
	rows := in
	if g.QLatent == 0 || g.AttnGate {
		rows = g.enter(b, in, "ln1.gathered")
	}
	from, width := rows, h
	if g.QLatent > 0 {
		from, width = g.enter(b, g.compressed(b, in, "q", "wq_a", int64(g.QLatent)), "q.latent.gathered"), int64(g.QLatent)
	}
	query := g.expanded(b, "q", from, g.columns("wq", width, heads*d, own*d, ConstHeads))
	if g.rotation(RotationQ) != plainNone {
		query = g.turned(b, "q", query, RotationQ, own, d)
	}
	latent := g.compressed(b, in, "kv", "wkv", int64(g.KVLatent))
	if g.Latents {
		latent = g.cached(b, g.held(b, latent, "kv.latent.gathered"), "kv.cached")
	} else {
		latent = g.enter(b, latent, "kv.latent.gathered")
	}
	shared := g.linear(b, "k.shared", Local, in, g.reduced(Param{Name: "wk_rope", Shape: [2]int64{h, turned}, Local: [2]int64{h, turned}, Std: g.InitStd}), Arg{Value: Missing})
	if shared = g.held(b, shared, "k.shared.gathered"); g.rotation(RotationK) != plainNone {
		shared = g.turned(b, "k.shared", shared, RotationK, 1, turned)
	}
	if g.Latents {
		shared = g.cached(b, shared, "k.shared.cached")
		return g.attendPieces(b, rows, query, latent, shared)
	}
	parts := g.expanded(b, "k.rest", latent, g.columns("wk", int64(g.KVLatent), heads*nope, own*nope, ConstNope))
	keys, values := g.kv(b, "k", g.Stream.K, own*d), g.kv(b, "v", g.Stream.V, own*wide)
	intoK, intoV := tail(keys), tail(values)
	if g.Gathers {
		intoK, intoV = all(b.activation("k.chunks", Held, own*d)), all(b.activation("v.chunks", Held, own*wide))
	}
	b.node(ir.ConcatHeads, []Attr{integer("heads", own), integer("head_dim", d)}, intoK, all(shared), all(parts))
	g.expand(b, "v", latent, g.columns("wv", int64(g.KVLatent), heads*wide, own*wide, ConstValue), intoV)
	if g.Gathers {
		b.gatherChunks(keys, intoK.Value)
		b.gatherChunks(values, intoV.Value)
	}
	return g.attend(b, rows, query, keys, values, ConstValue)
}

// cached appends rows to a cache of the whole sequence, which every rank has.
func (g *Model) cached(b *builder, x int, name string) int {
	cache := g.kv(b, name, g.Stream.K, b.Values[x].Cols)
	if g.Gathers {
		b.gatherChunks(cache, x)
		return cache
	}
	for _, n := range b.Forward {
		for k, a := range n.Args {
			if a.Value == x {
				n.Args[k] = tail(cache)
			}
		}
	}
	return cache
}

// attendPieces appends attention in which K and V are computed from cached latents, for one piece of the keys after another. Each rank
// computes those of its own heads, in every mode.
func (g *Model) attendPieces(b *builder, rows, query, latent, shared int) int {
	heads, own, d, wide, nope := int64(g.Heads), g.headsLocal(), int64(g.HeadDim), int64(g.ValueHeadDim), int64(g.NopeDim)
	ofHeads := func(name string, dim int64, start string) Param {
		if g.HeadRanks() == 1 {
			return g.columns(name, int64(g.KVLatent), heads*dim, own*dim, start)
		}
		return g.onRing(Param{Name: name, Shape: [2]int64{int64(g.KVLatent), heads * dim}, Local: [2]int64{int64(g.KVLatent), own * dim}, Shard: ByCols, Start: start, Std: g.InitStd})
	}
	b.looping = true
	parts := g.linear(b, "k.rest", Piece, latent, ofHeads("wk", nope, ConstNope), Arg{Value: Missing})
	keys := b.activation("k", Piece, own*d)
	b.node(ir.ConcatHeads, []Attr{integer("heads", own), integer("head_dim", d)}, all(keys), all(shared), all(parts))
	values := g.linear(b, "v", Piece, latent, ofHeads("wv", wide, ConstValue), Arg{Value: Missing})
	return g.attend(b, rows, query, keys, values, ConstValue)
}

// valueDim returns the width of a head of values in layers with attention.
func (g *Model) valueDim() int { return cmp.Or(g.ValueHeadDim, g.HeadDim) }

// compressed appends a latent of the layer's input: a linear map of the rank's own rows, and a norm.
func (g *Model) compressed(b *builder, x int, name, weight string, width int64) int {
	h := int64(g.Hidden)
	y := g.linear(b, name+".latent", Local, x, g.reduced(Param{Name: weight, Shape: [2]int64{h, width}, Local: [2]int64{h, width}, Std: g.InitStd}), Arg{Value: Missing})
	normed, stats := b.activation(name+".latent.normed", Local, width), b.value(Value{Name: name + ".latent.stats", Rows: Local, Cols: 1, DType: ir.F32})
	attrs := g.normAttrs()
	attrs[0] = float("eps", latentEps)
	b.node(ir.RMSNorm, attrs, all(normed), all(stats), all(y), all(b.param(g.replicated(name+"_a_norm.gamma", width, 1-g.NormOffset))))
	return normed
}

// held gathers rows that attention holds, in every mode.
func (g *Model) held(b *builder, x int, name string) int {
	return b.regroup(ir.AllGather, g.headGroup(), g.HeadRanks(), Held, x, name)
}

// expanded appends a linear map of a latent to the rank's heads, and expand writes it to an operand.
func (g *Model) expanded(b *builder, name string, x int, w Param) int {
	cols := w.Shape[1] / int64(g.HeadRanks())
	y := b.activation(name, Held, cols)
	g.expand(b, name, x, w, all(y))
	return y
}

func (g *Model) expand(b *builder, name string, x int, w Param, into Arg) {
	product := into
	if g.ulysses() {
		product = all(b.activation(name+".local", Local, w.Shape[1]))
	}
	b.node(ir.Matmul, nil, product, all(x), all(b.param(w)))
	g.adapt(b, w, product, x)
	if g.ulysses() {
		b.node(ir.AllToAll, g.exchange(1, false), into, product)
	}
}

// turned appends the rotation of heads of the given width.
func (g *Model) turned(b *builder, name string, x int, rotation string, heads, dim int64) int {
	y := b.value(b.like(x, name+".turned"))
	b.node(ir.Rope, g.ropeAttrs(rotation, heads, dim), all(y), all(x), g.positions(b))
	return y
}

// concatGradient is the rule for heads that share their first columns.
func concatGradient(b *builder, n Node) {
	shared, x := n.Args[1].Value, n.Args[2].Value
	dshared, dx := b.newGrad(shared), b.newGrad(x)
	b.node(ir.ConcatHeadsGrad, n.Attrs, all(dshared), all(dx), b.grad(n.Args[0]))
	b.contribute(shared, all(dshared))
	b.contribute(x, all(dx))
}
