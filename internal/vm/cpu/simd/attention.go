package simd

import "math"

// Attention is causal self-attention of Tokens query tokens over Keys key tokens. The keys are all tokens so
// far or a block of them. The first key is Prefix tokens before the first query: query token t sees key tokens
// Prefix+t-Window+1 to Prefix+t, if they exist. Without Positions, every query sees at least one. Sequences of
// a batch are interleaved: row t*Batch+b of a matrix is token t of sequence b. Query head h uses key head
// h/(Heads/KVHeads). Scores s become Softcap*tanh(s/Softcap) unless Softcap is 0.
//
// Positions, if not nil, holds the position of each query token in its document, laid out like the rows of the
// queries. Each is 0 or one more than that of the preceding token. A query sees no key of another document, so it
// may see no key at all.
//
// The kernels work on transposed score tiles, keys by queries. The running maximum and sum of a query are then
// lanes of vectors, and probabilities have the layout in which the micro-kernel reads a transposed left
// operand. If the instruction set multiplies pairs of bfloat16 and all operands are bfloat16, the products of
// queries with keys, and of output gradients with values, are computed in pairs, which needs no rounding.
// Probabilities and score gradients stay float32, and so do their products.
type Attention struct {
	Tokens, Keys, Prefix, Window, Batch, Heads, KVHeads, HeadDim int
	ValueDim                                                     int // width of a head of values, and of o; 0: HeadDim
	Softcap                                                      float32
	Positions                                                    []int32
}

// firstKey returns the first key that a query of a sequence sees.
func (a Attention) firstKey(query, seq int) int {
	before := a.Window - 1
	if a.Positions != nil {
		before = min(before, int(a.Positions[query*a.Batch+seq]))
	}
	return max(0, a.Prefix+query-before)
}

// firstBlock returns the first key of the first block that a query of a sequence sees. Later queries see no
// earlier block.
func (a Attention) firstBlock(query, seq int) int {
	return a.firstKey(query, seq) / keyBlock * keyBlock
}

const (
	// keyBlock is the number of keys in a score tile; tileQueries is the number of queries, a multiple of nr.
	keyBlock    = 112
	tileQueries = 32
	// queryChunk is the number of queries whose operands are held at once; leastChunk is the smallest number of
	// queries for which loading keys is worthwhile.
	queryChunk, leastChunk = 256, 64
	partsOfThread          = 4
)

// Forward computes o, laid out like q with heads of values, and lse. For each row of q and each head, lse holds one float32: the
// natural logarithm of the sum of exp(score) over the scaled scores. If accumulate is set, Forward continues from
// an o and lse computed over other keys.
func (a Attention) Forward(p *Pool, o Mat, lse []float32, accumulate bool, q, k, v Mat) {
	size := a.chunk(a.Batch*a.Heads, p.Threads())
	chunks := ceilDiv(a.Tokens, size)
	p.Run(a.Batch*a.Heads*chunks, func(part int) {
		s := takeScratch()
		defer s.release()
		// The last chunks go first because they see the most keys.
		chunk, head := chunks-1-part/(a.Batch*a.Heads), part%(a.Batch*a.Heads)
		f := a.attentionPart(s, head/a.Heads, head%a.Heads, q, k, v)
		f.q0 = chunk * size
		f.nq = min(size, a.Tokens-f.q0)
		f.forward(o, lse, accumulate, q, k, v)
	})
}

// chunk returns the number of queries per part for the given number of heads: queryChunk, or fewer if each thread
// would otherwise have fewer than partsOfThread parts, so that a slow thread does not delay the others.
func (a Attention) chunk(heads, threads int) int {
	size := queryChunk
	for threads > 1 && size > leastChunk && heads*ceilDiv(a.Tokens, size) < partsOfThread*threads {
		size /= 2
	}
	return size
}

// attentionPart is the work on some queries of one head in one sequence.
type attentionPart struct {
	Attention
	s         *scratch
	seq, head int
	q0, nq    int // the queries
	perWord   int // elements per word in the operands of scores
	qk, v     side
}

// side has the widths of heads of queries and keys, or of values and o.
type side struct {
	dim    int // elements
	words  int // of the elements along the summed dimension of a product
	dp     int // words per row of a right operand or an accumulator
	leftLd int // words per row of a left operand of scores
}

func sideOf(dim, perWord int) side {
	w := side{dim: dim, words: ceilDiv(dim, perWord), dp: roundUp(dim, active.nr)}
	if w.leftLd = w.dp; perWord == 2 {
		w.leftLd = w.words
	}
	return w
}

