package simd

import "sync"

// AttentionGrads holds the operands of Backward. Delta holds the inner products of the rows of DOut and O; see
// AttentionDelta. If Delta is nil, Backward computes them.
type AttentionGrads struct {
	DQ, DK, DV, DOut, Q, K, V, O Mat
	LSE, Delta                   []float32
	AddQ, AddKV                  bool // AddQ: add to DQ instead of overwriting it; AddKV: likewise for DK and DV
}

// Backward computes DQ, laid out like Q, and the gradients DK and DV of the keys and values, in float32. DOut is
// the gradient of O; O and LSE are Forward's results over all keys that a query sees.
//
// The gradient of a key is a sum over query heads and, for each, over blocks of queries. The gradient of a
// query is a sum over blocks of keys. All sums are in ascending order. If there are fewer heads than threads,
// the work is done in two phases with the score gradients kept in between: the first divides the keys among
// threads, the second the queries. This changes neither the order of any sum nor the arithmetic.
func (a Attention) Backward(p *Pool, g AttentionGrads) {
	if !g.AddKV {
		a.clearKeys(p, g.DK, g.DV)
	}
	heads, group := a.Batch*a.KVHeads, a.Heads/a.KVHeads
	if heads < p.Threads() {
		for member := range group {
			a.backwardInPhases(p, g, member)
		}
		return
	}
	a.backwardByHeads(p, g)
}

// backwardByHeads processes each key head's chunks of queries one after another, and different heads concurrently.
func (a Attention) backwardByHeads(p *Pool, g AttentionGrads) {
	heads, group := a.Batch*a.KVHeads, a.Heads/a.KVHeads
	chunk := a.chunk(heads*group, p.Threads())
	chunks := ceilDiv(a.Tokens, chunk)
	t := turns{each: group * chunks, done: make([]int, heads), busy: make([]bool, heads)}
	p.Run(heads*t.each, func(part int) {
		s := takeScratch()
		defer s.release()
		t.take(part/t.each, func(head, turn int) {
			b := a.backward(s, g, head, turn/chunks)
			b.q0 = turn % chunks * chunk
			b.q1 = min(a.Tokens, b.q0+chunk)
			b.run()
		})
	})
}

// turns schedules lists of tasks. The tasks of a list run one after another. Lists advance evenly, so all of
// them end at about the same time, and a delayed thread still finds a list to continue.
type turns struct {
	sync.Mutex
	each int    // tasks per list
	done []int  // by list: tasks done or under way
	busy []bool // a task of the list is under way
	owed int    // tasks for which every list was busy; the next thread to finish a task runs them
}

// take runs the next task of the idle list with the most tasks left, then tasks that are owed. Ties go to the
// first list at or after `from`, cyclically.
func (t *turns) take(from int, do func(list, task int)) {
	t.Lock()
	t.owed++
	for list := t.next(from); list >= 0; list = t.next(from) {
		task := t.done[list]
		t.owed, t.done[list], t.busy[list] = t.owed-1, task+1, true
		t.Unlock()
		do(list, task)
		t.Lock()
		t.busy[list] = false
	}
	t.Unlock()
}

// next returns the list to continue, or a negative number if there is none.
func (t *turns) next(from int) int {
	list := -1
	for i := range t.done {
		l := (from + i) % len(t.done)
		if t.owed > 0 && !t.busy[l] && t.done[l] < t.each && (list < 0 || t.done[l] < t.done[list]) {
			list = l
		}
	}
	return list
}

// panelBlocks is the number of blocks of keys whose score gradients are kept at once.
const panelBlocks = 8

// keptGrads is the number of score gradients of a chunk of queries for one block of keys.
const keptGrads = keyBlock * queryChunk

