package vmtest

import (
	"fmt"
	"math"
	"slices"

	"sppo/ir"
	"sppo/vm/vmtest/naive"
)

// attentionShapes hold a lone token, a prefix, several sequences, grouped heads, more tokens than a tile, and blocks of
// keys that all queries see, or of which the first see a part.
var attentionShapes = []naive.AttentionShape{
	{Queries: 1, Batch: 1, Heads: 1, KVHeads: 1, HeadDim: 2},
	{Queries: 4, Prefix: 3, Batch: 1, Heads: 2, KVHeads: 2, HeadDim: 5},
	{Queries: 3, Prefix: 2, Batch: 2, Heads: 4, KVHeads: 2, HeadDim: 3},
	{Queries: 3, Prefix: 0, Batch: 3, Heads: 3, KVHeads: 1, HeadDim: 4},
	{Queries: 4, Prefix: 9, Keys: 5, Batch: 2, Heads: 2, KVHeads: 1, HeadDim: 4},
	{Queries: 5, Prefix: 1, Keys: 3, Batch: 1, Heads: 2, KVHeads: 2, HeadDim: 3},
	{Queries: 4, Prefix: 0, Keys: 1, Batch: 1, Heads: 1, KVHeads: 1, HeadDim: 4},
	{Queries: 130, Prefix: 141, Batch: 1, Heads: 2, KVHeads: 1, HeadDim: 16},
	{Queries: 130, Prefix: 20, Keys: 120, Batch: 1, Heads: 2, KVHeads: 1, HeadDim: 16},
}

func attentionAttrs(a naive.AttentionShape) attrs {
	return attrs{"heads": float64(a.Heads), "kv_heads": float64(a.KVHeads), "head_dim": float64(a.HeadDim),
		"batch": float64(a.Batch), "prefix": float64(a.Prefix)}
}

func (s *suite) attentionOperands(a naive.AttentionShape) (q, k, v *value) {
	keys := a.Seen(a.Queries-1) * a.Batch
	return s.normal(a.Queries*a.Batch, a.Heads*a.HeadDim), s.normal(keys, a.KVHeads*a.HeadDim), s.normal(keys, a.KVHeads*a.HeadDim)
}

func caseAttention(s *suite) {
	for _, a := range attentionShapes {
		s.sub(fmt.Sprintf("%+v", a), func(s *suite) {
			q, k, v := s.attentionOperands(a)
			out := s.run(call{op: ir.Attention, attrs: attentionAttrs(a), args: args{
				"o": s.out(q.shape...), "lse": s.outF32(a.Queries*a.Batch, a.Heads), "q": q, "k": k, "v": v}})
			o, lse := naive.Attention(q.data, k.data, v.data, a)
			s.equal("o", out["o"], o, s.dtype)
			s.equal("lse", out["lse"], lse, ir.F32)
		})
	}
	for i := range 6 {
		s.sub(fmt.Sprint("in blocks ", i), (*suite).attentionInBlocks)
	}
	for _, r := range rings {
		s.sub(fmt.Sprintf("in a ring %+v", r), func(s *suite) { s.attentionInRing(r) })
	}
}

func caseAttentionGrad(s *suite) {
	for _, a := range attentionShapes {
		s.sub(fmt.Sprintf("%+v", a), func(s *suite) {
			s.onOff(func(s *suite, accumulate bool) { s.attentionGrad(a, accumulate) })
		})
	}
	for i := range 6 {
		s.sub(fmt.Sprint("in blocks ", i), (*suite).attentionGradInBlocks)
	}
	for _, r := range rings {
		s.sub(fmt.Sprintf("in a ring %+v", r), func(s *suite) { s.attentionGradInRing(r) })
	}
}

