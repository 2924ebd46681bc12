package lang

import (
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	"sppo.dev/ir"
)

// Names of blocks. Some blocks are calls, whose arguments are keys as well.
const (
	blockModel     = "model"
	blockCluster   = "cluster"
	blockTrain     = "train"
	blockOptimizer = "train.optimizer"
	blockSchedule  = "schedule"
	blockGuard     = "train.guard"
	blockData      = "train.data"
	blockAdapter   = "train.adapter"
)

// Block describes one kind of block.
type Block struct {
	Name     string
	Doc      string
	Required bool
}

// Blocks lists the kinds of blocks in their usual order.
var Blocks = []Block{
	{blockModel, "The neural network: `model NAME { ... }`. All sizes are those of the whole model, before it is divided among the ranks.", true},
	{blockCluster, "The machines: `cluster NAME { ... }`, or `cluster NAME = OTHER(nodes = 4)` for an instance of a cluster that has parameters. To use a cluster that ships with sppo, import it: `import \"clusters/a100-80g.sppo\"`.", true},
	{blockTrain, "One training run: `train { ... }`.", true},
	{blockSchedule, "The scheduling choices that you want to fix: `schedule NAME { ... }`. The block may be omitted, because the compiler chooses everything that is `auto`. Schedules from other systems are available for comparison: `schedule NAME = megatron(sp = 8, pp = 4)` after `import \"baselines/megatron.sppo\"`.", false},
	{blockOptimizer, "Arguments for the optimizer: `optimizer = adamw(lr = 3e-4)`. In `explain` and `--set`, they are written like keys: `train.optimizer.lr`.", false},
	{blockGuard, "Arguments for the guard: `guard = skip(spikes = 10)`. In `explain` and `--set`, they are written like keys: `train.guard.spikes`.", false},
	{blockAdapter, "Arguments for the adapter: `adapter = lora(rank = 16)`. In `explain` and `--set`, they are written like keys: `train.adapter.rank`.", false},
	{blockData, "Arguments to `data = tokens(...)` other than its files: `data = tokens(\"corpus/*.bin\", type = uint16)`. In `explain` and `--set`, they are written like keys: `train.data.shuffle`.", false},
}

// number is the range of a numeric key.
type number struct {
	dim      dim
	whole    bool
	min, max float64
	above    bool // min itself is excluded
	below    bool // max itself is excluded
}

// list limits the length of a list and gives the type of its items.
type list struct {
	item     valueType
	min, max int
}

// valueType describes the values that a key accepts: those of every form whose field is set.
type valueType struct {
	names  []string
	number *number
	list   *list
	calls  []callType
	text   bool
}

// callType is a call such as adamw(...). Its named arguments are the keys of a block, or only those listed in
// args.
type callType struct {
	name  string
	block string
	args  []string
	texts bool // takes one or more positional strings
	doc   string
}

// has reports whether the call takes an argument with that name.
func (c *callType) has(name string) bool {
	return FindKey(c.block+"."+name) != nil && (c.args == nil || slices.Contains(c.args, name))
}

// arguments returns the names that the call takes, in the order of the block.
func (c *callType) arguments() (names []string) {
	for _, k := range KeysOf(c.block) {
		if c.has(k.Name) {
			names = append(names, k.Name)
		}
	}
	return names
}

// Key is one row of the table of keys. It defines how a value is checked, documented, completed and
// stored in the Spec.
type Key struct {
	Block   string
	Name    string
	Default string // as written in a spec; "" if the key must be given
	Derived string // how the default follows from other keys, in words; derive computes the default
	Doc     string
	Example string

	takes  valueType
	paths  bool // strings name files, relative to the folder of the text
	set    func(*Spec, value)
	derive func(*Spec)
}

// Path returns the name of the key in messages, explain and --set.
func (k *Key) Path() string { return k.Block + "." + k.Name }

// Words returns the names that the key accepts as a value, such as auto, but not its other values.
func (k *Key) Words() []string { return slices.Clone(k.takes.names) }

// Required reports whether a spec must give the key.
func (k *Key) Required() bool { return k.Default == "" && k.Derived == "" }

const (
	maxRanks  = 1 << 20
	maxCount  = 1 << 31
	maxTokens = 1 << 40
	maxBytes  = 1 << 60
	maxRate   = 1e21
)

func names(ns ...string) valueType { return valueType{names: ns} }

func whole(least, most float64) valueType {
	return valueType{number: &number{dim: dimCount, whole: true, min: least, max: most}}
}

func positive(d dim) valueType {
	return valueType{number: &number{dim: d, above: true, max: maxRate}}
}

func notNegative(d dim) valueType {
	return valueType{number: &number{dim: d, max: maxRate}}
}

func bytes(least float64) valueType {
	return valueType{number: &number{dim: dimBytes, whole: true, min: least, max: maxBytes}}
}

// share returns the type of a fraction: above 0 and at most 1.
func share() valueType {
	return valueType{number: &number{above: true, max: 1}}
}

func (t valueType) orNames(ns ...string) valueType {
	t.names = append(slices.Clone(t.names), ns...)
	return t
}

func (t valueType) orList(item valueType, least, most int) valueType {
	t.list = &list{item, least, most}
	return t
}

// orCall adds a call that takes strings.
func (t valueType) orCall(name, doc string) valueType {
	t.calls = append(slices.Clone(t.calls), callType{name: name, texts: true, doc: doc})
	return t
}

func autoOr(t valueType) valueType { return t.orNames("auto") }

// curve returns the type of an efficiency: a share, or pairs of size and share.
func curve() valueType {
	pair := valueType{}.orList(valueType{number: &number{above: true, max: maxTokens}}, 2, 2)
	return share().orList(pair, 1, 1000)
}

func setSP(s *Spec, v value) {
	if s.Schedule.SP, s.Schedule.Ring = v.Int(), 0; len(v.list) > 0 {
		s.Schedule.Ring = v.list[1].Int()
		s.Schedule.SP = v.list[0].Int() * s.Schedule.Ring
	}
}

func setCurve(v value) []CurvePoint {
	if v.kind == isNumber {
		return []CurvePoint{{1, v.num}}
	}
	var points []CurvePoint
	for _, pair := range v.list {
		points = append(points, CurvePoint{pair.list[0].num, pair.list[1].num})
	}
	return points
}

// Keys is the table of all keys, in reading order within each block.
var Keys = slices.Concat(modelKeys, clusterKeys, trainKeys, optimizerKeys, adapterKeys, dataKeys, scheduleKeys)

