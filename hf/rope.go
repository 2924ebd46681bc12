package hf

import "math"

// rotary reads the rotary positions. transformers 5 has rope_parameters: one object, or one for each type of
// layer. Earlier versions had rope_theta and rope_scaling at the top level.
func (m *Model) rotary(c *config) {
	c.skip("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
	c.skip("original_max_position_embeddings", "rope_local_base_freq")
	p := c
	switch {
	case c.has("rope_parameters"):
		p = c.object("rope_parameters")
		if p.has("full_attention") {
			m.localTheta(p)
			p = p.object("full_attention")
		}
	case c.has("rope_scaling"):
		p = c.object("rope_scaling")
	}
	theta := p
	if !p.has("rope_theta") {
		theta = c
	}
	if m.value("rope_local_theta") == "" && c.has("rope_local_base_freq") {
		m.setNumber("rope_local_theta", c.positive("rope_local_base_freq"), "rope_local_base_freq")
	}
	m.setNumber("rope_theta", theta.positive("rope_theta"), theta.prefix+"rope_theta")
	m.partial(p, c)
	if p != c {
		m.scaling(p, c)
		p.finish()
	}
}

// localTheta sets the rotary base of layers with a window, if the config gives one.
func (m *Model) localTheta(p *config) {
	local := p.object("sliding_attention")
	local.want("rope_type", "default")
	m.setNumber("rope_local_theta", local.positive("rope_theta"), local.prefix+"rope_theta")
	local.finish()
	p.skip("full_attention", "sliding_attention")
	p.finish()
}

func (m *Model) partial(p, c *config) {
	from := p
	if !p.has("partial_rotary_factor") {
		from = c
	}
	if from.has("partial_rotary_factor") {
		if v := from.positive("partial_rotary_factor"); v != 1 {
			m.setNumber("rope_partial", v, from.prefix+"partial_rotary_factor")
		}
	}
}

// scaling reads how the rotary frequencies are scaled for a longer context.
func (m *Model) scaling(p, c *config) {
	key := "rope_type"
	if !p.has(key) && p.has("type") {
		key = "type" // before transformers 4.43
	}
	p.skip("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
	if !p.has(key) {
		return
	}
	kind := p.word(key)
	if kind == "su" {
		kind = "longrope" // its original name
	}
	switch kind {
	case "default":
		return
	case "linear", "llama3", "yarn", "longrope":
		m.set("rope_scaling", kind, p.prefix+key)
	default:
		p.failf(key, "= %q is not supported; use default, linear, llama3, yarn or longrope", kind)
		return
	}
	original := 0.0
	if kind != "linear" {
		original = m.originalLength(p, c)
	}
	m.scalingFactor(p, c, original)
	for _, k := range []struct{ ours, theirs string }{
		{"rope_low", "low_freq_factor"}, {"rope_high", "high_freq_factor"}, {"rope_fast", "beta_fast"}, {"rope_slow", "beta_slow"},
	} {
		if p.has(k.theirs) {
			m.setNumber(k.ours, p.positive(k.theirs), p.prefix+k.theirs)
		}
	}
	if kind == "yarn" && p.has("truncate") {
		if !p.truth("truncate") {
			m.set("rope_truncate", "false", p.prefix+"truncate")
		}
	}
	if kind == "longrope" {
		for _, k := range []struct{ ours, theirs string }{{"rope_short", "short_factor"}, {"rope_long", "long_factor"}} {
			var list []string
			for _, v := range p.numbers(k.theirs) {
				list = append(list, number(v))
			}
			m.setList(k.ours, list, p.prefix+k.theirs)
		}
	}
	m.amplitude(kind, p)
}

// originalLength returns the context length before the extension.
func (m *Model) originalLength(p, c *config) float64 {
	from, name := p, "original_max_position_embeddings"
	switch {
	case c.has(name): // as in Phi-3
		from = c
	case !p.has(name):
		from, name = c, "max_position_embeddings"
	}
	v := from.count(name)
	m.setCount("rope_original", v, from.prefix+name)
	return float64(v)
}

// scalingFactor sets the factor of the context extension. If the config does not give the factor, it is computed
// from the two context lengths, provided that both are known.
func (m *Model) scalingFactor(p, c *config, original float64) {
	switch {
	case p.has("factor"):
		m.setNumber("rope_factor", p.positive("factor"), p.prefix+"factor")
	case original > 0 && c.has("max_position_embeddings"):
		v := c.positive("max_position_embeddings") / original
		m.setNumber("rope_factor", max(1, v), "max_position_embeddings / original_max_position_embeddings")
	default:
		p.failf("factor", "is missing")
	}
}

// amplitude sets the factor by which cosines and sines are multiplied, if it differs from the one that the
// language derives. The formula for mscale is that of DeepSeek-V2, as in transformers.
func (m *Model) amplitude(kind string, p *config) {
	if p.has("attention_factor") {
		m.setNumber("rope_amplitude", p.positive("attention_factor"), p.prefix+"attention_factor")
		p.skip("mscale", "mscale_all_dim")
		return
	}
	if kind != "yarn" || !p.has("mscale") && !p.has("mscale_all_dim") {
		return
	}
	var scale, all float64
	if p.has("mscale") {
		scale = p.number("mscale")
	}
	if p.has("mscale_all_dim") {
		all = p.number("mscale_all_dim")
	}
	if scale == 0 || all == 0 {
		return
	}
	factor := 1.0
	if p.has("factor") {
		factor = p.positive("factor")
	}
	of := func(mscale float64) float64 {
		if factor <= 1 {
			return 1
		}
		return 0.1*mscale*math.Log(factor) + 1
	}
	m.setNumber("rope_amplitude", of(scale)/of(all), p.prefix+"mscale / mscale_all_dim")
}
