package hf

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"sppo.dev/ir"
)

// naming maps our tensors to those of an architecture: from our name, without a layer number, to the place in the
// architecture's tensors.
type naming struct {
	tensors map[string]place
	prefix  string   // prefix of all names except the head's; some folders omit it
	other   string   // instead of prefix, in some folders and in the memory of transformers
	ignored []string // suffixes of buffers in older files, which are not needed

	neighbours bool             // rotated pairs are neighbours: see pairing
	further    bool             // folders may have further layers, for multi-token prediction
	others     string           // prefix of further tensors that folders may have, for multi-token prediction; empty: none
	fused      map[string]place // instead, where all matrices of a layer's experts are one tensor
	packed     map[string]place // instead, where these are in MXFP4
	saved      map[string]place // instead, where transformers has written the folder
}

// how is the way in which a tensor is stored.
type how int

const (
	same            how = iota
	transposed          // as in nn.Linear: [out, in], where ours is [in, out]
	alternating         // its columns alternate with those of another of our tensors, which it follows if it is the second
	alternatingRows     // the same, transposed
	stacked             // as in nn.Conv1d with a group for each row: [rows, 1, columns]. In a fused tensor, rows follow those of others
	inner               // a vector as [1, 1, elements, 1]
)

// place is where one of our tensors is stored. In a fused tensor, it follows the tensors
// that the field `after` lists. The matrices of experts, which are one tensor of ours, are stored apart, or in a tensor
// of three dimensions with the number of the expert as the first.
type place struct {
	name  string // * stands for the number of a layer, # for the number of an expert
	how   how
	after []string // our tensors that precede it, in the same layer
	heads string   // the key with a number of heads, if each head of a fused tensor has a part of each of ours; empty: no
	// An export in bf16 or f16 leaves it in f32, if the folder has it so: transformers keeps it in f32 (_keep_in_fp32_modules_strict), or
	// published folders have it in f32 where other weights are bf16.
	f32 bool
}

const layerMark, expertMark = "*", "#"

// packedSuffix follows the name of a matrix in MXFP4 in that of its values.
const packedSuffix = "_blocks"

func linear(name string, after ...string) place {
	return place{name: name, how: transposed, after: after}
}
func plain(name string, after ...string) place { return place{name: name, after: after} }

// inF32 returns the place of a tensor that stays in f32.
func (p place) inF32() place {
	p.f32 = true
	return p
}

// ofHeads returns the place of a tensor in a fused one, of which each of some heads has a part.
func ofHeads(heads, name string, after ...string) place {
	return place{name: name, how: transposed, after: after, heads: heads}
}

// merged merges tables of places. Later tables override earlier ones, and a place without a name deletes an
// entry.
func merged(tables ...map[string]place) map[string]place {
	out := map[string]place{}
	for _, table := range tables {
		for ours, p := range table {
			if out[ours] = p; p.name == "" {
				delete(out, ours)
			}
		}
	}
	return out
}

var llamaPlaces = map[string]place{
	"embed": plain("model.embed_tokens.weight"), "ln_f.gamma": plain("model.norm.weight"), "head": plain("lm_head.weight"),

	"layer.ln1.gamma": plain("model.layers.*.input_layernorm.weight"),
	"layer.wq":        linear("model.layers.*.self_attn.q_proj.weight"), "layer.bq": plain("model.layers.*.self_attn.q_proj.bias"),
	"layer.wk": linear("model.layers.*.self_attn.k_proj.weight"), "layer.bk": plain("model.layers.*.self_attn.k_proj.bias"),
	"layer.wv": linear("model.layers.*.self_attn.v_proj.weight"), "layer.bv": plain("model.layers.*.self_attn.v_proj.bias"),
	"layer.wo": linear("model.layers.*.self_attn.o_proj.weight"), "layer.bo": plain("model.layers.*.self_attn.o_proj.bias"),
	"layer.q_norm.gamma": plain("model.layers.*.self_attn.q_norm.weight"), "layer.k_norm.gamma": plain("model.layers.*.self_attn.k_norm.weight"),

	"layer.ln2.gamma": plain("model.layers.*.post_attention_layernorm.weight"),
	"layer.w_gate":    linear("model.layers.*.mlp.gate_proj.weight"), "layer.b_gate": plain("model.layers.*.mlp.gate_proj.bias"),
	"layer.w_up": linear("model.layers.*.mlp.up_proj.weight"), "layer.b_up": plain("model.layers.*.mlp.up_proj.bias"),
	"layer.w_down": linear("model.layers.*.mlp.down_proj.weight"), "layer.b_down": plain("model.layers.*.mlp.down_proj.bias"),
}

