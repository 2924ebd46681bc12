package simd

// Backward computes the gradients of a scan. It first computes the states before all chunks anew, and then goes through the
// chunks from the last to the first. The heads of v that share q and k follow each other, so that their gradients are added in
// order.
func (a Scan) Backward(p *Pool, g ScanGrads, in ScanOperands) {
	p.Run(a.Batch*a.Heads, func(part int) {
		s := takeScratch()
		defer s.release()
		seq, group := part/a.Heads, part%a.Heads
		chunks := a.chunks(seq)
		for i := range a.Shared {
			b := a.backward(s, in, seq, group*a.Shared+i)
			b.recompute(chunks)
			b.gradients(g, chunks)
			for _, c := range chunks {
				if i == a.Shared-1 {
					b.finish(g, c)
				}
			}
		}
	})
}

// scanBackward is the work on the gradients of a head of v in one sequence.
type scanBackward struct {
	*scanHead
	states     []float32 // before each chunk that does not begin a document, and one that is 0
	ds         []float32 // the gradient of the state after the chunk, later of that before it
	dq, dk     []float32 // gradients of q and k once they are normalised, by token of the sequence, of all heads of v so far
	dout, y    []float32 // gradients of o, and of what would be added to the state if earlier tokens of the chunk changed nothing
	dp, da     []float32 // gradients of scores
	kq, kr, kc []float32 // dq of this head; dk divided by beta as the later of two tokens; dk as the earlier one
	ddecay     []float32 // of the logarithm of what is left at the end of the chunk, by channel
	diagonal   []float32 // gradients of the scores of tokens with themselves, which decays do not change, and which dp lacks
}

func (a Scan) backward(s *scratch, in ScanOperands, seq, own int) *scanBackward {
	b := &scanBackward{scanHead: a.head(s, in, seq, own)}
	kn, vn, pn, sn := scanRows*b.kLd, scanRows*b.vLd, scanRows*scanRows, a.KeyDim*b.vLd
	room := s.floats(4, 3*kn+2*vn+2*pn+sn+b.kLd+scanRows)
	cut := func(n int) []float32 {
		out := room[:n:n]
		room = room[n:]
		return out
	}
	b.ds, b.dout, b.y, b.dp, b.da = cut(sn), cut(vn), cut(vn), cut(pn), cut(pn)
	b.kq, b.kr, b.kc, b.ddecay, b.diagonal = cut(kn), cut(kn), cut(kn), cut(b.kLd), cut(scanRows)
	sums := s.floats(5, 2*a.Tokens*a.KeyDim)
	b.dq, b.dk = sums[:a.Tokens*a.KeyDim], sums[a.Tokens*a.KeyDim:]
	if own%a.Shared == 0 {
		clear(sums)
	}
	return b
}

// recompute computes the states before all chunks.
func (b *scanBackward) recompute(chunks []scanChunk) {
	size, goingOn := b.KeyDim*b.vLd, 0
	for _, c := range chunks {
		if !c.fresh {
			goingOn++
		}
	}
	b.states = b.s.floats(6, (goingOn+1)*size)
	clear(b.states[goingOn*size:])
	state := b.start()
	goingOn = 0
	for i, c := range chunks {
		if c.fresh {
			clear(state)
		} else {
			copy(b.states[goingOn*size:], state)
			goingOn++
		}
		if i < len(chunks)-1 && !chunks[i+1].fresh {
			b.load(c)
			b.scores(false)
			b.values(state)
			b.advance(state)
		}
	}
}

// gradients computes the gradients of all chunks, except that it only adds to those of q and k.
func (b *scanBackward) gradients(g ScanGrads, chunks []scanChunk) {
	size := b.KeyDim * b.vLd
	at := (b.seq*b.Heads*b.Shared + b.own) * b.size()
	clear(b.ds)
	if g.DNext != nil {
		active.copy2D(b.ds, b.vLd, g.DNext[at:], b.ValueDim, b.KeyDim, b.ValueDim)
	}
	zero := len(b.states)/size - 1
	goingOn := zero
	for i := len(chunks) - 1; i >= 0; i-- {
		state := b.states[zero*size:]
		if !chunks[i].fresh {
			goingOn--
			state = b.states[goingOn*size:][:size]
		}
		b.load(chunks[i])
		b.rows(g.DOut, b.own*b.ValueDim).load(b.dout, b.vLd, chunks[i].n, b.ValueDim)
		b.scores(true)
		b.values(state)
		b.added(g)
		b.keys(state)
		b.stateGrad(state)
		b.store(g)
	}
	b.keep(g.DState[at:], b.ds)
}