// attentionPart returns the work on one head for the given operands.
func (a Attention) attentionPart(s *scratch, seq, head int, operands ...Mat) attentionPart {
	f := attentionPart{Attention: a, s: s, seq: seq, head: head, perWord: perWord(operands...)}
	f.qk, f.v = sideOf(a.HeadDim, f.perWord), sideOf(a.values(), f.perWord)
	return f
}

// values returns the width of a head of values.
func (a Attention) values() int {
	if a.ValueDim > 0 {
		return a.ValueDim
	}
	return a.HeadDim
}

// scale returns the factor that turns products of queries and keys into scores; scaleLeft returns the part of it
// that remains to be applied to a tile of scores.
func (f *attentionPart) scale() float32 { return float32(1 / math.Sqrt(float64(f.HeadDim))) }
func (f *attentionPart) scaleLeft() float32 {
	if f.Softcap > 0 {
		return 1
	}
	return f.scale()
}

// bound applies the scale and the soft cap to the products of a tile; without a soft cap, it does nothing. slopes,
// if not nil, receives the derivatives of scores with respect to products.
func (f *attentionPart) bound(tile, slopes []float32) {
	if f.Softcap == 0 {
		return
	}
	softcap(tile, tile, f.scale(), f.Softcap)
	for i := range slopes {
		y := tile[i] / f.Softcap
		slopes[i] = f.scale() * (1 - float32(y*y))
	}
}

// tokens returns a view of one head of one sequence whose rows are tokens.
func (f *attentionPart) tokens(m Mat, w side, head, first int) Mat {
	m = m.at(first*f.Batch+f.seq, head*w.dim)
	m.Ld *= f.Batch
	return m
}

func (f *attentionPart) kvHead() int { return f.head / (f.Heads / f.KVHeads) }

// strips packs queries or output gradients as strips of nr: element (d, query) of a strip is at d*nr + query.
// Lanes beyond the last query are zero.
func (f *attentionPart) strips(dst []float32, m Mat, w side) {
	nr, d := active.nr, w.words
	m = f.tokens(m, w, f.head, f.q0)
	src, ld := m.F32, m.Ld
	if m.BF16 != nil {
		src, ld = f.s.floats(7, f.nq*w.leftLd), w.leftLd
		f.left(src, m, w, f.nq)
	}
	for i := 0; i < f.nq; i += nr {
		n := min(nr, f.nq-i)
		strip := dst[i*d:][:d*nr]
		if n < nr {
			clear(strip)
		}
		active.packT(strip, src[i*ld:], ld, n, d)
	}
}

// left packs tokens as a left operand of products that sum over the elements of a head.
func (f *attentionPart) left(dst []float32, m Mat, w side, tokens int) {
	if f.perWord == 2 {
		m.pairsAlong(dst, w.leftLd, tokens, w.dim)
		return
	}
	m.load(dst, w.leftLd, tokens, w.dim)
}

// right packs tokens as a right operand of products that sum over tokens: rows of dp elements in float32.
func (f *attentionPart) right(dst []float32, m Mat, w side, tokens int) {
	m.load(dst, w.dp, tokens, w.dim)
}

// product runs the micro-kernel over all strips of columns: c[rows][cols] (+)= a*b. Consecutive rows are bLd
// elements apart in b and cLd in c.
func (f *attentionPart) product(rows, cols, k int, a []float32, aRow, aK int, b []float32, bLd int, c []float32, cLd int, accumulate bool) {
	f.s.multiply(1, rows, cols, k, a, aRow, aK, b, bLd, c, cLd, accumulate)
}

// scores computes a tile of scores as a*bT: the first `rows` keys by the queries of the first `strips` strips.
// a is a left operand; bT is packed by strips.
func (f *attentionPart) scores(tile []float32, rows int, a, bT []float32, w side, strips int) {
	d, nr := w.words, active.nr
	for i := range strips {
		f.s.multiply(f.perWord, rows, nr, d, a, w.leftLd, 1, bT[i*d*nr:], nr, tile[i*nr:], tileQueries, false)
	}
}

// hide sets the scores of masked keys to minus infinity: key r of the tile is hidden from the first r+offset
// queries, and from queries at least `window` tokens after it.
func hide(tile []float32, ld, rows, offset, window int) {
	for r := max(0, 1-offset); r < rows; r++ {
		Fill(tile[r*ld:r*ld+min(ld, r+offset)], float32(math.Inf(-1)))
	}
	for r := 0; r < rows && r+offset+window < ld; r++ {
		Fill(tile[r*ld+max(0, r+offset+window):(r+1)*ld], float32(math.Inf(-1)))
	}
}

