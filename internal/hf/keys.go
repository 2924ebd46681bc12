package hf

import (
	"encoding/json"
	"slices"
	"strings"
)

// use is what happens to a key that a config class of transformers declares.
type use int

const (
	read    use = iota // the architecture's reader uses it
	silent             // it does not affect the losses of text: names, token ids, generation, images, other tasks
	dropout            // it is ignored, with a notice unless it is 0
	fixed              // it is refused unless it has its default
)

// key is a row of the table of a config class: a key of config.json, the JSON types that the class accepts, such as
// int|null, and its default. A row without types is a key whose type transformers does not check: one of the base class,
// or one that no class declares and that is read all the same. TestKeysOfTransformers compares the rows with the
// classes.
type key struct {
	name  string
	types string
	value any // default
	use   use
}

// Keys of all config classes.
var commonKeys = []key{
	{"architectures", "", nil, silent},
	{"chunk_size_feed_forward", "", 0, silent},
	{"dtype", "", nil, read},
	{"id2label", "", nil, silent},
	{"is_encoder_decoder", "", false, silent},
	{"label2id", "", nil, silent},
	{"output_hidden_states", "", false, silent},
	{"problem_type", "", nil, silent},
	{"return_dict", "", true, silent},
	{"transformers_version", "", nil, silent},
	{"_name_or_path", "", nil, silent},
	{"auto_map", "", nil, silent},
	{"cache_implementation", "", nil, silent},
	{"is_causal", "", true, fixed},
	{"mlp_layer_types", "", nil, fixed},
	{"model_type", "", nil, silent},
	{"per_layer_config", "", nil, fixed},
	{"task_specific_params", "", nil, silent},
	{"transformers_weights", "", nil, fixed},
}

// Keys of language models other than GPT-2, with the defaults of most classes.
var decoderKeys = with(commonKeys,
	key{"vocab_size", "int", 32000, read},
	key{"hidden_size", "int", 4096, read},
	key{"intermediate_size", "int", 11008, read},
	key{"num_hidden_layers", "int", 32, read},
	key{"num_attention_heads", "int", 32, read},
	key{"num_key_value_heads", "int|null", nil, read},
	key{"hidden_act", "str", "silu", read},
	key{"max_position_embeddings", "int", 2048, read},
	key{"initializer_range", "float", 0.02, read},
	key{"rms_norm_eps", "float", 1e-6, read},
	key{"use_cache", "bool", true, silent},
	key{"pad_token_id", "int|null", nil, read},
	key{"bos_token_id", "int|null", nil, silent},
	key{"eos_token_id", "int|list|null", nil, silent},
	key{"tie_word_embeddings", "bool", false, read},
	key{"rope_parameters", "dict|null", nil, read},
	key{"attention_dropout", "float|int", 0.0, dropout},
	// A dict under one of these names replaces the config.
	key{"text_config", "", nil, fixed}, key{"decoder", "", nil, fixed}, key{"generator", "", nil, fixed}, key{"text_encoder", "", nil, fixed},
)

