package lang

import (
	"fmt"
	"slices"
)

// Mixers of layers: the parts that read other tokens.
const (
	MixerAttention  = "attention"
	MixerGatedDelta = "gated_delta" // linear attention by the gated delta rule
	MixerMamba2     = "mamba2"      // linear attention by Mamba-2
	MixerKimiDelta  = "kimi_delta"  // Kimi delta attention: by the gated delta rule, with a decay for each channel of the keys
	MixerLatent     = "latent"      // attention whose keys and values are computed from a latent
	MixerNone       = "none"
)

// LayerSliding is the value of layer_types for attention with a window.
const LayerSliding = "sliding"

// layerTypes is the table of the values of layer_types: the mixer that each stands for, and whether it has a window.
var layerTypes = []struct {
	name, mixer string
	window      bool
}{
	{LayerSliding, MixerAttention, true},
	{"full", MixerAttention, false},
	{MixerGatedDelta, MixerGatedDelta, false},
	{MixerMamba2, MixerMamba2, false},
	{MixerKimiDelta, MixerKimiDelta, false},
	{MixerLatent, MixerLatent, false},
	{"none", MixerNone, false},
}

// layerTypeNames lists the values of layer_types, and mixerNames the mixers.
func layerTypeNames() (list []string) {
	for _, t := range layerTypes {
		list = append(list, t.name)
	}
	return list
}

func mixerNames() (list []string) {
	for _, t := range layerTypes {
		if !slices.Contains(list, t.mixer) {
			list = append(list, t.mixer)
		}
	}
	return list
}

// Form is what a layer computes, apart from the window of its attention and the positions: a mixer and an MLP.
type Form struct {
	Mixer   string
	FFN     int // width of the MLP, or of each expert; 0: none
	Experts int // number of experts; 0: the MLP is dense
}

// FormOf returns the form of a layer.
func (m *Model) FormOf(layer int) Form {
	f := Form{Mixer: MixerAttention, FFN: m.FFN}
	if n := len(m.Mixers); n > 0 {
		f.Mixer = m.Mixers[layer%n]
	}
	if n := len(m.FFNs); n > 0 {
		f.FFN = m.FFNs[layer%n]
	}
	if f.FFN > 0 && m.sparse(layer) {
		f.FFN, f.Experts = m.ExpertFFN, m.Experts
	}
	return f
}

// Attends reports whether layers of the form have keys and values.
func (f Form) Attends() bool { return f.Mixer == MixerAttention || f.Mixer == MixerLatent }

// latents reports whether any layer has latent attention.
func (m *Model) latents() bool { return slices.Contains(m.Mixers, MixerLatent) }

// latentDefault is how the defaults of keys of latent attention follow from other keys.
const latentDefault = "none; needed with layers of type latent"