// differences from llamaPlaces: norms after attention and MLP, other names, and fused tensors
var (
	olmoPlaces = map[string]place{
		"layer.ln1.gamma": {}, "layer.ln2.gamma": {},
		"layer.ln1_post.gamma": plain("model.layers.*.post_attention_layernorm.weight"),
		"layer.ln2_post.gamma": plain("model.layers.*.post_feedforward_layernorm.weight"),
	}
	gemmaPlaces = map[string]place{
		"layer.ln1_post.gamma": plain("model.layers.*.post_attention_layernorm.weight"),
		"layer.ln2.gamma":      plain("model.layers.*.pre_feedforward_layernorm.weight"),
		"layer.ln2_post.gamma": plain("model.layers.*.post_feedforward_layernorm.weight"),
	}
	hunyuanPlaces = map[string]place{
		"layer.q_norm.gamma": plain("model.layers.*.self_attn.query_layernorm.weight"),
		"layer.k_norm.gamma": plain("model.layers.*.self_attn.key_layernorm.weight"),
	}
	phiPlaces = map[string]place{
		"layer.wq":     linear("model.layers.*.self_attn.qkv_proj.weight"),
		"layer.wk":     linear("model.layers.*.self_attn.qkv_proj.weight", "layer.wq"),
		"layer.wv":     linear("model.layers.*.self_attn.qkv_proj.weight", "layer.wq", "layer.wk"),
		"layer.w_gate": linear("model.layers.*.mlp.gate_up_proj.weight"),
		"layer.w_up":   linear("model.layers.*.mlp.gate_up_proj.weight", "layer.w_gate"),
	}
)

// Names of our tensors of experts.
const (
	expertPrefix   = "layer.experts."
	routerName     = "layer.router.w"
	correctionName = "layer.router.correction"
)

// expertPlaces returns the places of experts: of their matrices, whose names in transformers and in older files differ, each in a tensor
// of its own.
func expertPlaces(block, gate, up, down string) map[string]place {
	expert := "model.layers.*." + block + ".experts.#."
	return map[string]place{
		routerName:             linear("model.layers.*." + block + ".gate.weight"),
		"layer.experts.w_gate": linear(expert + gate + ".weight"), "layer.experts.w_up": linear(expert + up + ".weight"),
		"layer.experts.w_down": plain(expert + down + ".weight"),
	}
}

// fusedExperts are the places of matrices of experts where all of a layer are one tensor.
var fusedExperts = map[string]place{
	"layer.experts.w_gate": linear("model.layers.*.mlp.experts.gate_up_proj"),
	"layer.experts.w_up":   linear("model.layers.*.mlp.experts.gate_up_proj", "layer.experts.w_gate"),
	"layer.experts.w_down": plain("model.layers.*.mlp.experts.down_proj"),
}

// gatedPlaces are those of Qwen3-Next that Qwen3.5 has, too: queries and gates of attention are one tensor, head by head, and so are the
// weights of convolutions.
var gatedPlaces = map[string]place{
	"layer.wq": ofHeads("heads", "model.layers.*.self_attn.q_proj.weight"), "layer.wg": ofHeads("heads", "model.layers.*.self_attn.q_proj.weight", "layer.wq"),
	"layer.linear.conv_q":     {name: "model.layers.*.linear_attn.conv1d.weight", how: stacked},
	"layer.linear.conv_k":     {name: "model.layers.*.linear_attn.conv1d.weight", how: stacked, after: []string{"layer.linear.conv_q"}},
	"layer.linear.conv_v":     {name: "model.layers.*.linear_attn.conv1d.weight", how: stacked, after: []string{"layer.linear.conv_q", "layer.linear.conv_k"}},
	"layer.linear.rate":       plain("model.layers.*.linear_attn.A_log"),
	"layer.linear.b_dt":       plain("model.layers.*.linear_attn.dt_bias"),
	"layer.linear.norm.gamma": plain("model.layers.*.linear_attn.norm.weight"),
	"layer.linear.wo":         linear("model.layers.*.linear_attn.out_proj.weight"),

	"layer.shared.w_gate":   linear("model.layers.*.mlp.shared_expert.gate_proj.weight"),
	"layer.shared.w_up":     linear("model.layers.*.mlp.shared_expert.up_proj.weight"),
	"layer.shared.w_down":   linear("model.layers.*.mlp.shared_expert.down_proj.weight"),
	"layer.shared.router.w": linear("model.layers.*.mlp.shared_expert_gate.weight"),
}

