package lang

import (
	"fmt"
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

// expertKeys lists the keys that only models with experts have.
var expertKeys = []string{
	"num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_expert_gate", "moe_latent_size", "mlp_layer_types", "first_k_dense_replace",
	"decoder_sparse_step", "mlp_only_layers", "scoring_func", "norm_topk_prob", "routed_scaling_factor", "e_score_correction_bias", "n_group", "topk_group", "router_z_loss_coef", "aux_loss", "router_aux_loss_coef",
}

// expertProblems lists the errors in the keys of experts.
func (m *Model) expertProblems(fail func(keys string, code Code, hint, format string, args ...any)) {
	const few = "num_experts = 8, for example"
	if m.Experts == 0 {
		if m.sparseLayers() > 0 || m.SharedFFN > 0 || m.LatentSize > 0 || m.HasBias(BiasExperts) || m.HasBias(BiasRouter) {
			fail("model.mlp_layer_types model.shared_expert_intermediate_size model.bias", Conflict, few, "layers without experts cannot be sparse, nor have a shared expert, latent rows, a router or biases of experts")
		}
		return
	}
	if m.TopExperts < 1 || m.ExpertFFN < 1 {
		fail("model.num_experts", Conflict, "num_experts_per_tok = 2 and moe_intermediate_size = 768, for example", "experts need num_experts_per_tok and moe_intermediate_size")
		return
	}
	if m.TopExperts > m.Experts {
		fail("model.num_experts_per_tok model.num_experts", OutOfRange, fmt.Sprintf("at most %d", m.Experts), "a token cannot use %d of %d experts", m.TopExperts, m.Experts)
	}
	if m.sparseLayers() == 0 {
		fail("model.mlp_layer_types model.first_k_dense_replace model.mlp_only_layers model.decoder_sparse_step model.num_experts", Conflict, "num_experts = 0", "no layer has experts")
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

func (m *Model) groupProblems(fail func(keys string, code Code, hint, format string, args ...any)) {
	groups, top := m.ExpertGroups, m.TopGroups
	switch {
	case groups == 0 && top == 0:
	case groups < 1 || m.Experts%groups != 0 || m.Experts/groups < 2:
		several := func(n int) bool { return m.Experts/n >= 2 }
		fail("model.n_group model.topk_group", Indivisible, fmt.Sprintf("n_group = %s", nearDivisorsWith(m.Experts, groups, several)), "%d experts are not in %d groups of two or more", m.Experts, groups)
	case top < 1 || top > groups:
		fail("model.topk_group model.n_group", OutOfRange, fmt.Sprintf("topk_group = 1 to %d", groups), "a token cannot use experts of %d of %d groups", top, groups)
	case m.TopExperts > top*(m.Experts/groups) && m.TopExperts <= m.Experts:
		fail("model.topk_group model.n_group", Conflict, "a larger topk_group", "a token uses %d experts, but %d groups have only %d", m.TopExperts, top, top*(m.Experts/groups))
	}
}
