// Package naive implements the models' published formulas in float64, as plainly as possible. Tests compare
// compiled programs with it. It covers decoders, described by their traits, from GPT-2 (Radford et al., 2019)
// to Llama (Touvron et al., 2023), Gemma, Qwen and OLMo, and the optimizers. All gradients are hand-written.
//
//   - model.go: the models, their tensors, the loss and the gradient of every tensor
//   - norm.go, matmul.go, rope.go, attention.go, elementwise.go, dropout.go, embed.go, loss.go: the formulas of
//     single operations, each with its gradient
//   - numeric.go: numerical differentiation
//   - optimizer.go: clipping, the optimizers and the learning-rate schedule
//
// It is for tests only. It does not depend on specs, plans, bytecode, ranks or devices, imports none of our
// packages, and shares no code with the code that it checks. It holds every row of logits and every T x T
// attention matrix in memory at the same time.
//
// All matrices are row-major. The rows of a batch are interleaved: token t of sequence b is row t*batch+b.
package naive

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Config describes a model. There are no defaults: KVHeads must be set to Heads if queries are not grouped. The
// JSON names are the spec's keys.
type Config struct {
	Layers  int      `json:"layers"`
	Hidden  int      `json:"hidden"`
	Heads   int      `json:"heads"`
	KVHeads int      `json:"kv_heads"`
	HeadDim int      `json:"head_dim"`
	FFN     int      `json:"ffn"`
	FFNs    []int    `json:"ffns"`   // for each layer, repeated cyclically: FFN, or 0 for no MLP; empty: FFN for all layers
	Mixers  []string `json:"mixers"` // attention | gated_delta | kimi_delta | mamba2 | latent | none for each layer, repeated cyclically; empty: attention for all layers
	Vocab   int      `json:"vocab"`

	MLPs          []string `json:"mlp_layer_types"` // dense | sparse for each layer, repeated cyclically; empty: sparse if there are experts
	Experts       int      `json:"num_experts"`
	TopExperts    int      `json:"num_experts_per_tok"`
	ExpertFFN     int      `json:"moe_intermediate_size"`
	SharedFFN     int      `json:"shared_expert_intermediate_size"`
	SharedGate    bool     `json:"shared_expert_gate"`
	LatentSize    int      `json:"moe_latent_size"`
	Scoring       string   `json:"scoring_func"` // softmax | sigmoid | softmax_topk
	NormTop       bool     `json:"norm_topk_prob"`
	RoutedScale   float64  `json:"routed_scaling_factor"`
	Correction    bool     `json:"e_score_correction_bias"`
	ExpertGroups  int      `json:"n_group"`
	TopGroups     int      `json:"topk_group"`
	TopMethod     string   `json:"topk_method"` // group_limited_greedy, or empty
	RouterZLoss   float64  `json:"router_z_loss_coef"`
	RouterAuxLoss float64  `json:"router_aux_loss_coef"`
	Closest       *float64 `json:"-"`        // that of the Router
	AuxLoss       string   `json:"aux_loss"` // layer | joint

	LinearKeyHeads   int `json:"linear_num_key_heads"`
	LinearValueHeads int `json:"linear_num_value_heads"`
	LinearKeyDim     int `json:"linear_key_head_dim"`
	LinearValueDim   int `json:"linear_value_head_dim"`
	LinearConv       int `json:"linear_conv_kernel_dim"`

	ConvBias bool    `json:"use_conv_bias"`
	StepMin  float64 `json:"time_step_min"`

	QLatent      int `json:"q_lora_rank"` // 0: queries are computed from the layer's input
	KVLatent     int `json:"kv_lora_rank"`
	NopeDim      int `json:"qk_nope_head_dim"`
	RopeDim      int `json:"qk_rope_head_dim"`
	ValueHeadDim int `json:"v_head_dim"`

	Norm       string   `json:"norm"`        // rmsnorm | layernorm
	NormOffset float64  `json:"norm_offset"` // added to gamma
	NormPlace  string   `json:"norm_place"`  // pre | post | pre_post
	NormEps    float64  `json:"norm_eps"`
	Activation string   `json:"activation"` // argument of Activate
	Gated      bool     `json:"gated"`
	Bias       []string `json:"bias"`    // subset of qkv, attn_out, mlp, router, experts
	QKNorm     string   `json:"qk_norm"` // none | head | all | rotated

	Positions       string   `json:"positions"`        // learned | rope | none
	PositionPattern []string `json:"position_pattern"` // rope | none for each layer, repeated cyclically; empty: Positions for all layers
	RopeConfig

	Windows      []int   `json:"windows"`    // for each layer, repeated cyclically: number of keys that a query sees, including its own; 0: all
	AttnScale    float64 `json:"attn_scale"` // factor of the scores
	AttnSoftcap  float64 `json:"attn_softcap"`
	AttnSinks    bool    `json:"attn_sinks"`
	AttnGate     bool    `json:"attn_output_gate"`
	LogitSoftcap float64 `json:"logit_softcap"`
	LogitScale   float64 `json:"logit_scale"`
	EmbedScale   float64 `json:"embed_scale"`
	Tied         bool    `json:"tied"` // the output projection uses the embedding

	Adapter        string   `json:"adapter"` // lora; empty: none
	AdapterRank    int      `json:"adapter_rank"`
	AdapterAlpha   float64  `json:"adapter_alpha"`
	AdapterDropout float64  `json:"adapter_dropout"`
	AdapterTargets []string `json:"adapter_targets"`

	Sequence   int   `json:"-"` // tokens of one sequence
	Seed, Step int64 `json:"-"` // seed of the run and number of the training step, for dropout; Step 0: no dropout
}

