package hf

import (
	"encoding/json"
	"maps"
	"math"
	"strconv"

	"sppo.dev/lang"
)

// Rotary positions. transformers 5 has rope_parameters: one object or, in Gemma-3 and OLMo-3, one for each type of layer. Earlier
// versions had rope_theta, partial_rotary_factor and rope_scaling at the top level, which transformers still reads.

// rotary reads the rotary positions.
func (m *Model) rotary(c *config) {
	p := m.rotation(c)
	m.theta("rope_theta", p, c, "rope_theta", m.arch.theta)
	m.scaling(p, c)
	m.truncated(p)
}

// rotaries reads the rotary positions of a model whose layers with and without a window may differ. Older configs have the
// base in layers with a window at the top level, under a name that depends on the class.
func (m *Model) rotaries(c *config, localName string) {
	full, local, both := m.rotations(c)
	m.theta("rope_theta", full, c, "rope_theta", m.arch.theta)
	m.scaling(full, c)
	m.truncated(both)
	if kind, key := m.kind(local); kind != "default" {
		local.failf(key, "= %q is not supported; use default", kind)
	}
	m.theta("rope_local_theta", local, c, localName, m.arch.local)
}

// rotation returns the object that describes the rotation. A rope_scaling that is not empty replaces
// rope_parameters.
func (m *Model) rotation(c *config) *config {
	name := "rope_parameters"
	if !empty(c.members["rope_scaling"]) {
		name = "rope_scaling"
	}
	p := c.objectOrEmpty(name)
	for _, nested := range []string{fullAttention, slidingAttention} {
		if p.present(nested) && c.row("layer_types") != nil {
			p.failf(nested, "is not supported for model_type = %s, whose layers have the same rotation", m.arch.modelType)
		}
	}
	return p
}

// rotations returns the objects that describe the rotation in layers without and with a window, and the
// object that contains them. rope_scaling is added to the former.
func (m *Model) rotations(c *config) (full, local, both *config) {
	both = c.objectOrEmpty("rope_parameters")
	full, local = both.objectOrEmpty(fullAttention), both.objectOrEmpty(slidingAttention)
	if c.has("rope_scaling") {
		scaling := c.object("rope_scaling")
		if c.has("rope_parameters") && !both.has(fullAttention) {
			c.failf("rope_scaling", "is not supported next to rope_parameters without %s", fullAttention)
		}
		members := maps.Clone(full.members)
		if !c.has("rope_parameters") {
			members["rope_type"] = json.RawMessage(`"default"`) // transformers does not look for the older name, type
		}
		maps.Copy(members, scaling.members)
		full.used = scaling.used // the members of both are read as those of one
		scaling.members = members
		full = scaling
	}
	return full, local, both
}

// empty reports whether a value counts as false in Python.
func empty(v json.RawMessage) bool {
	var x any
	_ = json.Unmarshal(v, &x) // an absent value is empty
	switch x := x.(type) {
	case []any:
		return len(x) == 0
	case map[string]any:
		return len(x) == 0
	}
	return x == nil || x == false || x == 0.0 || x == ""
}

// theta sets a rotary base. If the parameters do not contain it, it has a name of its own at the top level.
func (m *Model) theta(ours string, p, c *config, theirs string, usual float64) {
	switch {
	case p.present("rope_theta"):
		m.setNumber(ours, p.positive("rope_theta"), p.prefix+"rope_theta")
	case theirs != "" && c.present(theirs):
		m.setNumber(ours, c.positive(theirs), theirs)
	default:
		if theirs != "" {
			c.usual[theirs] = number(usual)
		}
		m.setNumber(ours, usual, "the default of transformers")
	}
}

// scalings lists the kinds of scaled frequencies that the class accepts and the language has.
func (a *architecture) scalings() []string {
	if a.modelType == phi3 {
		return []string{lang.ScalingLongRope}
	}
	return []string{lang.ScalingLinear, lang.ScalingLlama3, lang.ScalingYarn, lang.ScalingLongRope}
}

// ntkAlpha stands for frequencies with a base that the member alpha enlarges.
const ntkAlpha = "ntk_alpha"

// kind returns how the frequencies are scaled. Some configs of Phi-3 have the name su or yarn for longrope.
func (m *Model) kind(p *config) (kind, key string) {
	key = "rope_type"
	if !p.present(key) && p.present("type") {
		key = "type" // before transformers 4.43
	}
	if !p.present(key) {
		return "default", key
	}
	if string(p.members["type"]) == string(p.members[key]) {
		p.skip("type")
	}
	kind = p.word(key)
	if m.arch.modelType == phi3 && (kind == "su" || kind == lang.ScalingYarn) {
		if name := "original_max_position_embeddings"; kind == "su" && !p.present(name) {
			p.failf(name, "is missing") // transformers needs it here, too
		}
		kind = lang.ScalingLongRope
	}
	if m.arch.modelType == hunyuan && kind == "dynamic" && !empty(p.members["alpha"]) {
		return ntkAlpha, key
	}
	p.among(key, kind, append([]string{"default"}, m.arch.scalings()...))
	return kind, key
}