// added computes y, and the gradients of v and of beta as its factor.
func (b *scanBackward) added(g ScanGrads) {
	n := b.chunk.n
	b.multiply(n, b.ValueDim, b.KeyDim, b.kt, b.kLd, 1, b.ds, b.vLd, b.y, b.vLd, false)
	b.multiply(n, b.ValueDim, n, b.p, 1, scanRows, b.dout, b.vLd, b.y, b.vLd, true)
	if b.Delta {
		b.solve()
	}
	dv := b.s.floats(3, scanRows*b.vLd)
	for i := range n {
		active.scale(b.value(dv, i), b.value(b.y, i), b.beta[i])
		g.DBeta[b.row(i)] = active.dot(b.value(b.y, i), b.value(b.v, i))
	}
	b.rows(g.DV, b.own*b.ValueDim).store(dv, b.vLd, n, b.ValueDim)
}

// solve turns the gradient of e into y, from the last token to the first: that of a token is also that of all later ones, times
// the scores.
func (b *scanBackward) solve() {
	n := b.chunk.n
	for first := (n - 1) / scanBlock * scanBlock; first >= 0; first -= scanBlock {
		end := min(n, first+scanBlock)
		if end < n {
			b.multiply(end-first, b.ValueDim, n-end, b.a[end*scanRows+first:], 1, scanRows, b.y[end*b.vLd:], b.vLd, b.y[first*b.vLd:], b.vLd, true)
		}
		for i := end - 2; i >= first; i-- {
			for j := i + 1; j < end; j++ {
				active.axpy(b.value(b.y, i), b.value(b.y, j), b.a[j*scanRows+i])
			}
		}
	}
}

// keys computes the gradients of q and k, and of decays.
func (b *scanBackward) keys(state []float32) {
	n := b.chunk.n
	strips := b.strips(state, b.vLd, b.KeyDim, b.ValueDim)
	b.multiplyStrips(n, b.KeyDim, b.ValueDim, b.dout, b.vLd, strips, b.kq, b.kLd, false, false)
	if b.Delta {
		b.multiplyStrips(n, b.KeyDim, b.ValueDim, b.y, b.vLd, strips, b.kr, b.kLd, false, false)
	}
	strips = b.strips(b.ds, b.vLd, b.KeyDim, b.ValueDim)
	b.multiplyStrips(n, b.KeyDim, b.ValueDim, b.e, b.vLd, strips, b.kc, b.kLd, false, false)
	last := b.ddecay[:b.KeyDim]
	clear(last)
	b.ofState(last, state)
	for i := range n {
		b.decayed(b.key(b.kq, i), b.early, i, 1)
		b.decayed(b.key(b.kc, i), b.late, i, 1)
		if b.Delta {
			b.decayed(b.key(b.kr, i), b.early, i, -1)
		} else {
			clear(b.key(b.kr, i))
		}
		product := b.key(b.lq, 0)
		active.mul(product, b.key(b.kc, i), b.key(b.k, i))
		active.add(last, last, product)
	}
	strips = b.strips(b.e, b.vLd, n, b.ValueDim)
	b.multiplyStrips(n, n, b.ValueDim, b.dout, b.vLd, strips, b.dp, scanRows, false, true)
	if b.Delta {
		b.multiplyStrips(n, n, b.ValueDim, b.y, b.vLd, strips, b.da, scanRows, false, true)
	}
	for i := range n {
		b.diagonal[i] = b.dp[i*scanRows+i]
		b.mask(b.dp, i, i, 1)
		if b.Delta {
			b.mask(b.da, i, i, -1)
		}
	}
	if b.Channels == 1 {
		b.multiply(n, b.KeyDim, n, b.dp, scanRows, 1, b.k, b.kLd, b.kq, b.kLd, true)
		b.multiply(n, b.KeyDim, n, b.dp, 1, scanRows, b.q, b.kLd, b.kc, b.kLd, true)
		if b.Delta {
			b.multiply(n, b.KeyDim, n, b.da, scanRows, 1, b.k, b.kLd, b.kr, b.kLd, true)
			b.multiply(n, b.KeyDim, n, b.scaledByBeta(), 1, scanRows, b.k, b.kLd, b.kc, b.kLd, true)
		}
		return
	}
	b.channels()
}

