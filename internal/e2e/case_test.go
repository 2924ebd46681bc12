package e2e

import (
	"fmt"
	"slices"
	"strings"

	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/vm/vmtest/naive"
)

// Case is one point of the space: a tiny model and its schedule. Fields that name a choice hold the text
// after "=" in the spec.
type Case struct {
	Family, Positions, DType string
	Traits                   string // further keys of the model, as in a spec
	Tied                     bool
	KVHeads, Batch           int
	Window                   string // attention windows by layer, as in [5, 20]; empty: none

	PP, SP, DP, N, Microbatch int
	VirtualStages             int    // 0 means 1
	LayersPerStage            string // a list; empty: auto
	Order                     string // sequence | layer
	Keep                      string // [k, v] | [] | [k] | [v]
	Strategy                  string // one of schedule.strategy
	SPMode                    string // megatron | ulysses | ring | megatron-ring | ulysses-ring, with two groups of ranks on the ring
	ExpertParallel            string // off | on
	LatentCache               string // off | on
	Zero                      string // 0 | 1 | 2 | 3
	Partition                 string // flops | length | list
	Offload                   string // none | full | 0.5 | adaptive | memory | auto | list
	Mux                       string // off | left | right | on
	Recompute                 string // none | selective | keep_attention | full | full_kv | auto
	Optimizer                 string // adamw | sgd | muon
	OptimizerOffload          string // none | host
	Moments                   string // f32 | bf16
	GradReduce                string // f32 | bf16
	NoDecay                   string // norms, biases | groups, separated by ", "
	Tuning                    string // a line of the train block: adapter or freeze
	// An empty string means the first of the choices, except for Partition and Offload.

	Steps, Layers, Sequence, Vocab int
}

// Sizes of the tiny model. The vocabulary is not divisible by an SP of 2 or 4, and ffn is not divisible by 4,
// so both are padded; heads are divisible by both.
const (
	hidden    = 32
	heads     = 4
	ffn       = 70
	tinyVocab = 37
	evalBatch = 4
	normEps   = 1e-5
	ropeTheta = 100.0
	gradClip  = 1.0
	ranks     = 32
)

// The optimizer of every case. The rate is so high that a few steps change the weights, and eps is so large
// that a gradient consisting only of rounding errors changes nothing.
const (
	lr, minLR         = 2e-3, 5e-4
	beta1, beta2, eps = 0.9, 0.95, 1e-6
	weightDecay       = 0.1
	momentum          = 0.9
)

// optimizer returns the case's optimizer as written in the spec; naiveOptimizer returns the same optimizer for
// the independent implementation.
func (c Case) optimizer() string {
	common := fmt.Sprintf("lr = %g, weight_decay = %g, no_decay = [%s], moments = %s", lr, weightDecay, orElse(c.NoDecay, "norms, biases"), orElse(c.Moments, "f32"))
	means := fmt.Sprintf("betas = [%g, %g], eps = %g", beta1, beta2, eps)
	switch c.Optimizer {
	case "sgd":
		return fmt.Sprintf("sgd(%s, momentum = %g)", common, momentum)
	case "muon":
		return fmt.Sprintf("muon(%s, momentum = %g, %s)", common, momentum, means)
	}
	return fmt.Sprintf("adamw(%s, %s)", common, means)
}

func (c Case) naiveOptimizer() naive.Optimizer {
	return naive.Optimizer{Kind: c.Optimizer, LR: lr, Momentum: momentum, Beta1: beta1, Beta2: beta2, Eps: eps, WeightDecay: weightDecay,
		NoDecay: strings.Split(orElse(c.NoDecay, "norms, biases"), ", ")}
}

