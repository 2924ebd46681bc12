package simd

// Scan is linear attention with a state for each head of v in each sequence: S = exp(decay) S + k e^T, where e is beta v or, with
// Delta, beta (v - (exp(decay) S)^T k); o = S^T (Scale q). Row t*Batch+b of a matrix is token t of sequence b. Shared adjacent
// heads of v have one head of q and k, each of which is divided by sqrt(Norm + the sum of its squares) unless Norm is 0. A head
// has one decay if Channels is 1, and otherwise one for each of its KeyDim rows of the state. Where Positions, if not nil, is 0, a
// document begins, with a state of 0.
//
// Tokens are handled in chunks, within which everything is a product of matrices; see docs/bytecode.md. A chunk ends before the
// first token of a document. Exponents are always differences to later tokens, and so at most 0: no decay overflows, however
// strong it is.
type Scan struct {
	Tokens, Batch, Heads, Shared, KeyDim, ValueDim, Channels int
	Delta                                                    bool
	Norm, Scale                                              float32
	Positions                                                []int32
}

// ScanOperands are the operands of a scan. State may be nil.
type ScanOperands struct {
	Q, K, V            Mat
	Decay, Beta, State []float32
}

// ScanGrads are the gradients of a scan's results, and of its operands. DNext may be nil.
type ScanGrads struct {
	DOut   Mat
	DNext  []float32
	DQ, DK Mat
	DV     Mat
	DDecay []float32
	DBeta  []float32
	DState []float32
}

const (
	scanRows  = 64 // of a chunk
	scanBlock = 16 // rows of a sub-block of a chunk
	// mildDecay limits the decay within a sub-block whose products are computed with factors of more than 1.
	mildDecay = 40
)

// scanChunk is a run of tokens that a scan handles at once. If fresh is set, it begins a document.
type scanChunk struct {
	first, n int
	fresh    bool
}

// chunks divides the tokens of a sequence.
func (a Scan) chunks(seq int) (out []scanChunk) {
	begins := func(t int) bool { return a.Positions != nil && a.Positions[t*a.Batch+seq] == 0 }
	for t := 0; t < a.Tokens; {
		c := scanChunk{first: t, n: 1, fresh: begins(t)}
		for c.n < scanRows && t+c.n < a.Tokens && !begins(t+c.n) {
			c.n++
		}
		out, t = append(out, c), t+c.n
	}
	return out
}

// Forward computes o and the states after the last token.
func (a Scan) Forward(p *Pool, o Mat, next []float32, in ScanOperands) {
	heads := a.Heads * a.Shared
	p.Run(a.Batch*heads, func(part int) {
		s := takeScratch()
		defer s.release()
		h := a.head(s, in, part/heads, part%heads)
		state := h.start()
		for _, c := range a.chunks(h.seq) {
			h.load(c)
			if c.fresh {
				clear(state)
			}
			h.scores(true)
			h.values(state)
			h.output(o, state)
			h.advance(state)
		}
		h.keep(next[part*a.KeyDim*a.ValueDim:], state)
	})
}

// scanHead is the work on a head of v in one sequence, a chunk at a time. Matrices of a chunk have a row for each token; those
// named after keys have kLd elements from one row to the next, those named after values vLd, and scores scanRows.
type scanHead struct {
	Scan
	in       ScanOperands
	s        *scratch
	seq, own int
	kLd, vLd int
	chunk    scanChunk

	q, k, v     []float32
	qs, ks, kt  []float32 // q and k times what has decayed since the start of the chunk; k times what decays until its end
	early, late []float32 // these factors: one for each row or, by channel, as many as k has
	whole       []float32 // the factors of the rows of the state in the chunk
	sums        []float64 // logarithms of early, if a head has one decay
	gaps        []float32 // exp(sum of the decays from a token on to another), or by channel the logarithms of the factors within sub-blocks
	p, a        []float32 // scores of queries, and minus beta times those of keys with earlier keys
	e           []float32 // what is added to the state, and its products with the state before
	left, right []float32 // factors of a sub-block, by channel
	lq, lk, r   []float32 // and its operands
	beta        []float32
}