// ConfigOf parses a model from JSON.
func ConfigOf(model []byte, sequence int) Config {
	cfg := Config{Sequence: sequence}
	err := json.Unmarshal(model, &cfg)
	demand(err == nil, "%v", err)
	return cfg
}

// layerRotation returns the rotation of a layer's queries or keys.
func (cfg *Config) layerRotation(layer int, queries bool) Rotation {
	r := cfg.RopeConfig
	if n := len(cfg.Windows); n > 0 && cfg.Windows[layer%n] > 0 && r.Local > 0 {
		r = RopeConfig{Theta: r.Local, Partial: r.Partial, Scaling: "none", Amplitude: 1}
	}
	out := r.rotation(cfg.HeadDim, cfg.Sequence)
	if queries {
		out.Beta, out.Period = cfg.Beta, int64(cfg.Original)
	}
	return out
}

// normsBefore and normsAfter report whether there are norms before and after attention and the MLP,
// respectively.
func (cfg *Config) normsBefore() bool { return cfg.NormPlace != "post" }
func (cfg *Config) normsAfter() bool  { return cfg.NormPlace != "pre" }

// rotates reports whether a layer rotates queries and keys.
func (cfg *Config) rotates(layer int) bool {
	if n := len(cfg.PositionPattern); n > 0 {
		return cfg.PositionPattern[layer%n] == "rope"
	}
	return cfg.Positions == "rope"
}

// ffn returns the width of a layer's MLP, and attends reports whether the layer has attention.
func (cfg *Config) ffn(layer int) int {
	if n := len(cfg.FFNs); n > 0 {
		return cfg.FFNs[layer%n]
	}
	return cfg.FFN
}

func (cfg *Config) attends(layer int) bool {
	return cfg.mixer(layer) == "attention"
}

// Tensors holds row-major values by name.
type Tensors map[string][]float64

// tensor is one entry of a model's parameter list.
type tensor struct {
	name  string
	shape []int
}

// parameters lists a model's tensors in order of use. Names and shapes are defined only here.
func parameters(cfg Config) []tensor {
	h := cfg.Hidden
	list := []tensor{{"embed", []int{cfg.Vocab, h}}}
	if cfg.Positions == "learned" {
		list = append(list, tensor{"pos", []int{cfg.Sequence, h}})
	}
	for l := range cfg.Layers {
		list = append(list, layerParameters(cfg, l)...)
	}
	list = append(list, normParameters(cfg, "ln_f")...)
	if !cfg.Tied {
		list = append(list, tensor{"head", []int{cfg.Vocab, h}})
	}
	return list
}

func normParameters(cfg Config, name string) []tensor {
	list := []tensor{{name + ".gamma", []int{cfg.Hidden}}}
	if cfg.Norm == "layernorm" {
		list = append(list, tensor{name + ".beta", []int{cfg.Hidden}})
	}
	return list
}