// plain returns the case with its model on one rank, undivided, without offload: the reference for every
// schedule.
func (c Case) plain() Case {
	c.Mux = "off"
	c.PP, c.SP, c.DP, c.N, c.Microbatch, c.VirtualStages = 1, 1, 1, 1, 1, 1
	c.Strategy, c.SPMode, c.Zero, c.Partition, c.Offload, c.Recompute, c.Order = "sppo", "megatron", "0", "flops", "none", "none", "sequence"
	c.Keep, c.OptimizerOffload, c.LayersPerStage, c.ExpertParallel, c.LatentCache = "[k, v]", "", "", "", ""
	return c
}

// unpiped returns the case on one stage without offload, recomputation or deferred gradients, and divided among
// replicas only if that affects the order of sums. By E1 and E2 its results are bitwise equal to those of the
// case. All strategies except sppo and those that run backwards in reverse order are replaced by seq1f1b, which sums in
// the same order.
func (c Case) unpiped() Case {
	c.Mux = "off"
	if s := strategy.Find(c.Strategy); c.Strategy != "sppo" && c.Strategy != "" && (s == nil || !s.Reversed) {
		c.Strategy = "seq1f1b"
	}
	c.PP, c.VirtualStages, c.Offload, c.Recompute, c.OptimizerOffload = 1, 1, "none", "none", ""
	c.LayersPerStage = ""
	if c.oneTurn() || c.Zero < "2" {
		c.Zero, c.Order = "0", "sequence"
	} else {
		c.Zero = "2"
	}
	return c
}

// oneTurn reports whether each layer has exactly one backward pass in a step. With several passes, the order of
// sums differs: ranks that divide gradients sum them across ranks after each pass, whereas other ranks first
// add up the gradients of their own passes.
func (c Case) oneTurn() bool {
	return (c.N == 1 || c.Order == "layer") && c.Batch == c.DP*c.Microbatch
}

// lengths into which the list partition divides 48 tokens, by number of subsequences: uneven, rising and
// falling, multiples of every SP.
var lengths = map[int][]int{1: {48}, 3: {12, 20, 16}, 8: {8, 4, 4, 12, 4, 4, 8, 4}}

// shares that the list policy offloads, by number of subsequences: some subsequences stay, some are offloaded,
// and some, including the last, are offloaded in part.
var shares = map[int][]float64{1: {0.7}, 3: {0.3, 1, 0.6}, 8: {1, 0, 0.5, 0.25, 1, 0, 1, 0.4}}

func listOf[N int | int64 | float64](values []N) string {
	return strings.ReplaceAll(fmt.Sprint(values), " ", ", ")
}

func (c Case) virtualStages() string {
	if c.Order == "layer" && c.VirtualStages < 2 {
		return "auto" // one per layer
	}
	return fmt.Sprint(max(1, c.VirtualStages))
}

func (c Case) subsequences() string {
	if c.Partition == "list" {
		list := slices.Clone(lengths[c.N])
		for i := range list {
			list[i] *= c.Sequence / 48
		}
		return listOf(list)
	}
	return fmt.Sprint(c.N)
}

func (c Case) partition() string {
	if c.Partition == "list" { // the list of lengths overrides it
		return "flops"
	}
	return c.Partition
}

func (c Case) offload() string {
	if c.Offload == "list" {
		return listOf(shares[c.N])
	}
	return c.Offload
}

// orElse returns a choice, or the plainest value if the case leaves it open.
func orElse(choice, plainest string) string {
	if choice == "" {
		return plainest
	}
	return choice
}

func (c Case) warmup() int { return min(3, c.Steps) }

