"""Tiny configurations of any model type of transformers: its default one with small numbers.

A rule says which fields mean the same in all families; `BY_HAND` says what no rule can know.
"""

import copy
import re

import torch
from tiny_sizes import VOCABULARY, WINDOW, small
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


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
