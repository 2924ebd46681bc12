#!/usr/bin/env python3
"""Draws configs of all supported architectures at random, and measures what transformers makes of each: the test of hf's reader.

    python3 -m venv venv && venv/bin/pip install torch transformers safetensors numpy
    venv/bin/python bench/peers/hub_configs.py --draw SEED COUNT FOLDER    # draw configs, write a folder with weights for each
    venv/bin/python bench/peers/hub_configs.py --shrink FOLDER CONFIG...   # the same for smaller models with the keys of the given files
    venv/bin/python bench/peers/hub_configs.py --measure FOLDER            # measure every folder in FOLDER
    venv/bin/python bench/peers/hub_configs.py --keys                      # what the config classes declare

All except --keys print a JSON object for each config, with the losses of the tokens after the first, or with the error of
transformers. The first configs are those in CASES. Every other draw starts with a small model and then sets keys, of any architecture, to any value that a config might have: right
ones, null, the wrong type. So most keys are foreign to the architecture. Weights and tokens are random numbers that depend only on
the names of tensors and the vocabulary, so that a test can repeat them without Python."""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import sys
import warnings

import numpy as np
import torch
import transformers as hub
from safetensors.torch import save_file
from transformers.configuration_utils import PreTrainedConfig

from splitmix import draw, stream

TOKENS = 20
CLASSES = {
    "llama": hub.LlamaConfig, "mistral": hub.MistralConfig, "qwen2": hub.Qwen2Config, "qwen3": hub.Qwen3Config, "phi3": hub.Phi3Config,
    "olmo2": hub.Olmo2Config, "smollm3": hub.SmolLM3Config, "gemma2": hub.Gemma2Config, "gemma3_text": hub.Gemma3TextConfig,
    "olmo3": hub.Olmo3Config, "seed_oss": hub.SeedOssConfig, "granite": hub.GraniteConfig, "exaone4": hub.Exaone4Config,
    "ministral3": hub.Ministral3Config, "hunyuan_v1_dense": hub.HunYuanDenseV1Config, "ernie4_5": hub.Ernie4_5Config,
    "qwen3_moe": hub.Qwen3MoeConfig, "mixtral": hub.MixtralConfig, "glm4_moe": hub.Glm4MoeConfig, "minimax_m2": hub.MiniMaxM2Config,
    "gpt_oss": hub.GptOssConfig,
    "ministral": hub.MinistralConfig, "gpt2": hub.GPT2Config, "gemma3": hub.Gemma3Config, "mistral3": hub.Mistral3Config,
}
UNDRAWN = {  # they have fixtures
    "qwen3_next": hub.Qwen3NextConfig, "qwen3_5_text": hub.Qwen3_5TextConfig, "qwen3_5_moe_text": hub.Qwen3_5MoeTextConfig, "qwen3_5": hub.Qwen3_5Config,
    "qwen3_5_moe": hub.Qwen3_5MoeConfig, "nemotron_h": hub.NemotronHConfig,
    "deepseek_v2": hub.DeepseekV2Config, "deepseek_v3": hub.DeepseekV3Config, "mistral4": hub.Mistral4Config,
    "kimi_linear": hub.KimiLinearConfig,
}
VISION = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
OUTER = {
    "gemma3": dict(mm_tokens_per_image=4, image_token_index=3, boi_token_index=4, eoi_token_index=5,
                   vision_config=dict(VISION, model_type="siglip_vision_model", vision_use_head=False)),
    "mistral3": dict(image_token_index=10, spatial_merge_size=1, vision_config=dict(VISION, model_type="pixtral", head_dim=4)),
}
FULL, SLIDING = "full_attention", "sliding_attention"

