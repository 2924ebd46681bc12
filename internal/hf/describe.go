package hf

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"sppo.dev/ir"
	"sppo.dev/lang"
)

// Describe writes a config.json for a model that does not come from a folder and was trained on sequences of
// the given length, in tokens. It uses a transformers architecture that computes the same function, preferably
// the architecture of the model's family. The config is read back, and an architecture is used only if this
// yields the same model. The returned model has no folder.
func Describe(m *ir.Model, sequence int64) (*Model, []byte, error) {
	var refusal error
	for _, a := range candidates(m.Family) {
		members := asReals(a.describe(m, sequence))
		text, err := json.MarshalIndent(members, "", "  ")
		if err != nil {
			return nil, nil, err
		}
		read, err := a.reread(text, m, sequence)
		if err == nil {
			return read, append(text, '\n'), nil
		}
		if refusal == nil {
			refusal = fmt.Errorf("transformers has no such model: the closest is %s, but %w", a.class, err)
		}
	}
	return nil, nil, refusal
}

// candidates lists all architectures, starting with those of a family.
func candidates(family string) (list []*architecture) {
	var others []*architecture
	for i := range architectures {
		a := &architectures[i]
		if strings.HasPrefix(family, a.family) || strings.HasPrefix(a.family, family) {
			list = append(list, a)
		} else {
			others = append(others, a)
		}
	}
	return append(list, others...)
}

// reread reads a config back and checks that it yields the given model.
func (a *architecture) reread(text []byte, want *ir.Model, sequence int64) (*Model, error) {
	c, err := parseConfig(text)
	if err != nil {
		return nil, err
	}
	read, err := newModel("model", "", c)
	if err != nil {
		return nil, err
	}
	l, err := read.Lang(sequence, want.DType)
	if err != nil {
		return nil, err
	}
	got := ir.Model(l)
	for _, n := range [][2]*float64{{&got.AttnScale, &want.AttnScale}, {&got.LogitScale, &want.LogitScale}} {
		if math.Abs(*n[0]-*n[1]) <= 1e-12**n[1] {
			*n[0] = *n[1] // they differ by rounding if the config holds the inverse or its square
		}
	}
	if a, b := got.Difference(want); a != "" {
		return nil, fmt.Errorf("it has %s where this model has %s", a, b)
	}
	return read, nil
}

// theirs maps our names of activation functions to those of transformers.
var theirs = map[string]string{"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2", "clamped_silu": "silu"}