// scaling reads the rotated part of a head, and how the frequencies are scaled for a longer context.
func (m *Model) scaling(p, c *config) {
	kind, key := m.kind(p)
	if *c.err != nil {
		return
	}
	m.partial(kind, p, c)
	if kind == "default" || kind == ntkAlpha {
		return
	}
	m.set("rope_scaling", kind, p.prefix+key)
	original := 0.0
	if kind != lang.ScalingLinear {
		original = m.originalLength(p, c)
	}
	factor := m.scalingFactor(kind, p, c, original)
	switch kind {
	case lang.ScalingLlama3:
		m.setNumber("rope_low", p.positive("low_freq_factor"), p.prefix+"low_freq_factor")
		m.setNumber("rope_high", p.positive("high_freq_factor"), p.prefix+"high_freq_factor")
	case lang.ScalingYarn:
		for _, k := range []struct{ ours, theirs string }{{"rope_fast", "beta_fast"}, {"rope_slow", "beta_slow"}} {
			if p.skip(k.theirs); !empty(p.members[k.theirs]) {
				m.setNumber(k.ours, p.positive(k.theirs), p.prefix+k.theirs)
			}
		}
		m.amplitude(p, factor)
	case lang.ScalingLongRope:
		for _, k := range []struct{ ours, theirs string }{{"rope_short", "short_factor"}, {"rope_long", "long_factor"}} {
			var list []string
			for _, v := range p.numbers(k.theirs) {
				list = append(list, number(v))
			}
			m.setList(k.ours, list, p.prefix+k.theirs)
		}
		m.amplitude(p, factor)
	}
}

// truncated sets whether yarn rounds the range of pairs. In Gemma-3, transformers does not look for the member among
// the parameters of a type of layer, but next to these.
func (m *Model) truncated(p *config) {
	if v := p.members["truncate"]; m.value("rope_scaling") == lang.ScalingYarn && v != nil {
		p.skip("truncate")
		if empty(v) {
			m.set("rope_truncate", "false", p.prefix+"truncate")
		}
	}
}

// partial sets the rotated part of a head. Only some classes rotate a part. The others ignore the member with the
// default frequencies and, with others, fail.
func (m *Model) partial(kind string, p, c *config) {
	const name = "partial_rotary_factor"
	from := p
	if !p.present(name) {
		from = c
	}
	if !from.present(name) || from == c && !c.has(name) && !m.arch.partial {
		return
	}
	if rotated := m.heads("qk_rope_head_dim"); m.value("qk_rope_head_dim") != "" { // which says it, too
		if whole := float64(rotated + m.heads("qk_nope_head_dim")); int64(from.positive(name)*whole) != rotated && m.arch.modelType == mistral4 {
			from.failf(name, "= %s is not qk_rope_head_dim / (qk_nope_head_dim + qk_rope_head_dim)", quote(from.members[name]))
		}
		return
	}
	width, _ := strconv.ParseFloat(m.value("head_dim"), 64)
	switch {
	case m.arch.partial:
		// transformers rounds the number of rotated elements towards 0.
		if rotated := math.Trunc(from.positive(name) * width); rotated != width && *c.err == nil {
			m.setNumber("rope_partial", rotated/width, from.prefix+name)
		}
	case kind == "default":
	case math.Trunc(from.positive(name)*width) != width:
		from.failf(name, "= %s is not supported with rope_type = %s", quote(from.members[name]), kind)
	}
}

// originalLength returns the context length before the extension.
func (m *Model) originalLength(p, c *config) float64 {
	const name, most = "original_max_position_embeddings", "max_position_embeddings"
	from, key := p, name
	switch gemma3 := m.arch.local > 0; {
	case !gemma3 && (c.present(name) || m.arch.modelType == phi3):
		from = c
		p.skip(name)
	case !p.present(name):
		from, key = c, most
	}
	v := from.count(key)
	m.setCount("rope_original", v, from.prefix+key)
	return float64(v)
}

// scalingFactor sets the factor of the context extension and returns it. If it is null, or missing with longrope, it
// is computed from the two context lengths.
func (m *Model) scalingFactor(kind string, p, c *config, original float64) float64 {
	v, from := 0.0, p.prefix+"factor"
	switch {
	case original > 0 && !p.has("factor") && (kind == lang.ScalingLongRope || kind == lang.ScalingYarn && p.present("factor")):
		p.skip("factor")
		v, from = c.positive("max_position_embeddings")/original, "max_position_embeddings / original_max_position_embeddings"
	default:
		v = p.positive("factor")
	}
	if kind == lang.ScalingLongRope { // needs it only for the amplitude, which is 1 for smaller factors
		v = max(1, v)
	}
	m.setNumber("rope_factor", v, from)
	return v
}

// amplitude sets the factor by which cosines and sines are multiplied, if it differs from the one that the
// language derives. The formula for mscale is that of DeepSeek-V2, as in transformers.
func (m *Model) amplitude(p *config, factor float64) {
	if p.has("attention_factor") {
		m.setNumber("rope_amplitude", p.positive("attention_factor"), p.prefix+"attention_factor")
		return
	}
	if m.value("rope_scaling") != lang.ScalingYarn {
		return
	}
	of := func(mscale float64) float64 {
		if factor <= 1 {
			return 1
		}
		return 0.1*mscale*math.Log(factor) + 1
	}
	switch {
	case !empty(p.members["mscale"]) && !empty(p.members["mscale_all_dim"]):
		m.setNumber("rope_amplitude", of(p.number("mscale"))/of(p.number("mscale_all_dim")), p.prefix+"mscale / mscale_all_dim")
	case m.arch.modelType == ministral3: // whose family has another default
		m.setNumber("rope_amplitude", of(1), "the default of transformers")
	}
}