var (
	llamaKeys = with(decoderKeys,
		key{"pretraining_tp", "int|null", 1, silent},
		key{"attention_bias", "bool", false, read},
		key{"attention_dropout", "float|int|null", 0.0, dropout},
		key{"mlp_bias", "bool", false, read},
		key{"head_dim", "int|null", nil, read},
	)
	mistralKeys = with(decoderKeys,
		key{"intermediate_size", "int", 14336, read},
		key{"num_key_value_heads", "int", 8, read},
		key{"head_dim", "int|null", nil, read},
		key{"max_position_embeddings", "int", 131072, read},
		key{"sliding_window", "int|null", 4096, read},
	)
	ministralKeys  = with(mistralKeys, key{"layer_types", "list|null", nil, read})
	ministral3Keys = with(decoderKeys,
		key{"vocab_size", "int", 131072, read},
		key{"intermediate_size", "int", 14336, read},
		key{"num_hidden_layers", "int", 34, read},
		key{"num_key_value_heads", "int", 8, read},
		key{"head_dim", "int", 128, read},
		key{"max_position_embeddings", "int", 262144, read},
		key{"rms_norm_eps", "float", 1e-5, read},
		key{"pad_token_id", "int|null", 11, read},
		key{"sliding_window", "int|null", nil, read},
	)
	qwen2Keys = with(decoderKeys,
		key{"vocab_size", "int", 151936, read},
		key{"intermediate_size", "int", 22016, read},
		key{"num_key_value_heads", "int|null", 32, read},
		key{"max_position_embeddings", "int", 32768, read},
		key{"use_sliding_window", "bool", false, read},
		key{"sliding_window", "int|null", 4096, read},
		key{"max_window_layers", "int", 28, read},
		key{"layer_types", "list|null", nil, read},
	)
	qwen3Keys = with(qwen2Keys,
		key{"head_dim", "int", 128, read},
		key{"attention_bias", "bool", false, read},
	)
	phi3Keys = with(decoderKeys,
		key{"vocab_size", "int", 32064, read},
		key{"hidden_size", "int", 3072, read},
		key{"intermediate_size", "int", 8192, read},
		key{"resid_pdrop", "float|int", 0.0, dropout},
		key{"embd_pdrop", "float|int", 0.0, dropout},
		key{"max_position_embeddings", "int", 4096, read},
		key{"original_max_position_embeddings", "int", 4096, read},
		key{"rms_norm_eps", "float", 1e-5, read},
		key{"pad_token_id", "int|null", 32000, read},
		key{"sliding_window", "int|null", nil, read},
	)
	olmo2Keys = with(decoderKeys,
		key{"vocab_size", "int", 50304, read},
		key{"rms_norm_eps", "float", 1e-5, read},
		key{"pad_token_id", "int|null", 1, read},
		key{"attention_bias", "bool", false, read},
	)
	smollm3Keys = with(decoderKeys,
		key{"vocab_size", "int", 128256, read},
		key{"hidden_size", "int", 2048, read},
		key{"num_hidden_layers", "int", 36, read},
		key{"num_attention_heads", "int", 16, read},
		key{"num_key_value_heads", "int|null", 4, read},
		key{"max_position_embeddings", "int", 32768, read},
		key{"pad_token_id", "int|null", 128004, read},
		key{"use_sliding_window", "bool", false, read},
		key{"sliding_window", "int|null", nil, read},
		key{"no_rope_layers", "list|null", nil, read},
		key{"no_rope_layer_interval", "int", 4, read},
		key{"layer_types", "list|null", nil, read},
		key{"attention_bias", "bool", false, read},
		key{"mlp_bias", "bool", false, read},
		key{"tie_word_embeddings", "bool", true, read},
	)
	gemma2Keys = without(with(decoderKeys,
		key{"vocab_size", "int", 256000, read},
		key{"hidden_size", "int", 2304, read},
		key{"intermediate_size", "int", 9216, read},
		key{"num_hidden_layers", "int", 26, read},
		key{"num_attention_heads", "int", 8, read},
		key{"num_key_value_heads", "int", 4, read},
		key{"head_dim", "int", 256, read},
		key{"hidden_activation", "str", "gelu_pytorch_tanh", read},
		key{"max_position_embeddings", "int", 8192, read},
		key{"pad_token_id", "int|null", 0, read},
		key{"tie_word_embeddings", "bool", true, read},
		key{"attention_bias", "bool", false, read},
		key{"attention_dropout", "float|int|null", 0.0, dropout},
		key{"query_pre_attn_scalar", "int", 256, read},
		key{"sliding_window", "int|null", 4096, read},
		key{"layer_types", "list|null", nil, read},
		key{"final_logit_softcapping", "float|null", 30.0, read},
		key{"attn_logit_softcapping", "float|null", 50.0, read},
		key{"use_bidirectional_attention", "bool|null", nil, fixed},
	), "hidden_act")
	gemma3Keys = with(gemma2Keys,
		key{"vocab_size", "int", 262208, read},
		key{"max_position_embeddings", "int", 131072, read},
		key{"final_logit_softcapping", "float|null", nil, read},
		key{"attn_logit_softcapping", "float|null", nil, read},
		key{"use_bidirectional_attention", "bool|null", false, fixed},
		key{"_sliding_window_pattern", "", nil, silent}, // which transformers writes
	)
	olmo3Keys = with(olmo2Keys,
		key{"sliding_window", "int|null", 4096, read},
		key{"layer_types", "list|null", nil, read},
	)
	seedKeys = with(decoderKeys,
		key{"vocab_size", "int", 155136, read},
		key{"intermediate_size", "int", 27648, read},
		key{"num_hidden_layers", "int", 64, read},
		key{"num_attention_heads", "int", 80, read},
		key{"num_key_value_heads", "int|null", 8, read},
		key{"head_dim", "int|null", 128, read},
		key{"max_position_embeddings", "int", 524288, read},
		key{"pad_token_id", "int|null", 1, read},
		key{"pretraining_tp", "int", 1, silent},
		key{"attention_bias", "bool", true, read},
		key{"attention_out_bias", "bool", false, read},
		key{"mlp_bias", "bool", false, read},
		key{"attention_dropout", "float|int", 0.1, dropout},
		key{"residual_dropout", "float|int", 0.1, dropout},
	)
	graniteKeys = with(decoderKeys,
		key{"attention_bias", "bool", false, read},
		key{"mlp_bias", "bool", false, read},
		key{"embedding_multiplier", "float|int", 1.0, read},
		key{"logits_scaling", "float|int", 1.0, read},
		key{"residual_multiplier", "float|int", 1.0, read},
		key{"attention_multiplier", "float|int", 1.0, read},
	)
	exaone4Keys = with(decoderKeys,
		key{"vocab_size", "int", 102400, read},
		key{"intermediate_size", "int", 16384, read},
		key{"num_key_value_heads", "int", 32, read},
		key{"rms_norm_eps", "float", 1e-5, read},
		key{"sliding_window", "int|null", 4096, read},
		key{"sliding_window_pattern", "int|str|null", 4, read},
		key{"layer_types", "list|null", nil, read},
	)
	hunyuanKeys = with(decoderKeys,
		key{"vocab_size", "int", 290943, read},
		key{"rms_norm_eps", "float", 1e-5, read},
		key{"pad_token_id", "int|null", 0, read},
		key{"eod_token_id", "int|null", 3, silent},
		key{"pretraining_tp", "int", 1, silent},
		key{"attention_bias", "bool", false, read},
		key{"head_dim", "int|null", nil, read},
	)
	ernieKeys = without(with(decoderKeys,
		key{"vocab_size", "int", 103424, read},
		key{"hidden_size", "int", 1024, read},
		key{"intermediate_size", "int", 3072, read},
		key{"num_hidden_layers", "int", 18, read},
		key{"num_attention_heads", "int", 16, read},
		key{"num_key_value_heads", "int|null", 2, read},
		key{"max_position_embeddings", "int", 131072, read},
		key{"rms_norm_eps", "float", 1e-5, read},
		key{"use_cache", "bool|null", true, silent},
		key{"pad_token_id", "int|null", 0, read},
		key{"tie_word_embeddings", "bool", true, read},
		key{"use_bias", "bool|null", false, read},
		key{"head_dim", "int|null", 128, read},
	), "attention_dropout")
	// Keys of experts that affect only the auxiliary loss.
	auxiliaryKeys = []key{
		{"output_router_logits", "bool", false, silent},
		{"router_aux_loss_coef", "float", 0.001, silent},
	}
	qwenMoEKeys = with(with(decoderKeys, auxiliaryKeys...),
		key{"vocab_size", "int", 151936, read},
		key{"hidden_size", "int", 2048, read},
		key{"intermediate_size", "int", 6144, read},
		key{"num_hidden_layers", "int", 24, read},
		key{"num_key_value_heads", "int", 4, read},
		key{"max_position_embeddings", "int", 32768, read},
		key{"attention_bias", "bool", false, read},
		key{"use_sliding_window", "bool", false, read},
		key{"sliding_window", "int|null", 4096, read},
		key{"decoder_sparse_step", "int", 1, read},
		key{"moe_intermediate_size", "int", 768, read},
		key{"num_experts_per_tok", "int", 8, read},
		key{"num_experts", "int", 128, read},
		key{"norm_topk_prob", "bool", false, read},
		key{"mlp_only_layers", "list|null", nil, read},
	)
	// full_attention_interval is not declared, but decides where layer_types is absent.
	linearKeys = []key{
		{"attention_bias", "bool", false, read},
		{"head_dim", "int", 256, read},
		{"linear_conv_kernel_dim", "int", 4, read},
		{"linear_key_head_dim", "int", 128, read},
		{"linear_value_head_dim", "int", 128, read},
		{"linear_num_key_heads", "int", 16, read},
		{"linear_num_value_heads", "int", 32, read},
		{"layer_types", "list|null", nil, read},
		{"max_position_embeddings", "int", 32768, read},
	}
	qwenNextKeys = with(with(without(without(qwenMoEKeys, "use_sliding_window"), "sliding_window"), linearKeys...),
		key{"intermediate_size", "int", 5632, read},
		key{"num_hidden_layers", "int", 48, read},
		key{"num_attention_heads", "int", 16, read},
		key{"num_key_value_heads", "int", 2, read},
		key{"moe_intermediate_size", "int", 512, read},
		key{"shared_expert_intermediate_size", "int", 512, read},
		key{"num_experts_per_tok", "int", 10, read},
		key{"num_experts", "int", 512, read},
		key{"norm_topk_prob", "bool", true, read},
	)
	qwen35Keys = with(with(decoderKeys, linearKeys...),
		key{"vocab_size", "int", 248320, read},
		key{"intermediate_size", "int", 12288, read},
		key{"num_attention_heads", "int", 16, read},
		key{"num_key_value_heads", "int", 4, read},
	)
	qwen35MoEKeys = with(with(with(without(decoderKeys, "intermediate_size"), auxiliaryKeys...), linearKeys...),
		key{"vocab_size", "int", 248320, read},
		key{"hidden_size", "int", 2048, read},
		key{"num_hidden_layers", "int", 40, read},
		key{"num_attention_heads", "int", 16, read},
		key{"num_key_value_heads", "int", 2, read},
		key{"moe_intermediate_size", "int", 512, read},
		key{"shared_expert_intermediate_size", "int", 512, read},
		key{"num_experts_per_tok", "int", 8, read},
		key{"num_experts", "int", 256, read},
	)
	// The names of layers_block_type, num_hidden_layers and rms_norm_eps differ in older configs, or are ours.
	nemotronKeys = with(without(without(without(without(decoderKeys, "rope_parameters"), "rms_norm_eps"), "num_hidden_layers"), "hidden_act"),
		key{"vocab_size", "int", 131072, read},
		key{"layers_block_type", "list|null", nil, read},
		key{"num_logits_to_keep", "int", 1, silent},
		key{"pad_token_id", "int|null", 0, read},
		key{"num_key_value_heads", "int", 8, read},
		key{"head_dim", "int", 128, read},
		key{"max_position_embeddings", "int", 4096, read},
		key{"attention_bias", "bool", false, silent}, // which the class ignores
		key{"sliding_window", "int|null", nil, silent},
		key{"intermediate_size", "int", 21504, read},
		key{"mlp_hidden_act", "str", "relu2", read},
		key{"mlp_bias", "bool", false, fixed},
		key{"use_mamba_kernels", "bool", true, silent},
		key{"ssm_state_size", "int", 128, read},
		key{"mamba_num_heads", "int", 128, read},
		key{"mamba_head_dim", "int", 64, read},
		key{"mamba_hidden_act", "str", "silu", fixed},
		key{"n_groups", "int", 8, read},
		key{"conv_kernel", "int", 4, read},
		key{"expand", "int", 2, silent},
		key{"time_step_min", "float", 0.001, read},
		key{"time_step_max", "float", 0.1, silent},
		key{"time_step_limit", "list", nil, silent},
		key{"time_step_floor", "float", 1e-4, silent},
		key{"use_conv_bias", "bool", true, read},
		key{"chunk_size", "int", 128, silent},
		key{"mamba_proj_bias", "bool", false, silent},
		key{"mamba_ssm_cache_dtype", "str", "float32", silent},
		key{"n_routed_experts", "int", 8, read},
		key{"output_router_logits", "bool", false, silent},
		key{"n_shared_experts", "int", 1, silent}, // there is one, whose width has a key
		key{"moe_intermediate_size", "int", 7688, read},
		key{"moe_shared_expert_intermediate_size", "int", 7688, read},
		key{"moe_latent_size", "int|null", nil, read},
		key{"moe_shared_expert_overlap", "bool", true, silent},
		key{"num_experts_per_tok", "int", 2, read},
		key{"routed_scaling_factor", "float|int", 1.0, read},
		key{"n_group", "int", 1, read},
		key{"topk_group", "int", 1, read},
		key{"norm_topk_prob", "bool", true, read},
		key{"num_nextn_predict_layers", "int", 0, read},
		key{"mtp_layers_block_type", "list|null", nil, silent},
		key{"use_bias", "bool", false, fixed},
		key{"layer_norm_epsilon", "float", 1e-5, read},
		key{"residual_in_fp32", "bool", false, silent},
		key{"hidden_dropout", "float|int", 0.0, dropout},
		key{"rescale_prenorm_residual", "bool", true, silent},
	)
	mixtralKeys = with(with(decoderKeys, auxiliaryKeys...),
		key{"intermediate_size", "int", 14336, read},
		key{"num_key_value_heads", "int", 8, read},
		key{"head_dim", "int|null", nil, read},
		key{"max_position_embeddings", "int", 131072, read},
		key{"rms_norm_eps", "float", 1e-5, read},
		key{"sliding_window", "int|null", nil, read},
		key{"num_experts_per_tok", "int", 2, read},
		key{"num_local_experts", "int", 8, read},
		key{"router_jitter_noise", "float", 0.0, dropout},
	)
	minimaxKeys = with(without(mixtralKeys, "sliding_window"),
		key{"vocab_size", "int", 200064, read},
		key{"hidden_size", "int", 3072, read},
		key{"intermediate_size", "int", 1536, read},
		key{"num_hidden_layers", "int", 62, read},
		key{"num_attention_heads", "int", 48, read},
		key{"head_dim", "int", 128, read},
		key{"max_position_embeddings", "int", 196608, read},
		key{"rms_norm_eps", "float", 1e-6, read},
		key{"num_experts_per_tok", "int", 8, read},
		key{"num_local_experts", "int", 256, read},
	)
	ossKeys = with(with(decoderKeys, auxiliaryKeys...),
		key{"num_hidden_layers", "int", 36, read},
		key{"num_local_experts", "int", 128, read},
		key{"vocab_size", "int", 201088, read},
		key{"hidden_size", "int", 2880, read},
		key{"intermediate_size", "int", 2880, read},
		key{"head_dim", "int", 64, read},
		key{"num_attention_heads", "int", 64, read},
		key{"num_key_value_heads", "int", 8, read},
		key{"sliding_window", "int|null", 128, read},
		key{"hidden_act", "str", "silu", silent},
		key{"max_position_embeddings", "int", 131072, read},
		key{"rms_norm_eps", "float", 1e-5, read},
		key{"rope_parameters", "dict|null", nil, read},
		key{"num_experts_per_tok", "int", 4, read},
		key{"swiglu_alpha", "float", 1.702, fixed},
		key{"swiglu_limit", "float", real(7), fixed},
		key{"layer_types", "list|null", nil, read},
		key{"attention_bias", "bool", true, read},
	)
	glmMoEKeys = with(decoderKeys,
		key{"output_router_logits", "bool", false, silent},
		key{"vocab_size", "int", 151552, read},
		key{"intermediate_size", "int", 10944, read},
		key{"num_hidden_layers", "int", 46, read},
		key{"num_attention_heads", "int", 96, read},
		key{"num_key_value_heads", "int", 8, read},
		key{"max_position_embeddings", "int", 131072, read},
		key{"rms_norm_eps", "float", 1e-5, read},
		key{"attention_bias", "bool", false, read},
		key{"moe_intermediate_size", "int", 1408, read},
		key{"num_experts_per_tok", "int", 8, read},
		key{"n_shared_experts", "int", 1, read},
		key{"n_routed_experts", "int", 128, read},
		key{"routed_scaling_factor", "float", 1.0, read},
		key{"n_group", "int", 1, read},
		key{"topk_group", "int", 1, read},
		key{"first_k_dense_replace", "int", 1, read},
		key{"norm_topk_prob", "bool", true, read},
		key{"use_qk_norm", "bool", false, read},
		key{"num_mtp_layers", "int", 1, read},
	)
	// Keys of latent attention and of the experts of its models; qk_head_dim is the sum of two others.
	latentKeys = []key{
		{"output_router_logits", "bool", false, silent},
		{"pretraining_tp", "int|null", 1, silent},
		{"attention_bias", "bool", false, read},
		{"kv_lora_rank", "int", 512, read},
		{"q_lora_rank", "int|null", 1536, read},
		{"qk_rope_head_dim", "int", 64, read},
		{"qk_nope_head_dim", "int", 128, read},
		{"v_head_dim", "int", 128, read},
		{"num_experts_per_tok", "int|null", 8, read},
		{"moe_intermediate_size", "int", 2048, read},
		{"n_shared_experts", "int", 1, read},
		{"n_routed_experts", "int", 256, read},
		{"routed_scaling_factor", "float", 1.0, read},
		{"n_group", "int|null", 1, read},
		{"topk_group", "int|null", 1, read},
		{"first_k_dense_replace", "int|null", 0, read},
		{"norm_topk_prob", "bool|null", true, read},
		{"attention_dropout", "float|int|null", 0.0, dropout},
	}
	deepseek2Keys = with(with(decoderKeys, latentKeys...),
		key{"vocab_size", "int", 102400, read},
		key{"bos_token_id", "int|null", 1, silent},
		key{"eos_token_id", "int|list|null", 2, silent},
		key{"mlp_bias", "bool", false, read},
		key{"n_routed_experts", "int", 64, read},
		key{"n_shared_experts", "int", 2, read},
		key{"n_group", "int|null", nil, read},
		key{"topk_group", "int|null", nil, read},
		key{"topk_method", "str|null", "greedy", read},
		key{"norm_topk_prob", "bool|null", false, silent},
		key{"num_experts_per_tok", "int|null", nil, read},
		key{"moe_intermediate_size", "int", 1407, read},
		key{"head_dim", "int|null", nil, silent},
		key{"attention_dropout", "float|null", 0.0, dropout},
		key{"first_k_dense_replace", "int", 0, read},
	)
	deepseek3Keys = with(with(decoderKeys, latentKeys...),
		key{"vocab_size", "int", 129280, read},
		key{"hidden_size", "int", 7168, read},
		key{"intermediate_size", "int", 18432, read},
		key{"num_hidden_layers", "int", 61, read},
		key{"num_attention_heads", "int", 128, read},
		key{"num_key_value_heads", "int|null", 128, read},
		key{"max_position_embeddings", "int", 4096, read},
		key{"bos_token_id", "int|null", 0, silent},
		key{"eos_token_id", "int|list|null", 1, silent},
		key{"v_head_dim", "int|null", 128, read},
		key{"routed_scaling_factor", "float", 2.5, read},
		key{"n_group", "int|null", 8, read},
		key{"topk_group", "int|null", 4, read},
		key{"first_k_dense_replace", "int|null", 3, read},
		key{"rope_interleave", "bool|null", true, read},
		key{"num_mtp_layers", "int", 1, read},
	)
	mistral4Keys = with(with(decoderKeys, latentKeys...),
		key{"vocab_size", "int", 131072, read},
		key{"intermediate_size", "int", 12288, read},
		key{"num_hidden_layers", "int", 36, read},
		key{"num_key_value_heads", "int|null", 32, read},
		key{"kv_lora_rank", "int", 256, read},
		key{"v_head_dim", "int|null", 128, read},
		key{"q_lora_rank", "int|null", 1024, read},
		key{"qk_nope_head_dim", "int", 64, read},
		key{"n_routed_experts", "int", 128, read},
		key{"num_experts_per_tok", "int|null", 4, read},
		key{"max_position_embeddings", "int", 1048576, read},
		key{"pad_token_id", "int|null", 11, read},
		key{"bos_token_id", "int|null", 1, silent},
		key{"eos_token_id", "int|list|null", 2, silent},
		key{"rope_interleave", "bool|null", true, read},
	)
	kimiKeys = with(without(without(without(with(decoderKeys, latentKeys...), "n_routed_experts"), "first_k_dense_replace"), "rope_parameters"),
		key{"vocab_size", "int", 163840, read},
		key{"hidden_size", "int", 2304, read},
		key{"intermediate_size", "int", 9216, read},
		key{"moe_intermediate_size", "int", 1024, read},
		key{"num_hidden_layers", "int", 27, read},
		key{"num_key_value_heads", "int|null", 32, read},
		key{"routed_scaling_factor", "float", 2.446, read},
		key{"q_lora_rank", "int|null", nil, read},
		key{"v_head_dim", "int|null", 128, read},
		key{"norm_topk_prob", "bool", true, read},
		key{"n_group", "int", 1, read},
		key{"max_position_embeddings", "int", 1048576, read},
		key{"rms_norm_eps", "float", 1e-5, read},
		key{"pad_token_id", "int|null", 163839, read},
		key{"bos_token_id", "int|null", 163584, silent},
		key{"eos_token_id", "int|list|null", 163586, silent},
		key{"num_local_experts", "int", 256, read},
		key{"mlp_layer_types", "list|null", nil, read},
		key{"layer_types", "list|null", nil, read},
		key{"linear_head_dim", "int", 128, read},
		key{"linear_num_heads", "int", 32, read},
		key{"linear_conv_kernel_dim", "int", 4, read},
	)
	gpt2Keys = with(commonKeys,
		key{"vocab_size", "int", 50257, read},
		key{"n_positions", "int", 1024, read},
		key{"n_embd", "int", 768, read},
		key{"n_layer", "int", 12, read},
		key{"n_head", "int", 12, read},
		key{"n_inner", "int|null", nil, read},
		key{"activation_function", "str", "gelu_new", read},
		key{"resid_pdrop", "float|int", 0.1, dropout},
		key{"embd_pdrop", "float|int", 0.1, dropout},
		key{"attn_pdrop", "float|int", 0.1, dropout},
		key{"layer_norm_epsilon", "float", 1e-5, read},
		key{"initializer_range", "float", 0.02, read},
		key{"summary_type", "str", nil, silent},
		key{"summary_use_proj", "bool", nil, silent},
		key{"summary_activation", "str|null", nil, silent},
		key{"summary_proj_to_labels", "bool", nil, silent},
		key{"summary_first_dropout", "float|int", nil, silent},
		key{"scale_attn_weights", "bool", true, fixed},
		key{"use_cache", "bool", true, silent},
		key{"bos_token_id", "int|null", nil, silent},
		key{"eos_token_id", "int|list|null", nil, silent},
		key{"pad_token_id", "int|null", nil, silent},
		key{"scale_attn_by_inverse_layer_idx", "bool", false, fixed},
		key{"reorder_and_upcast_attn", "bool", false, silent}, // affects only rounding
		key{"add_cross_attention", "bool", false, fixed},
		key{"tie_word_embeddings", "bool", true, read},
		key{"rope_parameters", "", nil, fixed}, key{"rope_scaling", "", nil, fixed}, // which transformers checks
	)
)