var modelKeys = []*Key{
	{Block: blockModel, Name: "family", takes: names(familyNames()...), Example: "qwen3",
		Doc: "The family of published models that determines the defaults for the other keys and the layers that the adapter target `all-linear` covers. Every key can be overridden.",
		set: func(s *Spec, v value) { s.Model.Family = v.name }},
	{Block: blockModel, Name: "layers", takes: whole(1, maxRanks), Example: "32",
		Doc: "Number of transformer layers. Layers are divided among the pipeline stages, so the model needs at least as many layers as there are stages.",
		set: func(s *Spec, v value) { s.Model.Layers = v.Int() }},
	{Block: blockModel, Name: "hidden", takes: whole(1, 1<<24), Example: "4096",
		Doc: "Width of the residual stream. It must be divisible by `heads` unless `head_dim` is given.",
		set: func(s *Spec, v value) { s.Model.Hidden = v.Int() }},
	{Block: blockModel, Name: "heads", takes: whole(1, maxRanks), Example: "32",
		Doc: "Number of query heads. Heads are divided among the SP ranks.",
		set: func(s *Spec, v value) { s.Model.Heads = v.Int() }},
	{Block: blockModel, Name: "kv_heads", takes: whole(1, maxRanks), Derived: "heads", Example: "8",
		Doc:    "Number of key and value heads; a value below `heads` means grouped-query attention. It must divide `heads`.",
		set:    func(s *Spec, v value) { s.Model.KVHeads = v.Int() },
		derive: func(s *Spec) { s.Model.KVHeads = s.Model.Heads }},
	{Block: blockModel, Name: "head_dim", takes: whole(1, 1<<16), Derived: "hidden / heads; with latent attention, qk_nope_head_dim + qk_rope_head_dim", Example: "128",
		Doc:    "Width of one head. Rotary positions need an even width.",
		set:    func(s *Spec, v value) { s.Model.HeadDim = v.Int() },
		derive: deriveHeadDim},
	{Block: blockModel, Name: "ffn", takes: whole(1, 1<<26).orList(whole(0, 1<<26), 1, maxRanks), Derived: "4 * hidden; gated: 8/3 * hidden, rounded up to a multiple of 256", Example: "11008",
		Doc:    "Hidden width of the MLP. A list is a pattern that repeats over the layers; layers with 0 have no MLP.",
		set:    setFFN,
		derive: deriveFFN},
	{Block: blockModel, Name: "num_experts", takes: whole(0, 1<<16), Default: "0", Example: "128",
		Doc: "Number of experts in the MLPs that have experts; 0 means that none has. Each expert is an MLP of its own, and a token uses only those that a router chooses for it. No token is dropped.",
		set: func(s *Spec, v value) { s.Model.Experts = v.Int() }},
	{Block: blockModel, Name: "num_experts_per_tok", takes: whole(1, 1<<10), Derived: "none; needed with experts", Example: "8",
		Doc:    "Number of experts that a token uses.",
		set:    func(s *Spec, v value) { s.Model.TopExperts = v.Int() },
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "moe_intermediate_size", takes: whole(1, 1<<26), Derived: "none; needed with experts", Example: "768",
		Doc:    "Hidden width of each expert.",
		set:    func(s *Spec, v value) { s.Model.ExpertFFN = v.Int() },
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "shared_expert_intermediate_size", takes: whole(0, 1<<26), Default: "0", Example: "512",
		Doc: "Hidden width of an expert that all tokens use in addition, in the MLPs with experts; 0 means that there is none. Several shared experts are one whose width is the sum of theirs.",
		set: func(s *Spec, v value) { s.Model.SharedFFN = v.Int() }},
	{Block: blockModel, Name: "moe_latent_size", takes: whole(0, 1<<26), Default: "0", Example: "1024",
		Doc: "Width of the rows that experts take and return, if it is not 0: one linear map makes these rows, and another one turns the sum of a token's experts back.",
		set: func(s *Spec, v value) { s.Model.LatentSize = v.Int() }},
	{Block: blockModel, Name: "shared_expert_gate", takes: names("false", "true"), Default: "false", Example: "true",
		Doc: "Whether the result of the shared expert is multiplied by the sigmoid of a linear map of the token.",
		set: func(s *Spec, v value) { s.Model.SharedGate = v.name == "true" }},
	{Block: blockModel, Name: "mlp_layer_types", takes: names(mlpTypes...).orList(names(mlpTypes...), 1, maxRanks), Derived: "sparse with experts, else dense", Example: "[dense, sparse]",
		Doc:    "The MLP of each layer, as a pattern that repeats over the layers: without experts (`dense`, with width `ffn`), or with experts (`sparse`). The next three keys are other ways to say which layers are dense.",
		set:    setMLPTypes,
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "first_k_dense_replace", takes: whole(0, maxRanks), Default: "0", Example: "3",
		Doc: "Number of layers at the start whose MLPs have no experts.",
		set: func(s *Spec, v value) { s.Model.makeDense(func(layer int) bool { return layer < v.Int() }) }},
	{Block: blockModel, Name: "decoder_sparse_step", takes: whole(1, maxRanks), Default: "1", Example: "2",
		Doc: "With n, only each n-th layer has experts.",
		set: func(s *Spec, v value) { s.Model.makeDense(func(layer int) bool { return (layer+1)%v.Int() != 0 }) }},
	{Block: blockModel, Name: "mlp_only_layers", takes: valueType{}.orList(whole(0, maxRanks), 0, maxRanks), Default: "[]", Example: "[0, 1]",
		Doc: "Numbers of layers, counted from 0, whose MLPs have no experts.",
		set: setMLPOnly},
	{Block: blockModel, Name: "scoring_func", takes: names(scorings...), Default: "softmax", Example: "sigmoid",
		Doc: "How the scores of experts follow from the logits of the router: softmax over all experts, the sigmoid of each, or softmax over only those that the token uses (gpt-oss). A token uses the experts with the highest scores, and adds their results times the scores.",
		set: func(s *Spec, v value) { s.Model.Scoring = ifExperts(s, v.name) }},
	{Block: blockModel, Name: "norm_topk_prob", takes: names("true", "false"), Default: "true", Example: "false",
		Doc: "Whether the scores of the experts that a token uses are divided by their sum.",
		set: func(s *Spec, v value) { s.Model.NormTop = ifExperts(s, v.name == "true") }},
	{Block: blockModel, Name: "routed_scaling_factor", takes: positive(dimCount), Default: "1", Example: "2.5",
		Doc: "Factor by which these scores are then multiplied.",
		set: func(s *Spec, v value) { s.Model.RoutedScale = ifExperts(s, v.num) }},
	{Block: blockModel, Name: "e_score_correction_bias", takes: names("false", "true"), Default: "false", Example: "true",
		Doc: "Whether a number for each expert, which is not trained, is added to its score for the choice of experts, but not where their results are added (DeepSeek-V3).",
		set: func(s *Spec, v value) { s.Model.Correction = v.name == "true" }},
	{Block: blockModel, Name: "n_group", takes: whole(0, 1<<10), Default: "0", Example: "8",
		Doc: "Number of groups of experts, of equal size. A token uses only experts of the `topk_group` groups with the highest scores: see `topk_method`. 0 or 1 means no groups.",
		set: func(s *Spec, v value) { s.Model.ExpertGroups = v.Int() }},
	{Block: blockModel, Name: "topk_group", takes: whole(0, 1<<10), Default: "0", Example: "4",
		Doc: "Number of groups from which a token's experts are chosen.",
		set: setTopGroups},
	{Block: blockModel, Name: "topk_method", takes: names(topMethods...), Default: groupsByTwo, Example: GroupLimited,
		Doc: "The score of a group of experts: with `noaux_tc`, the sum of the two highest scores in it, with their correction biases (DeepSeek-V3); with `group_limited_greedy`, the highest one (DeepSeek-V2). The latter needs groups, and does not go with `e_score_correction_bias`.",
		set: func(s *Spec, v value) { s.Model.setTopMethod(v.name) }},
	{Block: blockModel, Name: "router_z_loss_coef", takes: notNegative(dimCount), Default: "0", Example: "0.001",
		Doc: "Coefficient of a loss that keeps the logits of routers small: of the mean over all tokens of the square of the logarithm of the sum of their exponentials (ST-MoE), added up over the layers with experts. It changes gradients, but not the loss that is reported.",
		set: func(s *Spec, v value) { s.Model.RouterZLoss = v.num }},
	{Block: blockModel, Name: "router_aux_loss_coef", takes: notNegative(dimCount), Default: "0", Example: "0.001",
		Doc: "Coefficient of a loss that is smallest if all experts process equally many tokens: see `aux_loss`. It changes gradients, but not the loss that is reported.",
		set: func(s *Spec, v value) { s.Model.RouterAuxLoss = v.num }},
	{Block: blockModel, Name: "aux_loss", takes: names(auxLosses...), Default: "layer", Example: "layer",
		Doc: "What `router_aux_loss_coef` multiplies. layer: for each layer and sequence, the sum over experts of f P, where P is the expert's mean probability, and f the number of tokens that have it among their `num_experts_per_tok` most probable ones, divided by the number that each expert would have if all had equally many (DeepSeek-V3). It is averaged over sequences and added up over layers. joint, the loss of transformers for one sequence at a time: probabilities and numbers of tokens are means over all tokens of all layers with experts, and f is not divided by `num_experts_per_tok`; probabilities are always the softmax of the logits. It is averaged over sequences.",
		set: func(s *Spec, v value) { s.Model.setAuxLoss(v.name) }},
	{Block: blockModel, Name: "vocab", takes: whole(2, maxCount), Example: "50304",
		Doc: "Number of tokens in the vocabulary. Text read as bytes needs 256. The compiler pads the vocabulary to a multiple of `sp`, so any number is allowed.",
		set: func(s *Spec, v value) { s.Model.Vocab = v.Int() }},
	{Block: blockModel, Name: "dtype", takes: names("f32", "bf16"), Example: "bf16",
		Doc: "Data type of stored weights and activations. Weight gradients are f32; only `train.grad_reduce = bf16` rounds them before ranks sum them. Optimizer state is f32 unless `train.optimizer.moments` is set.",
		set: func(s *Spec, v value) { s.Model.DType = v.name }},
	{Block: blockModel, Name: "norm", takes: names(RMSNorm, LayerNorm), Default: "rmsnorm", Example: "layernorm",
		Doc: "The norm in residual branches and before the output projection: RMSNorm with weights, or LayerNorm with weights and biases.",
		set: func(s *Spec, v value) { s.Model.Norm = v.name }},
	{Block: blockModel, Name: "norm_offset", takes: notNegative(dimCount), Default: "0", Example: "1",
		Doc: "Number added to the weights of a norm, including those of `qk_norm`, before the multiplication. Gemma uses 1.",
		set: func(s *Spec, v value) { s.Model.NormOffset = v.num }},
	{Block: blockModel, Name: "norm_place", takes: names(NormPre, NormPost, NormPrePost), Default: "pre", Example: "post",
		Doc: "Position of the norm in a residual branch: before attention and the MLP, after them (OLMo-2), or both (Gemma-2).",
		set: func(s *Spec, v value) { s.Model.NormPlace = v.name }},
	{Block: blockModel, Name: "norm_eps", takes: positive(dimCount), Default: "1e-5", Example: "1e-6",
		Doc: "Number added to the variance before the square root is taken.",
		set: func(s *Spec, v value) { s.Model.NormEps = v.num }},
	// The function sigmoid is for gates: it does not turn the zeros of padding into zeros.
	{Block: blockModel, Name: "activation", takes: names(append(slices.Clone(ir.Functions[:ir.Sigmoid]), ir.Functions[ir.ClampedSilu])...), Default: "silu", Example: "gelu_tanh",
		Doc: "The activation function of the MLP. `gelu` is exact, `gelu_tanh` is the approximation that GPT-2 and Gemma use, `relu2` is the square of ReLU, and `clamped_silu` is that of gpt-oss, which bounds the gate and the other projection by 7 and adds 1 to the latter.",
		set: func(s *Spec, v value) { s.Model.Activation = v.name }},
	{Block: blockModel, Name: "gated", takes: names("true", "false"), Default: "true", Example: "false",
		Doc: "Whether the MLP multiplies one projection by the activation of another; with `silu`, this is SwiGLU.",
		set: func(s *Spec, v value) { s.Model.Gated = v.name == "true" }},
	{Block: blockModel, Name: "bias", takes: valueType{}.orList(names(biasGroups...), 0, 5), Default: "[]", Example: "[qkv]",
		Doc: "Which linear maps have biases: the projections to Q, K and V (`qkv`), the output projection of attention (`attn_out`), the linear maps of MLPs without experts (`mlp`), those of experts (`experts`), or the map to the router's logits (`router`).",
		set: setBias},
	{Block: blockModel, Name: "qk_norm", takes: names(QKNormNone, QKNormHead, QKNormAll, QKNormRotated), Default: "none", Example: "head",
		Doc: "RMSNorm applied to queries and keys before rotation: for each head separately (Qwen3, Gemma-3), or for all heads of a token together (OLMo-2). `rotated` is for each head separately, after rotation (Hunyuan).",
		set: func(s *Spec, v value) { s.Model.QKNorm = v.name }},
	{Block: blockModel, Name: "positions", takes: names(PositionsLearned, PositionsRope, PositionsNone).orList(names(PositionsRope, PositionsNone), 1, maxRanks), Default: "rope", Example: "[rope, rope, rope, none]",
		Doc: "Position information: a learned table with `train.sequence` rows, rotary embedding of Q and K, or none. A list is a pattern that repeats over the layers.",
		set: setPositions},
	{Block: blockModel, Name: "rope_theta", takes: positive(dimCount), Default: "10000", Example: "500000",
		Doc: "Base of the rotary frequencies with `positions = rope`. Longer sequences need a larger base.",
		set: func(s *Spec, v value) { s.Model.RopeTheta = v.num }},
	{Block: blockModel, Name: "rope_partial", takes: share(), Derived: "1; with latent attention, qk_rope_head_dim / head_dim", Example: "0.75",
		Doc:    "Fraction of each head that is rotated, starting with its first elements.",
		set:    func(s *Spec, v value) { s.Model.RopePartial = v.num },
		derive: deriveRopePartial},
	{Block: blockModel, Name: "rope_scaling", takes: names(ScalingNone, ScalingLinear, ScalingLlama3, ScalingYarn, ScalingLongRope), Default: "none", Example: "llama3",
		Doc: "How rotary frequencies are scaled for sequences longer than those in the original training: all by the same factor (`linear`), only low frequencies (`llama3`, `yarn`), or each by its own factor (`longrope`).",
		set: func(s *Spec, v value) { s.Model.RopeScaling = v.name }},
	{Block: blockModel, Name: "rope_factor", takes: valueType{number: &number{min: 1, max: maxRate}}, Derived: "1 with longrope; needed by linear, llama3 and yarn", Example: "8",
		Doc:    "Factor by which `rope_scaling` extends the context. With `longrope`, it only affects `rope_amplitude`.",
		set:    func(s *Spec, v value) { s.Model.RopeFactor = v.num },
		derive: func(s *Spec) { s.Model.RopeFactor = whereScaled(s, 1, ScalingLongRope) }},
	{Block: blockModel, Name: "rope_original", takes: whole(1, maxCount), Derived: "none; needed by llama3, yarn and longrope", Example: "8K",
		Doc:    "Longest sequence in the original training, in tokens.",
		set:    func(s *Spec, v value) { s.Model.RopeOriginal = v.Int() },
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "rope_low", takes: positive(dimCount), Derived: "1 with llama3", Example: "1",
		Doc:    "`llama3`: frequencies with fewer turns than this in `rope_original` tokens are scaled by the full factor.",
		set:    func(s *Spec, v value) { s.Model.RopeLow = v.num },
		derive: func(s *Spec) { s.Model.RopeLow = whereScaled(s, 1, ScalingLlama3) }},
	{Block: blockModel, Name: "rope_high", takes: positive(dimCount), Derived: "4 with llama3", Example: "4",
		Doc:    "`llama3`: frequencies with more turns than this in `rope_original` tokens are not scaled.",
		set:    func(s *Spec, v value) { s.Model.RopeHigh = v.num },
		derive: func(s *Spec) { s.Model.RopeHigh = whereScaled(s, 4, ScalingLlama3) }},
	{Block: blockModel, Name: "rope_fast", takes: positive(dimCount), Derived: "32 with yarn", Example: "32",
		Doc:    "`yarn`: frequencies with more turns than this in `rope_original` tokens are not scaled (beta_fast).",
		set:    func(s *Spec, v value) { s.Model.RopeFast = v.num },
		derive: func(s *Spec) { s.Model.RopeFast = whereScaled(s, 32, ScalingYarn) }},
	{Block: blockModel, Name: "rope_slow", takes: positive(dimCount), Derived: "1 with yarn", Example: "1",
		Doc:    "`yarn`: frequencies with fewer turns than this in `rope_original` tokens are scaled by the full factor (beta_slow).",
		set:    func(s *Spec, v value) { s.Model.RopeSlow = v.num },
		derive: func(s *Spec) { s.Model.RopeSlow = whereScaled(s, 1, ScalingYarn) }},
	{Block: blockModel, Name: "rope_truncate", takes: names("true", "false"), Derived: "true with yarn", Example: "false",
		Doc:    "`yarn`: whether the pair indices at which scaling begins and ends are rounded to integers.",
		set:    func(s *Spec, v value) { s.Model.RopeTruncate = v.name == "true" },
		derive: func(s *Spec) { s.Model.RopeTruncate = s.Model.RopeScaling == ScalingYarn }},
	{Block: blockModel, Name: "rope_amplitude", takes: positive(dimCount), Derived: "yarn: 0.1 * ln(rope_factor) + 1; longrope: sqrt(1 + ln(rope_factor) / ln(rope_original)); else 1", Example: "1.19",
		Doc:    "`yarn` and `longrope`: factor by which rotated queries and keys are multiplied (attention_factor).",
		set:    func(s *Spec, v value) { s.Model.RopeAmplitude = v.num },
		derive: func(s *Spec) { s.Model.RopeAmplitude = s.Model.amplitude() }},
	{Block: blockModel, Name: "rope_beta", takes: notNegative(dimCount), Default: "0", Example: "0.1",
		Doc: "`llama3`, `yarn` and `longrope`: b, if rotated queries are multiplied by 1 + b * ln(1 + floor(position / rope_original)), as in Ministral 3 (llama_4_scaling_beta).",
		set: func(s *Spec, v value) { s.Model.RopeBeta = v.num }},
	{Block: blockModel, Name: "rope_short", takes: valueType{}.orList(positive(dimCount), 1, 1<<15), Derived: "none; needed by longrope", Example: "[1, 1.02, 1.5, 2]",
		Doc:    "`longrope`: scaling factor for each rotated pair if `train.sequence` is at most `rope_original`.",
		set:    func(s *Spec, v value) { s.Model.RopeShort = v.numbers() },
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "rope_long", takes: valueType{}.orList(positive(dimCount), 1, 1<<15), Derived: "none; needed by longrope", Example: "[1.05, 2, 20, 60]",
		Doc:    "`longrope`: scaling factor for each rotated pair if `train.sequence` is longer than `rope_original`.",
		set:    func(s *Spec, v value) { s.Model.RopeLong = v.numbers() },
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "window", takes: whole(0, maxTokens).orList(whole(0, maxTokens), 1, maxRanks), Default: "0", Example: "4K",
		Doc: "Number of tokens that a query attends to, including its own; 0 means all. A list is a pattern that repeats over the layers: `[1K, 0]` alternates. The window also reduces the amount of work and the traffic for streamed K and V.",
		set: setWindow},
	{Block: blockModel, Name: "layer_types", takes: names(layerTypeNames()...).orList(names(layerTypeNames()...), 1, maxRanks), Derived: "sliding where window is not 0", Example: "[sliding, sliding, full]",
		Doc:    "The attention of each layer, as a pattern that repeats over the layers: with the window (`sliding`, which needs a single number as `window`), over all earlier tokens (`full`), linear attention by the gated delta rule (`gated_delta`) with a decay for each channel as in Kimi Linear (`kimi_delta`) or as in Mamba-2 (`mamba2`), which needs the keys that begin with `linear_`, attention whose keys and values are computed from a latent (`latent`, which needs `kv_lora_rank` and the keys after it), or none (`none`).",
		set:    setLayerTypes,
		derive: func(s *Spec) { s.Model.normalizeWindows() }},
	{Block: blockModel, Name: "linear_num_key_heads", takes: whole(1, maxRanks), Derived: linearDefault, Example: "16",
		Doc:    "Number of heads of queries and keys in layers with linear attention; of Mamba-2, of groups (n_groups).",
		set:    func(s *Spec, v value) { s.Model.LinearKeyHeads = v.Int() },
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "linear_num_value_heads", takes: whole(1, maxRanks), Derived: linearDefault, Example: "32",
		Doc:    "Number of heads of values in layers with linear attention, a multiple of `linear_num_key_heads`. Each has a state, a matrix that the layer updates from token to token.",
		set:    func(s *Spec, v value) { s.Model.LinearValueHeads = v.Int() },
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "linear_key_head_dim", takes: whole(1, 1<<16), Derived: linearDefault, Example: "128",
		Doc:    "Width of a head of queries and keys in layers with linear attention, and number of rows of a state (ssm_state_size).",
		set:    func(s *Spec, v value) { s.Model.LinearKeyDim = v.Int() },
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "linear_value_head_dim", takes: whole(1, 1<<16), Derived: linearDefault, Example: "128",
		Doc:    "Width of a head of values in layers with linear attention, and number of columns of a state.",
		set:    func(s *Spec, v value) { s.Model.LinearValueDim = v.Int() },
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "linear_conv_kernel_dim", takes: whole(1, 1<<8), Derived: linearDefault, Example: "4",
		Doc:    "Number of tokens, including its own, over which queries, keys and values of a token are convolved in layers with linear attention.",
		set:    func(s *Spec, v value) { s.Model.LinearConv = v.Int() },
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "use_conv_bias", takes: names("false", "true"), Default: "false", Example: "true",
		Doc: "Whether the convolutions in layers of type `mamba2` have biases.",
		set: func(s *Spec, v value) { s.Model.ConvBias = v.name == "true" }},
	{Block: blockModel, Name: "time_step_min", takes: notNegative(dimCount), Default: "0", Example: "0.001",
		Doc: "Smaller steps in layers of type `mamba2` are replaced by this one.",
		set: func(s *Spec, v value) { s.Model.StepMin = v.num }},
	{Block: blockModel, Name: "q_lora_rank", takes: whole(0, 1<<24), Default: "0", Example: "1536",
		Doc: "Layers of type `latent`: width of the latent from which queries are computed, after a norm. With 0, they are computed from the layer's input.",
		set: func(s *Spec, v value) { s.Model.QLatent = v.Int() }},
	{Block: blockModel, Name: "kv_lora_rank", takes: whole(1, 1<<24), Derived: latentDefault, Example: "512",
		Doc:    "Layers of type `latent`: width of the latent from which keys and values are computed, after a norm.",
		set:    func(s *Spec, v value) { s.Model.KVLatent = v.Int() },
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "qk_nope_head_dim", takes: whole(1, 1<<16), Derived: latentDefault, Example: "128",
		Doc:    "Layers of type `latent`: number of elements of a head of queries and keys that are not rotated.",
		set:    func(s *Spec, v value) { s.Model.NopeDim = v.Int() },
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "qk_rope_head_dim", takes: whole(1, 1<<16), Derived: latentDefault, Example: "64",
		Doc:    "Layers of type `latent`: number of elements of a head of queries and keys that are rotated. They come first in a head; all heads of keys share them, and they are computed from the layer's input.",
		set:    func(s *Spec, v value) { s.Model.RopeDim = v.Int() },
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "v_head_dim", takes: whole(1, 1<<16), Derived: latentDefault, Example: "128",
		Doc:    "Layers of type `latent`: width of a head of values.",
		set:    func(s *Spec, v value) { s.Model.ValueHeadDim = v.Int() },
		derive: func(*Spec) {}},
	{Block: blockModel, Name: "rope_local_theta", takes: notNegative(dimCount), Default: "0", Example: "10000",
		Doc: "Base of the rotary frequencies in layers with a window. If it is not 0, `rope_scaling` does not apply to these layers. With 0, these layers use the same frequencies as the other layers. Gemma-3 uses 10000.",
		set: func(s *Spec, v value) { s.Model.RopeLocalTheta = v.num }},
	{Block: blockModel, Name: "attn_scale", takes: positive(dimCount), Derived: "1 / sqrt(head_dim)", Example: "0.0625",
		Doc:    "Factor by which attention scores are multiplied before the softmax.",
		set:    func(s *Spec, v value) { s.Model.AttnScale = v.num },
		derive: func(s *Spec) { s.Model.AttnScale = 1 / math.Sqrt(float64(max(1, s.Model.HeadDim))) }},
	{Block: blockModel, Name: "attn_softcap", takes: notNegative(dimCount), Default: "0", Example: "50",
		Doc: "Bound c on attention scores: each score becomes c * tanh(score / c) before the softmax. 0 means no bound. Gemma-2 uses 50.",
		set: func(s *Spec, v value) { s.Model.AttnSoftcap = v.num }},
	{Block: blockModel, Name: "attn_sinks", takes: names("false", "true"), Default: "false", Example: "true",
		Doc: "Whether the softmax of attention has one more key in each head, with a learnt score and the value 0, so that a query can attend to nothing. gpt-oss has these sinks.",
		set: func(s *Spec, v value) { s.Model.AttnSinks = v.name == "true" }},
	{Block: blockModel, Name: "attn_output_gate", takes: names("false", "true"), Default: "false", Example: "true",
		Doc: "Whether the result of attention is multiplied by the sigmoid of a linear map of the layer's input. Qwen3-Next has this gate.",
		set: func(s *Spec, v value) { s.Model.AttnGate = v.name == "true" }},
	{Block: blockModel, Name: "logit_softcap", takes: notNegative(dimCount), Default: "0", Example: "30",
		Doc: "Bound c on the logits: each logit becomes c * tanh(logit / c). 0 means no bound. Gemma-2 uses 30.",
		set: func(s *Spec, v value) { s.Model.LogitSoftcap = v.num }},
	{Block: blockModel, Name: "logit_scale", takes: positive(dimCount), Default: "1", Example: "0.125",
		Doc: "Factor by which the logits are multiplied, before `logit_softcap`. In Granite, it is 1 / logits_scaling.",
		set: func(s *Spec, v value) { s.Model.LogitScale = v.num }},
	{Block: blockModel, Name: "embed_scale", takes: positive(dimCount).orNames("sqrt_hidden"), Default: "1", Example: "sqrt_hidden",
		Doc: "Factor by which embedding vectors are multiplied. `sqrt_hidden` is the square root of `hidden`, rounded to `dtype`, as in Gemma.",
		set: setEmbedScale},
	{Block: blockModel, Name: "tied", takes: names("false", "true"), Default: "false", Example: "true",
		Doc: "Whether the output projection shares its weights with the embedding table.",
		set: func(s *Spec, v value) { s.Model.Tied = v.name == "true" }},
	{Block: blockModel, Name: "init_std", takes: positive(dimCount), Default: "0.02", Example: "0.02",
		Doc: "Standard deviation of initial weights. For the output projections of each layer, it is divided by sqrt(2 * layers).",
		set: func(s *Spec, v value) { s.Model.InitStd = v.num }},
}

