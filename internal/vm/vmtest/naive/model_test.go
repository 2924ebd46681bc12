package naive

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

const seed = 20240607 // seed of all random values in these tests

// tiny returns a model in which the widths of hidden states, queries, MLP and vocabulary all differ, so that
// code that confuses two of them fails.
func tiny(family, positions string, kvHeads int, tied bool) Config {
	cfg := Config{Layers: 2, Hidden: 6, Heads: 4, KVHeads: kvHeads, HeadDim: 2, FFN: 7, Vocab: 9,
		Norm: "rmsnorm", NormPlace: "pre", NormEps: 1e-5, Activation: "silu", Gated: true, QKNorm: "none",
		Positions: positions, RopeConfig: RopeConfig{Theta: 100, Partial: 1, Scaling: "none", Amplitude: 1},
		AttnScale: math.Sqrt2 / 2, EmbedScale: 1, LogitScale: 1, Tied: tied, Sequence: 4}
	if family == "gpt" {
		cfg.Norm, cfg.Activation, cfg.Gated, cfg.Bias = "layernorm", "gelu_tanh", false, []string{"qkv", "attn_out", "mlp"}
	}
	return cfg
}

// traits holds, by name, changes to a tiny model that the arguments of tiny do not cover.
var traits = map[string]func(*Config){
	"gemma": func(c *Config) {
		c.NormOffset, c.NormPlace, c.Activation, c.QKNorm = 1, "pre_post", "gelu_tanh", "head"
		c.EmbedScale, c.LogitScale, c.LogitSoftcap, c.AttnSoftcap, c.AttnScale = 2.5, 0.7, 1.5, 0.9, 0.4
	},
	"olmo2": func(c *Config) { c.NormPlace, c.QKNorm = "post", "all" },
	"relu2": func(c *Config) { c.Activation, c.Gated, c.Bias = "relu2", false, []string{"mlp"} },
	"gelu": func(c *Config) {
		c.Activation, c.Norm, c.NormOffset, c.Bias = "gelu", "layernorm", 0.5, []string{"qkv", "mlp"}
	},
	"mixed": func(c *Config) {
		c.Layers, c.FFNs, c.Mixers = 4, []int{7, 0, 5}, []string{"attention", "attention", "none", "attention"}
	},
	"gated_delta": func(c *Config) {
		c.Layers, c.Mixers, c.AttnGate, c.NormOffset = 3, []string{"gated_delta", "gated_delta", "attention"}, true, 1
		c.LinearKeyHeads, c.LinearValueHeads, c.LinearKeyDim, c.LinearValueDim, c.LinearConv = 2, 4, 3, 5, 3
	},
	"mamba2": func(c *Config) {
		c.Layers, c.Mixers, c.NormOffset, c.ConvBias, c.StepMin = 3, []string{"mamba2", "attention", "mamba2"}, 1, true, 0.7
		c.LinearKeyHeads, c.LinearValueHeads, c.LinearKeyDim, c.LinearValueDim, c.LinearConv = 2, 4, 3, 5, 3
	},
	"kimi_delta": func(c *Config) {
		c.Layers, c.Mixers = 3, []string{"kimi_delta", "attention", "kimi_delta"}
		c.LinearKeyHeads, c.LinearValueHeads, c.LinearKeyDim, c.LinearValueDim, c.LinearConv = 2, 2, 3, 4, 2
	},
	"mamba2_post": func(c *Config) {
		c.Mixers, c.NormPlace = []string{"gated_delta", "mamba2"}, "pre_post"
		c.LinearKeyHeads, c.LinearValueHeads, c.LinearKeyDim, c.LinearValueDim, c.LinearConv = 1, 3, 2, 3, 2
	},
	"latent": func(c *Config) {
		c.Gated, c.Activation, c.Mixers, c.FFNs = false, "relu2", []string{"none", "attention"}, []int{c.FFN, 0}
		c.Experts, c.TopExperts, c.ExpertFFN, c.SharedFFN, c.LatentSize, c.Scoring, c.NormTop, c.RoutedScale = 4, 2, 5, 3, 3, "sigmoid", true, 1.5
	},
	"gated_delta_post": func(c *Config) {
		c.Mixers, c.NormPlace = []string{"attention", "gated_delta"}, "pre_post"
		c.LinearKeyHeads, c.LinearValueHeads, c.LinearKeyDim, c.LinearValueDim, c.LinearConv = 1, 1, 2, 3, 7
	},
	"z_latent": func(c *Config) {
		c.Mixers, c.KVHeads, c.QLatent, c.KVLatent, c.NopeDim, c.RopeDim, c.ValueHeadDim, c.HeadDim = []string{"latent"}, 4, 5, 3, 2, 4, 3, 6
		c.Partial, c.Bias = 4./6, []string{"attn_out"}
		c.Scaling, c.Factor, c.Original, c.Fast, c.Slow, c.Amplitude = "yarn", 4, 40, 3, 1, 1.2
	},
	"z_latent_plain": func(c *Config) {
		c.Mixers, c.KVHeads, c.KVLatent, c.NopeDim, c.RopeDim, c.ValueHeadDim, c.HeadDim = []string{"latent", "none"}, 4, 4, 3, 2, 6, 5
		c.PositionPattern, c.NormOffset, c.AttnGate, c.AttnSinks = []string{"none", "rope"}, 1, true, true
	},
	"partial": func(c *Config) { c.HeadDim, c.Partial, c.Scaling, c.Factor = 8, 0.5, "linear", 3 },
	"pattern": func(c *Config) { c.PositionPattern, c.Bias = []string{"none", "rope"}, []string{"attn_out"} },
	"yarn": func(c *Config) {
		c.HeadDim, c.Scaling, c.Factor, c.Original, c.Fast, c.Slow, c.Amplitude = 8, "yarn", 4, 40, 3, 1, 1.2
	},
	"hunyuan": func(c *Config) { c.HeadDim, c.QKNorm = 4, "rotated" },
	"ministral3": func(c *Config) {
		c.HeadDim, c.Scaling, c.Factor, c.Original, c.Fast, c.Slow, c.Beta = 8, "yarn", 4, 2, 3, 1, 0.3
	},
	"llama3": func(c *Config) { c.HeadDim, c.Scaling, c.Factor, c.Original, c.Low, c.High = 8, "llama3", 4, 40, 1, 4 },
	"longrope": func(c *Config) {
		c.HeadDim, c.Scaling, c.Original, c.Short, c.Long = 4, "longrope", 3, []float64{9, 9}, []float64{1, 1.5}
	},
	"shortrope": func(c *Config) {
		c.HeadDim, c.Scaling, c.Original, c.Short, c.Long = 4, "longrope", 4, []float64{1, 1.5}, []float64{9, 9}
	},
}

