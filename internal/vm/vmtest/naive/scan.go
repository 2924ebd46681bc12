package naive

import "math"

// Scan is linear attention, one token after another, as in the opcode.
type Scan struct {
	Batch, Heads, Shared, KeyDim, ValueDim, Channels int
	Delta                                            bool
	Norm, Scale                                      float64
	Positions                                        []int32
}

// ScanOperands are the operands of a scan, or their gradients. State is nil if it is 0.
type ScanOperands struct{ Q, K, V, Decay, Beta, State []float64 }

// scanHead is a head of v in one sequence.
type scanHead struct {
	Scan
	seq, own int
	state    []float64
}

// each visits the heads of v of all sequences, with their states.
func (s Scan) each(states []float64, visit func(h *scanHead)) {
	size, all := s.KeyDim*s.ValueDim, s.Heads*s.Shared
	for i := range s.Batch * all {
		h := &scanHead{Scan: s, seq: i / all, own: i % all, state: make([]float64, size)}
		if states != nil {
			copy(h.state, states[i*size:])
		}
		visit(h)
	}
}

// row returns the part of a row that belongs to the head, whose width is given, of `shared` heads of v each.
func (h *scanHead) row(x []float64, t, width, shared int) []float64 {
	return x[((t*h.Batch+h.seq)*(h.Heads*h.Shared/shared)+h.own/shared)*width:][:width]
}

// normal returns the vector that a head of q or k becomes, and the factor by which it has been multiplied.
func (h *scanHead) normal(x []float64, factor float64) (out []float64, by float64) {
	if by = factor; h.Norm != 0 {
		sum := h.Norm
		for _, v := range x {
			sum += v * v
		}
		by /= math.Sqrt(sum)
	}
	out = make([]float64, len(x))
	for i := range x {
		out[i] = x[i] * by
	}
	return out, by
}

// normalGrad adds the gradient of normal to dx.
func (h *scanHead) normalGrad(dx, dy, x []float64, factor float64) {
	y, by := h.normal(x, factor)
	inner := 0.0
	for i := range dy {
		inner += dy[i] * y[i]
	}
	for i := range dx {
		dx[i] += by * dy[i]
		if h.Norm != 0 {
			dx[i] -= inner * by * by / (factor * factor) * x[i]
		}
	}
}

func (h *scanHead) factor() float64 {
	if h.Scale == 0 {
		return 1
	}
	return h.Scale
}

// scanStep is what a token does to a state: the vectors that it multiplies, the state once it has decayed, and afterwards.
type scanStep struct {
	q, k, v, e, kept []float64 // kept has the factors of the state's rows
	decayed, after   []float64
	predicted        []float64 // what is subtracted from v
	beta             float64
}

func (h *scanHead) step(o ScanOperands, t int) *scanStep {
	x := &scanStep{v: h.row(o.V, t, h.ValueDim, 1), beta: h.row(o.Beta, t, 1, 1)[0]}
	x.q, _ = h.normal(h.row(o.Q, t, h.KeyDim, h.Shared), h.factor())
	x.k, _ = h.normal(h.row(o.K, t, h.KeyDim, h.Shared), 1)
	starts := h.Positions != nil && h.Positions[t*h.Batch+h.seq] == 0
	decay := h.row(o.Decay, t, h.Channels, 1)
	x.kept, x.decayed = make([]float64, h.KeyDim), make([]float64, len(h.state))
	for c := range x.kept {
		if x.kept[c] = math.Exp(decay[c%h.Channels]); starts {
			x.kept[c] = 0
		}
		for j := range h.ValueDim {
			x.decayed[c*h.ValueDim+j] = x.kept[c] * h.state[c*h.ValueDim+j]
		}
	}
	x.predicted, x.e = make([]float64, h.ValueDim), make([]float64, h.ValueDim)
	x.after = append([]float64(nil), x.decayed...)
	for j := range h.ValueDim {
		for c := range h.KeyDim {
			if h.Delta {
				x.predicted[j] += x.decayed[c*h.ValueDim+j] * x.k[c]
			}
		}
		x.e[j] = x.beta * (x.v[j] - x.predicted[j])
		for c := range h.KeyDim {
			x.after[c*h.ValueDim+j] += x.k[c] * x.e[j]
		}
	}
	h.state = x.after
	return x
}

// Run returns the results of a scan.
func (s Scan) Run(o ScanOperands) (out, next []float64) {
	out = make([]float64, len(o.V))
	s.each(o.State, func(h *scanHead) {
		for t := range len(o.Beta) / (s.Batch * s.Heads * s.Shared) {
			x := h.step(o, t)
			to := h.row(out, t, s.ValueDim, 1)
			for i, v := range x.after {
				to[i%s.ValueDim] += v * x.q[i/s.ValueDim]
			}
		}
		next = append(next, h.state...)
	})
	return out, next
}