// Spec returns the case as a spec.
func (c Case) Spec() string {
	return fmt.Sprintf(`import "clusters/local.sppo"

model tiny {
  family = %s
  layers = %d
  hidden = %d
  heads = %d
  kv_heads = %d
%s  vocab = %d
  dtype = %s
  tied = %t
%s  rope_theta = %g
  norm_eps = %g
  window = %s
  init_std = 0.15  # far from linear, so that every part counts
%s}

cluster all = local(ranks = %d)

train {
  sequence = %d
  batch = %d
  steps = %d
  seed = 7
  optimizer = %s
  warmup = %d
  min_lr = %g
  grad_clip = %g
  grad_reduce = %s
  data = random()
  eval_batch = %d
%s}

schedule tiny {
  pp = %d
  sp = %s
  sp_mode = %s
  expert_parallel = %s
  latent_cache = %s
  dp = %d
  zero = %s
  optimizer_offload = %s
  microbatch = %d
  virtual_stages = %s
  layers_per_stage = %s
  order = %s
  keep = %s
  strategy = %s
  subsequences = %s
  partition = %s
  offload = %s
  recompute = %s
  mux = %s
}
`, c.Family, c.Layers, hidden, heads, c.KVHeads, c.ffnLine(), c.Vocab, c.DType, c.Tied, c.positionsLine(), ropeTheta, normEps, orElse(c.Window, "0"), lines(c.Traits),
		ranks, c.Sequence, c.Batch, c.Steps, c.optimizer(), c.warmup(), minLR, gradClip, orElse(c.GradReduce, "f32"), evalBatch, lines(c.Tuning),
		c.PP, c.sp(), c.spMode(), orElse(c.ExpertParallel, "off"), orElse(c.LatentCache, "off"), c.DP, orElse(c.Zero, "0"), orElse(c.OptimizerOffload, "none"), c.Microbatch, c.virtualStages(), orElse(c.LayersPerStage, "auto"), orElse(c.Order, "sequence"), orElse(c.Keep, "[k, v]"), orElse(c.Strategy, "sppo"),
		c.subsequences(), c.partition(), c.offload(), orElse(c.Recompute, "none"), orElse(c.Mux, "off"))
}

// onRing reports whether groups of ranks that divide heads form a ring, which takes four ranks.
func (c Case) onRing() bool { return strings.HasSuffix(c.SPMode, "-ring") && c.SP >= 4 }

func (c Case) sp() string {
	if c.onRing() {
		return fmt.Sprintf("[%d, 2]", c.SP/2)
	}
	return fmt.Sprint(c.SP)
}

func (c Case) spMode() string { return strings.TrimSuffix(orElse(c.SPMode, "megatron"), "-ring") }

func (c Case) spName() string {
	if c.onRing() {
		return c.spMode()[:1] + "r"
	}
	return c.spMode()[:1]
}

// positionsLine returns the spec's line for Positions, or nothing if the traits set positions.
func (c Case) positionsLine() string {
	if strings.Contains(c.Traits, "positions = ") {
		return ""
	}
	return "  positions = " + c.Positions + "\n"
}

// lines indents each line of a text, as in a block of a spec.
func lines(text string) (out string) {
	for line := range strings.Lines(text) {
		out += "  " + strings.TrimSpace(line) + "\n"
	}
	return out
}

