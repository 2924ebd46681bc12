package hf

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"sppo.dev/internal/data/safetensors"
	"sppo.dev/lang"
)

// architecture describes a model_type of config.json: the config class that transformers has for it, how its
// values become keys of the language, and the names of its tensors.
type architecture struct {
	modelType string
	outer     string // model_type of a config whose text_config has this model_type
	class     string // the class with which transformers loads it
	family    string // name of the family in the language
	keys      []key
	outerKeys []key // of the config with the vision part
	// The class requires hidden_size to be a multiple of num_attention_heads, even if there is a head_dim.
	divides bool
	theta   float64 // default of rope_theta
	partial bool    // it rotates a part of a head if partial_rotary_factor says so
	local   float64 // default of the rotary base in layers with a window; 0: the same base
	read    func(m *Model, c *config)
	names   naming
}

const (
	usualTheta = 10000
	mistral    = "mistral"
	ministral  = "ministral"
	phi3       = "phi3"
	gpt2       = "gpt2"
	exaone4    = "exaone4"
	ministral3 = "ministral3"
	hunyuan    = "hunyuan_v1_dense"
	glmMoE     = "glm4_moe"
	nemotronH  = "nemotron_h"
	qwenNext   = "qwen3_next"
	qwen35     = "qwen3_5"
	qwen35MoE  = "qwen3_5_moe_text"
	deepseek2  = "deepseek_v2"
	deepseek3  = "deepseek_v3"
	mistral4   = "mistral4"
	kimiK2     = "kimi_k2"
	kimiLinear = "kimi_linear"
)

var architectures = []architecture{
	{modelType: "llama", class: "LlamaForCausalLM", family: "llama", keys: llamaKeys, divides: true, theta: usualTheta, read: (*Model).llama, names: llamaNames},
	{modelType: mistral, class: "MistralForCausalLM", family: "mistral", keys: mistralKeys, theta: usualTheta, read: (*Model).mistral, names: llamaNames,
		outer: "mistral3", outerKeys: mistral3Keys},
	{modelType: ministral, class: "MinistralForCausalLM", family: "mistral", keys: ministralKeys, theta: usualTheta, read: (*Model).ministral, names: llamaNames},
	{modelType: ministral3, class: "Ministral3ForCausalLM", family: ministral3, keys: ministral3Keys, theta: usualTheta, read: (*Model).ministral3, names: llamaNames,
		outer: "mistral3", outerKeys: mistral3Keys},
	{modelType: "qwen2", class: "Qwen2ForCausalLM", family: "qwen2", keys: qwen2Keys, theta: usualTheta, read: (*Model).qwen, names: llamaNames},
	{modelType: "qwen3", class: "Qwen3ForCausalLM", family: "qwen3", keys: qwen3Keys, theta: usualTheta, read: (*Model).qwen, names: llamaNames},
	{modelType: phi3, class: "Phi3ForCausalLM", family: "phi3", keys: phi3Keys, theta: usualTheta, partial: true, read: (*Model).phi, names: phiNames},
	{modelType: "olmo2", class: "Olmo2ForCausalLM", family: "olmo2", keys: olmo2Keys, theta: usualTheta, read: (*Model).llama, names: olmoNames},
	{modelType: "olmo3", class: "Olmo3ForCausalLM", family: "olmo3", keys: olmo3Keys, theta: 500000, local: 500000, read: (*Model).olmo3, names: olmoNames},
	{modelType: "seed_oss", class: "SeedOssForCausalLM", family: "seed_oss", keys: seedKeys, theta: usualTheta, read: (*Model).llama, names: llamaNames},
	{modelType: "granite", class: "GraniteForCausalLM", family: "granite", keys: graniteKeys, theta: usualTheta, read: (*Model).granite, names: llamaNames},
	{modelType: exaone4, class: "Exaone4ForCausalLM", family: exaone4, keys: exaone4Keys, theta: usualTheta, read: (*Model).exaone, names: olmoNames},
	{modelType: hunyuan, class: "HunYuanDenseV1ForCausalLM", family: hunyuan, keys: hunyuanKeys, theta: usualTheta, read: (*Model).hunyuan, names: hunyuanNames},
	{modelType: "ernie4_5", class: "Ernie4_5ForCausalLM", family: "ernie4_5", keys: ernieKeys, theta: 500000, read: (*Model).llama, names: ernieNames},
	{modelType: "qwen3_moe", class: "Qwen3MoeForCausalLM", family: "qwen3_moe", keys: qwenMoEKeys, theta: usualTheta, read: (*Model).qwenMoE, names: qwenMoENames},
	{modelType: qwenNext, class: "Qwen3NextForCausalLM", family: qwenNext, keys: qwenNextKeys, theta: usualTheta, partial: true, read: (*Model).qwenNext, names: qwenNextNames},
	{modelType: "qwen3_5_text", class: "Qwen3_5ForCausalLM", family: qwen35, keys: qwen35Keys, theta: usualTheta, partial: true, read: (*Model).qwen35, names: qwen35Names,
		outer: "qwen3_5", outerKeys: qwen35VisionKeys},
	{modelType: qwen35MoE, class: "Qwen3_5MoeForCausalLM", family: qwen35, keys: qwen35MoEKeys, theta: usualTheta, partial: true, read: (*Model).qwen35MoE, names: qwen35Names,
		outer: "qwen3_5_moe", outerKeys: qwen35VisionKeys},
	{modelType: nemotronH, class: "NemotronHForCausalLM", family: nemotronH, keys: nemotronKeys, read: (*Model).nemotronH, names: nemotronNames},
	{modelType: "mixtral", class: "MixtralForCausalLM", family: "mixtral", keys: mixtralKeys, theta: 1e6, read: (*Model).mixtral, names: mixtralNames},
	{modelType: glmMoE, class: "Glm4MoeForCausalLM", family: glmMoE, keys: glmMoEKeys, theta: usualTheta, partial: true, read: (*Model).glmMoE, names: glmMoENames},
	{modelType: deepseek2, class: "DeepseekV2ForCausalLM", family: deepseek2, keys: deepseek2Keys, theta: usualTheta, read: (*Model).deepseek2, names: deepseekNames},
	{modelType: deepseek3, class: "DeepseekV3ForCausalLM", family: deepseek3, keys: deepseek3Keys, theta: usualTheta, read: (*Model).deepseek3, names: deepseekNames},
	{modelType: mistral4, class: "Mistral4ForCausalLM", family: mistral4, keys: mistral4Keys, theta: usualTheta, read: (*Model).mistral4, names: mistral4Names,
		outer: "mistral3", outerKeys: mistral3Keys},
	{modelType: kimiLinear, class: "KimiLinearForCausalLM", family: kimiLinear, keys: kimiKeys, read: (*Model).kimiLinear, names: kimiNames},
	{modelType: "gpt_oss", class: "GptOssForCausalLM", family: "gpt_oss", keys: ossKeys, theta: 150000, read: (*Model).gptOss, names: ossNames},
	{modelType: "minimax_m2", class: "MiniMaxM2ForCausalLM", family: "minimax_m2", keys: minimaxKeys, theta: 5e6, partial: true, read: (*Model).minimax, names: mixtralNames},
	{modelType: "smollm3", class: "SmolLM3ForCausalLM", family: "smollm3", keys: smollm3Keys, theta: 2e6, read: (*Model).smollm, names: llamaNames},
	{modelType: "gemma2", class: "Gemma2ForCausalLM", family: "gemma2", keys: gemma2Keys, divides: true, theta: usualTheta, read: (*Model).gemma2, names: gemmaNames},
	{modelType: "gemma3_text", class: "Gemma3ForCausalLM", family: "gemma3", keys: gemma3Keys, divides: true, theta: 1e6, local: 1e4, read: (*Model).gemma3, names: gemmaNames,
		outer: "gemma3", outerKeys: gemma3VisionKeys},
	{modelType: gpt2, class: "GPT2LMHeadModel", family: "gpt2", keys: gpt2Keys, divides: true, read: (*Model).gpt2, names: gpt2Names},
}

