package lang

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
)

// Family is a row of the table of model families: its name, and the defaults of keys for its models.
type Family struct {
	Name     string
	Doc      string
	Defaults map[string]string // by name of a model key; values as written in a spec
}

// Families is the table of all families. Families have no defaults for sizes.
var Families = []Family{
	{"gpt", "GPT: LayerNorm, GELU, biases, learned positions", map[string]string{
		"norm": "layernorm", "activation": "gelu_tanh", "gated": "false", "bias": "[qkv, attn_out, mlp]", "positions": "learned"}},
	{"gpt2", "GPT-2: like gpt, but with tied embeddings", map[string]string{
		"norm": "layernorm", "activation": "gelu_tanh", "gated": "false", "bias": "[qkv, attn_out, mlp]", "positions": "learned", "tied": "true"}},
	{"llama", "Llama and Llama 2: RMSNorm, SwiGLU, rotary positions, no biases", nil},
	{"llama3", "Llama 3", map[string]string{"rope_theta": "500000"}},
	{"llama3_1", "Llama 3.1 and 3.3", map[string]string{
		"rope_theta": "500000", "rope_scaling": "llama3", "rope_factor": "8", "rope_original": "8K"}},
	{"llama3_2", "Llama 3.2", map[string]string{
		"rope_theta": "500000", "rope_scaling": "llama3", "rope_factor": "32", "rope_original": "8K", "tied": "true"}},
	{"mistral", "Mistral 7B from v0.2 on, and Mistral Small", map[string]string{"rope_theta": "1000000"}},
	{"qwen2", "Qwen2 and Qwen2.5", map[string]string{"bias": "[qkv]", "rope_theta": "1000000", "norm_eps": "1e-6"}},
	{"qwen3", "Qwen3, dense", map[string]string{"qk_norm": "head", "head_dim": "128", "rope_theta": "1000000", "norm_eps": "1e-6"}},
	{"phi3", "Phi-3 and Phi-4", nil},
	{"olmo2", "OLMo-2", map[string]string{"norm_place": "post", "qk_norm": "all", "rope_theta": "500000", "norm_eps": "1e-6"}},
	{"olmo3", "OLMo-3", map[string]string{"norm_place": "post", "qk_norm": "all", "rope_theta": "500000", "norm_eps": "1e-6",
		"window": "4K", "layer_types": "[sliding, sliding, sliding, full]", "rope_local_theta": "500000"}},
	{"seed_oss", "Seed-OSS", map[string]string{"bias": "[qkv]", "head_dim": "128", "rope_theta": "10000000", "norm_eps": "1e-6"}},
	{"granite", "Granite 3. `residual_multiplier` r has no key: `embed_scale` is embedding_multiplier / r, and `norm_eps` is rms_norm_eps / r^2", map[string]string{
		"rope_theta": "10000000", "tied": "true"}},
	{"exaone4", "EXAONE-4; the model with 32B parameters also has `window = 4K`, `layer_types = [sliding, sliding, sliding, full]` and `positions = [rope, rope, rope, none]`", map[string]string{
		"norm_place": "post", "qk_norm": "head", "rope_theta": "1000000"}},
	{"ministral3", "Ministral 3", map[string]string{"head_dim": "128", "rope_theta": "1000000", "rope_scaling": "yarn",
		"rope_factor": "16", "rope_original": "16K", "rope_amplitude": "1", "rope_beta": "0.1"}},
	{"hunyuan_v1_dense", "Hunyuan, dense", map[string]string{"qk_norm": "rotated", "head_dim": "128"}},
	{"ernie4_5", "ERNIE 4.5, dense. Its rotated pairs are neighbours: their weights change places where folders are read and written", map[string]string{
		"head_dim": "128", "rope_theta": "500000", "tied": "true"}},
	{"qwen3_moe", "Qwen3 with experts", map[string]string{"qk_norm": "head", "head_dim": "128", "rope_theta": "1000000", "norm_eps": "1e-6"}},
	{"qwen3_next", "Qwen3-Next; `layer_types` says which layers have linear attention", map[string]string{"qk_norm": "head", "head_dim": "256",
		"norm_offset": "1", "norm_eps": "1e-6", "rope_theta": "10000000", "rope_partial": "0.25", "attn_output_gate": "true"}},
	{"qwen3_5", "Qwen3.5, with and without experts", map[string]string{"qk_norm": "head", "head_dim": "256",
		"norm_offset": "1", "norm_eps": "1e-6", "rope_theta": "10000000", "rope_partial": "0.25", "attn_output_gate": "true"}},
	{"nemotron_h", "Nemotron-H and Nemotron 3; `layer_types`, `ffn` and `mlp_layer_types` say which layers have Mamba-2, attention, an MLP or experts", map[string]string{
		"gated": "false", "activation": "relu2", "positions": "none", "head_dim": "128"}},
	{"mixtral", "Mixtral", map[string]string{"rope_theta": "1000000"}},
	{"glm4_moe", "GLM-4.5 to GLM-4.7", map[string]string{"bias": "[qkv]", "head_dim": "128", "rope_theta": "1000000", "rope_partial": "0.5",
		"scoring_func": "sigmoid", "e_score_correction_bias": "true"}},
	{"deepseek_v2", "DeepSeek-V2, without groups of experts", map[string]string{"layer_types": "latent", "kv_lora_rank": "512", "qk_nope_head_dim": "128", "qk_rope_head_dim": "64", "v_head_dim": "128",
		"norm_eps": "1e-6", "norm_topk_prob": "false"}},
	{"deepseek_v3", "DeepSeek-V3 and Kimi K2", map[string]string{"layer_types": "latent", "kv_lora_rank": "512", "qk_nope_head_dim": "128", "qk_rope_head_dim": "64", "v_head_dim": "128",
		"norm_eps": "1e-6", "scoring_func": "sigmoid", "e_score_correction_bias": "true"}},
	{"mistral4", "Mistral 4", map[string]string{"layer_types": "latent", "kv_lora_rank": "256", "qk_nope_head_dim": "64", "qk_rope_head_dim": "64", "v_head_dim": "128",
		"norm_eps": "1e-6"}},
	{"kimi_linear", "Kimi Linear; `layer_types` says which layers have Kimi delta attention, and which latent attention", map[string]string{
		"positions": "none", "scoring_func": "sigmoid", "e_score_correction_bias": "true"}},
	{"gpt_oss", "gpt-oss", map[string]string{"bias": "[qkv, attn_out, router, experts]", "head_dim": "64", "attn_sinks": "true", "activation": "clamped_silu",
		"scoring_func": "softmax_topk", "rope_theta": "150000", "rope_scaling": "yarn", "rope_factor": "32", "rope_original": "4K", "rope_truncate": "false",
		"window": "128", "layer_types": "[sliding, full]"}},
	{"minimax_m2", "MiniMax-M2", map[string]string{"qk_norm": "all", "head_dim": "128", "rope_theta": "5000000", "rope_partial": "0.5", "norm_eps": "1e-6",
		"scoring_func": "sigmoid", "e_score_correction_bias": "true"}},
	{"smollm3", "SmolLM3: every fourth layer without positions", map[string]string{
		"positions": "[rope, rope, rope, none]", "rope_theta": "5000000", "norm_eps": "1e-6", "tied": "true"}},
	{"gemma2", "Gemma-2", map[string]string{
		"norm_offset": "1", "norm_place": "pre_post", "norm_eps": "1e-6", "activation": "gelu_tanh", "embed_scale": "sqrt_hidden",
		"head_dim": "256", "attn_softcap": "50", "logit_softcap": "30", "tied": "true",
		"window": "4K", "layer_types": "[sliding, full]"}},
	{"gemma3", "Gemma-3 text; models with 4B parameters or more also need `rope_scaling = linear` and `rope_factor = 8`", map[string]string{
		"norm_offset": "1", "norm_place": "pre_post", "norm_eps": "1e-6", "activation": "gelu_tanh", "embed_scale": "sqrt_hidden",
		"head_dim": "256", "qk_norm": "head", "rope_theta": "1000000", "tied": "true",
		"window": "1K", "layer_types": "[sliding, sliding, sliding, sliding, sliding, full]", "rope_local_theta": "10000"}},
}

