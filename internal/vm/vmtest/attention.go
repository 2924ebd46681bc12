package vmtest

import (
	"fmt"
	"math"
	"slices"

	"sppo.dev/internal/vm/vmtest/naive"
	"sppo.dev/ir"
)

// attentionShapes covers a single token, a prefix, several sequences, grouped heads, more tokens than a tile
// holds, blocks of keys that all queries see or that only later queries see in full, and heads wide enough for
// tensor cores. Windows hold one key, are shorter than a block, begin at a block's boundary, lie before or
// across the first query, or are longer than the sequence. Soft caps are above all scores, within their range,
// or below most of them.
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
	{Queries: 70, Prefix: 61, Batch: 1, Heads: 2, KVHeads: 1, HeadDim: 64},
	{Queries: 4, Prefix: 3, Batch: 2, Heads: 2, KVHeads: 1, HeadDim: 5, Window: 1},
	{Queries: 5, Prefix: 9, Batch: 1, Heads: 2, KVHeads: 2, HeadDim: 4, Window: 3},
	{Queries: 4, Prefix: 6, Keys: 8, Batch: 1, Heads: 1, KVHeads: 1, HeadDim: 4, Window: 3},
	{Queries: 3, Prefix: 2, Batch: 1, Heads: 2, KVHeads: 1, HeadDim: 3, Window: 50},
	{Queries: 130, Prefix: 141, Batch: 1, Heads: 2, KVHeads: 1, HeadDim: 16, Window: 40},
	{Queries: 70, Prefix: 122, Batch: 1, Heads: 2, KVHeads: 1, HeadDim: 64, Window: 64},
	{Queries: 140, Prefix: 0, Batch: 1, Heads: 2, KVHeads: 1, HeadDim: 64, Window: 17},
	{Queries: 4, Prefix: 3, Batch: 2, Heads: 2, KVHeads: 1, HeadDim: 5, Softcap: 1.5},
	{Queries: 5, Prefix: 9, Batch: 1, Heads: 2, KVHeads: 2, HeadDim: 4, Window: 3, Softcap: 0.3},
	{Queries: 130, Prefix: 141, Batch: 1, Heads: 2, KVHeads: 1, HeadDim: 16, Window: 40, Softcap: 50},
	{Queries: 70, Prefix: 122, Batch: 1, Heads: 2, KVHeads: 1, HeadDim: 64, Window: 64, Softcap: 2},
	{Queries: 140, Prefix: 60, Batch: 1, Heads: 2, KVHeads: 1, HeadDim: 64, Softcap: 0.7},
	{Queries: 4, Prefix: 3, Batch: 2, Heads: 2, KVHeads: 2, HeadDim: 6, ValueDim: 4},
	{Queries: 5, Prefix: 9, Batch: 1, Heads: 4, KVHeads: 2, HeadDim: 3, ValueDim: 5, Window: 3, Softcap: 1.5},
	{Queries: 70, Prefix: 61, Batch: 1, Heads: 2, KVHeads: 2, HeadDim: 24, ValueDim: 16},
	{Queries: 70, Prefix: 61, Batch: 1, Heads: 2, KVHeads: 2, HeadDim: 192, ValueDim: 128},
}

func attentionAttrs(a naive.AttentionShape) attrs {
	return attrs{"heads": float64(a.Heads), "kv_heads": float64(a.KVHeads), "head_dim": float64(a.HeadDim),
		"batch": float64(a.Batch), "prefix": float64(a.Prefix), "window": float64(a.Window), "softcap": a.Softcap}
}

func (s *suite) attentionOperands(a naive.AttentionShape) (q, k, v *value) {
	keys := a.Seen(a.Queries-1) * a.Batch
	return s.normal(a.Queries*a.Batch, a.Heads*a.HeadDim), s.normal(keys, a.KVHeads*a.HeadDim), s.normal(keys, a.KVHeads*a.Values())
}

// results returns the shape of o.
func results(a naive.AttentionShape) []int { return []int{a.Queries * a.Batch, a.Heads * a.Values()} }

// eachShape visits the shapes. It visits shapes that leave out no key (Keys is 0) a second time, with several
// documents in a sequence.
func (s *suite) eachShape(visit func(s *suite, a naive.AttentionShape)) {
	for _, a := range attentionShapes {
		if s.short && a.Queries > 2*tile {
			continue
		}
		s.sub(fmt.Sprintf("%+v", a), func(s *suite) { visit(s, a) })
		if a.Keys == 0 {
			s.sub(fmt.Sprintf("documents %+v", a), func(s *suite) {
				a.Positions = s.positions(a)
				visit(s, a)
			})
		}
	}
}