// backwardInPhases processes one query head of each key head.
func (a Attention) backwardInPhases(p *Pool, g AttentionGrads, member int) {
	s := takeScratch()
	defer s.release()
	heads, dp := a.Batch*a.KVHeads, roundUp(a.HeadDim, active.nr)
	kept, dq := s.floats(0, heads*panelBlocks*keptGrads), s.floats(1, heads*queryChunk*dp)
	cuts := ceilDiv(2*p.Threads(), heads)
	for q0 := 0; q0 < a.Tokens; q0 += queryChunk {
		nq := min(queryChunk, a.Tokens-q0)
		seen, begin := min(a.Keys, a.Prefix+q0+nq), a.firstBlock(q0, 0)
		for seq := range a.Batch {
			begin = min(begin, a.firstBlock(q0, seq))
		}
		queryCuts := min(cuts, ceilDiv(nq, tileQueries))
		phase := func(cuts int, work func(b *attentionBackward, piece int)) {
			p.Run(heads*cuts, func(part int) {
				s := takeScratch()
				defer s.release()
				b := a.backward(s, g, part%heads, member)
				b.kept = kept[part%heads*panelBlocks*keptGrads:][:panelBlocks*keptGrads]
				b.dqRows = dq[part%heads*queryChunk*dp:][:queryChunk*dp]
				b.attentionPart.q0, b.nq = q0, nq
				work(b, part/heads)
			})
		}
		for k0 := begin; k0 < seen; k0 += panelBlocks * keyBlock {
			keys := min(panelBlocks*keyBlock, seen-k0)
			keyCuts := min(cuts, ceilDiv(keys, keyBlock))
			phase(keyCuts, func(b *attentionBackward, piece int) {
				lo, hi := cut(keys, keyCuts, piece, keyBlock)
				b.panel, b.k0, b.k1 = k0, k0+lo, k0+hi
				b.keyPhase()
			})
			phase(queryCuts, func(b *attentionBackward, piece int) {
				b.q0, b.q1 = cut(nq, queryCuts, piece, tileQueries)
				b.panel, b.k0, b.k1 = k0, k0, k0+keys
				b.queryPhase(k0 == begin, k0+keys == seen)
			})
		}
	}
}

// clearKeys sets the gradients of keys and values to zero.
func (a Attention) clearKeys(p *Pool, dk, dv Mat) {
	keyCols, valueCols := a.KVHeads*a.HeadDim, a.KVHeads*a.values()
	p.Split(a.Keys*a.Batch, rowGrain(max(keyCols, valueCols)), func(lo, hi int) {
		for i := lo; i < hi; i++ {
			clear(dk.F32[i*dk.Ld : i*dk.Ld+keyCols])
			clear(dv.F32[i*dv.Ld : i*dv.Ld+valueCols])
		}
	})
}

// attentionBackward is the work on a range of keys and a range of queries of one query head. It adds to the
// gradients of the keys, writes those of the queries, or does both.
type attentionBackward struct {
	attentionPart
	AttentionGrads
	queries, keys  bool
	k0, k1, q0, q1 int // in phases, q0 and q1 are relative to the chunk's first query

	kept  []float32 // in phases: score gradients, by key block starting at panel, then by tile
	panel int

	qT, doT, qRows, doRows, dqRows []float32 // queries and output gradients as strips, then as right operands; accumulators
	lseStrip, delta                []float32
	keyLeft, valueLeft, keyRight   []float32 // keys and values as left operands; keys as a right operand (or keyLeft)
	dkRows, dvRows                 []float32
	tile, dTile, slopes            []float32
}

// backward returns the work on an entire query head: number `member` of the group of query heads that use key head
// number `head`. Key heads are numbered over all sequences.
func (a Attention) backward(s *scratch, g AttentionGrads, head, member int) *attentionBackward {
	f := a.attentionPart(s, head/a.KVHeads, head%a.KVHeads*(a.Heads/a.KVHeads)+member, g.DOut, g.Q, g.K, g.V)
	return &attentionBackward{attentionPart: f, AttentionGrads: g, queries: true, keys: true, k1: a.Keys, q1: a.Tokens}
}

// run processes a chunk of queries.
func (b *attentionBackward) run() {
	b.attentionPart.q0, b.nq = b.q0, b.q1-b.q0
	b.room(b.nq)
	b.dqRows = b.s.floats(3, queryChunk*b.qk.dp)
	b.pack()
	b.beginQueries(0, b.nq)
	b.blocks()
	b.endQueries(0, b.nq)
}

// keyPhase computes a chunk's contribution to the gradients of keys and values, and keeps the score gradients.
func (b *attentionBackward) keyPhase() {
	b.queries = false
	b.room(b.nq)
	b.pack()
	b.blocks()
}