// tinyConfigs returns every family with every kind of position encoding and head grouping, alternately tied and
// untied, and a model for each entry of traits.
func tinyConfigs() []Config {
	var list []Config
	for _, family := range []string{"gpt", "llama"} {
		for _, positions := range []string{"learned", "rope", "none"} {
			for _, kvHeads := range []int{4, 2, 1} {
				list = append(list, tiny(family, positions, kvHeads, len(list)%2 == 1))
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(traits)) {
		cfg := tiny("llama", "rope", 2, len(list)%2 == 1)
		traits[name](&cfg)
		list = append(list, cfg)
	}
	return list
}

func (cfg Config) title() string {
	return fmt.Sprintf("%s/%s/%s/%s/%s/kv%d/tied=%t", cfg.Norm, cfg.NormPlace, cfg.Activation, cfg.Positions, cfg.Scaling, cfg.KVHeads, cfg.Tied)
}

func newRand(t *testing.T) *rand.Rand {
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

func normals(r *rand.Rand, n int, mean, std float64) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = mean + std*r.NormFloat64()
	}
	return x
}

// randomWeights returns weights so large that every part of the model is far from linear.
func randomWeights(r *rand.Rand, cfg Config) Tensors {
	w := Tensors{}
	for _, p := range parameters(cfg) {
		n := 1
		for _, d := range p.shape {
			n *= d
		}
		mean := 0.0
		if strings.HasSuffix(p.name, "gamma") {
			mean = 1 - cfg.NormOffset
		}
		w[p.name] = normals(r, n, mean, 0.5)
	}
	return w
}

func randomTokens(r *rand.Rand, cfg Config, batch int) [][]int32 {
	tokens := make([][]int32, batch)
	for b := range tokens {
		for range cfg.Sequence + 1 {
			tokens[b] = append(tokens[b], int32(r.IntN(cfg.Vocab)))
		}
	}
	return tokens
}

// wantClose fails unless the difference between got and want is less than tolerance times the norm of want.
func wantClose(t *testing.T, what string, got, want []float64, tolerance float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d values, want %d", what, len(got), len(want))
	}
	if !isClose(got, want, tolerance) {
		difference, size := apart(got, want)
		t.Errorf("%s: relative error %.2g\n got %.10g\nwant %.10g", what, difference/size, got, want)
	}
}

func isClose(got, want []float64, tolerance float64) bool {
	difference, size := apart(got, want)
	return difference <= tolerance*size
}

// apart returns the norm of the difference of two vectors of equal length, and the norm of the second.
func apart(got, want []float64) (difference, size float64) {
	for i := range want {
		difference, size = math.Hypot(difference, got[i]-want[i]), math.Hypot(size, want[i])
	}
	return difference, size
}