var clusterKeys = []*Key{
	{Block: blockCluster, Name: "nodes", takes: whole(1, maxRanks), Example: "4",
		Doc: "Number of machines.",
		set: func(s *Spec, v value) { s.Cluster.Nodes = v.Int() }},
	{Block: blockCluster, Name: "gpus_per_node", takes: whole(1, maxRanks), Example: "8",
		Doc: "Number of devices per machine; for the cpu device, the number of ranks.",
		set: func(s *Spec, v value) { s.Cluster.GPUsPerNode = v.Int() }},
	{Block: blockCluster, Name: "device_memory", takes: bytes(1), Example: "76GiB",
		Doc: "Memory that sppo may use on each device: its total memory minus the memory used by the driver and libraries.",
		set: func(s *Spec, v value) { s.Cluster.DeviceMemory = int64(v.num) }},
	{Block: blockCluster, Name: "host_memory", takes: bytes(0), Example: "1900GB",
		Doc: "Host memory that sppo may use on each node, in total for all ranks on the node.",
		set: func(s *Spec, v value) { s.Cluster.HostMemory = int64(v.num) }},
	{Block: blockCluster, Name: "peak_bf16", takes: positive(dimCompute), Example: "312TFLOPS",
		Doc: "Peak rate of dense bf16 matrix products on one device. Data sheets also list sparse rates, which are twice as high.",
		set: func(s *Spec, v value) { s.Cluster.PeakBF16 = v.num }},
	{Block: blockCluster, Name: "peak_f32", takes: positive(dimCompute), Example: "19.5TFLOPS",
		Doc: "Peak rate of f32 arithmetic on one device, without reduced-precision tensor cores.",
		set: func(s *Spec, v value) { s.Cluster.PeakF32 = v.num }},
	{Block: blockCluster, Name: "memory_bandwidth", takes: positive(dimRate), Example: "2039GB/s",
		Doc: "Bandwidth of device memory.",
		set: func(s *Spec, v value) { s.Cluster.MemoryBandwidth = v.num }},
	{Block: blockCluster, Name: "d2h_bandwidth", takes: positive(dimRate), Example: "32GB/s",
		Doc: "Rate of copies from one device to its host. It limits how much can be offloaded while the device computes.",
		set: func(s *Spec, v value) { s.Cluster.D2HBandwidth = v.num }},
	{Block: blockCluster, Name: "h2d_bandwidth", takes: positive(dimRate), Example: "32GB/s",
		Doc: "Rate of copies from the host to one device.",
		set: func(s *Spec, v value) { s.Cluster.H2DBandwidth = v.num }},
	{Block: blockCluster, Name: "node_copy_bandwidth", takes: notNegative(dimRate), Default: "0", Example: "256GB/s",
		Doc: "Limit on the combined rate of host copies by all devices in a node, in each direction; 0 means no limit.",
		set: func(s *Spec, v value) { s.Cluster.NodeCopyBandwidth = v.num }},
	{Block: blockCluster, Name: "copy_duplex", takes: names("full", "half"), Default: "full", Example: "half",
		Doc: "Whether a device can copy in both directions at the same time (`full`) or in only one (`half`). With `half`, both directions share the bandwidth of the device and of its node.",
		set: func(s *Spec, v value) { s.Cluster.CopyDuplex = v.name }},
	{Block: blockCluster, Name: "parallelism", takes: notNegative(dimCount), Default: "0", Example: "8",
		Doc: "Number of processors that the ranks of a node share if they are threads on one computer; 0 if each rank has its own device. If it is not 0, the other rates are per processor: each instruction runs on one processor, but one kernel at a time may also run on idle processors.",
		set: func(s *Spec, v value) { s.Cluster.Parallelism = v.num }},
	{Block: blockCluster, Name: "spread_efficiency", takes: share(), Default: "1", Example: "0.9",
		Doc: "If ranks share processors: the fraction of the processors' combined rate that a kernel reaches when it runs on all of them.",
		set: func(s *Spec, v value) { s.Cluster.SpreadEfficiency = v.num }},
	{Block: blockCluster, Name: "nvlink_bandwidth", takes: positive(dimRate), Example: "300GB/s",
		Doc: "Bandwidth between one device and the other devices in its node, in each direction.",
		set: func(s *Spec, v value) { s.Cluster.NVLinkBandwidth = v.num }},
	{Block: blockCluster, Name: "node_network_bandwidth", takes: positive(dimRate), Example: "200GB/s",
		Doc: "Bandwidth between one node and the other nodes, in each direction, shared by its devices.",
		set: func(s *Spec, v value) { s.Cluster.NodeNetworkBandwidth = v.num }},
	{Block: blockCluster, Name: "nvlink_latency", takes: notNegative(dimDuration), Example: "5us",
		Doc: "Time that an empty message takes between two devices in the same node.",
		set: func(s *Spec, v value) { s.Cluster.NVLinkLatency = v.num }},
	{Block: blockCluster, Name: "network_latency", takes: notNegative(dimDuration), Example: "10us",
		Doc: "Time that an empty message takes between two nodes.",
		set: func(s *Spec, v value) { s.Cluster.NetworkLatency = v.num }},
	{Block: blockCluster, Name: "kernel_latency", takes: notNegative(dimDuration), Example: "5us",
		Doc: "Time from the end of one kernel to the start of the next on a stream. If ranks share processors: the time it takes to spread a kernel over several processors; short kernels are not spread.",
		set: func(s *Spec, v value) { s.Cluster.KernelLatency = v.num }},
	{Block: blockCluster, Name: "matmul_efficiency", takes: curve(), Example: "[[128, 0.3], [1K, 0.5], [8K, 0.62]]",
		Doc: "Share of the peak rate that matrix products reach: one number, or (rows, share) pairs in increasing order of rows.",
		set: func(s *Spec, v value) { s.Cluster.MatmulEfficiency = setCurve(v) }},
	{Block: blockCluster, Name: "attention_efficiency", takes: curve(), Example: "0.58",
		Doc: "Share of the peak rate that attention reaches in the forward pass: one number, or (query rows, share) pairs in increasing order of query rows.",
		set: func(s *Spec, v value) { s.Cluster.AttentionEfficiency = setCurve(v) }},
	{Block: blockCluster, Name: "attention_grad_efficiency", takes: curve(), Example: "0.48",
		Doc: "Share of the peak rate that attention reaches in the backward pass: one number, or (query rows, share) pairs in increasing order of query rows.",
		set: func(s *Spec, v value) { s.Cluster.AttentionGradEff = setCurve(v) }},
	{Block: blockCluster, Name: "copy_efficiency", takes: share(), Example: "0.85",
		Doc: "Fraction of `memory_bandwidth` that memory-bound kernels reach.",
		set: func(s *Spec, v value) { s.Cluster.CopyEfficiency = v.num }},
	{Block: blockCluster, Name: "collective_efficiency", takes: share(), Example: "0.8",
		Doc: "Fraction of a link's bandwidth that collectives reach.",
		set: func(s *Spec, v value) { s.Cluster.CollectiveEfficiency = v.num }},
	{Block: blockCluster, Name: "contention", takes: valueType{number: &number{max: 0.9}}, Default: "0", Example: "0.4",
		Doc: "Share of their speed that kernels lose while a collective runs beside them within a node: both need multiprocessors and memory bandwidth. Beside a collective over a slower link, they lose less, in proportion to its bandwidth.",
		set: func(s *Spec, v value) { s.Cluster.Contention = v.num }},
	{Block: blockCluster, Name: "overhead", takes: valueType{number: &number{max: 1}}, Default: "0", Example: "0.025",
		Doc: "Share by which kernels, copies and messages take longer in a step than the other figures say: the slowest of several devices, clocks that fall under load, launches that come late.",
		set: func(s *Spec, v value) { s.Cluster.Overhead = v.num }},
}