// positions returns the position of each query in its document, for documents of random lengths. The first
// document may begin before the first query.
func (s *suite) positions(a naive.AttentionShape) []int32 {
	out := make([]int32, a.Queries*a.Batch)
	for b := range a.Batch {
		at, length := s.rng.IntN(a.Prefix+1), 1+s.rng.IntN(2*a.Queries)
		for t := range a.Queries {
			if s.rng.IntN(length) == 0 && t > 0 {
				at = 0
			}
			out[t*a.Batch+b] = int32(at)
			at++
		}
	}
	return out
}

// withPositions adds a shape's positions, if any, to operands.
func withPositions(in args, a naive.AttentionShape) args {
	if a.Positions != nil {
		v := nothing(ir.I32, []int{len(a.Positions)})
		for i, p := range a.Positions {
			v.data[i] = float64(p)
		}
		in["positions"] = v
	}
	return in
}

func caseAttention(s *suite) {
	s.eachShape(func(s *suite, a naive.AttentionShape) {
		q, k, v := s.attentionOperands(a)
		out := s.run(call{op: ir.Attention, attrs: attentionAttrs(a), args: withPositions(args{
			"o": s.out(results(a)...), "lse": s.outF32(a.Queries*a.Batch, a.Heads), "q": q, "k": k, "v": v}, a)})
		s.checkAttention("", out["o"], out["lse"], s.dtype, q, k, v, a)
	})
	for i := range 6 {
		s.sub(fmt.Sprint("in blocks ", i), (*suite).attentionInBlocks)
	}
	for _, r := range s.rings() {
		s.sub(fmt.Sprintf("in a ring %+v", r), func(s *suite) { s.attentionInRing(r) })
		for _, window := range r.windows() {
			s.sub(fmt.Sprintf("of chunks %+v, window %d", r, window), func(s *suite) { s.attentionOfChunks(r, window) })
		}
	}
	s.sub("window of all", (*suite).attentionWindowOfAll)
}

func caseAttentionGrad(s *suite) {
	turn := 0
	s.eachShape(func(s *suite, a naive.AttentionShape) {
		if turn++; s.short {
			s.attentionGrad(a, turn%2 == 0)
			return
		}
		s.onOff(func(s *suite, accumulate bool) { s.attentionGrad(a, accumulate) })
	})
	for i := range 6 {
		s.sub(fmt.Sprint("in blocks ", i), (*suite).attentionGradInBlocks)
	}
	for _, r := range s.rings() {
		s.sub(fmt.Sprintf("in a ring %+v", r), func(s *suite) { s.attentionGradInRing(r) })
		for _, window := range r.windows() {
			s.sub(fmt.Sprintf("of chunks %+v, window %d", r, window), func(s *suite) { s.attentionGradOfChunks(r, window) })
		}
	}
	s.sub("window of all", (*suite).attentionGradWindowOfAll)
}

