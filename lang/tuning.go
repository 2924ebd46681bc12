package lang

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
)

// AdapterLoRA is the name of the only kind of adapter (Hu et al. 2021).
const AdapterLoRA = "lora"

// AllLinear is the target that stands for all linear maps of the layers.
const AllLinear = "all-linear"

// TensorGroups are the groups of tensors that a spec can name, as in freeze. Every tensor of a model is in one
// of them, except the tensors of adapters.
var TensorGroups = []string{GroupEmbeddings, GroupAttention, GroupMLP, GroupNorms, GroupBiases, GroupHead}

// Groups of tensors.
const (
	GroupEmbeddings = "embeddings" // tables of tokens and positions, including a tied table
	GroupAttention  = "attention"  // matrices of attention
	GroupMLP        = "mlp"        // matrices of the MLP
	GroupNorms      = "norms"      // weights and biases of norms
	GroupBiases     = "biases"     // biases of linear maps
	GroupHead       = "head"       // the output projection, if it is not tied
)

// Groups is a set of TensorGroups.
type Groups uint8

func groupsOf(name string) Groups { return 1 << slices.Index(TensorGroups, name) }

// Has reports whether the set contains a group.
func (g Groups) Has(name string) bool { return g&groupsOf(name) != 0 }

// MarshalJSON writes the names of the groups.
func (g Groups) MarshalJSON() ([]byte, error) {
	has := []string{}
	for _, name := range TensorGroups {
		if g.Has(name) {
			has = append(has, name)
		}
	}
	return json.Marshal(has)
}

// UnmarshalJSON reads the format that MarshalJSON writes.
func (g *Groups) UnmarshalJSON(text []byte) error {
	var has []string
	if err := json.Unmarshal(text, &has); err != nil {
		return err
	}
	*g = 0
	for _, name := range has {
		if !slices.Contains(TensorGroups, name) {
			return fmt.Errorf("%q is not a group of tensors: %s", name, strings.Join(TensorGroups, ", "))
		}
		*g |= groupsOf(name)
	}
	return nil
}

// Base returns the model without its adapters.
func (m Model) Base() Model {
	m.Adapter, m.AdapterRank, m.AdapterAlpha, m.AdapterDropout, m.AdapterTargets = "", 0, 0, 0, nil
	return m
}

// Adapted returns the model with low-rank adapters of some linear maps, which are named as in train.adapter.targets.
func (m Model) Adapted(rank int, alpha float64, targets ...string) Model {
	m.Adapter, m.AdapterRank, m.AdapterAlpha = AdapterLoRA, rank, alpha
	m.AdapterTargets = m.resolve(targets)
	return m
}

// LinearMap is a linear map of a layer: its name in PEFT, and its matrices in this compiler. There are several
// matrices if published models store them as one; these matrices then share the adapter's A.
type LinearMap struct {
	Name    string
	Weights []string
}

// Tensor returns the name that the adapter's A for the map has within a layer, without its suffix.
func (l *LinearMap) Tensor() string {
	if len(l.Weights) == 1 {
		return l.Weights[0]
	}
	return fusedTensors[l.Name]
}

var fusedTensors = map[string]string{"q_proj": "wqg", "qkv_proj": "wqkv", "gate_up_proj": "w_gate_up",
	"in_proj_qkvz": "linear.wqkvz", "in_proj_ba": "linear.wba", "in_proj_qkv": "linear.wqkv", "in_proj": "linear.w_in",
	"kv_a_proj_with_mqa": "wkv_a", "kv_b_proj": "wkv_b"}

// linearTargets maps the targets of linear attention to the names of its matrices, as Qwen3-Next, Qwen3.5 and Nemotron-H fuse them.
var linearTargets = map[string]string{
	"in_proj_qkvz": "q k v z", "in_proj_ba": "b a", "in_proj_qkv": "q k v", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a",
	"in_proj": "z v k q a", "out_proj": "o",
}

