"""Multi-token prediction layers that checkpoints of some families bring (DeepSeek-V3 and others).

transformers has the layers, reads them and puts them together for every family whose
configuration names `num_mtp_layers` (`modeling_layers.MtpModel`); those of Qwen3-Next and Qwen3.5
are read by `read_layer`. A layer makes a token's entry from the token and the target's last state
of the token before it; below drafted tokens it reads its own output.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, modeling_layers
from transformers.cache_utils import Cache

from outrider.errors import ConfigurationError
from outrider.models import pretrained, unsupported
from outrider.models.cache import SlotCache
from outrider.models.calibrate import Setting
from outrider.models.config import decoder_of, found, read
from outrider.models.decoder import additive
from outrider.models.draft_source import TargetBoundSource
from outrider.models.heads import MTP
from outrider.models.heads.autoregressive_head import (
    AutoregressiveHead,
    HeadCache,
    parents,
    within,
)
from outrider.models.heads.eagle3 import HeadStates
from outrider.models.heads.model import HeadModel, read_states, write_states
from outrider.models.model_lock import CONFIGURATION
from outrider.models.sources import ModelSource
from outrider.types import Nodes

# Multi-token prediction layers that checkpoints bring as `mtp.*`, read from their files.
#
# Qwen3-Next and Qwen3.5 have one such layer in every checkpoint, which transformers drops at load:
# it is a decoder layer with full attention behind a linear layer over the token's embedding and the
# state before it, both normalised. transformers' `MtpModel` is that very module; it only has to be
# told of the layer, and to be given the weights by its own names.

#: Modules of a checkpoint's layer, and what `MtpModel` calls them.
NAMES = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "post_norm",
    "layers.0": "mtp_block",
}
_PART = re.compile(rf"(?:^|\.)mtp\.({'|'.join(map(re.escape, NAMES))})\.(.+)$")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def is_whole(names: list[str]) -> bool:
    """Whether tensors with these names are such a layer, none of its modules missing.

    >>> is_whole(["mtp.fc.weight"])
    False
    """
    found = (_PART.search(name) for name in names)
    return {match[1] for match in found if match} == set(NAMES)


def read_layer(made: Any, model: PreTrainedModel, folder: Path) -> Any:
    """The first such layer of a folder's safetensors, as `made` (`MtpModel`) for a loaded model.

    Raises RuntimeError, as torch does, where tensors are missing, too many, or of other shapes.
    """
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():
                if (part := _PART.search(name)) is not None:
                    weights[f"{NAMES[part[1]]}.{part[2]}"] = stored.get_tensor(name)
    with CONFIGURATION, _told(decoder_of(model.config)):
        layer = made(model, 1)
    layer.layers[0].load_state_dict(_fused(weights))
    layer.layers.to(model.device, model.dtype)
    return layer


@contextmanager
def _told(config: PretrainedConfig) -> Iterator[None]:
    """A configuration that says, for the time of a `with`, what the checkpoint's did not."""
    says = {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}
    if vars(config).get("mlp_layer_types"):
        says["mtp_mlp_layer_types"] = config.mlp_layer_types[-1:]
    kept = dict(vars(config))
    try:
        vars(config).update(says)
        yield
    finally:
        vars(config).clear()
        vars(config).update(kept)


def _fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts' matrices in one tensor, as transformers has them; authors store each alone."""
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    rest: dict[str, Tensor] = {}
    for name, weight in weights.items():
        match = _EXPERT.match(name)
        if match is None:
            rest[name] = weight
        else:
            kinds = experts.setdefault(match[1], {})
            kinds.setdefault(match[3], {})[int(match[2])] = weight
    for place, kinds in experts.items():
        stacked = {
            kind: torch.stack([each[number] for number in sorted(each)])
            for kind, each in kinds.items()
        }
        if stacked.keys() == {"gate", "up", "down"}:  # or else `load_state_dict` says what is not
            rest[f"{place}.down_proj"] = stacked["down"]
            rest[f"{place}.gate_up_proj"] = torch.cat([stacked["gate"], stacked["up"]], 1)
    return rest


#: Parts of names by which checkpoints have such layers.
_PARTS = re.compile(r"(^|\.)(mtp|mtp_layers|nextn)\.")