func layerParameters(cfg Config, layer int) (list []tensor) {
	prefix := fmt.Sprintf("layer.%d.", layer)
	h, q, kv, f := cfg.Hidden, cfg.Heads*cfg.HeadDim, cfg.KVHeads*cfg.HeadDim, cfg.ffn(layer)
	linear := func(weight, bias, group string, in, out int) {
		list = append(list, tensor{weight, []int{in, out}})
		if a := cfg.lowered(weight); a != "" {
			if a = prefix + a; !slices.ContainsFunc(list, func(t tensor) bool { return prefix+t.name == a }) {
				list = append(list, tensor{strings.TrimPrefix(a, prefix), []int{in, cfg.AdapterRank}})
			}
			list = append(list, tensor{weight + ".lora_b", []int{cfg.AdapterRank, out}})
		}
		if slices.Contains(cfg.Bias, group) {
			list = append(list, tensor{bias, []int{out}})
		}
	}
	norm := func(name string, there bool) {
		if there {
			list = append(list, normParameters(cfg, name)...)
		}
	}
	if cfg.attends(layer) || cfg.latent(layer) {
		norm("ln1", cfg.normsBefore())
		if cfg.latent(layer) {
			list = append(list, cfg.latentParameters(linear)...)
		} else {
			linear("wq", "bq", "qkv", h, q)
			linear("wk", "bk", "qkv", h, kv)
			linear("wv", "bv", "qkv", h, kv)
		}
		switch cfg.QKNorm {
		case "head", "rotated":
			list = append(list, tensor{"q_norm.gamma", []int{cfg.HeadDim}}, tensor{"k_norm.gamma", []int{cfg.HeadDim}})
		case "all":
			list = append(list, tensor{"q_norm.gamma", []int{q}}, tensor{"k_norm.gamma", []int{kv}})
		}
		if cfg.AttnSinks {
			list = append(list, tensor{"sinks", []int{cfg.Heads}})
		}
		if cfg.AttnGate {
			linear("wg", "", "", h, cfg.Heads*cfg.valueDim())
		}
		linear("wo", "bo", "attn_out", cfg.Heads*cfg.valueDim(), h)
		norm("ln1_post", cfg.normsAfter())
	}
	if cfg.linear(layer) {
		norm("ln1", cfg.normsBefore())
		for _, t := range linearParameters(cfg, layer) {
			if cfg.lowered(t.name) == "" {
				list = append(list, t)
			} else {
				linear(t.name, "", "", t.shape[0], t.shape[1])
			}
		}
		norm("ln1_post", cfg.normsAfter())
	}
	if f > 0 {
		norm("ln2", cfg.normsBefore())
		switch {
		case cfg.sparse(layer):
			list = append(list, sparseParameters(cfg)...)
		case cfg.Gated:
			linear("w_gate", "b_gate", "mlp", h, f)
			linear("w_up", "b_up", "mlp", h, f)
			linear("w_down", "b_down", "mlp", f, h)
		default:
			linear("w1", "b1", "mlp", h, f)
			linear("w2", "b2", "mlp", f, h)
		}
		norm("ln2_post", cfg.normsAfter())
	}
	for i := range list {
		list[i].name = prefix + list[i].name
	}
	return list
}

// lowered returns the name of the first matrix of a weight's adapter, or "" if the weight has no adapter.
// Weights of a fused target, such as qkv_proj, share that matrix.
func (cfg *Config) lowered(weight string) string {
	if own, ok := strings.CutPrefix(weight, "shared."); ok {
		if a := cfg.lowered(own); a != "" {
			return "shared." + a
		}
		return ""
	}
	of := map[string]string{"linear.wq": "q_proj", "linear.wk": "k_proj", "linear.wv": "v_proj", "linear.wb": "b_proj", "linear.wo": "o_proj",
		"linear.wa_low": "f_a_proj", "linear.wa": "f_b_proj", "linear.wz_low": "g_a_proj", "linear.wz": "g_b_proj"}
	if slices.Contains(cfg.Mixers, "kimi_delta") && of[weight] != "" && cfg.Adapter != "" && slices.Contains(cfg.AdapterTargets, of[weight]) {
		return weight + ".lora_a"
	}
	queries := [2]string{"wq", "wq"}
	if cfg.AttnGate {
		queries = [2]string{"wq wg", "wqg"}
	}
	for _, t := range []struct{ target, weights, a string }{
		{"q_proj", queries[0], queries[1]}, {"q_a_proj", "wq_a", "wq_a"}, {"q_b_proj", "wq", "wq"}, {"kv_a_proj_with_mqa", "wkv wk_rope", "wkv_a"}, {"kv_b_proj", "wk wv", "wkv_b"},
		{"in_proj_qkvz", "linear.wq linear.wk linear.wv linear.wz", "linear.wqkvz"}, {"in_proj_ba", "linear.wb linear.wa", "linear.wba"},
		{"in_proj_qkv", "linear.wq linear.wk linear.wv", "linear.wqkv"}, {"in_proj_z", "linear.wz", "linear.wz"}, {"in_proj_b", "linear.wb", "linear.wb"},
		{"in_proj_a", "linear.wa", "linear.wa"}, {"in_proj", "linear.wz linear.wv linear.wk linear.wq linear.wa", "linear.w_in"}, {"out_proj", "linear.wo", "linear.wo"}, {"k_proj", "wk", "wk"}, {"v_proj", "wv", "wv"}, {"qkv_proj", "wq wk wv", "wqkv"}, {"o_proj", "wo", "wo"},
		{"gate_proj", "w_gate", "w_gate"}, {"up_proj", "w_up", "w_up"}, {"up_proj", "w1", "w1"}, {"gate_up_proj", "w_gate w_up", "w_gate_up"},
		{"down_proj", "w_down", "w_down"}, {"down_proj", "w2", "w2"},
	} {
		if latents := slices.Contains(cfg.Mixers, "latent"); latents && (t.target == "k_proj" || t.target == "v_proj") || cfg.QLatent > 0 && t.target == "q_proj" {
			continue
		}
		if cfg.Adapter != "" && slices.Contains(cfg.AdapterTargets, t.target) && slices.Contains(strings.Fields(t.weights), weight) {
			return t.a + ".lora_a"
		}
	}
	return ""
}