var (
	qwenNextPlaces = merged(gatedPlaces, map[string]place{
		"layer.linear.wq": ofHeads(linearHeads, "model.layers.*.linear_attn.in_proj_qkvz.weight"),
		"layer.linear.wk": ofHeads(linearHeads, "model.layers.*.linear_attn.in_proj_qkvz.weight", "layer.linear.wq"),
		"layer.linear.wv": ofHeads(linearHeads, "model.layers.*.linear_attn.in_proj_qkvz.weight", "layer.linear.wq", "layer.linear.wk"),
		"layer.linear.wz": ofHeads(linearHeads, "model.layers.*.linear_attn.in_proj_qkvz.weight", "layer.linear.wq", "layer.linear.wk", "layer.linear.wv"),
		"layer.linear.wb": ofHeads(linearHeads, "model.layers.*.linear_attn.in_proj_ba.weight"),
		"layer.linear.wa": ofHeads(linearHeads, "model.layers.*.linear_attn.in_proj_ba.weight", "layer.linear.wb"),
	})
	qwen35Places = merged(gatedPlaces, map[string]place{
		"layer.linear.wq": linear("model.layers.*.linear_attn.in_proj_qkv.weight"),
		"layer.linear.wk": linear("model.layers.*.linear_attn.in_proj_qkv.weight", "layer.linear.wq"),
		"layer.linear.wv": linear("model.layers.*.linear_attn.in_proj_qkv.weight", "layer.linear.wq", "layer.linear.wk"),
		"layer.linear.wz": linear("model.layers.*.linear_attn.in_proj_z.weight"),
		"layer.linear.wb": linear("model.layers.*.linear_attn.in_proj_b.weight"),
		"layer.linear.wa": linear("model.layers.*.linear_attn.in_proj_a.weight"),

		"layer.linear.rate":       gatedPlaces["layer.linear.rate"].inF32(),
		"layer.linear.norm.gamma": gatedPlaces["layer.linear.norm.gamma"].inF32(),
	})
)

// linearHeads is the key with the number of heads by which Qwen3-Next fuses the linear maps of linear attention.
const linearHeads = "linear_num_key_heads"

var (
	qwenExperts = expertPlaces("mlp", "gate_proj", "up_proj", "down_proj")
	ossExperts  = map[string]place{
		routerName:             linear("model.layers.*.mlp.router.weight"),
		"layer.router.b":       plain("model.layers.*.mlp.router.bias"),
		"layer.experts.w_gate": {name: "model.layers.*.mlp.experts.gate_up_proj", how: alternating},
		"layer.experts.w_up":   {name: "model.layers.*.mlp.experts.gate_up_proj", how: alternating, after: []string{"layer.experts.w_gate"}},
		"layer.experts.w_down": linear("model.layers.*.mlp.experts.down_proj"),
		"layer.experts.b_gate": {name: "model.layers.*.mlp.experts.gate_up_proj_bias", how: alternating},
		"layer.experts.b_up":   {name: "model.layers.*.mlp.experts.gate_up_proj_bias", how: alternating, after: []string{"layer.experts.b_gate"}},
		"layer.experts.b_down": plain("model.layers.*.mlp.experts.down_proj_bias"),
		"layer.sinks":          plain("model.layers.*.self_attn.sinks"),
	}
	// packedExperts are the places of gpt-oss as published. The matrices are the transposes of those in the memory of transformers.
	packedExperts = map[string]place{
		"layer.experts.w_gate": {name: "model.layers.*.mlp.experts.gate_up_proj" + packedSuffix, how: alternatingRows},
		"layer.experts.w_up":   {name: "model.layers.*.mlp.experts.gate_up_proj" + packedSuffix, how: alternatingRows, after: []string{"layer.experts.w_gate"}},
		"layer.experts.w_down": plain("model.layers.*.mlp.experts.down_proj" + packedSuffix),
	}
	mixtralExperts = merged(expertPlaces("block_sparse_moe", "w1", "w3", "w2"), map[string]place{
		correctionName: plain("model.layers.*.block_sparse_moe.e_score_correction_bias").inF32(),
	})
	glmExperts = merged(qwenExperts, map[string]place{
		routerName:            qwenExperts[routerName].inF32(),
		correctionName:        plain("model.layers.*.mlp.gate.e_score_correction_bias").inF32(),
		"layer.shared.w_gate": linear("model.layers.*.mlp.shared_experts.gate_proj.weight"),
		"layer.shared.w_up":   linear("model.layers.*.mlp.shared_experts.up_proj.weight"),
		"layer.shared.w_down": linear("model.layers.*.mlp.shared_experts.down_proj.weight"),
	})
)