// queryPhase adds the contribution of the kept score gradients to the gradients of queries. The flags first and
// last mark the first and the last panel.
func (b *attentionBackward) queryPhase(first, last bool) {
	if first {
		b.beginQueries(b.q0, b.q1)
	}
	b.keyRight = b.s.floats(1, keyBlock*b.qk.dp)
	for k0 := b.k0; k0 < b.k1; k0 += keyBlock {
		nk := min(keyBlock, b.k1-k0)
		b.right(b.keyRight, b.tokens(b.K, b.qk, b.kvHead(), k0), b.qk, nk)
		for i := b.q0; i < b.q1; i += tileQueries {
			if n, rows := b.sees(i, k0, nk); rows > 0 {
				b.product(n, b.HeadDim, rows, b.keptTile(i, k0), 1, tileQueries, b.keyRight, b.qk.dp, b.dqRows[i*b.qk.dp:], b.qk.dp, true)
			}
		}
	}
	if last {
		b.endQueries(b.q0, b.q1)
	}
}

// keptTile returns the kept score gradients of the tile of queries that starts at i, for a block of keys.
func (b *attentionBackward) keptTile(i, k0 int) []float32 {
	return b.kept[(k0-b.panel)/keyBlock*keptGrads+i*keyBlock:][:keyBlock*tileQueries]
}

// room reserves scratch for a chunk of the given number of queries.
func (b *attentionBackward) room(queries int) {
	padded := roundUp(queries, tileQueries)
	rows := b.s.floats(0, (b.qk.words+b.v.words+b.qk.dp+b.v.dp+2)*padded)
	take := func(n int) []float32 { x := rows[:n]; rows = rows[n:]; return x }
	b.qT, b.doT = take(padded*b.qk.words), take(padded*b.v.words)
	b.qRows, b.doRows = take(padded*b.qk.dp), take(padded*b.v.dp)
	b.lseStrip, b.delta = take(padded), take(padded)
	rows = b.s.floats(1, keyBlock*(b.qk.leftLd+b.v.leftLd+2*b.qk.dp+b.v.dp))
	b.keyLeft, b.valueLeft = take(keyBlock*b.qk.leftLd), take(keyBlock*b.v.leftLd)
	b.dkRows, b.dvRows, b.keyRight = take(keyBlock*b.qk.dp), take(keyBlock*b.v.dp), b.keyLeft
	if b.perWord == 2 {
		b.keyRight = take(keyBlock * b.qk.dp)
	}
	rows = b.s.floats(2, 3*keyBlock*tileQueries)
	b.tile, b.dTile, b.slopes = take(keyBlock*tileQueries), take(keyBlock*tileQueries), take(keyBlock*tileQueries)
}

// pack packs the chunk's queries into the layouts that the products need.
func (b *attentionBackward) pack() {
	first := b.attentionPart.q0
	b.strips(b.qT, b.Q, b.qk)
	b.strips(b.doT, b.DOut, b.v)
	b.right(b.qRows, b.tokens(b.Q, b.qk, b.head, first), b.qk, b.nq)
	b.right(b.doRows, b.tokens(b.DOut, b.v, b.head, first), b.v, b.nq)
	clear(b.delta)
	clear(b.lseStrip)
	for i := range b.nq {
		b.lseStrip[i] = b.LSE[b.lseAt(first+i)]
	}
	b.makeDelta(first)
}

// beginQueries initialises the gradients of some of the chunk's queries: to zero, or to their existing values if
// AddQ is set.
func (b *attentionBackward) beginQueries(lo, hi int) {
	rows := b.dqRows[lo*b.qk.dp : hi*b.qk.dp]
	clear(rows)
	if b.AddQ {
		b.tokens(b.DQ, b.qk, b.head, b.attentionPart.q0+lo).load(rows, b.qk.dp, hi-lo, b.HeadDim)
	}
}

// endQueries stores the gradients of some of the chunk's queries.
func (b *attentionBackward) endQueries(lo, hi int) {
	b.tokens(b.DQ, b.qk, b.head, b.attentionPart.q0+lo).store(b.dqRows[lo*b.qk.dp:], b.qk.dp, hi-lo, b.HeadDim)
}

// blocks processes every block of keys that at least one of the chunk's queries sees.
func (b *attentionBackward) blocks() {
	end := min(b.k1, b.Prefix+b.attentionPart.q0+b.nq)
	for k0 := max(b.k0, b.firstBlock(b.attentionPart.q0, b.seq)); k0 < end; k0 += keyBlock {
		b.block(k0, min(keyBlock, b.k1-k0))
	}
}

