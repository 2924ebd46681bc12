package vmtest

import (
	"slices"

	"sppo.dev/internal/vm/vmtest/naive"
	"sppo.dev/ir"
)

// ring describes attention among members, each of which holds two chunks in zigzag order and a part of the
// prefix.
type ring struct {
	members, chunk, prefix, batch, heads, kvHeads, headDim, valueDim int // prefix: number of prefix tokens that each member holds
	softcap                                                          float64
}

var rings = []ring{
	{members: 2, chunk: 1, batch: 1, heads: 1, kvHeads: 1, headDim: 2},
	{members: 3, chunk: 2, prefix: 3, batch: 2, heads: 4, kvHeads: 2, headDim: 5, valueDim: 3},
	{members: 2, chunk: 70, prefix: 33, batch: 1, heads: 2, kvHeads: 1, headDim: 64},
	{members: 4, chunk: 5, prefix: 2, batch: 1, heads: 3, kvHeads: 3, headDim: 16, softcap: 1.5},
}

// rings returns the rings that the suite tests.
func (s *suite) rings() []ring {
	if !s.short {
		return rings
	}
	return slices.DeleteFunc(slices.Clone(rings), func(r ring) bool { return r.chunk > tile })
}

func (r ring) whole() naive.AttentionShape {
	return naive.AttentionShape{Queries: 2 * r.members * r.chunk, Prefix: r.members * r.prefix, Batch: r.batch,
		Heads: r.heads, KVHeads: r.kvHeads, HeadDim: r.headDim, ValueDim: r.valueDim, Softcap: r.softcap}
}

// tokens returns the indices of a member's tokens in order. If the argument before is true, these are its part
// of the prefix and its two chunks; if not, only the chunks, counted from the end of the prefix.
func (r ring) tokens(member int, before bool) (out []int) {
	add := func(first, n int) {
		for i := range n {
			out = append(out, first+i)
		}
	}
	at := 0
	if before {
		at = r.members * r.prefix
		add(member*r.prefix, r.prefix)
	}
	add(at+member*r.chunk, r.chunk)
	add(at+(2*r.members-1-member)*r.chunk, r.chunk)
	return out
}

// take returns an operand's rows for some tokens; put adds to those rows.
func (r ring) take(v *value, tokens []int) *value {
	width := r.batch * v.shape[1]
	out := &value{dtype: v.dtype, shape: []int{len(tokens) * r.batch, v.shape[1]}}
	for _, t := range tokens {
		out.data = append(out.data, v.data[t*width:(t+1)*width]...)
	}
	return out
}

func (r ring) put(v *value, tokens []int, data []float64) {
	width := r.batch * v.shape[1]
	for i, t := range tokens {
		for j := range width {
			v.data[t*width+j] += data[i*width+j]
		}
	}
}

// turns visits every turn of every member, with the member whose keys it has in that turn (source) and the
// attributes of its instruction.
func (r ring) turns(visit func(member, source int, at attrs)) {
	for k := range r.members {
		for j := range r.members {
			source := (k - j + r.members) % r.members
			at := attentionAttrs(r.whole())
			at["prefix"] = float64(r.prefix)
			switch {
			case source < k:
				at["zigzag"] = ir.ZigzagBefore
			case source > k:
				at["zigzag"] = ir.ZigzagBehind
			}
			visit(k, source, at)
		}
	}
}

func zeros(shape ...int) *value {
	v := nothing(ir.F32, shape)
	clear(v.data)
	return v
}

// attentionInRing passes keys around the ring until every member has seen all of them.
func (s *suite) attentionInRing(r ring) {
	a := r.whole()
	q, k, v := s.attentionOperands(a)
	o, lse := zeros(results(a)...), zeros(q.shape[0], a.Heads)
	r.turns(func(member, source int, at attrs) {
		mine, keys := r.tokens(member, false), r.tokens(source, true)
		at["accumulate"] = truth(source != member)
		in := args{"o": r.take(o, mine), "lse": r.take(lse, mine), "q": r.take(q, mine), "k": r.take(k, keys), "v": r.take(v, keys)}
		before := [2][]float64{slices.Clone(in["o"].data), slices.Clone(in["lse"].data)}
		out := s.run(call{op: ir.Attention, attrs: at, args: in})
		r.put(o, mine, minus(out["o"], before[0]))
		r.put(lse, mine, minus(out["lse"], before[1]))
	})
	s.checkAttention("", o.data, lse.data, ir.F32, q, k, v, a)
}

