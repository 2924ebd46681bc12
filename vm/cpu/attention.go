package cpu

import "sppo/vm/cpu/simd"

func (b *binder) attentionShape() simd.Attention {
	rows, _ := b.shape("q")
	keys, _ := b.shape("k")
	batch := max(b.int("batch"), 1)
	return simd.Attention{
		Tokens: rows / batch, Keys: keys / batch, Prefix: b.int("prefix"), Batch: batch,
		Heads: b.int("heads"), KVHeads: b.int("kv_heads"), HeadDim: b.int("head_dim"),
	}
}

func attention(b *binder) func() {
	shape, pool, accumulate := b.attentionShape(), b.device.pool, b.bool("accumulate")
	o, lse, q, k, v := b.mat("o"), b.floats("lse"), b.mat("q"), b.mat("k"), b.mat("v")
	return func() { shape.Forward(pool, o, lse, accumulate, q, k, v) }
}

func attentionGrad(b *binder) func() {
	shape, pool := b.attentionShape(), b.device.pool
	g := simd.AttentionGrads{
		DQ: b.mat("dq"), DK: b.mat("dk"), DV: b.mat("dv"), AddQ: b.bool("accumulate_q"), AddKV: b.bool("accumulate"),
		DOut: b.mat("do"), Q: b.mat("q"), K: b.mat("k"), V: b.mat("v"), LSE: b.floats("lse"),
	}
	if b.has("delta") {
		g.Delta = b.floats("delta")
	} else {
		g.O = b.mat("o")
	}
	return func() { shape.Backward(pool, g) }
}

func attentionMerge(b *binder) func() {
	pool, heads, dim := b.device.pool, b.int("heads"), b.int("head_dim")
	o, lse, parts, lses := b.mat("o"), b.floats("lse"), b.mat("parts"), b.floats("lses")
	rows, _ := b.shape("o")
	return func() { simd.AttentionMerge(pool, o, lse, parts, lses, rows, heads, dim) }
}

func attentionDelta(b *binder) func() {
	pool, heads, dim := b.device.pool, b.int("heads"), b.int("head_dim")
	delta, do, o := b.floats("delta"), b.mat("do"), b.mat("o")
	rows, _ := b.shape("do")
	return func() { simd.AttentionDelta(pool, delta, do, o, rows, heads, dim) }
}