// nemotronPlaces are those of Nemotron-H, whose layers have one block each: the norm before it has the same name in all layers.
var (
	nemotronPlaces = map[string]place{
		"embed": plain("backbone.embeddings.weight"), "ln_f.gamma": plain("backbone.norm_f.weight"), "head": plain("lm_head.weight"),
		"layer.ln1.gamma": plain("backbone.layers.*.norm.weight"), "layer.ln2.gamma": plain("backbone.layers.*.norm.weight"),

		"layer.wq": linear("backbone.layers.*.mixer.q_proj.weight"), "layer.wk": linear("backbone.layers.*.mixer.k_proj.weight"),
		"layer.wv": linear("backbone.layers.*.mixer.v_proj.weight"), "layer.wo": linear("backbone.layers.*.mixer.o_proj.weight"),
		"layer.w1": linear("backbone.layers.*.mixer.up_proj.weight"), "layer.w2": linear("backbone.layers.*.mixer.down_proj.weight"),

		"layer.linear.wz":         linear("backbone.layers.*.mixer.in_proj.weight"),
		"layer.linear.wv":         linear("backbone.layers.*.mixer.in_proj.weight", "layer.linear.wz"),
		"layer.linear.wk":         linear("backbone.layers.*.mixer.in_proj.weight", "layer.linear.wz", "layer.linear.wv"),
		"layer.linear.wq":         linear("backbone.layers.*.mixer.in_proj.weight", "layer.linear.wz", "layer.linear.wv", "layer.linear.wk"),
		"layer.linear.wa":         linear("backbone.layers.*.mixer.in_proj.weight", "layer.linear.wz", "layer.linear.wv", "layer.linear.wk", "layer.linear.wq"),
		"layer.linear.conv_v":     {name: "backbone.layers.*.mixer.conv1d.weight", how: stacked},
		"layer.linear.conv_k":     {name: "backbone.layers.*.mixer.conv1d.weight", how: stacked, after: []string{"layer.linear.conv_v"}},
		"layer.linear.conv_q":     {name: "backbone.layers.*.mixer.conv1d.weight", how: stacked, after: []string{"layer.linear.conv_v", "layer.linear.conv_k"}},
		"layer.linear.b_conv_v":   plain("backbone.layers.*.mixer.conv1d.bias"),
		"layer.linear.b_conv_k":   plain("backbone.layers.*.mixer.conv1d.bias", "layer.linear.b_conv_v"),
		"layer.linear.b_conv_q":   plain("backbone.layers.*.mixer.conv1d.bias", "layer.linear.b_conv_v", "layer.linear.b_conv_k"),
		"layer.linear.rate":       plain("backbone.layers.*.mixer.A_log").inF32(),
		"layer.linear.b_dt":       plain("backbone.layers.*.mixer.dt_bias").inF32(),
		"layer.linear.skip":       plain("backbone.layers.*.mixer.D").inF32(),
		"layer.linear.norm.gamma": plain("backbone.layers.*.mixer.norm.weight"),
		"layer.linear.wo":         linear("backbone.layers.*.mixer.out_proj.weight"),

		routerName:           linear("backbone.layers.*.mixer.gate.weight").inF32(),
		correctionName:       plain("backbone.layers.*.mixer.gate.e_score_correction_bias").inF32(),
		"layer.experts.w1":   linear("backbone.layers.*.mixer.experts.#.up_proj.weight"),
		"layer.experts.w2":   plain("backbone.layers.*.mixer.experts.#.down_proj.weight"),
		"layer.latent.w_in":  linear("backbone.layers.*.mixer.fc1_latent_proj.weight"),
		"layer.latent.w_out": linear("backbone.layers.*.mixer.fc2_latent_proj.weight"),
		"layer.shared.w1":    linear("backbone.layers.*.mixer.shared_experts.up_proj.weight"),
		"layer.shared.w2":    linear("backbone.layers.*.mixer.shared_experts.down_proj.weight"),
	}
	nemotronFused = map[string]place{
		"layer.experts.w1": linear("backbone.layers.*.mixer.experts.up_proj"), "layer.experts.w2": plain("backbone.layers.*.mixer.experts.down_proj"),
	}
)

