package simd

// Conv is a convolution of each column of x over the last Width tokens of a document, followed by silu. Row t*Batch+b is token t
// of sequence b. A token whose value in Positions, if they are not nil, is p depends on p tokens before it at most. Tail holds the
// Width tokens before the first, in the same order; without one they are 0.
type Conv struct {
	Tokens, Width, Batch, Cols int
	Positions                  []int32
	W                          Mat // [Cols, Width], the newest token last
	X                          Mat
	Tail                       Mat       // neither slice is set: none
	Bias                       []float32 // nil: none
}

// ConvGrads are the gradients of a convolution. DNext, DW and DBias may be nil.
type ConvGrads struct {
	DY           Mat
	DNext, DTail []float32
	DX           Mat
	DW, DBias    []float32
	Add          bool // to DW and DBias
}

// convCols is the number of columns that are handled at once.
const convCols = 256

// convPart is the work on some columns of a sequence.
type convPart struct {
	*Conv
	seq, first, cols  int
	weights           [][]float32 // by age of the token
	bias, ones        []float32
	row, product, pre []float32
}

// each runs f for parts of the columns of every sequence.
func (c *Conv) each(p *Pool, f func(s *scratch, x *convPart)) {
	blocks := ceilDiv(c.Cols, convCols)
	p.Run(c.Batch*blocks, func(part int) {
		s := takeScratch()
		defer s.release()
		x := &convPart{Conv: c, seq: part / blocks, first: part % blocks * convCols}
		x.cols = min(convCols, c.Cols-x.first)
		room := s.floats(0, (5+2*c.Width)*convCols)
		cut := func(n int) []float32 {
			out := room[:n:n]
			room = room[n:]
			return out
		}
		x.row, x.product, x.pre, x.bias, x.ones = cut(x.cols), cut(x.cols), cut(x.cols), cut(x.cols), cut(x.cols)
		clear(x.bias)
		if c.Bias != nil {
			copy(x.bias, c.Bias[x.first:])
		}
		Fill(x.ones, 1)
		w := cut(x.cols * c.Width)
		c.W.at(x.first, 0).load(w, c.Width, x.cols, c.Width)
		for j := range c.Width {
			own := cut(x.cols)
			for i := range own {
				own[i] = w[i*c.Width+c.Width-1-j]
			}
			x.weights = append(x.weights, own)
		}
		f(s, x)
	})
}

// at returns the elements of a token, in place or converted into row, or nil if they are 0 because there is no tail. Tokens before
// the first have negative numbers.
func (x *convPart) at(t int) []float32 {
	m, row := x.X, t*x.Batch+x.seq
	if t < 0 {
		if m = x.Tail; m.F32 == nil && m.BF16 == nil {
			return nil
		}
		row += x.Width * x.Batch
	}
	return m.at(row, x.first).row(0, x.cols, x.row)
}

// seen returns the number of tokens on which a token depends.
func (x *convPart) seen(t int) int {
	if x.Positions == nil {
		return x.Width
	}
	return min(x.Width, 1+int(x.Positions[t*x.Batch+x.seq]))
}

// sum computes what silu is applied to.
func (x *convPart) sum(t int) []float32 {
	copy(x.pre, x.bias)
	for j := range x.seen(t) {
		if row := x.at(t - j); row != nil {
			active.mul(x.product, row, x.weights[j])
			active.add(x.pre, x.pre, x.product)
		}
	}
	return x.pre
}

// Forward computes y and the rows that the tokens after the last need.
func (c *Conv) Forward(p *Pool, y, next Mat) {
	c.each(p, func(_ *scratch, x *convPart) {
		for t := range c.Tokens {
			pre := x.sum(t)
			active.swiglu(pre, pre, x.ones)
			y.at(t*c.Batch+x.seq, x.first).store(pre, x.cols, 1, x.cols)
		}
		for i := range c.Width {
			row := x.at(c.Tokens - c.Width + i)
			if row == nil {
				row = x.pre
				clear(row)
			}
			next.at(i*c.Batch+x.seq, x.first).store(row, x.cols, 1, x.cols)
		}
	})
}

// Backward computes the gradients of a convolution. Sums over tokens run from the last to the first, sequence by sequence.
func (c *Conv) Backward(p *Pool, g ConvGrads) {
	sums := make([]float32, c.Batch*(c.Width+1)*c.Cols) // of each sequence: for the weights by age, and for the bias
	c.each(p, func(s *scratch, x *convPart) {
		own := s.floats(1, (c.Width+2)*x.cols)
		b := &convBackward{convPart: x, dx: own[:x.cols], dup: own[x.cols : 2*x.cols], later: own[2*x.cols:],
			sums: sums[x.seq*(c.Width+1)*c.Cols:]}
		for t := c.Tokens - 1; t >= -c.Width; t-- {
			b.token(g, t)
		}
	})
	for seq := range c.Batch {
		own := sums[seq*(c.Width+1)*c.Cols:]
		for i := range g.DW {
			put(&g.DW[i], own[(c.Width-1-i%c.Width)*c.Cols+i/c.Width], g.Add || seq > 0)
		}
		for i := range g.DBias {
			put(&g.DBias[i], own[c.Width*c.Cols+i], g.Add || seq > 0)
		}
	}
}

func put(to *float32, x float32, add bool) {
	if add {
		x += *to
	}
	*to = x
}

// convBackward is the work on the gradients of some columns of a sequence.
type convBackward struct {
	*convPart
	dx, dup, sums []float32
	later         []float32 // gradients of what silu was applied to, of the last Width tokens
}

func (b *convBackward) slot(t int) []float32 { return b.later[t%b.Width*b.cols:][:b.cols] }

// token computes the gradient of a token's elements. Those after it are done.
func (b *convBackward) token(g ConvGrads, t int) {
	clear(b.dx)
	if m := t - b.Tokens + b.Width; m >= 0 && g.DNext != nil {
		copy(b.dx, g.DNext[(m*b.Batch+b.seq)*b.Cols+b.first:])
	}
	if t >= 0 {
		pre := b.sum(t)
		active.swigluBackward(b.slot(t), b.dup, pre, b.ones, g.DY.at(t*b.Batch+b.seq, b.first).row(0, b.cols, b.row))
		b.addTo(b.Width, b.slot(t))
		for j := range b.seen(t) {
			if row := b.at(t - j); row != nil {
				active.mul(b.product, b.slot(t), row)
				b.addTo(j, b.product)
			}
		}
	}
	for j := max(0, -t); j < b.Width && t+j < b.Tokens; j++ {
		if b.seen(t+j) > j {
			active.mul(b.product, b.slot(t+j), b.weights[j])
			active.add(b.dx, b.dx, b.product)
		}
	}
	if t >= 0 {
		g.DX.at(t*b.Batch+b.seq, b.first).store(b.dx, b.cols, 1, b.cols)
	} else {
		copy(g.DTail[((b.Width+t)*b.Batch+b.seq)*b.Cols+b.first:], b.dx)
	}
}

// addTo adds to a sum over tokens.
func (b *convBackward) addTo(sum int, x []float32) {
	to := b.sums[sum*b.Cols+b.first:][:b.cols]
	active.add(to, to, x)
}