// describe returns those members of a config that the architecture supports.
func (a *architecture) describe(m *ir.Model, sequence int64) map[string]any {
	l := lang.Model(*m)
	c := map[string]any{
		"architectures": []string{a.class}, "model_type": a.modelType, "dtype": typeNames[exportTypes[m.DType]],
		"vocab_size": m.Vocab, "tie_word_embeddings": m.Tied, "initializer_range": m.InitStd,
		"bos_token_id": nil, "eos_token_id": nil, "pad_token_id": nil,
	}
	if a.modelType == gpt2 {
		a.describeGPT(c, m, sequence)
		return c
	}
	for key, v := range map[string]any{
		"hidden_size": m.Hidden, "num_hidden_layers": m.Layers, "num_attention_heads": m.Heads, "num_key_value_heads": m.KVHeads,
		"head_dim": m.HeadDim, "intermediate_size": m.FFN, "rms_norm_eps": m.NormEps, "max_position_embeddings": sequence,
	} {
		c[key] = v
	}
	if a.names.fused != nil && rowOf(a.keys, "moe_intermediate_size") == nil && m.Experts > 0 {
		c["intermediate_size"] = m.ExpertFFN
	}
	if rowOf(a.keys, "layers_block_type") != nil {
		a.describeBlocks(c, &l)
	}
	dense := denseLayers(&l)
	for key, v := range map[string]any{
		"hidden_act": theirs[m.Activation], "hidden_activation": theirs[m.Activation],
		"attention_bias": l.HasBias(lang.BiasQKV), "attention_out_bias": l.HasBias(lang.BiasAttnOut), "mlp_bias": l.HasBias(lang.BiasMLP),
		"embedding_multiplier": m.EmbedScale, "residual_multiplier": 1.0, "attention_multiplier": m.AttnScale, "logits_scaling": 1 / m.LogitScale,
		"use_bias":    len(m.Bias) > 0,
		"num_experts": m.Experts, "num_local_experts": m.Experts, "n_routed_experts": m.Experts, "num_experts_per_tok": m.TopExperts,
		"linear_num_key_heads": max(1, m.LinearKeyHeads), "linear_num_value_heads": max(1, m.LinearValueHeads),
		"linear_key_head_dim": max(1, m.LinearKeyDim), "linear_value_head_dim": max(1, m.LinearValueDim), "linear_conv_kernel_dim": max(1, m.LinearConv),
		"shared_expert_intermediate_size": m.SharedFFN,
		"kv_lora_rank":                    max(1, m.KVLatent), "q_lora_rank": countOrNull(m.QLatent), "qk_nope_head_dim": max(1, m.NopeDim), "qk_rope_head_dim": max(1, m.RopeDim),
		"v_head_dim": max(1, m.ValueHeadDim), "rope_interleave": true, "topk_method": cmp.Or(m.TopMethod, greedy),
		"moe_intermediate_size": m.ExpertFFN, "norm_topk_prob": m.NormTop, "routed_scaling_factor": m.RoutedScale,
		"n_group": max(1, m.ExpertGroups), "topk_group": max(1, m.TopGroups), "use_qk_norm": m.QKNorm == lang.QKNormHead, "num_mtp_layers": 0,
		"n_groups": max(1, m.LinearKeyHeads), "mamba_num_heads": max(1, m.LinearValueHeads), "ssm_state_size": max(1, m.LinearKeyDim), "mamba_head_dim": max(1, m.LinearValueDim),
		"conv_kernel": max(1, m.LinearConv), "use_conv_bias": m.ConvBias, "time_step_min": m.StepMin, "mlp_hidden_act": theirs[m.Activation],
		"layer_norm_epsilon": m.NormEps, "moe_shared_expert_intermediate_size": m.SharedFFN, "moe_latent_size": countOrNull(m.LatentSize),
		"linear_num_heads": max(1, m.LinearKeyHeads), "linear_head_dim": max(1, m.LinearKeyDim), "mlp_layer_types": a.mlpTypes(&l),
		"n_shared_experts": m.SharedFFN / max(1, m.ExpertFFN), "first_k_dense_replace": len(dense), "mlp_only_layers": dense,
		"query_pre_attn_scalar":  int64(math.Round(1 / (m.AttnScale * m.AttnScale))), // transformers accepts no others
		"attn_logit_softcapping": orNull(m.AttnSoftcap), "final_logit_softcapping": orNull(m.LogitSoftcap),
	} {
		if rowOf(a.keys, key) != nil {
			c[key] = v
		}
	}
	a.describeWindows(c, &l)
	a.describeRotary(c, &l)
	return c
}

// describeBlocks writes the block of each layer of Nemotron-H. If a layer has two, reading the config back reveals the difference.
func (a *architecture) describeBlocks(c map[string]any, m *lang.Model) {
	var types []string
	for layer := range m.Layers {
		switch f := m.FormOf(layer); {
		case f.Mixer == lang.MixerMamba2:
			types = append(types, linearAttention)
		case f.Mixer != lang.MixerNone:
			types = append(types, fullAttention)
		case f.Experts > 0:
			types = append(types, "moe")
		default:
			types = append(types, "mlp")
		}
	}
	c["layers_block_type"] = types
	delete(c, "num_hidden_layers")
	delete(c, "rms_norm_eps")
}

// mlpTypes lists the kinds of the MLPs of all layers. Only some classes read such a list.
func (a *architecture) mlpTypes(m *lang.Model) any {
	if row := rowOf(a.keys, "mlp_layer_types"); row == nil || row.use != read {
		return nil
	}
	var types []string
	for layer := range m.Layers {
		types = append(types, map[bool]string{true: "sparse", false: "dense"}[m.FormOf(layer).Experts > 0])
	}
	return types
}

// denseLayers lists the layers whose MLPs have no experts.
func denseLayers(m *lang.Model) []int {
	list := []int{}
	for layer := range m.Layers {
		if m.FormOf(layer).Experts == 0 {
			list = append(list, layer)
		}
	}
	return list
}

// describeGPT writes the members that have names of their own in GPT-2's config.
func (a *architecture) describeGPT(c map[string]any, m *ir.Model, sequence int64) {
	function := theirs[m.Activation]
	if m.Activation == "gelu_tanh" {
		function = "gelu_new"
	}
	for key, v := range map[string]any{
		"n_embd": m.Hidden, "n_layer": m.Layers, "n_head": m.Heads, "n_inner": m.FFN, "n_positions": sequence,
		"activation_function": function, "layer_norm_epsilon": m.NormEps, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
	} {
		c[key] = v
	}
}

// real is a number that transformers requires to be a float: it is written with a point or an exponent.
type real float64

func (v real) MarshalJSON() ([]byte, error) {
	text := strconv.FormatFloat(float64(v), 'g', -1, 64)
	if !strings.ContainsAny(text, ".e") {
		text += ".0"
	}
	return []byte(text), nil
}

