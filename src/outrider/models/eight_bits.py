"""A model whose linear layers read weights of 8 bits, beside one that is left as it is.

Layers compute as `models.native.int8` says; everything else is the model's own forward. That is for
drafts alone: their law is another than the model's own, and the one that they declare.
"""

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.errors import ConfigurationError
from outrider.models.linear import product


def stored(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its decoder's linear layers, and its output layer, in 8 bits.

    Its other tensors are shared with `model`. Raises ConfigurationError where there is no layer
    that can be kept so.
    """
    tensors = [*model.parameters(), *model.buffers()]
    made: PreTrainedModel = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    parts = {*made.get_decoder().modules(), made.get_output_embeddings()}
    if not sum(_lay(part) for part in parts):
        raise ConfigurationError(
            "8 bits are for layers of type Linear and Conv1D; got draft_dtype='int8' with a "
            f"{type(model).__name__}, which has none; leave it out"
        )
    return made


def _lay(part: torch.nn.Module | None) -> bool:
    """Let a linear layer compute in 8 bits; whether it is one."""
    if part is None or type(part) not in (torch.nn.Linear, Conv1D):
        return False
    weight_OI: Tensor = part.get_parameter("weight")
    if type(part) is Conv1D:
        weight_OI = weight_OI.T
    bias = dict(part.named_parameters()).get("bias")
    vars(part)["forward"] = product(weight_OI, bias, int8=True)
    return True
