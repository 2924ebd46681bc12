package hf

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"sppo.dev/hf/safetensors"
	"sppo.dev/lang"
)

// architecture describes a model_type of config.json: the keys of the language that correspond to its members,
// and the names of its tensors.
type architecture struct {
	modelType string
	outer     string // model_type of a config whose text_config has this model_type
	class     string // the class with which transformers loads it
	family    string // name of the family in the language
	defaults  map[string]any
	read      func(m *Model, c *config)
	names     naming
}

// Defaults shared by all architectures except GPT-2. A member that is missing from a config has the default of
// its class in transformers.
var usual = map[string]any{
	"hidden_act": "silu", "attention_bias": false, "mlp_bias": false, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
	"tie_word_embeddings": false, "initializer_range": 0.02,
}

// with adds the given defaults to the usual ones, which they override.
func with(others map[string]any) map[string]any {
	out := map[string]any{}
	for _, m := range []map[string]any{usual, others} {
		for k, v := range m {
			out[k] = v
		}
	}
	return out
}

var architectures = []architecture{
	{modelType: "llama", class: "LlamaForCausalLM", family: "llama", defaults: usual, read: (*Model).llama, names: llamaNames},
	{modelType: "mistral", outer: "mistral3", class: "MistralForCausalLM", family: "mistral", read: (*Model).mistral, names: llamaNames,
		defaults: with(map[string]any{"sliding_window": 4096})},
	{modelType: "qwen2", class: "Qwen2ForCausalLM", family: "qwen2", defaults: usual, read: (*Model).qwen, names: llamaNames},
	{modelType: "qwen3", class: "Qwen3ForCausalLM", family: "qwen3", read: (*Model).qwen, names: llamaNames,
		defaults: with(map[string]any{"head_dim": 128})},
	{modelType: "phi3", class: "Phi3ForCausalLM", family: "phi3", read: (*Model).mistral, names: phiNames,
		defaults: with(map[string]any{"rms_norm_eps": 1e-5})},
	{modelType: "olmo2", class: "Olmo2ForCausalLM", family: "olmo2", read: (*Model).llama, names: olmoNames,
		defaults: with(map[string]any{"rms_norm_eps": 1e-5})},
	{modelType: "smollm3", class: "SmolLM3ForCausalLM", family: "smollm3", read: (*Model).smollm, names: llamaNames,
		defaults: with(map[string]any{"rope_theta": 2000000.0, "tie_word_embeddings": true, "num_key_value_heads": 4})},
	{modelType: "gemma2", class: "Gemma2ForCausalLM", family: "gemma2", read: (*Model).gemma, names: gemmaNames,
		defaults: with(map[string]any{
			"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true, "query_pre_attn_scalar": 256,
			"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096, "vocab_size": 256000,
		})},
	{modelType: "gemma3_text", outer: "gemma3", class: "Gemma3ForCausalLM", family: "gemma3", read: (*Model).gemma, names: gemmaNames,
		defaults: with(map[string]any{
			"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true, "query_pre_attn_scalar": 256,
			"sliding_window": 4096, "sliding_window_pattern": 6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
			"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4,
		})},
	{modelType: "gpt2", class: "GPT2LMHeadModel", family: "gpt2", read: (*Model).gpt2, names: gpt2Names,
		defaults: map[string]any{
			"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": true, "initializer_range": 0.02,
			"n_positions": 1024, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1,
		}},
}

// Kinds of layers in layer_types of a config.
const (
	fullAttention    = "full_attention"
	slidingAttention = "sliding_attention"
)

// decoder reads the members that all architectures with rotary positions share.
func (m *Model) decoder(c *config) {
	m.setCount("layers", layersOf(c), "num_hidden_layers")
	hidden, heads := c.count("hidden_size"), c.count("num_attention_heads")
	m.setCount("hidden", hidden, "hidden_size")
	m.setCount("heads", heads, "num_attention_heads")
	kv := heads
	if c.has("num_key_value_heads") {
		kv = c.count("num_key_value_heads")
	}
	m.setCount("kv_heads", kv, "num_key_value_heads")
	switch {
	case c.has("head_dim"):
		m.setCount("head_dim", c.count("head_dim"), "head_dim")
	case *c.err == nil && hidden%heads != 0:
		c.failf("hidden_size", "= %d is not a multiple of num_attention_heads = %d, and there is no head_dim", hidden, heads)
	case *c.err == nil:
		m.setCount("head_dim", hidden/heads, "hidden_size / num_attention_heads")
	}
	c.skip("head_dim", "num_key_value_heads")
	m.setCount("ffn", c.count("intermediate_size"), "intermediate_size")
	m.setCount("vocab", c.count("vocab_size"), "vocab_size")
	m.storage(c)
	m.tied(c)
	m.setNumber("norm_eps", c.positive("rms_norm_eps"), "rms_norm_eps")
	m.initial(c)
	m.rotary(c)
	m.activation(c)
	m.biases(c)
	m.dropout(c, "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout")
}