func (a Scan) head(s *scratch, in ScanOperands, seq, own int) *scanHead {
	h := &scanHead{Scan: a, in: in, s: s, seq: seq, own: own, kLd: roundUp(a.KeyDim, active.nr), vLd: roundUp(a.ValueDim, active.nr)}
	kn, vn, pn := scanRows*h.kLd, scanRows*h.vLd, scanRows*scanRows
	room := s.floats(0, 13*kn+3*vn+3*pn+h.kLd+scanRows+2*scanBlock*h.kLd)
	cut := func(n int) []float32 {
		out := room[:n:n]
		room = room[n:]
		return out
	}
	h.q, h.k, h.qs, h.ks, h.kt, h.early, h.late = cut(kn), cut(kn), cut(kn), cut(kn), cut(kn), cut(kn), cut(kn)
	h.v, h.e = cut(vn), cut(vn)
	h.p, h.a = cut(pn), cut(pn)
	h.gaps = cut(max(2*kn, pn))
	h.left, h.right, h.r = cut(scanBlock*h.kLd), cut(kn), cut(kn)
	h.lq, h.lk = cut(scanBlock*h.kLd), cut(scanBlock*h.kLd)
	h.whole, h.beta = cut(h.kLd), cut(scanRows)
	h.sums = make([]float64, scanRows)
	return h
}

func (h *scanHead) size() int { return h.KeyDim * h.ValueDim }

// start returns the state before the first token, with vLd elements from one row to the next.
func (h *scanHead) start() []float32 {
	state := h.s.floats(2, h.KeyDim*h.vLd)
	clear(state)
	if h.in.State != nil {
		at := (h.seq*h.Heads*h.Shared + h.own) * h.size()
		active.copy2D(state, h.vLd, h.in.State[at:], h.ValueDim, h.KeyDim, h.ValueDim)
	}
	return state
}

// keep stores a state.
func (h *scanHead) keep(to, state []float32) {
	active.copy2D(to, h.ValueDim, state, h.vLd, h.KeyDim, h.ValueDim)
}

// rows returns a view of the chunk whose rows are tokens, from the given column on.
func (h *scanHead) rows(m Mat, column int) Mat {
	m = m.at(h.chunk.first*h.Batch+h.seq, column)
	m.Ld *= h.Batch
	return m
}

// row returns the index of a token of the chunk among the values of all heads of v.
func (h *scanHead) row(i int) int {
	return ((h.chunk.first+i)*h.Batch+h.seq)*h.Heads*h.Shared + h.own
}

func (h *scanHead) factor() float32 {
	if h.Scale == 0 {
		return 1
	}
	return h.Scale
}

// by returns the factor that normalises a row of q or k, whose result is also multiplied by the given factor.
func (h *scanHead) by(x []float32, factor float32) float32 {
	if h.Norm == 0 {
		return factor
	}
	return factor * reciprocalRoot(active.sumSquares(x, 0)+h.Norm)
}

// load reads a chunk.
func (h *scanHead) load(c scanChunk) {
	h.chunk = c
	group := h.own / h.Shared
	h.rows(h.in.Q, group*h.KeyDim).load(h.q, h.kLd, c.n, h.KeyDim)
	h.rows(h.in.K, group*h.KeyDim).load(h.k, h.kLd, c.n, h.KeyDim)
	h.rows(h.in.V, h.own*h.ValueDim).load(h.v, h.vLd, c.n, h.ValueDim)
	for i := range c.n {
		q, k := h.key(h.q, i), h.key(h.k, i)
		active.scale(q, q, h.by(q, h.factor()))
		active.scale(k, k, h.by(k, 1))
		h.beta[i] = h.in.Beta[h.row(i)]
	}
	if h.Channels == 1 {
		h.decayHead()
	} else {
		h.decayChannels()
	}
}

// key and value return a row of a matrix that is named after keys or values.
func (h *scanHead) key(x []float32, i int) []float32   { return x[i*h.kLd : i*h.kLd+h.KeyDim] }
func (h *scanHead) value(x []float32, i int) []float32 { return x[i*h.vLd : i*h.vLd+h.ValueDim] }

