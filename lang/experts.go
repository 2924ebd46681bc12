package lang

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Values of mlp_layer_types.
const (
	mlpDense  = "dense"
	mlpSparse = "sparse"
)

var mlpTypes = []string{mlpDense, mlpSparse}

// Values of scoring_func.
const (
	ScoringSoftmax = "softmax"
	ScoringSigmoid = "sigmoid"
	ScoringTop     = "softmax_topk" // softmax over the logits of the chosen experts
)

var scorings = []string{ScoringSoftmax, ScoringSigmoid, ScoringTop}

// Values of topk_method.
const (
	groupsByTwo  = "noaux_tc"
	GroupLimited = "group_limited_greedy" // the score of a group is that of its best expert
)

var topMethods = []string{groupsByTwo, GroupLimited}

// Values of aux_loss.
const (
	AuxLayer = "layer"
	AuxJoint = "joint"
)

var auxLosses = []string{AuxLayer, AuxJoint}

// setAuxLoss runs after router_aux_loss_coef, without which there is no such loss.
func (m *Model) setAuxLoss(name string) {
	if m.RouterAuxLoss > 0 {
		m.AuxLoss = name
	}
}

// ifExperts returns a value if the model has experts, otherwise the zero value.
func ifExperts[T any](s *Spec, v T) (out T) {
	if s.Model.Experts > 0 {
		out = v
	}
	return out
}

// sparse reports whether the MLP of a layer, if it has one, has experts.
func (m *Model) sparse(layer int) bool {
	if n := len(m.MLPs); n > 0 {
		return m.MLPs[layer%n] == mlpSparse
	}
	return m.Experts > 0
}

// sparseLayers returns the number of layers that have experts.
func (m *Model) sparseLayers() (n int) {
	for layer := range m.Layers {
		if m.FormOf(layer).Experts > 0 {
			n++
		}
	}
	return n
}

func setMLPTypes(s *Spec, v value) {
	s.Model.MLPs = nil
	for _, item := range v.items() {
		s.Model.MLPs = append(s.Model.MLPs, item.name)
	}
	s.Model.makeDense(func(int) bool { return false })
}

func setMLPOnly(s *Spec, v value) {
	s.Model.makeDense(func(layer int) bool {
		return slices.ContainsFunc(v.list, func(item value) bool { return item.Int() == layer })
	})
}

// makeDense removes the experts of layers, and reduces MLPs to the shortest equivalent list.
func (m *Model) makeDense(dense func(layer int) bool) {
	types := make([]string, m.Layers)
	for layer := range types {
		types[layer] = mlpDense
		if m.sparse(layer) && !dense(layer) {
			types[layer] = mlpSparse
		}
	}
	if m.MLPs = shortest(types, m.Layers); len(m.MLPs) == 1 && (m.MLPs[0] == mlpSparse) == (m.Experts > 0) {
		m.MLPs = nil
	}
}

// setTopGroups runs after n_group, of which a single group is none.
func setTopGroups(s *Spec, v value) {
	if s.Model.TopGroups = v.Int(); s.Model.ExpertGroups <= 1 && s.Model.TopGroups <= 1 {
		s.Model.ExpertGroups, s.Model.TopGroups = 0, 0
	}
}

// setTopMethod leaves the field empty for the method that models without the key have.
func (m *Model) setTopMethod(name string) {
	if m.TopMethod = name; name == groupsByTwo {
		m.TopMethod = ""
	}
}

// expertKeys lists the keys that only models with experts have.
var expertKeys = []string{
	"num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_expert_gate", "moe_latent_size", "mlp_layer_types", "first_k_dense_replace",
	"decoder_sparse_step", "mlp_only_layers", "scoring_func", "norm_topk_prob", "routed_scaling_factor", "e_score_correction_bias", "n_group", "topk_group", "topk_method", "router_z_loss_coef", "aux_loss", "router_aux_loss_coef",
}

// expertProblems lists the errors in the keys of experts. The values that hints name are accepted.
func (m *Model) expertProblems(fail func(keys string, code Code, hint, format string, args ...any)) {
	if m.Experts == 0 {
		if m.sparseLayers() > 0 || m.SharedFFN > 0 || m.LatentSize > 0 || m.HasBias(BiasExperts) || m.HasBias(BiasRouter) {
			fail("model.mlp_layer_types model.shared_expert_intermediate_size model.bias", Conflict, m.firstExperts(), "layers without experts cannot be sparse, nor have a shared expert, latent rows, a router or biases of experts")
		}
		return
	}
	if m.TopExperts < 1 || m.ExpertFFN < 1 {
		fail("model.num_experts", Conflict, m.firstExperts(), "experts need num_experts_per_tok and moe_intermediate_size")
	}
	if m.TopExperts > m.Experts {
		fail("model.num_experts_per_tok model.num_experts", OutOfRange, "num_experts_per_tok = "+upTo(1, m.mostExperts()), "a token cannot use %d of %d experts", m.TopExperts, m.Experts)
	}
	if m.sparseLayers() == 0 {
		fail("model.mlp_layer_types model.first_k_dense_replace model.mlp_only_layers model.decoder_sparse_step model.num_experts", Conflict,
			"mlp_layer_types, first_k_dense_replace, mlp_only_layers and decoder_sparse_step make layers dense; without these keys, all have experts", "no layer has experts")
	}
	if !slices.Contains(scorings, m.Scoring) {
		fail("model.scoring_func", UnknownName, strings.Join(scorings, " or "), "scoring_func cannot be %q", m.Scoring)
	}
	if m.SharedGate && m.SharedFFN == 0 {
		fail("model.shared_expert_gate", Conflict, "shared_expert_intermediate_size = 512, for example", "there is no shared expert that a gate could multiply")
	}
	if m.LatentSize > 0 && m.HasBias(BiasExperts) {
		fail("model.moe_latent_size model.bias", Conflict, "moe_latent_size = 0", "biases of experts with latent rows are not supported")
	}
	m.groupProblems(fail)
}