// layersOf returns the number of layers. It refuses large numbers, because some lists get one entry per layer.
func layersOf(c *config) int64 {
	const most = 1 << 14
	n := c.count("num_hidden_layers")
	if n > most {
		c.failf("num_hidden_layers", "= %d is more than %d", n, most)
		return 0
	}
	return n
}

func (m *Model) tied(c *config) {
	m.set("tied", fmt.Sprint(c.truth("tie_word_embeddings")), "tie_word_embeddings")
}

func (m *Model) initial(c *config) {
	if v := c.number("initializer_range"); v > 0 {
		m.setNumber("init_std", v, "initializer_range")
	}
}

// storage sets the type in which weights are stored. Models trained in f16 are stored as bf16: the range of f16
// is too small for gradients.
func (m *Model) storage(c *config) {
	name, key := "", "dtype"
	if !c.has(key) {
		key = "torch_dtype"
	}
	from := key
	switch {
	case c.has(key):
		name = strings.TrimPrefix(c.word(key), "torch.")
	default:
		name, from = m.storedType(), "the type of the stored weights"
	}
	c.skip("dtype", "torch_dtype")
	switch name {
	case "float32":
		m.set("dtype", "f32", from)
	case "bfloat16":
		m.set("dtype", "bf16", from)
	case "float16":
		m.set("dtype", "bf16", from+" = float16")
		m.notice("%s = float16: the run computes with bf16 weights; their f32 masters hold the file's values exactly", key)
	case "":
		m.set("dtype", "bf16", "not in "+ConfigFile)
	default:
		c.failf(key, "= %q is not supported; use float32, bfloat16 or float16", name)
	}
}

// storedType returns the type of the folder's first weights, as transformers names it, or "" if they cannot be
// read.
func (m *Model) storedType() string {
	f, err := safetensors.Open(m.Dir)
	if err != nil {
		return ""
	}
	defer f.Close()
	for _, t := range f.Tensors() {
		if name := typeNames[t.DType]; name != "" {
			return name
		}
	}
	return ""
}

var typeNames = map[string]string{safetensors.F32: "float32", safetensors.F16: "float16", safetensors.BF16: "bfloat16"}

// activations maps the names of activation functions in transformers to ours.
var activations = map[string]string{
	"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
	"gelu_python_tanh": "gelu_tanh", "relu2": "relu2",
}

func (m *Model) activation(c *config) {
	for _, key := range []string{"hidden_activation", "activation_function", "hidden_act"} {
		if !c.has(key) {
			continue
		}
		name := c.word(key)
		ours, ok := activations[name]
		if !ok {
			c.failf(key, "= %q is not supported", name)
		}
		// If transformers has a default, the family has the same default in the language.
		if usual, _ := m.arch.defaults[key].(string); ours != activations[usual] {
			m.set("activation", ours, key)
		}
		break
	}
	c.skip("hidden_act", "hidden_activation")
}

func (m *Model) biases(c *config) {
	var list, from []string
	if c.has("attention_bias") && c.truth("attention_bias") {
		list, from = append(list, "qkv", "attn_out"), append(from, "attention_bias")
	}
	if c.has("mlp_bias") && c.truth("mlp_bias") {
		list, from = append(list, "mlp"), append(from, "mlp_bias")
	}
	if len(list) > 0 {
		m.setList("bias", list, strings.Join(from, ", "))
	}
}

// dropout is ignored, because training on long sequences does not use it.
func (m *Model) dropout(c *config, keys ...string) {
	for _, key := range keys {
		if c.has(key) && c.number(key) != 0 {
			m.notice("%s = %v is ignored, because the model is trained without dropout", key, c.number(key))
		}
		c.skip(key)
	}
}

// layerTypes sets the keys that specify which layers have a window. If all have one, the key window is
// sufficient.
func (m *Model) layerTypes(c *config, types []string, window int64, from string) {
	if !slices.Contains(types, slidingAttention) {
		return
	}
	m.setCount("window", window, "sliding_window")
	if !slices.Contains(types, fullAttention) {
		return
	}
	var words []string
	for _, t := range period(types) {
		words = append(words, strings.TrimSuffix(t, "_attention"))
	}
	m.setList("layer_types", words, from)
}

// listedTypes reads layer_types, or derives the list from the index of each layer.
func (m *Model) listedTypes(c *config, sliding func(layer int64) bool) (types []string, from string) {
	layers := layersOf(c)
	if !c.has("layer_types") {
		for i := range layers {
			types = append(types, map[bool]string{true: slidingAttention, false: fullAttention}[sliding(i)])
		}
		return types, "model_type"
	}
	types = c.words("layer_types")
	if *c.err == nil && int64(len(types)) != layers {
		c.failf("layer_types", "has %d entries for %d layers", len(types), layers)
	}
	for _, t := range types {
		if t != fullAttention && t != slidingAttention {
			c.failf("layer_types", "has %q, which is not supported; use %s or %s", t, fullAttention, slidingAttention)
		}
	}
	return types, "layer_types"
}

// period returns the shortest prefix whose repetition yields the list.
func period[T comparable](list []T) []T {
	for p := 1; p < len(list); p++ {
		same := true
		for i := 0; same && i < len(list); i++ {
			same = list[i] == list[i%p]
		}
		if same {
			return list[:p]
		}
	}
	return list
}

