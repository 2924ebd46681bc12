#!/usr/bin/env python3
"""Saves tiny random models with transformers, together with its results for them: the fixtures of package hf.

    python3 -m venv venv && venv/bin/pip install torch transformers safetensors
    venv/bin/python bench/peers/hub_models.py internal/hf/testdata/models [NAME...]
    venv/bin/python bench/peers/hub_models.py --measure FOLDER...    # print expected.json of each
    venv/bin/python bench/peers/hub_models.py --tokens 96 --measure FOLDER...    # the same for sequences of this length
    venv/bin/python bench/peers/hub_models.py --generate FOLDER...   # print the tokens that each generates after the first of expected.json

Each folder contains config.json, the weights and expected.json: tokens, the loss of each token after the first, their mean, the
norm of its gradient over all parameters, and the means at the beginning of each of the first steps with AdamW, computed in f32. Sizes are unusual: a head dimension other than hidden / heads, one head of
keys and values, a prime vocabulary. The tests of hf compare our results with these and, if SPPO_PYTHON names a Python that has
transformers, with those of a new run of this script."""

import json
import pathlib
import sys

import torch
import transformers as hub
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

TOKENS = 24
STEPS = 11
ADAMW = dict(lr=0.002, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
PROMPT = 17  # beyond original_max_position_embeddings, where transformers changes the frequencies of longrope
SMALL = dict(vocab_size=37, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
             max_position_embeddings=64, initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=2.0, original_max_position_embeddings=12)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
HYBRID = dict(SMALL, num_hidden_layers=4, sliding_window=5)
GEMMA = dict(SMALL, head_dim=6, query_pre_attn_scalar=10, num_hidden_layers=3, sliding_window=7)
ODD = dict(SMALL, hidden_size=12, intermediate_size=13, num_hidden_layers=3, vocab_size=41)
FULL, SLIDING = "full_attention", "sliding_attention"
GROWN = dict(YARN, llama_4_scaling_beta=0.4, original_max_position_embeddings=5)

LINEARS = dict(SMALL, rms_norm_eps=0.02, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=12, linear_conv_kernel_dim=3)
GATED = "linear_attention"

MAMBA = dict({key: value for key, value in SMALL.items() if key != "num_hidden_layers"}, ssm_state_size=6, mamba_num_heads=6, mamba_head_dim=5, n_groups=2, conv_kernel=3,
             n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=7, moe_shared_expert_intermediate_size=9, layer_norm_epsilon=0.02)
LATENT = dict(SMALL, num_key_value_heads=2, q_lora_rank=7, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=5, n_routed_experts=4, num_experts_per_tok=2,
              moe_intermediate_size=6, n_shared_experts=1, first_k_dense_replace=1)
LIMITED = dict(LATENT, topk_method="group_limited_greedy")

KIMI = dict({key: value for key, value in LATENT.items() if key not in ("n_routed_experts", "first_k_dense_replace")}, q_lora_rank=None, num_local_experts=4, num_hidden_layers=4,
            linear_num_heads=2, linear_head_dim=6, linear_conv_kernel_dim=3, rms_norm_eps=0.02)

VISION = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)