# Values of keys; None is null. Keys with a function draw from it, given the config so far.
WINDOWS = [None, 1, 2, 3, 5, 9, 4096]
SIZES = dict(
    vocab_size=[11, 37, 60], hidden_size=[8, 12, 16], intermediate_size=[5, 12, 20], num_hidden_layers=[1, 2, 3, 4, 6], num_attention_heads=[1, 2, 4],
    num_key_value_heads=[1, 2, 4, None], head_dim=[2, 4, 6, 8, 10, None], max_position_embeddings=[24, 32, 64], rms_norm_eps=[1e-6, 1e-3, 0.05],
)
VALUES = SIZES | dict(
    hidden_act=["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python", "gelu_python_tanh",
                "relu2", "silu", "gelu", "relu", "gelu_10", "silu"],
    tie_word_embeddings=[True, False], attention_bias=[True, False], mlp_bias=[True, False], attention_dropout=[0.0, 0, 0.1, None],
    initializer_range=[0.02, 0.3], sliding_window=WINDOWS, use_sliding_window=[True, False], max_window_layers=[0, 1, 2, 28, -1],
    no_rope_layer_interval=[1, 2, 3, 4], query_pre_attn_scalar=[1, 4, 10, 256, 7.5], final_logit_softcapping=[None, 2.0, 5.0, 30],
    attn_logit_softcapping=[None, 2.0, 1.5, 50], use_bidirectional_attention=[None, False, True], sliding_window_pattern=[1, 2, 3, 6],
    _sliding_window_pattern=[1, 2, 3], is_causal=[True, False, None], rope_theta=[100.0, 10000, 500000.0, None], rope_local_base_freq=[50.0, 10000],
    partial_rotary_factor=[1.0, 1, 0.5, 0.75, 0.9, None], original_max_position_embeddings=[8, 16, 64, None], rope_interleaved=[False, True],
    is_llama_config=[True], full_attn_mod=[1], interpolate_factor=[1, 2.0], pretraining_tp=[1, 2], use_cache=[True, False],
    pad_token_id=[None, 0, 3, -1], bos_token_id=[None, 1], eos_token_id=[None, 2, [1, 2]], torch_dtype=["float32", "bfloat16", "float16"],
    dtype=["float32", "bfloat16", None], resid_pdrop=[0.0, 0.1], embd_pdrop=[0.0, 0.1], attn_pdrop=[0.0, 0.1], hidden_dropout=[0.1],
    n_positions=[24, 32], n_embd=[8, 12], n_layer=[1, 2, 3], n_head=[1, 2, 4], n_inner=[None, 5, 12], n_ctx=[24], layer_norm_epsilon=[1e-6, 1e-3, 0.05],
    scale_attn_weights=[True, False], scale_attn_by_inverse_layer_idx=[True, False], reorder_and_upcast_attn=[True, False],
    add_cross_attention=[True, False], summary_type=["cls_index"], summary_use_proj=[True, False], summary_activation=[None, "tanh"],
    summary_proj_to_labels=[True], summary_first_dropout=[0.1], chunk_size_feed_forward=[0, 2], is_encoder_decoder=[True, False],
    output_hidden_states=[True, False], output_attentions=[True, False], return_dict=[True], architectures=[["LlamaForCausalLM"]],
    id2label=[{"0": "a"}], problem_type=["regression", None], num_local_experts=[8, 4, 3], sinks=[True], qk_norm=[True], rope_type=["yarn"],
    attention_chunk_size=[4], per_layer_config=[{"0": {"sliding_window": 3}}, None], hidden_size_per_layer_input=[8], temperature=[0.5],
    _name_or_path=["x"], auto_map={}.values(), gradient_checkpointing=[False, True], cache_implementation=["hybrid"], transformers_version=["4.40.0"],
    logit_scale=[0.5], residual_multiplier=[2.0, 0.22, 1], embedding_multiplier=[3.0, 12],
    attention_multiplier=[0.5, 0.125], logits_scaling=[8, 0.5, 1.3, 0], attention_out_bias=[True, False], use_bias=[True, False, None], num_experts=[2, 4, 5, 8, 0], n_routed_experts=[4, 8, 6], num_experts_per_tok=[1, 2, 3, 2],
    moe_intermediate_size=[5, 8], norm_topk_prob=[True, False], decoder_sparse_step=[1, 2, 3], mlp_only_layers=[None, [], [0], [1]], n_group=[1, 2, 4], topk_group=[1, 2],
    routed_scaling_factor=[1.0, 2.5], first_k_dense_replace=[0, 1, 2], n_shared_experts=[1, 2], output_router_logits=[True, False], router_aux_loss_coef=[0.01],
    router_jitter_noise=[0.0, 0.1], num_mtp_layers=[0, 1], rotary_dim=[2, 4], swiglu_limit=[7.0, 5.0], swiglu_alpha=[1.702, 1.0], num_nextn_predict_layers=[0, 1], eod_token_id=[None, 3], residual_dropout=[0.1, 0.0], clip_qkv=[4.0], parallel_attn=[True],
    use_qk_norm=[True, False], mup_width_multiplier=[2.0], norm_type=["layernorm"], num_labels=[2], _num_labels=[1], tie_encoder_decoder=[True],
    multimodal_projector_bias=[True], image_token_index=[3], vision_feature_layer=[-1], mm_tokens_per_image=[4], projector_hidden_act=["gelu"],
)
EXPERTS = {
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6), "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, num_mtp_layers=0), "minimax_m2": dict(num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2),
}
VALUES["hidden_activation"] = VALUES["activation_function"] = VALUES["hidden_act"]
VALUES["auto_map"] = [{"AutoConfig": "x.Y"}]
WRONG = [None, "8", 1.0, True, 0, [], {}]  # of any key except these, which only name or list something
PLAIN = {"architectures", "auto_map", "bos_token_id", "eos_token_id", "cache_implementation", "chunk_size_feed_forward", "gradient_checkpointing", "id2label", "is_encoder_decoder",
         "num_labels", "_num_labels", "output_attentions", "output_hidden_states", "problem_type", "return_dict", "temperature", "transformers_version", "use_cache",
         "_name_or_path"}