// latentProblems lists the errors in the keys of latent attention.
func (m *Model) latentProblems(fail func(keys string, code Code, hint, format string, args ...any)) {
	latent := m.latents()
	for _, k := range []struct {
		name string
		n    int
	}{{"kv_lora_rank", m.KVLatent}, {"qk_nope_head_dim", m.NopeDim}, {"qk_rope_head_dim", m.RopeDim}, {"v_head_dim", m.ValueHeadDim}, {"q_lora_rank", m.QLatent}} {
		switch {
		case k.n > 0 && !latent:
			fail("model."+k.name, Conflict, "layer_types = latent, for example", "%s has no effect without layers of type %s", k.name, MixerLatent)
			return
		case k.n < 1 && latent && k.name != "q_lora_rank":
			fail("model.layer_types", MissingKey, "add "+k.name+" = "+FindKey("model."+k.name).Example, "layers of type %s need %s", MixerLatent, k.name)
			return
		}
	}
	if !latent {
		return
	}
	if slices.Contains(m.Mixers, MixerAttention) {
		fail("model.layer_types", Conflict, "latent in place of full and sliding", "the keys and values of layers of type %s are not as wide as those of other layers with attention", MixerLatent)
	}
	if m.HeadDim != m.NopeDim+m.RopeDim {
		fail("model.head_dim", Conflict, fmt.Sprintf("head_dim = %d, or omit it", m.NopeDim+m.RopeDim),
			"head_dim = %d, but with latent attention it is qk_nope_head_dim + qk_rope_head_dim = %d", m.HeadDim, m.NopeDim+m.RopeDim)
	}
	if m.Positions == PositionsRope && m.HeadDim == m.NopeDim+m.RopeDim && m.rotated() != m.RopeDim {
		fail("model.rope_partial", Conflict, "omit rope_partial", "rope_partial = %g, but with latent attention the rotated elements are the %d of qk_rope_head_dim", m.RopePartial, m.RopeDim)
	}
	if m.KVHeads != m.Heads {
		fail("model.kv_heads", Conflict, fmt.Sprintf("kv_heads = %d, or omit it", m.Heads), "with latent attention, every query head has its own keys and values: kv_heads = %d is not heads = %d", m.KVHeads, m.Heads)
	}
	if m.QKNorm != "" && m.QKNorm != QKNormNone {
		fail("model.qk_norm", Conflict, "qk_norm = none", "latent attention has norms of its own: qk_norm = %s is not supported with it", m.QKNorm)
	}
	if m.HasBias(BiasQKV) {
		fail("model.bias", Conflict, "bias = []", "the linear maps of latent attention have no biases")
	}
}

// linearDefault is how the defaults of keys of linear attention follow from other keys.
var linearDefault = "none; needed with layers of type " + joinOr(linearMixers)

// linearMixers lists the mixers with linear attention.
var linearMixers = []string{MixerGatedDelta, MixerMamba2, MixerKimiDelta}

func isLinear(mixer string) bool { return slices.Contains(linearMixers, mixer) }

// linearKeys lists the keys that only models with linear attention have.
var linearKeys = []string{"linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"}

// ScansInRing says why a ring of ranks cannot divide a sequence.
const ScansInRing = "in a ring, every rank has rows from both ends of a subsequence, but the states of linear attention pass from token to token"

// linearProblems lists the errors in the keys of linear attention.
func (m *Model) linearProblems(fail func(keys string, code Code, hint, format string, args ...any)) {
	scans := slices.ContainsFunc(m.Mixers, isLinear)
	for i, n := range []int{m.LinearKeyHeads, m.LinearValueHeads, m.LinearKeyDim, m.LinearValueDim, m.LinearConv} {
		switch {
		case n > 0 && !scans:
			fail("model."+linearKeys[i], Conflict, "layer_types = [gated_delta, full], for example", "%s has no effect without layers of type %s", linearKeys[i], joinOr(linearMixers))
			return
		case n < 1 && scans:
			fail("model.layer_types", MissingKey, "add "+linearKeys[i]+" = "+FindKey("model."+linearKeys[i]).Example, "layers of type %s need %s", joinOr(linearMixers), linearKeys[i])
			return
		}
	}
	if m.LinearValueHeads != m.LinearKeyHeads && slices.Contains(m.Mixers, MixerKimiDelta) {
		fail("model.linear_num_value_heads model.linear_num_key_heads", Conflict, fmt.Sprintf("linear_num_value_heads = %d", m.LinearKeyHeads),
			"layers of type %s have as many heads of values as of keys, not %d and %d", MixerKimiDelta, m.LinearValueHeads, m.LinearKeyHeads)
	}
	if (m.ConvBias || m.StepMin != 0) && !slices.Contains(m.Mixers, MixerMamba2) {
		fail("model.use_conv_bias model.time_step_min", Conflict, "layer_types = [mamba2, full], for example", "use_conv_bias and time_step_min have no effect without layers of type %s", MixerMamba2)
	}
	if scans && m.LinearValueHeads%m.LinearKeyHeads != 0 {
		fail("model.linear_num_value_heads model.linear_num_key_heads", Indivisible, "linear_num_value_heads = "+nearMultiples(int64(m.LinearValueHeads), int64(m.LinearKeyHeads)),
			"linear_num_value_heads = %d is not a multiple of linear_num_key_heads = %d", m.LinearValueHeads, m.LinearKeyHeads)
	}
}