# Name, class, config, type of the stored weights, bytes of a shard. The index of a row is its seed, so add rows at the end. There is no
# padding token, because transformers does not train its row.
MODELS = [
    ("llama", hub.LlamaConfig, dict(SMALL, head_dim=6), "bfloat16", None),
    ("llama-f32-shards", hub.LlamaConfig, dict(SMALL, num_key_value_heads=2), "float32", "3KB"),
    ("llama-tied-f16", hub.LlamaConfig, dict(SMALL, head_dim=4, tie_word_embeddings=True), "float16", None),
    ("llama-bias", hub.LlamaConfig, dict(SMALL, head_dim=6, attention_bias=True, mlp_bias=True), "bfloat16", None),
    ("llama-3.1", hub.LlamaConfig, dict(SMALL, head_dim=8, rope_parameters=LLAMA3), "bfloat16", None),
    ("llama-linear", hub.LlamaConfig, dict(SMALL, head_dim=6, rope_parameters=LINEAR), "bfloat16", None),
    ("mistral", hub.MistralConfig, dict(SMALL, head_dim=6, sliding_window=None), "bfloat16", None),
    ("mistral-window", hub.MistralConfig, dict(SMALL, head_dim=6, sliding_window=5), "bfloat16", None),
    ("qwen2", hub.Qwen2Config, dict(SMALL, tie_word_embeddings=True), "bfloat16", None),
    ("qwen3", hub.Qwen3Config, dict(SMALL, head_dim=6), "bfloat16", None),
    ("qwen3-yarn", hub.Qwen3Config, dict(SMALL, head_dim=8, rope_parameters=YARN), "bfloat16", None),
    ("phi3", hub.Phi3Config, dict(SMALL, num_key_value_heads=2, sliding_window=None), "bfloat16", None),
    ("phi3-longrope", hub.Phi3Config, dict(
        SMALL, hidden_size=16, original_max_position_embeddings=16, rope_parameters=dict(
            rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75, short_factor=[1.0, 1.1, 1.2],
            long_factor=[1.0, 2.0, 4.0])), "bfloat16", None),
    ("olmo2", hub.Olmo2Config, dict(SMALL, num_key_value_heads=2), "bfloat16", None),
    ("smollm3", hub.SmolLM3Config, dict(SMALL, num_hidden_layers=4), "bfloat16", None),
    ("gemma2-full", hub.Gemma2Config, dict(GEMMA, layer_types=["full_attention"] * 3, attn_logit_softcapping=None), "bfloat16", None),
    ("gemma2-window", hub.Gemma2Config, dict(GEMMA, attn_logit_softcapping=None), "bfloat16", None),
    ("qwen3-window", hub.Qwen3Config, dict(SMALL, head_dim=6, num_hidden_layers=3, use_sliding_window=True, sliding_window=40,
                                           max_window_layers=1), "bfloat16", None),
    ("gemma3-full", hub.Gemma3TextConfig, dict(GEMMA, layer_types=["full_attention"] * 3, rope_parameters=dict(
        sliding_attention=dict(rope_type="default", rope_theta=10000.0),
        full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0))), "bfloat16", None),
    ("gpt2", hub.GPT2Config, dict(vocab_size=37, n_embd=8, n_layer=2, n_head=2, n_positions=32, initializer_range=0.3, bos_token_id=None,
                                  eos_token_id=None), "float32", None),
    ("gemma2", hub.Gemma2Config, dict(GEMMA, attn_logit_softcapping=2.0), "bfloat16", None),
    ("gemma3", hub.Gemma3TextConfig, dict(GEMMA, sliding_window=9, rope_parameters=dict(
        sliding_attention=dict(rope_type="default", rope_theta=10000.0),
        full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0)),
        layer_types=["sliding_attention", "sliding_attention", "full_attention"]), "bfloat16", None),
    ("gemma3-vision", hub.Gemma3Config, dict(
        mm_tokens_per_image=4, image_token_index=36, boi_token_index=35, eoi_token_index=34, vision_config=dict(
            VISION, model_type="siglip_vision_model", vision_use_head=False),
        text_config=dict(GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"])), "bfloat16", None),
    ("mistral-small-vision", hub.Mistral3Config, dict(
        image_token_index=10, spatial_merge_size=1, vision_config=dict(VISION, model_type="pixtral", head_dim=4),
        text_config=dict(SMALL, model_type="mistral", head_dim=6, sliding_window=None)), "bfloat16", None),
    ("olmo3", hub.Olmo3Config, dict(HYBRID, num_key_value_heads=2, rope_parameters=dict(
        full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=10000.0))), "bfloat16", None),
    ("seed-oss", hub.SeedOssConfig, dict(SMALL, head_dim=6, attention_out_bias=True), "bfloat16", None),
    ("granite", hub.GraniteConfig, dict(SMALL, tie_word_embeddings=True, embedding_multiplier=12.0, residual_multiplier=0.22,
                                        attention_multiplier=0.4, logits_scaling=1.3), "bfloat16", None),
    ("exaone4", hub.Exaone4Config, dict(HYBRID, hidden_size=12, intermediate_size=20), "bfloat16", None),
    ("exaone4-full", hub.Exaone4Config, dict(SMALL, sliding_window=None, layer_types=["full_attention"] * 2, rope_parameters=LLAMA3), "float32", None),
    ("olmo3-full", hub.Olmo3Config, dict(ODD, num_key_value_heads=2, sliding_window=9, layer_types=[FULL] * 3), "float32", None),
    ("olmo3-types", hub.Olmo3Config, dict(ODD, num_key_value_heads=2, sliding_window=3, layer_types=[FULL, SLIDING, SLIDING], tie_word_embeddings=True), "bfloat16", None),
    ("olmo3-shards", hub.Olmo3Config, dict(HYBRID, num_key_value_heads=2, hidden_act="gelu"), "bfloat16", "3KB"),
    ("seed-oss-plain", hub.SeedOssConfig, dict(ODD, head_dim=8), "float32", None),
    ("seed-oss-mlp", hub.SeedOssConfig, dict(ODD, head_dim=4, num_key_value_heads=2, mlp_bias=True, tie_word_embeddings=True), "bfloat16", None),
    ("seed-oss-yarn", hub.SeedOssConfig, dict(SMALL, head_dim=10, attention_bias=False, rope_parameters=YARN), "bfloat16", "3KB"),
    ("granite-plain", hub.GraniteConfig, dict(ODD, attention_multiplier=6 ** -0.5), "float32", None),
    ("granite-bias", hub.GraniteConfig, dict(ODD, num_key_value_heads=2, attention_bias=True, mlp_bias=True, embedding_multiplier=3.0, residual_multiplier=0.6,
                                            attention_multiplier=0.5, logits_scaling=0.8), "bfloat16", None),
    ("granite-linear", hub.GraniteConfig, dict(SMALL, tie_word_embeddings=True, residual_multiplier=1.5, attention_multiplier=0.7, logits_scaling=2.0,
                                              rope_parameters=LINEAR), "bfloat16", "3KB"),
    ("exaone4-types", hub.Exaone4Config, dict(ODD, sliding_window=4, layer_types=[SLIDING, FULL, SLIDING], tie_word_embeddings=True), "bfloat16", None),
    ("exaone4-window", hub.Exaone4Config, dict(SMALL, num_key_value_heads=2, sliding_window=6, layer_types=[SLIDING] * 2), "bfloat16", "3KB"),
    ("hunyuan", hub.HunYuanDenseV1Config, dict(SMALL, head_dim=6), "bfloat16", None),
    ("hunyuan-alpha", hub.HunYuanDenseV1Config, dict(ODD, head_dim=8, tie_word_embeddings=True, rope_parameters=dict(
        rope_type="dynamic", factor=1.0, alpha=50.0, rope_theta=10000.0)), "float32", None),
    ("hunyuan-bias", hub.HunYuanDenseV1Config, dict(ODD, head_dim=6, num_key_value_heads=2, attention_bias=True), "bfloat16", None),
    ("hunyuan-yarn", hub.HunYuanDenseV1Config, dict(SMALL, head_dim=10, rope_parameters=YARN), "bfloat16", "3KB"),
    ("ministral-3", hub.Ministral3Config, dict(SMALL, head_dim=6, rope_parameters=GROWN), "bfloat16", None),
    ("ministral-3-window", hub.Ministral3Config, dict(ODD, head_dim=8, sliding_window=5, rope_parameters=dict(
        LLAMA3, llama_4_scaling_beta=1.0, original_max_position_embeddings=8)), "float32", None),
    ("ministral-3-plain", hub.Ministral3Config, dict(ODD, head_dim=6, num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=dict(
        rope_type="default", rope_theta=100.0, llama_4_scaling_beta=0.0, original_max_position_embeddings=8)), "bfloat16", "3KB"),
    ("ministral-3-vision", hub.Mistral3Config, dict(
        image_token_index=10, spatial_merge_size=1, vision_config=dict(VISION, model_type="pixtral", head_dim=4),
        text_config=dict(SMALL, model_type="ministral3", head_dim=6, rope_parameters=GROWN)), "bfloat16", None),
    ("ernie-4.5", hub.Ernie4_5Config, dict(SMALL, head_dim=6), "bfloat16", None),
    ("ernie-4.5-bias", hub.Ernie4_5Config, dict(ODD, head_dim=8, use_bias=True, tie_word_embeddings=False), "float32", None),
    ("ernie-4.5-odd", hub.Ernie4_5Config, dict(ODD, head_dim=10, num_key_value_heads=2, hidden_act="gelu"), "bfloat16", "3KB"),
    ("ernie-4.5-linear", hub.Ernie4_5Config, dict(SMALL, head_dim=None, rope_parameters=LINEAR), "float16", None),
    ("qwen3-moe", hub.Qwen3MoeConfig, dict(SMALL, head_dim=6, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=7, norm_topk_prob=True), "bfloat16", None),
    ("qwen3-moe-steps", hub.Qwen3MoeConfig, dict(ODD, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, decoder_sparse_step=2,
                                                tie_word_embeddings=True), "float32", None),
    ("qwen3-moe-only", hub.Qwen3MoeConfig, dict(ODD, head_dim=4, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=5, mlp_only_layers=[0],
                                               norm_topk_prob=True, attention_bias=True), "bfloat16", "3KB"),
    ("qwen3-moe-fused", hub.Qwen3MoeConfig, dict(SMALL, head_dim=6, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=7, norm_topk_prob=True), "bfloat16", None),
    ("mixtral", hub.MixtralConfig, dict(SMALL, num_local_experts=4, num_experts_per_tok=2), "bfloat16", None),
    ("mixtral-window", hub.MixtralConfig, dict(ODD, head_dim=8, sliding_window=5, num_local_experts=5, num_experts_per_tok=3), "float32", None),
    ("mixtral-tied", hub.MixtralConfig, dict(ODD, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, tie_word_embeddings=True), "bfloat16", "3KB"),
    ("mixtral-fused", hub.MixtralConfig, dict(SMALL, num_local_experts=4, num_experts_per_tok=2), "float32", None),
    ("glm4-moe", hub.Glm4MoeConfig, dict(SMALL, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, attention_bias=True, num_mtp_layers=0),
     "float32", None),
    ("glm4-moe-groups", hub.Glm4MoeConfig, dict(ODD, head_dim=4, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=5, n_group=4, topk_group=2, n_shared_experts=2,
                                               use_qk_norm=True, routed_scaling_factor=2.5, first_k_dense_replace=2, num_mtp_layers=0), "bfloat16", None),
    ("glm4-moe-plain", hub.Glm4MoeConfig, dict(ODD, head_dim=8, n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=7, norm_topk_prob=False,
                                              first_k_dense_replace=0, partial_rotary_factor=1.0, num_mtp_layers=0), "bfloat16", "3KB"),
    ("glm4-moe-mtp", hub.Glm4MoeConfig, dict(SMALL, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, num_mtp_layers=1), "bfloat16", None),
    ("minimax-m2", hub.MiniMaxM2Config, dict(SMALL, num_key_value_heads=2, head_dim=8, rotary_dim=4, num_local_experts=4, num_experts_per_tok=2), "bfloat16", None),
    ("minimax-m2-whole", hub.MiniMaxM2Config, dict(ODD, num_key_value_heads=2, head_dim=6, num_local_experts=5, num_experts_per_tok=3), "float32", None),
    ("minimax-m2-tied", hub.MiniMaxM2Config, dict(ODD, num_key_value_heads=2, head_dim=8, partial_rotary_factor=0.5, num_local_experts=3, num_experts_per_tok=2,
                                                 tie_word_embeddings=True), "bfloat16", "3KB"),
    ("minimax-m2-fused", hub.MiniMaxM2Config, dict(SMALL, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2), "bfloat16", None),
    ("gpt-oss", hub.GptOssConfig, dict(SMALL, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, rope_parameters=dict(YARN, truncate=False)), "bfloat16", None),
    ("gpt-oss-plain", hub.GptOssConfig, dict(ODD, head_dim=6, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=3, sliding_window=4, attention_bias=False,
                                            rope_parameters=dict(rope_type="default", rope_theta=100.0)), "float32", None),
    ("gpt-oss-full", hub.GptOssConfig, dict(ODD, head_dim=8, num_local_experts=3, num_experts_per_tok=2, sliding_window=4, layer_types=[FULL] * 3, tie_word_embeddings=True,
                                           rope_parameters=YARN), "bfloat16", "3KB"),
    ("gpt-oss-window", hub.GptOssConfig, dict(SMALL, head_dim=10, num_local_experts=4, num_experts_per_tok=1, sliding_window=7, layer_types=[SLIDING] * 2), "bfloat16", None),
    ("gpt-oss-mxfp4", hub.GptOssConfig, dict(SMALL, hidden_size=64, intermediate_size=32, head_dim=8, num_local_experts=3, num_experts_per_tok=2, sliding_window=5,
                                            rope_parameters=dict(YARN, truncate=False)), "bfloat16", None),
    ("qwen3-next", hub.Qwen3NextConfig, dict(LINEARS, head_dim=8, num_hidden_layers=4, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=7, shared_expert_intermediate_size=9,
                                            full_attention_interval=2), "bfloat16", None),
    ("qwen3-next-types", hub.Qwen3NextConfig, dict(LINEARS, head_dim=16, num_hidden_layers=3, linear_num_value_heads=6, linear_conv_kernel_dim=4, num_experts=4,
                                                  num_experts_per_tok=3, moe_intermediate_size=6, shared_expert_intermediate_size=5, norm_topk_prob=False, mlp_only_layers=[1],
                                                  layer_types=[GATED, FULL, GATED], tie_word_embeddings=True, partial_rotary_factor=1.0), "float32", None),
    ("qwen3.5", hub.Qwen3_5TextConfig, dict(LINEARS, head_dim=16, num_hidden_layers=3, layer_types=[FULL, GATED, GATED]), "float32", None),
    ("qwen3.5-moe", hub.Qwen3_5MoeTextConfig, dict(LINEARS, head_dim=8, num_hidden_layers=4, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=7,
                                                  shared_expert_intermediate_size=9), "bfloat16", None),
    ("nemotron-h", hub.NemotronHConfig, dict(MAMBA, head_dim=6, layers_block_type=[GATED, "moe", FULL, "mlp"], moe_latent_size=5), "float32", None),
    ("nemotron-h-groups", hub.NemotronHConfig, dict(MAMBA, head_dim=4, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, norm_topk_prob=False,
                                                   routed_scaling_factor=2.5, hybrid_override_pattern="MEM*E"), "bfloat16", "3KB"),
    ("nemotron-h-dense", hub.NemotronHConfig, dict(MAMBA, head_dim=8, num_key_value_heads=2, n_groups=6, conv_kernel=4, use_conv_bias=False, time_step_min=0.5,
                                                  hybrid_override_pattern="M-M*-", tie_word_embeddings=True), "bfloat16", None),
    ("nemotron-h-fused", hub.NemotronHConfig, dict(MAMBA, head_dim=6, layers_block_type=[FULL, GATED, "moe", GATED], mlp_hidden_act="gelu", moe_latent_size=12),
     "float32", None),
    ("qwen3.5-vision", hub.Qwen3_5Config, dict(
        vision_config=dict(depth=1, hidden_size=8, intermediate_size=12, num_heads=2, patch_size=4, out_hidden_size=8, num_position_embeddings=16),
        text_config=dict(LINEARS, head_dim=16, num_hidden_layers=3, layer_types=[GATED, FULL, GATED])), "bfloat16", None),
    ("deepseek-v3", hub.DeepseekV3Config, dict(LATENT, n_group=2, topk_group=1, rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0)), "bfloat16", None),
    ("deepseek-v3-plain", hub.DeepseekV3Config, dict(LATENT, q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False, tie_word_embeddings=True), "float32", None),
    ("deepseek-v3-halves", hub.DeepseekV3Config, dict(LATENT, hidden_size=12, qk_nope_head_dim=3, qk_rope_head_dim=8, v_head_dim=6, num_attention_heads=4, num_key_value_heads=4,
                                                     n_group=4, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2, rope_interleave=False), "bfloat16", "3KB"),
    ("deepseek-v3-mtp", hub.DeepseekV3Config, dict(LATENT, n_group=1, topk_group=1, first_k_dense_replace=0, num_mtp_layers=1, rope_parameters=dict(
        YARN, factor=4.0, mscale=0.7, mscale_all_dim=1.3)), "float32", None),
    ("deepseek-v2", hub.DeepseekV2Config, dict(LATENT, rope_parameters=dict(YARN, mscale=0.707, mscale_all_dim=0.707)), "bfloat16", None),
    ("deepseek-v2-plain", hub.DeepseekV2Config, dict(LATENT, q_lora_rank=None, first_k_dense_replace=0, n_shared_experts=2), "float32", None),
    ("deepseek-v2-odd", hub.DeepseekV2Config, dict(LATENT, hidden_size=12, num_attention_heads=4, num_key_value_heads=4, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=3, vocab_size=41,
                                                  routed_scaling_factor=1.7, tie_word_embeddings=True), "bfloat16", "3KB"),
    ("deepseek-v2-linear", hub.DeepseekV2Config, dict(LATENT, num_experts_per_tok=1, rope_parameters=LINEAR), "float32", None),
    ("mistral4", hub.Mistral4Config, dict(LATENT, rope_parameters=dict(GROWN, mscale=1.0, mscale_all_dim=1.0)), "bfloat16", None),
    ("mistral4-plain", hub.Mistral4Config, dict(LATENT, q_lora_rank=None, n_group=2, topk_group=1, rope_parameters=dict(
        rope_type="linear", factor=2.0, rope_theta=100.0, llama_4_scaling_beta=0.0, original_max_position_embeddings=8)), "float32", None),
    ("mistral4-halves", hub.Mistral4Config, dict(LATENT, hidden_size=12, num_attention_heads=4, num_key_value_heads=4, v_head_dim=7, rope_interleave=False, norm_topk_prob=False,
                                                rope_parameters=dict(GROWN, factor=3.0)), "bfloat16", "3KB"),
    ("mistral4-dense", hub.Mistral4Config, dict(LATENT, num_hidden_layers=3, first_k_dense_replace=2, tie_word_embeddings=True, rope_parameters=dict(GROWN, mscale_all_dim=0.5)), "bfloat16", None),
    ("mistral4-vision", hub.Mistral3Config, dict(
        image_token_index=10, spatial_merge_size=1, vision_config=dict(VISION, model_type="pixtral", head_dim=4),
        text_config=dict(LATENT, model_type="mistral4", rope_parameters=dict(GROWN, mscale=1.0, mscale_all_dim=1.0))), "bfloat16", None),
    ("kimi-linear", hub.KimiLinearConfig, dict(KIMI, layer_types=[GATED] * 3 + [FULL]), "bfloat16", None),
    ("kimi-linear-groups", hub.KimiLinearConfig, dict(KIMI, layer_types=[FULL, GATED, GATED, GATED], n_group=2, topk_group=1, norm_topk_prob=False, n_shared_experts=2, q_lora_rank=7,
                                                     qk_nope_head_dim=3, v_head_dim=6, tie_word_embeddings=True), "float32", None),
    ("kimi-linear-odd", hub.KimiLinearConfig, dict(KIMI, hidden_size=12, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=3, layer_types=[GATED, FULL, GATED],
                                                  linear_num_heads=4, linear_head_dim=5, linear_conv_kernel_dim=4, num_experts_per_tok=1, qk_rope_head_dim=3, vocab_size=41,
                                                  mlp_layer_types=["dense", "sparse", "dense"], routed_scaling_factor=1.0), "bfloat16", "3KB"),
    ("kimi-linear-fused", hub.KimiLinearConfig, dict(KIMI, layer_types=[GATED, GATED, FULL, GATED], kv_lora_rank=5, first_k_dense_replace=2), "float32", None),
    ("kimi-k2", hub.DeepseekV3Config, dict(LATENT, num_hidden_layers=3, n_routed_experts=6, n_group=1, topk_group=1, num_mtp_layers=0, routed_scaling_factor=2.827, rope_parameters=dict(
        YARN, rope_theta=50000.0, factor=32.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)), "bfloat16", None),
    ("deepseek-v2-groups", hub.DeepseekV2Config, dict(LIMITED, n_group=4, topk_group=2, n_routed_experts=12, num_experts_per_tok=3, routed_scaling_factor=16.0, n_shared_experts=2,
                                                     rope_parameters=dict(YARN, mscale=0.707, mscale_all_dim=0.707)), "bfloat16", None),
    ("deepseek-v2-single", hub.DeepseekV2Config, dict(LIMITED, q_lora_rank=None, hidden_size=12, num_attention_heads=4, num_key_value_heads=4, vocab_size=41, n_routed_experts=5,
                                                     n_group=5, topk_group=3, first_k_dense_replace=0, tie_word_embeddings=True), "float32", None),
]