// kimiPlaces are those of Kimi Linear. Layers with linear attention have some of the names of those with latent attention.
var (
	kimiPlaces = merged(expertPlaces("block_sparse_moe", "w1", "w3", "w2"), map[string]place{
		routerName: linear("model.layers.*.block_sparse_moe.gate.weight").inF32(),

		"layer.linear.wq": linear("model.layers.*.self_attn.q_proj.weight"), "layer.linear.conv_q": {name: "model.layers.*.self_attn.q_conv1d.weight", how: stacked},
		"layer.linear.wk": linear("model.layers.*.self_attn.k_proj.weight"), "layer.linear.conv_k": {name: "model.layers.*.self_attn.k_conv1d.weight", how: stacked},
		"layer.linear.wv": linear("model.layers.*.self_attn.v_proj.weight"), "layer.linear.conv_v": {name: "model.layers.*.self_attn.v_conv1d.weight", how: stacked},
		"layer.linear.wa_low": linear("model.layers.*.self_attn.f_a_proj.weight"), "layer.linear.wa": linear("model.layers.*.self_attn.f_b_proj.weight"),
		"layer.linear.wz_low": linear("model.layers.*.self_attn.g_a_proj.weight"), "layer.linear.wz": linear("model.layers.*.self_attn.g_b_proj.weight"),
		"layer.linear.wb":         linear("model.layers.*.self_attn.b_proj.weight"),
		"layer.linear.rate":       {name: "model.layers.*.self_attn.A_log", how: inner, f32: true},
		"layer.linear.b_dt":       plain("model.layers.*.self_attn.dt_bias").inF32(),
		"layer.linear.norm.gamma": plain("model.layers.*.self_attn.o_norm.weight"),
		"layer.linear.wo":         linear("model.layers.*.self_attn.o_proj.weight"),

		correctionName:        plain("model.layers.*.block_sparse_moe.gate.e_score_correction_bias").inF32(),
		"layer.shared.w_gate": linear("model.layers.*.block_sparse_moe.shared_experts.gate_proj.weight"),
		"layer.shared.w_up":   linear("model.layers.*.block_sparse_moe.shared_experts.up_proj.weight"),
		"layer.shared.w_down": linear("model.layers.*.block_sparse_moe.shared_experts.down_proj.weight"),
	})
	// kimiSaved are the places of dense MLPs in folders that transformers has written, in which they have the name of experts.
	kimiSaved = map[string]place{
		"layer.w_gate": linear("model.layers.*.block_sparse_moe.gate_proj.weight"), "layer.w_up": linear("model.layers.*.block_sparse_moe.up_proj.weight"),
		"layer.w_down": linear("model.layers.*.block_sparse_moe.down_proj.weight"),
	}
	// kimiFused are the places in the memory of transformers.
	kimiFused = merged(fusedExperts, map[string]place{
		routerName: glmExperts[routerName], correctionName: glmExperts[correctionName],
		"layer.shared.w_gate": glmExperts["layer.shared.w_gate"], "layer.shared.w_up": glmExperts["layer.shared.w_up"], "layer.shared.w_down": glmExperts["layer.shared.w_down"],
		"layer.linear.conv_q": {name: "model.layers.*.self_attn.conv1d.weight", how: stacked},
		"layer.linear.conv_k": {name: "model.layers.*.self_attn.conv1d.weight", how: stacked, after: []string{"layer.linear.conv_q"}},
		"layer.linear.conv_v": {name: "model.layers.*.self_attn.conv1d.weight", how: stacked, after: []string{"layer.linear.conv_q", "layer.linear.conv_k"}},
		"layer.linear.wa_low": linear("model.layers.*.self_attn.forget_gate.f_a_proj.weight"), "layer.linear.wa": linear("model.layers.*.self_attn.forget_gate.f_b_proj.weight"),
		"layer.linear.rate": {name: "model.layers.*.self_attn.forget_gate.A_log", how: inner, f32: true}, "layer.linear.b_dt": plain("model.layers.*.self_attn.forget_gate.dt_bias").inF32(),
	})
)

// rotaryBuffers are the name suffixes of tables in files that transformers wrote before version 4.32. These
// tables can be computed from the config.
var rotaryBuffers = []string{".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached"}