// defaultsInWords lists the defaults as they would be written in a spec, in the order of the keys.
func (f *Family) defaultsInWords() string {
	var words []string
	for _, k := range modelKeys {
		if v := f.Defaults[k.Name]; v != "" {
			words = append(words, "`"+k.Name+" = "+v+"`")
		}
	}
	if words == nil {
		return "All keys have their usual defaults."
	}
	return strings.Join(words, ", ")
}

func familyNames() (names []string) {
	for _, f := range Families {
		names = append(names, f.Name)
	}
	return names
}

// familyDefault returns the default that the model's family has for a key, or "" if the family has none.
func (s *Spec) familyDefault(k *Key) string {
	i := slices.IndexFunc(Families, func(f Family) bool { return f.Name == s.Model.Family })
	if i < 0 || k.Block != blockModel {
		return ""
	}
	defaults := Families[i].Defaults
	if isRopeKey(k.Name) && s.Model.RopeScaling != defaults["rope_scaling"] {
		return "" // the family's numbers apply only to its own scaling
	}
	switch w := s.Model.Windows; k.Name {
	case "layer_types": // the family's pattern applies only if the spec has one window for all layers
		if (len(w) != 1 || w[0] == 0) && strings.Contains(defaults[k.Name], LayerSliding) {
			return ""
		}
	case "rope_local_theta":
		if !s.Model.hasWindow() {
			return ""
		}
	}
	return defaults[k.Name]
}

