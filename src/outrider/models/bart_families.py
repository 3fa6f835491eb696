"""Encoder-decoders with BART's layers, which the lean runner computes, and how they differ."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from outrider.models.config import read
from outrider.models.layer import whole


class Family(NamedTuple):
    """One of them."""

    #: names of its classes: with an encoder, and of a decoder alone
    classes: tuple[str, ...]
    norms_ahead: bool  #: whether a norm stands ahead of each part (pre-norm), or behind the sum
    norms_tokens: bool = False  #: whether a decoder norms tokens alone, before positions are added
    scales: bool = True  #: whether embeddings are scaled where the configuration says so
    counts_tokens: bool = False  #: whether padding within a source has no position
    #: whether a source is a thousand states and more, over which rounding to 8 bits pays
    long_sources: bool = False
    #: the context by name
    context: str = "max_position_embeddings"


#: By the type that a configuration names.
FAMILIES: Mapping[str, Family] = {
    "bart": Family(("BartForConditionalGeneration", "BartForCausalLM"), False),
    "blenderbot": Family(("BlenderbotForConditionalGeneration", "BlenderbotForCausalLM"), True),
    "blenderbot-small": Family(
        ("BlenderbotSmallForConditionalGeneration", "BlenderbotSmallForCausalLM"),
        False,
        norms_tokens=True,
    ),
    "m2m_100": Family(("M2M100ForConditionalGeneration",), True, counts_tokens=True),
    "marian": Family(("MarianMTModel", "MarianForCausalLM"), False),
    "mbart": Family(("MBartForConditionalGeneration", "MBartForCausalLM"), True),
    "pegasus": Family(("PegasusForConditionalGeneration", "PegasusForCausalLM"), True),
    "plbart": Family(("PLBartForConditionalGeneration", "PLBartForCausalLM"), False),
    "whisper": Family(
        ("WhisperForConditionalGeneration", "WhisperForCausalLM"),
        True,
        scales=False,
        long_sources=True,
        context="max_target_positions",
    ),
}


def fits(model: PreTrainedModel) -> bool:
    """Whether the lean runner computes this model: one of `FAMILIES`, with or without an encoder.

    Not one whose weights are sharded, or quantised by another library.
    """
    family = FAMILIES.get(model.config.model_type)
    if family is None or type(model).__name__ not in family.classes:
        return False
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    quantised = read(model.config, "quantization_config", object) is not None
    return not quantised and all(whole(layer) for layer in linears)
