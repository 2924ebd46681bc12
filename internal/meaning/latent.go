package meaning

import "sppo.dev/ir"

// latentAttention is latent attention in the reference, with the values that its backward pass needs.
type latentAttention struct {
	q, kv  *normalized // latents
	shared head        // what all heads of keys share
}

// valueDim returns the width of a head of values.
func (l *layer) valueDim() int64 {
	if l.ValueHeadDim > 0 {
		return int64(l.ValueHeadDim)
	}
	return int64(l.HeadDim)
}

// compressed adds a latent of x.
func (l *layer) compressed(x value, weight, name string, width int) *normalized {
	y := l.linear(weight, "", false, x, int64(l.Hidden), int64(width))
	norm := l.name(name + "_a_norm")
	return l.normalize(&normalized{name: norm, x: y, width: int64(width), groups: 1, rms: true, offset: l.NormOffset, eps: 1e-6, numbers: 1, gamma: l.weight(norm + ".gamma")})
}

// attendLatent adds latent attention, of which heads begin with their rotated elements.
func (l *layer) attendLatent(x value) value {
	a, h, heads, nope, shared := &l.latent, int64(l.Hidden), int64(l.Heads), int64(l.NopeDim), int64(l.RopeDim)
	q, from, width := &l.heads[0], x, h
	if l.QLatent > 0 {
		a.q = l.compressed(x, "wq_a", "q", l.QLatent)
		from, width = a.q.y, int64(l.QLatent)
	}
	q.rotation, q.width = l.rotation(l.number, true), int64(l.HeadDim)
	q.value = l.turn(l.name("q"), q, l.linear("wq", "", false, from, width, heads*int64(l.HeadDim)), false)
	a.kv = l.compressed(x, "wkv", "kv", l.KVLatent)
	a.shared.rotation, a.shared.width = l.rotation(l.number, false), shared
	a.shared.value = l.turn(l.name("k.shared"), &a.shared, l.linear("wk_rope", "", false, x, h, shared), false)
	own := l.linear("wk", "", false, a.kv.y, int64(l.KVLatent), heads*nope)
	l.heads[1].value = l.plain(l.name("k"), ir.ConcatHeads, concatKey(shared, nope), a.shared.value, own)
	l.heads[2].value = l.linear("wv", "", false, a.kv.y, int64(l.KVLatent), heads*l.valueDim())
	return l.attendHeads(x)
}

func (l *layer) attendLatentGradient(dy value) value {
	a, heads, nope, shared := &l.latent, int64(l.Heads), int64(l.NopeDim), int64(l.RopeDim)
	d, dx := l.headsGradient(dy)
	dlatent := l.linearGradient("wv", d[2])
	dlatent = dlatent.plus(l.linearGradient("wk", l.plain(l.name("d.k.own"), ir.ConcatHeadsGrad, concatGradKey("x", shared, nope), d[1])))
	dshared := l.add(l.name("d.k.shared"), ir.ConcatHeadsGrad, term{kind: overCols, need: nowhere.by(features, interval{0, heads})}, concatGradKey("shared", shared, nope), d[1])
	dx = dx.plus(l.linearGradient("wk_rope", l.turn(l.name("k.shared"), &a.shared, dshared, true)))
	dx = dx.plus(l.linearGradient("wkv", l.normGradient(a.kv, l.named(l.name("the gradient of the latent of keys and values"), dlatent))))
	dq := l.linearGradient("wq", l.turn(l.name("q"), &l.heads[0], d[0], true))
	if a.q == nil {
		return dx.plus(dq)
	}
	return dx.plus(l.linearGradient("wq_a", l.normGradient(a.q, l.named(l.name("the gradient of the latent of queries"), dq))))
}