var trainKeys = []*Key{
	{Block: blockTrain, Name: "sequence", takes: whole(1, maxTokens), Example: "1M",
		Doc: "Number of tokens in one training sample. K stands for 1024 tokens, M for 1024K.",
		set: func(s *Spec, v value) { s.Train.Sequence = int64(v.num) }},
	{Block: blockTrain, Name: "batch", takes: whole(1, maxCount), Default: "1", Example: "8",
		Doc: "Number of sequences per step, across all replicas.",
		set: func(s *Spec, v value) { s.Train.Batch = v.Int() }},
	{Block: blockTrain, Name: "steps", takes: whole(1, maxTokens), Default: "100", Example: "1000",
		Doc: "Number of optimizer steps.",
		set: func(s *Spec, v value) { s.Train.Steps = v.Int() }},
	{Block: blockTrain, Name: "seed", takes: whole(0, 1<<53), Default: "1", Example: "42",
		Doc: "Seed for the initial weights and the data of each step. Results do not depend on the number of ranks.",
		set: func(s *Spec, v value) { s.Train.Seed = int64(v.num) }},
	{Block: blockTrain, Name: "optimizer", Default: "adamw()", Example: "adamw(lr = 3e-4, betas = [0.9, 0.95])",
		takes: valueType{calls: []callType{
			{name: "adamw", block: blockOptimizer, args: []string{"lr", "betas", "eps", "weight_decay", "no_decay", "moments"}, doc: "AdamW (Loshchilov and Hutter, 2019)"},
			{name: "sgd", block: blockOptimizer, args: []string{"lr", "momentum", "weight_decay", "no_decay", "moments"}, doc: "gradient descent with momentum"},
			{name: "muon", block: blockOptimizer, args: []string{"lr", "momentum", "betas", "eps", "weight_decay", "no_decay", "moments"},
				doc: "Muon (Jordan et al., 2024) for the matrices of layers, with the step size of Liu et al. (2025); AdamW with `betas` and `eps` for all other parameters"},
		}},
		Doc: "The optimizer, which updates weights from gradients.",
		set: func(s *Spec, v value) { s.Train.Optimizer.Kind = v.name }},
	{Block: blockTrain, Name: "adapter", Default: "none", Example: "lora(rank = 16, alpha = 32, targets = [q_proj, v_proj])",
		takes: valueType{names: []string{"none"}, calls: []callType{
			{name: AdapterLoRA, block: blockAdapter, doc: "low-rank matrices A and B added to linear maps (Hu et al., 2021): x W becomes x W + alpha/rank * (x A) B"},
		}},
		Doc: "The adapter that is trained instead of the model. All tensors of the model are then frozen. A is " +
			"initialised with random values and B with zeros.",
		set: func(s *Spec, v value) {
			if s.Model.Adapter = v.name; v.name == "none" {
				s.Model.Adapter = ""
			}
		}},
	{Block: blockTrain, Name: "freeze", takes: valueType{}.orList(valueType{text: true, names: TensorGroups}, 0, 1000), Default: "[]", Example: `[embeddings, "layer.0-15"]`,
		Doc: "Tensors that are not trained: groups (`attention` and `mlp` mean the matrices of those blocks), or name patterns in quotes. `*` matches any characters; `layer.0-15` matches all tensors of these layers, and `layer.0-15.w*` some of them. A frozen tensor has no gradient, no optimizer state and no f32 master weight. Below the lowest layer with a trained tensor, there is no backward pass.",
		set: setFreeze},
	{Block: blockTrain, Name: "warmup", takes: whole(0, maxTokens), Default: "0", Example: "100",
		Doc: "Number of steps over which the learning rate grows linearly from 0, or from `min_lr` with `warmup_stable_decay`.",
		set: func(s *Spec, v value) { s.Train.Warmup = v.Int() }},
	{Block: blockTrain, Name: "lr_schedule", takes: names(lrSchedules...), Default: "cosine", Example: "warmup_stable_decay",
		Doc: "The learning-rate schedule after the warm-up; the names are those used by transformers. `constant` does not change the rate. `linear` and `cosine` reduce it to `min_lr` at the last step, along a straight line or half a cosine. `warmup_stable_decay` keeps it constant until the last `decay_steps` steps, over which it falls. " +
			"The rate of step t, counted from 1, is the one that transformers' `get_scheduler` reports after t steps, so no step has a rate of 0 before the end.",
		set: func(s *Spec, v value) { s.Train.LRSchedule = v.name }},
	{Block: blockTrain, Name: "min_lr", takes: notNegative(dimCount), Derived: "optimizer.lr / 10 with cosine, otherwise 0", Example: "3e-5",
		Doc:    "The learning rate of the last step, unless `lr_schedule = constant`. With `warmup_stable_decay`, the warm-up also begins at this rate, as in transformers.",
		set:    func(s *Spec, v value) { s.Train.MinLR = v.num },
		derive: deriveMinLR},
	{Block: blockTrain, Name: "decay_steps", takes: whole(1, maxTokens), Derived: "steps / 10, rounded up, with warmup_stable_decay", Example: "100",
		Doc:    "Number of steps at the end of the run over which `lr_schedule = warmup_stable_decay` reduces the learning rate (transformers' num_decay_steps).",
		set:    func(s *Spec, v value) { s.Train.DecaySteps = v.Int() },
		derive: deriveDecaySteps},
	{Block: blockTrain, Name: "decay_type", takes: names("cosine", "linear", "sqrt"), Derived: "cosine with warmup_stable_decay", Example: "sqrt",
		Doc:    "Curve along which `lr_schedule = warmup_stable_decay` reduces the learning rate: half a cosine, a straight line, or one minus the square root (transformers' 1-sqrt).",
		set:    func(s *Spec, v value) { s.Train.DecayType = v.name },
		derive: deriveDecayType},
	{Block: blockTrain, Name: "grad_clip", takes: notNegative(dimCount), Default: "1.0", Example: "0.5",
		Doc: "Global L2 norm to which larger gradients are scaled down; 0 switches clipping off.",
		set: func(s *Spec, v value) { s.Train.GradClip = v.num }},
	{Block: blockTrain, Name: "grad_reduce", takes: names("f32", "bf16"), Default: "f32", Example: "bf16",
		Doc: "Data type in which ranks sum the gradients of matrices that they divide. A rank always adds up its own gradients in f32. With `bf16`, it then rounds them, which halves the bytes that ranks and replicas exchange; `docs/precision.md` says how sums are rounded. The norm and the update read the rounded sum.",
		set: func(s *Spec, v value) { s.Train.GradReduce = v.name }},
	{Block: blockTrain, Name: "moe_router_bias_update_rate", takes: notNegative(dimCount), Default: "0", Example: "0.001",
		Doc: "By how much a step changes what `model.e_score_correction_bias` adds to the scores of experts, so that their loads become equal (DeepSeek-V3, which uses 0.001): each number grows by this much if fewer tokens of the batch, over all replicas, chose the expert than the mean of the layer's experts, and falls by as much if more did. 0: the numbers stay as they are. A step that `guard` skips does not change them.",
		set: func(s *Spec, v value) { s.Train.BiasRate = v.num }},
	{Block: blockTrain, Name: "guard", Default: "skip()", Example: "skip(spikes = 10, stop = 20)",
		takes: valueType{calls: []callType{
			{name: "skip", block: blockGuard, args: []string{"spikes", "stop"}, doc: "a step whose gradients are not finite, or are too large, does not change weights or optimizer state"},
		}},
		Doc: "Protection against gradients that are not finite or are too large. All ranks make the same decision before any " +
			"weight changes. The data of a skipped step is not used again, and the learning-rate schedule advances.",
		set: func(s *Spec, v value) {}},
	{Block: blockTrain, Name: "data", Example: `text("corpus/*.txt")`,
		takes: valueType{calls: []callType{
			{name: "text", texts: true, doc: "the bytes of files, one token per byte; patterns with `*` are allowed, and paths are relative to the folder of the file that contains them"},
			{name: "tokens", texts: true, block: blockData, doc: "tokens in files, used in the order listed, with patterns as for `text`: flat files of integers, as nanoGPT and llm.c write them; folders written by `sppoc tokenize`; Megatron's `.bin` files with their `.idx`; with `tokenizer`, text and jsonl"},
			{name: "random", doc: "random tokens generated from the seed, for benchmarks"},
		}},
		Doc:   "The source of the training tokens.",
		paths: true,
		set:   setData},
	{Block: blockTrain, Name: "holdout", takes: valueType{number: &number{max: 1, below: true}}, Derived: "0.05; 0 for tokens", Example: "0.1",
		Doc: "Fraction of the data, taken from its end, that is reserved for validation; 0 disables validation. In a mixture, it applies to each part.",
		set: func(s *Spec, v value) { s.Train.Holdout = v.num },
		derive: func(s *Spec) {
			if s.Train.Holdout = 0.05; s.Train.Data.Options != nil {
				s.Train.Holdout = 0
			}
		}},
	{Block: blockTrain, Name: "eval_every", takes: whole(0, maxTokens), Default: "0", Example: "100",
		Doc: "Number of steps between validations; 0 means only at the end of the run.",
		set: func(s *Spec, v value) { s.Train.EvalEvery = v.Int() }},
	{Block: blockTrain, Name: "eval_batch", takes: whole(0, maxCount), Default: "8", Example: "16",
		Doc: "Number of sequences per validation; 0 disables validation.",
		set: func(s *Spec, v value) { s.Train.EvalBatch = v.Int() }},
}