// Keys of models with a vision part.
var (
	gemma3VisionKeys = with(commonKeys,
		key{"text_config", "dict|null", nil, read},
		key{"vision_config", "dict|null", nil, silent},
		key{"mm_tokens_per_image", "int|null", nil, silent},
		key{"boi_token_index", "int|null", nil, silent},
		key{"eoi_token_index", "int|null", nil, silent},
		key{"image_token_index", "int|null", nil, silent},
		key{"initializer_range", "float|null", nil, silent},
		key{"tie_word_embeddings", "bool|null", true, read},
	)
	qwen35VisionKeys = with(commonKeys,
		key{"text_config", "dict|null", nil, read},
		key{"vision_config", "dict|null", nil, silent},
		key{"image_token_id", "int", 248056, silent},
		key{"video_token_id", "int", 248057, silent},
		key{"vision_start_token_id", "int", 248053, silent},
		key{"vision_end_token_id", "int", 248054, silent},
		key{"tie_word_embeddings", "bool", false, read},
	)
	mistral3Keys = with(commonKeys,
		key{"text_config", "dict|null", nil, read},
		key{"vision_config", "dict|null", nil, silent},
		key{"image_token_index", "int", nil, silent},
		key{"projector_hidden_act", "str", nil, silent},
		key{"vision_feature_layer", "int|list", nil, silent},
		key{"multimodal_projector_bias", "bool", nil, silent},
		key{"spatial_merge_size", "int", nil, silent},
		key{"tie_word_embeddings", "bool", true, read},
	)
)

