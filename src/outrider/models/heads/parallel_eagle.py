"""P-EAGLE heads (Hui et al. 2026, arXiv 2602.01469): an EAGLE-3 head that guesses all at once.

The pending token's entry is made as an EAGLE-3 head makes it. Behind it stand masks, each the
embedding of a mask token beside a learnt vector in place of the target's states; they see the text
and the masks before them, in one call:

    x_n      = layers(embedding(pending), fc(states_{n-1}))         says what is behind it
    x_{n+d}  = layers(embedding(mask), fc(mask_hidden))             says the token d places further

So the law of a draft is a product over its positions, and a tree has one law per level.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.models.batch_invariance import BatchInvariance
from outrider.models.config import folder_fields
from outrider.models.heads import formats
from outrider.models.heads.autoregressive_head import AutoregressiveHead, HeadCache, StateHead
from outrider.models.heads.eagle3 import Eagle3, Eagle3Config, HeadStates
from outrider.models.heads.model import read_states, write_states
from outrider.models.heads.source import HeadSource
from outrider.models.sources import ModelSource
from outrider.tree import numbers
from outrider.types import Nodes

DEPTH = 8  #: tokens that are guessed at once, where a checkpoint does not say how many


class ParallelEagle(Eagle3):
    """An EAGLE-3 head with a vector `mask_hidden` [1, 1, aux_layers E'] for what has no states."""

    def __init__(self, config: Eagle3Config, **lent: Tensor | None) -> None:
        super().__init__(config, **lent)
        self.mask_hidden = nn.Parameter(self.fc.weight.new_zeros(1, 1, self.fc.in_features))


class ParallelDraftingHead(AutoregressiveHead):
    """A `HeadRunner` over a P-EAGLE head: `depth` laws from one call, one for each level.

    >>> ParallelDraftingHead(head, head, mask=128255, depth=8)          # doctest: +SKIP
    """

    def __init__(self, head: StateHead, module: ParallelEagle, mask: int, depth: int) -> None:
        super().__init__(head)
        self._mask, self._masks = mask, depth - 1
        with torch.inference_mode(False), torch.no_grad():
            hidden = module.mask_hidden.chunk(len(self.aux_layers), -1)
            self._state_11E = head.fuse([state.to(self.dtype) for state in hidden])

    def open(self, rows: int, capacity: int) -> HeadCache:
        """An empty cache, with room for masks behind the last token."""
        return super().open(rows, capacity + self._room)

    @property
    def _room(self) -> int:
        return BatchInvariance().width(self._masks)

    def logits(self, cache: HeadCache, nodes: Nodes, last: int | None) -> Tensor:
        """[B, Q or last, K]; a call that reads text runs the masks behind it."""
        if last is not None:
            said = super().logits(cache, nodes, last)
            self._guess(cache, nodes)
            return said
        drafted_BQ = nodes.positions_BQ - cache.known_B[:, None]
        at_BQ = torch.minimum(nodes.positions_BQ, cache.known_B[:, None] + self._masks)
        read = read_states(cache.own, at_BQ, self.head.width, self.dtype)
        logits = self.head.logits(HeadStates(read, read))
        return logits.masked_fill((drafted_BQ > self._masks)[..., None], -torch.inf)

    def _guess(self, cache: HeadCache, nodes: Nodes) -> None:
        """Run the masks behind each row's last node, and keep what its output layer would read."""
        if not self._masks:
            return
        first_B1, rows = nodes.slots_BQ[:, -1:] + 1, len(nodes.slots_BQ)
        wide = nodes.visible_BQW.shape[-1] + self._room
        slots_BQ = first_B1 + numbers(self._masks, first_B1.device)
        slot_W = numbers(wide, first_B1.device)
        # no state stands before the first token: its entry has no meaning to others
        seen_BQW = (slot_W > 0) & (slot_W <= slots_BQ[..., None])
        tokens_BQ = torch.full_like(slots_BQ, self._mask)
        masks = Nodes(tokens_BQ, slots_BQ, slots_BQ, seen_BQW, nodes.settled_B)
        cache.entries.begin(slots_BQ, wide, 0)
        state = self._state_11E.expand(rows, self._masks, -1)
        made = self.head.entries(masks, state, cache.entries)
        write_states(cache.own, slots_BQ, wide, made.read_BQE)


class PEagleSource(HeadSource):
    """A P-EAGLE head of a target by its folder: the speculators layout, or vLLM's.

    speculators   `speculators_model_type: "peagle"`; `mask_token_id` (`ptd_token_id` before)
    vLLM's        an EAGLE-3 head's config.json with `ptd_token_id` or `pard_token`
    """

    kind = "peagle"
    _MASKS = ("mask_token_id", "ptd_token_id", "pard_token")
    #: How it was trained, and how many tokens at once.
    fields = frozenset(
        {
            *_MASKS,
            "down_sample_ratio",
            "down_sample_ratio_min",
            "loss_type",
            "max_seq_len",
            "num_depths",
            "para_depths",
            "para_num",
            "parallel_drafting",
            "prediction_loss_weight",
        }
    )

    @classmethod
    def reads(cls, given: object) -> bool:
        """Whether this names a folder with such a head."""
        fields = folder_fields(given)
        kind = formats.layout(fields)
        if kind == formats.SPECULATORS:
            return bool(fields["speculators_model_type"] == cls.kind)
        return kind is not None and any(fields.get(name) is not None for name in cls._MASKS)

    def __init__(self, target: ModelSource, given: str | Path) -> None:
        super().__init__(target, given)
        fields, vocab = folder_fields(given), int(self.config.vocab_size)
        masks = [fields[name] for name in self._MASKS if fields.get(name) is not None]
        hidden, inputs = self._read.weights.get("mask_hidden"), self._read.weights["fc.weight"]
        if not masks or not isinstance(masks[0], int) or not 0 <= masks[0] < vocab:
            raise formats.bad_head(
                self.given,
                f"mask_token_id={masks[0] if masks else None!r} and a vocabulary of {vocab}",
                "write the token that stands for a mask into its config.json",
            )
        if hidden is None or hidden.numel() != inputs.shape[1]:
            size = "none" if hidden is None else f"one of {hidden.numel()} numbers"
            need = f"a tensor mask_hidden of {inputs.shape[1]} numbers: there is {size}"
            raise formats.bad_head(self.given, need, "give a whole checkpoint of a P-EAGLE head")
        self._read.weights["mask_hidden"] = hidden.view(1, 1, -1)
        self._mask, self._depth = masks[0], _depth(fields)

    def module(self, config: Eagle3Config, **lent: Tensor | None) -> Eagle3:
        """The module, without its weights."""
        return ParallelEagle(config, **lent)

    def runner(self, head: StateHead, module: Eagle3) -> AutoregressiveHead:
        """What drafts with it; `head` may be a faster form of the module."""
        assert isinstance(module, ParallelEagle)
        return ParallelDraftingHead(head, module, self._mask, self._depth)


def _depth(fields: dict[str, object]) -> int:
    """How many tokens a checkpoint guesses at once.

    >>> _depth({"para_depths": 4}), _depth({})
    (4, 8)
    """
    said = fields.get("speculators_config")
    ways = said.get("proposal_methods") if isinstance(said, dict) else None
    counts = [way.get("speculative_tokens") for way in ways or () if isinstance(way, dict)]
    counts += [fields.get(name) for name in ("num_depths", "para_depths", "para_num")]
    return next((count for count in counts if isinstance(count, int) and count > 0), DEPTH)
