"""A tiny Llama with a tokenizer in one GGUF file, as llama.cpp's converter lays it out."""

from outrider.testing import llama

#: One token for every byte that prints, as a byte-level BPE spells them, and three special ones.
LETTERS = [chr(code) for code in range(33, 127)]
TOKENS = ["<|bos|>", "<|end|>", "<unk>", *LETTERS, "Ġ", "Ċ", "th", "he"]
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


def model():
    return llama(vocab_size=len(TOKENS), eos_token_id=1, bos_token_id=0)


def write(path):
    """Write `model()` there; returns it."""
    import gguf

    made = model()
    config, weights = made.config, made.state_dict()
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(TOKENS)
    kinds = gguf.TokenType
    out.add_token_types([kinds.CONTROL] * 3 + [kinds.NORMAL] * (len(TOKENS) - 3))
    out.add_token_merges(MERGES)
    out.add_bos_token_id(0)
    out.add_eos_token_id(1)
    out.add_unk_token_id(2)
    out.add_chat_template(CHAT)
    out.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"].numpy())
    out.add_tensor("output_norm.weight", weights["model.norm.weight"].numpy())
    out.add_tensor("output.weight", weights["lm_head.weight"].numpy())
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in NAMES.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            if theirs in heads:  # rotary pairs lie side by side there, half a head apart here
                weight = weight.view(heads[theirs], 2, -1, weight.shape[-1]).transpose(1, 2)
                weight = weight.reshape(-1, weight.shape[-1])
            out.add_tensor(f"blk.{layer}.{theirs}.weight", weight.contiguous().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return made