var (
	llamaNames   = naming{tensors: llamaPlaces, prefix: "model.", ignored: rotaryBuffers}
	olmoNames    = naming{tensors: merged(llamaPlaces, olmoPlaces), prefix: "model.", ignored: rotaryBuffers}
	gemmaNames   = naming{tensors: merged(llamaPlaces, gemmaPlaces), prefix: "model.", ignored: rotaryBuffers}
	hunyuanNames = naming{tensors: merged(llamaPlaces, hunyuanPlaces), prefix: "model.", ignored: rotaryBuffers}
	ernieNames   = naming{tensors: llamaPlaces, prefix: "model.", ignored: rotaryBuffers, neighbours: true}
	phiNames     = naming{tensors: merged(llamaPlaces, phiPlaces), prefix: "model.", ignored: rotaryBuffers}

	// In transformers, heads of keys and values are one tensor, as are what all heads of keys share and the latent.
	latentPlaces = map[string]place{
		"layer.wq_a": linear("model.layers.*.self_attn.q_a_proj.weight"), "layer.q_a_norm.gamma": plain("model.layers.*.self_attn.q_a_layernorm.weight"),
		"layer.wq":  linear("model.layers.*.self_attn.q_b_proj.weight"),
		"layer.wkv": linear("model.layers.*.self_attn.kv_a_proj_with_mqa.weight"), "layer.wk_rope": linear("model.layers.*.self_attn.kv_a_proj_with_mqa.weight", "layer.wkv"),
		"layer.kv_a_norm.gamma": plain("model.layers.*.self_attn.kv_a_layernorm.weight"),
		"layer.wk":              ofHeads("heads", "model.layers.*.self_attn.kv_b_proj.weight"),
		"layer.wv":              ofHeads("heads", "model.layers.*.self_attn.kv_b_proj.weight", "layer.wk"),
	}
	deepseekNames = naming{tensors: merged(llamaPlaces, glmExperts, latentPlaces), prefix: "model.", ignored: rotaryBuffers, further: true, fused: fusedExperts, neighbours: true}
	mistral4Names = naming{tensors: merged(deepseekNames.tensors, map[string]place{routerName: qwenExperts[routerName]}), prefix: "model.", ignored: rotaryBuffers, further: true, fused: fusedExperts, neighbours: true}
	// wholeQueries is the place of queries that have no latent.
	wholeQueries = map[string]place{"layer.wq": llamaPlaces["layer.wq"]}

	kimiNames = naming{tensors: merged(llamaPlaces, latentPlaces, kimiPlaces), prefix: "model.", ignored: rotaryBuffers, neighbours: true, fused: kimiFused, saved: kimiSaved}

	qwenNextNames = naming{tensors: merged(llamaPlaces, qwenExperts, qwenNextPlaces), prefix: "model.", ignored: rotaryBuffers, fused: fusedExperts, others: "mtp."}
	qwen35Names   = naming{tensors: merged(llamaPlaces, qwenExperts, qwen35Places), prefix: "model.", ignored: rotaryBuffers, fused: fusedExperts, others: "mtp."}

	qwenMoENames = naming{tensors: merged(llamaPlaces, qwenExperts), prefix: "model.", ignored: rotaryBuffers, fused: fusedExperts}
	mixtralNames = naming{tensors: merged(llamaPlaces, mixtralExperts), prefix: "model.", ignored: rotaryBuffers, fused: merged(fusedExperts, map[string]place{
		routerName: qwenExperts[routerName], correctionName: plain("model.layers.*.mlp.e_score_correction_bias").inF32(),
	})}
	glmMoENames = naming{tensors: merged(llamaPlaces, glmExperts), prefix: "model.", ignored: rotaryBuffers, further: true, fused: fusedExperts}

	nemotronNames = naming{tensors: nemotronPlaces, prefix: "backbone.", other: "model.", fused: nemotronFused, others: "mtp."}

	ossNames = naming{tensors: merged(llamaPlaces, ossExperts), prefix: "model.", ignored: rotaryBuffers, packed: packedExperts}

	// GPT-2's Conv1D is [in, out], like our matrices; c_attn holds q, k and v side by side.
	gpt2Names = naming{prefix: "transformer.", ignored: []string{".attn.bias", ".attn.masked_bias"}, tensors: map[string]place{
		"embed": plain("transformer.wte.weight"), "pos": plain("transformer.wpe.weight"), "head": plain("lm_head.weight"),
		"ln_f.gamma": plain("transformer.ln_f.weight"), "ln_f.beta": plain("transformer.ln_f.bias"),

		"layer.ln1.gamma": plain("transformer.h.*.ln_1.weight"), "layer.ln1.beta": plain("transformer.h.*.ln_1.bias"),
		"layer.wq": plain("transformer.h.*.attn.c_attn.weight"), "layer.bq": plain("transformer.h.*.attn.c_attn.bias"),
		"layer.wk": plain("transformer.h.*.attn.c_attn.weight", "layer.wq"), "layer.bk": plain("transformer.h.*.attn.c_attn.bias", "layer.bq"),
		"layer.wv": plain("transformer.h.*.attn.c_attn.weight", "layer.wq", "layer.wk"),
		"layer.bv": plain("transformer.h.*.attn.c_attn.bias", "layer.bq", "layer.bk"),
		"layer.wo": plain("transformer.h.*.attn.c_proj.weight"), "layer.bo": plain("transformer.h.*.attn.c_proj.bias"),

		"layer.ln2.gamma": plain("transformer.h.*.ln_2.weight"), "layer.ln2.beta": plain("transformer.h.*.ln_2.bias"),
		"layer.w1": plain("transformer.h.*.mlp.c_fc.weight"), "layer.b1": plain("transformer.h.*.mlp.c_fc.bias"),
		"layer.w2": plain("transformer.h.*.mlp.c_proj.weight"), "layer.b2": plain("transformer.h.*.mlp.c_proj.bias"),
	}}
)