// makeDelta loads or computes the delta of the chunk's queries.
func (b *attentionBackward) makeDelta(first int) {
	if b.Delta != nil {
		for i := range b.nq {
			b.delta[i] = b.Delta[b.lseAt(first+i)]
		}
		return
	}
	d := b.v.dim
	o, dout, buf := b.tokens(b.O, b.v, b.head, first), b.tokens(b.DOut, b.v, b.head, first), b.s.floats(7, 2*d)
	for i := range b.nq {
		b.delta[i] = active.dot(dout.row(i, d, buf), o.row(i, d, buf[d:]))
	}
}

// block processes one block of keys against the chunk.
func (b *attentionBackward) block(k0, nk int) {
	kv := b.kvHead()
	b.left(b.keyLeft, b.tokens(b.K, b.qk, kv, k0), b.qk, nk)
	b.left(b.valueLeft, b.tokens(b.V, b.v, kv, k0), b.v, nk)
	if b.queries && b.perWord == 2 {
		b.right(b.keyRight, b.tokens(b.K, b.qk, kv, k0), b.qk, nk)
	}
	dk, dv := b.tokens(b.DK, b.qk, kv, k0), b.tokens(b.DV, b.v, kv, k0)
	if b.keys {
		dk.load(b.dkRows, b.qk.dp, nk, b.qk.dim)
		dv.load(b.dvRows, b.v.dp, nk, b.v.dim)
	}
	for i := 0; i < b.nq; i += tileQueries {
		if n, rows := b.sees(i, k0, nk); rows > 0 {
			if b.kept != nil {
				b.dTile = b.keptTile(i, k0)
			}
			b.group(i, n, rows, k0-(b.Prefix+b.attentionPart.q0+i))
		}
	}
	if b.keys {
		dk.store(b.dkRows, b.qk.dp, nk, b.qk.dim)
		dv.store(b.dvRows, b.v.dp, nk, b.v.dim)
	}
}

// sees returns the number of queries in a tile, and how many of a block's nk keys at least one of these queries
// might see.
func (b *attentionBackward) sees(i, k0, nk int) (n, rows int) {
	n = min(tileQueries, b.nq-i)
	if k0 < b.firstBlock(b.attentionPart.q0+i, b.seq) {
		return n, 0
	}
	return n, min(nk, b.Prefix+b.attentionPart.q0+i+n-k0)
}

// group processes one tile: n queries, starting at i, against the first `rows` keys of a block.
func (b *attentionBackward) group(i, n, rows, offset int) {
	nr := active.nr
	strips := ceilDiv(n, nr)
	b.scores(b.tile, rows, b.keyLeft, b.qT[i*b.qk.words:], b.qk, strips)
	b.scores(b.dTile, rows, b.valueLeft, b.doT[i*b.v.words:], b.v, strips)
	b.bound(b.tile[:rows*tileQueries], b.slopes[:rows*tileQueries])
	hide(b.tile, tileQueries, rows, offset, b.Window)
	b.hideDocuments(b.tile, rows, b.attentionPart.q0+i, n, b.Prefix+b.attentionPart.q0+i+offset)
	for j := 0; j < strips*nr; j += nr {
		active.softmaxGrads(b.tile[j:], b.dTile[j:], tileQueries, rows, b.lseStrip[i+j:], b.delta[i+j:], b.scaleLeft())
	}
	if b.Softcap > 0 {
		Mul(b.dTile[:rows*tileQueries], b.dTile, b.slopes)
	}
	if b.keys {
		b.product(rows, b.v.dim, n, b.tile, tileQueries, 1, b.doRows[i*b.v.dp:], b.v.dp, b.dvRows, b.v.dp, true)
		b.product(rows, b.qk.dim, n, b.dTile, tileQueries, 1, b.qRows[i*b.qk.dp:], b.qk.dp, b.dkRows, b.qk.dp, true)
	}
	if b.queries {
		b.product(n, b.qk.dim, rows, b.dTile, 1, tileQueries, b.keyRight, b.qk.dp, b.dqRows[i*b.qk.dp:], b.qk.dp, true)
	}
}