class Mtp:
    """Layers of multi-token prediction, as transformers' `MtpModel` holds them.

    >>> Mtp(MtpModel.from_pretrained(target)).aux_layers                      # doctest: +SKIP
    (-1,)
    """

    aux_layers: tuple[int, ...] = (-1,)
    ids_K: Tensor | None = None

    def __init__(self, model: Any) -> None:
        self.model = model
        self.depth = len(model.layers)
        kinds = read(model.config, "layer_types", (list, tuple)) or ()
        self._kinds: tuple[str | None, ...] = (*kinds, *[None] * self.depth)[: self.depth]
        rope = read(model.config, "rope_parameters", dict) or {}
        #: whether types of layers have frequencies of their own
        self._rope_by_kind = any(isinstance(each, dict) for each in rope.values())
        wide = read(model.config, "sliding_window", int)
        #: of each layer, how many positions back its attention reaches; None: all
        self.windows = tuple(wide if "sliding_attention" == kind else None for kind in self._kinds)
        self.window = self.windows[0]
        self.width = int(model.config.hidden_size)

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.layers[0].eh_proj.weight.device)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.layers[0].eh_proj.weight.dtype
        return dtype

    def fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        """The target's last state, as it is."""
        return hidden[0]

    def __call__(
        self,
        tokens_BQ: Tensor,
        states_BQE: Tensor,
        positions_BQ: Tensor | None = None,
        mask_B1QW: Tensor | None = None,
        cache: Cache | None = None,
        layer: int = 0,
    ) -> HeadStates:
        """A layer's entries of tokens, each with the state of the token before it."""
        if positions_BQ is None:
            positions_BQ = torch.arange(1, 1 + tokens_BQ.shape[1], device=tokens_BQ.device)[None]
        model = self.model
        embedded, turned = model.embed_tokens(tokens_BQ), None
        if model.rotary_emb is not None:
            kind = {"layer_type": self._kinds[layer]} if self._rope_by_kind else {}
            at = positions_BQ
            if found(model.rotary_emb, "mrope_section") is not None:  # by text, row and column
                at = at.expand(3, -1, -1)
            turned = model.rotary_emb(embedded, position_ids=at, **kind)
        x: Tensor = model.layers[layer](
            embedded,
            states_BQE,
            position_embeddings=turned,
            attention_mask=mask_B1QW,
            position_ids=positions_BQ,
            past_key_values=cache,
        )
        if model.use_shared_post_norm:
            x = model.shared_post_norm(x)
        return HeadStates(x, x)

    def entries(
        self, nodes: Nodes, states_BQE: Tensor, cache: SlotCache, layer: int = 0
    ) -> HeadStates:
        """A layer's entries of nodes, each with the state of the token before it."""
        mask = additive(nodes.visible_BQW, self.dtype)
        return self(nodes.tokens_BQ, states_BQE, nodes.positions_BQ, mask, cache, layer)

    def logits(self, states: HeadStates) -> Tensor:
        """[B, Q, V], by the target's own output layer."""
        logits: Tensor = self.model._project_to_logits(states.read_BQE)
        return logits


def _stored(target: ModelSource) -> list[str]:
    """Names of tensors of such layers in the safetensors of a target's folder."""
    layers = read(decoder_of(target.config), "num_hidden_layers", int) or 0
    found: list[str] = []
    folder = _folder(target)
    for file in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        with suppress(SafetensorError), safe_open(file, "pt") as stored:
            found += [key for key in stored.keys() if _PARTS.search(key) or _behind(key, layers)]
    return found


def _folder(target: ModelSource) -> Path | None:
    """The folder of a target's checkpoint; None: nobody knows."""
    given = target.given
    if isinstance(given, (str, Path)):
        return Path(given)
    place = read(given, "name_or_path", str)  # where transformers has read it
    return Path(place) if place and Path(place).is_dir() else None


def _behind(key: str, layers: int) -> bool:
    """Whether a tensor is of a layer behind the decoder's last, where DeepSeek and GLM have them.

    >>> _behind("model.layers.61.eh_proj.weight", 61), _behind("model.layers.3.mlp.weight", 61)
    (True, False)
    """
    number = re.match(r"model\.layers\.(\d+)\.", key)
    return number is not None and int(number[1]) >= layers


class MtpSource(TargetBoundSource):
    """The layers that a target's own checkpoint brings: the k-th drafts the k-th token.

    Deeper ones are the last layer's, below its own output: as trained for its first, a guess for
    the others. Raises ConfigurationError for a target without one, or for a transformers that does
    not read them.
    """

    @classmethod
    def reads(cls, given: object) -> bool:
        """Whether this is the name of that layer."""
        return given == MTP

    def __init__(self, target: ModelSource, given: str = MTP) -> None:
        super().__init__(target, given)
        self.config = target.config
        count = read(decoder_of(target.config), "num_mtp_layers", int)
        keys = [] if count else _stored(target)
        self._unbuilt = is_whole(keys)  #: transformers drops it at load
        if not count and not self._unbuilt:
            more = ""
            if keys:
                more = (
                    f" ({len(keys)} tensors of its checkpoint are such layers', first {keys[0]}, "
                    f"which transformers {transformers.__version__} does not build for "
                    f"{target.config.model_type!r})"
                )
            raise ConfigurationError(
                f"draft='{MTP}' is the multi-token prediction layer of a target; got {target}, "
                f"which has none{more}; use another draft"
            )
        self._made: Any = read(modeling_layers, "MtpModel", type)
        if self._made is None:
            raise ConfigurationError(
                f"draft='{MTP}' needs a transformers that has MtpModel; got "
                f"{transformers.__version__}; install a newer one"
            )

    def driven(
        self, setting: Setting, device: torch.device, vocab: int, shares: bool = False
    ) -> HeadModel:
        """The layer as a draft model. Raises ConfigurationError if its weights are not there."""
        model = self.target.model(setting.dtype, device)
        layers = Mtp(self._loaded(model))
        return HeadModel(
            AutoregressiveHead(layers) if layers.depth == 1 else ChainedHead(layers), vocab
        )

    def _loaded(self, model: PreTrainedModel) -> Any:
        try:
            if self._unbuilt and (folder := _folder(self.target)) is not None:
                made = read_layer(self._made, model, folder)
            else:
                made = pretrained.read_mtp(self._made, model, device_map={"": model.device})
        except (OSError, RuntimeError, ValueError) as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
            if not _stored(self.target):
                why = "not one tensor of it, though its configuration promises it (num_mtp_layers)"
            raise ConfigurationError(
                f"cannot read the multi-token prediction layer of {self.target}; got {why}; give "
                "the whole checkpoint by its path, or install a newer transformers"
            ) from error
        unsupported.check_numbers(dict(made.named_parameters()), str(self))
        return made.eval().requires_grad_(False)

    def __str__(self) -> str:
        return f"the multi-token prediction layer of {self.target}"