// isVector reports whether one of our tensors is a vector, that is, has one column.
func isVector(t *ir.Tensor) bool { return t.Shape[1] == 1 }

// part is one of our tensors, or the rows of one from `first` on, within one of the architecture's: element (first+r, c) of ours
// is element (row+r, col+c) of the other or, if transposed, (row+c, col+r).
type part struct {
	ir.Tensor
	first      int64
	shape      [2]int64 // of ours
	transposed bool
	row, col   int64
	step       int64 // from one of our columns to the next
	left       int64 // first of our columns; only transposed tensors have several parts side by side
}

// stored is one of the architecture's tensors with the parts that make it up, in order. Rows are those of all its matrices
// if it has three dimensions.
type stored struct {
	name  string
	shape []int64
	parts []part
	f32   bool // it stays in f32
}

// rows and cols return the shape of a stored tensor; a vector has one column.
func (s *stored) rows() int64 { return product(s.shape) / s.cols() }
func (s *stored) cols() int64 { return lastOf(s.shape) }

// lastOf returns the number of columns of a shape, and product its number of elements.
func lastOf(shape []int64) int64 {
	if len(shape) < 2 {
		return 1
	}
	return shape[len(shape)-1]
}

func product(shape []int64) int64 {
	n := int64(1)
	for _, size := range shape {
		n *= size
	}
	return n
}

// layout finds the places at which the architecture stores the tensors. The stored tensors are ordered by
// the first of our tensors that each contains.
// The function heads returns the value of a key with a number of heads.
func (n *naming) layout(tensors []ir.Tensor, heads func(key string) int64) ([]*stored, error) {
	index := map[string]*ir.Tensor{}
	for i := range tensors {
		index[tensors[i].Name] = &tensors[i]
	}
	byName := map[string]*stored{}
	var list []*stored
	for i := range tensors {
		t := &tensors[i]
		key, layer := splitName(t.Name)
		p, ok := n.tensors[key]
		if !ok {
			return nil, fmt.Errorf("the architecture has no tensor for %s", t.Name)
		}
		before := int64(0) // columns of our tensors that precede this one in the stored tensor
		for _, other := range p.after {
			o := index[joinName(other, layer)]
			if o == nil {
				return nil, fmt.Errorf("%s contains %s after %s, which the model lacks", p.name, t.Name, joinName(other, layer))
			}
			before += p.across(o)
		}
		matrices := int64(1)
		if router := index[joinName(routerName, layer)]; router != nil && strings.HasPrefix(key, expertPrefix+"w") {
			matrices = router.Shape[1]
		}
		for expert := range matrices {
			number := strconv.FormatInt(expert, 10)
			name := strings.NewReplacer(layerMark, layer, expertMark, number).Replace(p.name)
			if matrices > 1 && !strings.Contains(p.name, expertMark) {
				name += expertMark + number
			}
			s := byName[name]
			if s == nil {
				s = &stored{name: name, f32: p.f32}
				byName[name] = s
				list = append(list, s)
			}
			if p.heads != "" {
				s.addHeads(*t, heads(p.heads), before, n.fusedColumns(index, p.name, layer))
				continue
			}
			s.add(*t, expert, matrices, p.how, before)
		}
	}
	return stack(list), nil
}