// kimiTargets maps the targets of Kimi delta attention to its matrices. Other attention in the same model has some of the same targets.
var kimiTargets = map[string]string{"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "b_proj": "wb", "f_a_proj": "wa_low", "f_b_proj": "wa", "g_a_proj": "wz_low", "g_b_proj": "wz", "o_proj": "wo"}

// linearWeights returns the matrices of a target in linear attention, except in Kimi delta attention. The first maps of Mamba-2 are one map, those of the gated delta rule
// are several.
func (m *Model) linearWeights(target string) (weights []string) {
	delta, mamba := slices.Contains(m.Mixers, MixerGatedDelta), slices.Contains(m.Mixers, MixerMamba2)
	if own := target == "in_proj"; slices.Contains(m.Mixers, MixerKimiDelta) || !delta && !mamba || target != "out_proj" && own == delta {
		return nil
	}
	for _, name := range strings.Fields(linearTargets[target]) {
		weights = append(weights, "linear.w"+name)
	}
	return weights
}

// targetNames lists all targets in the order in which a layer applies them, followed by the names in GPT-2.
var targetNames = []string{
	"q_proj", "q_a_proj", "q_b_proj", "k_proj", "v_proj", "qkv_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
	"in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj", "out_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "c_attn", "c_fc", "c_proj",
}

// gpt2Targets maps the names in GPT-2 to targets. In GPT-2, c_proj is the name of two linear maps.
var gpt2Targets = map[string][]string{"c_attn": {"qkv_proj"}, "c_fc": {"up_proj"}, "c_proj": {"o_proj", "down_proj"}}

// mapsOf returns the linear maps of a target in a model: none if the model does not have it, two if Kimi delta attention and other attention
// have it.
func (m *Model) mapsOf(target string) (maps []LinearMap) {
	if weights := m.weightsOf(target); weights != nil {
		maps = append(maps, LinearMap{target, weights})
	}
	if name := kimiTargets[target]; name != "" && slices.Contains(m.Mixers, MixerKimiDelta) {
		maps = append(maps, LinearMap{target, []string{"linear." + name}})
	}
	return maps
}

// weightsOf returns the matrices of a target in a model, except in Kimi delta attention, or nil if the model has no others.
func (m *Model) weightsOf(target string) []string {
	up, down := "w1", "w2"
	if m.Gated {
		up, down = "w_up", "w_down"
	}
	if linearTargets[target] != "" {
		return m.linearWeights(target)
	}
	if weights, ofLatent := m.latentWeightsOf(target); ofLatent {
		return weights
	}
	switch target {
	case "q_proj":
		if m.AttnGate {
			return []string{"wq", "wg"} // one matrix in published models
		}
		return []string{"wq"}
	case "k_proj", "v_proj", "o_proj":
		return []string{"w" + target[:1]}
	case "qkv_proj":
		return []string{"wq", "wk", "wv"}
	case "up_proj":
		return []string{up}
	case "down_proj":
		return []string{down}
	}
	if !m.Gated {
		return nil
	}
	return map[string][]string{"gate_proj": {"w_gate"}, "gate_up_proj": {"w_gate", up}}[target]
}

// latentWeightsOf returns the matrices of a target of attention in a model with latent attention. ofLatent is false for other targets, and in
// other models.
func (m *Model) latentWeightsOf(target string) (weights []string, ofLatent bool) {
	own := map[string][]string{"q_a_proj": {"wq_a"}, "q_b_proj": {"wq"}, "kv_a_proj_with_mqa": {"wkv", "wk_rope"}, "kv_b_proj": {"wk", "wv"}}
	if !m.latents() {
		return nil, own[target] != nil
	}
	switch target {
	case "q_a_proj", "q_b_proj":
		if m.QLatent == 0 {
			return nil, true
		}
	case "q_proj":
		return nil, m.QLatent > 0
	case "k_proj", "v_proj", "qkv_proj":
		return nil, true
	}
	return own[target], own[target] != nil
}

// allLinear returns the targets that AllLinear stands for: the linear maps as published models of the family
// store them.
func (m *Model) allLinear() []string {
	targets := []string{"q_proj", "q_a_proj", "q_b_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
	switch m.Family {
	case "phi3":
		targets = []string{"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
	case "gpt", "gpt2":
		targets = []string{"qkv_proj", "o_proj", "up_proj", "down_proj"}
	}
	if m.Family == "qwen3_next" {
		targets = append(targets, "in_proj_qkvz", "in_proj_ba")
	} else {
		targets = append(targets, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
	}
	targets = append(targets, "in_proj", "out_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj")
	return slices.DeleteFunc(targets, func(t string) bool { return m.mapsOf(t) == nil })
}

// Maps returns the linear maps of a layer that have adapters, in the order in which the layer applies them.
func (m *Model) Maps() (maps []LinearMap) {
	for _, name := range m.AdapterTargets {
		maps = append(maps, m.mapsOf(name)...)
	}
	return maps
}

// resolve expands the targets of a spec into linear maps, in the order in which a layer applies them.
func (m *Model) resolve(written []string) (targets []string) {
	var asked []string
	for _, name := range written {
		switch {
		case name == AllLinear:
			asked = append(asked, m.allLinear()...)
		case gpt2Targets[name] != nil:
			asked = append(asked, gpt2Targets[name]...)
		default:
			asked = append(asked, name)
		}
	}
	for _, name := range targetNames {
		if m.mapsOf(name) != nil && slices.Contains(asked, name) {
			targets = append(targets, name)
		}
	}
	return targets
}

// Freezes reports whether a run does not train a tensor of the model itself. With adapters, a run trains no
// such tensor.
func Freezes(m *Model, freeze []string, tensor, group string) bool {
	return m.Adapter != "" || slices.ContainsFunc(freeze, func(pattern string) bool { return freezes(pattern, tensor, group) })
}

// freezes reports whether a group or a pattern matches a tensor.
func freezes(pattern, tensor, group string) bool {
	if slices.Contains(TensorGroups, pattern) {
		return pattern == group
	}
	first, last, rest, ok := layerRange(pattern)
	if !ok {
		matches, err := path.Match(pattern, tensor)
		return err == nil && matches
	}
	parts := strings.SplitN(tensor, ".", 3)
	if len(parts) < 3 || parts[0] != "layer" {
		return false
	}
	layer, err := strconv.Atoi(parts[1])
	if err != nil || layer < first || layer > last {
		return false
	}
	matches, err := path.Match(rest, parts[2])
	return err == nil && matches
}

// layerRange parses a pattern that names one layer or a range: layer.3.wq, layer.0-15.*, or layer.0-15 for
// entire layers.
func layerRange(pattern string) (first, last int, rest string, ok bool) {
	parts := strings.SplitN(pattern, ".", 3)
	if len(parts) < 2 || parts[0] != "layer" {
		return 0, 0, "", false
	}
	from, to, several := strings.Cut(parts[1], "-")
	if !several {
		to = from
	}
	first, err := strconv.Atoi(from)
	if err != nil {
		return 0, 0, "", false
	}
	if last, err = strconv.Atoi(to); err != nil {
		return 0, 0, "", false
	}
	if rest = "*"; len(parts) == 3 {
		rest = parts[2]
	}
	return first, last, rest, true
}

func setFreeze(s *Spec, v value) {
	s.Train.Freeze = nil
	for _, item := range v.list {
		s.Train.Freeze = append(s.Train.Freeze, item.name+item.text)
	}
}

func setTargets(s *Spec, v value) {
	s.Model.AdapterTargets = nil
	if v.kind != isList {
		s.Model.AdapterTargets = []string{v.name}
	}
	for _, item := range v.list {
		s.Model.AdapterTargets = append(s.Model.AdapterTargets, item.name)
	}
}

// tuning checks the keys that restrict training to part of a model, and resolves the targets of adapters.
func (c *checker) tuning() {
	m := &c.Model
	for i, pattern := range c.Train.Freeze {
		if _, err := path.Match(pattern, ""); err != nil {
			c.fail(fmt.Sprintf("train.freeze[%d]", i), BadArgument, `write a name with * for any characters, as in "layer.0-15.*"`,
				"%q is not a pattern of names", pattern)
		}
	}
	if c.Train.BiasRate > 0 && !m.Correction {
		c.fail("train.moe_router_bias_update_rate", Conflict, "model.e_score_correction_bias = true, or omit it", "nothing is added to the scores of experts that steps could change")
	}
	if m.Adapter == "" {
		return
	}
	if c.Train.BiasRate > 0 {
		c.fail("train.moe_router_bias_update_rate", Conflict, "omit it", "with an adapter, all tensors of the model are frozen, and experts are chosen as before")
	}
	if len(c.Train.Freeze) > 0 {
		c.fail("train.freeze", Conflict, "omit freeze", "with an adapter, all tensors of the model are already frozen")
	}
	for i, name := range m.AdapterTargets {
		if name != AllLinear && gpt2Targets[name] == nil && m.mapsOf(name) == nil {
			c.fail(c.culprit(fmt.Sprintf("train.adapter.targets[%d]", i), "train.adapter.targets"), Conflict,
				"it has "+strings.Join(m.allLinear(), ", "), "the model has no %s", name)
		}
	}
	m.AdapterTargets = m.resolve(m.AdapterTargets)
	of := map[string]string{}
	for _, l := range m.Maps() {
		for _, w := range l.Weights {
			if other := of[w]; other != "" {
				c.fail("train.adapter.targets", Conflict, "keep one of the two", "targets %s and %s both contain %s", other, l.Name, w)
				return
			}
			of[w] = l.Name
		}
	}
}
