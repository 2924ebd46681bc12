package ir

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Model describes the neural network that a program trains. It is part of the program's header and
// of checkpoints, because the names and shapes of tensors do not determine the computed function.
// In a hand-written program it may be empty.
type Model struct {
	Name   string `json:"name"`
	Family string `json:"family"` // the family that supplied the defaults; the adapter target all-linear also depends on it

	Layers  int   `json:"layers"`
	Hidden  int   `json:"hidden"`
	Heads   int   `json:"heads"`
	KVHeads int   `json:"kv_heads"`       // = Heads unless the model uses grouped-query attention
	HeadDim int   `json:"head_dim"`       // = Hidden/Heads unless given
	FFN     int   `json:"ffn"`            // width of the MLP
	FFNs    []int `json:"ffns,omitempty"` // width in each layer, 0 for none; FFN is the largest. The list repeats over the layers; empty: FFN in all layers
	Vocab   int   `json:"vocab"`          // as given; codegen pads it to a multiple of SP

	// MLPs with experts, of which each token uses some. All fields are 0 or empty without experts.
	MLPs          []string `json:"mlp_layer_types,omitempty"` // dense | sparse for each layer, repeated; sparse MLPs have experts. Empty: all are sparse if there are experts
	Experts       int      `json:"num_experts,omitempty"`
	TopExperts    int      `json:"num_experts_per_tok,omitempty"`
	ExpertFFN     int      `json:"moe_intermediate_size,omitempty"`           // width of each expert
	SharedFFN     int      `json:"shared_expert_intermediate_size,omitempty"` // width of the expert that all tokens use; 0: none
	SharedGate    bool     `json:"shared_expert_gate,omitempty"`              // its result is multiplied by a sigmoid
	LatentSize    int      `json:"moe_latent_size,omitempty"`                 // width of the rows of experts, which a linear map makes and another turns back; 0: hidden, and no maps
	Scoring       string   `json:"scoring_func,omitempty"`                    // softmax | sigmoid | softmax_topk: from a router's logits to scores
	NormTop       bool     `json:"norm_topk_prob,omitempty"`                  // the scores of a token's experts are divided by their sum
	RoutedScale   float64  `json:"routed_scaling_factor,omitempty"`           // factor of the scores
	Correction    bool     `json:"e_score_correction_bias,omitempty"`         // a number for each expert is added to its score for the choice
	ExpertGroups  int      `json:"n_group,omitempty"`                         // groups of experts; 0 or 1: none
	TopGroups     int      `json:"topk_group,omitempty"`                      // groups from which a token's experts are chosen
	TopMethod     string   `json:"topk_method,omitempty"`                     // group_limited_greedy: the score of a group is that of its best expert; empty: the sum of the two highest
	RouterZLoss   float64  `json:"router_z_loss_coef,omitempty"`              // coefficient of the mean over tokens of the square of the logarithm of the sum of exponentials of a router's logits
	AuxLoss       string   `json:"aux_loss,omitempty"`                        // layer | joint; empty: RouterAuxLoss is 0
	RouterAuxLoss float64  `json:"router_aux_loss_coef,omitempty"`            // coefficient of the loss that balances experts
	DType         string   `json:"dtype"`                                     // f32 | bf16: storage of weights and activations

	// Linear attention. All fields are above 0 if any layer has it, and 0 otherwise.
	LinearKeyHeads   int `json:"linear_num_key_heads,omitempty"`
	LinearValueHeads int `json:"linear_num_value_heads,omitempty"` // each has a state, and as many as LinearValueHeads / LinearKeyHeads share a head of keys
	LinearKeyDim     int `json:"linear_key_head_dim,omitempty"`
	LinearValueDim   int `json:"linear_value_head_dim,omitempty"`
	LinearConv       int `json:"linear_conv_kernel_dim,omitempty"` // tokens on which a result of the short convolution depends

	ConvBias bool    `json:"use_conv_bias,omitempty"` // in layers with mamba2, convolutions have biases
	StepMin  float64 `json:"time_step_min,omitempty"` // in layers with mamba2, smaller steps are replaced by this one

	// Latent attention. The first field may be 0; all others are above 0 if any layer has it, and 0 otherwise.
	QLatent      int `json:"q_lora_rank,omitempty"` // width of the latent from which queries are computed; 0: they are computed from the layer's input
	KVLatent     int `json:"kv_lora_rank,omitempty"`
	NopeDim      int `json:"qk_nope_head_dim,omitempty"`
	RopeDim      int `json:"qk_rope_head_dim,omitempty"` // HeadDim = NopeDim + RopeDim
	ValueHeadDim int `json:"v_head_dim,omitempty"`

	Norm       string   `json:"norm"`        // rmsnorm | layernorm
	NormOffset float64  `json:"norm_offset"` // added to a norm's weights
	NormPlace  string   `json:"norm_place"`  // pre | post | pre_post: position in a residual branch
	NormEps    float64  `json:"norm_eps"`
	Activation string   `json:"activation"` // one of ir.Functions
	Gated      bool     `json:"gated"`      // the MLP multiplies by the activation of a gate
	Bias       []string `json:"bias"`       // subset of qkv, attn_out, mlp, router, experts, in this order
	QKNorm     string   `json:"qk_norm"`    // none | head | all | rotated: RMSNorm of queries and keys

	Positions       string   `json:"positions"`        // learned | rope | none
	PositionPattern []string `json:"position_pattern"` // rope | none for each layer, repeated; empty: Positions in all layers
	RopeTheta       float64  `json:"rope_theta"`       // base of the rotary frequencies
	RopeLocalTheta  float64  `json:"rope_local_theta"` // base in layers with a window, to which RopeScaling then does not apply; 0: as in other layers
	RopePartial     float64  `json:"rope_partial"`     // share of a head that is rotated
	RopeScaling     string   `json:"rope_scaling"`     // none | linear | llama3 | yarn | longrope

	// Fields that RopeScaling does not use are 0, false or empty.
	RopeFactor    float64   `json:"rope_factor"`
	RopeOriginal  int       `json:"rope_original"` // tokens
	RopeLow       float64   `json:"rope_low"`
	RopeHigh      float64   `json:"rope_high"`
	RopeFast      float64   `json:"rope_fast"`
	RopeSlow      float64   `json:"rope_slow"`
	RopeTruncate  bool      `json:"rope_truncate"`
	RopeAmplitude float64   `json:"rope_amplitude"`      // 1 unless scaled
	RopeBeta      float64   `json:"rope_beta,omitempty"` // queries are multiplied by 1 + RopeBeta ln(1 + floor(position / RopeOriginal))
	RopeShort     []float64 `json:"rope_short"`
	RopeLong      []float64 `json:"rope_long"`

	Windows      []int64  `json:"windows"`                    // tokens that a query attends to, including its own; 0: all. The list repeats over the layers; empty: all
	Mixers       []string `json:"mixers,omitempty"`           // attention | gated_delta | kimi_delta | mamba2 | latent | none for each layer, repeated; empty: attention in all layers
	AttnScale    float64  `json:"attn_scale"`                 // factor applied to attention scores
	AttnSoftcap  float64  `json:"attn_softcap"`               // bound on attention scores; 0: none
	AttnSinks    bool     `json:"attn_sinks,omitempty"`       // the softmax of attention has one more key for each head: with a learnt score, and the value 0
	AttnGate     bool     `json:"attn_output_gate,omitempty"` // the result of attention is multiplied by the sigmoid of a linear map
	LogitSoftcap float64  `json:"logit_softcap"`              // 0: none
	LogitScale   float64  `json:"logit_scale"`                // factor applied to the logits before the bound
	EmbedScale   float64  `json:"embed_scale"`                // factor applied to the embedding's result
	Tied         bool     `json:"tied"`                       // output projection shares the embedding

	InitStd float64 `json:"init_std"` // standard deviation of weight matrices and embeddings; divided by sqrt(2*Layers) for output projections of a layer

	Adapter        string   `json:"adapter,omitempty"` // lora; empty: none
	AdapterRank    int      `json:"adapter_rank,omitempty"`
	AdapterAlpha   float64  `json:"adapter_alpha,omitempty"`
	AdapterDropout float64  `json:"adapter_dropout,omitempty"` // probability that a training step drops an element of an adapter's input
	AdapterTargets []string `json:"adapter_targets,omitempty"` // linear maps of every layer that have an adapter, named as in lang.LinearMap
}

