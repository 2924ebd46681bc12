package lang

import (
	"fmt"
	"strings"
	"testing"
)

// TestForms checks that ffn and layer_types give every layer its mixer and its MLP, are reduced to the shortest
// equivalent lists, and that models without attention, or with empty layers, are refused.
func TestForms(t *testing.T) {
	for set, want := range map[string]string{
		"model.ffn=64":                               "[{attention 64 0} {attention 64 0} {attention 64 0} {attention 64 0}] []: 64 [] []",
		"model.ffn=[64,64]":                          "[{attention 64 0} {attention 64 0} {attention 64 0} {attention 64 0}] []: 64 [] []",
		"model.ffn=[32,64,32]":                       "[{attention 32 0} {attention 64 0} {attention 32 0} {attention 32 0}] []: 64 [32 64 32] []",
		"model.ffn=[64,0]":                           "[{attention 64 0} {attention 0 0} {attention 64 0} {attention 0 0}] []: 64 [64 0] []",
		"model.ffn=64 model.layer_types=[none,full]": "[{none 64 0} {attention 64 0} {none 64 0} {attention 64 0}] []: 64 [] [none attention]",
		"model.ffn=64 model.layer_types=[full,full]": "[{attention 64 0} {attention 64 0} {attention 64 0} {attention 64 0}] []: 64 [] []",
		"model.ffn=64 model.window=16 model.layer_types=[sliding,none]":                                                "[{attention 64 0} {none 64 0} {attention 64 0} {none 64 0}] [16 0]: 64 [] [attention none]",
		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 model.first_k_dense_replace=1": "[{attention 256 0} {attention 16 8} {attention 16 8} {attention 16 8}] []: 256 [] []",
		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 model.decoder_sparse_step=2":   "[{attention 256 0} {attention 16 8} {attention 256 0} {attention 16 8}] []: 256 [] []",
		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 model.mlp_layer_types=sparse":  "[{attention 16 8} {attention 16 8} {attention 16 8} {attention 16 8}] []: 256 [] []",
		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 model.mlp_only_layers=[0,3]":   "[{attention 256 0} {attention 16 8} {attention 16 8} {attention 256 0}] []: 256 [] []",
		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 model.mlp_layer_types=dense":   "no layer has experts",
		"model.num_experts=8":                         "experts need num_experts_per_tok",
		"model.num_experts_per_tok=2":                 "num_experts_per_tok has no effect without experts",
		"model.num_experts_per_tok=2 model.n_group=1": "num_experts_per_tok, n_group have no effect without experts",
		"model.mlp_layer_types=sparse":                "without experts",
		"model.num_experts=2 model.num_experts_per_tok=3 model.moe_intermediate_size=16":                                    "a token cannot use 3 of 2 experts",
		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 model.n_group=3":                    "8 experts are not in 3 groups",
		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 model.n_group=4":                    "experts of 0 of 4 groups",
		"model.num_experts=8 model.num_experts_per_tok=3 model.moe_intermediate_size=16 model.n_group=4 model.topk_group=1": "topk_group = 1 has only 2",
		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 model.shared_expert_gate=true":      "there is no shared expert",
		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 train.optimizer=muon()":             "muon does not update",
		"model.ffn=0":            "must be from 1",
		"model.ffn=[0,0]":        "no layer has an MLP",
		"model.layer_types=none": "no layer has attention",
		"model.ffn=[64,0] model.layer_types=[full,none]": "layer 1 has neither attention nor an MLP",
		"model.layer_types=[sliding,none]":               "sliding layers need a window",

		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 model.n_group=8 model.topk_group=4":                                                                           "8 experts are not in 8 groups of two or more",
		"model.num_experts=8 model.num_experts_per_tok=5 model.moe_intermediate_size=16 model.n_group=8 model.topk_group=4 model.topk_method=group_limited_greedy":                                    "hint: topk_group = 5 to 8",
		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 model.n_group=8 model.topk_group=4 model.topk_method=group_limited_greedy":                                    "[{attention 16 8} {attention 16 8} {attention 16 8} {attention 16 8}] []: 256 [] []",
		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 model.n_group=3 model.topk_group=2 model.topk_method=group_limited_greedy":                                    "8 experts are not in 3 groups [",
		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 model.topk_method=group_limited_greedy":                                                                       "topk_method = group_limited_greedy needs groups of experts",
		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 model.n_group=1 model.topk_group=1 model.topk_method=group_limited_greedy":                                    "topk_method = group_limited_greedy needs groups of experts",
		"model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=16 model.n_group=4 model.topk_group=2 model.topk_method=group_limited_greedy model.e_score_correction_bias=true": "topk_method = group_limited_greedy has no correction bias",
		"model.topk_method=noaux_tc": "topk_method has no effect without experts",
	} {
		s, err := Parse("forms.sppo", []byte(exampleBase), Options{ReadFile: base, Shipped: shipped, Set: strings.Fields(set + " model.layers=4")})
		got := fmt.Sprint(err)
		if err == nil {
			var forms []Form
			for layer := range s.Model.Layers {
				forms = append(forms, s.Model.FormOf(layer))
			}
			got = fmt.Sprintf("%v %v: %d %v %v", forms, s.Model.Windows, s.Model.FFN, s.Model.FFNs, s.Model.Mixers)
		}
		if err == nil && got != want || !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %s", set, got, want)
		}
	}
}
