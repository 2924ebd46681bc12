package simd

// AttentionGrads are the operands of Backward. Delta is that of attention's gradient; where it is nil, it is made from O.
type AttentionGrads struct {
	DQ, DK, DV, DOut, Q, K, V, O Mat
	LSE, Delta                   []float32
	AddQ, AddKV                  bool // add to DQ, to DK and DV, instead of writing them
}

// Backward computes DQ, laid out like Q, and the gradients DK and DV of the keys and values, in float32. DOut is the
// gradient of O; O and LSE are Forward's over all keys that a query sees.
//
// A gradient of a key is the sum over query heads, then over blocks of queries, a gradient of a query the sum over blocks of
// keys, each in rising order. Where there are fewer heads than threads, queries and keys are cut up and the scores
// computed once for each of the two: the order of every sum stays what it was.
func (a Attention) Backward(p *Pool, g AttentionGrads) {
	heads, total := a.Batch*a.KVHeads, a.Keys
	if !g.AddKV {
		a.clearKeys(p, g.DK, g.DV)
	}
	keyCuts, queryCuts := 1, 0
	if heads < p.Threads() {
		keyCuts = min(ceilDiv(2*p.Threads(), heads), ceilDiv(total, keyBlock))
		queryCuts = min(ceilDiv(2*p.Threads(), heads), ceilDiv(a.Tokens, queryChunk))
	}
	p.Run(heads*(keyCuts+queryCuts), func(part int) {
		s := takeScratch()
		defer s.release()
		f := attentionPart{Attention: a, s: s, seq: part % heads / a.KVHeads, dp: roundUp(a.HeadDim, active.nr)}
		piece, kvHead := part/heads, part%heads%a.KVHeads
		b := attentionBackward{attentionPart: f, AttentionGrads: g, queries: queryCuts == 0, keys: piece < keyCuts}
		b.k0, b.k1, b.q0, b.q1 = 0, total, 0, a.Tokens
		if b.keys {
			b.k0, b.k1 = cut(total, keyCuts, piece, keyBlock)
		} else {
			b.queries = true
			b.q0, b.q1 = cut(a.Tokens, queryCuts, piece-keyCuts, queryChunk)
		}
		group := a.Heads / a.KVHeads
		for b.head = kvHead * group; b.head < (kvHead+1)*group; b.head++ {
			b.run()
		}
	})
}

// clearKeys sets the gradients of keys and values to zero.
func (a Attention) clearKeys(p *Pool, dk, dv Mat) {
	cols := a.KVHeads * a.HeadDim
	p.Split(a.Keys*a.Batch, rowGrain(cols), func(lo, hi int) {
		for i := lo; i < hi; i++ {
			clear(dk.F32[i*dk.Ld : i*dk.Ld+cols])
			clear(dv.F32[i*dv.Ld : i*dv.Ld+cols])
		}
	})
}

// attentionBackward is the work on a range of keys and a range of queries of one key head: it adds to the gradients of
// the keys, writes those of the queries, or does both.
type attentionBackward struct {
	attentionPart
	AttentionGrads
	queries, keys  bool
	k0, k1, q0, q1 int

	doT, qRows, doRows, dqRows []float32
	lseStrip, delta            []float32
	keyRows, valueRows         []float32
	dkRows, dvRows             []float32
	tile, dTile                []float32
}

// run goes through one query head, a chunk of queries at a time.
func (b *attentionBackward) run() {
	d := b.HeadDim
	padded := roundUp(min(queryChunk, b.q1-b.q0), tileQueries)
	rows := b.s.floats(0, (2*d+3*b.dp+2)*padded)
	take := func(n int) []float32 { x := rows[:n]; rows = rows[n:]; return x }
	b.qT, b.doT = take(padded*d), take(padded*d)
	b.qRows, b.doRows, b.dqRows = take(padded*b.dp), take(padded*b.dp), take(padded*b.dp)
	b.lseStrip, b.delta = take(padded), take(padded)
	rows = b.s.floats(1, 4*keyBlock*b.dp)
	b.keyRows, b.valueRows = take(keyBlock*b.dp), take(keyBlock*b.dp)
	b.dkRows, b.dvRows = take(keyBlock*b.dp), take(keyBlock*b.dp)
	rows = b.s.floats(2, 2*keyBlock*tileQueries)
	b.tile, b.dTile = take(keyBlock*tileQueries), take(keyBlock*tileQueries)
	for first := b.q0; first < b.q1; first += queryChunk {
		b.attentionPart.q0, b.nq = first, min(queryChunk, b.q1-first)
		b.chunk()
	}
}