// ofTraining lists the keys that do not change the function that a network computes of its weights.
var ofTraining = []string{"name", "family", "init_std", "adapter_dropout", "router_z_loss_coef", "router_aux_loss_coef", "aux_loss"}

// identity returns the keys, with their values, that define which function of its weights a network computes.
// It omits those of ofTraining. Unused keys, such as those for rotation if nothing is rotated, have the value "none".
func (m *Model) identity() (traits [][2]string) {
	s := reflect.ValueOf(*m)
	for i := range s.NumField() {
		key := jsonKey(s.Type().Field(i))
		if slices.Contains(ofTraining, key) {
			continue
		}
		value, field := "none", s.Field(i)
		switch {
		case strings.HasPrefix(key, "adapter") && empty(field), strings.HasPrefix(key, "rope_") && (m.Positions != "rope" || empty(field)):
		default:
			value = fmt.Sprint(field.Interface())
		}
		traits = append(traits, [2]string{key, value})
	}
	return traits
}

// WithPositionsOf returns the model with the position settings of another: the frequencies of rotary positions and the
// windows of attention. Weights do not depend on them, so a run may change them to train on longer sequences. If the two
// models have different kinds of positions, the model is returned unchanged.
func (m Model) WithPositionsOf(other *Model) Model {
	if m.Positions != "rope" || other.Positions != m.Positions {
		return m
	}
	to, from := reflect.ValueOf(&m).Elem(), reflect.ValueOf(other).Elem()
	for i := range to.NumField() {
		if key := jsonKey(to.Type().Field(i)); strings.HasPrefix(key, "rope_") || key == "windows" {
			to.Field(i).Set(from.Field(i))
		}
	}
	return m
}

// jsonKey returns the name of a field in JSON.
func jsonKey(f reflect.StructField) string {
	key, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return key
}

// empty reports whether a field has the value of an unused key.
func empty(v reflect.Value) bool { return v.IsZero() || v.Kind() == reflect.Slice && v.Len() == 0 }

// IsZero reports whether the model is empty, as in a program that does not describe its model.
func (m *Model) IsZero() bool { return reflect.ValueOf(*m).IsZero() }

// Difference returns the keys because of which two networks compute different functions, with each network's
// values: "heads = 2, norm_eps = 1e-05" and "heads = 4, norm_eps = 1e-06". Both results are empty if there
// is no difference.
func (m *Model) Difference(other *Model) (mine, others string) {
	var a, b []string
	theirs := other.identity()
	for i, trait := range m.identity() {
		if trait != theirs[i] {
			a, b = append(a, trait[0]+" = "+trait[1]), append(b, trait[0]+" = "+theirs[i][1])
		}
	}
	return strings.Join(a, ", "), strings.Join(b, ", ")
}