def kind(config):
    """The class of a vision model, or of a text model."""
    if config.model_type == "mistral4":  # which AutoModelForCausalLM does not know
        return hub.Mistral4ForCausalLM
    if isinstance(config, hub.DeepseekV3Config):
        return hub.DeepseekV3ForCausalLM
    return hub.AutoModelForImageTextToText if hasattr(config, "vision_config") else hub.AutoModelForCausalLM


def settings_of(folder):
    """The config of a folder. That of Kimi K2 says that it loads as DeepSeek-V3, by code in the folder, and has a model_type that transformers does not know."""
    if json.loads((pathlib.Path(folder) / "config.json").read_text())["model_type"] == "kimi_k2":
        config = hub.DeepseekV3Config.from_pretrained(folder)
        config.model_type = "deepseek_v3"  # which decides how tensors are named
        return config
    return hub.AutoConfig.from_pretrained(folder)


def randomise(model):
    """Gives norms and biases different values, so that a swapped pair is detected."""
    with torch.no_grad():
        for name, b in model.named_buffers():
            if name.endswith("correction_bias"):
                b.add_(torch.randn_like(b) * 0.2)
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.2)


def expected(folder):
    """Returns the losses and the gradient norm of the saved model, in f32."""
    config = settings_of(folder)
    model = kind(config).from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()
    tokens = torch.randint(0, config.get_text_config().vocab_size, (1, TOKENS + 1), generator=torch.Generator().manual_seed(7))
    optimizer, steps = torch.optim.AdamW(model.parameters(), **ADAMW), []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits[0], tokens[0, 1:], reduction="none")
        losses.mean().backward()
        steps.append(losses.double().mean().item())
        if step == 0:
            square = sum(p.grad.double().pow(2).sum() for p in model.parameters() if p.grad is not None)
            first = dict(tokens=tokens[0].tolist(), losses=losses.tolist(), loss=steps[0], grad_norm=square.sqrt().item(),
                         parameters=sum(p.numel() for p in model.parameters() if p.grad is not None))
        optimizer.step()
    return first | dict(steps=steps)