// adapter returns the names of the two matrices of a weight's adapter; ok is false if the weight has no
// adapter.
func (m *model) adapter(weight string) (a, b string, ok bool) {
	parts := strings.SplitN(weight, ".", 3) // layer.3.wq
	if len(parts) < 3 {
		return "", "", false
	}
	low := m.cfg.lowered(parts[2])
	return parts[0] + "." + parts[1] + "." + low, weight + ".lora_b", low != ""
}

func (m *model) adapterScale() float64 { return m.cfg.AdapterAlpha / float64(m.cfg.AdapterRank) }

// Names lists the model's tensors in order of use.
func Names(cfg Config) []string {
	var names []string
	for _, p := range parameters(cfg) {
		names = append(names, p.name)
	}
	return names
}

// Shapes returns the shape of every tensor by name.
func Shapes(cfg Config) map[string][]int {
	shapes := map[string][]int{}
	for _, p := range parameters(cfg) {
		shapes[p.name] = p.shape
	}
	return shapes
}

// Loss returns the mean cross-entropy in nats over all tokens of the batch. Each element of tokens is a
// sequence of cfg.Sequence+1 tokens: all but the last are inputs, all but the first are labels.
func Loss(cfg Config, w Tensors, tokens [][]int32) float64 {
	m := newModel(cfg, w, tokens)
	loss, _ := m.forward()
	return loss
}

// TokenLosses returns the cross-entropy of every token, by sequence.
func TokenLosses(cfg Config, w Tensors, tokens [][]int32) [][]float64 {
	m := newModel(cfg, w, tokens)
	m.forward()
	out := make([][]float64, len(tokens))
	for row, l := range m.losses {
		out[row%m.batch] = append(out[row%m.batch], l)
	}
	return out
}

// Logits returns, for each input token of a sequence, the logits for the token that follows it.
func Logits(cfg Config, w Tensors, tokens []int32) (rows [][]float64) {
	m := newModel(cfg, w, [][]int32{tokens})
	m.forward()
	for row := range cfg.Sequence {
		rows = append(rows, m.logits[row*cfg.Vocab:(row+1)*cfg.Vocab])
	}
	return rows
}

// LossAndGrads returns Loss and its gradient with respect to every tensor of the model.
func LossAndGrads(cfg Config, w Tensors, tokens [][]int32) (loss float64, grads Tensors) {
	return newModel(cfg, w, tokens).lossAndGrads()
}

// MaskedLossAndGrads evaluates one sequence in which negative labels are masked. The loss is the sum over the
// other labels, whose number it also returns.
func MaskedLossAndGrads(cfg Config, w Tensors, tokens, labels []int32) (loss float64, counted int, grads Tensors) {
	m := newModel(cfg, w, [][]int32{tokens})
	m.labels = labels
	for _, label := range labels {
		if label >= 0 {
			counted++
		}
	}
	loss, grads = m.lossAndGrads()
	for _, g := range grads {
		for i := range g {
			g[i] *= float64(len(labels))
		}
	}
	return loss * float64(len(labels)), counted, grads
}

func (m *model) lossAndGrads() (loss float64, grads Tensors) {
	cfg := m.cfg
	loss, dx := m.forward()
	for l := cfg.Layers - 1; l >= 0; l-- {
		dx = m.layerGrad(l, dx)
	}
	if cfg.Positions == "learned" {
		addTo(m.grads["pos"], EmbedGrad(m.places(), dx, cfg.Hidden, 0, cfg.Sequence))
	}
	addTo(m.grads["embed"], EmbedGrad(m.inputs, scaled(dx, cfg.EmbedScale), cfg.Hidden, 0, cfg.Vocab))
	return loss, m.grads
}

// model is one evaluation: the weights, the batch as interleaved rows, values kept from the forward pass for
// the backward pass, and the gradients computed so far.
type model struct {
	cfg            Config
	w, grads       Tensors
	batch          int
	inputs, labels []int32
	tapes          []tape
	losses         []float64 // by row
	logits         []float64 // by row, after the soft cap
	joint          []float64 // by sequence and expert: the tokens that have it among their most probable ones, in all layers
}

// tape holds the values of one layer's forward pass that its backward pass needs.
type tape struct {
	x, norm1, rawQ, rawK, q, k, v []float64 // rawQ and rawK: before their norms; q and k: as attention takes them
	attention, attentionOut       []float64
	logSumExp                     []float64 // of attention
	mid, norm2, gate, up, act     []float64 // gate only if the MLP has one
	mlpOut                        []float64
	attnGate, attended            []float64 // the gate of attention, and the result of attention before it
	linear                        linearTape
	latent                        latentTape
	sparse                        sparseTape
}