// Grad returns the gradients of a scan's operands, given those of its results. The gradient of the state is that before the
// first token, even if the state is nil.
func (s Scan) Grad(o ScanOperands, dout, dnext []float64) ScanOperands {
	d := ScanOperands{Q: make([]float64, len(o.Q)), K: make([]float64, len(o.K)), V: make([]float64, len(o.V)), Decay: make([]float64, len(o.Decay)), Beta: make([]float64, len(o.Beta))}
	s.each(o.State, func(h *scanHead) {
		var steps []*scanStep
		for t := range len(o.Beta) / (s.Batch * s.Heads * s.Shared) {
			steps = append(steps, h.step(o, t))
		}
		ds := make([]float64, s.KeyDim*s.ValueDim)
		if dnext != nil {
			copy(ds, dnext[(h.seq*s.Heads*s.Shared+h.own)*len(ds):])
		}
		for t := len(steps) - 1; t >= 0; t-- {
			h.back(steps[t], t, o, d, h.row(dout, t, s.ValueDim, 1), ds)
		}
		d.State = append(d.State, ds...)
	})
	return d
}

// back adds the gradients of one token, and turns the gradient of the state after it into that of the state before it.
func (h *scanHead) back(x *scanStep, t int, o, d ScanOperands, dout, ds []float64) {
	dq, dk, de := make([]float64, h.KeyDim), make([]float64, h.KeyDim), make([]float64, h.ValueDim)
	for i := range ds {
		c, j := i/h.ValueDim, i%h.ValueDim
		ds[i] += x.q[c] * dout[j]
		dq[c] += x.after[i] * dout[j]
		de[j] += ds[i] * x.k[c]
		dk[c] += ds[i] * x.e[j]
	}
	dv, dbeta, ddecay := h.row(d.V, t, h.ValueDim, 1), h.row(d.Beta, t, 1, 1), h.row(d.Decay, t, h.Channels, 1)
	for j := range de {
		dv[j] = x.beta * de[j]
		dbeta[0] += de[j] * (x.v[j] - x.predicted[j])
	}
	for i := range ds {
		c, j := i/h.ValueDim, i%h.ValueDim
		if h.Delta {
			dk[c] -= x.decayed[i] * x.beta * de[j]
			ds[i] -= x.k[c] * x.beta * de[j]
		}
		ddecay[c%h.Channels] += ds[i] * x.decayed[i]
		ds[i] *= x.kept[c]
	}
	h.normalGrad(h.row(d.Q, t, h.KeyDim, h.Shared), dq, h.row(o.Q, t, h.KeyDim, h.Shared), h.factor())
	h.normalGrad(h.row(d.K, t, h.KeyDim, h.Shared), dk, h.row(o.K, t, h.KeyDim, h.Shared), 1)
}

// Conv is a short convolution of columns over the last Width tokens of a document, and its activation.
type Conv struct {
	Width, Batch, Cols int
	Positions          []int32
}

// Run returns the results of a convolution. w is [cols, width], the newest token last; bias and tail may be nil.
func (c Conv) Run(x, w, bias, tail []float64) (y, next []float64) {
	if tail == nil {
		tail = make([]float64, c.Width*c.Batch*c.Cols)
	}
	all := append(append([]float64(nil), tail...), x...)
	for i := range x {
		row, col, sum := i/c.Cols, i%c.Cols, 0.0
		if bias != nil {
			sum = bias[col]
		}
		for j := range c.Width {
			if c.Positions == nil || int(c.Positions[row]) >= j {
				sum += w[(col+1)*c.Width-1-j] * all[len(tail)+i-j*c.Batch*c.Cols]
			}
		}
		y = append(y, sum/(1+math.Exp(-sum)))
	}
	return y, all[len(all)-len(tail):]
}

// Decay returns the decays of scans and the steps that they are proportional to, of rows of the columns of all heads. No step is less than
// least.
func Decay(x, rate, bias []float64, least float64) (y, step []float64) {
	for i := range x {
		c := i % len(bias)
		step = append(step, max(least, math.Log(1+math.Exp(x[i]+bias[c]))))
		y = append(y, -math.Exp(rate[c/(len(bias)/len(rate))])*step[i])
	}
	return y, step
}

// ScaleColumns multiplies the columns of each head by its factor.
func ScaleColumns(x, factor []float64, headDim int) []float64 {
	y := make([]float64, len(x))
	for i := range x {
		y[i] = factor[i/headDim%len(factor)] * x[i]
	}
	return y
}

// ScaleColumnsGrad returns the gradients of ScaleColumns.
func ScaleColumnsGrad(x, factor, dy []float64, headDim int) (dx, dfactor []float64) {
	dfactor = make([]float64, len(factor))
	for i := range x {
		dfactor[i/headDim%len(factor)] += x[i] * dy[i]
	}
	return ScaleColumns(dy, factor, headDim), dfactor
}
