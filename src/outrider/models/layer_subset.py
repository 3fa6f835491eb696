"""A model made of some decoder layers of another: everything else is shared, no weight is copied.

What is made is a transformers model of the same class, so that every family is run as ever.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from outrider import arguments
from outrider.errors import ConfigurationError, VocabularyMismatch
from outrider.models import TreeDecoder, adapt, reads_more, unsupported
from outrider.models.calibrate import Setting
from outrider.models.config import decoder_of, read, vocabulary_of
from outrider.models.draft_source import TargetBoundSource
from outrider.models.linear import beside
from outrider.models.sources import ModelSource, ShareEncoder
from outrider.models.weight_only import like


def cut(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """The model with these of its decoder layers alone.

    Raises ConfigurationError if another layer holds what these need, as T5's first holds the
    position bias of all.
    """
    small = beside(model)
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
    """The outermost list of modules of a decoder, or of the decoder inside of a model of both."""
    inner = read(decoder, "decoder", torch.nn.Module)
    decoder = decoder if inner is None else inner
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


# Where a shallow draft comes from: layers of the target, or a folder of layers trained for it.
#
# A draft folder holds what a training has made of some decoder layers:
#
#     draft.json          {"of": "openai/whisper-base", "layers": [0, 5], ...}: the layers it began
#                         as; "draft_dtype": "int8" if it is best kept so
#     draft.safetensors   layers.0.*, layers.1.*: their weights by transformers' names, counted in
#                         the draft; others by their names in the decoder (`layer_norm.weight`);
#                         `ids` [K]: the tokens that it proposes, if not all
#
# What the file leaves out is lent by the target: embedding, positions, output layer, and the
# encoder's states. Tokens outside `ids` have no chance in the draft's law, so they are never
# proposed, and every rule stays exact.


@dataclass(frozen=True)
class LayerSubset:
    """Decoder layers of the target, counted from 0: a draft that needs no training.

    >>> LayerSubset((0, 5)).layers
    (0, 5)
    """

    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        what, do = "numbers of decoder layers, growing from 0 on", "write draft_layers=(0, 5)"
        layers: tuple[int, ...] = arguments.several(
            "draft_layers", self.layers, what, do, arguments.is_whole
        )
        if not layers or layers[0] < 0 or list(layers) != sorted(set(layers)):
            arguments.refuse("draft_layers", what, self.layers, do)
        object.__setattr__(self, "layers", layers)


def check(asked: LayerSubset, config: PretrainedConfig, target: str) -> None:
    """Raise ConfigurationError unless the target has these layers."""
    have = depth(config)
    if asked.layers[-1] >= have:
        raise ConfigurationError(
            f"the target has {have} decoder layers, counted from 0; got draft layers "
            f"{asked.layers} for {target}; take layers below {have}"
        )


def is_folder(given: object) -> bool:
    """Whether this names a draft folder."""
    return isinstance(given, (str, Path)) and (Path(given) / "draft.json").is_file()


class LayerSubsetSource(TargetBoundSource):
    """A shallow draft of a target, by its layers or by its folder: what is to be had is read.

    Raises ConfigurationError for a folder that cannot be read and layers that are not there,
    VocabularyMismatch for tokens that the target does not know.
    """

    takes_int8 = True
    ids_K: Tensor | None  #: the tokens that it proposes, if not all

    @classmethod
    def reads(cls, given: object) -> bool:
        """Whether these are layers, or a draft folder."""
        return isinstance(given, LayerSubset) or is_folder(given)

    def __init__(self, target: ModelSource, given: LayerSubset | str | Path) -> None:
        super().__init__(target, given)
        self._weights: dict[str, Tensor] = {}
        self._layers = given.layers if isinstance(given, LayerSubset) else self._read(Path(given))
        self.ids_K = self._weights.pop("ids", None)
        self._check(target.config)
        self.config = copy.deepcopy(target.config)
        shorten(self.config, self._layers)

    def _read(self, folder: Path) -> tuple[int, ...]:
        try:
            described = json.loads((folder / "draft.json").read_text())
            layers = LayerSubset(tuple(described["layers"]))
            self._weights = load_file(folder / "draft.safetensors")
            self.draft_dtype = described.get("draft_dtype")
            if self.draft_dtype not in (None, "int8"):
                raise ValueError(f"draft_dtype {self.draft_dtype!r} is not int8")
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ConfigurationError(
                f"cannot read the draft folder; got {str(folder)!r} ({type(error).__name__}: "
                f"{error}); it needs draft.json, which names layers, and draft.safetensors"
            ) from error
        unsupported.check_numbers(self._weights, f"the draft folder {str(folder)!r}")
        return layers.layers

    def _check(self, config: PretrainedConfig) -> None:
        have = depth(config)
        if not isinstance(self.given, LayerSubset) and self._layers[-1] >= have:
            raise ConfigurationError(
                f"the draft {self} was made of layer {self._layers[-1]} of its target; got "
                f"{self.target}, which has {have} layers, counted from 0; use it with the target "
                "that it was made for"
            )
        check(LayerSubset(self._layers), config, str(self.target))
        ids, vocab = self.ids_K, vocabulary_of(config)
        if ids is not None and not (len(ids) and 0 <= int(ids.min()) <= int(ids.max()) < vocab):
            raise VocabularyMismatch(
                f"the draft {self} proposes tokens that its target does not know; got {self.target}"
                f" with {vocab} tokens; use it with the target that it was made for"
            )

    def shares(
        self, target: ModelSource, wish: ShareEncoder, dtype: str, place: torch.device
    ) -> bool:
        """Whether it attends to the states of the target's encoder: always, if there is one."""
        shares = reads_more(self.config)
        if wish is False and shares:
            raise ConfigurationError(
                "layers of the target read what its encoder made; got share_encoder=False; leave it"
                " out"
            )
        return shares

    def model(self, dtype: str, device: torch.device) -> PreTrainedModel:
        """The draft as a model of transformers, with the target's whole output layer.

        Raises ConfigurationError for weights that do not fit.
        """
        model = cut(self.target.model(dtype, device), self._layers)
        if self._weights:
            try:
                fill(model, self._weights)
            except ValueError as error:
                raise ConfigurationError(
                    f"the draft {self} does not fit its target; got {self.target}, and {error}; "
                    "use it with the target that it was made for"
                ) from error
        return model

    def driven(
        self, setting: Setting, device: torch.device, vocab: int, shares: bool = True
    ) -> TreeDecoder:
        """The draft behind its runner. Raises ConfigurationError for weights that do not fit."""
        model = self.model(setting.dtype, device)
        ids = None if self.ids_K is None else self.ids_K.to(device)
        if ids is not None:
            trim(model, ids)
        int8 = setting.draft_dtype == "int8"
        draft = adapt(model, packed=setting.packed, vocab_size=vocab, shares=shares, int8=int8)
        draft.ids_K = ids
        return draft

    def __str__(self) -> str:
        if isinstance(self.given, LayerSubset):
            return f"layers {', '.join(map(str, self._layers))} of {self.target}"
        return str(self.given)
