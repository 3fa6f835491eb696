"""Tiny models whose layers keep states, with weights under which the states matter."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 97
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
_CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_MIXED = ["mamba", "mamba", "attention", "mamba"]
_SSD = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
_INKLING = {
    "head_dim": 16,
    "swa_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "d_rel": 8,
    "sliding_window_size": 16,
    "num_experts_per_tok": 2,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
}
_SHARED = {"shared_expert_intermediate_size": 32}

#: Sizes by transformers' model_type.
SIZES = {
    "bailing_hybrid": {
        **_ATTENTION,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "layer_types": _DELTA["layer_types"],
    },
    "bamba": {**_ATTENTION, **_SSD, "attn_layer_indices": [2]},
    "falcon_h1": {
        **_ATTENTION,
        **_SSD,
        "head_dim": 16,
        "mamba_n_heads": 4,
        "mamba_d_ssm": 64,
        "mamba_rms_norm": False,
    },
    "granitemoehybrid": {
        **_ATTENTION,
        **_SSD,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "layer_types": _MIXED,
    },
    "kimi_linear": {
        **_ATTENTION,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": _DELTA["layer_types"],
    },
    "falcon_mamba": {"state_size": 8, "expand": 2, "time_step_rank": 8},
    "jamba": {
        **_ATTENTION,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mamba": {"state_size": 8, "expand": 2, "time_step_rank": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 2, "state_size": 24},
    "nemotron_h": {
        **_ATTENTION,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 24,
        "chunk_size": 16,
        "time_step_min": 1e-6,
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
    },
    "olmo_hybrid": {**_ATTENTION, **_DELTA, "linear_num_key_heads": 4},
    "qwen3_5_moe_text": {**_ATTENTION, **_DELTA, **_EXPERTS, **_SHARED},
    "qwen3_5_text": {**_ATTENTION, **_DELTA},
    "qwen3_next": {**_ATTENTION, **_DELTA, **_EXPERTS, **_SHARED},
    "minimax": {
        **_ATTENTION,
        "head_dim": 16,
        "block_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": _DELTA["layer_types"],
    },
    "recurrent_gemma": {
        **_ATTENTION,
        "lru_width": 64,
        "attention_window_size": 16,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv": {"attention_hidden_size": 64, "intermediate_size": 96, "rescale_every": 2},
    "zamba": {
        **_ATTENTION,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "n_mamba_heads": 2,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
    "zamba2": {
        **_ATTENTION,
        "num_key_value_heads": 4,
        "mamba_d_state": 32,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "time_step_min": 1e-6,
        "chunk_size": 16,
        "adapter_rank": 8,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
    "inkling_text": {
        **_ATTENTION,
        **_INKLING,
        "rel_extent": 24,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "log_scaling_n_floor": 8,
        "logits_mup_width_multiplier": 1.0,
    },
    "inkling2_text": {
        **_ATTENTION,
        **_INKLING,
        "rel_extent": 24,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "n_layers_per_attn_res_block": 2,
        "log_scaling_n_floor": 8,
    },
    "qwen4_exp_text": {
        **_ATTENTION,
        **_DELTA,
        **_EXPERTS,
        **_SHARED,
        "layer_types": [
            "linear_attention",
            "indexed_attention",
            "linear_attention",
            "indexed_attention",
        ],
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
        "ple_layer_ids": [1, 3],
        "eos_token_id": 2,
        "ple_embed_dim": 64,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 200,
    },
    "xlstm": {"num_heads": 4, "chunk_size": 16, "qk_dim_factor": 1.0},
    "zaya": {
        **_ATTENTION,
        "head_dim": 16,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "router_hidden_size": 32,
        "sliding_window": 16,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"],
    },
    "lfm2": {**_ATTENTION, **_CONV, "block_auto_adjust_ff_dim": False},
    "lfm3": {
        **_ATTENTION,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    },
    "lfm2_moe": {**_ATTENTION, **_CONV, **_EXPERTS, "num_dense_layers": 1},
}


def made(kind, seed=0, **more):
    """A model in evaluation mode; random weights as they come leave states without a meaning."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**_BASE, **SIZES[kind], **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed" in name:
                weight.copy_(torch.randn_like(weight) * 0.5)
            elif weight.dim() >= 2 and "norm" not in name:
                size = 0.4 if "conv" in name else 1.5 / weight.shape[-1] ** 0.5
                weight.copy_(torch.randn_like(weight) * size)
            elif "dt_bias" in name:
                weight.copy_(torch.randn_like(weight) * 0.5 - 1.0)
    return model


def perturbed(model, size=0.03, seed=3):
    """A draft model: the same with other weights."""
    import copy

    other, random = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.numel() > 1:
                weight += size * weight.std() * torch.randn(weight.shape, generator=random)
    return other