// models lists, by name, the traits of published models and of some unpublished ones.
var models = map[string]string{
	"":          "",
	"qwen2":     "bias = [qkv]",
	"qwen3":     "qk_norm = head\nhead_dim = 12",
	"olmo2":     "norm_place = post\nqk_norm = all\nbias = [qkv]",
	"gemma":     "bias = []\nnorm_offset = 1\nnorm_place = pre_post\nactivation = gelu_tanh\nembed_scale = sqrt_hidden\nqk_norm = head\nattn_scale = 0.2\nattn_softcap = 0.8\nlogit_softcap = 1.5\nlogit_scale = 0.7",
	"phi3":      "rope_partial = 0.5\nrope_scaling = longrope\nrope_factor = 4\nrope_original = 16\nrope_short = [1, 1.5]\nrope_long = [1.5, 3]",
	"llama3":    "rope_scaling = llama3\nrope_factor = 4\nrope_original = 64",
	"yarn":      "rope_scaling = yarn\nrope_factor = 4\nrope_original = 16\nrope_fast = 4\nactivation = relu2\nbias = [mlp]",
	"mixed":     "ffn = [20, 0, 33]\nlayer_types = [full, full, none]\nbias = [qkv, mlp]\nattn_sinks = true",
	"moe":       "num_experts = 5\nnum_experts_per_tok = 2\nmoe_intermediate_size = 12\nrouter_z_loss_coef = 0.02\nrouter_aux_loss_coef = 0.3",
	"joint":     "num_experts = 6\nnum_experts_per_tok = 2\nmoe_intermediate_size = 9\nmlp_layer_types = [sparse, dense, sparse]\nrouter_z_loss_coef = 0.02\nrouter_aux_loss_coef = 0.3\naux_loss = joint",
	"glm":       "num_experts = 8\nnum_experts_per_tok = 3\nmoe_intermediate_size = 7\nscoring_func = sigmoid\ne_score_correction_bias = true\nn_group = 4\ntopk_group = 2\nrouted_scaling_factor = 2.5\nfirst_k_dense_replace = 1\nshared_expert_intermediate_size = 10\nrouter_aux_loss_coef = 0.2",
	"limited":   "num_experts = 8\nnum_experts_per_tok = 3\nmoe_intermediate_size = 7\nnorm_topk_prob = false\nn_group = 4\ntopk_group = 2\ntopk_method = group_limited_greedy\nrouted_scaling_factor = 1.5\nfirst_k_dense_replace = 1\nshared_expert_intermediate_size = 10",
	"qwenmoe":   "num_experts = 6\nnum_experts_per_tok = 2\nmoe_intermediate_size = 9\nnorm_topk_prob = false\ndecoder_sparse_step = 2\nmlp_only_layers = [3]\nshared_expert_intermediate_size = 8\nshared_expert_gate = true\nrouter_z_loss_coef = 0.05",
	"ossmoe":    "attn_sinks = true\nnum_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 11\nscoring_func = softmax_topk\nbias = [qkv, attn_out, router, experts]\nrouter_aux_loss_coef = 0.1",
	"gptoss":    "attn_sinks = true\nbias = [qkv, attn_out]\nrope_scaling = yarn\nrope_factor = 4\nrope_original = 16\nrope_truncate = false",
	"hunyuan":   "qk_norm = rotated\nhead_dim = 12",
	"ministral": "rope_scaling = yarn\nrope_factor = 4\nrope_original = 6\nrope_amplitude = 1\nrope_beta = 0.4\nrope_partial = 0.5",
	"hybrid":    "layer_types = [full, gated_delta, full]\nlinear_num_key_heads = 4\nlinear_num_value_heads = 8\nlinear_key_head_dim = 24\nlinear_value_head_dim = 16\nlinear_conv_kernel_dim = 4\nattn_output_gate = true",
	"nemotron":  "ffn = [0, 20, 0, 20]\nlayer_types = [mamba2, none, full, none]\nmlp_layer_types = [dense, sparse, dense, dense]\nlinear_num_key_heads = 4\nlinear_num_value_heads = 8\nlinear_key_head_dim = 12\nlinear_value_head_dim = 16\nlinear_conv_kernel_dim = 4\nuse_conv_bias = true\ntime_step_min = 0.02\nnum_experts = 6\nnum_experts_per_tok = 2\nmoe_intermediate_size = 9\nscoring_func = sigmoid\nmoe_latent_size = 7\nshared_expert_intermediate_size = 8",
	"kimi":      "layer_types = [full, kimi_delta, full]\nlinear_num_key_heads = 4\nlinear_num_value_heads = 4\nlinear_key_head_dim = 16\nlinear_value_head_dim = 16\nlinear_conv_kernel_dim = 4",
	"kimilin":   "layer_types = [latent, kimi_delta, latent]\nlinear_num_key_heads = 4\nlinear_num_value_heads = 4\nlinear_key_head_dim = 24\nlinear_value_head_dim = 16\nlinear_conv_kernel_dim = 4\nkv_lora_rank = 16\nqk_nope_head_dim = 6\nqk_rope_head_dim = 6\nv_head_dim = 10\npositions = none\nbias = []",
	"mamba":     "layer_types = [mamba2, full, gated_delta]\nlinear_num_key_heads = 2\nlinear_num_value_heads = 6\nlinear_key_head_dim = 24\nlinear_value_head_dim = 16\nlinear_conv_kernel_dim = 3",
	"deepseek":  "layer_types = latent\nq_lora_rank = 20\nkv_lora_rank = 12\nqk_nope_head_dim = 8\nqk_rope_head_dim = 4\nv_head_dim = 6\nrope_scaling = yarn\nrope_factor = 4\nrope_original = 16\nattn_scale = 0.4\nbias = [mlp]",
	"latent":    "layer_types = [latent, none]\nkv_lora_rank = 16\nqk_nope_head_dim = 6\nqk_rope_head_dim = 6\nv_head_dim = 10\npositions = none\nattn_output_gate = true\nbias = [attn_out]",
	"smollm":    "positions = [rope, none]\nrope_scaling = linear\nrope_factor = 2\nattn_scale = 0.5\nactivation = gelu\nbias = [attn_out]",
}