// isRopeKey reports whether only some scalings use a key.
func isRopeKey(name string) bool {
	return slices.ContainsFunc(ropeKeys, func(k ropeKey) bool { return k.name == name })
}

// Methods of scaling rotary frequencies.
const (
	ScalingNone     = "none"
	ScalingLinear   = "linear"
	ScalingLlama3   = "llama3"
	ScalingYarn     = "yarn"
	ScalingLongRope = "longrope"
)

// scalings lists all methods except ScalingNone.
var scalings = []string{ScalingLinear, ScalingLlama3, ScalingYarn, ScalingLongRope}

// ropeKey is a key that only some scalings use.
type ropeKey struct {
	name   string
	usedBy []string
	needed []string // those of usedBy that require the key
	given  func(*Model) bool
}

// ropeKeys is the table of keys that only some scalings use.
var ropeKeys = []ropeKey{
	{"rope_factor", scalings, scalings[:3], func(m *Model) bool { return m.RopeFactor != 0 }},
	{"rope_original", scalings[1:], scalings[1:], func(m *Model) bool { return m.RopeOriginal != 0 }},
	{"rope_low", scalings[1:2], nil, func(m *Model) bool { return m.RopeLow != 0 }},
	{"rope_high", scalings[1:2], nil, func(m *Model) bool { return m.RopeHigh != 0 }},
	{"rope_fast", scalings[2:3], nil, func(m *Model) bool { return m.RopeFast != 0 }},
	{"rope_slow", scalings[2:3], nil, func(m *Model) bool { return m.RopeSlow != 0 }},
	{"rope_truncate", scalings[2:3], nil, func(m *Model) bool { return m.RopeTruncate }},
	{"rope_amplitude", scalings[2:], nil, func(m *Model) bool { return m.RopeAmplitude != 1 }},
	{"rope_beta", scalings[1:], nil, func(m *Model) bool { return m.RopeBeta != 0 }},
	{"rope_short", scalings[3:], scalings[3:], func(m *Model) bool { return len(m.RopeShort) > 0 }},
	{"rope_long", scalings[3:], scalings[3:], func(m *Model) bool { return len(m.RopeLong) > 0 }},
}

// whereScaled returns value if the model uses one of the given scalings, otherwise 0.
func whereScaled(s *Spec, value float64, by ...string) float64 {
	if slices.Contains(by, s.Model.RopeScaling) {
		return value
	}
	return 0
}

