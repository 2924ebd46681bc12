package cpu

import (
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

var attentionKernels = kernelTable{
	ir.Attention:         attention,
	ir.AttentionGrad:     attentionGrad,
	ir.AttentionMerge:    attentionMerge,
	ir.AttentionDelta:    attentionDelta,
	ir.AttentionSink:     attentionSink,
	ir.AttentionSinkGrad: attentionSinkGrad,
	ir.ConcatHeads:       concatHeads,
	ir.ConcatHeadsGrad:   concatHeadsGrad,
}

// attentionPart is an instruction's work on some of its queries; row is their first row.
type attentionPart struct {
	simd.Attention
	row int
}

func (b *binder) attentionParts() (parts []attentionPart) {
	batch, positions := max(b.int("batch"), 1), b.ints("positions")
	for _, p := range b.in.AttentionParts(b.consts) {
		var own []int32
		if positions != nil {
			own = positions[p.Place:][:int(p.Queries)*batch]
		}
		parts = append(parts, attentionPart{simd.Attention{
			Positions: own, Softcap: float32(b.float("softcap")),
			Tokens: int(p.Queries), Keys: int(p.Keys), Prefix: int(p.Prefix), Window: int(p.Window), Batch: batch,
			Heads: b.int("heads"), KVHeads: b.int("kv_heads"), HeadDim: b.int("head_dim"), ValueDim: int(b.in.Work().ValueDim),
		}, int(p.Query) * batch})
	}
	return parts
}

// lseRows takes a statistic with one value per row and head, such as lse, and returns its values from the part's
// first row on.
func (p *attentionPart) lseRows(lse []float32) []float32 { return lse[p.row*p.Heads:] }

func attention(b *binder) func() {
	parts, pool, accumulate := b.attentionParts(), b.device.pool, b.bool("accumulate")
	o, lse, q, k, v := b.mat("o"), b.floats("lse"), b.mat("q"), b.mat("k"), b.mat("v")
	return func() {
		for i := range parts {
			p := &parts[i]
			p.Forward(pool, o.From(p.row), p.lseRows(lse), accumulate, q.From(p.row), k, v)
		}
	}
}

func attentionGrad(b *binder) func() {
	parts, pool := b.attentionParts(), b.device.pool
	g := simd.AttentionGrads{
		DQ: b.mat("dq"), DK: b.mat("dk"), DV: b.mat("dv"), AddQ: b.bool("accumulate_q"), AddKV: b.bool("accumulate"),
		DOut: b.mat("do"), Q: b.mat("q"), K: b.mat("k"), V: b.mat("v"), LSE: b.floats("lse"),
	}
	if b.has("delta") {
		g.Delta = b.floats("delta")
	} else {
		g.O = b.mat("o")
	}
	return func() {
		for i := range parts {
			parts[i].backward(pool, g, i > 0)
		}
	}
}

// backward computes the gradients of a part. Unless the instruction accumulates, the first part overwrites the
// gradients of keys and values, and clears the gradients of keys that no query sees. Later parts add to them.
func (p *attentionPart) backward(pool *simd.Pool, g simd.AttentionGrads, later bool) {
	seen := p.Keys * p.Batch * p.KVHeads
	if !later && !g.AddKV {
		clear(g.DK.F32[seen*p.HeadDim:])
		clear(g.DV.F32[seen*p.ValueDim:])
	}
	g.AddKV = g.AddKV || later
	g.DQ, g.DOut, g.Q, g.LSE = g.DQ.From(p.row), g.DOut.From(p.row), g.Q.From(p.row), p.lseRows(g.LSE)
	if g.Delta != nil {
		g.Delta = p.lseRows(g.Delta)
	} else {
		g.O = g.O.From(p.row)
	}
	p.Backward(pool, g)
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

func attentionSink(b *binder) func() {
	pool, heads, dim := b.device.pool, b.int("heads"), b.int("head_dim")
	o, lse, sink := b.mat("o"), b.floats("lse"), b.vector("sink")
	rows, _ := b.shape("o")
	return func() { simd.AttentionSink(pool, o, lse, sink.values(), rows, heads, dim) }
}

func attentionSinkGrad(b *binder) func() {
	pool, heads, dim, accumulate := b.device.pool, b.int("heads"), b.int("head_dim"), b.bool("accumulate")
	dsink, do, o, lse, sink := b.floats("dsink"), b.mat("do"), b.mat("o"), b.floats("lse"), b.vector("sink")
	rows, _ := b.shape("do")
	return func() { simd.AttentionSinkGrad(pool, dsink, accumulate, do, o, lse, sink.values(), rows, heads, dim) }
}

func concatHeads(b *binder) func() {
	pool, heads, dim := b.device.pool, b.int("heads"), b.int("head_dim")
	y, shared, x := b.mat("y"), b.mat("shared"), b.mat("x")
	rows, _ := b.shape("y")
	return func() { simd.ConcatHeads(pool, y, shared, x, rows, heads, dim) }
}

func concatHeadsGrad(b *binder) func() {
	pool, heads, dim := b.device.pool, b.int("heads"), b.int("head_dim")
	dshared, dx, dy := b.mat("dshared"), b.mat("dx"), b.mat("dy")
	rows, _ := b.shape("dy")
	return func() { simd.ConcatHeadsGrad(pool, dshared, dx, dy, rows, heads, dim) }
}
