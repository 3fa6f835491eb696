"""The encoder-decoders of `outrider.testing` with more families than authors of drafters need."""

from typing import Any

import transformers
from transformers import PreTrainedModel

from outrider.testing import (
    FAMILIES,
    VOCAB,
    encoder_decoder as encoder_decoder,
    encoder_decoders as encoder_decoders,
)
from outrider.testing.sourced import BART

_WHISPER = {name: value for name, value in BART.items() if name != "max_position_embeddings"}
_GEMMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_BERT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}


def _whisper() -> PreTrainedModel:
    config = transformers.WhisperConfig(
        **_WHISPER,
        max_source_positions=12,
        max_target_positions=256,
        num_mel_bins=8,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration(config)


def _t5gemma() -> PreTrainedModel:
    decoder = _GEMMA | {"cross_attention_hidden_size": 32}
    config = transformers.T5GemmaConfig(encoder=dict(_GEMMA), decoder=decoder, vocab_size=VOCAB)
    return transformers.T5GemmaForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    )


def _bert2bert() -> PreTrainedModel:
    config = transformers.EncoderDecoderConfig(
        encoder=dict(_BERT),
        decoder=_BERT | {"is_decoder": True, "add_cross_attention": True},
        decoder_start_token_id=5,
        pad_token_id=0,
    )
    return transformers.EncoderDecoderModel(config)


FAMILIES["whisper"] = _whisper
FAMILIES["t5gemma"] = _t5gemma
FAMILIES["bert2bert"] = _bert2bert
