"""Tiny models with a tokenizer in one GGUF file, as llama.cpp's converter lays them out."""

import numpy as np
import torch
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

from outrider.testing import llama

#: One token for every byte that prints, as a byte-level BPE spells them, and special ones.
LETTERS = [chr(code) for code in range(33, 127)]
SPECIAL = ["<|bos|>", "<|end|>", "<unk>", "<|endoftext|>"]  #: the last is added if it is not there
TOKENS = [*SPECIAL, *LETTERS, "Ġ", "Ċ", "th", "he"]
MERGES = ["t h", "h e"]
CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def model(**settings):
    how = {"vocab_size": len(TOKENS), "eos_token_id": 1, "bos_token_id": 0}
    return llama(**(how | settings))


def qwen2():
    """Another architecture: biases, a tied output layer, and a forward of its own."""
    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.3, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    made = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return made


#: What files call parts of mixtures.
EXPERTS = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}


def mixture(kind):
    """Of a type with experts, as wide as no model that is known."""
    more = {"shared_expert_intermediate_size": 96} if kind == "qwen2_moe" else {}
    return AutoConfig.for_model(
        kind, vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32, bos_token_id=0,
        eos_token_id=1, pad_token_id=None, norm_topk_prob=kind == "qwen3_moe", **more,
    )  # fmt: skip


def write(path, made=None, kind="F32", architecture=None, up=None):
    """Write a model there, `model()` if none is given; returns it.

    `kind` is what linear layers and embeddings are quantised to, and `up` what the second matrices
    of experts are.
    """
    import gguf

    made = model() if made is None else made
    config, weights = made.config, made.state_dict()
    out = gguf.GGUFWriter(str(path), architecture or config.model_type)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    if architecture is not None:
        out.add_expert_count(config.num_experts)
        out.add_expert_used_count(config.num_experts_per_tok)
        out.add_key_length(config.hidden_size // config.num_attention_heads)
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(TOKENS)
    kinds = gguf.TokenType
    out.add_token_types([kinds.CONTROL] * 4 + [kinds.NORMAL] * (len(TOKENS) - 4))
    out.add_token_merges(MERGES)
    out.add_bos_token_id(0)
    out.add_eos_token_id(1)
    out.add_unk_token_id(2)
    out.add_chat_template(CHAT)

    def add(name, tensor, form=kind):
        values, told = tensor.float().numpy(), gguf.GGMLQuantizationType[form]
        if form in ("F32", "F16"):
            out.add_tensor(name, values.astype(np.float32 if form == "F32" else np.float16))
        else:
            out.add_tensor(name, gguf.quants.quantize(values, told), raw_dtype=told)

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"], "F32")
    if not config.tie_word_embeddings:
        add("output.weight", weights["lm_head.weight"])
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        stack = weights.get(f"model.layers.{layer}.mlp.experts.gate_up_proj")
        if stack is not None:
            gate, second = stack.chunk(2, 1)
            down = weights[f"model.layers.{layer}.mlp.experts.down_proj"]
            add(f"blk.{layer}.ffn_gate_exps.weight", gate)
            add(f"blk.{layer}.ffn_up_exps.weight", second, up)
            add(f"blk.{layer}.ffn_down_exps.weight", down)
        for theirs, ours in {**NAMES, **EXPERTS}.items():
            for leaf in ("weight", "bias"):
                tensor = weights.get(f"model.layers.{layer}.{ours}.{leaf}")
                if tensor is None:
                    continue
                if theirs in heads and config.model_type == "llama":
                    # rotary pairs lie side by side there, half a head apart here
                    tensor = tensor.unflatten(0, (heads[theirs], 2, -1)).transpose(1, 2)
                    tensor = tensor.flatten(0, 2)
                plain = tensor.dim() < 2 or "_inp" in theirs
                tensor = tensor[0] if theirs == "ffn_gate_inp_shexp" else tensor
                add(f"blk.{layer}.{theirs}.{leaf}", tensor.contiguous(), "F32" if plain else kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return made