func newModel(cfg Config, w Tensors, tokens [][]int32) *model {
	check(cfg, w, tokens)
	m := &model{cfg: cfg, w: w, grads: Tensors{}, batch: len(tokens), tapes: make([]tape, cfg.Layers)}
	for name, values := range w {
		m.grads[name] = make([]float64, len(values))
	}
	for t := range cfg.Sequence {
		for _, sequence := range tokens {
			m.inputs = append(m.inputs, sequence[t])
			m.labels = append(m.labels, sequence[t+1])
		}
	}
	return m
}

// check panics on invalid arguments. They are always mistakes in a test, which would otherwise compute
// meaningless numbers.
func check(cfg Config, w Tensors, tokens [][]int32) {
	for _, word := range []struct{ what, is, oneOf string }{
		{"norm", cfg.Norm, "rmsnorm layernorm"}, {"norm place", cfg.NormPlace, "pre post pre_post"},
		{"qk norm", cfg.QKNorm, "none head all rotated"}, {"positions", cfg.Positions, "learned rope none"},
	} {
		demand(slices.Contains(strings.Fields(word.oneOf), word.is), "%s %q", word.what, word.is)
	}
	demand(cfg.AttnScale > 0 && cfg.EmbedScale > 0 && cfg.LogitScale > 0, "scales %g, %g and %g", cfg.AttnScale, cfg.EmbedScale, cfg.LogitScale)
	demand(cfg.KVHeads > 0 && cfg.Heads%cfg.KVHeads == 0, "%d heads over %d kv heads", cfg.Heads, cfg.KVHeads)
	list := parameters(cfg)
	demand(len(w) == len(list), "%d tensors where the model has %d", len(w), len(list))
	for _, p := range list {
		size := 1
		for _, n := range p.shape {
			size *= n
		}
		demand(len(w[p.name]) == size, "tensor %q has %d values, its shape is %v", p.name, len(w[p.name]), p.shape)
	}
	demand(len(tokens) > 0, "an empty batch")
	for b, sequence := range tokens {
		demand(len(sequence) == cfg.Sequence+1, "sequence %d has %d tokens, not %d+1", b, len(sequence), cfg.Sequence)
		for _, token := range sequence {
			demand(token >= 0 && int(token) < cfg.Vocab, "token %d outside a vocabulary of %d", token, cfg.Vocab)
		}
	}
}

func demand(ok bool, format string, args ...any) {
	if !ok {
		panic("internal: naive: " + fmt.Sprintf(format, args...))
	}
}

// places returns the position of every row in its sequence.
func (m *model) places() []int32 {
	places := make([]int32, len(m.inputs))
	for row := range places {
		places[row] = int32(row / m.batch)
	}
	return places
}

// forward returns the loss and its gradient with respect to the last layer's output. It differentiates the head
// and the loss immediately, because nothing lies between their forward and backward passes.
func (m *model) forward() (loss float64, dx []float64) {
	x := scaled(Embed(m.w["embed"], m.inputs, m.cfg.Hidden, 0), m.cfg.EmbedScale)
	if m.cfg.Positions == "learned" {
		addTo(x, Embed(m.w["pos"], m.places(), m.cfg.Hidden, 0))
	}
	for l := range m.cfg.Layers {
		x = m.layer(l, x)
	}
	head := "head"
	if m.cfg.Tied {
		head = "embed"
	}
	rows, h, v := len(m.inputs), m.cfg.Hidden, m.cfg.Vocab
	y := scaled(m.norm(x, "ln_f"), m.cfg.LogitScale)
	logits := Softcap(MatMul(y, m.w[head], nil, rows, v, h, false, true), m.cfg.LogitSoftcap)
	losses, lse := CrossEntropy(logits, m.labels, v)
	m.losses, m.logits = losses, logits
	for row, l := range losses {
		if m.labels[row] >= 0 {
			loss += l / float64(rows)
		}
	}
	dlogits := SoftcapGrad(logits, CrossEntropyGrad(logits, m.labels, lse, v, v, 0, 1/float64(rows)), m.cfg.LogitSoftcap)
	addTo(m.grads[head], MatMul(dlogits, y, nil, v, h, rows, true, false))
	dy := MatMul(dlogits, m.w[head], nil, rows, h, v, false, false)
	return loss, m.normGrad(x, scaled(dy, m.cfg.LogitScale), "ln_f")
}