// lrSchedules are the learning-rate schedules that ir.LRSchedules lists, the default first.
var lrSchedules = []string{"cosine", "linear", "constant", stableDecay}

const stableDecay = "warmup_stable_decay"

func deriveMinLR(s *Spec) {
	if s.Train.LRSchedule == "cosine" {
		s.Train.MinLR = s.Train.Optimizer.LR / 10
	}
}

func deriveDecaySteps(s *Spec) {
	if t := &s.Train; t.LRSchedule == stableDecay {
		t.DecaySteps = max(1, min((t.Steps+9)/10, t.Steps-t.Warmup))
	}
}

func deriveDecayType(s *Spec) {
	if s.Train.LRSchedule == stableDecay {
		s.Train.DecayType = "cosine"
	}
}

// setData resolves each path relative to the folder of the file that contains it.
func setData(s *Spec, v value) {
	s.Train.Data = Data{Kind: v.name}
	for _, file := range v.list {
		s.Train.Data.Files = append(s.Train.Data.Files, file.path())
	}
	if v.name == "tokens" {
		s.Train.Data.Options = &DataOptions{}
	}
}

// path returns the file name in a string, relative to the folder of the text that contains it.
func (v value) path() string {
	if dir := v.at.src.dir; dir != "" && v.text != "" && !path.IsAbs(v.text) {
		return path.Join(dir, v.text)
	}
	return v.text
}

