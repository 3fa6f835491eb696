"""Any configuration made tiny: a small number for every size that its fields name."""

from transformers import PretrainedConfig

WINDOW = 32
VOCABULARY = 128
LAYERS = 4


def _choices(key, value, every):
    """How many experts a token goes to: no more than there are."""
    experts = key != "top_k" or any("expert" in name for name in every)
    return min(value, 2) if value and experts else value


def _one(key, value, every):
    return value and 1


def _window(key, value, every):
    number = isinstance(value, int) and not isinstance(value, bool)
    return WINDOW if number and value else value


def _widths(key, value, every):
    return value if value is None else [64] * LAYERS if isinstance(value, (list, tuple)) else 64


def _key_heads(key, value, every):
    """As many as query heads, one, or half of them, as the default has it."""
    names = ("num_attention_heads", "n_head", "num_heads", "n_heads")
    heads = next((every[name] for name in names if isinstance(every.get(name), int)), None)
    if not isinstance(value, int):
        return value
    return 4 if heads == value else 1 if value == 1 else 2


#: What a field is called (a whole name, or the end of one where it begins with a dot) -> its value.
RULES = [
    (
        "vocab_size vocab_size_per_layer_input text_vocab_size output_vocab_size n_vocab"
        " decoder_vocab_size lm_vocab_size draft_vocab_size original_vocab_size",
        VOCABULARY,
    ),
    (
        "hidden_size d_model n_embd embed_dim dim model_dim emb_dim word_embed_proj_dim"
        " embedding_size attention_hidden_size cross_hidden_size projection_dim text_hidden_size"
        " encoder_hidden_size lm_hidden_size pad_head_dim lru_width block_size_hidden"
        " out_hidden_size hidden_dim backbone_hidden_size residual_dim rnn_hidden_size conv_dim"
        " conv_dim_out block_dim mamba_d_ssm",
        64,
    ),
    ("hidden_size_per_layer_input laurel_rank altup_lr_dim", 8),
    ("num_kv_shared_layers", 2),
    (
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth"
        " num_encoder_layers num_decoder_layers decoder_num_hidden_layers"
        " num_transformer_layers encoder_num_hidden_layers",
        LAYERS,
    ),
    (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads"
        " decoder_attention_heads decoder_num_attention_heads encoder_num_attention_heads"
        " swa_num_attention_heads sliding_num_attention_heads linear_num_value_heads"
        " linear_num_key_heads linear_num_heads kda_num_heads num_linear_heads"
        " linear_num_attention_heads linear_attn_num_heads",
        4,
    ),
    (
        "num_key_value_heads num_kv_heads n_head_kv decoder_num_key_value_heads"
        " encoder_num_key_value_heads num_global_key_value_heads swa_num_key_value_heads"
        " multi_query_group_num cross_num_key_value_heads",
        _key_heads,
    ),
    (
        "head_dim attention_head_dim global_head_dim kv_channels swa_head_dim d_kv"
        " attention_key_size head_size v_head_dim swa_v_head_dim decoder_head_dim"
        " linear_key_head_dim linear_value_head_dim linear_head_dim kda_head_dim"
        " linear_attn_head_dim qk_nope_head_dim index_head_dim indexer_head_dim kv_lora_rank"
        " q_lora_rank o_lora_rank num_image_tokens mamba_chunk_size chunk_size mamba_chunk"
        " mamba_d_head mamba_headdim mamba_head_dim",
        16,
    ),
    (
        "qk_rope_head_dim qk_rope_dim index_rope_dim rotary_dim state_size ssm_state_size"
        " mamba_d_state mamba_state_size d_state ssm_d_state mamba_n_heads mamba_num_heads",
        8,
    ),
    ("qk_head_dim", 24),
    ("index_topk", WINDOW),
    ("n_mamba_heads", 2),
    # many: where all heads' scores are below zero tokens tie, and generate breaks ties by chance
    ("index_n_heads indexer_n_heads indexer_num_heads index_num_heads", 16),
    (
        "n_group n_groups topk_group num_expert_group moe_topk_group moe_n_group"
        " num_expert_groups mamba_n_groups mamba_ngroups mamba_num_groups ssm_groups",
        1,
    ),
    (
        "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts"
        " moe_n_experts time_step_rank mamba_dt_rank",
        4,
    ),
    ("zero_expert_num", 2),
    ("n_shared_experts num_shared_experts moe_num_shared_experts num_shared_expert", _one),
    (
        "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts moe_top_k"
        " num_selected_experts router_topk moe_router_topk experts_per_token top_k",
        _choices,
    ),
    ("first_k_dense_replace moe_layer_start_index num_dense_layers mlp_first_dense", _one),
    ("moe_layer_end_index", LAYERS - 1),
    (
        "sliding_window sliding_window_size local_attention attention_window window_size"
        " attention_chunk_size local_window_size swa_window attention_window_size"
        " swa_window_size",
        _window,
    ),
    (
        "max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length"
        " max_target_positions seq_length model_max_length",
        512,
    ),
    (
        ".intermediate_size .intermediate_size_mlp .ffn_dim .ffn_hidden_size .n_inner .mlp_dim"
        " .d_ff .block_ff_dim .block_ffn_dim .intermediate_dim .ffn_intermediate"
        " .mlp_hidden_size",
        _widths,
    ),
    ("pad_token_id", 0),
    ("bos_token_id decoder_start_token_id", 1),
    ("eos_token_id", 2),
    ("forced_eos_token_id forced_bos_token_id", None),
    ("activation_sparsity_pattern", [0.0] * LAYERS),
]
_EXACT = {name: value for names, value in RULES for name in names.split() if name[0] != "."}
_ENDS = {name[1:]: value for names, value in RULES for name in names.split() if name[0] == "."}
_LEFT = {"model_type", "rope_parameters", "rope_scaling", "architectures", "dtype", "layer_types"}
_MAY_BE_NONE = ("pad_token_id", "bos_token_id", "eos_token_id")


