"""Tiny configurations of any model type of transformers: its default one with small numbers.

A rule says which fields mean the same in all families; `BY_HAND` says what no rule can know.
"""

import copy
import re

import torch
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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


def blt(cls):
    """Bytes to patches to bytes: three decoders of one size."""
    part = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    part |= {"intermediate_size": 64, "vocab_size": VOCABULARY}
    return cls(
        vocab_size=VOCABULARY,
        encoder_config=part | {"cross_attn_k": 1, "hidden_size_global": 64},
        decoder_config=part | {"cross_attn_k": 1, "hidden_size_global": 64},
        global_config=part,
        patcher_config=part | {"vocab_size": 260},
        encoder_hash_byte_group_vocab=64,
        cross_attn_k=1,
    )


#: Families that are decoders where their configuration says so.
_DECODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert"
    " roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
).split()

#: Families whose rotations have three parts, the sizes of which no configuration names.
_TURNED = ("qwen2_vl qwen2_5_vl glm4v glm46v glmga glm_ocr paddleocr_vl").split()


def _mrope(sections, **more):
    """Rotations by time, row and column for heads of 16."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}
    return {"text_config": {"rope_parameters": rope}}


#: A vocabulary in which pictures are written: of each of 16 visual tokens, as families name them.
_WRITTEN = {
    "emu3": {f"<|visual token {n:06d}|>": 60 + n for n in range(16)}
    | {"<|extra_200|>": 80, "<image>": 100},
    "chameleon": {f"IMGIMG{chr(65 + n // 10)}{chr(65 + n % 10)}Z": 60 + n for n in range(16)}
    | {"<image>": 100},
}

#: Rotations by the type of a layer.
_BY_KIND = {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0}
        for kind in ("full_attention", "sliding_attention")
    },
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
#: What checkpoints' files name and the class of their configuration does not.
_MARKED = {
    "vision_start_token_id": 102,
    "vision_end_token_id": 103,
    "audio_start_token_id": 104,
    "audio_end_token_id": 105,
    "image_token_id": 100,
    "video_token_id": 101,
    "audio_token_id": 106,
    "audio_config": {"output_dim": 64},
    **_mrope([2, 3, 3]),
}

#: Layers with windows have sizes of their own.
_DOTS3 = {
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
    **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim"), 16),
    **dict.fromkeys(("swa_qk_nope_head_dim", "swa_qk_rope_head_dim"), 8),
    "swa_v_head_dim": 16,
}

BY_HAND = {
    "dots3_note_text": _DOTS3,
    "emu3": {
        "vocabulary_map": _WRITTEN["emu3"],
        "vq_config": {
            "codebook_size": 16,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "attn_resolutions": [],
            "hidden_size": 32,
            "embed_dim": 4,
            "temporal_downsample_factor": 1,
        },
    },
    "chameleon": {
        "vocabulary_map": _WRITTEN["chameleon"],
        "vq_config": {
            "num_embeddings": 16,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "resolution": 8,
            "embed_dim": 8,
            "latent_channels": 8,
        },
    },
    "gemma4": {
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "pooling_kernel_size": 2,
            "patch_size": 4,
            "position_embedding_size": 64,
        }
    },
    "gemma4_unified": {
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 64,
            "mm_posemb_size": 64,
            "output_proj_dims": 64,
        }
    },
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0}},
    "granite4_vision": {
        "image_grid_pinpoints": [[32, 32], [32, 64]],
        "vision_config": {"image_size": 32, "patch_size": 16},
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-2, 0]],
        "spatial_target_layers": [1, 2, 3, 3],
    },
    "idefics": {"vision_config": {"image_size": 8, "patch_size": 4}},
    "molmo2": {
        "image_patch_id": 100,
        "vision_config": {"image_size": [32, 32], "patch_size": 16, "head_dim": 16},
        "adapter_config": {"vision_feature_layer": [-1, -2], "head_dim": 16},
    },
    **{kind: {"out_hidden_size": 256} for kind in ("muse_glimmer", "muse_spark")},
    "nemotron_h_omni": {
        "image_token_id": 100,
        "vision_hidden_size": 64,
        "projector_hidden_size": 64,
        "vision_config": {"video_temporal_patch_size": 2},
    },
    "kimi_k25": {"projection_hidden_size": 64},
    "llava_next_video": {
        "image_grid_pinpoints": [[32, 32], [32, 64]],
        "vision_config": {"image_size": 32, "patch_size": 16},
    },
    **{kind: {"is_decoder": True} for kind in _DECODERS},
    **{
        kind: {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        }
        for kind in ("deepseek_v2", "dots1")
    },
    **{kind: {"head_dim": 16} for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{kind: _mrope([2, 3, 3]) for kind in _TURNED},
    "glm4v_moe": _mrope([1, 1, 2], partial_rotary_factor=0.5),
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16},
    "blt": blt,
    "cohere_compass": {"text_config": _BY_KIND},
    "cohere_compass_text": _BY_KIND,
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", *["sparse"] * 3], "num_experts_per_tok": 2},
        "vision_config": {
            "sam_config": {"downsample_channels": [32, 64], "image_size": 64, "patch_size": 16}
        },
    },
    "dots3_note": {
        "vision_config": {
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
        },
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
        "text_config": _DOTS3,
    },
    "ernie4_5_vl_moe": _mrope([2, 2, 4]),
    "hunyuan_vl": {
        "text_config": {"head_dim": 16, **_mrope([2, 2, 2, 2])["text_config"]},
        "vision_config": {"image_size": 32, "temporal_patch_size": 1},
    },
    "paligemma": {"text_config": {"num_key_value_heads": 1}},
    "step3p7": {"text_config": {"sliding_window": WINDOW}},
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), _MARKED),
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "longcat_flash": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"] * 2}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": WINDOW,
        "indexer_compress_ratio": 1,
        "hc_lowrank": 8,
        "ple_embed_dim": 64,
    },
    "xlstm": {"embedding_dim": 64, "num_blocks": 4, "chunk_size": 16, "qk_dim_factor": 1.0},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 2,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
    },
    # `generate` reads prompts beyond the window without it
    "moshi": {"sliding_window": 64},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
}


def config_for(kind, by_hand=None):
    """A configuration of this model type that is small enough to be run in milliseconds."""
    cls = CONFIG_MAPPING[kind]
    hand = (BY_HAND if by_hand is None else by_hand).get(kind, {})
    if callable(hand):
        return hand(cls)
    try:
        fields = small(cls())
    except Exception:  # some are not valid by themselves
        if not hand:
            raise
        fields = {}
    _merge(fields, hand)
    tries = [fields]
    if "layer_types" in fields and "layer_types" not in hand:
        tries.append({name: v for name, v in fields.items() if name != "layer_types"})
    errors = []
    for each in tries:
        try:
            made = cls(**copy.deepcopy(each))
            if made.is_encoder_decoder and not getattr(made, "decoder_start_token_id", None):
                made.decoder_start_token_id = 1
            return made
        except Exception as error:  # each configuration class has checks of its own
            errors.append(error)
    raise errors[0]


def _merge(into, more):
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict) and "config" in name:
            _merge(into[name], value)
        else:
            into[name] = value


#: Parameters that keep what a family begins with: decays, steps, convolutions, norms.
_KEPT = re.compile(r"A_log|conv|dt_|time_|norm|rg_lru|recurrent_param|decay")


def randomise(model, seed=0, deviation=0.15):
    """Weights wide enough that texts differ from token to token, in float32."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and weight.is_floating_point() and not _KEPT.search(name):
                weight.copy_(torch.randn(weight.shape, generator=random) * deviation)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx] = 0  # as it is after a folder was read
    return model.float().eval()
