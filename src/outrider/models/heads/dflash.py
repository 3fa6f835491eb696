"""DFlash heads: one call guesses a whole block from masks, beside the target's states.

The layers' keys and values of committed tokens are projections of the target's states at their
positions, fused into one (`context`). A block stands behind them: the pending token and masks,
which see the context and each other in both directions. Behind the layers the i-th mask says which
token stands in its place:

    context_p = norm(fc(states_p)),   x = layers([embedding(pending), mask, mask, ...])
    law of the i-th token behind the pending one = softmax(output_layer(norm(x_i)))

The masks see no drafted token, so the law of a draft is a product over its positions: a tree below
the pending token has one law per level. Embedding and output layer are the target's, unless the
head brings them.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from outrider.models.batch_invariance import BatchInvariance
from outrider.models.calibrate import Setting
from outrider.models.config import decoder_of, folder_fields, read, vocabulary_of
from outrider.models.decoder import additive
from outrider.models.draft_source import TargetBoundSource
from outrider.models.heads import formats
from outrider.models.heads.autoregressive_head import HeadCache
from outrider.models.heads.eagle3 import KINDS
from outrider.models.heads.model import DraftHead, HeadModel, read_states, write_states
from outrider.models.sources import ModelSource
from outrider.tree import numbers
from outrider.types import Nodes, TargetStates


@dataclass(frozen=True)
class DFlashConfig:
    """What a DFlash head computes.

    layer             transformers' configuration of its layers, a Qwen3's or a Llama's
    aux_layers        the target's states that it reads, as `LanguageModel.forward` counts them
    block             the pending token and the masks behind it
    mask              token whose embedding stands for a mask
    draft_vocab_size  how many tokens it can propose
    sights            what a block's places see in each layer; (): all of the text and each other
    """

    layer: PretrainedConfig
    aux_layers: tuple[int, ...]
    block: int
    mask: int
    draft_vocab_size: int
    sights: tuple["BlockSight", ...] = ()


class BlockSight(NamedTuple):
    """What the places of a block see in a layer.

    >>> BlockSight(2048, causal=True)
    BlockSight(window=2048, causal=True)
    """

    window: int | None = None  #: how many positions back and forth, their own included; None: all
    causal: bool = False  #: whether no place sees those behind it

    def seen(self, slots_BQ: Tensor, wide: int) -> Tensor:
        """Which of `wide` slots are in sight, [B, Q, W], of a block in these slots."""
        slot_W = numbers(wide, slots_BQ.device)
        last_BQ1 = (slots_BQ if self.causal else slots_BQ[:, -1:].expand_as(slots_BQ))[..., None]
        seen = slot_W <= last_BQ1
        if self.window is not None:
            seen = seen & ((slots_BQ[..., None] - slot_W).abs() < self.window)
        return seen


class DFlash(DraftHead):
    """A DFlash head; `embedding_VE` and `output_KE` are lent where it has none of its own.

    >>> head.remember(head.fuse(hidden), positions, cache)              # doctest: +SKIP
    >>> head.logits(head(blocks, positions, mask, cache))               # doctest: +SKIP
    """

    def __init__(
        self,
        config: DFlashConfig,
        *,
        embedding_VE: Tensor | None = None,
        output_KE: Tensor | None = None,
        ids_K: Tensor | None = None,
    ) -> None:
        inner, kind = copy.deepcopy(config.layer), KINDS[config.layer.model_type]
        inner._attn_implementation = "sdpa"
        wide, eps = int(inner.hidden_size), inner.rms_norm_eps
        super().__init__(inner.vocab_size, wide, embedding_VE, output_KE)
        self.config = config
        self.fc = nn.Linear(len(config.aux_layers) * wide, wide, bias=False)
        self.hidden_norm = kind.norm(wide, eps=eps)
        self.layers = nn.ModuleList(
            kind.layer(inner, number) for number in range(inner.num_hidden_layers)
        )
        self.norm = kind.norm(wide, eps=eps)
        self.speak(config.draft_vocab_size, ids_K)
        self.turned_by(kind.rotary(inner))
        self._size = int(inner.head_dim or wide // inner.num_attention_heads)

    def fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        """The context [B, Q, E] of the target's states [B, Q, E] at the aux layers."""
        fused: Tensor = self.hidden_norm(self.fc(torch.cat(list(hidden), -1)))
        return fused

    def remember(self, context_BQE: Tensor, positions_BQ: Tensor, cache: Cache) -> None:
        """Write the layers' keys and values of committed tokens."""
        cos, sin = self.rotary(context_BQE, positions_BQ)
        for number, layer in enumerate(self.layers):
            attention = layer.get_submodule("self_attn")
            parts = dict(attention.named_children())
            k, v = (
                parts[name](context_BQE).unflatten(-1, (-1, self._size))
                for name in ("k_proj", "v_proj")
            )
            k = parts["k_norm"](k) if "k_norm" in parts else k
            k, _ = apply_rotary_pos_emb(k.transpose(1, 2), k.transpose(1, 2), cos, sin)
            cache.update(k, v.transpose(1, 2), number)

    def forward(self, tokens_BQ: Tensor, positions_BQ: Tensor, wide: int, cache: Cache) -> Tensor:
        """What the output layer reads of a block behind the context, [B, Q, E].

        It lies in the slots of its positions; `wide` slots of the cache are there to be seen.
        """
        x = self.embedded(tokens_BQ)
        turned = self.rotary(x, positions_BQ)
        sights = self.config.sights or (BlockSight(),) * len(self.layers)
        masks = {sight: additive(sight.seen(positions_BQ, wide), x.dtype) for sight in set(sights)}
        for layer, sight in zip(self.layers, sights, strict=True):
            x = layer(
                x, attention_mask=masks[sight], position_embeddings=turned, past_key_values=cache
            )
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, read_BQE: Tensor) -> Tensor:
        return F.linear(read_BQE, self.output)