// layer computes y = x + attention(norm(x)), then y + mlp(norm(y)). Depending on NormPlace, the norms come
// before attention and the MLP, after them, or both. A layer may lack attention or the MLP.
func (m *model) layer(l int, x []float64) []float64 {
	t := &m.tapes[l]
	t.x, t.mid = x, x
	switch {
	case m.cfg.attends(l):
		m.attend(l, t)
	case m.cfg.latent(l):
		m.latentAttend(l, t)
	case m.cfg.linear(l):
		m.linearAttend(l, t)
	}
	if m.cfg.ffn(l) == 0 {
		return t.mid
	}
	return m.mlp(l, t)
}

// attend computes the middle of a layer, after attention.
func (m *model) attend(l int, t *tape) {
	in := fmt.Sprintf("layer.%d.", l)
	t.norm1 = m.normBefore(t.x, in+"ln1")
	t.rawQ = m.linear(t.norm1, in+"wq", in+"bq")
	t.rawK = m.linear(t.norm1, in+"wk", in+"bk")
	t.v = m.linear(t.norm1, in+"wv", in+"bv")
	if m.cfg.QKNorm == "rotated" {
		t.rawQ, t.rawK = m.rope(l, t.rawQ, true, Rope), m.rope(l, t.rawK, false, Rope)
	}
	t.q, t.k = m.headNorm(t.rawQ, in+"q_norm.gamma"), m.headNorm(t.rawK, in+"k_norm.gamma")
	if m.cfg.QKNorm != "rotated" {
		t.q, t.k = m.rope(l, t.q, true, Rope), m.rope(l, t.k, false, Rope)
	}
	m.attendHeads(l, t)
}

// attendHeads computes the middle of a layer from queries, before they are scaled, keys and values.
func (m *model) attendHeads(l int, t *tape) {
	in := fmt.Sprintf("layer.%d.", l)
	t.q = scaled(t.q, m.queryScale())
	t.attention, t.logSumExp = Attention(t.q, t.k, t.v, m.attentionShape(l))
	if sinks := m.w[in+"sinks"]; sinks != nil {
		t.attention, t.logSumExp = AttentionSink(t.attention, t.logSumExp, sinks, m.cfg.valueDim())
	}
	t.attended = t.attention
	if m.cfg.AttnGate {
		t.attnGate = m.linear(t.norm1, in+"wg", "")
		t.attended = GLU("sigmoid", t.attnGate, t.attention)
	}
	t.attentionOut = m.linear(t.attended, in+"wo", in+"bo")
	t.mid = add(t.x, m.normAfter(t.attentionOut, in+"ln1_post"))
}

// mlp computes the output of a layer from its middle.
func (m *model) mlp(l int, t *tape) []float64 {
	in := fmt.Sprintf("layer.%d.", l)
	t.norm2 = m.normBefore(t.mid, in+"ln2")
	if m.cfg.sparse(l) {
		t.mlpOut = m.sparse(l, t)
		return add(t.mid, m.normAfter(t.mlpOut, in+"ln2_post"))
	}
	down, downBias := in+"w2", in+"b2"
	if m.cfg.Gated {
		t.gate = m.linear(t.norm2, in+"w_gate", in+"b_gate")
		t.up = m.linear(t.norm2, in+"w_up", in+"b_up")
		t.act = GLU(m.cfg.Activation, t.gate, t.up)
		down, downBias = in+"w_down", in+"b_down"
	} else {
		t.up = m.linear(t.norm2, in+"w1", in+"b1")
		t.act = Activate(m.cfg.Activation, t.up)
	}
	t.mlpOut = m.linear(t.act, down, downBias)
	return add(t.mid, m.normAfter(t.mlpOut, in+"ln2_post"))
}

// layerGrad returns the gradient with respect to a layer's input, given the gradient with respect to its
// output.
func (m *model) layerGrad(l int, dout []float64) []float64 {
	if m.cfg.ffn(l) > 0 {
		dout = m.mlpGrad(l, dout)
	}
	switch {
	case m.cfg.attends(l):
		dout = m.attendGrad(l, dout)
	case m.cfg.latent(l):
		dout = m.latentAttendGrad(l, dout)
	case m.cfg.linear(l):
		dout = m.linearAttendGrad(l, dout)
	}
	return dout
}

func (m *model) mlpGrad(l int, dout []float64) []float64 {
	t, in := &m.tapes[l], fmt.Sprintf("layer.%d.", l)
	dmlp := m.normAfterGrad(t.mlpOut, dout, in+"ln2_post")
	var dnorm2 []float64
	switch {
	case m.cfg.sparse(l):
		dnorm2 = m.sparseGrad(l, t, dmlp)
	case m.cfg.Gated:
		dgate, dup := GLUGrad(m.cfg.Activation, t.gate, t.up, m.linearGrad(t.act, dmlp, in+"w_down", in+"b_down"))
		dnorm2 = add(m.linearGrad(t.norm2, dgate, in+"w_gate", in+"b_gate"), m.linearGrad(t.norm2, dup, in+"w_up", in+"b_up"))
	default:
		dup := ActivateGrad(m.cfg.Activation, t.up, m.linearGrad(t.act, dmlp, in+"w2", in+"b2"))
		dnorm2 = m.linearGrad(t.norm2, dup, in+"w1", in+"b1")
	}
	return add(dout, m.normBeforeGrad(t.mid, dnorm2, in+"ln2"))
}

