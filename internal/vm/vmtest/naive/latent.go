package naive

import "fmt"

// latentEps is the epsilon of the norms of latents in transformers.
const latentEps = 1e-6

// latentTape holds the values of latent attention (DeepSeek-V2, section 2.1) that its backward pass needs.
type latentTape struct {
	q, qNormed   []float64 // the latent of queries, if they have one, and its norm
	kv, kvNormed []float64
}

func (cfg *Config) latent(layer int) bool {
	n := len(cfg.Mixers)
	return n > 0 && cfg.Mixers[layer%n] == "latent"
}

// valueDim returns the width of a head of values.
func (cfg *Config) valueDim() int {
	if cfg.ValueHeadDim > 0 {
		return cfg.ValueHeadDim
	}
	return cfg.HeadDim
}

// latentParameters lists the tensors of latent attention up to queries, keys and values; linear lists those of a linear map.
func (cfg *Config) latentParameters(linear func(weight, bias, group string, in, out int)) []tensor {
	h, from := cfg.Hidden, cfg.Hidden
	norms := []tensor{{"kv_a_norm.gamma", []int{cfg.KVLatent}}}
	if cfg.QLatent > 0 {
		linear("wq_a", "", "none", h, cfg.QLatent)
		norms, from = append(norms, tensor{"q_a_norm.gamma", []int{cfg.QLatent}}), cfg.QLatent
	}
	linear("wq", "", "none", from, cfg.Heads*cfg.HeadDim)
	linear("wkv", "", "none", h, cfg.KVLatent)
	linear("wk_rope", "", "none", h, cfg.RopeDim)
	linear("wk", "", "none", cfg.KVLatent, cfg.Heads*cfg.NopeDim)
	linear("wv", "", "none", cfg.KVLatent, cfg.Heads*cfg.valueDim())
	return norms
}

func (m *model) latentNorm(x []float64, gamma string) []float64 {
	return RMSNorm(x, Plus(m.w[gamma], m.cfg.NormOffset), latentEps)
}

// latentNormGrad is named after the norm's weights.
func (m *model) latentNormGrad(x, dy []float64, gamma string) []float64 {
	dx, dgamma := RMSNormGrad(x, Plus(m.w[gamma], m.cfg.NormOffset), dy, latentEps)
	addTo(m.grads[gamma], dgamma)
	return dx
}

// turned rotates the first elements of heads, or does nothing in a layer that does not rotate.
func (m *model) turned(layer int, x []float64, heads, dim int, queries bool, rope func([]float64, int, int, int, int, Rotation) []float64) []float64 {
	if !m.cfg.rotates(layer) {
		return x
	}
	return rope(x, m.batch, heads, dim, 0, m.cfg.layerRotation(layer, queries))
}

// latentAttend computes the middle of a layer with latent attention.
func (m *model) latentAttend(l int, t *tape) {
	in, a, cfg := fmt.Sprintf("layer.%d.", l), &t.latent, &m.cfg
	t.norm1 = m.normBefore(t.x, in+"ln1")
	a.qNormed = t.norm1
	if cfg.QLatent > 0 {
		a.q = m.linear(t.norm1, in+"wq_a", "")
		a.qNormed = m.latentNorm(a.q, in+"q_a_norm.gamma")
	}
	t.q = m.turned(l, m.linear(a.qNormed, in+"wq", ""), cfg.Heads, cfg.HeadDim, true, Rope)
	a.kv = m.linear(t.norm1, in+"wkv", "")
	a.kvNormed = m.latentNorm(a.kv, in+"kv_a_norm.gamma")
	shared := m.turned(l, m.linear(t.norm1, in+"wk_rope", ""), 1, cfg.RopeDim, false, Rope)
	t.k = ConcatHeads(shared, m.linear(a.kvNormed, in+"wk", ""), cfg.Heads, cfg.RopeDim, cfg.NopeDim)
	t.v = m.linear(a.kvNormed, in+"wv", "")
	m.attendHeads(l, t)
}

func (m *model) latentAttendGrad(l int, dmid []float64) []float64 {
	t, in, cfg := &m.tapes[l], fmt.Sprintf("layer.%d.", l), &m.cfg
	a := &t.latent
	dq, dk, dv, dnorm1 := m.attendHeadsGrad(l, dmid)
	if dnorm1 == nil {
		dnorm1 = make([]float64, len(t.norm1))
	}
	dshared, down := ConcatHeadsGrad(dk, cfg.Heads, cfg.RopeDim, cfg.NopeDim)
	addTo(dnorm1, m.linearGrad(t.norm1, m.turned(l, dshared, 1, cfg.RopeDim, false, RopeGrad), in+"wk_rope", ""))
	dlatent := add(m.linearGrad(a.kvNormed, down, in+"wk", ""), m.linearGrad(a.kvNormed, dv, in+"wv", ""))
	addTo(dnorm1, m.linearGrad(t.norm1, m.latentNormGrad(a.kv, dlatent, in+"kv_a_norm.gamma"), in+"wkv", ""))
	dlatent = m.linearGrad(a.qNormed, m.turned(l, dq, cfg.Heads, cfg.HeadDim, true, RopeGrad), in+"wq", "")
	if cfg.QLatent > 0 {
		dlatent = m.linearGrad(t.norm1, m.latentNormGrad(a.q, dlatent, in+"q_a_norm.gamma"), in+"wq_a", "")
	}
	addTo(dnorm1, dlatent)
	return add(dmid, m.normBeforeGrad(t.x, dnorm1, in+"ln1"))
}
