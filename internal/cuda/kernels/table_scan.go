package kernels

// Sizes of the kernels in scan.cu: tokens of a chunk and of a sub-block of it, and of a segment, for which a block keeps all states.
const (
	scanRows, scanSub = 64, 16
	scanSegment       = 1024
)

// scanShape holds the sizes of a scan.
type scanShape struct {
	tokens, batch, heads, shared, keyDim, valueDim int64
	args                                           []any
}

func (b *binder) scanShape() scanShape {
	rows, _ := b.shape("q")
	s := scanShape{batch: b.int("batch"), heads: b.int("heads"), shared: b.int("shared"), keyDim: b.int("key_dim"), valueDim: b.int("value_dim")}
	s.tokens = rows / s.batch
	s.args = []any{s.tokens, s.batch, s.heads, s.shared, s.keyDim, s.valueDim, b.int("channels"), b.int("delta"), b.float("norm"), b.float("scale")}
	return s
}

func (s *scanShape) all() int64   { return s.heads * s.shared * s.batch }
func (s *scanShape) state() int64 { return s.keyDim * s.valueDim }

// words returns the numbers of floats that a block needs for some columns of v, and for the gradients of a head; scan.cu computes the same.
func (s *scanShape) words(columns int64) int64 {
	return 9*scanRows*s.keyDim + 2*scanSub*s.keyDim + 2*scanRows*columns + 2*scanRows*scanRows + scanRows + s.keyDim + 2*scanRows
}

func (s *scanShape) gradWords() int64 {
	return s.words(s.valueDim) + (scanSegment/scanRows+1)*s.state() + 2*scanRows*s.valueDim + 2*scanRows*scanRows + 3*scanRows*s.keyDim + s.keyDim + scanRows
}

// columns returns the number of columns of v for each block: all of a head, or as few as a tile has if there are few heads.
func (s *scanShape) columns() int64 {
	const enough = 132 // blocks for the largest GPU
	if s.all() >= enough || s.valueDim <= scanRows {
		return s.valueDim
	}
	return scanRows
}

// run launches the scan of the tokens up to end, which computes o and next, or saves the states of segments.
func (b *binder) run(s scanShape, o, next, saved any, end int64) {
	columns := s.columns()
	slices := ceil(s.valueDim, columns)
	work := b.reserve(4 * s.all() * slices * (s.words(columns) + (s.keyDim+scanRows)*columns))
	args := append([]any{o, next, saved, "q", "k", "v", "decay", "beta", "state", "positions", work, columns, end}, s.args...)
	b.launch("scan_"+b.types("q"), [3]int64{s.heads * s.shared * slices, s.batch, 1}, args...)
}

func scan(b *binder) {
	s := b.scanShape()
	b.run(s, "o", "next", absent, s.tokens)
}

// scanGrad saves the state before each segment, and then goes through the segments from the last to the first.
func scanGrad(b *binder) {
	s := b.scanShape()
	segments := ceil(s.tokens, scanSegment)
	saved := b.reserve(4 * s.all() * segments * s.state())
	b.run(s, absent, absent, saved, (segments-1)*scanSegment)
	bytes := int64(b.in.Arg("dstate").Bytes())
	if b.has("dnext") {
		b.launch("cast_ff", spread(bytes/4, 8), "dstate", "dnext", bytes/4).Source = "elementwise.cu"
	} else {
		b.launch("fill", spread(bytes, 16), "dstate", bytes, int64(0)).Source = "elementwise.cu"
	}
	dq, dk := b.reserve(4*s.all()*scanSegment*s.keyDim), b.reserve(4*s.all()*scanSegment*s.keyDim)
	work := b.reserve(4 * s.all() * s.gradWords())
	for segment := (segments - 1) * scanSegment; segment >= 0; segment -= scanSegment {
		args := append([]any{dq, dk, "dv", "ddecay", "dbeta", "dstate", saved, "do", "q", "k", "v", "decay", "beta", "state", "positions", work, segment}, s.args...)
		b.launch("scan_grad_"+b.types("q"), [3]int64{s.heads * s.shared, s.batch, 1}, args...)
		tokens := min(scanSegment, s.tokens-segment)
		for _, x := range []struct {
			to, from string
			sums     workspace
			scale    float64
		}{{"dq", "q", dq, b.float("scale")}, {"dk", "k", dk, 1}} {
			b.launch("scan_finish_"+b.types("q"), rows(ceil(tokens*s.batch*s.heads, 8)), x.to, x.from, x.sums, segment, tokens, s.batch, s.heads, s.shared, s.keyDim,
				b.float("norm"), x.scale)
		}
	}
}

