"""Layers that keep a state: exact over trees by a log of what each node adds, not by its states.

A state layer takes a token by an update of its state. Of the text that is settled a row has the
state; of every node behind it, by slot as keys and values, what the update was made of
(`states.RecurrentStates`). So a rejected node is forgotten by being written over, an accepted path
moves next to its root, and what is settled is applied to the state before the next call.

The mixers stay transformers' own: they ask the cache for their state, are given a handle, and hand
it to functions of their modelling file, which stand behind wrappers that know handles (`hooks`).
A kind of mixer is one file here and one line in `MIXERS`.
"""

from collections.abc import Mapping

#: Files of this package by the function of a modelling file that they stand before, or by the class
#: of a mixer that calls none, whose forward they replace.
MIXERS: Mapping[str, str] = {
    "causal_conv1d_fn": "short_conv",
    "causal_conv1d_update": "short_conv",
    "torch_chunk_gated_delta_rule": "gated_delta",
    "torch_recurrent_gated_delta_rule": "gated_delta",
    "chunk_kimi_delta_attention": "gated_delta",
    "recurrent_kimi_delta_attention": "gated_delta",
    "mamba2_chunk_scan": "ssd",
    "mamba2_selective_state_update": "ssd",
    "mamba_selective_scan": "selective_scan",
    "mamba_selective_state_update": "selective_scan",
    "MiniMaxLightningAttention": "ssd",
    "RecurrentGemmaRecurrentBlock": "rg_lru",
    "RwkvFeedForward": "rwkv",
    "RwkvSelfAttention": "rwkv",
    "xLSTMBackend": "matrix_lstm",
    "ZayaCCAProjection": "short_conv",
    "Inkling2DynamicShortConvolution": "relative_attention",
    "Inkling2FullAttention": "relative_attention",
    "Inkling2RelativeLogits": "relative_attention",
    "Inkling2SlidingAttention": "relative_attention",
    "InklingAttention": "relative_attention",
    "InklingRelativeLogits": "relative_attention",
    "Qwen4ExpTextNGramEmbedding": "hashed_ngrams",
    "Qwen4ExpTextPLELayer": "hashed_ngrams",
}

#: Those files that have a kernel of ours (`cpu_kernels/outer_product.c`, `mixers.c`).
COMPILED = frozenset({"gated_delta", "short_conv", "ssd"})

#: Types of transformers' models whose mixers call these functions, and nothing else of that kind.
FAMILIES = frozenset(
    """
    bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling2_text inkling_text
    jamba kimi_linear lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl mamba mamba2 minicpm_ocr minicpmv4_6
    minicpmv4_7 minimax nemotron_h nemotron_h_omni olmo_hybrid qwen3_5 qwen3_5_moe
    qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text recurrent_gemma rwkv xlstm zamba
    zamba2 zaya
    """.split()
)

#: Types of layers that keep a state alone and take no mask, as configurations call them.
LAYERS = frozenset({"conv", "linear_attention", "mamba"})

#: Types of layers that attend and keep a state besides, by how they attend.
ATTEND = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