// hideDocuments sets to minus infinity the scores of keys that belong to an earlier document than the query.
// The tile has n queries, starting at `query`, and `rows` keys, starting at k0.
func (f *attentionPart) hideDocuments(tile []float32, rows, query, n, k0 int) {
	if f.Positions == nil || f.firstKey(query+n-1, f.seq) <= k0 {
		return
	}
	seeing := 0 // queries that see this key
	for r := range rows {
		for seeing < n && f.firstKey(query+seeing, f.seq) <= k0+r {
			seeing++
		}
		Fill(tile[r*tileQueries+seeing:(r+1)*tileQueries], float32(math.Inf(-1)))
	}
}

// lseAt returns the index of a query's values in lse and delta.
func (f *attentionPart) lseAt(query int) int { return (query*f.Batch+f.seq)*f.Heads + f.head }

func (f *attentionPart) forward(o Mat, lse []float32, accumulate bool, q, k, v Mat) {
	d, dp, nr := f.v.dim, f.v.dp, active.nr
	padded := roundUp(f.nq, tileQueries)
	qT, keys, values := f.s.floats(0, padded*f.qk.words), f.s.floats(1, keyBlock*f.qk.leftLd), f.s.floats(2, keyBlock*dp)
	f.strips(qT, q, f.qk)
	out, tile := f.s.floats(3, f.nq*dp), f.s.floats(4, keyBlock*tileQueries)
	state := f.s.floats(5, 3*padded)
	rowMax, sum, alpha := state[:padded], state[padded:2*padded], state[2*padded:]
	Fill(rowMax, -math.MaxFloat32) // finite: a query might see no keys in the first block
	clear(sum)
	if accumulate { // keys handled earlier count as one key with score lse and value o, or as none if lse is -Inf
		f.tokens(o, f.v, f.head, f.q0).load(out, dp, f.nq, d)
		for j := range f.nq {
			if before := lse[f.lseAt(f.q0+j)]; !math.IsInf(float64(before), -1) {
				rowMax[j], sum[j] = before, 1
			}
		}
	}

	seen := min(f.Keys, f.Prefix+f.q0+f.nq)
	for k0 := f.firstBlock(f.q0, f.seq); k0 < seen; k0 += keyBlock {
		nk := min(keyBlock, seen-k0)
		f.left(keys, f.tokens(k, f.qk, f.kvHead(), k0), f.qk, nk)
		f.right(values, f.tokens(v, f.v, f.kvHead(), k0), f.v, nk)
		for i := 0; i < f.nq; i += tileQueries {
			n := min(tileQueries, f.nq-i)
			first := f.Prefix + f.q0 + i // the last key that the group's first query sees
			begin, rows := f.firstBlock(f.q0+i, f.seq), min(nk, first+n-k0)
			if rows <= 0 || k0 < begin {
				continue
			}
			goesOn := accumulate || k0 > begin
			strips := ceilDiv(n, nr)
			f.scores(tile, rows, keys, qT[i*f.qk.words:], f.qk, strips)
			f.bound(tile[:rows*tileQueries], nil)
			hide(tile, tileQueries, rows, k0-first, f.Window)
			f.hideDocuments(tile, rows, f.q0+i, n, k0)
			for j := i; j < i+strips*nr; j += nr {
				active.softmaxStrip(tile[j-i:], tileQueries, rows, rowMax[j:j+nr], sum[j:j+nr], alpha[j:j+nr], f.scaleLeft())
			}
			for j := i; goesOn && j < i+n; j++ {
				if alpha[j] != 1 {
					row := out[j*dp : j*dp+d]
					active.scale(row, row, alpha[j])
				}
			}
			f.product(n, d, rows, tile, 1, tileQueries, values, dp, out[i*dp:], dp, goesOn)
		}
	}
	for j := range f.nq {
		row := out[j*dp : j*dp+d]
		if sum[j] == 0 { // the query sees no key
			clear(row)
			lse[f.lseAt(f.q0+j)] = float32(math.Inf(-1))
			continue
		}
		active.scale(row, row, 1/sum[j])
		lse[f.lseAt(f.q0+j)] = rowMax[j] + float32(math.Log(float64(sum[j])))
	}
	f.tokens(o, f.v, f.head, f.q0).store(out, dp, f.nq, d)
}