def generated(folder):
    """Returns the greedy continuation of PROMPT tokens, up to the number of tokens in expected.json, in f32, with the margin of each
    choice: the largest logit minus the second largest."""
    config = settings_of(folder)
    model = kind(config).from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()
    tokens = json.loads((pathlib.Path(folder) / "expected.json").read_text())["tokens"][:PROMPT]
    out = model.generate(torch.tensor([tokens]), do_sample=False, max_length=TOKENS + 1, eos_token_id=None, pad_token_id=0,
                         return_dict_in_generate=True, output_logits=True)
    best = [row[0].topk(2).values for row in out.logits]
    return dict(tokens=out.sequences[0].tolist(), margins=[(b[0] - b[1]).item() for b in best])


def packed(folder):
    """Replaces the matrices of experts by random ones in MXFP4, and returns the results of the model with the values that transformers has for
    them. (Its from_pretrained reads such a folder only if the package accelerate is installed.)"""
    file, config, random = folder / "model.safetensors", folder / "config.json", torch.Generator().manual_seed(11)
    plain, mxfp4 = load_file(file), {}
    for name in list(plain):
        if name.endswith("_proj"):
            experts, rows, cols = plain[name].shape
            mxfp4[f"{name}_blocks"] = torch.randint(0, 256, (experts, cols, rows // 32, 16), generator=random, dtype=torch.uint8)
            mxfp4[f"{name}_scales"] = torch.randint(121, 125, (experts, cols, rows // 32), generator=random, dtype=torch.uint8)
            plain[name] = convert_moe_packed_tensors(mxfp4[f"{name}_blocks"], mxfp4[f"{name}_scales"])
    save_file(plain, file, {"format": "pt"})
    results = expected(folder)
    save_file({name: values for name, values in plain.items() if not name.endswith("_proj")} | mxfp4, file, {"format": "pt"})
    settings = json.loads(config.read_text()) | dict(quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"]))
    config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return results


def published(folder):
    """Gives the config and the tensors of a folder of Kimi Linear the names that they have in published ones, which transformers reads but does not write."""
    file, config = folder / "model.safetensors", folder / "config.json"
    save_file({name.replace("block_sparse_moe", "mlp") if name.startswith("model.layers.0.") else name: values for name, values in load_file(file).items()}, file, {"format": "pt"})
    settings = json.loads(config.read_text())
    types, sizes = settings.pop("layer_types"), {ours: settings.pop(name) for ours, name in (
        ("num_heads", "linear_num_heads"), ("head_dim", "linear_head_dim"), ("short_conv_kernel_size", "linear_conv_kernel_dim"))}
    del settings["mlp_layer_types"]
    layers = lambda kind: [i + 1 for i, name in enumerate(types) if name == kind]
    settings |= dict(linear_attn_config=dict(sizes, kda_layers=layers(GATED), full_attn_layers=layers(FULL)), first_k_dense_replace=1, moe_layer_freq=1, mla_use_nope=True,
                     moe_router_activation_func="sigmoid", num_nextn_predict_layers=0, use_grouped_topk=True, rope_theta=10000.0, rope_scaling=None)
    config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def main(out, *names):
    for seed, (name, config, arguments, dtype, shard) in enumerate(MODELS):
        if names and name not in names:
            continue
        folder = pathlib.Path(out) / name
        torch.manual_seed(seed)
        settings = config(**arguments)
        model = (kind(settings)._from_config if settings.model_type in ("mistral4", "deepseek_v3") else kind(settings).from_config)(settings)
        randomise(model)
        model.to(getattr(torch, dtype)).save_pretrained(folder, save_original_format=not name.endswith("fused"), **({"max_shard_size": shard} if shard else {}))
        (folder / "generation_config.json").unlink(missing_ok=True)
        if name in ("qwen3-next", "qwen3.5-vision"):  # as in published folders, which have tensors for multi-token prediction
            save_file(load_file(folder / "model.safetensors") | {"mtp.fc.weight": torch.randn(8, 16).bfloat16()}, folder / "model.safetensors", {"format": "pt"})
        if name == "kimi-linear":
            published(folder)
        if name == "kimi-k2":
            config = json.loads((folder / "config.json").read_text())
            scaling = config.pop("rope_parameters")
            rope = dict(rope_theta=scaling.pop("rope_theta"), rope_scaling=dict(scaling, type=scaling.pop("rope_type")))
            config |= rope | dict(model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
                                  aux_loss_alpha=0.001, ep_size=1, moe_layer_freq=1, scoring_func="sigmoid", seq_aux=True, topk_method="noaux_tc")
            (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        (folder / "expected.json").write_text(json.dumps((packed if name.endswith("mxfp4") else expected)(folder)) + "\n")
        print(name)


if __name__ == "__main__":
    if sys.argv[1] == "--tokens":
        TOKENS = int(sys.argv[2])
        del sys.argv[1:3]
    if sys.argv[1] == "--measure":
        for folder in sys.argv[2:]:
            print(json.dumps(expected(folder)))
    elif sys.argv[1] == "--generate":
        for folder in sys.argv[2:]:
            print(json.dumps(generated(folder)))
    else:
        main(*sys.argv[1:])