// decayHead computes the factors of a head with one decay.
func (h *scanHead) decayHead() {
	n, sum := h.chunk.n, 0.0
	for i := range n {
		sum += float64(h.in.Decay[h.row(i)])
		h.sums[i] = sum
		h.early[i] = float32(sum)
	}
	for i := range n {
		h.late[i] = float32(sum - h.sums[i])
		gaps := h.gaps[i*scanRows : i*scanRows+i+1]
		for j := range gaps {
			gaps[j] = float32(h.sums[i] - h.sums[j])
		}
		active.expScale(gaps, gaps, 0, 1)
	}
	active.expScale(h.early[:n], h.early[:n], 0, 1)
	active.expScale(h.late[:n], h.late[:n], 0, 1)
	Fill(h.whole[:h.KeyDim], h.early[n-1])
	for i := range n {
		active.scale(h.key(h.qs, i), h.key(h.q, i), h.early[i])
		active.scale(h.key(h.ks, i), h.key(h.k, i), h.early[i])
		active.scale(h.key(h.kt, i), h.key(h.k, i), h.late[i])
	}
}

// gapsFrom and gapsTo have, by channel, the sums of decays from the start of a token's sub-block up to the token, and from the
// next token up to the end of the sub-block.
func (h *scanHead) gapsFrom(i int) []float32 { return h.key(h.gaps, i) }
func (h *scanHead) gapsTo(i int) []float32   { return h.key(h.gaps[scanRows*h.kLd:], i) }

// decay returns the decays of the rows of the state.
func (h *scanHead) decay(i int) []float32 { return h.in.Decay[h.row(i)*h.Channels:][:h.Channels] }

// decayChannels computes the factors of a head whose channels decay differently. Sums only ever add decays, none of which is
// positive, so that they are accurate, however different they are.
func (h *scanHead) decayChannels() {
	n := h.chunk.n
	sum := h.whole[:h.KeyDim]
	clear(sum)
	for first := 0; first < n; first += scanBlock {
		end := min(n, first+scanBlock)
		for i := first; i < end; i++ {
			if i == first {
				copy(h.gapsFrom(i), h.decay(i))
			} else {
				active.add(h.gapsFrom(i), h.gapsFrom(i-1), h.decay(i))
			}
			active.add(h.key(h.early, i), sum, h.gapsFrom(i))
		}
		copy(sum, h.key(h.early, end-1))
		clear(h.gapsTo(end - 1))
		for i := end - 2; i >= first; i-- {
			active.add(h.gapsTo(i), h.gapsTo(i+1), h.decay(i+1))
		}
	}
	sum = h.key(h.left, 0)
	clear(sum)
	for first := (n - 1) / scanBlock * scanBlock; first >= 0; first -= scanBlock {
		end := min(n, first+scanBlock)
		for i := first; i < end; i++ {
			active.add(h.key(h.late, i), sum, h.gapsTo(i))
		}
		active.add(sum, sum, h.gapsFrom(end-1))
	}
	active.expScale(h.whole[:h.KeyDim], h.whole[:h.KeyDim], 0, 1)
	for i := range n {
		early, late := h.key(h.early, i), h.key(h.late, i)
		active.expScale(early, early, 0, 1)
		active.expScale(late, late, 0, 1)
		active.mul(h.key(h.qs, i), h.key(h.q, i), early)
		active.mul(h.key(h.ks, i), h.key(h.k, i), early)
		active.mul(h.key(h.kt, i), h.key(h.k, i), late)
	}
}

// multiply computes c [+]= a b of f32 matrices with the micro-kernel. b has bLd elements from one row to the next, and room for
// whole vectors.
func (h *scanHead) multiply(rows, cols, k int, a []float32, aRow, aK int, b []float32, bLd int, c []float32, cLd int, accumulate bool) {
	if rows > 0 && k > 0 {
		h.s.multiply(1, rows, cols, k, a, aRow, aK, b, bLd, c, cLd, accumulate)
	}
}