// routesAlike reports whether rounding leaves the choice of experts as it is. With rounded logits, it does not.
func (c Case) routesAlike() bool {
	return c.DType != "bf16" || !strings.Contains(c.Traits, "num_experts")
}

// ffnLine returns the width of the MLP, unless the traits have it.
func (c Case) ffnLine() string {
	if strings.HasPrefix(c.Traits, "ffn") {
		return ""
	}
	return fmt.Sprintf("  ffn = %d\n", ffn)
}

func (c Case) String() string {
	tied := "untied"
	if c.Tied {
		tied = "tied"
	}
	if c.Window != "" {
		tied += "-window" + strings.NewReplacer("[", "", "]", "", ", ", ".").Replace(c.Window)
	}
	return c.modelName() + fmt.Sprintf("-kv%d-%s-%s-%s/b%d.%d-dp%d.%s-pp%d.%d-sp%d%s-n%d-%s-%s-%s-%s-%s-%s%s", c.KVHeads, c.Positions, tied, c.DType,
		c.Batch, c.Microbatch, c.DP, orElse(c.Zero, "0"), c.PP, max(1, c.VirtualStages), c.SP, c.spName(), c.N, c.Partition, c.Offload,
		orElse(c.Recompute, "none"), orElse(c.Strategy, "sppo"), orElse(c.Order, "sequence"), c.kept(), map[bool]string{true: "-mux-" + c.Mux}[orElse(c.Mux, "off") != "off"]+map[bool]string{true: "-" + c.Optimizer}[c.Optimizer != ""]+map[bool]string{true: "-away"}[c.OptimizerOffload == "host"]+map[bool]string{true: "-rounded"}[c.Moments == "bf16"]+map[bool]string{true: "-narrow"}[c.GradReduce == "bf16"]) + c.tuningName()
}

// tuningName returns the part of a train line that distinguishes cases.
func (c Case) tuningName() string {
	if c.Tuning == "" {
		return ""
	}
	return "-" + strings.NewReplacer(" = ", ".", "[", "", "]", "", ", ", ".", "\"", "", "(", ".", ")", "").Replace(c.Tuning)
}

// modelName returns the family, with the name of the traits if there are any.
func (c Case) modelName() string {
	for name, traits := range models {
		if traits == c.Traits && name != "" {
			return c.Family + "." + name
		}
	}
	return c.Family
}

// kept returns the part of a case's name that lists the tensors in Keep.
func (c Case) kept() string {
	return "keep" + strings.NewReplacer("[", "", "]", "", ", ", "").Replace(orElse(c.Keep, "[k, v]"))
}
