"""Tiny encoder-decoders and sources of several lengths, for drafters of models that read a source.

target, draft = encoder_decoders("t5")
Engine(target, MyDrafter(draft)).run(prompts, inputs=sources(target, len(prompts)))
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from outrider.models import TreeDecoder, adapt
from outrider.testing.models import VOCAB, disturb
from outrider.types import Inputs

_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
_BART: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 256,
    **_IDS,
}
_WHISPER = {name: value for name, value in _BART.items() if name != "max_position_embeddings"}
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


def _t5() -> PreTrainedModel:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,  # as many as the decoder: transformers counts these for its cache
            num_decoder_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


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


#: Families, each of another kind of decoder: what makes a random model of it.
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "t5": _t5,
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**_BART)),
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**_BART)),
    "whisper": _whisper,
    "t5gemma": _t5gemma,
    "bert2bert": _bert2bert,
}


def encoder_decoder(family: str = "t5", size: float = 0.0) -> PreTrainedModel:
    """A random model of a family in FAMILIES, peaked enough to disagree about.

    `size` is that of the noise on its weights, as in `perturbed`.

    >>> encoder_decoder("t5").config.vocab_size
    32
    """
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:  # norms and biases are not left at 1 and 0
                parameter.add_(0.05 * torch.randn_like(parameter))
    if size:
        torch.manual_seed(1)
        disturb(model, size)
    return model


@lru_cache
def encoder_decoders(family: str = "t5", size: float = 0.05) -> tuple[TreeDecoder, TreeDecoder]:
    """A target and a draft model, each with an encoder, that agree more or less.

    `size` is as in `perturbed`. The same call gives the same objects.

    >>> target, draft = encoder_decoders()
    >>> target.reads, draft.reads
    ('source', 'source')
    """
    return adapt(encoder_decoder(family)), adapt(encoder_decoder(family, size))


def sources(target: TreeDecoder, rows: int) -> list[Inputs]:
    """Something to read for each of `rows` rows, of several lengths where they may differ."""
    made = target.probe(rows)
    assert made is not None, "the model reads text alone"
    made = made._replace(encoded=None)
    return [_alone(made.take([row])) for row in range(rows)]


def _alone(row: Inputs) -> Inputs:
    """A row without its padding."""
    size = int(row.mask_BS.sum())
    ids = None if row.ids_BS is None else row.ids_BS[:, :size]
    return row._replace(ids_BS=ids, mask_BS=row.mask_BS[:, :size])
