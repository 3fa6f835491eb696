"""What a step of a model reads and computes, by its configuration alone: no weight is read."""

from math import prod

import torch
from transformers import PretrainedConfig, PreTrainedModel

from outrider.costs import Sizes
from outrider.errors import UnsupportedModel
from outrider.models import pretrained
from outrider.models.auto_classes import auto_class
from outrider.models.config import decoder_of, read
from outrider.models.sources import DTYPES, ModelSource
from outrider.models.weight_only import STORED, bytes_a_weight


def empty(source: ModelSource) -> PreTrainedModel:
    """A model of that configuration without weights, to be counted."""
    with torch.device("meta"):
        made: PreTrainedModel = pretrained.empty_model(
            auto_class(source.config), source.config, source.trust
        )
        return made


def sizes(source: ModelSource, dtype: str | None = None) -> Sizes:
    """Of the decoder with weights of this dtype; None: the checkpoint's.

    A mixture of experts counts in full, as if every expert were used in every step. Raises
    UnsupportedModel for models that read more than text, and where a configuration names no heads.
    """
    config, kind = source.config, dtype or source.checkpoint_dtype()
    state = DTYPES.get(kind, torch.float32).itemsize
    if read(config, "is_encoder_decoder", bool):
        raise UnsupportedModel(
            f"capacity is that of a decoder alone; got {source}, which has an encoder; give the "
            "numbers by hand: --model-bytes, --kv-bytes"
        )
    model = empty(source)
    parameters = sum(weight.numel() for weight in model.parameters())
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    if head is None or head.weight is not table:  # rows are looked up; a tied table is multiplied
        parameters -= table.numel()
    layers, heads, kv_heads, size = _attention(decoder_of(config), source)
    return Sizes(
        parameters * _bytes_a_weight(source, kind),
        2 * layers * kv_heads * size * state,
        parameters,
        layers,
        4 * layers * heads * size,
    )


def _bytes_a_weight(source: ModelSource, kind: str) -> float:
    """Of memory; of a file whose weights stay in its blocks, what they take of it on average."""
    if kind != STORED:
        return bytes_a_weight(kind)
    stored = source.stored().tensors.values()
    return sum(one.rows.nbytes for one in stored) / sum(prod(one.shape) for one in stored)


def _attention(config: PretrainedConfig, source: ModelSource) -> tuple[int, int, int, int]:
    """Layers, heads, key/value heads and the size of a head."""
    layers = read(config, "num_hidden_layers", int)
    heads = read(config, "num_attention_heads", int)
    wide = read(config, "hidden_size", int)
    if not layers or not heads or not wide:
        raise UnsupportedModel(
            f"the configuration of {source} does not say how many heads its layers have; got "
            f"{config.model_type!r}; give the numbers by hand: --model-bytes, --kv-bytes"
        )
    size = read(config, "head_dim", int) or wide // heads
    return layers, heads, read(config, "num_key_value_heads", int) or heads, size