// strips packs the transpose of a matrix of n rows of k elements for multiplyStrips, into buffer 1.
func (h *scanHead) strips(b []float32, bLd, n, k int) []float32 {
	nr := active.nr
	out := h.s.floats(1, roundUp(n, nr)*k)
	for i := 0; i < n; i += nr {
		own := min(nr, n-i)
		strip := out[i*k : (i+nr)*k]
		if own < nr {
			clear(strip)
		}
		active.packT(strip, b[i*bLd:], bLd, own, k)
	}
	return out
}

// multiplyStrips computes c [+]= a b^T, where b is packed by strips. If lower is set, only the rows from that of its first column
// on are computed of each strip.
func (h *scanHead) multiplyStrips(rows, cols, k int, a []float32, aLd int, strips []float32, c []float32, cLd int, accumulate, lower bool) {
	nr := active.nr
	for j := 0; j < cols; j += nr {
		first := 0
		if lower {
			first = j
		}
		if first < rows {
			h.multiply(rows-first, min(nr, cols-j), k, a[first*aLd:], aLd, 1, strips[j*k:], nr, c[first*cLd+j:], cLd, accumulate)
		}
	}
}

// scores computes p, if wanted, and a.
func (h *scanHead) scores(queries bool) {
	n := h.chunk.n
	if h.Channels == 1 {
		strips := h.strips(h.k, h.kLd, n, h.KeyDim)
		if queries {
			h.multiplyStrips(n, n, h.KeyDim, h.q, h.kLd, strips, h.p, scanRows, false, true)
		}
		if h.Delta {
			h.multiplyStrips(n, n, h.KeyDim, h.k, h.kLd, strips, h.a, scanRows, false, true)
		}
	} else {
		h.eachBlock(func(first, rows, cols int, pairs bool) {
			strips := h.strips(h.r, h.kLd, cols, h.KeyDim)
			if queries {
				h.multiplyStrips(rows, cols, h.KeyDim, h.lq, h.kLd, strips, h.p[first*scanRows:], scanRows, false, false)
			}
			if h.Delta {
				h.multiplyStrips(rows, cols, h.KeyDim, h.lk, h.kLd, strips, h.a[first*scanRows:], scanRows, false, false)
			}
			if pairs {
				h.eachPair(first, rows, func(i, j int, kept, part []float32) {
					active.mul(part, kept, h.key(h.k, j))
					h.p[i*scanRows+j] = active.dot(h.key(h.q, i), part)
					h.a[i*scanRows+j] = active.dot(h.key(h.k, i), part)
				})
			}
		})
	}
	for i := range n {
		h.mask(h.p, i, i+1, 1)
		if h.Delta {
			h.mask(h.a, i, i, -h.beta[i])
		}
	}
}

// mask multiplies the first elements of a row of scores by a factor, and by those of the gaps if a head has one decay, and sets the others to 0.
func (h *scanHead) mask(x []float32, i, cols int, factor float32) {
	row := x[i*scanRows:][:h.chunk.n]
	if h.Channels == 1 {
		active.mul(row[:cols], row[:cols], h.gaps[i*scanRows:])
	}
	if factor != 1 {
		active.scale(row[:cols], row[:cols], factor)
	}
	clear(row[cols:])
}