// AttentionLayers returns the number of layers with attention, and of those whose window is not shorter than the sequence.
func (m *Model) AttentionLayers(sequence int64) (all, full int) {
	for layer := range m.Layers {
		if !m.FormOf(layer).Attends() {
			continue
		}
		all++
		if w := m.WindowOf(layer); w == 0 || w >= sequence {
			full++
		}
	}
	return all, full
}

// setFFN sets the width of every MLP, or a pattern of widths, of which FFN is the largest.
func setFFN(s *Spec, v value) {
	m := &s.Model
	m.FFN, m.FFNs = 0, nil
	for _, item := range v.items() {
		m.FFN, m.FFNs = max(m.FFN, item.Int()), append(m.FFNs, item.Int())
	}
	if m.FFNs = shortest(m.FFNs, m.Layers); len(m.FFNs) < 2 {
		m.FFNs = nil
	}
}

// setLayerTypes runs after setWindow, and assigns the window set there to the layers that have one.
func setLayerTypes(s *Spec, v value) {
	m, window := &s.Model, int64(noWindow)
	if w := m.Windows; len(w) == 1 && w[0] > 0 {
		window = w[0]
	}
	m.Windows, m.Mixers = nil, nil
	for _, item := range v.items() {
		t := layerTypes[slices.Index(layerTypeNames(), item.name)]
		m.Mixers = append(m.Mixers, t.mixer)
		if t.window {
			m.Windows = append(m.Windows, window)
		} else {
			m.Windows = append(m.Windows, 0)
		}
	}
	if m.Mixers = shortest(m.Mixers, m.Layers); slices.Equal(m.Mixers, []string{MixerAttention}) {
		m.Mixers = nil
	}
	m.normalizeWindows()
}

// shortest returns the shortest pattern that gives all layers the same values as a pattern, so that equal models
// compare equal.
func shortest[T comparable](pattern []T, layers int) []T {
	if len(pattern) == 0 || layers == 0 {
		return pattern
	}
	all := make([]T, layers)
	for i := range all {
		all[i] = pattern[i%len(pattern)]
	}
	for n := range all {
		if repeats(all, n+1) {
			return all[:n+1]
		}
	}
	return all
}

// repeats reports whether a list consists of its first n elements, repeated.
func repeats[T comparable](list []T, n int) bool {
	for i := range list {
		if list[i] != list[i%n] {
			return false
		}
	}
	return true
}

// formProblems lists the errors in the forms of the layers.
func (m *Model) formProblems(fail func(keys string, code Code, hint, format string, args ...any)) {
	if slices.ContainsFunc(m.Mixers, func(mixer string) bool { return !slices.Contains(mixerNames(), mixer) }) {
		fail("model.layer_types", WrongType, "", "mixers are %v, but must be %v", m.Mixers, mixerNames())
		return
	}
	switch {
	case m.FFN == 0 && len(m.FFNs) == 0:
		fail("model.ffn", OutOfRange, fmt.Sprintf("ffn = %d, for example", 4*m.Hidden), "no layer has an MLP")
	case len(m.FFNs) > 0 && (slices.Min(m.FFNs) < 0 || slices.Max(m.FFNs) != m.FFN) || m.FFN < 1:
		fail("model.ffn", OutOfRange, "", "ffn = %d must be the largest width of an MLP, and above 0; the widths are %v", m.FFN, m.FFNs)
	}
	if all, _ := m.AttentionLayers(0); all == 0 {
		fail("model.layer_types", Conflict, "layer_types = [full, none], for example", "no layer has attention")
	}
	for layer := range m.Layers {
		if m.FormOf(layer) == (Form{Mixer: MixerNone}) {
			fail("model.layer_types model.ffn", Conflict, "a smaller number of layers, or an MLP in the layer", "layer %d has neither attention nor an MLP", layer)
			return
		}
	}
}