def small(config):
    """The fields of this configuration that have to be other ones, those of its parts within."""
    every = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    found = {}
    for key, value in every.items():
        if isinstance(value, PretrainedConfig):
            found[key] = small(value)
            if value.model_type:
                found[key]["model_type"] = value.model_type
        elif key == "rope_parameters" and "mrope_section" in (value or {}):
            found[key] = value | {"mrope_section": _sections(value)}
        elif key not in _LEFT and not isinstance(value, bool):
            new = _ruled(key, value, every)
            if key == "head_dim" and "qk_rope_head_dim" in every:
                continue  # made from that
            if new != value and (value is not None or key in _MAY_BE_NONE):
                found[key] = new
    kinds = list(dict.fromkeys(every.get("layer_types") or ()))
    if kinds:
        count = max(LAYERS, len(kinds))
        found["layer_types"] = [kinds[i % len(kinds)] for i in range(count)]
        for name in ("num_hidden_layers", "n_layer", "num_layers"):
            if name in every:
                found[name] = count
    return found


def _sections(rope):
    """Frequencies that turn with time, rows and columns: half of a head of 16, or of its part."""
    half = int(16 * rope.get("partial_rotary_factor", 1.0)) // 2
    first = half // 4
    return [first, (half - first) // 2, half - first - (half - first) // 2]


def _ruled(key, value, every):
    """What the rules say of a field, or its value."""
    ends = (rule for end, rule in _ENDS.items() if key.endswith(end))
    rule = _EXACT.get(key, next(ends, _LEFT))
    if rule is _LEFT:
        far = isinstance(value, int) and value >= VOCABULARY
        if far and key.endswith(("_token_id", "_token_index", "token_id")):
            return 100 + sum(map(ord, key)) % 25
        return value
    return rule(key, value, every) if callable(rule) else rule