// scaledByBeta multiplies the rows of da by beta, and returns it.
func (b *scanBackward) scaledByBeta() []float32 {
	for i := range b.chunk.n {
		row := b.da[i*scanRows:][:b.chunk.n]
		active.scale(row, row, b.beta[i])
	}
	return b.da
}

// decayed multiplies a row by a token's factors, early or late, and by a sign.
func (b *scanBackward) decayed(row, factors []float32, i int, sign float32) {
	if b.Channels == 1 {
		active.scale(row, row, sign*factors[i])
		return
	}
	active.mul(row, row, b.key(factors, i))
	if sign != 1 {
		active.scale(row, row, sign)
	}
}

// ofState adds, for each row of the state before the chunk, its inner product with the gradient of the same row after it, times
// what is left of it.
func (b *scanBackward) ofState(sums, state []float32) {
	for c := range sums {
		sums[c] += b.whole[c] * active.dot(b.value(state, c), b.value(b.ds, c))
	}
}

// channels adds the gradients by scores of a head whose channels decay differently, sub-block by sub-block.
func (b *scanBackward) channels() {
	own := b.s.floats(3, (2*scanBlock+scanRows)*b.kLd)
	// eachPair uses the start of buffer 3, but only once own is no longer needed.
	dq, dr, dk := own[:scanBlock*b.kLd], own[scanBlock*b.kLd:2*scanBlock*b.kLd], own[2*scanBlock*b.kLd:]
	b.eachBlock(func(first, rows, cols int, pairs bool) {
		dp, da := b.dp[first*scanRows:], b.da[first*scanRows:]
		if cols > 0 {
			b.multiply(rows, b.KeyDim, cols, dp, scanRows, 1, b.r, b.kLd, dq, b.kLd, false)
			b.multiply(cols, b.KeyDim, rows, dp, 1, scanRows, b.lq, b.kLd, dk, b.kLd, false)
			if b.Delta {
				b.multiply(rows, b.KeyDim, cols, da, scanRows, 1, b.r, b.kLd, dr, b.kLd, false)
			}
		}
		for i := range rows {
			for _, x := range []struct {
				sum, part []float32
				there     bool
			}{{b.key(b.kq, first+i), b.key(dq, i), cols > 0}, {b.key(b.kr, first+i), b.key(dr, i), cols > 0 && b.Delta}} {
				if x.there {
					active.mul(x.part, x.part, b.key(b.left, i))
					active.add(x.sum, x.sum, x.part)
				}
			}
			lk := b.key(b.lk, i)
			active.scale(lk, lk, b.beta[first+i])
		}
		if b.Delta && cols > 0 {
			b.multiply(cols, b.KeyDim, rows, da, 1, scanRows, b.lk, b.kLd, dk, b.kLd, true)
		}
		for j := range cols {
			part, sum := b.key(dk, j), b.key(b.kc, j)
			active.mul(part, part, b.key(b.right, j))
			active.add(sum, sum, part)
		}
		if pairs {
			b.pairs(first, rows)
		}
	})
}

// pairs adds the gradients by scores within a sub-block whose keys are not among those of its products.
func (b *scanBackward) pairs(first, rows int) {
	b.eachPair(first, rows, func(i, j int, kept, part []float32) {
		dp, da := b.dp[i*scanRows+j], float32(0)
		active.mul(part, kept, b.key(b.k, j))
		active.axpy(b.key(b.kq, i), part, dp)
		if b.Delta {
			da = b.da[i*scanRows+j]
			active.axpy(b.key(b.kr, i), part, da)
			active.mul(part, kept, b.key(b.k, i))
			active.axpy(b.key(b.kc, j), part, b.beta[i]*da)
		}
		active.mul(part, kept, b.key(b.q, i))
		active.axpy(b.key(b.kc, j), part, dp)
	})
}