// with returns a table with further rows, which replace rows of the same name.
func with(table []key, rows ...key) []key {
	out := slices.Clone(table)
	for _, row := range rows {
		if i := slices.IndexFunc(out, func(k key) bool { return k.name == row.name }); i >= 0 {
			out[i] = row
		} else {
			out = append(out, row)
		}
	}
	return out
}

func without(table []key, name string) []key {
	return slices.DeleteFunc(slices.Clone(table), func(k key) bool { return k.name == name })
}

// rowOf returns the row of a key, or nil.
func rowOf(table []key, name string) *key {
	if i := slices.IndexFunc(table, func(k key) bool { return k.name == name }); i >= 0 {
		return &table[i]
	}
	return nil
}

func (c *config) row(name string) *key { return rowOf(c.keys, name) }

// jsonType returns the type of a JSON value, by the names that rows use.
func jsonType(v json.RawMessage) string {
	switch v[0] {
	case '"':
		return "str"
	case '{':
		return "dict"
	case '[':
		return "list"
	case 't', 'f':
		return "bool"
	case 'n':
		return "null"
	}
	if strings.ContainsAny(string(v), ".eE") {
		return "float"
	}
	return "int"
}

// accept applies the table of the config's class. It refuses values of types that transformers refuses, and values
// that differ from a fixed default; null and false are equal there. It returns the names of dropout probabilities
// that are not 0.
func (c *config) accept() (dropouts []string) {
	for _, k := range c.keys {
		v, there := c.members[k.name]
		if !there {
			continue
		}
		types, t := strings.Split(k.types, "|"), jsonType(v)
		text, _ := json.Marshal(k.value)
		unset := func(s string) bool { return s == "null" || s == "false" }
		switch {
		case k.types != "" && !slices.Contains(types, t):
			c.failf(k.name, "= %s, but transformers needs a value of type %s", quote(v), strings.Join(types, " or "))
		case k.use == fixed && string(v) != string(text) && !(unset(string(text)) && unset(string(v))):
			c.failf(k.name, "= %s is not supported; only %s is", quote(v), text)
		case k.use == dropout && t != "null" && c.number(k.name) != 0:
			dropouts = append(dropouts, k.name)
		}
	}
	return dropouts
}