var dataKeys = []*Key{
	{Block: blockData, Name: "type", takes: names("auto", "uint16", "uint32"), Default: "auto", Example: "uint16",
		Doc: "Type of the tokens in flat files, which are little-endian. `auto`: the type in the header, or, without a header, `uint16` if the vocabulary is at most 65536, as in nanoGPT. Manifests and indexes state the type themselves.",
		set: func(s *Spec, v value) { s.Train.Data.Options.Type = v.name }},
	{Block: blockData, Name: "header", takes: names("auto", "none", "llmc"), Default: "auto", Example: "none",
		Doc: "Header of flat files: none, or llm.c's 1,024 bytes. `auto` recognizes llm.c's header by its magic number and size, and Megatron's files by their index.",
		set: func(s *Spec, v value) { s.Train.Data.Options.Header = v.name }},
	{Block: blockData, Name: "shuffle", takes: names("on", "off"), Default: "on", Example: "off",
		Doc: "Order of sequences. `off`: sequence g is the window that starts at token g * `train.sequence`, plus one token for the last label; after the end of the data, reading continues at the beginning. `on`: the tokens are cut into the same windows, and each is used once per epoch, in an order determined by `train.seed` and the epoch. The tokens of a sequence depend only on its number, so a resumed run continues exactly where it stopped, however the work is divided among ranks.",
		set: func(s *Spec, v value) { s.Train.Data.Options.Shuffle = v.name == "on" }},
	{Block: blockData, Name: "weights", takes: valueType{}.orList(positive(dimCount), 0, 1000), Default: "[]", Example: "[0.7, 0.3]",
		Doc: "Weights of a mixture: the share of sequences drawn from each file pattern, in the order of the patterns. The parts are interleaved evenly: at any time, the number of sequences from each part differs from its share by only a few. When a part is used up, it starts over from the beginning. `[]`: all files form one stream.",
		set: func(s *Spec, v value) {
			for _, w := range v.list {
				s.Train.Data.Options.Weights = append(s.Train.Data.Options.Weights, w.num)
			}
		}},
	{Block: blockData, Name: "tokenizer", takes: valueType{text: true}, paths: true, Default: `""`, Example: `"tokenizers/mine"`,
		Doc: "A tokenizer.json, a SentencePiece model, or a folder that contains one. The data files are then text or, if their names end in .jsonl, jsonl, and are tokenized when they are opened. Their size is limited to 256 MiB; for larger or compressed files and parquet, use `sppoc tokenize`.",
		set: func(s *Spec, v value) { s.Train.Data.Options.Tokenizer = v.path() }},
	{Block: blockData, Name: "field", takes: valueType{text: true}, Default: `"text"`, Example: `"content"`,
		Doc: "The jsonl field that contains the text.",
		set: func(s *Spec, v value) { s.Train.Data.Options.Field = v.text }},
	{Block: blockData, Name: "append_eos", takes: names("false", "true"), Default: "false", Example: "true",
		Doc: "Whether each document of text or jsonl is followed by the tokenizer's end-of-sequence token.",
		set: func(s *Spec, v value) { s.Train.Data.Options.AppendEOS = v.name == "true" }},
	{Block: blockData, Name: "documents", takes: whole(0, maxCount).orNames("off", "index"), Default: "off", Example: "index",
		Doc: "Whether a sequence contains several independent documents; if so, attention stays inside a document, positions restart with each document, and a document's last token has no label. Document boundaries are given by the data's `index`, or a document ends after each token with the given ID. A step takes no longer than it would without documents. With `rope_scaling = longrope`, sequences must not be longer than `rope_original`.",
		set: func(s *Spec, v value) {
			if s.Train.Data.Options.Documents = v.name; v.kind == isNumber {
				s.Train.Data.Options.Documents = strconv.Itoa(v.Int())
			}
		}},
	{Block: blockData, Name: "pack", takes: names("cut", "whole"), Default: "cut", Example: "whole",
		Doc: "How documents are packed into sequences. `cut`: one after another; the rest of a document that does not fit becomes a separate document in the next sequence. `whole`: a document that does not fit begins the next sequence, and the rest of the current one is padding without labels; only documents longer than a sequence are cut. Requires `documents`. With `whole`, each sequence takes an extra 8 bytes of host memory.",
		set: func(s *Spec, v value) { s.Train.Data.Options.Pack = v.name }},
	{Block: blockData, Name: "masks", takes: names("off", "on", "ignore"), Default: "off", Example: "on",
		Doc: "Whether the data's masks, as written by `sppoc tokenize --prompt`, select the labels to train on. The loss is the mean over the selected labels. If the data has masks, the value must be either `on` or `ignore`; `ignore` trains on all labels.",
		set: func(s *Spec, v value) { s.Train.Data.Options.Masks = v.name }},
}

var adapterKeys = []*Key{
	{Block: blockAdapter, Name: "rank", takes: whole(1, 1<<16), Default: "8", Example: "16",
		Doc: "Rank of the adapters: the number of columns in A and of rows in B.",
		set: func(s *Spec, v value) { s.Model.AdapterRank = v.Int() }},
	{Block: blockAdapter, Name: "alpha", takes: positive(dimCount), Derived: "rank", Example: "32",
		Doc:    "The output of an adapter is multiplied by alpha / rank.",
		set:    func(s *Spec, v value) { s.Model.AdapterAlpha = v.num },
		derive: func(s *Spec) { s.Model.AdapterAlpha = float64(s.Model.AdapterRank) }},
	{Block: blockAdapter, Name: "dropout", takes: valueType{number: &number{max: 1, below: true}}, Default: "0", Example: "0.1",
		Doc: "Probability that an element of an adapter's input is set to 0 in a training step; the others are divided by 1 - dropout. Each map drops different elements. Which elements are dropped depends only on the seed, the step, the tensor and the element, so every schedule drops the same elements. Validation, `eval` and `sample` drop none.",
		set: func(s *Spec, v value) { s.Model.AdapterDropout = v.num }},
	{Block: blockAdapter, Name: "targets", takes: names(AllLinear).orList(names(append([]string{AllLinear}, targetNames...)...), 1, 100), Default: AllLinear, Example: "[q_proj, v_proj]",
		Doc: "The linear maps of every layer that get an adapter, named as in PEFT. `qkv_proj` and `gate_up_proj` each stand for several maps that share A, for models that store them as a single matrix (Phi-3); `c_attn`, `c_fc` and `c_proj` are the names in GPT-2. `all-linear`: all linear maps, fused as they are in models of the given `family`.",
		set: setTargets},
}

func beta() valueType { return valueType{number: &number{above: true, max: 1, below: true}} }