// convShape returns the operands and sizes that convolutions and their gradients share.
func (b *binder) convShape() (tokens int64, args []any) {
	rows, cols := b.shape("x")
	tokens = rows / b.int("batch")
	return tokens, []any{"x", "w", "bias", "tail", "positions", tokens, b.int("width"), b.int("batch"), cols}
}

func conv(b *binder) {
	_, args := b.convShape()
	b.launch("conv_"+b.types("x"), spread(b.elements("x")+b.elements("next"), 2), append([]any{"y", "next"}, args...)...)
}

func convGrad(b *binder) {
	tokens, args := b.convShape()
	b.launch("conv_grad_"+b.types("x"), spread(b.elements("x")+b.elements("dtail"), 2), append([]any{"dx", "dtail", "dy", "dnext"}, args...)...)
	if !b.has("dw") && !b.has("dbias") {
		return
	}
	_, cols := b.shape("x")
	part := max(64, ceil(tokens, 256))
	parts := ceil(tokens, part)
	sums := b.reserve(4 * (b.int("width") + 1) * parts * cols)
	b.launch("conv_sums_"+b.types("x"), [3]int64{ceil(cols, threads), parts, 1}, append([]any{sums, "dy", part}, args...)...)
	b.launch("conv_join", rows(ceil(cols, threads)), "dw", "dbias", sums, parts, b.int("width"), cols, b.int("accumulate"))
}

// half is 1 if an operand is bf16, and 0 if it is f32.
func (b *binder) half(name string) int64 {
	if b.types(name) == "b" {
		return 1
	}
	return 0
}

// decayShape returns the operands and sizes that decays and their gradients share.
func (b *binder) decayShape() (rows, cols int64, args []any) {
	rows, cols = b.shape("x")
	return rows, cols, []any{"x", "rate", "bias", b.half("rate"), b.half("bias"), rows, cols, b.int("head_dim"), b.float("least")}
}

func decay(b *binder) {
	rows, cols, args := b.decayShape()
	b.launch("decay_"+b.types("x"), spread(rows*cols, 2), append([]any{"y", "step"}, args...)...)
}

// parts divides rows into parts, of which each column is summed by a thread.
func parts(rows int64) (part, number int64) {
	part = max(64, ceil(rows, 256))
	return part, ceil(rows, part)
}

func decayGrad(b *binder) {
	r, cols, args := b.decayShape()
	part, parts := parts(r)
	sums := b.reserve(8 * parts * cols)
	b.launch("decay_grad_"+b.types("x"), [3]int64{ceil(cols, threads), parts, 1}, append([]any{"dx", sums, "dy", "dstep", part}, args...)...)
	if b.has("drate") || b.has("dbias") {
		b.launch("decay_join", rows(ceil(cols, threads)), "drate", "dbias", sums, parts, cols, b.int("head_dim"), b.int("accumulate"))
	}
}

// scaledShape returns the operands and sizes that scale_columns and its gradient share.
func (b *binder) scaledShape() (rows, cols int64, args []any) {
	rows, cols = b.shape("x")
	return rows, cols, []any{"x", "factor", b.half("factor"), rows, cols, b.int("head_dim")}
}

func scaleColumns(b *binder) {
	rows, cols, args := b.scaledShape()
	b.launch("scale_columns_"+b.types("x"), spread(rows*cols, 2), append([]any{"y"}, args...)...)
}

func scaleColumnsGrad(b *binder) {
	r, cols, args := b.scaledShape()
	part, parts := parts(r)
	sums := b.reserve(4 * parts * cols)
	b.launch("scale_columns_grad_"+b.types("x"), [3]int64{ceil(cols, threads), parts, 1}, append([]any{"dx", sums, "dy", part}, args...)...)
	if b.has("dfactor") {
		b.launch("decay_join", rows(ceil(cols, threads)), "dfactor", int64(0), sums, parts, cols, b.int("head_dim"), b.int("accumulate"))
	}
}