// Kinds of layers in layer_types of a config.
const (
	fullAttention    = "full_attention"
	slidingAttention = "sliding_attention"
	linearAttention  = "linear_attention"
)

// greedy is the value of topk_method without groups of experts.
const greedy = "greedy"

// decoder reads the keys that all architectures except GPT-2 share. transformers rounds hidden_size /
// num_attention_heads towards 0.
func (m *Model) decoder(c *config) {
	m.setCount("layers", layersOf(c), "num_hidden_layers")
	hidden, heads := c.count("hidden_size"), c.count("num_attention_heads")
	m.setCount("hidden", hidden, "hidden_size")
	m.setCount("heads", heads, "num_attention_heads")
	if c.has("num_key_value_heads") {
		m.setCount("kv_heads", c.count("num_key_value_heads"), "num_key_value_heads")
	} else {
		m.setCount("kv_heads", heads, "num_attention_heads")
	}
	if *c.err == nil && m.arch.divides && hidden%heads != 0 {
		c.failf("hidden_size", "= %d is not a multiple of num_attention_heads = %d", hidden, heads)
	}
	switch row := c.row("head_dim"); {
	case c.has("head_dim"), row == nil && c.present("head_dim"):
		m.setCount("head_dim", c.count("head_dim"), "head_dim")
	case *c.err == nil:
		m.setCount("head_dim", hidden/heads, "hidden_size / num_attention_heads")
	}
	m.setCount("ffn", c.count("intermediate_size"), "intermediate_size")
	m.vocabulary(c)
	m.storage(c)
	m.tied(c)
	m.setNumber("norm_eps", c.positive("rms_norm_eps"), "rms_norm_eps")
	m.initial(c)
	m.biases(c)
	c.skip("max_position_embeddings")
}

// vocabulary sets the size of the vocabulary. transformers refuses padding outside the vocabulary.
func (m *Model) vocabulary(c *config) {
	size := c.count("vocab_size")
	m.setCount("vocab", size, "vocab_size")
	if c.row("pad_token_id").use == read && c.has("pad_token_id") {
		if pad := get[int64](c, "pad_token_id", "a token"); pad >= size || pad < -size {
			c.failf("pad_token_id", "= %d is outside the vocabulary of %d tokens", pad, size)
		}
	}
}

// layersOf returns the number of layers. It refuses large numbers, because some lists get one entry per layer.
func layersOf(c *config) int64 {
	const most = 1 << 12
	n := c.count("num_hidden_layers")
	if n > most {
		c.failf("num_hidden_layers", "= %d is more than %d", n, most)
		return 0
	}
	return n
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
	if c.has(key) {
		name = strings.TrimPrefix(c.word(key), "torch.")
	} else {
		name, from = m.storedType(), "the type of the stored weights"
	}
	c.skip("torch_dtype")
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
	"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "relu2": "relu2",
	"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
}

// activation sets the activation function if it differs from the class's default, which is the family's, too.
func (m *Model) activation(c *config, key string) {
	name := c.word(key)
	ours, ok := activations[name]
	if !ok {
		c.failf(key, "= %q is not supported", name)
	}
	if usual, _ := c.row(key).value.(string); ours != activations[usual] {
		m.set("activation", ours, key)
	}
}