// amplitude returns the default of rope_amplitude, from Peng et al. (2023) for yarn and from Ding
// et al. (2024) for longrope.
func (m *Model) amplitude() float64 {
	switch {
	case m.RopeFactor <= 1:
	case m.RopeScaling == ScalingYarn:
		return 0.1*math.Log(m.RopeFactor) + 1
	case m.RopeScaling == ScalingLongRope && m.RopeOriginal > 1:
		return math.Sqrt(1 + math.Log(m.RopeFactor)/math.Log(float64(m.RopeOriginal)))
	}
	return 1
}

// rotated returns the number of elements of a head that are rotated, in pairs (i, i+Rotated/2).
func (m *Model) rotated() int { return int(math.Round(m.RopePartial * float64(m.HeadDim))) }

// biasGroups lists the groups of linear maps that may have biases.
var biasGroups = []string{BiasQKV, BiasAttnOut, BiasMLP, BiasRouter, BiasExperts}

func setBias(s *Spec, v value) {
	s.Model.Bias = []string{}
	for _, group := range biasGroups { // in a fixed order, so that equal sets compare equal
		if slices.ContainsFunc(v.list, func(item value) bool { return item.name == group }) {
			s.Model.Bias = append(s.Model.Bias, group)
		}
	}
}

func setPositions(s *Spec, v value) {
	s.Model.Positions, s.Model.PositionPattern = v.name, nil
	if v.kind != isList {
		return
	}
	s.Model.Positions = PositionsNone
	for _, item := range v.list {
		s.Model.PositionPattern = append(s.Model.PositionPattern, item.name)
		if item.name == PositionsRope {
			s.Model.Positions = PositionsRope
		}
	}
	if n := len(s.Model.PositionPattern); !slices.Contains(s.Model.PositionPattern, PositionsNone) || s.Model.Positions == PositionsNone || n == 1 {
		s.Model.PositionPattern = nil // the same in all layers
	}
}

func setEmbedScale(s *Spec, v value) {
	s.Model.EmbedScale = v.num
	if v.kind == isName {
		s.Model.EmbedScale = s.Model.rootOfHidden()
	}
}

// rootOfHidden returns the square root of Hidden, rounded to the model's data type, as in Gemma's training.
func (m *Model) rootOfHidden() float64 {
	root := math.Sqrt(float64(m.Hidden))
	if m.DType != "bf16" {
		return root
	}
	bits := math.Float32bits(float32(root))
	return float64(math.Float32frombits((bits + 0x7fff + bits>>16&1) &^ 0xffff)) // to nearest even
}

func deriveHeadDim(s *Spec) {
	m := &s.Model
	if m.HeadDim = m.Hidden / max(1, m.Heads); m.RopeDim > 0 {
		m.HeadDim = m.NopeDim + m.RopeDim
	}
}

func deriveRopePartial(s *Spec) {
	m := &s.Model
	if m.RopePartial = 1; m.RopeDim > 0 {
		m.RopePartial = float64(m.RopeDim) / float64(m.NopeDim+m.RopeDim)
	}
}

func deriveFFN(s *Spec) {
	s.Model.FFN = 4 * s.Model.Hidden
	if s.Model.Gated {
		const step = 256
		s.Model.FFN = ((8*s.Model.Hidden+2)/3 + step - 1) / step * step
	}
}

// Problem is an error in a model.
type Problem struct {
	Keys    []string // the keys that may have caused it; diagnostics point at the first one that was written
	Code    Code
	Hint    string
	Message string
}

