"""A model whose linear layers read weights laid out anew, beside one that is left as it is.

Packed weights are the model's own, in the order in which a product reads them (`linear`). Those of
8 bits are others (`cpu_kernels.int8`): they are for drafts alone, whose law is the one that they
declare. Everything else is the model's own forward.
"""

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.errors import ConfigurationError
from outrider.models.linear import product
from outrider.models.weight_only import WeightOnlyTensor


def quantize_int8(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its decoder's linear layers, and its output layer, in 8 bits.

    Its other tensors are shared with `model`. Raises ConfigurationError where there is no layer
    that can be kept so.
    """
    made = beside(model)
    if not sum(_lay(part, int8=True) for part in _decoding(made)):
        raise ConfigurationError(
            "8 bits are for layers of type Linear and Conv1D; got draft_dtype='int8' with a "
            f"{type(model).__name__}, which has none; leave it out"
        )
    return made


def pack_linear_layers(model: PreTrainedModel) -> PreTrainedModel | None:
    """The model with all its linear layers packed, which takes their memory once more.

    (Not where products read weights as they lie, but for those of type Conv1D.)
    Its other tensors are shared with `model`; None where it has no such layer.
    """
    made = beside(model)
    return made if sum(_lay(part) for part in made.modules()) else None


def beside(model: PreTrainedModel) -> PreTrainedModel:
    """Modules of its own, with the model's tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    made: PreTrainedModel = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    return made


def _decoding(model: PreTrainedModel) -> set[torch.nn.Module | None]:
    return {*model.get_decoder().modules(), model.get_output_embeddings()}


def _lay(part: torch.nn.Module | None, int8: bool = False) -> bool:
    """Let a linear layer compute with weights laid out anew; whether it is one."""
    if part is None or type(part) not in (torch.nn.Linear, Conv1D):
        return False
    if type(part.weight) not in (torch.nn.Parameter, WeightOnlyTensor):
        return False  # quantised by another library, whose product it needs
    weight_OI: Tensor = part.get_parameter("weight")
    if type(part) is Conv1D:
        weight_OI = weight_OI.T
    bias = dict(part.named_parameters()).get("bias")
    vars(part)["forward"] = product(weight_OI, bias, packed=not int8, int8=int8)
    return True