// eachBlock visits the sub-blocks of a head whose channels decay differently: the first row, and the numbers of rows and of
// earlier and own keys. It sets lq, lk and r, whose products are the scores, and their factors left and right. If pairs is set,
// the sub-block decays so much that own keys are missing among these.
func (h *scanHead) eachBlock(visit func(first, rows, cols int, pairs bool)) {
	n := h.chunk.n
	for first := 0; first < n; first += scanBlock {
		rows := min(scanBlock, n-first)
		for i := range rows {
			left := h.key(h.left, i)
			active.expScale(left, h.gapsFrom(first+i), 0, 1)
			active.mul(h.key(h.lq, i), h.key(h.q, first+i), left)
			active.mul(h.key(h.lk, i), h.key(h.k, first+i), left)
		}
		// Of earlier sub-blocks, the decay up to the start of this one; whole holds that of the sub-blocks between.
		between := h.key(h.right, scanRows-1)
		clear(between)
		for j := first - 1; j >= 0; j-- {
			active.add(h.key(h.r, j), h.gapsTo(j), between)
			if j%scanBlock == 0 {
				active.add(between, between, h.gapsFrom(j+scanBlock-1))
			}
		}
		cols, pairs := first, true
		if active.max(negated(between, h.gapsFrom(first+rows-1))) < mildDecay {
			pairs, cols = false, first+rows
			for j := first; j < cols; j++ {
				negated(h.key(h.r, j), h.gapsFrom(j))
			}
		}
		for j := range cols {
			active.expScale(h.key(h.right, j), h.key(h.r, j), 0, 1)
			active.mul(h.key(h.r, j), h.key(h.k, j), h.key(h.right, j))
		}
		visit(first, rows, cols, pairs)
	}
}

func negated(dst, x []float32) []float32 {
	active.scale(dst, x[:len(dst)], -1)
	return dst
}

// eachPair visits the tokens j up to i of a sub-block, with the factors that are kept from j to i and room for as many numbers.
func (h *scanHead) eachPair(first, rows int, visit func(i, j int, kept, room []float32)) {
	buf := h.s.floats(3, 3*h.kLd)
	sum, kept, room := buf[:h.KeyDim], buf[h.kLd:][:h.KeyDim], buf[2*h.kLd:][:h.KeyDim]
	for j := first; j < first+rows; j++ {
		clear(sum)
		for i := j; i < first+rows; i++ {
			if i > j {
				active.add(sum, sum, h.decay(i))
			}
			active.expScale(kept, sum, 0, 1)
			visit(i, j, kept, room)
		}
	}
}

// values computes e, given the state before the chunk.
func (h *scanHead) values(state []float32) {
	n := h.chunk.n
	if !h.Delta {
		for i := range n {
			active.scale(h.value(h.e, i), h.value(h.v, i), h.beta[i])
		}
		return
	}
	h.multiply(n, h.ValueDim, h.KeyDim, h.ks, h.kLd, 1, state, h.vLd, h.e, h.vLd, false)
	for i := range n {
		e := h.value(h.e, i)
		active.scale(e, e, -h.beta[i])
		active.axpy(e, h.value(h.v, i), h.beta[i])
	}
	for first := 0; first < n; first += scanBlock {
		end := min(n, first+scanBlock)
		h.multiply(end-first, h.ValueDim, first, h.a[first*scanRows:], scanRows, 1, h.e, h.vLd, h.e[first*h.vLd:], h.vLd, true)
		for i := first + 1; i < end; i++ {
			for j := first; j < i; j++ {
				active.axpy(h.value(h.e, i), h.value(h.e, j), h.a[i*scanRows+j])
			}
		}
	}
}

// output computes the rows of o.
func (h *scanHead) output(o Mat, state []float32) {
	n, out := h.chunk.n, h.s.floats(3, scanRows*h.vLd)
	h.multiply(n, h.ValueDim, h.KeyDim, h.qs, h.kLd, 1, state, h.vLd, out, h.vLd, false)
	const half = scanRows / 2
	h.multiply(min(n, half), h.ValueDim, min(n, half), h.p, scanRows, 1, h.e, h.vLd, out, h.vLd, true)
	if n > half {
		h.multiply(n-half, h.ValueDim, n, h.p[half*scanRows:], scanRows, 1, h.e, h.vLd, out[half*h.vLd:], h.vLd, true)
	}
	h.rows(o, h.own*h.ValueDim).store(out, h.vLd, n, h.ValueDim)
}

// advance turns the state before the chunk into that after it.
func (h *scanHead) advance(state []float32) {
	for c, factor := range h.whole[:h.KeyDim] {
		row := h.value(state, c)
		active.scale(row, row, factor)
	}
	h.multiply(h.KeyDim, h.ValueDim, h.chunk.n, h.kt, 1, h.kLd, h.e, h.vLd, state, h.vLd, true)
}
