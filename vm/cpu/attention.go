package cpu

import "sppo/vm/cpu/simd"

func (b *binder) attentionShape() simd.Attention {
	rows, _ := b.shape("q")
	batch := max(b.int("batch"), 1)
	return simd.Attention{
		Tokens: rows / batch, Prefix: b.int("prefix"), Batch: batch,
		Heads: b.int("heads"), KVHeads: b.int("kv_heads"), HeadDim: b.int("head_dim"),
	}
}

func attention(b *binder) func() {
	shape, pool := b.attentionShape(), b.device.pool
	o, lse, q, k, v := b.mat("o"), b.floats("lse"), b.mat("q"), b.mat("k"), b.mat("v")
	return func() { shape.Forward(pool, o, lse, q, k, v) }
}

func attentionGrad(b *binder) func() {
	shape, pool, accumulate := b.attentionShape(), b.device.pool, b.bool("accumulate")
	dq, dk, dv := b.mat("dq"), b.mat("dk"), b.mat("dv")
	do, q, k, v, o, lse := b.mat("do"), b.mat("q"), b.mat("k"), b.mat("v"), b.mat("o"), b.floats("lse")
	return func() { shape.Backward(pool, dq, dk, dv, accumulate, do, q, k, v, o, lse) }
}