func (s *suite) attentionGrad(a naive.AttentionShape, accumulate bool) {
	q, k, v := s.attentionOperands(a)
	do := s.normal(results(a)...)
	o, lse := s.attentionResults(q, k, v, a)
	dq, dk, dv := s.sum(accumulate, q.shape...), s.sum(accumulate, k.shape...), s.sum(accumulate, v.shape...)
	if !accumulate {
		dq = s.out(q.shape...)
	}
	at := attentionAttrs(a)
	at["accumulate"], at["accumulate_q"] = truth(accumulate), truth(accumulate)
	out := s.run(call{op: ir.AttentionGrad, attrs: at, args: withPositions(args{"dq": dq, "dk": dk, "dv": dv,
		"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}, a)})
	if accumulate {
		out["dq"], out["dk"], out["dv"] = minus(out["dq"], dq.data), minus(out["dk"], dk.data), minus(out["dv"], dv.data)
	}
	s.checkAttentionGrad(out["dq"], out["dk"], out["dv"], dq.dtype, q, k, v, o, do, a)
	if a.Queries < 10 && s.dtype == ir.F32 { // larger shapes take too long to differentiate numerically; in bf16, o is rounded
		forward := func(q, k, v []float64) []float64 { o, _ := naive.Attention(q, k, v, a); return o }
		s.equal("dq", out["dq"], derivative(q.data, do.data, func(q []float64) []float64 { return forward(q, k.data, v.data) }), ir.F32)
		s.equal("dk", out["dk"], derivative(k.data, do.data, func(k []float64) []float64 { return forward(q.data, k, v.data) }), ir.F32)
		s.equal("dv", out["dv"], derivative(v.data, do.data, func(v []float64) []float64 { return forward(q.data, k.data, v) }), ir.F32)
	}
}

// attentionResults returns o and lse as the forward pass stores them.
func (s *suite) attentionResults(q, k, v *value, a naive.AttentionShape) (o, lse *value) {
	o, lse = s.out(results(a)...), s.outF32(a.Queries*a.Batch, a.Heads)
	o.data, lse.data = naiveAttention(q.data, k.data, v.data, a)
	for i := range o.data {
		o.data[i] = stored(o.data[i], s.dtype)
	}
	return o, lse
}

// tensorDim is the smallest head dimension for which devices may use tensor cores. Tensor cores read the
// probabilities, and in the backward pass also the gradients of scores, as bf16.
const tensorDim = 64

// rounded returns the tolerance for sums in which a device may round a factor of every term to the 8
// significant bits of bf16: 2^-8 of each term. For other sums it is 0.
func (s *suite) rounded(a naive.AttentionShape, terms []float64) []float64 {
	slack := make([]float64, len(terms))
	if s.dtype == ir.BF16 && a.HeadDim >= tensorDim {
		for i := range terms {
			slack[i] = terms[i] / 256
		}
	}
	return slack
}

// checkAttention compares o and lse with naive attention that is not divided into blocks.
func (s *suite) checkAttention(how string, o, lse []float64, t ir.DType, q, k, v *value, a naive.AttentionShape) {
	s.Helper()
	wantO, wantLSE := naiveAttention(q.data, k.data, v.data, a)
	s.within("o"+how, o, wantO, t, s.rounded(a, naiveAttentionTerms(q.data, k.data, v.data, wantLSE, a)))
	s.equal("lse"+how, lse, wantLSE, ir.F32)
}

// checkAttentionGrad compares the gradients with those of naive attention. Both are computed from o, which may
// be rounded. The type of dq is t; dk and dv are f32.
func (s *suite) checkAttentionGrad(dq, dk, dv []float64, t ir.DType, q, k, v, o, do *value, a naive.AttentionShape) {
	s.Helper()
	wantQ, wantK, wantV := naiveAttentionGrad(q.data, k.data, v.data, o.data, do.data, a)
	_, lse := naiveAttention(q.data, k.data, v.data, a)
	termsQ, termsK, termsV := naiveAttentionGradTerms(q.data, k.data, v.data, do.data, lse, innerProducts(do.data, o.data, a.Values()), a)
	s.within("dq", dq, wantQ, t, s.rounded(a, termsQ))
	s.within("dk", dk, wantK, ir.F32, s.rounded(a, termsK))
	s.within("dv", dv, wantV, ir.F32, s.rounded(a, termsV))
}

// blocks is a case of attention over several blocks of keys, with a random shape and random cuts.
type blocks struct {
	naive.AttentionShape
	q, k, v *value
	cuts    []int // ends of blocks
}

func (s *suite) blocks() blocks {
	kv := 1 + s.rng.IntN(3)
	b := blocks{AttentionShape: naive.AttentionShape{Queries: 1 + s.rng.IntN(50), Prefix: s.rng.IntN(130), Batch: 1 + s.rng.IntN(2),
		KVHeads: kv, Heads: kv * (1 + s.rng.IntN(3)), HeadDim: 1 + s.rng.IntN(20)}}
	if s.rng.IntN(3) == 0 {
		b.HeadDim = tensorDim
	}
	if s.rng.IntN(3) == 0 {
		b.ValueDim = 1 + s.rng.IntN(30)
	}
	if s.rng.IntN(2) == 0 {
		b.Window = 1 + s.rng.IntN(b.Prefix+b.Queries)
	}
	if s.rng.IntN(3) == 0 {
		b.Softcap = 1.5
	}
	if s.rng.IntN(2) == 0 {
		b.Positions = s.positions(b.AttentionShape)
	}
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

// goesOn reports whether the results of the block that starts at key first are added to existing results. With
// a window or documents, so are the results of the first block, because some queries may see none of its keys;
// the existing results then have weight 0.
func (b *blocks) goesOn(first int) bool { return first > 0 || b.hides() }

// hides reports whether some queries may see none of a block's keys.
func (b *blocks) hides() bool { return b.Window > 0 || b.Positions != nil }

// before returns the results to which the first block adds.
func (b *blocks) before(s *suite) (o, lse *value) {
	o, lse = s.sum(true, results(b.AttentionShape)...), s.sum(true, b.Queries*b.Batch, b.Heads)
	if b.hides() {
		for i := range lse.data { // minus infinity is what a block writes for a query that sees none of its keys
			lse.data[i] = []float64{math.Inf(-1), -1e30}[i%2]
		}
	}
	return o, lse
}

// each visits the blocks in which some query sees a key, with the block's shape, its first key, and the first
// query that sees one of its keys.
func (b *blocks) each(visit func(a naive.AttentionShape, first, query int)) {
	first := 0
	for _, end := range b.cuts {
		a := b.AttentionShape
		query := max(0, first-b.Prefix)
		a.Queries, a.Prefix, a.Keys = b.Queries-query, b.Prefix+query-first, end-first
		if b.Positions != nil {
			a.Positions = b.Positions[query*b.Batch:]
		}
		if b.Window == 0 || a.Prefix-b.Window+1 < a.Keys {
			visit(a, first, query)
		}
		first = end
	}
}

// rows returns an operand's rows for count tokens, starting at the given token; put writes such rows back.
func (b *blocks) rows(v *value, token, count int) *value {
	cols := v.shape[1]
	return &value{dtype: v.dtype, shape: []int{count * b.Batch, cols}, data: slices.Clone(v.data[token*b.Batch*cols:][:count*b.Batch*cols])}
}

func (b *blocks) put(v *value, token int, data []float64) {
	copy(v.data[token*b.Batch*v.shape[1]:], data)
}

// attentionInBlocks computes attention over the blocks in two ways: each instruction adds to the results of the
// previous one, or the blocks' separate results are merged. Both must give the same results as attention that
// is not divided into blocks.
func (s *suite) attentionInBlocks() {
	b := s.blocks()
	o, lse := b.before(s)
	parts, lses := &value{dtype: ir.F32}, &value{dtype: ir.F32}
	b.each(func(a naive.AttentionShape, first, query int) {
		at := attentionAttrs(a)
		at["accumulate"] = truth(b.goesOn(first))
		in := withPositions(args{"q": b.rows(b.q, query, a.Queries), "k": b.rows(b.k, first, a.Keys), "v": b.rows(b.v, first, a.Keys)}, a)
		in["o"], in["lse"] = b.rows(o, query, a.Queries), b.rows(lse, query, a.Queries)
		out := s.run(call{op: ir.Attention, attrs: at, args: in})
		b.put(o, query, out["o"])
		b.put(lse, query, out["lse"])
		if query == 0 && b.Window == 0 {
			at["accumulate"] = 0
			out = s.run(call{op: ir.Attention, attrs: at, args: in})
			parts.data, lses.data = append(parts.data, out["o"]...), append(lses.data, out["lse"]...)
		}
	})
	s.checkAttention(" in turn", o.data, lse.data, ir.F32, b.q, b.k, b.v, b.AttentionShape)
	n := b.Queries * b.Batch
	if b.cuts[len(b.cuts)-1] != b.Prefix+b.Queries || len(parts.data) != len(b.cuts)*n*b.Heads*b.Values() {
		return // not every block was also computed separately, for all queries
	}
	parts.shape, lses.shape = []int{len(b.cuts), n, b.Heads * b.Values()}, []int{len(b.cuts), n, b.Heads}
	out := s.run(call{op: ir.AttentionMerge, attrs: attrs{"heads": float64(b.Heads), "head_dim": float64(b.Values())},
		args: args{"o": s.out(results(b.AttentionShape)...), "lse": s.outF32(n, b.Heads), "parts": parts, "lses": lses}})
	s.checkAttention(" joined", out["o"], out["lse"], s.dtype, b.q, b.k, b.v, b.AttentionShape)
}

// attentionGradInBlocks computes the gradients block by block, adding to dq, and passes delta instead of o.
func (s *suite) attentionGradInBlocks() {
	b := s.blocks()
	do := s.normal(results(b.AttentionShape)...)
	o, lse := s.attentionResults(b.q, b.k, b.v, b.AttentionShape)
	delta := &value{dtype: ir.F32, shape: lse.shape, data: innerProducts(do.data, o.data, b.Values())}
	dq, dk, dv := s.sum(true, b.q.shape...), s.sum(true, b.k.shape...), s.sum(true, b.v.shape...)
	if b.hides() {
		dq, dk, dv = zeros(b.q.shape...), zeros(b.k.shape...), zeros(b.v.shape...)
	}
	b.each(func(a naive.AttentionShape, first, query int) {
		at := attentionAttrs(a)
		at["accumulate_q"] = truth(b.goesOn(first))
		out := s.run(call{op: ir.AttentionGrad, attrs: at, args: withPositions(args{
			"dq": b.rows(dq, query, a.Queries), "dk": b.rows(dk, first, a.Keys), "dv": b.rows(dv, first, a.Keys),
			"do": b.rows(do, query, a.Queries), "q": b.rows(b.q, query, a.Queries), "k": b.rows(b.k, first, a.Keys), "v": b.rows(b.v, first, a.Keys),
			"lse": b.rows(lse, query, a.Queries), "delta": b.rows(delta, query, a.Queries)}, a)})
		b.put(dq, query, out["dq"])
		b.put(dk, first, out["dk"])
		b.put(dv, first, out["dv"])
	})
	s.checkAttentionGrad(dq.data, dk.data, dv.data, ir.F32, b.q, b.k, b.v, o, do, b.AttentionShape)
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

// caseAttentionMerge merges the results of blocks with very different weights, into results of both types.
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

// caseAttentionSink adds sinks that are much smaller and much larger than the sums of the softmax.
func caseAttentionSink(s *suite) {
	const rows, heads, dim = 37, 3, 9
	sink := s.normal(heads)
	lse := s.f32(rows, heads)
	for i := range lse.data {
		lse.data[i] = stored(20*lse.data[i], ir.F32)
	}
	lse.data[0] = math.Inf(-1) // a query that sees no key
	for _, t := range []ir.DType{ir.F32, ir.BF16} {
		s.sub("of "+t.String(), func(s *suite) {
			o := s.normal(rows, heads*dim)
			if t == ir.F32 {
				o = s.f32(rows, heads*dim)
			}
			out := s.run(call{op: ir.AttentionSink, attrs: attrs{"heads": heads, "head_dim": dim}, args: args{"o": o, "lse": lse, "sink": sink}})
			want, wantLSE := naive.AttentionSink(o.data, lse.data, sink.data, dim)
			s.equal("o", out["o"], want, o.dtype)
			s.equal("lse", out["lse"], wantLSE, ir.F32)
		})
	}
}

// caseAttentionSinkGrad compares the gradient with the numerical derivative of attention with sinks.
func caseAttentionSinkGrad(s *suite) {
	for _, a := range []naive.AttentionShape{
		{Queries: 21, Prefix: 5, Batch: 2, Heads: 4, KVHeads: 2, HeadDim: 6}, {Queries: 150, Batch: 1, Heads: 3, KVHeads: 3, HeadDim: 10, Window: 9},
	} {
		s.onOff(func(s *suite, accumulate bool) {
			q, k, v := s.attentionOperands(a)
			do, sink, dsink := s.normal(q.shape...), s.normal(a.Heads), s.sum(accumulate, a.Heads)
			plain, plainLSE := naive.Attention(q.data, k.data, v.data, a)
			sunk := func(sinks []float64) []float64 {
				out, _ := naive.AttentionSink(plain, plainLSE, sinks, a.HeadDim)
				return out
			}
			o, lse := &value{dtype: s.dtype, shape: q.shape}, &value{dtype: ir.F32, shape: []int{q.shape[0], a.Heads}}
			o.data, lse.data = naive.AttentionSink(plain, plainLSE, sink.data, a.HeadDim)
			for i := range o.data {
				o.data[i] = stored(o.data[i], s.dtype)
			}
			want := derivative(sink.data, do.data, sunk)
			out := s.run(call{op: ir.AttentionSinkGrad, attrs: attrs{"heads": float64(a.Heads), "head_dim": float64(a.HeadDim), "accumulate": truth(accumulate)},
				args: args{"dsink": dsink, "do": do, "o": o, "lse": lse, "sink": sink}})
			slack, rounding := make([]float64, a.Heads), 0.0
			if s.dtype == ir.BF16 {
				rounding = 1.0 / 256 // of o
			}
			for i := range o.data {
				h := i / a.HeadDim % a.Heads
				slack[h] += rounding * math.Exp(sink.data[h]-lse.data[i/a.HeadDim]) * math.Abs(do.data[i]*o.data[i])
			}
			s.within("dsink", out["dsink"], plus(accumulate, dsink, want), ir.F32, slack)
		})
	}
}

// attentionWindowOfAll checks that a window that covers all keys gives the same bits as no window.
func (s *suite) attentionWindowOfAll() {
	for _, a := range []naive.AttentionShape{
		{Queries: 37, Prefix: 120, Batch: 2, Heads: 2, KVHeads: 1, HeadDim: 12}, {Queries: 70, Prefix: 61, Batch: 1, Heads: 2, KVHeads: 1, HeadDim: tensorDim},
	} {
		q, k, v := s.attentionOperands(a)
		in := args{"o": s.out(q.shape...), "lse": s.outF32(q.shape[0], a.Heads), "q": q, "k": k, "v": v}
		s.sameBits(call{op: ir.Attention, attrs: attentionAttrs(a), args: in}, a)
	}
}

func (s *suite) attentionGradWindowOfAll() {
	a := naive.AttentionShape{Queries: 37, Prefix: 120, Batch: 2, Heads: 2, KVHeads: 1, HeadDim: 12}
	q, k, v := s.attentionOperands(a)
	do := s.normal(q.shape...)
	o, lse := s.attentionResults(q, k, v, a)
	s.sameBits(call{op: ir.AttentionGrad, attrs: attentionAttrs(a), args: args{"dq": s.out(q.shape...), "dk": s.sum(false, k.shape...),
		"dv": s.sum(false, v.shape...), "do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}}, a)
}

// sameBits checks that windows that cover all keys do not change any bit of a call's results.
func (s *suite) sameBits(c call, a naive.AttentionShape) {
	s.Helper()
	want := s.run(c)
	for _, window := range []int{a.Prefix + a.Queries, 1 << 40} {
		c.attrs["window"] = float64(window)
		for name, got := range s.run(c) {
			if !slices.Equal(got, want[name]) {
				s.Errorf("a window of %d tokens, of which there are %d, changes %s", window, a.Prefix+a.Queries, name)
			}
		}
	}
}

// eachConcat visits heads of several shapes; some rows are not a multiple of eight elements.
func (s *suite) eachConcat(visit func(s *suite, rows, heads, first, rest int, at attrs)) {
	for _, x := range [][4]int{{1, 1, 1, 1}, {41, 3, 4, 7}, {70, 2, 64, 128}, {9, 5, 2, 1}} {
		s.sub(fmt.Sprint(x), func(s *suite) {
			visit(s, x[0], x[1], x[2], x[3], attrs{"heads": float64(x[1]), "head_dim": float64(x[2] + x[3])})
		})
	}
}

func caseConcatHeads(s *suite) {
	s.eachConcat(func(s *suite, rows, heads, first, rest int, at attrs) {
		shared, x := s.normal(rows, first), s.normal(rows, heads*rest)
		out := s.run(call{op: ir.ConcatHeads, attrs: at, args: args{"y": s.out(rows, heads*(first+rest)), "shared": shared, "x": x}})
		s.equal("y", out["y"], naive.ConcatHeads(shared.data, x.data, heads, first, rest), s.dtype)
	})
}

func caseConcatHeadsGrad(s *suite) {
	s.eachConcat(func(s *suite, rows, heads, first, rest int, at attrs) {
		for _, t := range []ir.DType{ir.F32, ir.BF16} {
			dy := s.typed(t, rows, heads*(first+rest))
			out := s.run(call{op: ir.ConcatHeadsGrad, attrs: at, args: args{"dshared": s.out(rows, first), "dx": s.out(rows, heads*rest), "dy": dy}})
			dshared, dx := naive.ConcatHeadsGrad(dy.data, heads, first, rest)
			s.equal("dshared", out["dshared"], dshared, s.dtype)
			s.equal("dx", out["dx"], dx, s.dtype)
		}
	})
}
