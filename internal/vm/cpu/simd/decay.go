package simd

import "math"

// Decay computes the decays of scans: step = max(Least, ln(1 + exp(x + bias))) and y = -exp(rate) step. The columns of a head have
// one rate.
type Decay struct {
	Rows, Heads, HeadDim int
	X                    Mat
	Rate, Bias           []float32
	Least                float64
}

// step returns the step of x, and its derivative.
func (d *Decay) step(x float64) (y, slope float64) {
	if y, slope = softplus(x); y < d.Least {
		return d.Least, 0
	}
	return y, slope
}

// softplus returns ln(1 + exp(x)), and its derivative.
func softplus(x float64) (y, slope float64) {
	e := math.Exp(-math.Abs(x))
	if slope = 1 / (1 + e); x < 0 {
		slope = e / (1 + e)
	}
	return max(x, 0) + math.Log1p(e), slope
}

// Forward computes y and, unless it is nil, step.
func (d *Decay) Forward(p *Pool, y, step []float32) {
	cols := d.Heads * d.HeadDim
	p.Split(d.Rows, rowGrain(8*cols), func(lo, hi int) {
		buf := make([]float32, cols)
		for r := lo; r < hi; r++ {
			for c, x := range d.X.row(r, cols, buf) {
				s, _ := d.step(float64(x) + float64(d.Bias[c]))
				y[r*cols+c] = float32(-math.Exp(float64(d.Rate[c/d.HeadDim])) * s)
				if step != nil {
					step[r*cols+c] = float32(s)
				}
			}
		}
	})
}

// DecayGrads are the gradients of decays. DStep, DRate and DBias may be nil.
type DecayGrads struct {
	DY, DStep    []float32
	DX           Mat
	DRate, DBias []float32
	Add          bool // to DRate and DBias
}

// Backward computes the gradients. Sums over rows are of blocks of rows, added in order.
func (d *Decay) Backward(p *Pool, g DecayGrads) {
	cols := d.Heads * d.HeadDim
	blocks := ceilDiv(d.Rows, rowBlock)
	sums := make([]float64, 2*blocks*cols) // of each block: those of rates, by column, and those of biases
	p.Split(blocks, 1, func(lo, hi int) {
		buf, out := make([]float32, cols), make([]float32, cols)
		for block := lo; block < hi; block++ {
			rates, biases := sums[2*block*cols:][:cols], sums[(2*block+1)*cols:][:cols]
			for r := block * rowBlock; r < min(d.Rows, (block+1)*rowBlock); r++ {
				to := g.DX.target(r, cols, out)
				for c, x := range d.X.row(r, cols, buf) {
					s, slope := d.step(float64(x) + float64(d.Bias[c]))
					dy := -math.Exp(float64(d.Rate[c/d.HeadDim])) * float64(g.DY[r*cols+c])
					rates[c] += dy * s
					if g.DStep != nil {
						dy += float64(g.DStep[r*cols+c])
					}
					biases[c] += dy * slope
					to[c] = float32(dy * slope)
				}
				g.DX.done(r, to)
			}
		}
	})
	total := func(at int) (sum float64) {
		for block := range blocks {
			sum += sums[2*block*cols+at]
		}
		return sum
	}
	for h := range g.DRate {
		sum := 0.0
		for c := h * d.HeadDim; c < (h+1)*d.HeadDim; c++ {
			sum += total(c)
		}
		put(&g.DRate[h], float32(sum), g.Add)
	}
	for c := range g.DBias {
		put(&g.DBias[c], float32(total(cols+c)), g.Add)
	}
}

// ColumnScale multiplies the columns of each head by its factor.
type ColumnScale struct {
	Rows, Heads, HeadDim int
	X                    Mat
	Factor               []float32
}

// Forward computes y.
func (s *ColumnScale) Forward(p *Pool, y Mat) {
	s.scale(p, s.X, y, nil)
}

// Backward computes dx from dy and, unless dfactor is nil, the gradients of the factors, or adds to them. Sums over rows are of blocks of
// rows, added in order.
func (s *ColumnScale) Backward(p *Pool, dx Mat, dfactor []float32, dy Mat, add bool) {
	blocks := ceilDiv(s.Rows, rowBlock)
	sums := make([]float64, blocks*s.Heads)
	s.scale(p, dy, dx, sums)
	for h := range dfactor {
		sum := 0.0
		for block := range blocks {
			sum += sums[block*s.Heads+h]
		}
		put(&dfactor[h], float32(sum), add)
	}
}

// scale multiplies from into to and, unless sums is nil, adds up the products of from and X for each block of rows and head.
func (s *ColumnScale) scale(p *Pool, from, to Mat, sums []float64) {
	cols := s.Heads * s.HeadDim
	p.Split(ceilDiv(s.Rows, rowBlock), 1, func(lo, hi int) {
		in, out, other := make([]float32, cols), make([]float32, cols), make([]float32, cols)
		for r := lo * rowBlock; r < min(s.Rows, hi*rowBlock); r++ {
			row, into := from.row(r, cols, in), to.target(r, cols, out)
			if sums != nil {
				for c, x := range s.X.row(r, cols, other) {
					sums[r/rowBlock*s.Heads+c/s.HeadDim] += float64(x) * float64(row[c])
				}
			}
			for c, x := range row {
				into[c] = s.Factor[c/s.HeadDim] * x
			}
			to.done(r, into)
		}
	})
}