func (m *Model) llama(c *config) { m.decoder(c) }

// mistral reads the configs of Mistral and Phi-3, in which every layer has the window if there is one.
func (m *Model) mistral(c *config) {
	m.decoder(c)
	c.skip("sliding_window", "layer_types")
	if !c.has("sliding_window") {
		return
	}
	types, from := m.listedTypes(c, func(int64) bool { return true })
	m.layerTypes(c, types, c.count("sliding_window"), from)
}

// qwen reads the configs of Qwen2 and Qwen3, whose later layers may have a window.
func (m *Model) qwen(c *config) {
	m.decoder(c)
	on := c.has("use_sliding_window") && c.truth("use_sliding_window") && c.has("sliding_window")
	c.skip("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
	if !on && !c.has("layer_types") {
		return
	}
	types, from := m.listedTypes(c, func(layer int64) bool { return on && layer >= c.count("max_window_layers") })
	if slices.Contains(types, slidingAttention) {
		m.layerTypes(c, types, c.count("sliding_window"), from)
	}
}

// smollm reads the config of SmolLM3, in which every fourth layer has no positions.
func (m *Model) smollm(c *config) {
	m.qwen(c)
	layers := layersOf(c)
	var rotated []int64
	from := "no_rope_layers"
	switch {
	case c.has(from):
		rotated = get[[]int64](c, from, "a list of whole numbers")
	default:
		from = "no_rope_layer_interval"
		interval := int64(4)
		if c.has(from) {
			interval = c.count(from)
		}
		for i := range layers {
			rotated = append(rotated, map[bool]int64{true: 1}[*c.err == nil && (i+1)%max(1, interval) != 0])
		}
	}
	c.skip("no_rope_layers", "no_rope_layer_interval")
	if *c.err == nil && int64(len(rotated)) != layers {
		c.failf(from, "has %d entries for %d layers", len(rotated), layers)
	}
	var words []string
	for _, v := range period(rotated) {
		words = append(words, map[bool]string{true: "rope", false: "none"}[v != 0])
	}
	m.setList("positions", words, from)
}

// gemma reads the configs of Gemma-2 and Gemma-3, which have windows in many layers, norms before and after
// attention and MLP, and limits on scores and logits.
func (m *Model) gemma(c *config) {
	m.decoder(c)
	c.want("use_bidirectional_attention", false)
	scalar := c.positive("query_pre_attn_scalar")
	m.setNumber("attn_scale", 1/math.Sqrt(scalar), "1 / sqrt(query_pre_attn_scalar)")
	for _, k := range []struct{ ours, theirs string }{{"attn_softcap", "attn_logit_softcapping"}, {"logit_softcap", "final_logit_softcapping"}} {
		switch {
		case c.has(k.theirs):
			m.setNumber(k.ours, c.positive(k.theirs), k.theirs)
		default: // the family may have a default
			m.set(k.ours, "0", k.theirs)
		}
		c.skip(k.theirs)
	}
	every := int64(2)
	key := "sliding_window_pattern"
	if !c.has(key) && c.has("_"+key) {
		key = "_" + key
	}
	if c.has(key) {
		every = c.count(key)
	}
	c.skip("sliding_window", "sliding_window_size", "sliding_window_pattern", "_sliding_window_pattern")
	types, from := m.listedTypes(c, func(layer int64) bool { return (layer+1)%every != 0 })
	c.skip("layer_types")
	switch { // the family has windows by default
	case !slices.Contains(types, slidingAttention):
		m.set("window", "0", from)
		m.drop("rope_local_theta")
	case !slices.Contains(types, fullAttention):
		m.layerTypes(c, types, c.count("sliding_window"), from)
		m.setList("layer_types", []string{lang.LayerSliding}, from)
	default:
		m.layerTypes(c, types, c.count("sliding_window"), from)
	}
}

func (m *Model) gpt2(c *config) {
	hidden := c.count("n_embd")
	m.setCount("layers", c.count("n_layer"), "n_layer")
	m.setCount("hidden", hidden, "n_embd")
	m.setCount("heads", c.count("n_head"), "n_head")
	if c.has("n_inner") {
		m.setCount("ffn", c.count("n_inner"), "n_inner")
	} else {
		m.setCount("ffn", 4*hidden, "4 * n_embd")
	}
	m.setCount("vocab", c.count("vocab_size"), "vocab_size")
	m.storage(c)
	m.tied(c)
	m.setNumber("norm_eps", c.positive("layer_norm_epsilon"), "layer_norm_epsilon")
	m.initial(c)
	m.activation(c)
	c.want("scale_attn_weights", true)
	c.want("scale_attn_by_inverse_layer_idx", false)
	c.want("add_cross_attention", false)
	c.skip("n_inner", "n_positions", "reorder_and_upcast_attn") // reorder_and_upcast_attn affects only rounding
	m.dropout(c, "attn_pdrop", "embd_pdrop", "resid_pdrop")
}
