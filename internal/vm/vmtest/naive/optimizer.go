package naive

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Optimizer holds an optimizer's constants. LR is the highest rate of the schedule; every update receives the
// rate of its step.
type Optimizer struct {
	Kind                                         string // adamw (the default), sgd or muon
	LR, Momentum, Beta1, Beta2, Eps, WeightDecay float64
	NoDecay                                      []string // parameter groups without weight decay; nil: norms and biases
	BiasRate                                     float64  // by which the corrections of experts' scores change in a step
}

// State is the optimizer's state. Before the first step, only Shapes is set, and only muon needs it.
type State struct {
	Shapes map[string][]int // rows and columns of matrices by name
	M, V   Tensors
	Step   int // completed updates
}

// Decays reports whether weight decay applies to a tensor. By default it applies to matrices, embeddings and
// positions, but not to biases and norms.
func (opt Optimizer) Decays(name string) bool {
	without := opt.NoDecay
	if without == nil {
		without = []string{"norms", "biases"}
	}
	last, group := name[strings.LastIndexByte(name, '.')+1:], "mlp"
	switch last {
	case "gamma", "beta":
		group = "norms"
	case "bq", "bk", "bv", "bo", "b1", "b2", "b_gate", "b_up", "b_down", "b", "sinks", "rate", "b_dt", "skip", "b_conv_q", "b_conv_k", "b_conv_v":
		group = "biases"
	case "embed", "pos":
		group = "embeddings"
	case "head":
		group = "head"
	case "wq", "wk", "wv", "wo", "wg", "wz", "wb", "wa", "wz_low", "wa_low", "conv_q", "conv_k", "conv_v":
		group = "attention"
	case "lora_a", "lora_b":
		return true
	}
	return !slices.Contains(without, group)
}

// Update clips the gradients to a global norm of clip (0 means no clipping) and updates the weights
// in place with one step at rate lr. It returns the norm before clipping and does not change grads.
func (s *State) Update(opt Optimizer, lr float64, w, grads Tensors, clip float64) (norm float64) {
	if s.M == nil {
		s.M, s.V = Tensors{}, Tensors{}
		for name, values := range w {
			s.M[name], s.V[name] = make([]float64, len(values)), make([]float64, len(values))
		}
	}
	s.Step++
	norm = globalNorm(grads)
	scale := 1.0
	if clip > 0 && norm > clip {
		scale = clip / norm
	}
	for name, values := range w {
		if corrects(name) {
			copy(values, Balance(values, grads[name], opt.BiasRate))
			continue
		}
		decay := 0.0
		if opt.Decays(name) {
			decay = opt.WeightDecay
		}
		m, v, shape := s.M[name], s.V[name], s.Shapes[name]
		switch matrix := len(shape) == 2 && strings.HasPrefix(name, "layer."); {
		case opt.Kind == "sgd":
			for i := range values {
				values[i], m[i] = opt.SGD(lr, decay, values[i], grads[name][i]*scale, m[i])
			}
		case opt.Kind == "muon" && matrix:
			opt.muon(lr, decay, scale, shape[0], shape[1], values, grads[name], m)
		default:
			for i := range values {
				values[i], m[i], v[i] = opt.Scalar(lr, decay, s.Step, values[i], grads[name][i]*scale, m[i], v[i])
			}
		}
	}
	return norm
}

// corrects reports whether a tensor corrects the scores of experts. In the place of its gradient is how often each expert was chosen.
func corrects(name string) bool { return strings.HasSuffix(name, "router.correction") }

// Balance returns corrections of experts' scores after a step: larger by rate for experts with less than the mean load, and smaller for
// those with more (Wang et al., 2024).
func Balance(w, load []float64, rate float64) []float64 {
	mean, out := 0.0, slices.Clone(w)
	for _, n := range load {
		mean += n / float64(len(load))
	}
	for e, n := range load {
		if n != mean && math.Abs(n-mean) > 1e-9*mean {
			out[e] += math.Copysign(rate, mean-n)
		}
	}
	return out
}

