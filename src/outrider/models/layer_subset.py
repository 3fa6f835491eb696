"""A model made of some decoder layers of another: everything else is shared, no weight is copied.

What is made is a transformers model of the same class, so that every family is run as ever.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from outrider.errors import ConfigurationError
from outrider.models.config import decoder_of, read
from outrider.models.weight_only import like


def cut(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """The model with these of its decoder layers alone.

    Raises ConfigurationError if another layer holds what these need, as T5's first holds the
    position bias of all.
    """
    tensors = [*model.parameters(), *model.buffers()]
    small: PreTrainedModel = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    stack = layers_of(small)
    first = {name for name, _ in stack[0].named_parameters()}
    held = sorted(first - {name for name, _ in stack[layers[0]].named_parameters()})
    if held:
        raise ConfigurationError(
            f"layer 0 of {type(model).__name__} holds {held[0]} for all layers; got layers "
            f"{tuple(layers)}; keep layer 0, too"
        )
    kept = [stack[number] for number in layers]
    while len(stack):
        del stack[-1]
    for number, layer in enumerate(kept):
        stack.append(layer)
        for part in layer.modules():
            if "layer_idx" in vars(part):  # its number in the cache
                vars(part)["layer_idx"] = number
    shorten(small.config, layers)
    return small


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder's layers: its outermost list of modules."""
    found = stack_of(model.get_decoder())
    if found is None:
        raise ConfigurationError(
            f"{type(model).__name__} has no list of decoder layers; got draft layers of it; use "
            "another draft"
        )
    return found


def stack_of(decoder: torch.nn.Module) -> torch.nn.ModuleList | None:
    """The outermost list of modules of a decoder."""
    lists = (part for part in decoder.modules() if isinstance(part, torch.nn.ModuleList))
    return next(lists, None)


def depth(config: PretrainedConfig) -> int:
    """How many layers the decoder has."""
    return int(read(decoder_of(config), _counted(config), int) or 0)


def shorten(config: PretrainedConfig, layers: Sequence[int]) -> None:
    """Let a configuration say that its decoder has these layers alone."""
    inner = decoder_of(config)
    setattr(inner, _counted(config), len(layers))
    kinds = read(inner, "layer_types", (list, tuple))
    if kinds and depth(config):
        inner.layer_types = [kinds[number] for number in layers]


def _counted(config: PretrainedConfig) -> str:
    """The name that the number of decoder layers has. Of Whisper's two one means the encoder's."""
    names = ("num_decoder_layers", "decoder_layers")
    inner = decoder_of(config)
    if inner is config and read(config, "is_encoder_decoder", bool):
        return next((name for name in names if read(config, name, int)), "num_hidden_layers")
    return "num_hidden_layers"


def trim(model: PreTrainedModel, ids_K: Tensor) -> None:
    """Let the output layer know these tokens alone, in this order."""
    head = model.get_output_embeddings()
    rows = torch.nn.Linear(head.in_features, len(ids_K), head.bias is not None, device="meta")
    known = like(head.weight.detach()[ids_K], head.weight)
    rows.weight = torch.nn.Parameter(known, requires_grad=False)
    if head.bias is not None:
        rows.bias = torch.nn.Parameter(head.bias.detach()[ids_K], requires_grad=False)
    model.set_output_embeddings(rows)
    bias = model._buffers.get("final_logits_bias")  # BART and its kin add it to every logit
    if bias is not None:
        model._buffers["final_logits_bias"] = bias[:, ids_K]


def fill(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Put other weights in the place of the decoder's: `layers.0.*` and so on, others by name.

    Raises ValueError, which says what does not fit.
    """
    decoder: torch.nn.Module = model.get_decoder()
    stack = layers_of(model)
    path = next(name for name, part in decoder.named_modules() if part is stack)
    own = {name.replace(f"{path}.", "layers.", 1): name for name, _ in decoder.named_parameters()}
    lacking = [name for name in own if name.startswith("layers.") and name not in weights]
    if lacking:
        raise ValueError(f"it has no {lacking[0]}")
    for name, weight in weights.items():
        if name not in own:
            raise ValueError(f"the target has no {name}")
        owner, _, leaf = own[name].rpartition(".")
        module = decoder.get_submodule(owner)
        there = module.get_parameter(leaf)
        if there.shape != weight.shape:
            raise ValueError(f"{name} is {list(weight.shape)}, of the target {list(there.shape)}")
        weight = like(weight, there)
        setattr(module, leaf, torch.nn.Parameter(weight, requires_grad=False))