func TestGradientsOfEveryTensor(t *testing.T) {
	r := newRand(t)
	for _, cfg := range tinyConfigs() {
		t.Run(cfg.title(), func(t *testing.T) {
			w, tokens := randomWeights(r, cfg), randomTokens(r, cfg, 2)
			loss, grads := LossAndGrads(cfg, w, tokens)
			if loss != Loss(cfg, w, tokens) {
				t.Errorf("LossAndGrads gives loss %g, Loss gives %g", loss, Loss(cfg, w, tokens))
			}
			if len(grads) != len(w) {
				t.Errorf("%d gradients of %d tensors", len(grads), len(w))
			}
			for _, name := range Names(cfg) {
				lossAt := func(x []float64) float64 {
					moved := maps.Clone(w)
					moved[name] = x
					return Loss(cfg, moved, tokens)
				}
				if strings.HasSuffix(name, "bk") && cfg.Positions != "rope" {
					wantZero(t, name, grads[name])
					continue
				}
				numeric := NumericGrad(lossAt, w[name])
				if !isClose(grads[name], numeric, 1e-6) {
					numeric = NumericGradBy(2e-6, lossAt, w[name])
				}
				wantClose(t, name, grads[name], numeric, 1e-6)
			}
		})
	}
}

// wantZero checks that the gradient of a key bias is zero: without rotation, the bias adds the same number to
// all scores of a query, which softmax ignores.
func wantZero(t *testing.T, name string, grad []float64) {
	t.Helper()
	for _, g := range grad {
		if !(math.Abs(g) <= 1e-14) {
			t.Errorf("%s: gradient %g where theory says zero", name, g)
		}
	}
}

func TestNamesAndShapes(t *testing.T) {
	cfg := tiny("llama", "rope", 2, false)
	cfg.Layers = 1
	want := []string{"embed", "layer.0.ln1.gamma", "layer.0.wq", "layer.0.wk", "layer.0.wv", "layer.0.wo",
		"layer.0.ln2.gamma", "layer.0.w_gate", "layer.0.w_up", "layer.0.w_down", "ln_f.gamma", "head"}
	if got := Names(cfg); !slices.Equal(got, want) {
		t.Errorf("llama: got %v, want %v", got, want)
	}
	cfg = tiny("gpt", "learned", 2, true)
	cfg.Layers = 1
	want = []string{"embed", "pos", "layer.0.ln1.gamma", "layer.0.ln1.beta", "layer.0.wq", "layer.0.bq", "layer.0.wk",
		"layer.0.bk", "layer.0.wv", "layer.0.bv", "layer.0.wo", "layer.0.bo", "layer.0.ln2.gamma", "layer.0.ln2.beta",
		"layer.0.w1", "layer.0.b1", "layer.0.w2", "layer.0.b2", "ln_f.gamma", "ln_f.beta"}
	if got := Names(cfg); !slices.Equal(got, want) {
		t.Errorf("gpt: got %v, want %v", got, want)
	}
	for name, want := range map[string][]int{"embed": {9, 6}, "pos": {4, 6}, "layer.0.wq": {6, 8}, "layer.0.wk": {6, 4},
		"layer.0.wo": {8, 6}, "layer.0.w1": {6, 7}, "layer.0.w2": {7, 6}, "layer.0.b1": {7}} {
		if got := Shapes(cfg)[name]; !slices.Equal(got, want) {
			t.Errorf("%s: shape %v, want %v", name, got, want)
		}
	}
}

func TestUniformLogitsGiveLogVocab(t *testing.T) {
	r := newRand(t)
	for _, cfg := range tinyConfigs() {
		if cfg.Tied {
			continue
		}
		w := randomWeights(r, cfg)
		clear(w["head"])
		if got, want := Loss(cfg, w, randomTokens(r, cfg, 3)), math.Log(float64(cfg.Vocab)); !(math.Abs(got-want) <= 1e-14) {
			t.Errorf("%s: loss %.17g, want %.17g", cfg.title(), got, want)
		}
	}
}

// TestByHand uses one layer of width 2 whose matrices are zero, so the embedding goes directly to the last
// norm: (3, 4) divided by its root mean square 5/sqrt(2) is (0.6, 0.8)*sqrt(2). The head is the identity.
func TestByHand(t *testing.T) {
	cfg := tiny("llama", "none", 1, false)
	cfg.Layers, cfg.Hidden, cfg.Heads, cfg.FFN, cfg.Vocab, cfg.NormEps, cfg.Sequence = 1, 2, 1, 3, 2, 0, 1
	w := Tensors{}
	for name, shape := range Shapes(cfg) {
		w[name] = make([]float64, shape[0]*append(shape, 1)[1])
	}
	w["embed"], w["head"], w["ln_f.gamma"] = []float64{3, 4, 0, 0}, []float64{1, 0, 0, 1}, []float64{1, 1}
	want := math.Log(1 + math.Exp(-0.2*math.Sqrt2)) // the logit of label 1 is larger by 0.2*sqrt(2)
	if got := Loss(cfg, w, [][]int32{{0, 1}}); !(math.Abs(got-want) <= 1e-15) {
		t.Errorf("loss %.17g, want %.17g", got, want)
	}
}

