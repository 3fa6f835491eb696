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

#: Sizes by transformers' model_type.
SIZES = {
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
            weight += size * weight.std() * torch.randn(weight.shape, generator=random)
    return other