// fusedColumns returns the number of columns of all our matrices of a layer that one tensor has.
func (n *naming) fusedColumns(index map[string]*ir.Tensor, name, layer string) (all int64) {
	for key, p := range n.tensors {
		if t := index[joinName(key, layer)]; t != nil && p.name == name {
			all += t.Shape[1]
		}
	}
	return all
}

// stack replaces the matrices of experts that the architecture stores in one tensor by this tensor.
func stack(list []*stored) (out []*stored) {
	byName := map[string]*stored{}
	for _, s := range list {
		name, _, one := strings.Cut(s.name, expertMark)
		if !one {
			out = append(out, s)
			continue
		}
		whole := byName[name]
		if whole == nil {
			whole = &stored{name: name, shape: append([]int64{0}, s.shape...)}
			byName[name] = whole
			out = append(out, whole)
		}
		for _, p := range s.parts {
			p.row += whole.shape[0] * s.shape[0]
			whole.parts = append(whole.parts, p)
		}
		whole.shape[0]++
	}
	return out
}

// across returns the size of the side along which tensors are fused: columns of a matrix, elements of a vector.
func (p *place) across(t *ir.Tensor) int64 {
	if isVector(t) && p.how != transposed || p.how == stacked {
		return t.Shape[0]
	}
	return t.Shape[1]
}

// addHeads appends one of our matrices, transposed, in a part for each head. In a head, it follows `at` columns of others, of `all`.
func (s *stored) addHeads(t ir.Tensor, heads, at, all int64) {
	width := t.Shape[1] / heads
	s.shape = []int64{all, t.Shape[0]}
	for head := range heads {
		s.parts = append(s.parts, part{Tensor: t, shape: [2]int64{t.Shape[0], width}, left: head * width, transposed: true, row: (head*all + at) / heads, step: 1})
	}
}

// add appends one of our tensors, or one of its matrices: a range of rows if it is transposed or a vector, otherwise a range of columns.
func (s *stored) add(t ir.Tensor, number, matrices int64, how how, at int64) {
	rows, turned := t.Shape[0]/matrices, how == transposed || how == alternatingRows
	p := part{Tensor: t, first: number * rows, shape: [2]int64{rows, t.Shape[1]}, transposed: turned, step: 1}
	var shape []int64
	switch {
	case how == inner:
		shape = []int64{1, 1, rows, 1}
	case how == stacked:
		p.row, shape = at, []int64{at + rows, 1, t.Shape[1]}
	case isVector(&t) && !turned:
		p.row, shape = at, []int64{at + rows}
	case how == alternating:
		p.col, p.step, shape = min(at, 1), 2, []int64{rows, 2 * t.Shape[1]}
	case how == alternatingRows:
		p.row, p.step, shape = min(at, 1), 2, []int64{2 * t.Shape[1], rows}
	case turned:
		p.row, shape = at, []int64{at + t.Shape[1], rows}
	default:
		p.col, shape = at, []int64{rows, at + t.Shape[1]}
	}
	if s.shape == nil {
		s.shape = shape
	}
	for i := range s.shape {
		s.shape[i] = max(s.shape[i], shape[i])
	}
	s.parts = append(s.parts, p)
}

const layerPrefix = "layer."

// splitName removes the number from the name of a layer's tensor: "layer.3.wq" becomes "layer.wq" and "3".
func splitName(name string) (key, layer string) {
	rest, ok := strings.CutPrefix(name, layerPrefix)
	number, rest, found := strings.Cut(rest, ".")
	if _, err := strconv.Atoi(number); !ok || !found || err != nil {
		return name, ""
	}
	return layerPrefix + rest, number
}

func joinName(key, layer string) string {
	if layer == "" {
		return key
	}
	return layerPrefix + layer + "." + strings.TrimPrefix(key, layerPrefix)
}

// ignorable reports whether a tensor of a folder is a buffer that is not needed.
func (n *naming) ignorable(name string) bool {
	return slices.ContainsFunc(n.ignored, func(end string) bool { return strings.HasSuffix(name, end) })
}