// Problems lists the errors that prevent the compiler from building the model. The sizes of the model must be
// positive. The model may come from a spec or from an edited plan.
func (m *Model) Problems() (found []Problem) {
	fail := func(keys string, code Code, hint, format string, args ...any) {
		found = append(found, Problem{strings.Fields(keys), code, hint, fmt.Sprintf(format, args...)})
	}
	found = append(found, m.foreignValues()...)
	m.formProblems(fail)
	m.expertProblems(fail)
	m.linearProblems(fail)
	m.latentProblems(fail)
	if m.Heads%m.KVHeads != 0 {
		fail("model.kv_heads", Indivisible, fmt.Sprintf("kv_heads = %s divides %d", nearDivisors(m.Heads, m.KVHeads), m.Heads),
			"heads = %[2]d is not divisible by %[1]d key and value heads", m.KVHeads, m.Heads)
	}
	if m.NormPlace != NormPre && (m.HasBias(BiasAttnOut) || m.HasBias(BiasMLP)) {
		fail("model.bias model.norm_place", Conflict, "bias = [qkv] or [], or norm_place = pre",
			"biases of attention's output and of the MLP are not supported with a norm after them")
	}
	if scaled := math.Abs(m.AttnScale*math.Sqrt(float64(m.HeadDim))-1) > 1e-12; m.QKNorm == QKNormRotated && (scaled || m.RopeBeta != 0) {
		fail("model.attn_scale model.rope_beta model.qk_norm", Conflict, "qk_norm = head",
			"attn_scale and rope_beta are part of the rotation, which qk_norm = rotated would undo")
	}
	if m.Positions == PositionsRope {
		found = append(found, m.ropeProblems()...)
	}
	return found
}

// foreignValues lists values that no key could have set, such as unknown names and numbers out of range. A key
// that only some scalings use may be 0.
func (m *Model) foreignValues() (found []Problem) {
	keys, s := keysByName(), reflect.ValueOf(*m)
	for i := range s.NumField() {
		name := s.Type().Field(i).Tag.Get("json")
		k, field := keys[name], s.Field(i)
		if name == "position_pattern" {
			k = keys["positions"]
		}
		if k == nil || name == "ffn" || field.IsZero() && isRopeKey(name) { // formProblems checks ffn
			continue
		}
		switch field.Kind() {
		case reflect.String:
			found = append(found, k.foreignWord(field.String())...)
		case reflect.Slice:
			for j := range field.Len() {
				if word := field.Index(j); word.Kind() == reflect.String {
					found = append(found, k.foreignWord(word.String())...)
				}
			}
		case reflect.Int:
			found = append(found, k.foreignNumber(float64(field.Int()))...)
		case reflect.Float64:
			found = append(found, k.foreignNumber(field.Float())...)
		}
	}
	return found
}

func (k *Key) foreignWord(word string) []Problem {
	if words := k.values(); !slices.Contains(words, word) {
		return []Problem{{[]string{k.Path()}, UnknownName, orList(words), fmt.Sprintf("it cannot be %q", word)}}
	}
	return nil
}

func (k *Key) foreignNumber(v float64) []Problem {
	n := k.takes.number
	if !(v >= n.min && v <= n.max) || n.above && v == n.min {
		return []Problem{{[]string{k.Path()}, OutOfRange, "", fmt.Sprintf("%s is out of range: %g", k.Name, v)}}
	}
	return nil
}

// keysByName maps the names of model keys to their rows in the table.
var keysByName = sync.OnceValue(func() map[string]*Key {
	keys := map[string]*Key{}
	for _, k := range KeysOf(blockModel) {
		keys[k.Name] = k
	}
	return keys
})