// biases sets the linear maps with biases. Classes that do not declare the keys ignore them. Only classes that declare
// attention_out_bias belong to a family with biases, so the list is set there even if it is empty.
func (m *Model) biases(c *config) {
	list, attention, from := []string{}, []string{lang.BiasQKV, lang.BiasAttnOut}, ""
	separate := c.row("attention_out_bias") != nil
	if separate {
		attention, from = attention[:1], "attention_bias"
	}
	for _, k := range []struct {
		name string
		maps []string
	}{
		{"attention_bias", attention}, {"attention_out_bias", []string{lang.BiasAttnOut}}, {"mlp_bias", []string{lang.BiasMLP}},
		{"use_bias", []string{lang.BiasQKV, lang.BiasAttnOut, lang.BiasMLP}},
	} {
		if c.row(k.name) != nil && c.has(k.name) && c.truth(k.name) {
			if len(list) > 0 {
				from += ", " + k.name
			} else {
				from = k.name
			}
			list = append(list, k.maps...)
		}
	}
	if len(list) > 0 || separate {
		m.setList("bias", list, from)
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
	if c.has("layer_types") {
		return m.checkedTypes(c), "layer_types"
	}
	for i := range layersOf(c) {
		types = append(types, map[bool]string{true: slidingAttention, false: fullAttention}[sliding(i)])
	}
	return types, "model_type"
}

// checkedTypes returns layer_types, which transformers also checks in models that do not use it.
func (m *Model) checkedTypes(c *config) []string {
	types := c.words("layer_types")
	if layers := m.value("layers"); *c.err == nil && strconv.Itoa(len(types)) != layers {
		c.failf("layer_types", "has %d entries for %s layers", len(types), layers)
	}
	for _, t := range types {
		if t != fullAttention && t != slidingAttention {
			c.failf("layer_types", "has %q, which is not supported; use %s or %s", t, fullAttention, slidingAttention)
		}
	}
	return types
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

func (m *Model) llama(c *config) {
	m.decoder(c)
	m.activation(c, "hidden_act")
	m.rotary(c)
}

// mistral reads the configs of Mistral and Phi-3, in which every layer has the window if there is one.
func (m *Model) mistral(c *config) {
	m.llama(c)
	if c.has("sliding_window") {
		m.setCount("window", c.count("sliding_window"), "sliding_window")
	}
}

// ministral reads the config of Ministral, in which some layers have a window. transformers needs sliding_window even if
// no layer has one.
func (m *Model) ministral(c *config) {
	c.count("head_dim") // without it, the class fails
	m.llama(c)
	window := c.count("sliding_window")
	types, from := m.listedTypes(c, func(int64) bool { return true })
	m.layerTypes(c, types, window, from)
}

// ministral3 reads the config of Ministral 3, whose queries grow with the position. transformers needs the parameters of this
// growth even if there is none.
func (m *Model) ministral3(c *config) {
	if !c.has("rope_parameters") {
		c.assume("rope_parameters", `{"type": "yarn", "rope_theta": 1e6, "factor": 16, "original_max_position_embeddings": 16384,
			"beta_fast": 32, "beta_slow": 1, "mscale_all_dim": 1, "mscale": 1, "llama_4_scaling_beta": 0.1}`)
	}
	m.mistral(c)
	m.growing(c)
	if m.value("rope_scaling") == "" {
		m.set("rope_scaling", lang.ScalingNone, "rope_type") // the family has another default
	}
}

// growing reads by how much queries grow with their positions.
func (m *Model) growing(c *config) {
	p := m.rotation(c)
	p.skip("max_position_embeddings")
	const name = "llama_4_scaling_beta"
	beta := p.number(name)
	switch scaled := m.value("rope_original") != ""; {
	case !scaled && beta != 0:
		p.failf(name, "= %v is not supported with rope_type = default or linear", beta)
	case !scaled:
		p.count("original_max_position_embeddings")
	}
	m.setNumber("rope_beta", beta, p.prefix+name)
}

// hunyuan reads the config of Hunyuan. The class calls a larger base of the frequencies dynamic scaling.
func (m *Model) hunyuan(c *config) {
	c.count("head_dim") // without it, the class fails
	m.llama(c)
	p := m.rotation(c)
	if kind, _ := m.kind(p); kind != ntkAlpha {
		return
	}
	theta, _ := strconv.ParseFloat(m.value("rope_theta"), 64)
	dim, _ := strconv.ParseFloat(m.value("head_dim"), 64)
	m.drop("rope_theta")
	m.setNumber("rope_theta", theta*math.Pow(p.positive("alpha"), dim/(dim-2)), "rope_theta, "+p.prefix+"alpha")
}

// phi reads the config of Phi-3. The class computes the length of the lists of longrope without regard to head_dim, and
// checks lists that it does not use.
func (m *Model) phi(c *config) {
	m.mistral(c)
	p, share := m.rotation(c), 1.0
	for _, from := range []*config{c, p} {
		if from.has("partial_rotary_factor") {
			share = from.number("partial_rotary_factor")
		}
	}
	pairs := int(share*float64(c.count("hidden_size")/max(1, c.count("num_attention_heads")))) / 2
	for _, list := range []string{"short_factor", "long_factor"} {
		if p.has(list) && len(p.numbers(list)) != pairs {
			p.failf(list, "has %d numbers, but transformers needs %d", len(p.numbers(list)), pairs)
		}
	}
}

// qwen reads the configs of Qwen2 and Qwen3, whose later layers may have a window.
func (m *Model) qwen(c *config) {
	m.llama(c)
	m.sliding(c, func(layer int64) bool { return layer >= get[int64](c, "max_window_layers", "a whole number") })
	c.skip("max_window_layers")
}

// sliding reads which layers have a window, for classes with use_sliding_window.
func (m *Model) sliding(c *config, usual func(layer int64) bool) {
	on := c.truth("use_sliding_window") && c.has("sliding_window")
	c.skip("sliding_window")
	types, from := m.listedTypes(c, func(layer int64) bool { return on && usual(layer) })
	switch {
	case on:
		m.layerTypes(c, types, c.count("sliding_window"), from)
	case slices.Contains(types, slidingAttention):
		c.failf("layer_types", "has %s, which needs use_sliding_window = true and sliding_window", slidingAttention)
	}
}

// alias is a name under which transformers also accepts a key.
type alias struct{ other, name string }

// expertAliases lists other names of keys of experts.
var expertAliases = []alias{
	{"num_local_experts", "num_experts"}, {"num_experts", "num_local_experts"}, {"num_local_experts", "n_routed_experts"}, {"num_nextn_predict_layers", "num_mtp_layers"},
}

// sparse reads the number and the width of experts, under the given names.
func (m *Model) sparse(c *config, number, width string) {
	c.rename(expertAliases)
	m.setCount("num_experts", c.count(number), number)
	m.setCount("num_experts_per_tok", c.count("num_experts_per_tok"), "num_experts_per_tok")
	m.setCount("moe_intermediate_size", c.count(width), width)
}

// qwenMoE reads the config of Qwen3 with experts, in which every layer has the window if there is one.
func (m *Model) qwenMoE(c *config) {
	m.llama(c)
	if c.truth("use_sliding_window") && c.has("sliding_window") {
		m.setCount("window", c.count("sliding_window"), "sliding_window")
	}
	c.skip("sliding_window")
	m.sparseLayers(c)
}

// sparseLayers reads the experts of a Qwen model, and which layers have them.
func (m *Model) sparseLayers(c *config) {
	m.sparse(c, "num_experts", "moe_intermediate_size")
	m.set("norm_topk_prob", fmt.Sprint(c.truth("norm_topk_prob")), "norm_topk_prob")
	if step := c.count("decoder_sparse_step"); step != 1 {
		m.setCount("decoder_sparse_step", step, "decoder_sparse_step")
	}
	if !c.has("mlp_only_layers") {
		return
	}
	var layers []string
	for _, layer := range get[[]int64](c, "mlp_only_layers", "a list of whole numbers") {
		layers = append(layers, strconv.FormatInt(layer, 10))
	}
	m.setList("mlp_only_layers", layers, "mlp_only_layers")
}

// qwen35 reads what the configs of Qwen3-Next and Qwen3.5 have in common. In text, the positions of all sections of mrope are equal.
func (m *Model) qwen35(c *config) {
	if name := "partial_rotary_factor"; !c.present(name) && !m.rotation(c).present(name) {
		c.assume(name, "0.25")
	}
	m.llama(c)
	m.wholeHeads()
	p := m.rotation(c)
	p.skip("mrope_section")
	p.skip("mrope_interleaved")
	every, from := int64(4), "full_attention_interval"
	if c.has("layer_types") {
		c.skip(from)
		from = "layer_types"
	} else if c.present(from) {
		every = max(1, c.count(from))
	} else {
		c.usual[from] = strconv.FormatInt(every, 10)
	}
	var words []string
	for i := range layersOf(c) {
		words = append(words, map[bool]string{true: "full", false: lang.MixerGatedDelta}[(i+1)%every == 0])
	}
	if c.has("layer_types") {
		words = m.linearTypes(c, "full", lang.MixerGatedDelta)
	}
	m.setList("layer_types", period(words), from)
	for _, name := range []string{"linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"} {
		if n := c.count(name); slices.Contains(words, lang.MixerGatedDelta) {
			m.setCount(name, n, name)
		}
	}
}

// linearTypes returns layer_types of a model with linear attention in the given words of the language.
func (m *Model) linearTypes(c *config, full, linear string) (words []string) {
	types := c.words("layer_types")
	if layers := m.value("layers"); *c.err == nil && strconv.Itoa(len(types)) != layers {
		c.failf("layer_types", "has %d entries for %s layers", len(types), layers)
	}
	for _, t := range types {
		word, ok := map[string]string{fullAttention: full, linearAttention: linear}[t]
		if !ok {
			c.failf("layer_types", "has %q, which is not supported; use %s or %s", t, fullAttention, linearAttention)
		}
		words = append(words, word)
	}
	return words
}

// qwenNext reads the config of Qwen3-Next.
func (m *Model) qwenNext(c *config) {
	m.qwen35(c)
	m.sparseLayers(c)
	m.sharedExpert(c)
}

// qwen35MoE reads the config of Qwen3.5 with experts in every layer.
func (m *Model) qwen35MoE(c *config) {
	const dense = "intermediate_size" // of no layer
	c.members[dense] = json.RawMessage(strconv.FormatInt(c.count("moe_intermediate_size"), 10))
	m.qwen35(c)
	m.sparse(c, "num_experts", "moe_intermediate_size")
	m.set("norm_topk_prob", "true", "model_type")
	m.sharedExpert(c)
}

// nemotronBlocks maps the layers of Nemotron-H, each of which has one block, to words of hybrid_override_pattern and of layer_types.
var nemotronBlocks = map[string]struct{ letter, older, mixer string }{
	linearAttention: {"M", "mamba", lang.MixerMamba2}, fullAttention: {"*", "attention", "full"}, "mlp": {"-", "mlp", "none"}, "moe": {"E", "moe", "none"},
}

// nemotronTypes returns the block of each layer.
func (m *Model) nemotronTypes(c *config) (types []string, from string) {
	from = "layers_block_type"
	for _, other := range []string{"layer_types", "hybrid_override_pattern"} {
		if !c.has(from) && c.has(other) {
			from = other
		}
	}
	var words []string
	if from == "hybrid_override_pattern" {
		words = strings.Split(c.word(from), "")
	} else {
		words = c.words(from)
	}
	for _, word := range words {
		found := ""
		for name, b := range nemotronBlocks {
			if word == name || word == b.letter && from == "hybrid_override_pattern" || word == b.older {
				found = name
			}
		}
		if found == "" {
			c.failf(from, "has %q, which is not supported; use %s, %s, moe or mlp", word, linearAttention, fullAttention)
		}
		types = append(types, found)
	}
	c.skip("hybrid_override_pattern", "layer_types", "num_hidden_layers")
	return types, from
}

// nemotronH reads the config of Nemotron-H and Nemotron 3. transformers limits the steps of decays from below by time_step_min, whatever
// time_step_limit says.
func (m *Model) nemotronH(c *config) {
	types, from := m.nemotronTypes(c)
	if len(types) > 1<<12 {
		c.failf(from, "has %d layers, more than %d", len(types), 1<<12)
		return
	}
	c.members["num_hidden_layers"] = json.RawMessage(strconv.Itoa(len(types)))
	c.members["rms_norm_eps"] = json.RawMessage("1")
	m.decoder(c)
	delete(c.members, "rms_norm_eps")
	delete(c.members, "num_hidden_layers")
	for _, name := range []string{"norm_eps", "bias", "layers", "ffn"} {
		m.drop(name)
	}
	m.setCount("layers", int64(len(types)), from)
	m.setNumber("norm_eps", c.positive("layer_norm_epsilon"), "layer_norm_epsilon")
	m.activation(c, "mlp_hidden_act")
	var mixers, widths, mlps []string
	for _, t := range types {
		mixer, width, mlp := nemotronBlocks[t].mixer, "0", "dense"
		if mixer == "none" {
			width = strconv.FormatInt(c.count("intermediate_size"), 10)
		}
		if t == "moe" {
			mlp = "sparse"
		}
		mixers, widths, mlps = append(mixers, mixer), append(widths, width), append(mlps, mlp)
	}
	m.setList("ffn", period(widths), from)
	m.setList("layer_types", period(mixers), from)
	if slices.Contains(types, linearAttention) {
		for _, k := range [][2]string{{"linear_num_key_heads", "n_groups"}, {"linear_num_value_heads", "mamba_num_heads"}, {"linear_key_head_dim", "ssm_state_size"},
			{"linear_value_head_dim", "mamba_head_dim"}, {"linear_conv_kernel_dim", "conv_kernel"}} {
			m.setCount(k[0], c.count(k[1]), k[1])
		}
		m.set("use_conv_bias", fmt.Sprint(c.truth("use_conv_bias")), "use_conv_bias")
		m.setNumber("time_step_min", c.number("time_step_min"), "time_step_min")
	}
	if slices.Contains(types, "moe") {
		m.setList("mlp_layer_types", period(mlps), from)
		m.sparse(c, "n_routed_experts", "moe_intermediate_size")
		m.sigmoidRouter(c)
		m.setCount("shared_expert_intermediate_size", c.count("moe_shared_expert_intermediate_size"), "moe_shared_expert_intermediate_size")
		if c.has("moe_latent_size") {
			m.setCount("moe_latent_size", c.count("moe_latent_size"), "moe_latent_size")
		}
	}
	if n := get[int64](c, "num_nextn_predict_layers", "a whole number"); n > 0 {
		m.notice("num_nextn_predict_layers = %d: the layers for multi-token prediction are not trained", n)
	}
}

// sigmoidRouter reads the keys of a router that chooses experts by corrected scores, which are sigmoids.
func (m *Model) sigmoidRouter(c *config) {
	m.set("scoring_func", lang.ScoringSigmoid, "model_type")
	m.set("e_score_correction_bias", "true", "model_type")
	m.setNumber("routed_scaling_factor", c.positive("routed_scaling_factor"), "routed_scaling_factor")
	m.groupedExperts(c)
}

// sharedExpert reads the width of an expert that all tokens use, which has a gate.
func (m *Model) sharedExpert(c *config) {
	m.setCount("shared_expert_intermediate_size", c.count("shared_expert_intermediate_size"), "shared_expert_intermediate_size")
	m.set("shared_expert_gate", "true", "model_type")
}

// sharedExperts reads the width of the experts that all tokens use, which are one.
func (m *Model) sharedExperts(c *config) {
	m.setCount("shared_expert_intermediate_size", c.count("n_shared_experts")*c.count("moe_intermediate_size"), "n_shared_experts * moe_intermediate_size")
}

// mixtral reads the config of Mixtral, in which every layer has experts.
func (m *Model) mixtral(c *config) {
	m.mistral(c)
	m.sparse(c, "num_local_experts", "intermediate_size")
}

// gptOss reads the config of gpt-oss, in which every second layer has a window.
func (m *Model) gptOss(c *config) {
	if !c.has("rope_parameters") && empty(c.members["rope_scaling"]) {
		c.assume("rope_parameters", `{"rope_type": "yarn", "factor": 32, "beta_fast": 32, "beta_slow": 1, "truncate": false,
			"original_max_position_embeddings": 4096}`)
	}
	m.decoder(c)
	m.rotary(c)
	switch m.value("rope_scaling") { // the family has other defaults
	case "":
		m.set("rope_scaling", lang.ScalingNone, "rope_type")
	case lang.ScalingYarn:
		if m.value("rope_truncate") == "" {
			m.set("rope_truncate", "true", "the default of transformers")
		}
	}
	m.drop("bias")
	bias := []string{lang.BiasRouter, lang.BiasExperts}
	if c.truth("attention_bias") {
		bias = append(bias, lang.BiasQKV, lang.BiasAttnOut)
	}
	m.setList("bias", bias, "attention_bias")
	m.sparse(c, "num_local_experts", "intermediate_size")
	m.windowsOfFamily(c, func(layer int64) bool { return layer%2 == 0 })
}

// minimax reads the config of MiniMax-M2. Published configs state the rotated part of a head by its width.
func (m *Model) minimax(c *config) {
	if name := "rotary_dim"; c.has(name) && !c.present("partial_rotary_factor") {
		text, _ := json.Marshal(c.number(name) / max(1, c.number("head_dim")))
		c.members["partial_rotary_factor"] = text
	}
	m.llama(c)
	m.wholeHeads()
	m.sparse(c, "num_local_experts", "intermediate_size")
}

// wholeHeads sets that heads are rotated entirely if they are, for families that have another default.
func (m *Model) wholeHeads() {
	if m.value("rope_partial") == "" {
		m.set("rope_partial", "1", "partial_rotary_factor")
	}
}

// glmMoE reads the config of GLM-4.5.
func (m *Model) glmMoE(c *config) {
	if name := "partial_rotary_factor"; !c.present(name) && !m.rotation(c).present(name) {
		c.assume(name, "0.5")
	}
	m.llama(c)
	m.wholeHeads()
	m.drop("bias")
	if c.truth("attention_bias") {
		m.setList("bias", []string{lang.BiasQKV}, "attention_bias")
	} else {
		m.setList("bias", nil, "attention_bias")
	}
	m.sparse(c, "n_routed_experts", "moe_intermediate_size")
	m.set("norm_topk_prob", fmt.Sprint(c.truth("norm_topk_prob")), "norm_topk_prob")
	m.setNumber("routed_scaling_factor", c.positive("routed_scaling_factor"), "routed_scaling_factor")
	m.groups(c)
	dense := get[int64](c, "first_k_dense_replace", "a whole number")
	if layers := layersOf(c); dense >= layers {
		c.failf("num_hidden_layers", "= %d is not supported with first_k_dense_replace = %d: no layer has experts", layers, dense)
	}
	m.setCount("first_k_dense_replace", dense, "first_k_dense_replace")
	m.sharedExperts(c)
	m.set("qk_norm", map[bool]string{true: lang.QKNormHead, false: lang.QKNormNone}[c.truth("use_qk_norm")], "use_qk_norm")
	if n := get[int64](c, "num_mtp_layers", "a whole number"); n > 0 {
		m.notice("num_nextn_predict_layers = %d: the layers for multi-token prediction are not trained", n)
	}
}

// latentSizes reads the sizes of latent attention, and what other layers of models that have it share.
func (m *Model) latentSizes(c *config) {
	m.decoder(c)
	m.drop("head_dim") // in some classes, that of rotated elements
	c.skip("head_dim", "qk_head_dim")
	m.activation(c, "hidden_act")
	for _, name := range []string{"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"} {
		m.setCount(name, c.count(name), name)
	}
	if c.has("q_lora_rank") {
		m.setCount("q_lora_rank", c.count("q_lora_rank"), "q_lora_rank")
	} else {
		c.skip("q_lora_rank")
		other := *m.arch
		other.names.tensors = merged(other.names.tensors, wholeQueries)
		m.arch = &other
	}
	if c.truth("attention_bias") {
		c.failf("attention_bias", "= true is not supported with latent attention")
	}
	m.drop("bias")
	m.setList("bias", nil, "attention_bias")
}

// latent reads what the configs of DeepSeek and Mistral 4 have in common.
func (m *Model) latent(c *config) {
	m.latentSizes(c)
	m.set("layer_types", lang.MixerLatent, "model_type")
	m.rotary(c)
	m.attentionScale(c)
	if row := c.row("rope_interleave"); row != nil {
		m.halves = !c.has("rope_interleave") || !c.truth("rope_interleave")
		c.skip("rope_interleave")
	}
	m.sparse(c, "n_routed_experts", "moe_intermediate_size")
	m.setNumber("routed_scaling_factor", c.positive("routed_scaling_factor"), "routed_scaling_factor")
	dense := int64(0)
	if c.has("first_k_dense_replace") {
		dense = get[int64](c, "first_k_dense_replace", "a whole number")
	}
	if layers := layersOf(c); dense >= layers {
		c.failf("num_hidden_layers", "= %d is not supported with first_k_dense_replace = %d: no layer has experts", layers, dense)
	}
	m.setCount("first_k_dense_replace", dense, "first_k_dense_replace")
	m.sharedExperts(c)
}

// attentionScale sets the factor of the scores of latent attention, which yarn changes. The class computes it from the members that
// follow, with other names than elsewhere.
func (m *Model) attentionScale(c *config) {
	p := m.rotation(c)
	const all = "mscale_all_dim"
	p.skip(all)
	if m.value("rope_scaling") == "" || empty(p.members[all]) || *c.err != nil {
		return
	}
	grown := 1.0
	if factor := p.number("factor"); factor > 1 {
		grown = 0.1*p.number(all)*math.Log(factor) + 1
	}
	width := float64(c.count("qk_nope_head_dim") + c.count("qk_rope_head_dim"))
	m.setNumber("attn_scale", grown*grown/math.Sqrt(width), p.prefix+all)
}

// groups reads the groups of experts.
func (m *Model) groups(c *config) {
	m.setCount("n_group", c.count("n_group"), "n_group")
	m.setCount("topk_group", c.count("topk_group"), "topk_group")
}

// groupedExperts reads the groups of experts, and whether scores are divided by their sum.
func (m *Model) groupedExperts(c *config) {
	m.set("norm_topk_prob", fmt.Sprint(c.truth("norm_topk_prob")), "norm_topk_prob")
	m.groups(c)
}

// deepseek2 reads the config of DeepSeek-V2. Its class never divides the scores of a token's experts by their sum.
func (m *Model) deepseek2(c *config) {
	m.latent(c)
	m.set("norm_topk_prob", "false", "model_type")
	c.skip("n_group", "topk_group", "norm_topk_prob")
	if c.has("topk_method") {
		c.among("topk_method", c.word("topk_method"), []string{greedy, lang.GroupLimited})
		if c.word("topk_method") == lang.GroupLimited {
			m.groups(c)
		}
		if n := m.value("n_group"); n != "" && n != "1" { // with one group, this is greedy
			m.set("topk_method", lang.GroupLimited, "topk_method")
		}
	}
	if c.truth("mlp_bias") {
		c.failf("mlp_bias", "= true is not supported")
	}
}

// deepseek3 reads the config of DeepSeek-V3.
func (m *Model) deepseek3(c *config) {
	m.latent(c)
	m.groupedExperts(c)
	if n := get[int64](c, "num_mtp_layers", "a whole number"); n > 0 {
		m.notice("num_nextn_predict_layers = %d: the layers for multi-token prediction are not trained", n)
	}
}

// mistral4 reads the config of Mistral 4.
func (m *Model) mistral4(c *config) {
	if !c.has("rope_parameters") && empty(c.members["rope_scaling"]) {
		c.assume("rope_parameters", `{"type": "yarn", "rope_theta": 1e4, "factor": 128, "original_max_position_embeddings": 8192,
			"beta_fast": 32, "beta_slow": 1, "mscale_all_dim": 1, "mscale": 1, "llama_4_scaling_beta": 0.1}`)
	}
	m.latent(c)
	if p := m.rotation(c); m.value("rope_scaling") == "" {
		p.failf("rope_type", "= default is not supported with model_type = %s: transformers fails", mistral4)
	}
	m.growing(c)
	m.groupedExperts(c)
}

// kimiAliases lists the names that keys have in published configs of Kimi Linear.
var kimiAliases = []alias{
	{"model_max_length", "max_position_embeddings"}, {"moe_renormalize", "norm_topk_prob"}, {"num_expert_group", "n_group"}, {"num_experts", "num_local_experts"},
	{"num_experts_per_token", "num_experts_per_tok"}, {"num_shared_experts", "n_shared_experts"},
}

// kimiLinear reads the config of Kimi Linear. An object linear_attn_config, as in published configs, has other names for the sizes of
// linear attention, and lists layers by numbers from 1 where there is no layer_types. The class has no rotation, whatever the config says of it.
func (m *Model) kimiLinear(c *config) {
	c.rename(kimiAliases)
	m.latentSizes(c)
	m.halves = true // no pairs
	if m.value("tied") == "true" {
		c.failf("tie_word_embeddings", "= true is not supported with model_type = %s: transformers ignores it", kimiLinear)
	}
	if name := c.word("hidden_act"); activations[name] != "silu" {
		c.failf("hidden_act", "= %q is not supported with linear attention; use silu", name)
	}
	o := c.objectOrEmpty("linear_attn_config")
	types, from := m.kimiTypes(c, o)
	m.setList("layer_types", period(types), from)
	for _, k := range []struct {
		own, name string
		ours      []string
	}{
		{"num_heads", "linear_num_heads", []string{"linear_num_key_heads", "linear_num_value_heads"}},
		{"head_dim", "linear_head_dim", []string{"linear_key_head_dim", "linear_value_head_dim"}},
		{"short_conv_kernel_size", "linear_conv_kernel_dim", []string{"linear_conv_kernel_dim"}},
	} {
		of, name := c, k.name
		if o.has(k.own) {
			of, name = o, k.own
			c.skip(k.name)
		}
		n := of.count(name)
		for _, ours := range k.ours {
			if slices.Contains(types, lang.MixerKimiDelta) {
				m.setCount(ours, n, of.prefix+name)
			}
		}
	}
	m.sparse(c, "num_local_experts", "moe_intermediate_size")
	m.sigmoidRouter(c)
	m.sharedExperts(c)
	if dense, name := int64(1), "first_k_dense_replace"; c.has("mlp_layer_types") {
		m.setList("mlp_layer_types", period(c.words("mlp_layer_types")), "mlp_layer_types")
		c.skip(name)
	} else {
		if c.present(name) {
			dense = get[int64](c, name, "a whole number")
		} else {
			c.usual[name] = strconv.FormatInt(dense, 10)
		}
		m.setCount(name, dense, name)
	}
}

// kimiTypes returns the types of the layers of Kimi Linear, in words of the language. Without any list, the class has its own pattern.
func (m *Model) kimiTypes(c, o *config) (types []string, from string) {
	const full, linear = "full_attn_layers", "kda_layers"
	layers := layersOf(c)
	if c.has("layer_types") {
		c.skip("layer_types")
		o.skip(full, linear)
		return m.linearTypes(c, lang.MixerLatent, lang.MixerKimiDelta), "layer_types"
	}
	types = make([]string, layers)
	if !o.has(full) || !o.has(linear) {
		for i := range types {
			types[i] = map[bool]string{true: lang.MixerLatent, false: lang.MixerKimiDelta}[i > 0 && i%4 == 0]
		}
		return types, "model_type"
	}
	for _, list := range []struct{ name, word string }{{full, lang.MixerLatent}, {linear, lang.MixerKimiDelta}} {
		for _, number := range get[[]int64](o, list.name, "a list of whole numbers") {
			if number < 1 || number > layers {
				o.failf(list.name, "has layer %d of %d layers", number, layers)
				return nil, ""
			}
			types[number-1] = list.word
		}
	}
	if i := slices.Index(types, ""); i >= 0 {
		o.failf(linear, "does not have layer %d, and neither does %s", i+1, full)
	}
	return types, o.prefix + linear
}

// smollm reads the config of SmolLM3, in which every fourth layer has no positions.
func (m *Model) smollm(c *config) {
	m.llama(c)
	layers, from := layersOf(c), "no_rope_layers"
	var rotated []int64
	if c.has(from) {
		rotated = get[[]int64](c, from, "a list of whole numbers")
		c.skip("no_rope_layer_interval")
	} else {
		from = "no_rope_layer_interval"
		interval := c.count(from)
		for i := range layers {
			rotated = append(rotated, map[bool]int64{true: 1}[*c.err == nil && (i+1)%interval != 0])
		}
	}
	if int64(len(rotated)) < layers {
		c.failf(from, "has %d entries for %d layers", len(rotated), layers)
		return
	}
	var words []string
	for _, v := range period(rotated[:layers]) {
		words = append(words, map[bool]string{true: "rope", false: "none"}[v != 0])
	}
	m.setList("positions", words, from)
	m.sliding(c, func(layer int64) bool { return rotated[layer] == 0 })
}

// gemma2 reads the config of Gemma-2, in which every second layer has a window.
func (m *Model) gemma2(c *config) {
	m.gemma(c)
	m.softcap(c, "attn_softcap", "attn_logit_softcapping")
	m.softcap(c, "logit_softcap", "final_logit_softcapping")
	m.rotary(c)
	m.windowsOfFamily(c, func(layer int64) bool { return layer%2 == 0 })
}

// gemma3 reads the config of Gemma-3, in which every sixth layer has no window. transformers ignores the limit on
// scores and, in models with a vision part, the limit on logits.
func (m *Model) gemma3(c *config) {
	m.gemma(c)
	if !m.outer {
		m.softcap(c, "logit_softcap", "final_logit_softcapping")
	}
	m.rotaries(c, "rope_local_base_freq")
	every := int64(6)
	if name := "sliding_window_pattern"; c.present(name) && !c.has("layer_types") {
		every = max(1, c.count(name))
	}
	m.windowsOfFamily(c, func(layer int64) bool { return (layer+1)%every != 0 })
}

// gemma reads what the configs of Gemma-2 and Gemma-3 have in common.
func (m *Model) gemma(c *config) {
	m.decoder(c)
	m.activation(c, "hidden_activation")
	m.setNumber("attn_scale", 1/math.Sqrt(c.positive("query_pre_attn_scalar")), "1 / sqrt(query_pre_attn_scalar)")
}

// olmo3 reads the config of OLMo-3, in which every fourth layer has no window.
func (m *Model) olmo3(c *config) {
	m.decoder(c)
	m.activation(c, "hidden_act")
	m.rotaries(c, "")
	m.windowsOfFamily(c, func(layer int64) bool { return (layer+1)%4 != 0 })
}

// granite reads the config of Granite. A stream that is divided by residual_multiplier gets the results of attention and
// MLP without a factor. A norm gives the same for it if its epsilon is divided by the square.
func (m *Model) granite(c *config) {
	m.llama(c)
	branch := c.positive("residual_multiplier")
	m.setNumber("attn_scale", c.positive("attention_multiplier"), "attention_multiplier")
	m.setNumber("logit_scale", 1/c.positive("logits_scaling"), "1 / logits_scaling")
	m.setNumber("embed_scale", c.positive("embedding_multiplier")/branch, "embedding_multiplier / residual_multiplier")
	if branch != 1 {
		m.drop("norm_eps")
		m.setNumber("norm_eps", c.positive("rms_norm_eps")/(branch*branch), "rms_norm_eps / residual_multiplier^2")
	}
}

// exaone reads the config of EXAONE-4. In a model with a sliding_window, layers without it do not rotate. Without
// layer_types, transformers divides by sliding_window_pattern, which must then be a number.
func (m *Model) exaone(c *config) {
	m.llama(c)
	hybrid, every := c.has("sliding_window"), int64(1)
	switch {
	case c.has("layer_types"):
		c.skip("sliding_window_pattern")
	case hybrid:
		every = max(1, c.count("sliding_window_pattern"))
	default:
		c.failf("layer_types", "is missing, and sliding_window does not replace it")
	}
	types, from := m.listedTypes(c, func(layer int64) bool { return (layer+1)%every != 0 })
	if !hybrid && !slices.Contains(types, slidingAttention) {
		return
	}
	m.layerTypes(c, types, c.count("sliding_window"), from)
	var words []string
	for _, t := range period(types) {
		words = append(words, map[string]string{slidingAttention: lang.PositionsRope, fullAttention: lang.PositionsNone}[t])
	}
	m.setList("positions", words, from)
}

// softcap sets a limit. The family may have a default, so null is set, too.
func (m *Model) softcap(c *config, ours, theirs string) {
	if c.has(theirs) {
		m.setNumber(ours, c.positive(theirs), theirs)
	} else {
		m.set(ours, "0", theirs)
	}
}

// windowsOfFamily sets the windows of a family that has windows by default. transformers needs sliding_window even if
// no layer has a window.
func (m *Model) windowsOfFamily(c *config, usual func(layer int64) bool) {
	window := c.count("sliding_window")
	types, from := m.listedTypes(c, usual)
	m.layerTypes(c, types, window, from)
	switch {
	case !slices.Contains(types, slidingAttention):
		m.set("window", "0", from)
		m.drop("rope_local_theta")
	case !slices.Contains(types, fullAttention):
		m.setList("layer_types", []string{lang.LayerSliding}, from)
	}
}

// gpt2 reads the config of GPT-2. transformers accepts some of its keys under the names that other configs have.
func (m *Model) gpt2(c *config) {
	for other, name := range map[string]string{
		"hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
	} {
		if v, there := c.members[other]; there {
			c.members[name] = v
			c.skip(other)
		}
	}
	hidden, heads := c.count("n_embd"), c.count("n_head")
	m.setCount("layers", c.count("n_layer"), "n_layer")
	m.setCount("hidden", hidden, "n_embd")
	m.setCount("heads", heads, "n_head")
	if *c.err == nil && hidden%heads != 0 {
		c.failf("n_embd", "= %d is not a multiple of n_head = %d", hidden, heads)
	}
	if c.has("n_inner") {
		m.setCount("ffn", c.count("n_inner"), "n_inner")
	} else {
		m.setCount("ffn", 4*hidden, "4 * n_embd")
	}
	m.vocabulary(c)
	m.storage(c)
	m.tied(c)
	m.setNumber("norm_eps", c.positive("layer_norm_epsilon"), "layer_norm_epsilon")
	m.initial(c)
	m.activation(c, "activation_function")
	c.count("n_positions")
}
