"""Tiny configurations of every supported family, window 8 where there is one."""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM

WINDOW = 8
BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDE_FULL = ["sliding_attention", "full_attention"]


def based(kind, **more):
    return AutoConfig.for_model(kind, **{**BASE, **more})


def gpt(kind, **more):
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return AutoConfig.for_model(kind, **{**sizes, "bos_token_id": 1, "eos_token_id": 2, **more})


def own(kind, **sizes):
    return AutoConfig.for_model(kind, vocab_size=97, bos_token_id=1, eos_token_id=2, **sizes)


def alternating(kind, **more):
    return based(kind, sliding_window=WINDOW, layer_types=SLIDE_FULL, **more)


#: name -> (configuration, what is special about its positions or masks)
FAMILIES = {
    "Llama": lambda: based("llama"),
    "Mistral": lambda: based("mistral", sliding_window=None),
    "Mistral (window)": lambda: based("mistral", sliding_window=WINDOW),
    "Mixtral": lambda: based("mixtral", num_local_experts=4),
    "Qwen2": lambda: based("qwen2"),
    "Qwen2 (window)": lambda: based(
        "qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "Qwen3": lambda: based("qwen3", head_dim=8),
    "Qwen3-MoE": lambda: based(
        "qwen3_moe", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "Gemma": lambda: based("gemma", head_dim=8),
    "Gemma 2": lambda: based("gemma2", head_dim=8, sliding_window=WINDOW),
    "Gemma 3": lambda: alternating("gemma3_text", head_dim=8),
    "Gemma 3n": lambda: based(
        "gemma3n_text",
        head_dim=8,
        sliding_window=WINDOW,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=SLIDE_FULL * 2,
        vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
        intermediate_size=[48] * 4,
    ),
    "Phi": lambda: based("phi", num_key_value_heads=4),
    "Phi-3": lambda: based("phi3", sliding_window=None),
    "Phi-3 (window)": lambda: based("phi3", sliding_window=WINDOW),
    "Falcon (rotary)": lambda: own(
        "falcon",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=False,
        new_decoder_architecture=False,
        multi_query=True,
        parallel_attn=True,
    ),
    "Falcon (ALiBi)": lambda: own(
        "falcon",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
        new_decoder_architecture=False,
        multi_query=False,
        parallel_attn=False,
    ),
    "BLOOM": lambda: own("bloom", hidden_size=32, n_layer=2, n_head=4),
    "MPT": lambda: own("mpt", d_model=32, n_layers=2, n_heads=4, max_seq_len=256),
    "GPT-2": lambda: gpt("gpt2"),
    "GPT-Neo": lambda: own(
        "gpt_neo",
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
        max_position_embeddings=256,
        intermediate_size=48,
    ),
    "GPT-J": lambda: gpt("gptj", rotary_dim=4),
    "CodeGen": lambda: gpt("codegen", rotary_dim=4, n_ctx=256),
    "GPT-BigCode": lambda: gpt("gpt_bigcode"),
    "GPT-NeoX": lambda: based("gpt_neox"),
    "OPT": lambda: own(
        "opt",
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
        pad_token_id=0,
    ),
    "XGLM": lambda: own(
        "xglm",
        d_model=32,
        ffn_dim=48,
        num_layers=2,
        attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
    ),
    "BioGPT": lambda: own(
        "biogpt",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=256,
        pad_token_id=0,
    ),
    "StableLM": lambda: based("stablelm"),
    "OLMo 2": lambda: based("olmo2"),
    "OLMo 3": lambda: alternating("olmo3"),
    "Cohere": lambda: based("cohere"),
    "Cohere 2": lambda: alternating("cohere2"),
    "Granite": lambda: based("granite"),
    "SmolLM3": lambda: based("smollm3"),
    "Starcoder2 (window)": lambda: based("starcoder2", sliding_window=WINDOW),
    "Nemotron": lambda: based("nemotron"),
    "GPT-OSS": lambda: alternating(
        "gpt_oss", head_dim=8, num_local_experts=4, num_experts_per_tok=2
    ),
    "DeepSeek-V3": lambda: based(
        "deepseek_v3",
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "Llama 4": lambda: based(
        "llama4_text",
        head_dim=8,
        attention_chunk_size=WINDOW,
        num_local_experts=2,
        intermediate_size_mlp=48,
        interleave_moe_layer_step=1,
    ),
    "Ernie 4.5": lambda: based("ernie4_5", head_dim=8),
    "GLM-4": lambda: based("glm4", head_dim=8),
    "EXAONE 4": lambda: based("exaone4", sliding_window=WINDOW, sliding_window_pattern=2),
    "HunYuan": lambda: based("hunyuan_v1_dense", head_dim=8),
}

#: Families that transformers runs with eager attention alone.
EAGER_ONLY = {"Gemma 2", "GPT-OSS", "GPT-J", "CodeGen", "GPT-Neo", "MPT", "BLOOM", "XGLM"}


def build(config, attention="eager", seed=0):
    """A random float32 model with logits far from uniform. The configuration is copied."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=attention
    ).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
    return model.eval()


def attentions(name):
    return ("eager",) if name in EAGER_ONLY else ("eager", "sdpa")