// chunk packs the queries, then passes over every block of keys that one of them sees.
func (b *attentionBackward) chunk() {
	d, first := b.HeadDim, b.attentionPart.q0
	b.strips(b.qT, b.Q, b.qRows)
	b.strips(b.doT, b.DOut, b.doRows)
	clear(b.delta)
	clear(b.lseStrip)
	for i := range b.nq {
		b.lseStrip[i] = b.LSE[b.lseAt(first+i)]
	}
	b.makeDelta(first)
	clear(b.dqRows)
	if b.queries && b.AddQ {
		b.tokens(b.DQ, b.head, first).load(b.dqRows, b.dp, b.nq, d)
	}
	for k0 := b.k0; k0 < min(b.k1, b.Prefix+first+b.nq); k0 += keyBlock {
		b.block(k0, min(keyBlock, b.k1-k0))
	}
	if b.queries {
		b.tokens(b.DQ, b.head, first).store(b.dqRows, b.dp, b.nq, d)
	}
}

// makeDelta brings or makes the delta of the chunk's queries.
func (b *attentionBackward) makeDelta(first int) {
	if b.Delta != nil {
		for i := range b.nq {
			b.delta[i] = b.Delta[b.lseAt(first+i)]
		}
		return
	}
	d := b.HeadDim
	o, buf := b.tokens(b.O, b.head, first), b.s.floats(7, d)
	for i := range b.nq {
		b.delta[i] = active.dot(b.doRows[i*b.dp:i*b.dp+d], o.row(i, d, buf))
	}
}

// block is one block of keys against the chunk.
func (b *attentionBackward) block(k0, nk int) {
	d, kv := b.HeadDim, b.kvHead()
	b.tokens(b.K, kv, k0).load(b.keyRows, b.dp, nk, d)
	b.tokens(b.V, kv, k0).load(b.valueRows, b.dp, nk, d)
	dk, dv := b.tokens(b.DK, kv, k0), b.tokens(b.DV, kv, k0)
	if b.keys {
		dk.load(b.dkRows, b.dp, nk, d)
		dv.load(b.dvRows, b.dp, nk, d)
	}
	for i := 0; i < b.nq; i += tileQueries {
		n := min(tileQueries, b.nq-i)
		first := b.Prefix + b.attentionPart.q0 + i
		if rows := min(nk, first+n-k0); rows > 0 {
			b.group(i, n, rows, k0-first)
		}
	}
	if b.keys {
		dk.store(b.dkRows, b.dp, nk, d)
		dv.store(b.dvRows, b.dp, nk, d)
	}
}

// group is one tile: n queries from i on, against rows keys.
func (b *attentionBackward) group(i, n, rows, offset int) {
	d, nr := b.HeadDim, active.nr
	strips := ceilDiv(n, nr)
	b.scores(b.tile, rows, b.keyRows, b.qT[i*d:], strips)
	b.scores(b.dTile, rows, b.valueRows, b.doT[i*d:], strips)
	hide(b.tile, tileQueries, rows, offset)
	for j := 0; j < strips*nr; j += nr {
		active.softmaxGrads(b.tile[j:], b.dTile[j:], tileQueries, rows, b.lseStrip[i+j:], b.delta[i+j:], b.scale())
	}
	if b.keys {
		b.product(rows, d, n, b.tile, tileQueries, 1, b.doRows[i*b.dp:], b.dp, b.dvRows, b.dp, true)
		b.product(rows, d, n, b.dTile, tileQueries, 1, b.qRows[i*b.dp:], b.dp, b.dkRows, b.dp, true)
	}
	if b.queries {
		b.product(n, d, rows, b.dTile, 1, tileQueries, b.keyRows, b.dp, b.dqRows[i*b.dp:], b.dp, true)
	}
}