var optimizerKeys = []*Key{
	{Block: blockGuard, Name: "spikes", takes: notNegative(dimCount), Default: "0", Example: "10",
		Doc: "From the eleventh step on, a step is skipped if its gradient norm is more than this many times the median norm of the last 100 steps that were not skipped. With 0, only steps whose norm is not finite are skipped.",
		set: func(s *Spec, v value) { s.Train.Guard.Spikes = v.num }},
	{Block: blockGuard, Name: "stop", takes: whole(1, maxTokens), Default: "10", Example: "1",
		Doc: "Number of consecutive skipped steps after which the run ends with an error.",
		set: func(s *Spec, v value) { s.Train.Guard.Stop = v.Int() }},
	{Block: blockOptimizer, Name: "lr", takes: positive(dimCount), Default: "3e-4", Example: "1e-3",
		Doc: "Highest learning rate, which is reached after the warm-up.",
		set: func(s *Spec, v value) { s.Train.Optimizer.LR = v.num }},
	{Block: blockOptimizer, Name: "momentum", takes: valueType{number: &number{max: 1, below: true}}, Derived: "0.9 with sgd, 0.95 with muon", Example: "0.9",
		Doc: "Factor by which the running sum of gradients is multiplied in each step.",
		set: func(s *Spec, v value) { s.Train.Optimizer.Momentum = v.num },
		derive: func(s *Spec) {
			s.Train.Optimizer.Momentum = map[string]float64{"sgd": 0.9, "muon": 0.95}[s.Train.Optimizer.Kind]
		}},
	{Block: blockOptimizer, Name: "betas", takes: valueType{}.orList(beta(), 2, 2), Default: "[0.9, 0.95]", Example: "[0.9, 0.999]",
		Doc: "Decay rates for the running means of the gradient and its square.",
		set: func(s *Spec, v value) {
			s.Train.Optimizer.Beta1, s.Train.Optimizer.Beta2 = v.list[0].num, v.list[1].num
		}},
	{Block: blockOptimizer, Name: "eps", takes: positive(dimCount), Default: "1e-8", Example: "1e-6",
		Doc: "Number added to the square root of the second moment.",
		set: func(s *Spec, v value) { s.Train.Optimizer.Eps = v.num }},
	{Block: blockOptimizer, Name: "weight_decay", takes: notNegative(dimCount), Default: "0.1", Example: "0.01",
		Doc: "Decoupled weight decay, multiplied by the learning rate. It applies to all tensors except those in `no_decay`.",
		set: func(s *Spec, v value) { s.Train.Optimizer.WeightDecay = v.num }},
	{Block: blockOptimizer, Name: "no_decay", takes: valueType{}.orList(names(TensorGroups...), 0, len(TensorGroups)), Default: "[norms, biases]", Example: "[norms, biases, embeddings]",
		Doc: "Groups of tensors without weight decay. The default includes all one-dimensional tensors, as in transformers' Trainer. A tied embedding table belongs to `embeddings`.",
		set: func(s *Spec, v value) {
			s.Train.Optimizer.NoDecay = 0
			for _, item := range v.list {
				s.Train.Optimizer.NoDecay |= groupsOf(item.name)
			}
		}},
	{Block: blockOptimizer, Name: "moments", takes: names("f32", "bf16"), Default: "f32", Example: "bf16",
		Doc: "Data type in which the optimizer stores its running means; it computes in f32. `bf16` halves the memory that they take. DeepSeek-V3 was trained with bf16 moments, Llama 3 with f32. A bf16 number has a precision of about three digits, so changes smaller than that would be lost. With `bf16`, `betas` and `momentum` are therefore limited to 0.99.",
		set: func(s *Spec, v value) { s.Train.Optimizer.Moments = v.name }},
}

var scheduleKeys = []*Key{
	{Block: blockSchedule, Name: "sp", takes: autoOr(whole(1, maxRanks)).orList(whole(2, maxRanks), 2, 2), Default: "auto", Example: "8",
		Doc: "Number of ranks that share the layers of a stage and divide heads, features and rows of the sequence: tensor and sequence parallelism combined. It must divide `model.heads`, unless `sp_mode` is `ring`. Communication between these ranks is cheapest inside a node. " +
			"With `[a, b]`, groups of `a` adjacent ranks share heads as `sp_mode` says, `megatron` or `ulysses`, and `b` such groups form a ring, around which each passes K and V of its chunks of the sequence; only `a` must divide `model.heads`. `auto` tries all numbers that fit the model and the cluster; and for numbers of ranks that span nodes or do not divide the heads, also `[a, b]` with the largest possible `a` in a node, if `sp_mode` is `auto`, too.",
		set: setSP},
	{Block: blockSchedule, Name: "pp", takes: autoOr(whole(1, maxRanks)), Default: "auto", Example: "4",
		Doc: "Number of pipeline stages, each with contiguous layers. `auto` tries every number that is possible with the given GPUs and layers.",
		set: func(s *Spec, v value) { s.Schedule.PP = v.Int() }},
	{Block: blockSchedule, Name: "dp", takes: autoOr(whole(1, maxRanks)), Default: "auto", Example: "2",
		Doc: "Number of replicas of the whole pipeline, which process different sequences of the batch. `auto` tries the divisors of the batch.",
		set: func(s *Spec, v value) { s.Schedule.DP = v.Int() }},
	{Block: blockSchedule, Name: "sp_mode", takes: names("auto", "megatron", "ulysses", "ring"), Default: "auto", Example: "ulysses",
		Doc: "How SP ranks share a layer. `megatron`: weights are divided. `ulysses`: weights are replicated, with all-to-all exchanges before and after attention. `ring`: weights are replicated, every rank holds two chunks of each subsequence in zigzag order, and K and V are passed around. `ring` works best with a small number of subsequences, or when the number of heads is not divisible by `sp`. `auto` tries the first two, and tries `ring` where more ranks can share a layer than its heads can be divided among evenly.",
		set: func(s *Spec, v value) { s.Schedule.SPMode = v.name }},
	{Block: blockSchedule, Name: "expert_parallel", takes: names("auto", "off", "on"), Default: "auto", Example: "on",
		Doc: "Whether the ranks that share a layer have different experts (expert parallelism). `off`: with `sp_mode = megatron`, each rank has some columns of every expert; otherwise, each has all experts, which `zero = 3` gathers. `on`: the experts are divided among these ranks (with `[a, b]`, among `a`), and each computes with the rows of all ranks that chose its experts: rows are gathered before experts, and results summed after them. No token is dropped, however unequally tokens choose: buffers have room for all rows, and products take as long as the rank that most tokens choose needs. The number of experts must be divisible by the number of ranks, and `sp` may not be 1. `auto` tries both.",
		set: func(s *Spec, v value) { s.Schedule.ExpertParallel = v.name }},
	{Block: blockSchedule, Name: "zero", takes: autoOr(whole(0, 3)), Default: "auto", Example: "3",
		Doc: "ZeRO stage, which determines what is divided among the ranks that hold the same matrix. These are the ranks of different replicas and, with `ulysses` or `ring`, also those of a stage. 1: the optimizer state and, between steps, the weights of layers if there are several replicas. 2: also the gradients of layers, which are reduced when the backward pass moves to another layer. " +
			"3: also the weights of layers, which are gathered before each forward and backward pass. `auto` tries all values if several ranks hold the same matrix. The setting affects results only through rounding, and only if it is 2 or 3 and a layer has several backward passes in a step.",
		set: func(s *Spec, v value) {
			if s.Schedule.Zero = "auto"; !v.Auto() {
				s.Schedule.Zero = strconv.Itoa(v.Int())
			}
		}},
	{Block: blockSchedule, Name: "optimizer_offload", takes: names("auto", "none", "host"), Default: "auto", Example: "host",
		Doc: "Where the optimizer state and the master weights of matrices are stored between updates. `none`: on the device. `host`: in host memory; at the end of each step, they pass through the device in blocks. `auto` tries `host` if weights, gradients and optimizer state, divided among all GPUs, take more than half of a device's memory. The setting does not change results.",
		set: func(s *Spec, v value) { s.Schedule.OptimizerOffload = v.name }},
	{Block: blockSchedule, Name: "checkpoint_copy", takes: names("off", "on"), Default: "off", Example: "on",
		Doc: "Whether the plan leaves room in host memory for the copy of weights and optimizer state that `sppovm run --save-every` makes. `sppoc plan` reports the size of this copy. If it does not fit, `--save-every` needs `--save-wait`, which pauses training while a checkpoint is written. Results do not change.",
		set: func(s *Spec, v value) { s.Schedule.CheckpointCopy = v.name }},
	{Block: blockSchedule, Name: "microbatch", takes: autoOr(whole(1, maxCount)), Default: "auto", Example: "2",
		Doc: "Number of sequences that one task processes together. `auto` tries several values if sequences are short.",
		set: func(s *Spec, v value) { s.Schedule.Microbatch = v.Int() }},
	{Block: blockSchedule, Name: "subsequences", takes: autoOr(whole(1, maxRanks)).orList(whole(1, maxTokens), 1, maxRanks), Default: "auto", Example: "160",
		Doc: "Number of chunks into which a sequence is cut for the pipeline, or a list of their lengths, which must add up to `train.sequence`. `auto` tries numbers that increase by a factor of √2, until chunks are as short as 1K tokens. If the strategy needs whole sequences, `auto` also tries 1.",
		set: setSubsequences},
	{Block: blockSchedule, Name: "partition", takes: names("auto", "flops", "time", "length"), Default: "auto", Example: "length",
		Doc: "Quantity that is made equal for all subsequences: floating-point operations (later subsequences are then shorter, because they attend to more tokens), predicted time, or length. `auto` is `flops`, unless another value is clearly faster for the chosen plan. If `subsequences` is a list of lengths, it overrides this key.",
		set: func(s *Spec, v value) { s.Schedule.Partition = v.name }},
	{Block: blockSchedule, Name: "align", takes: autoOr(whole(1, maxTokens)), Default: "auto", Example: "128",
		Doc: "Boundaries between subsequences are multiples of this number. It must be a multiple of `sp` and at most the average length. `auto` is 128, or less for short subsequences. If memory is short and `solve` searches for sizes, it also tries values that make the first subsequence shorter.",
		set: func(s *Spec, v value) { s.Schedule.Align = v.Int() }},
	{Block: blockSchedule, Name: "keep", takes: autoOr(valueType{}.orList(names("k", "v"), 0, 2)), Default: "auto", Example: "[]",
		Doc: "Which of K and V stay on the device between forward and backward. Those not listed are kept on the host and streamed: each layer of each subsequence reloads the rows of earlier tokens block by block; " +
			"in the backward pass, it reloads their gradients as well. The length of the sequence is then limited by host memory; in a ring, the host of every rank holds the rows of all its members. Subsequences of 8K tokens or more hide the traffic. `auto` keeps both, unless only streaming fits or streaming is clearly faster.",
		set: func(s *Spec, v value) {
			if s.Schedule.Keep = nil; v.Auto() {
				return
			}
			s.Schedule.Keep = []string{}
			for _, item := range v.list {
				s.Schedule.Keep = append(s.Schedule.Keep, item.name)
			}
		}},
	{Block: blockSchedule, Name: "latent_cache", takes: names("off", "on"), Default: "off", Example: "on",
		Doc: "What layers with latent attention keep of earlier tokens. `off`: K and V, which every rank has for its own heads. `on`: the latents and the rotated elements that all heads share, which every rank has for all heads; attention computes K and V from them for one block of tokens after another, in the forward and again in the backward pass, and forgets them. Of DeepSeek-V3, this is a 71st of the numbers of K and V; the longer the subsequences, the less the additional products matter: 5% of the time of attention with 8K tokens. `on` needs `mux = off` and layers without windows. An undivided sequence has no cache. The search does not choose `on`, but `sppoc plan` suggests it for a job that fits only so. The setting affects results only through rounding.",
		set: func(s *Spec, v value) { s.Schedule.LatentCache = v.name }},
	{Block: blockSchedule, Name: "order", takes: names("auto", "sequence", "layer"), Default: "auto", Example: "layer",
		Doc: "Order of work inside a stage: all layers of a subsequence first, or all subsequences of a layer first; the latter needs a single stage. In layer order, the device holds K and V of one layer, " +
			"and those of the other layers are on the host, unless `recompute = full_kv` recomputes them. The hidden states between layers are also on the host, unless `offload` keeps them on the device. With `virtual_stages`, groups of layers take turns instead of single layers. `auto` is `sequence`, unless only `layer` fits or `layer` is clearly faster.",
		set: func(s *Spec, v value) { s.Schedule.Order = v.name }},
	{Block: blockSchedule, Name: "recompute", takes: names("auto", "none", "full", "full_kv", "selective", "keep_attention"), Default: "auto", Example: "selective",
		Doc: "Which activations are recomputed in the backward pass instead of being saved: none (`none`), everything in a layer except its input (`full`), the outputs of norms and activation functions (`selective`), or everything except attention (`keep_attention`). `full_kv` extends `full`: it also recomputes K and V of a layer, once for all subsequences, when the backward pass reaches the layer; it needs `order = layer`. `auto` recomputes nothing if memory suffices. Otherwise it compares recomputation with copies to the host, and recomputes the units with the lowest time per byte first.",
		set: func(s *Spec, v value) { s.Schedule.Recompute = v.name }},
	{Block: blockSchedule, Name: "loss_chunk", takes: autoOr(whole(1, maxTokens)), Default: "auto", Example: "1024",
		Doc: "Largest number of tokens whose logits exist at a time on a rank, like the chunk size of a chunked cross-entropy loss. For each chunk, the loss head reads the output matrix and adds to its gradient, so short chunks take longer; each token takes 4 bytes, or 6 with `bf16`, for every entry of the vocabulary (divided by `sp`). " +
			"`auto` is 1024 if memory suffices, and otherwise also tries 256 and the number of tokens whose logits take 64 MiB. The setting affects results only through rounding.",
		set: func(s *Spec, v value) { s.Schedule.LossChunk = v.Int() }},
	{Block: blockSchedule, Name: "strategy", takes: names("auto", "sppo", "interleaved-sppo", "overlapped-sppo", "terapipe", "gpipe", "looped-bfs", "1f1b", "interleaved-1f1b", "seq1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v").orCall(StrategyCSV, "the order that a file in the format of `torch.distributed.pipelining` states: a line for each pipeline rank, with cells such as `0F1` (docs/schedules.md). The file decides `pp`, `virtual_stages` and the number of microbatches. With `subsequences = N`, its microbatch `m*N + s` is subsequence s of microbatch m; otherwise, sequences are whole. Files for V-Half, V-Min and eager 1F1B ship with sppo: `csv(\"schedules/v-half-8x32.csv\")`"), Default: "auto", Example: "1f1b", paths: true,
		Doc: "Order of tasks on the stages. `sppo` runs all subsequences of a sequence forward, then backward, one sequence after another. `overlapped-sppo` starts the next sequence while the current one turns from forward to backward. The other strategies are for comparison. " +
			"Some of them also support subsequences: `terapipe` runs all sequences forward, then backward; `seq1f1b` alternates forward and backward tasks; `zb-h1` and `zb-h2` also defer weight gradients, " +
			"`zb-h1` for a smaller bubble, `zb-h2` for no bubble but more activations. Others need whole sequences: `gpipe`, `1f1b`, `looped-bfs`, which is `gpipe` for virtual stages, and `zb-v` and `dualpipe-v`, which have two virtual stages per rank, arranged in a V. " +
			"`interleaved-sppo` and `interleaved-1f1b` are `sppo` and `1f1b` with `virtual_stages` of 2 or more. `auto` tries every strategy that could lead to a different plan.",
		set: func(s *Spec, v value) { s.Schedule.Strategy = v.name }},
	{Block: blockSchedule, Name: "virtual_stages", takes: autoOr(whole(1, maxRanks)), Default: "auto", Example: "2",
		Doc: "Number of groups of layers per rank, assigned round-robin. The bubble is divided by this number. `auto` tries up to 16, if `strategy` supports virtual stages. `pp * virtual_stages` is at most the number of layers plus 2: the last group may be the head without layers, and the first the embedding. " +
			"With `order = layer`, it is the number of groups of layers in the single stage; `auto` tries divisors of the number of layers, starting with one layer per group. If `layers_per_stage` is a list, `auto` is its length divided by `pp`.",
		set: func(s *Spec, v value) { s.Schedule.VirtualStages = v.Int() }},
	{Block: blockSchedule, Name: "layers_per_stage", takes: names("auto").orList(whole(0, maxCount), 1, maxRanks), Default: "auto", Example: "[3, 4, 4, 1]",
		Doc: "Number of layers of each stage, in the order of the model; the numbers add up to `model.layers`. With virtual stages, the list has an entry for each of them: with `pp = 2` and `virtual_stages = 2`, the entries 0 and 2 are those of the first rank, or 0 and 3 if `strategy` places virtual stages in a V. " +
			"The first and the last of several virtual stages of a rank may have 0 layers: only the embedding or only the head. A list needs `pp`. `auto` balances the predicted time of ranks, including embedding and head.",
		set: setLayersPerStage},
	{Block: blockSchedule, Name: "offload", Default: "auto", Example: "full",
		takes: valueType{number: &number{max: 1}}.orNames("auto", "none", "full", "adaptive", "carry", "memory").
			orList(valueType{number: &number{max: 1}}, 1, maxRanks),
		Doc: "Which activations are in host memory between forward and backward: none, all, a share, a list with a share for each subsequence, or a policy. " +
			"`adaptive` offloads as much as can be copied during the next task. With `carry`, copies may lag, but they always finish by the turnaround. `memory` gives the lowest peak without exposed copies. `auto` gives the shortest step: it offloads nothing if everything fits, and otherwise starts with the copies that computation hides.",
		set: setOffload},
	{Block: blockSchedule, Name: "mux", takes: names("auto", "off", "left", "right", "on"), Default: "auto", Example: "off",
		Doc: "Whether idle stages take over some of the work adjacent to the bubble: never (`off`), at the start and end of a step (`left`: pieces of subsequences), at the turnaround (`right`: attention over the blocks of keys that an idle stage holds), or both (`on`). `auto` tries all values if each rank has one virtual stage.",
		set: func(s *Spec, v value) { s.Schedule.Mux = v.name }},
	{Block: blockSchedule, Name: "overlap", takes: names("on", "replicas", "off"), Default: "on", Example: "off",
		Doc: "Which collectives run beside computation: all (`on`), only those on weights and gradients among replicas (`replicas`), or none (`off`). Computation waits for each of the others: this is slower, but predicts the steps of systems that do not overlap them. Messages between stages and copies to the host overlap in any case. The setting does not change results.",
		set: func(s *Spec, v value) { s.Schedule.Overlap = v.name }},
}