// stateGrad turns the gradient of the state after the chunk into that of the state before it, which is 0 if a document begins.
func (b *scanBackward) stateGrad(state []float32) {
	if b.chunk.fresh {
		clear(b.ds)
		return
	}
	n := b.chunk.n
	for c, factor := range b.whole[:b.KeyDim] {
		row := b.value(b.ds, c)
		active.scale(row, row, factor)
	}
	b.multiply(b.KeyDim, b.ValueDim, n, b.qs, 1, b.kLd, b.dout, b.vLd, b.ds, b.vLd, true)
	if b.Delta {
		for i := range n {
			ks := b.key(b.ks, i)
			active.scale(ks, ks, -b.beta[i])
		}
		b.multiply(b.KeyDim, b.ValueDim, n, b.ks, 1, b.kLd, b.y, b.vLd, b.ds, b.vLd, true)
	}
}

// store adds the gradients of q and k to those of other heads, and stores those of beta and of decays. A token's decay changes
// the score of every pair of a later token and an earlier one: what it adds to a gradient at the later token, it takes away at
// the earlier one.
func (b *scanBackward) store(g ScanGrads) {
	n, at := b.chunk.n, b.chunk.first*b.KeyDim
	sum, product := b.key(b.lq, 0), b.key(b.lq, 1)
	clear(sum)
	total := 0.0
	for i := n - 1; i >= 0; i-- {
		q, k, kq, kr, kc := b.key(b.q, i), b.key(b.k, i), b.key(b.kq, i), b.key(b.kr, i), b.key(b.kc, i)
		row := b.row(i)
		g.DBeta[row] += active.dot(k, kr)
		active.scale(kr, kr, b.beta[i])
		if b.Channels == 1 {
			if i == n-1 {
				total = float64(active.sum(b.ddecay[:b.KeyDim]))
			}
			total += float64(active.dot(q, kq)) + float64(active.dot(k, kr)) - float64(active.dot(k, kc))
			g.DDecay[row] = float32(total)
		} else {
			if i == n-1 {
				copy(sum, b.ddecay)
			}
			active.mul(product, q, kq)
			active.add(sum, sum, product)
			active.mul(product, k, kr)
			active.add(sum, sum, product)
			active.mul(product, k, kc)
			active.axpy(sum, product, -1)
			copy(g.DDecay[row*b.Channels:][:b.Channels], sum)
		}
		dq, dk := b.dq[at+i*b.KeyDim:][:b.KeyDim], b.dk[at+i*b.KeyDim:][:b.KeyDim]
		active.add(dq, dq, kq)
		active.add(dk, dk, kr)
		active.add(dk, dk, kc)
		active.axpy(dq, k, b.diagonal[i])
		active.axpy(dk, q, b.diagonal[i])
	}
	if b.chunk.fresh || b.chunk.first == 0 && b.in.State == nil { // there is nothing to decay
		clear(g.DDecay[b.row(0)*b.Channels:][:b.Channels])
	}
}

// finish stores the gradients of q and k of a chunk.
func (b *scanBackward) finish(g ScanGrads, c scanChunk) {
	b.chunk = c
	column := b.own / b.Shared * b.KeyDim
	for _, x := range []struct {
		from, to Mat
		sums     []float32
		factor   float32
	}{{b.in.Q, g.DQ, b.dq, b.factor()}, {b.in.K, g.DK, b.dk, 1}} {
		b.rows(x.from, column).load(b.qs, b.kLd, c.n, b.KeyDim)
		for i := range c.n {
			own, sum := b.key(b.qs, i), x.sums[(c.first+i)*b.KeyDim:][:b.KeyDim]
			by := b.by(own, x.factor)
			inner := active.dot(own, sum) * by / x.factor // with the normalised vector
			active.scale(sum, sum, by)
			if b.Norm != 0 {
				active.axpy(sum, own, -inner*by*by/x.factor)
			}
		}
		b.rows(x.to, column).store(x.sums[c.first*b.KeyDim:], b.KeyDim, c.n, b.KeyDim)
	}
}
