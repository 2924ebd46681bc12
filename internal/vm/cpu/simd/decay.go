package simd

import "math"

// Decay computes the decays of scans: step = ln(1 + exp(x + bias)) and y = -exp(rate) step. The columns of a head have one rate.
type Decay struct {
	Rows, Heads, HeadDim int
	X                    Mat
	Rate, Bias           []float32
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
				s, _ := softplus(float64(x) + float64(d.Bias[c]))
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
					s, slope := softplus(float64(x) + float64(d.Bias[c]))
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