func setSubsequences(s *Spec, v value) {
	switch {
	case v.Auto():
		s.Schedule.Subsequences = Subsequences{Auto: true}
	case v.kind == isNumber:
		s.Schedule.Subsequences = Subsequences{Count: v.Int()}
	default:
		sub := Subsequences{Count: len(v.list)}
		for _, item := range v.list {
			sub.Lengths = append(sub.Lengths, int64(item.num))
		}
		s.Schedule.Subsequences = sub
	}
}

func setLayersPerStage(s *Spec, v value) {
	s.Schedule.LayersPerStage = nil
	for _, item := range v.list {
		s.Schedule.LayersPerStage = append(s.Schedule.LayersPerStage, int(item.num))
	}
}

func setOffload(s *Spec, v value) {
	switch v.kind {
	case isName:
		s.Schedule.Offload = Offload{Policy: v.name}
	case isNumber:
		s.Schedule.Offload = Offload{Policy: "ratio", Alpha: []float64{v.num}}
	default:
		s.Schedule.Offload = Offload{Policy: "list"}
		for _, item := range v.list {
			s.Schedule.Offload.Alpha = append(s.Schedule.Offload.Alpha, item.num)
		}
	}
}

// KeysOf returns the keys of one block, in the order of the table.
func KeysOf(block string) []*Key {
	var keys []*Key
	for _, k := range Keys {
		if k.Block == block {
			keys = append(keys, k)
		}
	}
	return keys
}

// FindKey returns the key of a path such as "schedule.sp", or nil.
func FindKey(path string) *Key {
	for _, k := range Keys {
		if k.Path() == path {
			return k
		}
	}
	return nil
}

func findBlock(name string) *Block {
	for i := range Blocks {
		if Blocks[i].Name == name {
			return &Blocks[i]
		}
	}
	return nil
}

// inText reports whether blocks of this kind are written as blocks, rather than as the arguments of a call.
func (b *Block) inText() bool { return !strings.Contains(b.Name, ".") }

// allNames returns the bare names that a type accepts, also as items of lists, and the names of its calls.
func (t valueType) allNames() []string {
	out := slices.Clone(t.names)
	for _, c := range t.calls {
		out = append(out, c.name)
	}
	if t.list != nil {
		for _, name := range t.list.item.allNames() {
			if !slices.Contains(out, name) {
				out = append(out, name)
			}
		}
	}
	return out
}

// plainNames returns the bare names that some key accepts.
var plainNames = sync.OnceValue(func() []string {
	var out []string
	for _, k := range Keys {
		out = append(out, k.takes.allNames()...)
	}
	slices.Sort(out)
	return slices.Compact(out)
})