class MaskedBlockHead:
    """A `HeadRunner` over a DFlash head: a node's law follows from its depth alone.

    Behind its block no token is possible, so no draft goes there.
    """

    follows = False
    ahead = 1  #: how far the place is whose state says what is behind a node

    def __init__(self, head: DFlash) -> None:
        self.head, self.aux_layers, self.ids_K = head, head.config.aux_layers, head.ids_K
        self.device, self.dtype = head.fc.weight.device, head.fc.weight.dtype

    def open(self, rows: int, capacity: int) -> HeadCache:
        """An empty cache, with room for a block behind the last token."""
        return HeadCache.of(len(self.head.layers), rows, capacity + self._room, self.device)

    @property
    def _room(self) -> int:
        return BatchInvariance().width(self.head.config.block)

    def learn(self, cache: HeadCache, target: TargetStates) -> None:
        """Remember the context of these tokens."""
        if target.hidden:
            cache.entries.begin(target.slots_BQ, target.wide, 0)
            context = self.head.fuse([state.to(self.dtype) for state in target.hidden])
            self.head.remember(context, target.positions_BQ, cache.entries)
        cache.known_B.copy_(target.known_B)

    def keep(self, cache: HeadCache, first_B: Tensor, path_BD: Tensor) -> None:
        cache.entries.keep(first_B, path_BD)

    def logits(self, cache: HeadCache, nodes: Nodes, last: int | None) -> Tensor:
        """[B, Q or last, K]; the root's call, for the last node alone, runs the block."""
        known_B1, block = cache.known_B[:, None], self.head.config.block
        at_BQ = nodes.positions_BQ
        if last is not None:
            at_BQ = at_BQ[:, -last:]
            self._guess(cache, nodes.tokens_BQ[:, -1:], nodes.visible_BQW.shape[-1] + self._room)
        place_BQ = at_BQ + self.ahead  # a mask says which token stands in its place
        there = place_BQ < known_B1 + block
        at_BQ = torch.minimum(place_BQ, known_B1 + block - 1)
        found = read_states(cache.own, at_BQ, self.head.width, self.dtype)
        logits = self.block_logits(cache, nodes, found)
        return logits.masked_fill(~there[..., None], -torch.inf)

    def block_logits(self, cache: HeadCache, nodes: Nodes, read_BQE: Tensor) -> Tensor:
        """[B, Q, K]: what the block's states say behind (the last Q of) the nodes."""
        return self.head.logits(read_BQE)

    def _guess(self, cache: HeadCache, pending_B1: Tensor, wide: int) -> None:
        """Run the block behind each row's context, and keep what its output layer would read."""
        config, known_B1 = self.head.config, cache.known_B[:, None]
        masks = torch.full_like(pending_B1, config.mask).expand(-1, config.block - 1)
        slots_BQ = known_B1 + numbers(config.block, pending_B1.device)
        cache.entries.begin(slots_BQ, wide, 0)
        tokens = torch.cat([pending_B1, masks], 1)
        made = self.head(tokens, slots_BQ, wide, cache.entries)
        write_states(cache.own, slots_BQ, wide, made)