// SGD returns the result of one step of gradient descent with momentum (Sutskever et al., 2013) and decoupled
// weight decay (Loshchilov and Hutter, 2019).
func (opt Optimizer) SGD(lr, decay, w, g, m float64) (newW, newM float64) {
	newM = opt.Momentum*m + g
	return w - lr*(newM+decay*w), newM
}

// muon takes one step of Muon (Jordan et al., 2024) for a matrix, scaled to the usual length of an AdamW step
// (Liu et al., 2025).
func (opt Optimizer) muon(lr, decay, factor float64, rows, cols int, w, grad, m []float64) {
	step := make([]float64, len(w))
	for i := range w {
		g := factor * grad[i]
		m[i] = opt.Momentum*m[i] + g
		step[i] = g + opt.Momentum*m[i]
	}
	step = Orthogonalize(step, rows, cols)
	scale := 0.2 * math.Sqrt(float64(max(rows, cols)))
	for i := range w {
		w[i] -= lr * (scale*step[i] + decay*w[i])
	}
}

// Orthogonalize brings the singular values of a matrix close to 1 with five Newton-Schulz iterations.
func Orthogonalize(x []float64, rows, cols int) []float64 {
	norm := 0.0
	for _, v := range x {
		norm += v * v
	}
	norm = math.Sqrt(norm) + 1e-7
	y := make([]float64, len(x))
	for i := range x {
		y[i] = x[i] / norm
	}
	for range 5 {
		gram := product(y, transposed(y, rows, cols), rows, cols, rows)
		square := product(gram, gram, rows, rows, rows)
		for i := range gram {
			gram[i] = -4.7750*gram[i] + 2.0315*square[i]
		}
		z := product(gram, y, rows, rows, cols)
		for i := range y {
			y[i] = 3.4445*y[i] + z[i]
		}
	}
	return y
}

// product multiplies a [rows,inner] matrix by an [inner,cols] matrix.
func product(a, b []float64, rows, inner, cols int) []float64 {
	c := make([]float64, rows*cols)
	for i := range rows {
		for k := range inner {
			for j := range cols {
				c[i*cols+j] += a[i*inner+k] * b[k*cols+j]
			}
		}
	}
	return c
}

func transposed(x []float64, rows, cols int) []float64 {
	y := make([]float64, len(x))
	for i := range rows {
		for j := range cols {
			y[j*rows+i] = x[i*cols+j]
		}
	}
	return y
}

// Scalar returns the result of a step of AdamW (Loshchilov and Hutter, 2019) for a weight w with gradient g and
// moments m and v. Steps are numbered from 1.
func (opt Optimizer) Scalar(lr, decay float64, step int, w, g, m, v float64) (newW, newM, newV float64) {
	newM = opt.Beta1*m + (1-opt.Beta1)*g
	newV = opt.Beta2*v + (1-opt.Beta2)*g*g
	meanHat := newM / (1 - math.Pow(opt.Beta1, float64(step)))
	varHat := newV / (1 - math.Pow(opt.Beta2, float64(step)))
	return w - lr*meanHat/(math.Sqrt(varHat)+opt.Eps) - lr*decay*w, newM, newV
}

// globalNorm sums over the tensors in the order of their names, so that repeated runs give bitwise equal
// results.
func globalNorm(grads Tensors) float64 {
	var names []string
	for name := range grads {
		if !corrects(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	sum := 0.0
	for _, name := range names {
		for _, g := range grads[name] {
			sum += g * g
		}
	}
	return math.Sqrt(sum)
}

// LearningRate returns the rate of a step, numbered from 1. It rises linearly to lr during the warm-up, and
// then stays constant or falls along half a cosine (Loshchilov and Hutter, 2017) to minLR at the last step, and
// stays there.
func LearningRate(step, warmup, steps int, decay string, lr, minLR float64) float64 {
	switch {
	case step <= warmup:
		return lr * float64(step) / float64(warmup)
	case decay == "constant":
		return lr
	case decay != "cosine":
		panic(fmt.Sprintf("internal: naive: learning-rate decay %q", decay))
	case step > steps:
		return minLR
	}
	share := float64(step-warmup) / float64(steps-warmup)
	return minLR + 0.5*(lr-minLR)*(1+math.Cos(math.Pi*share))
}