// attendHeadsGrad returns the gradients of queries, before they are scaled, of keys and of values, and that of the norm's result through the
// gate, if there is one.
func (m *model) attendHeadsGrad(l int, dmid []float64) (dq, dk, dv, throughGate []float64) {
	t, in := &m.tapes[l], fmt.Sprintf("layer.%d.", l)
	dattention := m.linearGrad(t.attended, m.normAfterGrad(t.attentionOut, dmid, in+"ln1_post"), in+"wo", in+"bo")
	if m.cfg.AttnGate {
		var dgate []float64
		dgate, dattention = GLUGrad("sigmoid", t.attnGate, t.attention, dattention)
		throughGate = m.linearGrad(t.norm1, dgate, in+"wg", "")
	}
	dq, dk, dv = AttentionGrad(t.q, t.k, t.v, t.attention, t.logSumExp, dattention, m.attentionShape(l))
	if sinks := in + "sinks"; m.w[sinks] != nil {
		addTo(m.grads[sinks], AttentionSinkGrad(t.attention, t.logSumExp, m.w[sinks], dattention, m.cfg.valueDim()))
	}
	return scaled(dq, m.queryScale()), dk, dv, throughGate
}

func (m *model) attendGrad(l int, dmid []float64) []float64 {
	t, in := &m.tapes[l], fmt.Sprintf("layer.%d.", l)
	dq, dk, dv, throughGate := m.attendHeadsGrad(l, dmid)
	if m.cfg.QKNorm != "rotated" {
		dq, dk = m.rope(l, dq, true, RopeGrad), m.rope(l, dk, false, RopeGrad)
	}
	dq, dk = m.headNormGrad(t.rawQ, dq, in+"q_norm.gamma"), m.headNormGrad(t.rawK, dk, in+"k_norm.gamma")
	if m.cfg.QKNorm == "rotated" {
		dq, dk = m.rope(l, dq, true, RopeGrad), m.rope(l, dk, false, RopeGrad)
	}
	dnorm1 := m.linearGrad(t.norm1, dq, in+"wq", in+"bq")
	addTo(dnorm1, throughGate)
	addTo(dnorm1, m.linearGrad(t.norm1, dk, in+"wk", in+"bk"))
	addTo(dnorm1, m.linearGrad(t.norm1, dv, in+"wv", in+"bv"))
	return add(dmid, m.normBeforeGrad(t.x, dnorm1, in+"ln1"))
}

// rope applies Rope or RopeGrad to queries or keys, if the layer rotates them.
func (m *model) rope(layer int, x []float64, queries bool, rope func(x []float64, batch, heads, headDim, prefix int, r Rotation) []float64) []float64 {
	if !m.cfg.rotates(layer) {
		return x
	}
	heads := m.cfg.KVHeads
	if queries {
		heads = m.cfg.Heads
	}
	return rope(x, m.batch, heads, m.cfg.HeadDim, 0, m.cfg.layerRotation(layer, queries))
}

func (m *model) attentionShape(layer int) AttentionShape {
	s := AttentionShape{Queries: m.cfg.Sequence, Batch: m.batch,
		Heads: m.cfg.Heads, KVHeads: m.cfg.KVHeads, HeadDim: m.cfg.HeadDim, ValueDim: m.cfg.ValueHeadDim, Softcap: m.cfg.AttnSoftcap}
	if n := len(m.cfg.Windows); n > 0 {
		s.Window = m.cfg.Windows[layer%n]
	}
	return s
}

// queryScale returns the factor for queries that turns Attention's division of scores by sqrt(HeadDim) into a
// multiplication by AttnScale.
func (m *model) queryScale() float64 { return m.cfg.AttnScale * math.Sqrt(float64(m.cfg.HeadDim)) }

func scaled(x []float64, factor float64) []float64 {
	y := make([]float64, len(x))
	for i := range x {
		y[i] = factor * x[i]
	}
	return y
}

// headNorm normalises queries or keys, in rows as wide as gamma: each head by itself, or all heads of a token
// together. A model without this norm has no gamma tensor for it.
func (m *model) headNorm(x []float64, gamma string) []float64 {
	if m.cfg.QKNorm == "none" {
		return x
	}
	return RMSNorm(x, Plus(m.w[gamma], m.cfg.NormOffset), m.cfg.NormEps)
}