// TestBatchIsTheMeanOfItsSequences checks the interleaving of rows.
func TestBatchIsTheMeanOfItsSequences(t *testing.T) {
	r := newRand(t)
	for _, cfg := range tinyConfigs() {
		w, tokens := randomWeights(r, cfg), randomTokens(r, cfg, 3)
		loss, grads := LossAndGrads(cfg, w, tokens)
		mean, meanGrads := 0.0, Tensors{}
		for _, sequence := range tokens {
			l, g := LossAndGrads(cfg, w, [][]int32{sequence})
			mean += l / 3
			for name := range g {
				if meanGrads[name] == nil {
					meanGrads[name] = make([]float64, len(g[name]))
				}
				for i := range g[name] {
					meanGrads[name][i] += g[name][i] / 3
				}
			}
		}
		wantClose(t, cfg.title()+" loss", []float64{loss}, []float64{mean}, 1e-14)
		for name := range grads {
			if !strings.HasSuffix(name, "bk") {
				wantClose(t, cfg.title()+" "+name, grads[name], meanGrads[name], 1e-12)
			}
		}
	}
}

// TestCausal changes only the last input token. For earlier rows, no bit of the input to the last layer's MLP
// may change.
func TestCausal(t *testing.T) {
	r := newRand(t)
	for _, cfg := range tinyConfigs() {
		w, tokens := randomWeights(r, cfg), randomTokens(r, cfg, 1)
		last := cfg.Sequence - 1
		other := [][]int32{slices.Clone(tokens[0])}
		other[0][last] = (other[0][last] + 1) % int32(cfg.Vocab)
		a, b := lastMid(cfg, w, tokens), lastMid(cfg, w, other)
		border := last * cfg.Hidden
		if !slices.Equal(a[:border], b[:border]) {
			t.Errorf("%s: an earlier row felt a later token", cfg.title())
		}
		if slices.Equal(a[border:], b[border:]) {
			t.Errorf("%s: the last row did not feel its own token", cfg.title())
		}
	}
}

// lastMid returns the last layer's residual stream between attention and MLP.
func lastMid(cfg Config, w Tensors, tokens [][]int32) []float64 {
	m := newModel(cfg, w, tokens)
	m.forward()
	return m.tapes[cfg.Layers-1].mid
}

func TestMistakesPanic(t *testing.T) {
	r := newRand(t)
	good := tiny("gpt", "learned", 2, true)
	w, tokens := randomWeights(r, good), randomTokens(r, good, 1)
	for what, try := range map[string]func(){
		"norm":     func() { c := good; c.Norm = "batchnorm"; Loss(c, w, tokens) },
		"kv heads": func() { c := good; c.KVHeads = 3; Loss(c, w, tokens) },
		"tensor":   func() { c := good; c.Tied = false; Loss(c, w, tokens) },
		"length":   func() { Loss(good, w, [][]int32{{1, 2}}) },
		"token":    func() { Loss(good, w, [][]int32{{1, 2, 3, 4, 9}}) },
	} {
		t.Run(what, func(t *testing.T) {
			defer func() {
				if text, _ := recover().(string); !strings.HasPrefix(text, "internal: naive: ") {
					t.Errorf("no panic, or a strange one: %q", text)
				}
			}()
			try()
		})
	}
}

// The gradient of the losses of a router is the numerical one.
func TestRouterLosses(t *testing.T) {
	for i, scoring := range []string{"softmax", "sigmoid", "softmax_topk", "sigmoid"} {
		m := &model{cfg: Config{Layers: 2, Experts: 5, TopExperts: 2, Scoring: scoring, RouterZLoss: 0.3, RouterAuxLoss: 0.7}, batch: 2, inputs: make([]int32, 6)}
		if i > 2 {
			m.cfg.AuxLoss, m.joint = "joint", []float64{3, 0, 2, 1, 0, 1, 1, 4, 0, 0}
		}
		logits := make([]float64, 30)
		for i := range logits {
			logits[i] = math.Sin(float64(7 * i))
		}
		want := NumericGrad(m.routerLosses, logits)
		for i, got := range m.routerLossGrad(logits) {
			if math.Abs(got-want[i]) > 1e-8 {
				t.Errorf("%s: gradient %d is %g, not %g", scoring, i, got, want[i])
			}
		}
	}
}