def layer_types(r, c):
    n = c.get("num_hidden_layers", c.get("n_layer", 2))
    if r.random() < 0.1:
        return r.choice([None, [FULL], [], [FULL, "chunked_attention"] * n, ["attention"] * n])
    return [r.choice([FULL, SLIDING]) for _ in range(n if isinstance(n, int) else 2)]


def no_rope_layers(r, c):
    n = c.get("num_hidden_layers", 2)
    return [r.choice([0, 1]) for _ in range((n if isinstance(n, int) else 2) + r.choice([0, 0, 0, 1]))]


def rotation(r, c, kind=None):
    """The parameters of one kind of rotation, with keys missing, null, or of another kind."""
    model = c["model_type"]
    head = c.get("head_dim") or (c.get("hidden_size") or 8) // (c.get("num_attention_heads") or 2)
    share = r.choice([1.0, 1.0, 0.5, 0.75, 0.9])
    kind = kind or r.choice(["default", "linear", "llama3", "yarn", "longrope", "default", "dynamic", "su", "proportional"])
    factors = lambda: [round(r.uniform(1, 4), 2) for _ in range(max(1, int(head * share) // 2))]
    p = {r.choice(["rope_type", "rope_type", "type"]): kind}
    needs = dict(linear=["factor"], dynamic=["factor"], llama3=["factor", "low_freq_factor", "high_freq_factor", "original"],
                 yarn=["factor", "original"], longrope=["short_factor", "long_factor", "original"], su=["short_factor", "long_factor"]).get(kind, [])
    mays = dict(yarn=["beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"],
                longrope=["factor", "attention_factor"], su=["factor", "attention_factor"]).get(kind, [])
    choices = dict(factor=[1, 2.0, 4, 8.0, 0.5], low_freq_factor=[1, 1.0, 2.0], high_freq_factor=[4, 4.0, 3.0], original=[4, 8, 16, 64],
                   beta_fast=[32, 8.0, 2, 0, None], beta_slow=[1, 0.5, None], truncate=[True, False, None, 0], attention_factor=[1.5, 1, None],
                   mscale=[0.7, 1.0, 1, 0], mscale_all_dim=[0.7, 0.5, 1, 0], short_factor=[factors()], long_factor=[factors()])
    names = [k for k in needs if r.random() < 0.97] + [k for k in mays if r.random() < 0.4]
    if r.random() < 0.1:
        names.append(r.choice(list(choices)))
    for k in names:
        p["original_max_position_embeddings" if k == "original" else k] = None if r.random() < 0.04 else r.choice(choices[k])
    if r.random() < 0.05:
        p |= dict(type=r.choice(["default", "linear", "yarn"]), rope_type=kind)
    if r.random() < (0.95 if model == "ministral3" else 0.02):
        p["llama_4_scaling_beta"] = r.choice([0.1, 0.4, 1, 0, 0, None] if model == "ministral3" else [0.1])
        if r.random() < 0.8:
            p.setdefault("original_max_position_embeddings", r.choice([4, 8, 16]))
    if r.random() < (0.5 if kind == "dynamic" else 0.02):
        p["alpha"] = r.choice([1.0, 20.0, 1000, 0, None])
    if r.random() < 0.6:
        p["rope_theta"] = r.choice([100.0, 1000, 10000.0])
    if share != 1 or r.random() < 0.1:
        p["partial_rotary_factor"] = share
    if r.random() < 0.03:
        p[r.choice(["mscale_x", "rope_dim", "finetuned"])] = r.choice([True, 2])
    return p


def rope(r, c):
    """Sets the keys of rotary positions in one of the spellings, or in several."""
    often = {"phi3": "longrope", "hunyuan_v1_dense": "dynamic", "ministral3": "yarn"}.get(c["model_type"])
    flat = lambda: rotation(r, c, often if r.random() < 0.5 else None)
    nested = lambda: {k: r.choice([rotation(r, c), rotation(r, c, "default")]) if k == FULL else rotation(r, c, "default" if r.random() < 0.9 else None)
                      for k in [FULL, SLIDING] if r.random() < 0.95}
    usual = nested if c["model_type"] in ("gemma3_text", "olmo3") else flat
    for key in r.choice([["rope_parameters"], ["rope_scaling"], ["rope_parameters", "rope_scaling"], []]):
        c[key] = r.choice([usual, usual, usual, flat, nested, dict, lambda: None])() if key == "rope_parameters" else r.choice([flat, flat, flat, flat, dict, lambda: None])()
        if c[key] and r.random() < 0.1:
            c[key]["truncate"] = False
    for key in ["rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "rope_local_base_freq"]:
        if r.random() < 0.15:
            c[key] = r.choice(VALUES[key])


SPECIAL = dict(layer_types=layer_types, no_rope_layers=no_rope_layers)


def set_key(r, c, key, wrong=0.06):
    if key not in PLAIN and r.random() < wrong:
        c[key] = r.choice(WRONG)
    elif key in SPECIAL:
        c[key] = SPECIAL[key](r, c)
    else:
        c[key] = r.choice(list(VALUES[key]))


def config(r):
    """Draws a config."""
    name = r.choice(list(CLASSES))
    inner = {"gemma3": "gemma3_text", "mistral3": r.choice(["mistral", "ministral3"])}.get(name, name)
    declared = {f.name for f in dataclasses.fields(CLASSES[inner])} & set(VALUES) | set(SPECIAL) & {f.name for f in dataclasses.fields(CLASSES[inner])}
    c = dict(model_type=inner, vocab_size=37, pad_token_id=None)
    if inner == "gpt2":
        c |= dict(n_embd=8, n_layer=2, n_head=2, n_positions=32)
    else:
        heads = r.choice([1, 2, 2, 4])
        c |= dict(hidden_size=4 * heads * r.choice([1, 2]), intermediate_size=12, num_hidden_layers=r.choice([1, 2, 3, 4]), num_attention_heads=heads,
                  num_key_value_heads=r.choice([1, heads]), max_position_embeddings=r.choice([24, 64]))
        c |= EXPERTS.get(inner, {})
        if "head_dim" in declared and r.random() < (0.95 if inner in ("hunyuan_v1_dense", "ministral") else 0.8):
            c["head_dim"] = r.choice([4, 6, 8])
    for key in sorted(declared):
        if key not in SIZES and r.random() < 0.25:
            set_key(r, c, key, 0.02)
    if r.random() < 0.6:
        rope(r, c)
    for _ in range(r.choice([0, 0, 1, 1, 2, 3, 5])):
        set_key(r, c, r.choice(sorted(set(VALUES) | set(SPECIAL))))
    if r.random() < 0.1:
        c.pop(r.choice([k for k in c if k not in ("model_type", "vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "intermediate_size")]))
    if name == inner:
        return c
    outer = dict(OUTER[name], model_type=name, text_config=c)
    if r.random() < 0.1:
        c["model_type"] = r.choice(["llama", "qwen2", "mistral", "gemma3_text", "ministral3"])
    for _ in range(r.choice([0, 1, 2])):
        set_key(r, outer, r.choice(["tie_word_embeddings", "is_causal", "tie_word_embeddings", "final_logit_softcapping", "rope_theta", "torch_dtype", "sinks"]))
    return outer


# Configs that do not depend on the seed: keys that transformers treats in a particular way.
WINDOW = dict(sliding_window=3, num_hidden_layers=3)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4, rope_theta=100.0)
LONG = dict(type="longrope", short_factor=[1.0, 1.5], long_factor=[2.0, 3.0])
CASES = [
    ("llama", dict(is_causal=False)), ("qwen2", dict(is_causal=False)), ("llama", dict(is_causal=None)), ("gemma3_text", dict(use_bidirectional_attention=True)),
    ("llama", dict(rope_parameters=dict(rope_type="default", rope_theta=1000.0), rope_scaling=YARN)),
    ("llama", dict(rope_parameters=YARN, rope_scaling={})), ("llama", dict(rope_parameters=YARN, rope_theta=9.0)),
    ("llama", dict(rope_theta=None)), ("llama", dict(rope_scaling=dict(type="linear", factor=4), rope_theta=100)),
    ("qwen2", dict(use_sliding_window=True, max_window_layers=0, max_position_embeddings=24)),
    ("qwen2", dict(WINDOW, use_sliding_window=True, max_window_layers=0)), ("qwen3", dict(WINDOW, use_sliding_window=True, max_window_layers=1)),
    ("qwen3", dict(WINDOW, use_sliding_window=False)), ("qwen3", dict(WINDOW, layer_types=[SLIDING, FULL, SLIDING])),
    ("qwen2", dict(attention_bias=True)), ("smollm3", dict(WINDOW, use_sliding_window=True, no_rope_layers=[1, 0, 1])),
    ("smollm3", dict(WINDOW, use_sliding_window=False, layer_types=[SLIDING, FULL, FULL])), ("smollm3", dict(no_rope_layers=[0, 1, 0, 0])),
    ("phi3", dict(WINDOW, layer_types=[FULL, FULL, SLIDING])), ("phi3", dict(rope_scaling=dict(LONG, original_max_position_embeddings=8))),
    ("phi3", dict(rope_scaling=LONG, original_max_position_embeddings=8, max_position_embeddings=64)), ("phi3", dict(rope_scaling=YARN)),
    ("phi3", dict(rope_scaling=dict(LONG, type="su", attention_factor=1.25), original_max_position_embeddings=64)),
    ("phi3", dict(partial_rotary_factor=0.5)), ("phi3", dict(partial_rotary_factor=0.8)), ("phi3", dict(partial_rotary_factor=0.7)),
    ("phi3", dict(full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False, attention_bias=False)),
    ("mistral", dict(WINDOW, layer_types=[FULL, SLIDING, FULL])), ("mistral", dict(layer_types=None, sliding_window=3)), ("mistral", dict(sliding_window=None)),
    ("gemma2", dict(WINDOW, sliding_window_pattern=3)), ("gemma2", dict(WINDOW, rope_local_base_freq=50.0, hidden_act="silu")),
    ("gemma2", dict(WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)), ("gemma2", dict(query_pre_attn_scalar=7.5)),
    ("gemma2", dict(sliding_window=None)), ("gemma2", dict(attention_bias=True)), ("olmo2", dict(attention_bias=True)),
    ("gemma3_text", dict(WINDOW, sliding_window_pattern=2)), ("gemma3_text", dict(WINDOW, _sliding_window_pattern=2)),
    ("gemma3_text", dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)), ("gemma3", dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    ("gemma3_text", dict(layer_types=[FULL, FULL], rope_parameters={FULL: dict(YARN, truncate=False)})),
    ("gemma3_text", dict(layer_types=[FULL, FULL], rope_parameters={FULL: YARN, "truncate": False})),
    ("gemma3_text", dict(layer_types=[SLIDING, FULL], rope_parameters=dict(rope_type="linear", factor=8.0, rope_theta=100.0))),
    ("gemma3_text", dict(layer_types=[SLIDING, FULL], rope_parameters={FULL: dict(rope_type="default", rope_theta=100.0)}, rope_scaling=dict(rope_type="linear", factor=4.0))),
    ("gemma3_text", dict(layer_types=[SLIDING, FULL], partial_rotary_factor=0.5)),
    ("gemma3_text", dict(layer_types=[SLIDING, FULL], rope_theta=100.0, rope_local_base_freq=50.0, rope_scaling=dict(rope_type="linear", factor=4.0))),
    ("llama", dict(partial_rotary_factor=0.5)), ("llama", dict(partial_rotary_factor=0.5, rope_scaling=YARN)), ("llama", dict(hidden_activation="gelu")),
    ("llama", dict(rope_scaling=dict(YARN, factor=None))), ("llama", dict(rope_scaling=dict(YARN, factor=None, mscale=0.7, mscale_all_dim=0.5))),
    ("llama", dict(rope_scaling=dict(YARN, truncate=False, beta_fast=8, beta_slow=0.5))), ("llama", dict(rope_scaling=dict(YARN, truncate=None, beta_fast=None))),
    ("llama", dict(original_max_position_embeddings=16, rope_scaling=YARN)), ("llama", dict(rope_scaling={FULL: YARN})), ("qwen3", dict(rope_parameters={FULL: YARN})),
    ("llama", dict(is_llama_config=True, rope_interleaved=False, **{"transformers.js_config": {"dtype": "q4"}})), ("llama", dict(rms_norm_eps=1)),
    ("llama", dict(num_key_value_heads=None)), ("mistral", dict(num_key_value_heads=None)), ("qwen2", dict(head_dim=6)), ("qwen2", dict(head_dim=None)),
    ("gpt2", dict(_num_labels=1, id2label={"0": "LABEL_0"}, n_ctx=32, task_specific_params={"text-generation": {"do_sample": True}})),
    ("gpt2", dict(num_hidden_layers=1)), ("gpt2", dict(scale_attn_by_inverse_layer_idx=True)), ("gpt2", dict(reorder_and_upcast_attn=True)),
    ("mistral3", dict()), ("mistral3", dict(tie_word_embeddings=False)),
    ("hunyuan_v1_dense", dict(rope_scaling=dict(type="dynamic", alpha=1000.0, factor=1.0))), ("hunyuan_v1_dense", dict(rope_scaling=dict(type="dynamic", factor=2.0))),
    ("hunyuan_v1_dense", dict(head_dim=None)), ("hunyuan_v1_dense", dict(attention_bias=True, rope_parameters=YARN)),
    ("ministral3", dict()), ("ministral3", dict(rope_parameters=YARN)), ("ministral3", dict(rope_parameters=dict(YARN, llama_4_scaling_beta=0.5), sliding_window=3)),
    ("ministral3", dict(rope_parameters=dict(rope_type="default", llama_4_scaling_beta=0.5, original_max_position_embeddings=4))),
    ("ministral3", dict(rope_parameters=dict(rope_type="default", llama_4_scaling_beta=0.0, original_max_position_embeddings=4))),
    ("ministral3", dict(rope_scaling=dict(YARN, llama_4_scaling_beta=0.2, mscale=1.0, mscale_all_dim=1.0), max_position_embeddings=16)),
    ("qwen3_moe", dict()), ("qwen3_moe", dict(norm_topk_prob=True, decoder_sparse_step=2)), ("qwen3_moe", dict(mlp_only_layers=[0], use_sliding_window=True, sliding_window=3)),
    ("qwen3_moe", dict(num_experts_per_tok=1, head_dim=6)), ("qwen3_moe", dict(sliding_window=3)),
    ("mixtral", dict()), ("mixtral", dict(sliding_window=3, router_jitter_noise=0.1)), ("mixtral", dict(num_local_experts=3, num_experts_per_tok=1)),
    ("glm4_moe", dict()), ("glm4_moe", dict(first_k_dense_replace=0, n_routed_experts=8, n_group=4, topk_group=2)), ("glm4_moe", dict(use_qk_norm=True, attention_bias=True)),
    ("glm4_moe", dict(routed_scaling_factor=2.5, norm_topk_prob=False, n_shared_experts=2, first_k_dense_replace=0)), ("glm4_moe", dict(partial_rotary_factor=1.0)),
    ("minimax_m2", dict(rotary_dim=4, num_key_value_heads=2)), ("minimax_m2", dict(rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5), num_key_value_heads=2)),
    ("minimax_m2", dict(num_key_value_heads=2)),
    ("gpt_oss", dict()), ("gpt_oss", dict(WINDOW, rope_parameters=dict(rope_type="default", rope_theta=100.0))), ("gpt_oss", dict(WINDOW, attention_bias=False, hidden_act="gelu")),
    ("gpt_oss", dict(sliding_window=3, layer_types=[FULL, FULL])), ("gpt_oss", dict(swiglu_limit=5.0)), ("gpt_oss", dict(rope_parameters=YARN)),
    ("ernie4_5", dict()), ("ernie4_5", dict(use_bias=True, tie_word_embeddings=False)), ("ernie4_5", dict(head_dim=None, rope_theta=100.0)),
    ("mistral3", dict(model_type="ministral3", rope_parameters=dict(YARN, llama_4_scaling_beta=0.5))),
    ("gemma3_text", dict(layer_types=[FULL, FULL], rope_scaling={k: v for k, v in YARN.items() if k != "rope_type"} | dict(type="yarn"))),
]
SMALL = dict(vocab_size=37, pad_token_id=None, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
             max_position_embeddings=64)


def case(name, keys):
    """Returns a small config with some keys."""
    if name == "gpt2":
        return dict(model_type=name, vocab_size=37, n_embd=8, n_layer=2, n_head=2, n_positions=32) | keys
    head = {"head_dim": 6} if name in ("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "gemma3", "mistral3", "hunyuan_v1_dense", "ministral3", "ernie4_5", "minimax_m2", "gpt_oss") else {}
    head |= EXPERTS.get(name, {})
    inner = dict(SMALL, model_type={"gemma3": "gemma3_text", "mistral3": "mistral"}.get(name, name)) | head | keys
    return dict(OUTER[name], model_type=name, text_config=inner) if name in OUTER else inner


def shrunk(c):
    """Returns a published config with the sizes of a small model. The size of heads and everything else is kept."""
    t = c.get("text_config", c)
    c.pop("quantization_config", None)  # with it, transformers loads models only if the package accelerate is installed
    if t["model_type"] == "gpt2":
        return t | dict(vocab_size=37, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    layers, default = min(t["num_hidden_layers"], 7), (CLASSES | UNDRAWN)[t["model_type"]]()
    heads, kv = (t.get(key, getattr(default, key)) for key in ("num_attention_heads", "num_key_value_heads"))
    t |= dict(hidden_size=2 * (t["hidden_size"] // heads), intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
              num_key_value_heads=1 if kv not in (None, heads) else 2, vocab_size=37, pad_token_id=None)
    for key, size in (("moe_intermediate_size", 8), ("num_experts", 8), ("num_experts_per_tok", 2), ("num_experts_per_token", 2)):
        if key in t:
            t[key] = size
    for key in ("layer_types", "no_rope_layers"):
        if t.get(key):
            t[key] = t[key][:layers]
    if t.get("sliding_window"):
        t["sliding_window"] = 5
    if "linear_attn_config" in t:
        t["linear_attn_config"] |= dict(num_heads=2) | {key: [layer for layer in t["linear_attn_config"][key] if layer <= layers] for key in ("kda_layers", "full_attn_layers")}
    return c | OUTER.get(c["model_type"], {})


def load(source, config_only):
    """Returns the model of a folder: with its weights, or with random ones."""
    c = hub.AutoConfig.from_pretrained(source)
    kind = hub.AutoModelForImageTextToText if hasattr(c, "vision_config") else hub.AutoModelForCausalLM
    if config_only:
        return kind.from_config(c, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32)
    return kind.from_pretrained(source, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()


def values(name, shape):
    """The values of a tensor: the weights of norms are around 1, all others around 0."""
    n = int(np.prod(shape))
    u = (draw(stream(0, name), np.arange(n, dtype=np.uint64)) >> np.uint64(40)).astype(np.float64) / 2**23 - 1
    if len(shape) == 1:
        u = 1 + 0.3 * u if name.endswith("weight") else 0.5 * u
    else:
        u *= np.sqrt(2 / shape[-1])
    return torch.tensor(u.astype(np.float32)).reshape(shape)


def tokens(vocab):
    return [int(x % np.uint64(vocab)) for x in draw(stream(0, "tokens"), np.arange(TOKENS + 1, dtype=np.uint64))]


def measure(folder):
    """Returns the losses of the tokens in f32, and by how much a loss differs if f64 replaces f32 where the model permits it."""
    model = load(folder, False)
    ids = torch.tensor([tokens(model.config.get_text_config().vocab_size)])

    def losses():
        with torch.no_grad():
            logits = model(ids[:, :-1], use_cache=False, return_dict=True).logits
        return torch.nn.functional.cross_entropy(logits[0].double(), ids[0, 1:], reduction="none")

    single = losses()
    if not single.isfinite().all():
        raise ValueError("the losses are not finite")
    rounding = 0.0
    with contextlib.suppress(RuntimeError):  # a model that requires f32 somewhere
        model.double()
        rounding = float(f"{(losses() - single).abs().nan_to_num().max().item():.1e}")
    return dict(losses=[round(x, 6) for x in single.tolist()], rounding=rounding)


def write(folder):
    """Writes the weights of a folder with a config. Returns whether they contain an output projection."""
    model = load(folder, True)
    kept = {name: p for name, p in model.state_dict().items() if name not in model.all_tied_weights_keys}
    save_file({name: values(name, tuple(p.shape)) for name, p in kept.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return "lm_head.weight" in kept


def attempt(folder, prepare):
    try:
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            head = prepare(folder)
            return measure(folder) | dict(head=head)
    except Exception as e:
        return dict(error=f"{type(e).__name__}: {e}"[:120])


def keys():
    """The declared keys of each class with the JSON types that it accepts and the default."""
    words = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null", list: "list", tuple: "list", dict: "dict"}

    def types(t):
        args = getattr(t, "__args__", None)
        if args and getattr(t, "__origin__", None) not in (list, tuple, dict):
            return sorted({w for a in args for w in types(a)}, key=lambda w: (w == "null", w))
        t = getattr(t, "__origin__", None) or t
        return [words[t]] if t in words else ["dict"] if isinstance(t, type) else ["str"]

    base = {f.name for f in dataclasses.fields(PreTrainedConfig)}
    return {name: {f.name: ["|".join(types(f.type)), None if isinstance(f.default, tuple) else f.default] for f in dataclasses.fields(cls) if f.name not in base}
            for name, cls in (CLASSES | UNDRAWN).items()} | {"": {name: ["", None] for name in base}}


def main():
    warnings.simplefilter("ignore")
    hub.logging.set_verbosity(100)
    hub.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if sys.argv[1] == "--keys":
        print(json.dumps(keys()))
    elif sys.argv[1] == "--measure":
        for i in range(len(list(pathlib.Path(sys.argv[2]).iterdir()))):
            print(json.dumps(attempt(pathlib.Path(sys.argv[2]) / str(i), lambda folder: None)))
    else:
        if sys.argv[1] == "--shrink":
            root, drawn = sys.argv[2], [shrunk(json.loads(pathlib.Path(name).read_text())) for name in sys.argv[3:]]
        else:
            root = sys.argv[4]
            drawn = [case(*CASES[i]) if i < len(CASES) else config(random.Random(f"{sys.argv[2]} {i}")) for i in range(int(sys.argv[3]))]
        for i, c in enumerate(drawn):
            folder = pathlib.Path(root) / str(i)
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(c))
            print(json.dumps(dict(config=c) | attempt(folder, write)), flush=True)


if __name__ == "__main__":
    main()