# Layers of multi-token prediction in a chain: the k-th drafts the k-th token behind the text.
#
# A layer makes a token's entry from the token and a state of the token before it: the first layer
# from the target's, each other one from the output of the layer before it (DeepSeek-V3, section
# 2.2). So a layer's entry knows the target's states up to as many tokens back as its number, and
# the pending token's law is the first layer's, that of the first drafted token the second's, and so
# on:
#
#   layer 0   t1(h0) t2(h1) ... tn(hn-1)                      says what is behind tn
#   layer 1          t2(o0) ... tn(o0)   d1(o0)               says what is behind the first draft d1
#   layer 2                              d1(o1)  d2(o1)       and behind the second one
#
# Below as many drafted tokens as there are layers the last one goes on below its own output.


class ChainedHead(AutoregressiveHead):
    """A `HeadRunner` over layers of which each one drafts at a depth of its own.

    >>> HeadModel(ChainedHead(Mtp(layers)), vocab_size=129280).aux_layers     # doctest: +SKIP
    (-1,)
    """

    head: Mtp

    def open(self, rows: int, capacity: int) -> HeadCache:
        """An empty cache: every layer keeps entries and outputs."""
        return HeadCache.of(self.head.depth, rows, capacity, self.device, self.head.depth)

    def logits(self, cache: HeadCache, nodes: Nodes, last: int | None) -> Tensor:
        """Write the nodes' entries of the layers that go on from them; [B, Q or last, K]."""
        head, slots_BQ, wide = self.head, nodes.slots_BQ, nodes.visible_BQW.shape[-1]
        # how many tokens were drafted behind the pending one, up to the node
        drafted_BQ = (nodes.positions_BQ - cache.known_B[:, None]).clamp(min=0)
        parent_BQ, read = parents(nodes), None
        for layer in range(self._first(drafted_BQ, last), head.depth):
            state = self._before(cache, parent_BQ, layer, drafted_BQ)
            seen = within(nodes, 1 + layer, head.windows[layer])
            cache.entries.begin(slots_BQ, wide, 0)
            made = head.entries(nodes._replace(visible_BQW=seen), state, cache.entries, layer)
            write_states(cache.own, slots_BQ, wide, made.next_BQE, layer)
            own = (drafted_BQ.clamp(max=head.depth - 1) == layer)[..., None]
            read = made.read_BQE if read is None else torch.where(own, made.read_BQE, read)
        assert read is not None
        if last is not None:
            read = read[:, -last:]
        return head.logits(HeadStates(read, read))

    def _first(self, drafted_BQ: Tensor, last: int | None) -> int:
        """The first layer that any of the nodes, or what is drafted below them, needs."""
        if last is not None or drafted_BQ.device.type != "cpu":
            return 0  # a device's values are not waited for: all layers run there
        return min(int(drafted_BQ.min()), self.head.depth - 1)

    def _before(
        self, cache: HeadCache, parent_BQ: Tensor, layer: int, drafted_BQ: Tensor
    ) -> Tensor:
        """What a layer reads of the tokens before the nodes, [B, Q, E]."""
        if layer == 0:
            return cache.states(parent_BQ, self.head.width, self.head.dtype)
        head, at_BQ = self.head, parent_BQ.clamp(min=0)
        state = read_states(cache.own, at_BQ, head.width, head.dtype, layer - 1)
        if layer == head.depth - 1:  # below all layers it goes on by itself
            own = read_states(cache.own, at_BQ, head.width, head.dtype, layer)
            state = torch.where((drafted_BQ > layer)[..., None], own, state)
        return state.masked_fill(parent_BQ[..., None] < 0, 0.0)