func (m *model) headNormGrad(x, dy []float64, gamma string) []float64 {
	if m.cfg.QKNorm == "none" {
		return dy
	}
	dx, dgamma := RMSNormGrad(x, Plus(m.w[gamma], m.cfg.NormOffset), dy, m.cfg.NormEps)
	addTo(m.grads[gamma], dgamma)
	return dx
}

func (m *model) normBefore(x []float64, name string) []float64 {
	if !m.cfg.normsBefore() {
		return x
	}
	return m.norm(x, name)
}

func (m *model) normBeforeGrad(x, dy []float64, name string) []float64 {
	if !m.cfg.normsBefore() {
		return dy
	}
	return m.normGrad(x, dy, name)
}

func (m *model) normAfter(x []float64, name string) []float64 {
	if !m.cfg.normsAfter() {
		return x
	}
	return m.norm(x, name)
}

func (m *model) normAfterGrad(x, dy []float64, name string) []float64 {
	if !m.cfg.normsAfter() {
		return dy
	}
	return m.normGrad(x, dy, name)
}

func (m *model) norm(x []float64, name string) []float64 {
	gamma := Plus(m.w[name+".gamma"], m.cfg.NormOffset)
	if m.cfg.Norm == "rmsnorm" {
		return RMSNorm(x, gamma, m.cfg.NormEps)
	}
	return LayerNorm(x, gamma, m.w[name+".beta"], m.cfg.NormEps)
}

func (m *model) normGrad(x, dy []float64, name string) []float64 {
	gamma := Plus(m.w[name+".gamma"], m.cfg.NormOffset)
	if m.cfg.Norm == "rmsnorm" {
		dx, dgamma := RMSNormGrad(x, gamma, dy, m.cfg.NormEps)
		addTo(m.grads[name+".gamma"], dgamma)
		return dx
	}
	dx, dgamma, dbeta := LayerNormGrad(x, gamma, dy, m.cfg.NormEps)
	addTo(m.grads[name+".gamma"], dgamma)
	addTo(m.grads[name+".beta"], dbeta)
	return dx
}

// linear computes x*W + b, and adds the output of the weight's adapter, if any. For a weight without bias,
// m.w[bias] is nil, which MatMul treats as no bias.
func (m *model) linear(x []float64, weight, bias string) []float64 {
	rows := len(m.inputs)
	in := len(x) / rows
	out := len(m.w[weight]) / in
	y := MatMul(x, m.w[weight], m.w[bias], rows, out, in, false, false)
	if a, b, ok := m.adapter(weight); ok {
		low := MatMul(m.dropped(x, in, a), m.w[a], nil, rows, m.cfg.AdapterRank, in, false, false)
		addTo(y, scaled(MatMul(low, m.w[b], nil, rows, out, m.cfg.AdapterRank, false, false), m.adapterScale()))
	}
	return y
}

func (m *model) linearGrad(x, dy []float64, weight, bias string) []float64 {
	rows := len(m.inputs)
	in, out := len(x)/rows, len(dy)/rows
	addTo(m.grads[weight], MatMul(x, dy, nil, in, out, rows, true, false))
	if m.w[bias] != nil {
		addTo(m.grads[bias], columnSums(dy, out))
	}
	dx := MatMul(dy, m.w[weight], nil, rows, in, out, false, true)
	if a, b, ok := m.adapter(weight); ok {
		rank := m.cfg.AdapterRank
		kept := m.dropped(x, in, a)
		low := MatMul(kept, m.w[a], nil, rows, rank, in, false, false)
		addTo(m.grads[b], scaled(MatMul(low, dy, nil, rank, out, rows, true, false), m.adapterScale()))
		dlow := scaled(MatMul(dy, m.w[b], nil, rows, rank, out, false, true), m.adapterScale())
		addTo(m.grads[a], MatMul(kept, dlow, nil, in, rank, rows, true, false))
		addTo(dx, m.dropped(MatMul(dlow, m.w[a], nil, rows, in, rank, false, true), in, a))
	}
	return dx
}

// dropped applies dropout to the input of an adapter's first matrix, or to the gradient of that input.
func (m *model) dropped(x []float64, cols int, a string) []float64 {
	if m.cfg.AdapterDropout == 0 || m.cfg.Step == 0 {
		return x
	}
	key := DropoutKey(m.cfg.Seed, m.cfg.Step, a)
	return Dropout(x, cols, 0, m.cfg.AdapterDropout, key, func(row int) (sequence, position int) { return row % m.batch, row / m.batch })
}

func add(a, b []float64) []float64 {
	sum := make([]float64, len(a))
	for i := range a {
		sum[i] = a[i] + b[i]
	}
	return sum
}

func addTo(to, from []float64) {
	for i := range from {
		to[i] += from[i]
	}
}

// columnSums returns the sum of each column of a matrix.
func columnSums(x []float64, width int) []float64 {
	sums := make([]float64, width)
	for i, value := range x {
		sums[i%width] += value
	}
	return sums
}