func (m *Model) ropeProblems() (found []Problem) {
	fail := func(keys string, code Code, hint, format string, args ...any) {
		found = append(found, Problem{strings.Fields(keys), code, hint, fmt.Sprintf(format, args...)})
	}
	rotated := m.RopePartial * float64(m.HeadDim)
	switch whole := math.Abs(rotated-math.Round(rotated)) < 1e-6; {
	case m.RopeDim%2 != 0:
		fail("model.qk_rope_head_dim", Indivisible, fmt.Sprintf("qk_rope_head_dim = %d", m.RopeDim+1),
			"rotary positions need an even qk_rope_head_dim, not %d", m.RopeDim)
	case m.RopePartial == 1 && m.HeadDim%2 != 0:
		fail("model.head_dim model.heads model.hidden", Indivisible, fmt.Sprintf("head_dim = %d or %d", m.HeadDim-1, m.HeadDim+1),
			"rotary positions need an even head_dim, not %d", m.HeadDim)
	case !whole || m.rotated()%2 != 0 || m.rotated() == 0:
		fail("model.rope_partial", Indivisible, "rope_partial * head_dim is an even number",
			"rope_partial = %g of head_dim = %d is %g, which is not an even number of elements", m.RopePartial, m.HeadDim, rotated)
	}
	for _, k := range ropeKeys {
		key := "model." + k.name
		if k.given(m) && !slices.Contains(k.usedBy, m.RopeScaling) {
			fail(key, Conflict, "rope_scaling = "+strings.Join(k.usedBy, " or "), "%s has no effect with rope_scaling = %s", k.name, m.RopeScaling)
		}
		if !k.given(m) && slices.Contains(k.needed, m.RopeScaling) {
			fail("model.rope_scaling", MissingKey, "add "+k.name+" = "+FindKey(key).Example, "rope_scaling = %s needs %s", m.RopeScaling, k.name)
		}
	}
	if m.RopeScaling == ScalingLongRope {
		for _, l := range []struct {
			key  string
			list []float64
		}{{"rope_short", m.RopeShort}, {"rope_long", m.RopeLong}} {
			if n := m.rotated() / 2; len(l.list) > 0 && len(l.list) != n {
				fail("model."+l.key, LengthOfList, fmt.Sprintf("write %d numbers", n), "%s lists %d numbers for %d rotated pairs", l.key, len(l.list), n)
			}
		}
	}
	if m.RopeLocalTheta != 0 && !m.hasWindow() {
		fail("model.rope_local_theta", Conflict, "window = 1K, for example", "rope_local_theta applies to layers with a window, but no layer has one")
	}
	if m.RopeScaling == ScalingLlama3 && m.RopeLow >= m.RopeHigh {
		fail("model.rope_low model.rope_high", Conflict, "", "rope_low = %g is not below rope_high = %g", m.RopeLow, m.RopeHigh)
	}
	return found
}

// Local reports whether a layer uses the base rope_local_theta.
func (m *Model) Local(layer int) bool { return m.RopeLocalTheta != 0 && m.WindowOf(layer) != 0 }

// Rates returns the angles by which the rotated pairs of a layer turn from one position to the next, in
// radians.
func (m *Model) Rates(layer int, sequence int64) []float64 {
	width := m.rotated()
	rates := make([]float64, width/2)
	for i := range rates {
		place := -2 * float64(i) / float64(width)
		if m.Local(layer) {
			rates[i] = math.Pow(m.RopeLocalTheta, place)
			continue
		}
		rate := math.Pow(m.RopeTheta, place)
		rates[i] = rate / m.stretch(rate, i, width, sequence)
	}
	return rates
}

// stretch returns the number by which a frequency is divided: llama3 as in Llama 3.1's published
// code, yarn after Peng et al. (2023), longrope after Ding et al. (2024).
func (m *Model) stretch(rate float64, pair, width int, sequence int64) float64 {
	unstretched := 0.0 // weight of the original frequency
	switch m.RopeScaling {
	case ScalingNone:
		return 1
	case ScalingLongRope:
		if sequence > int64(m.RopeOriginal) {
			return m.RopeLong[pair]
		}
		return m.RopeShort[pair]
	case ScalingLlama3:
		turns := float64(m.RopeOriginal) * rate / (2 * math.Pi)
		unstretched = (turns - m.RopeLow) / (m.RopeHigh - m.RopeLow)
	case ScalingYarn:
		low, high := m.yarnPairs(width)
		unstretched = 1 - (float64(pair)-low)/(high-low)
	}
	unstretched = min(max(unstretched, 0), 1)
	return 1 / ((1-unstretched)/m.RopeFactor + unstretched)
}

// yarnPairs returns the range of pairs over which scaling increases: pairs before the first number are not
// scaled, and pairs at or after the second are scaled fully.
func (m *Model) yarnPairs(width int) (low, high float64) {
	pair := func(turns float64) float64 {
		return float64(width) * math.Log(float64(m.RopeOriginal)/(turns*2*math.Pi)) / (2 * math.Log(m.RopeTheta))
	}
	low, high = pair(m.RopeFast), pair(m.RopeSlow)
	if m.RopeTruncate {
		low, high = math.Floor(low), math.Ceil(high)
	}
	low, high = max(low, 0), min(high, float64(width-1))
	if low == high {
		high += 0.001
	}
	return low, high
}