// attentionGradInRing sums the gradients of keys over the turns, and accumulates those of queries from turn to
// turn. Every second member passes o instead of delta.
func (s *suite) attentionGradInRing(r ring) {
	a := r.whole()
	q, k, v := s.attentionOperands(a)
	do := s.normal(results(a)...)
	o, lse := s.attentionResults(q, k, v, a)
	delta := &value{dtype: ir.F32, shape: lse.shape, data: innerProducts(do.data, o.data, a.Values())}
	dq, dk, dv := zeros(q.shape...), zeros(k.shape...), zeros(v.shape...)
	r.turns(func(member, source int, at attrs) {
		mine, keys := r.tokens(member, false), r.tokens(source, true)
		at["accumulate_q"], at["accumulate"] = truth(source != member), truth((member+source)%3 == 0)
		rows := len(keys) * r.batch
		in := args{"dq": r.take(dq, mine), "dk": s.sum((member+source)%3 == 0, rows, k.shape[1]), "dv": s.sum((member+source)%3 == 0, rows, v.shape[1]),
			"do": r.take(do, mine), "q": r.take(q, mine), "k": r.take(k, keys), "v": r.take(v, keys), "lse": r.take(lse, mine)}
		if member%2 == 0 {
			in["delta"] = r.take(delta, mine)
		} else {
			in["o"] = r.take(o, mine)
		}
		before := slices.Clone(in["dq"].data)
		beforeK, beforeV := in["dk"].data, in["dv"].data
		out := s.run(call{op: ir.AttentionGrad, attrs: at, args: in})
		r.put(dq, mine, minus(out["dq"], before))
		if at["accumulate"] != 0 {
			out["dk"], out["dv"] = minus(out["dk"], beforeK), minus(out["dv"], beforeV)
		}
		r.put(dk, keys, out["dk"])
		r.put(dv, keys, out["dv"])
	})
	s.checkAttentionGrad(dq.data, dk.data, dv.data, ir.F32, q, k, v, o, do, a)
}

func minus(a, b []float64) []float64 {
	out := make([]float64, len(a))
	for i := range a {
		out[i] = a[i] - b[i]
	}
	return out
}

// windows returns the windows to test: no window (0), only the query's own key, within a chunk, as long as a
// chunk, into the chunk before, and as long as all chunks and one member's prefix. For chunks longer than a
// tile it returns only windows that change which tiles a kernel skips, because emulated kernels are slow on
// such chunks.
func (r ring) windows() []int {
	if r.chunk > tile {
		return []int{0, 1, r.chunk - 1, r.chunk + 1}
	}
	return []int{0, 1, max(1, r.chunk-1), r.chunk, r.chunk + 1, 2*r.members*r.chunk + r.prefix}
}

// tile is the maximum number of keys that kernels process at a time, for heads as wide as those of the rings.
const tile = 64

// ofMember returns the attributes of attention between a member's queries and all keys.
func (r ring) ofMember(member, window int) attrs {
	at := attentionAttrs(r.whole())
	at["window"], at["chunks"], at["member"] = float64(window), float64(2*r.members), float64(member)
	return at
}

// cut returns the number of keys that some members visit in a block of their own, after the others: those of the prefix, unless
// the window hides all of them.
func (r ring) cut(member, window int) int {
	if member%2 == 0 || window == 1 {
		return 0
	}
	return r.members * r.prefix
}

// from returns the rows from a token on, and before those before it.
func (r ring) from(v *value, token int) *value {
	at := token * r.batch
	return &value{dtype: v.dtype, shape: []int{v.shape[0] - at, v.shape[1]}, data: v.data[at*v.shape[1]:]}
}