# DFlash checkpoints, in the authors' layout and the speculators one; a target lends the rest.
#
# authors       config.json of a Qwen3 with `block_size` and `dflash_config`, whose
#               `target_layer_ids` count layers from 0: state k + 1 is read for layer k
# speculators   `speculators_model_type: "dflash"`; `aux_hidden_state_layer_ids` count states
#
# Layers with a window, by `layer_types` (or `use_swa` of the authors), are causal unless the
# checkpoint says otherwise: `causal` of the authors for all layers, `sliding_window_non_causal`

_SPECULATORS = frozenset(
    {
        "aux_hidden_state_layer_ids",
        "block_size",
        "draft_vocab_size",
        "mask_token_id",
        "sliding_window_non_causal",
        "target_hidden_size",
        "transformer_layer_config",
    }
)
#: Of the speculators layout: what its other forms of head are made of, and how they were trained.
_OTHER_FORMS = frozenset(
    {
        "auf",
        "emb_dim",
        "gru_hidden_dim",
        "lambda_base_decay_ratio",
        "lambda_base_start",
        "pure_draft_prefix_len",
    }
)
_OWN = frozenset({"block_size", "dflash_config", "num_target_layers"})


#: Of the authors' `dflash_config`.
_AUTHORS = {
    "causal",
    "mask_token_id",
    "swa_window_size",
    "target_hidden_size",
    "target_layer_ids",
    "use_swa",
}
SLIDING = "sliding_attention"


def sights_of(
    folder: Path, layer: PretrainedConfig, window: object, causal: bool, every: bool = False
) -> tuple[BlockSight, ...]:
    """What a block sees in each layer: those that slide, or `every` one, have a window.

    `causal` is said of layers with a window. Raises ConfigurationError for a window of no size.
    """
    count = int(layer.num_hidden_layers)
    kinds = read(layer, "layer_types", (list, tuple)) or [None] * count
    kinds = [SLIDING] * count if every else kinds
    if SLIDING in kinds and (not isinstance(window, int) or window < 1):
        do = "write sliding_window, a number of positions, into its config.json"
        raise formats.bad_head(folder, f"sliding layers and sliding_window={window!r}", do)
    size = window if isinstance(window, int) else None
    return tuple(BlockSight(size, causal) if kind == SLIDING else BlockSight() for kind in kinds)


