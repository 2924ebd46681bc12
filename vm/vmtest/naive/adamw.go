package naive

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// AdamW holds the optimizer's constants (Loshchilov and Hutter, 2019). LR is the schedule's highest rate; every update
// is given the rate of its own step.
type AdamW struct{ LR, Beta1, Beta2, Eps, WeightDecay float64 }

// State is the optimizer's memory. The zero value is the state before the first step.
type State struct {
	M, V Tensors
	Step int // updates done
}

// Decays tells whether weight decay applies to a tensor: to matrices, embeddings and positions, not to biases and norms.
func Decays(name string) bool {
	last := name[strings.LastIndexByte(name, '.')+1:]
	return !slices.Contains([]string{"gamma", "beta", "bq", "bk", "bv", "bo", "b1", "b2"}, last)
}

// Update clips the gradients to a global norm of clip (0: as they are) and moves the weights in place by one step at
// rate lr. It returns the norm before clipping and leaves grads alone.
func (s *State) Update(opt AdamW, lr float64, w, grads Tensors, clip float64) (norm float64) {
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
		decay := 0.0
		if Decays(name) {
			decay = opt.WeightDecay
		}
		m, v := s.M[name], s.V[name]
		for i := range values {
			values[i], m[i], v[i] = opt.Scalar(lr, decay, s.Step, values[i], grads[name][i]*scale, m[i], v[i])
		}
	}
	return norm
}

// Scalar is one step, numbered from 1, for one weight w with gradient g and moments m and v.
func (opt AdamW) Scalar(lr, decay float64, step int, w, g, m, v float64) (newW, newM, newV float64) {
	newM = opt.Beta1*m + (1-opt.Beta1)*g
	newV = opt.Beta2*v + (1-opt.Beta2)*g*g
	meanHat := newM / (1 - math.Pow(opt.Beta1, float64(step)))
	varHat := newV / (1 - math.Pow(opt.Beta2, float64(step)))
	return w - lr*meanHat/(math.Sqrt(varHat)+opt.Eps) - lr*decay*w, newM, newV
}

// globalNorm adds the tensors in the order of their names, so that one run equals the next to the last bit.
func globalNorm(grads Tensors) float64 {
	var names []string
	for name := range grads {
		names = append(names, name)
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

// LearningRate is the rate of a step, numbered from 1: a line up to lr over the warm-up, then constant, or half a
// cosine (Loshchilov and Hutter, 2017) down to minLR at the last step and minLR after it.
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
