package naive

import (
	"math"
	"testing"
)

// TestAdamWByHand checks one decayed weight and one bias over two steps. Gradients (3, 4) have norm 5 and are
// clipped to 0.5, which gives (0.3, 0.4). In the first step the bias corrections cancel the factors 1-beta
// exactly, so each weight moves by lr times the sign of its gradient.
func TestAdamWByHand(t *testing.T) {
	opt := Optimizer{LR: 0.1, Beta1: 0.9, Beta2: 0.99, Eps: 0, WeightDecay: 0.5}
	w, grads := Tensors{"layer.0.w1": {2}, "layer.0.b1": {-1}}, Tensors{"layer.0.w1": {3}, "layer.0.b1": {4}}
	var s State
	if norm := s.Update(opt, 0.1, w, grads, 0.5); norm != 5 {
		t.Errorf("norm %g, want 5", norm)
	}
	wantClose(t, "m", s.M["layer.0.w1"], []float64{0.03}, 1e-15)
	wantClose(t, "v", s.V["layer.0.w1"], []float64{0.0009}, 1e-14)
	wantClose(t, "decayed weight", w["layer.0.w1"], []float64{2 - 0.1 - 0.1*0.5*2}, 1e-15)
	wantClose(t, "bias", w["layer.0.b1"], []float64{-1.1}, 1e-15)

	// The second step has gradients (-0.1, 0), whose norm is below the clipping limit, and half the learning
	// rate.
	grads["layer.0.w1"][0], grads["layer.0.b1"][0] = -0.1, 0
	if norm := s.Update(opt, 0.05, w, grads, 0.5); !(math.Abs(norm-0.1) <= 1e-16) {
		t.Errorf("norm %g, want 0.1", norm)
	}
	m, v := 0.9*0.03-0.1*0.1, 0.99*0.0009+0.01*0.01
	want := 1.8 - 0.05*(m/0.19)/math.Sqrt(v/0.0199) - 0.05*0.5*1.8
	wantClose(t, "second step", w["layer.0.w1"], []float64{want}, 1e-14)
	m, v = 0.9*0.04, 0.99*0.0016
	wantClose(t, "second step of the bias", w["layer.0.b1"],
		[]float64{-1.1 - 0.05*(m/0.19)/math.Sqrt(v/0.0199)}, 1e-14)
	if s.Step != 2 || grads["layer.0.w1"][0] != -0.1 {
		t.Errorf("step %d, want 2; gradient %g, want it left alone", s.Step, grads["layer.0.w1"][0])
	}
}

// TestEps checks that eps is added to the square root, not under it.
func TestEps(t *testing.T) {
	w, _, _ := Optimizer{Eps: 1}.Scalar(1, 0, 1, 0, 3, 0, 0) // with betas of 0 the moments are 3 and 9
	wantClose(t, "w", []float64{w}, []float64{-0.75}, 1e-15)
}

func TestDecays(t *testing.T) {
	for _, cfg := range []Config{tiny("gpt", "learned", 4, false), tiny("llama", "rope", 2, false)} {
		for name, shape := range Shapes(cfg) {
			if want := len(shape) == 2; (Optimizer{}).Decays(name) != want { // the vectors are the norms and biases
				t.Errorf("%s: decays %t, want %t", name, (Optimizer{}).Decays(name), want)
			}
		}
	}
}

func TestClipOff(t *testing.T) {
	var s State
	s.Update(Optimizer{Beta1: 0.5}, 0, Tensors{"head": {0}}, Tensors{"head": {1000}}, 0)
	wantClose(t, "m", s.M["head"], []float64{500}, 0)
}

func TestLearningRate(t *testing.T) {
	for _, c := range []struct {
		step, warmup, steps int
		decay               string
		want                float64
	}{
		{1, 4, 12, "cosine", 0.25},
		{4, 4, 12, "cosine", 1},
		{8, 4, 12, "cosine", 0.55}, // halfway from 1 to 0.1
		{6, 4, 12, "cosine", 0.1 + 0.45*(1+math.Sqrt2/2)},
		{12, 4, 12, "cosine", 0.1},
		{99, 4, 12, "cosine", 0.1},
		{1, 0, 2, "cosine", 0.55},
		{5, 5, 5, "cosine", 1},
		{6, 5, 5, "cosine", 0.1},
		{3, 4, 12, "constant", 0.75},
		{99, 4, 12, "constant", 1},
		{1, 0, 12, "constant", 1},
	} {
		if got := LearningRate(c.step, c.warmup, c.steps, c.decay, 1, 0.1); !(math.Abs(got-c.want) <= 1e-15) {
			t.Errorf("%+v: got %g", c, got)
		}
	}
}

// TestLearns checks that training on one batch reduces the loss to almost 0.
func TestLearns(t *testing.T) {
	r := newRand(t)
	for _, family := range []string{"gpt", "llama"} {
		cfg := tiny(family, "rope", 2, true)
		w, tokens := randomWeights(r, cfg), randomTokens(r, cfg, 2)
		opt := Optimizer{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: 0.01}
		var s State
		for step := 1; step <= 150; step++ {
			_, grads := LossAndGrads(cfg, w, tokens)
			s.Update(opt, LearningRate(step, 10, 150, "cosine", 0.02, 0.002), w, grads, 1)
		}
		if loss := Loss(cfg, w, tokens); loss > 0.2 {
			t.Errorf("%s: loss %g after 150 steps on one batch", family, loss)
		}
	}
}