func (r ring) before(v *value, token int) *value {
	rows := token * r.batch
	return &value{dtype: v.dtype, shape: []int{rows, v.shape[1]}, data: v.data[:rows*v.shape[1]]}
}

// attentionOfChunks lets each member attend to the gathered keys of all members, at once or in two blocks.
func (s *suite) attentionOfChunks(r ring, window int) {
	a := r.whole()
	a.Window = window
	if window%2 == 1 {
		a.Positions = s.positions(a)
	}
	q, k, v := s.attentionOperands(a)
	o, lse := zeros(results(a)...), zeros(q.shape[0], a.Heads)
	for member := range r.members {
		mine, at, cut := r.tokens(member, false), r.ofMember(member, window), r.cut(member, window)
		in := withPositions(args{"o": s.sum(false, len(mine)*r.batch, results(a)[1]), "lse": s.outF32(len(mine)*r.batch, a.Heads), "q": r.take(q, mine)}, a)
		in["k"], in["v"] = r.from(k, cut), r.from(v, cut)
		at["prefix"] -= float64(cut)
		out := s.run(call{op: ir.Attention, attrs: at, args: in})
		if cut > 0 {
			in["o"].data, in["lse"].data, in["k"], in["v"] = out["o"], out["lse"], r.before(k, cut), r.before(v, cut)
			at["prefix"], at["accumulate"] = float64(cut), 1
			out = s.run(call{op: ir.Attention, attrs: at, args: in})
		}
		r.put(o, mine, out["o"])
		r.put(lse, mine, out["lse"])
	}
	s.checkAttention("", o.data, lse.data, ir.F32, q, k, v, a)
}

// attentionGradOfChunks sums the members' contributions to the gradients of keys, at once or in two blocks. Every second
// member accumulates.
func (s *suite) attentionGradOfChunks(r ring, window int) {
	a := r.whole()
	a.Window = window
	if window%2 == 1 {
		a.Positions = s.positions(a)
	}
	q, k, v := s.attentionOperands(a)
	do := s.normal(results(a)...)
	o, lse := s.attentionResults(q, k, v, a)
	dq, dk, dv := zeros(q.shape...), zeros(k.shape...), zeros(v.shape...)
	for member := range r.members {
		mine, at, cut := r.tokens(member, false), r.ofMember(member, window), r.cut(member, window)
		in := withPositions(args{"dq": s.sum(false, len(mine)*r.batch, q.shape[1]), "do": r.take(do, mine), "q": r.take(q, mine), "o": r.take(o, mine), "lse": r.take(lse, mine)}, a)
		run := func(k, v, dk, dv *value, accumulate bool) []float64 {
			at["accumulate"] = truth(accumulate)
			in["k"], in["v"], in["dk"], in["dv"] = k, v, s.sum(accumulate, k.shape...), s.sum(accumulate, v.shape...)
			earlierK, earlierV := in["dk"].data, in["dv"].data
			out := s.run(call{op: ir.AttentionGrad, attrs: at, args: in})
			if accumulate {
				out["dk"], out["dv"] = minus(out["dk"], earlierK), minus(out["dv"], earlierV)
			}
			for i := range dk.data {
				dk.data[i] += out["dk"][i]
			}
			for i := range dv.data {
				dv.data[i] += out["dv"][i]
			}
			return out["dq"]
		}
		at["prefix"] -= float64(cut)
		sum := run(r.from(k, cut), r.from(v, cut), r.from(dk, cut), r.from(dv, cut), member%2 == 1)
		if cut > 0 {
			in["dq"].data, at["prefix"], at["accumulate_q"] = sum, float64(cut), 1
			sum = run(r.before(k, cut), r.before(v, cut), r.before(dk, cut), r.before(dv, cut), true)
		}
		r.put(dq, mine, sum)
	}
	s.checkAttentionGrad(dq.data, dk.data, dv.data, ir.F32, q, k, v, o, do, a)
}