func (s *suite) attentionGrad(a naive.AttentionShape, accumulate bool) {
	q, k, v := s.attentionOperands(a)
	do := s.normal(q.shape...)
	o, lse := s.attentionResults(q, k, v, a)
	dq, dk, dv := s.sum(accumulate, q.shape...), s.sum(accumulate, k.shape...), s.sum(accumulate, v.shape...)
	if !accumulate {
		dq = s.out(q.shape...)
	}
	at := attentionAttrs(a)
	at["accumulate"], at["accumulate_q"] = truth(accumulate), truth(accumulate)
	out := s.run(call{op: ir.AttentionGrad, attrs: at, args: args{"dq": dq, "dk": dk, "dv": dv,
		"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}})
	wantQ, wantK, wantV := naive.AttentionGrad(q.data, k.data, v.data, do.data, a)
	if a.Queries < 10 { // larger, the numerical derivative takes too long, and the formula has proved itself
		forward := func(q, k, v []float64) []float64 { o, _ := naive.Attention(q, k, v, a); return o }
		wantQ = derivative(q.data, do.data, func(q []float64) []float64 { return forward(q, k.data, v.data) })
		wantK = derivative(k.data, do.data, func(k []float64) []float64 { return forward(q.data, k, v.data) })
		wantV = derivative(v.data, do.data, func(v []float64) []float64 { return forward(q.data, k.data, v) })
	}
	s.closeGrad("dq", out["dq"], plus(accumulate, dq, wantQ), s.dtype)
	s.closeGrad("dk", out["dk"], plus(accumulate, dk, wantK), s.dtype)
	s.closeGrad("dv", out["dv"], plus(accumulate, dv, wantV), s.dtype)
}

// attentionResults are o and lse as a forward pass would leave them.
func (s *suite) attentionResults(q, k, v *value, a naive.AttentionShape) (o, lse *value) {
	o, lse = s.out(q.shape...), s.outF32(a.Queries*a.Batch, a.Heads)
	o.data, lse.data = naive.Attention(q.data, k.data, v.data, a)
	for i := range o.data {
		o.data[i] = stored(o.data[i], s.dtype)
	}
	return o, lse
}

// closeGrad allows for the o that the backward reads, which bf16 has rounded: dP - dO.O loses digits.
func (s *suite) closeGrad(what string, got, want []float64, t ir.DType) {
	s.Helper()
	if t == ir.BF16 {
		largest := 1.0
		for _, w := range want {
			largest = math.Max(largest, math.Abs(w))
		}
		for i := range got {
			if !(math.Abs(got[i]-want[i]) <= largest/60) {
				s.Fatalf("%s[%d] = %g, want %g (seed %d)", what, i, got[i], want[i], seed)
			}
		}
		return
	}
	s.equal(what, got, want, t)
}

// blocks is attention over any number of blocks of keys: a case of its own shape, cut anywhere.
type blocks struct {
	naive.AttentionShape
	q, k, v *value
	cuts    []int // where blocks end
}

func (s *suite) blocks() blocks {
	kv := 1 + s.rng.IntN(3)
	b := blocks{AttentionShape: naive.AttentionShape{Queries: 1 + s.rng.IntN(50), Prefix: s.rng.IntN(130), Batch: 1 + s.rng.IntN(2),
		KVHeads: kv, Heads: kv * (1 + s.rng.IntN(3)), HeadDim: 1 + s.rng.IntN(20)}}
	b.q, b.k, b.v = s.attentionOperands(b.AttentionShape)
	keys := b.Prefix + b.Queries
	for range s.rng.IntN(5) {
		b.cuts = append(b.cuts, 1+s.rng.IntN(keys))
	}
	b.cuts = append(b.cuts, keys)
	slices.Sort(b.cuts)
	b.cuts = slices.Compact(b.cuts)
	return b
}

// each visits the blocks: the shape of the block with keys from first on, and the first query that sees one of them.
func (b *blocks) each(visit func(a naive.AttentionShape, first, query int)) {
	first := 0
	for _, end := range b.cuts {
		a := b.AttentionShape
		query := max(0, first-b.Prefix)
		a.Queries, a.Prefix, a.Keys = b.Queries-query, b.Prefix+query-first, end-first
		visit(a, first, query)
		first = end
	}
}

// rows are those of an operand from a token on, to count of them; put writes them back.
func (b *blocks) rows(v *value, token, count int) *value {
	cols := v.shape[1]
	return &value{dtype: v.dtype, shape: []int{count * b.Batch, cols}, data: slices.Clone(v.data[token*b.Batch*cols:][:count*b.Batch*cols])}
}

func (b *blocks) put(v *value, token int, data []float64) {
	copy(v.data[token*b.Batch*v.shape[1]:], data)
}

// attentionInBlocks goes through the blocks twice: one instruction goes on from the other, and what each gives of its own
// is joined. Of f32 both must give what the whole gives.
func (s *suite) attentionInBlocks() {
	b := s.blocks()
	o, lse := s.sum(true, b.q.shape...), s.sum(true, b.Queries*b.Batch, b.Heads)
	parts, lses := &value{dtype: ir.F32}, &value{dtype: ir.F32}
	b.each(func(a naive.AttentionShape, first, query int) {
		at := attentionAttrs(a)
		at["accumulate"] = truth(first > 0)
		in := args{"q": b.rows(b.q, query, a.Queries), "k": b.rows(b.k, first, a.Keys), "v": b.rows(b.v, first, a.Keys)}
		in["o"], in["lse"] = b.rows(o, query, a.Queries), b.rows(lse, query, a.Queries)
		out := s.run(call{op: ir.Attention, attrs: at, args: in})
		b.put(o, query, out["o"])
		b.put(lse, query, out["lse"])
		if query == 0 {
			at["accumulate"] = 0
			out = s.run(call{op: ir.Attention, attrs: at, args: in})
			parts.data, lses.data = append(parts.data, out["o"]...), append(lses.data, out["lse"]...)
		}
	})
	wantO, wantLSE := naive.Attention(b.q.data, b.k.data, b.v.data, b.AttentionShape)
	s.equal("o in turn", o.data, wantO, ir.F32)
	s.equal("lse in turn", lse.data, wantLSE, ir.F32)
	n := b.Queries * b.Batch
	if b.cuts[len(b.cuts)-1] != b.Prefix+b.Queries || len(parts.data) != len(b.cuts)*n*b.Heads*b.HeadDim {
		return // a block starts behind the first query
	}
	parts.shape, lses.shape = []int{len(b.cuts), n, b.Heads * b.HeadDim}, []int{len(b.cuts), n, b.Heads}
	out := s.run(call{op: ir.AttentionMerge, attrs: attrs{"heads": float64(b.Heads), "head_dim": float64(b.HeadDim)},
		args: args{"o": s.out(b.q.shape...), "lse": s.outF32(n, b.Heads), "parts": parts, "lses": lses}})
	s.equal("o joined", out["o"], wantO, s.dtype)
	s.equal("lse joined", out["lse"], wantLSE, ir.F32)
}

// attentionGradInBlocks adds to dq block by block, with delta in the place of o.
func (s *suite) attentionGradInBlocks() {
	b := s.blocks()
	do := s.normal(b.q.shape...)
	o, lse := s.attentionResults(b.q, b.k, b.v, b.AttentionShape)
	delta := &value{dtype: ir.F32, shape: lse.shape, data: innerProducts(do.data, o.data, b.HeadDim)}
	dq, dk, dv := s.sum(true, b.q.shape...), s.sum(true, b.k.shape...), s.sum(true, b.v.shape...)
	b.each(func(a naive.AttentionShape, first, query int) {
		at := attentionAttrs(a)
		at["accumulate_q"] = truth(first > 0)
		out := s.run(call{op: ir.AttentionGrad, attrs: at, args: args{
			"dq": b.rows(dq, query, a.Queries), "dk": b.rows(dk, first, a.Keys), "dv": b.rows(dv, first, a.Keys),
			"do": b.rows(do, query, a.Queries), "q": b.rows(b.q, query, a.Queries), "k": b.rows(b.k, first, a.Keys), "v": b.rows(b.v, first, a.Keys),
			"lse": b.rows(lse, query, a.Queries), "delta": b.rows(delta, query, a.Queries)}})
		b.put(dq, query, out["dq"])
		b.put(dk, first, out["dk"])
		b.put(dv, first, out["dv"])
	})
	wantQ, wantK, wantV := naive.AttentionGrad(b.q.data, b.k.data, b.v.data, do.data, b.AttentionShape)
	s.closeGrad("dq", dq.data, wantQ, s.dtype)
	s.closeGrad("dk", dk.data, wantK, s.dtype)
	s.closeGrad("dv", dv.data, wantV, s.dtype)
}

func innerProducts(x, y []float64, width int) (out []float64) {
	for at := 0; at < len(x); at += width {
		sum := 0.0
		for i := range width {
			sum += x[at+i] * y[at+i]
		}
		out = append(out, sum)
	}
	return out
}

// caseAttentionMerge joins blocks of very unlike weight, in the other type too.
func caseAttentionMerge(s *suite) {
	const p, rows, heads, dim = 3, 37, 2, 9
	parts, lses := s.normal(p, rows, heads*dim), s.f32(p, rows, heads)
	for i := range lses.data {
		lses.data[i] = stored(30*lses.data[i], ir.F32)
	}
	var o, lse []float64
	for at := range rows * heads {
		sum, largest := 0.0, math.Inf(-1)
		for b := range p {
			largest = math.Max(largest, lses.data[b*rows*heads+at])
		}
		for b := range p {
			sum += math.Exp(lses.data[b*rows*heads+at] - largest)
		}
		lse = append(lse, largest+math.Log(sum))
		for d := range dim {
			x := 0.0
			for b := range p {
				x += math.Exp(lses.data[b*rows*heads+at]-lse[at]) * parts.data[(b*rows*heads+at)*dim+d]
			}
			o = append(o, x)
		}
	}
	for _, t := range []ir.DType{ir.F32, ir.BF16} {
		s.sub("to "+t.String(), func(s *suite) {
			out := s.run(call{op: ir.AttentionMerge, attrs: attrs{"heads": heads, "head_dim": dim}, args: args{
				"o": nothing(t, []int{rows, heads * dim}), "lse": s.outF32(rows, heads), "parts": parts, "lses": lses}})
			s.equal("o", out["o"], o, t)
			s.equal("lse", out["lse"], lse, ir.F32)
		})
	}
}

func caseAttentionDelta(s *suite) {
	const rows, heads, dim = 41, 3, 10
	do, o := s.normal(rows, heads*dim), s.normal(rows, heads*dim)
	out := s.run(call{op: ir.AttentionDelta, attrs: attrs{"heads": heads, "head_dim": dim},
		args: args{"delta": s.outF32(rows, heads), "do": do, "o": o}})
	s.equal("delta", out["delta"], innerProducts(do.data, o.data, dim), ir.F32)
}