// firstExperts returns values for those of the three keys that experts need that are not set.
func (m *Model) firstExperts() string {
	var out []string
	if m.Experts == 0 {
		out = append(out, fmt.Sprintf("num_experts = %d", max(8, m.TopExperts)))
	}
	if m.TopExperts < 1 {
		out = append(out, fmt.Sprintf("num_experts_per_tok = %d", min(2, max(m.mostExperts(), 1))))
	}
	if m.ExpertFFN < 1 {
		out = append(out, "moe_intermediate_size = 768")
	}
	return strings.Join(out, ", ") + ", for example"
}

// mostExperts returns the number of experts that a token can use at most: those of its groups, if these are right.
func (m *Model) mostExperts() int {
	if m.Experts == 0 {
		return math.MaxInt
	}
	if n, top := m.ExpertGroups, m.TopGroups; m.divides(n) && top >= 1 && top <= n {
		return top * (m.Experts / n)
	}
	return m.Experts
}

// divides reports whether experts can be in n groups. Where two scores decide, a group has two experts or more.
func (m *Model) divides(n int) bool {
	if m.TopMethod == GroupLimited {
		return n > 1 && m.Experts%n == 0
	}
	return n >= 1 && m.Experts%n == 0 && m.Experts/n >= 2
}

// fewestGroups returns the number of groups that have enough experts for a token if there are n. Where a token uses more
// experts than there are, another error says so.
func (m *Model) fewestGroups(n int) int {
	size := m.Experts / n
	return max(1, (min(m.TopExperts, m.Experts)+size-1)/size)
}

func (m *Model) groupProblems(fail func(keys string, code Code, hint, format string, args ...any)) {
	groups, top, limited := m.ExpertGroups, m.TopGroups, m.TopMethod == GroupLimited
	if limited && m.Correction {
		fail("model.topk_method model.e_score_correction_bias", Conflict, "e_score_correction_bias = false", "topk_method = %s has no correction bias", m.TopMethod)
	}
	switch {
	case m.TopMethod != "" && !limited:
		fail("model.topk_method", UnknownName, strings.Join(topMethods, " or "), "topk_method cannot be %q", m.TopMethod)
	case limited && groups <= 1:
		fail("model.topk_method model.n_group", Conflict, m.nearGroups(), "topk_method = %s needs groups of experts", m.TopMethod)
	case groups == 0 && top == 0:
	case !m.divides(groups):
		fail("model.n_group model.topk_group", Indivisible, m.nearGroups(), "%d experts are not in %d groups%s", m.Experts, groups, map[bool]string{false: " of two or more"}[limited])
	case top < 1 || top > groups:
		fail("model.topk_group model.n_group", OutOfRange, "topk_group = "+upTo(m.fewestGroups(groups), groups), "a token cannot use experts of %d of %d groups", top, groups)
	case m.TopExperts > top*(m.Experts/groups) && m.TopExperts <= m.Experts:
		fail("model.topk_group model.n_group", Conflict, "topk_group = "+upTo(m.fewestGroups(groups), groups), "a token uses %d experts, but topk_group = %d has only %d", m.TopExperts, top, top*(m.Experts/groups))
	}
}

// nearGroups returns numbers of groups, if possible such that topk_group stays as it is.
func (m *Model) nearGroups() string {
	kept := func(n int) bool { return m.divides(n) && m.TopGroups >= m.fewestGroups(n) && m.TopGroups <= n }
	if near := nearDivisorsWith(m.Experts, m.ExpertGroups, kept); near != "" {
		return "n_group = " + near
	}
	n, step := min(m.ExpertGroups, m.Experts), -1
	if m.TopMethod == GroupLimited {
		n, step = 2, 1
	}
	for ; n > 1 && n <= m.Experts; n += step {
		if m.divides(n) {
			return fmt.Sprintf("n_group = %d and topk_group = %s", n, upTo(m.fewestGroups(n), n))
		}
	}
	if m.TopMethod == GroupLimited {
		return "topk_method = noaux_tc, n_group = 0 and topk_group = 0"
	}
	return "n_group = 0 and topk_group = 0"
}

// upTo returns a range of numbers in words.
func upTo(first, last int) string {
	if first == last {
		return fmt.Sprint(first)
	}
	return fmt.Sprintf("%d to %d", first, last)
}