// asReals converts all floats in a value to the type real.
func asReals(v any) any {
	switch v := v.(type) {
	case float64:
		return real(v)
	case []float64:
		var list []real
		for _, x := range v {
			list = append(list, real(x))
		}
		return list
	case map[string]any:
		for key, x := range v {
			v[key] = asReals(x)
		}
	}
	return v
}

func countOrNull(n int) any {
	if n == 0 {
		return nil
	}
	return n
}

func orNull(v float64) any {
	if v == 0 {
		return nil
	}
	return v
}

// latent reports whether the models of an architecture have latent attention.
func (a *architecture) latent() bool { return rowOf(a.keys, "kv_lora_rank") != nil }

// describeWindows writes the members that specify which layers have a window. If transformers cannot express the
// windows, reading the config back reveals the difference.
func (a *architecture) describeWindows(c map[string]any, m *lang.Model) {
	window := slices.Max(append([]int64{0}, m.Windows...))
	row := rowOf(a.keys, "sliding_window")
	if window > 0 {
		c["sliding_window"] = window
	} else if row != nil {
		c["sliding_window"] = nil
	}
	var types []string
	for layer := range m.Layers {
		kind := fullAttention
		switch {
		case !m.FormOf(layer).Attends() && m.FormOf(layer).Mixer != lang.MixerNone:
			kind = linearAttention
		case m.WindowOf(layer) > 0:
			kind = slidingAttention
		}
		types = append(types, kind)
	}
	switched := rowOf(a.keys, "use_sliding_window") != nil
	if switched {
		c["use_sliding_window"] = window > 0
	}
	if rowOf(a.keys, "layer_types") != nil {
		c["layer_types"] = types
		if window == 0 && row != nil && !switched && (a.modelType != exaone4 || m.Positions == lang.PositionsNone) {
			c["sliding_window"] = row.value // applies to no layer
		}
	}
}

// describeRotary writes rope_parameters in the format of transformers 5.
func (a *architecture) describeRotary(c map[string]any, m *lang.Model) {
	if len(m.PositionPattern) > 0 || a.family == "smollm3" {
		var rotated []int
		for layer := range m.Layers {
			rotated = append(rotated, map[bool]int{true: 1}[m.Rotates(layer)])
		}
		c["no_rope_layers"] = rotated
	}
	if rowOf(a.keys, "rope_parameters") == nil {
		return
	}
	p := map[string]any{"rope_type": "default", "rope_theta": m.RopeTheta}
	if a.latent() {
		delete(c, "head_dim")
	}
	if m.RopePartial != 1 && a.partial || a.modelType == glmMoE || a.family == qwenNext || a.family == qwen35 { // other classes ignore it
		p["partial_rotary_factor"] = m.RopePartial
	}
	if slices.Contains(a.scalings(), m.RopeScaling) {
		p["rope_type"], p["factor"] = m.RopeScaling, m.RopeFactor
	}
	if m.RopeOriginal > 0 {
		p["original_max_position_embeddings"] = m.RopeOriginal
		if a.modelType == phi3 {
			c["original_max_position_embeddings"] = m.RopeOriginal
		}
	}
	switch m.RopeScaling {
	case lang.ScalingLlama3:
		p["low_freq_factor"], p["high_freq_factor"] = m.RopeLow, m.RopeHigh
	case lang.ScalingYarn:
		p["beta_fast"], p["beta_slow"], p["truncate"], p["attention_factor"] = m.RopeFast, m.RopeSlow, m.RopeTruncate, m.RopeAmplitude
	case lang.ScalingLongRope:
		p["short_factor"], p["long_factor"], p["attention_factor"] = m.RopeShort, m.RopeLong, m.RopeAmplitude
	}
	if grown := m.AttnScale * math.Sqrt(float64(m.HeadDim)); a.latent() && m.RopeScaling == lang.ScalingYarn && m.RopeFactor > 1 && math.Abs(grown-1) > 1e-12 {
		p["mscale_all_dim"] = (math.Sqrt(grown) - 1) / (0.1 * math.Log(m.RopeFactor))
	}
	if a.modelType == ministral3 || a.modelType == mistral4 {
		p["llama_4_scaling_beta"] = m.RopeBeta
		if m.RopeOriginal == 0 {
			p["original_max_position_embeddings"] = c["max_position_embeddings"] // transformers needs it
		}
	}
	c["rope_parameters"] = p
	if a.local > 0 {
		local := m.RopeLocalTheta
		if local == 0 {
			local = a.local // applies to no layer
		}
		both := map[string]any{fullAttention: p, slidingAttention: map[string]any{"rope_type": "default", "rope_theta": local}}
		if truncate, ok := p["truncate"]; ok { // where transformers looks for it
			delete(p, "truncate")
			both["truncate"] = truncate
		}
		c["rope_parameters"] = both
	}
}