def spread(target: int, draft: int) -> tuple[int, ...]:
    """Layers, counted from 0, that are read where a checkpoint of the authors' names none.

    >>> spread(36, 5)
    (1, 9, 17, 25, 33)
    """
    if draft == 1:
        return (target // 2,)
    return tuple(round(1 + i * (target - 4) / (draft - 1)) for i in range(draft))


class DFlashSource(TargetBoundSource):
    """A DFlash head of a target by its folder.

    Raises ConfigurationError for a folder that cannot be read and for what is not computed here,
    VocabularyMismatch for tokens that the target does not know.
    """

    kind = "dflash"  #: as the speculators layout calls it
    projector = "dflash"  #: what makes scores of a block's states, by its name there
    fields: frozenset[str] = frozenset()  #: of its config.json, beside a DFlash head's
    runner: type[MaskedBlockHead] = MaskedBlockHead  #: what drafts with it

    @classmethod
    def reads(cls, given: object) -> bool:
        """Whether this names a folder with such a head."""
        fields = folder_fields(given)
        own = fields.get("speculators_model_type") == cls.kind
        return own or (cls.kind == "dflash" and "dflash_config" in fields)

    def __init__(self, target: ModelSource, given: str | Path) -> None:
        super().__init__(target, Path(given))
        fields, decoder = folder_fields(given), decoder_of(target.config)
        layers, wide = int(decoder.num_hidden_layers), int(decoder.hidden_size)
        known = vocabulary_of(target.config)
        asked = self._speculators if "speculators_model_type" in fields else self._authors
        layer, aux_layers, mask, sights = asked(fields, layers)
        self.config: PretrainedConfig = layer
        formats.fits(self.given, aux_layers, layers)
        if layer.hidden_size != wide:
            given_width = f"width {layer.hidden_size}, for a target of width {wide}"
            raise formats.bad_head(self.given, given_width, "use it with the target of that width")
        formats.same_vocabulary(str(self), layer.vocab_size, target, known)
        block, size = fields.get("block_size"), fields.get("draft_vocab_size") or known
        if not isinstance(block, int) or block < 2 or not isinstance(mask, int):
            do = "give a whole checkpoint"
            raise formats.bad_head(self.given, f"block_size={block!r}, mask_token_id={mask!r}", do)
        self._asked = DFlashConfig(layer, aux_layers, block, mask, int(size), sights)

    def _speculators(
        self, fields: Mapping[str, Any], layers: int
    ) -> tuple[PretrainedConfig, tuple[int, ...], object, tuple[BlockSight, ...]]:
        if fields.get("projector_type", "dflash") != self.projector:
            kind = f"projector_type={fields['projector_type']!r}, which is not computed here"
            raise formats.bad_head(
                self.given, kind, "give a head of projector 'dflash' or 'domino'"
            )
        inert = formats.INERT | _OTHER_FORMS | {"projector_type"}
        formats.refuse(self.given, fields, inert | _SPECULATORS | self.fields)
        inner: Any = fields.get("transformer_layer_config")
        layer = formats.layers_as(self.given, inner, slides=True)
        causal = not fields.get("sliding_window_non_causal")
        sights = sights_of(self.given, layer, inner.get("sliding_window"), causal)
        aux_layers = tuple(fields.get("aux_hidden_state_layer_ids") or ())
        return layer, aux_layers, fields["mask_token_id"], sights

    def _authors(
        self, fields: Mapping[str, Any], layers: int
    ) -> tuple[PretrainedConfig, tuple[int, ...], object, tuple[BlockSight, ...]]:
        own = fields["dflash_config"] or {}
        formats.refuse(self.given, own, _AUTHORS)
        inner = {name: value for name, value in fields.items() if name not in _OWN}
        layer = formats.layers_as(self.given, inner, slides=True)
        window = own.get("swa_window_size", fields.get("sliding_window"))
        every = bool(own.get("use_swa")) and SLIDING not in (fields.get("layer_types") or ())
        causal = own.get("causal")
        sights = sights_of(self.given, layer, window, causal is not False and not every, every)
        if causal:  # said of all layers
            sights = tuple(sight._replace(causal=True) for sight in sights)
        ids = own.get("target_layer_ids") or spread(layers, int(layer.num_hidden_layers))
        return layer, tuple(number + 1 for number in ids), own.get("mask_token_id"), sights

    def driven(
        self, setting: Setting, device: torch.device, vocab: int, shares: bool = False
    ) -> HeadModel:
        model = self.target.model(setting.dtype, device)
        weights = formats.weights_of(self.given)
        ids = formats.known_ids(
            self.given, weights, self._asked.draft_vocab_size, int(self.config.vocab_size)
        )
        head = self.module(**formats.lent(model, weights, ids), ids_K=ids)
        formats.settle(head, weights, str(self), setting.dtype, device)
        return HeadModel(self.runner(head), vocab)

    def module(self, **lent: Tensor | None) -> DFlash:
        """The module, without its weights."""
        return DFlash(self._asked, **lent)
