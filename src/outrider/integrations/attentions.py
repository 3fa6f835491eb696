"""Attention weights of a finished text, from one pass over all of it.

Speculation reads several tokens in a call, and some for nothing: what `generate` gives with
`output_attentions` is computed afterwards, once, and cut as if the tokens had come one by one.
Whisper's word timestamps are made of them.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.errors import ConfigurationError

Layers: TypeAlias = tuple[Tensor, ...]


class Attentions(NamedTuple):
    """Weights of every layer, one entry for each call that plain decoding makes."""

    decoder_attentions: tuple[Layers, ...]  #: [B, H, Q, keys so far]
    cross_attentions: tuple[Layers, ...]  #: [B, H, Q, T]


def of_text(
    model: PreTrainedModel, sequences: Tensor, width: int, model_kwargs: Mapping[str, object]
) -> Attentions:
    """Weights of sequences [B, L] whose first `width` tokens are the prompt.

    Raises ConfigurationError for a model whose attention gives none.
    """
    text = sequences[:, :-1]  # nothing was read behind the last token
    mask = model_kwargs.get("decoder_attention_mask")
    if isinstance(mask, Tensor):
        mask = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
    inputs = model.prepare_inputs_for_generation(
        text,
        attention_mask=model_kwargs.get("attention_mask"),
        decoder_attention_mask=mask,
        encoder_outputs=model_kwargs["encoder_outputs"],
        use_cache=False,
    )
    with torch.no_grad():
        output = model(**inputs, output_attentions=True, return_dict=True)
    if not output.cross_attentions or any(one is None for one in output.cross_attentions):
        raise ConfigurationError(
            f"output_attentions needs attention that keeps its weights; got {type(model).__name__} "
            f"with attn_implementation={model.config._attn_implementation!r}; load it with 'eager'"
        )
    starts = [0, *range(width, text.shape[1])]
    ends = [*starts[1:], text.shape[1]]
    spans = list(zip(starts, ends, strict=True))
    return Attentions(
        tuple(
            tuple(layer[:, :, first:last, :last] for layer in output.decoder_attentions)
            for first, last in spans
        ),
        tuple(
            tuple(layer[:, :, first:last] for layer in output.cross_attentions)
            for first, last in spans
        ),
    )
