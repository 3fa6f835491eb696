"""PARD draft models (An et al. 2025, arXiv 2504.18583): a whole model that guesses all at once.

Any decoder that was trained to read masks behind its text, one token of its own vocabulary:

    text ... pending  mask  mask  mask      one call
                   |     |     |     |
                  d1    d2    d3    d4      the laws of the next tokens

So the law of a draft is a product over its positions, and a tree has one law per level. It is no
module on a target's states: it has a target's vocabulary and needs nothing else of it. Its
checkpoint is an ordinary one whose config.json names `pard_token`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import UnsupportedModel
from outrider.models.batch_invariance import BatchInvariance
from outrider.models.cache import SlotCache
from outrider.models.calibrate import Setting
from outrider.models.config import folder_fields
from outrider.models.decoder import TreeDecoder
from outrider.models.heads import formats
from outrider.models.model_wrapper import ModelWrapper
from outrider.models.sources import ModelSource
from outrider.row_params import RowTable
from outrider.tree import numbers
from outrider.types import Inputs, Nodes, Output

DEPTH = 8  #: tokens that are guessed at once; the authors' code drafts 12 on a card


@dataclass(frozen=True)
class ParallelDraftCache(RowTable):
    """What a parallel draft model keeps of its rows."""

    entries: SlotCache
    pending_B: Tensor  #: position of the token that the guesses stand behind
    guess_BDV: Tensor  #: logits of the tokens behind it, one place after another

    @property
    def capacity(self) -> int:
        return self.entries.capacity


class ParallelDraftModel(ModelWrapper[TreeDecoder]):
    """A `LanguageModel` whose calls that read text guess `depth` tokens behind it.

    >>> ParallelDraftModel(model, mask=151665, depth=8)                 # doctest: +SKIP
    """

    rereads = True  #: what it has drafted has left no entries behind

    def __init__(self, model: TreeDecoder, mask: int, depth: int = DEPTH) -> None:
        super().__init__(model)
        self._mask, self._depth = mask, depth
        self.trees = True  # of one law per level: no node sees another

    @property
    def _room(self) -> int:
        return BatchInvariance().width(self._depth - 1)

    def open(self, rows: int, capacity: int, inputs: Inputs | None = None) -> ParallelDraftCache:
        """An empty cache, with room for masks behind the last token."""
        guess = torch.zeros(
            rows, self._depth, self.vocab_size, dtype=torch.float32, device=self.device
        )
        return ParallelDraftCache(
            self.model.open(rows, capacity + self._room, inputs),
            torch.zeros(rows, dtype=torch.int64, device=self.device),
            guess if self.device.type == "cpu" else guess.to(self.dtype),
        )

    def forward(
        self,
        cache: ParallelDraftCache,
        nodes: Nodes,
        *,
        last: int | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> Output:
        """The logits [B, Q or last, V]: behind text by a call with masks behind it, and behind
        drafted nodes as that call guessed them; -inf where it guessed none."""
        if last is not None:
            return self._read(cache, nodes, last)
        depth_BQ = nodes.positions_BQ - cache.pending_B[:, None]
        at_BQ1 = depth_BQ.clamp(0, self._depth - 1)[..., None]
        logits = cache.guess_BDV.gather(1, at_BQ1.expand(-1, -1, self.vocab_size))
        return Output(logits.masked_fill((depth_BQ >= self._depth)[..., None], -torch.inf), ())

    def _read(self, cache: ParallelDraftCache, nodes: Nodes, last: int) -> Output:
        """Read text, and guess what is behind its last token."""
        device, rows, masks = self.device, len(nodes.slots_BQ), self._depth - 1
        before = nodes.visible_BQW.shape[-1]
        wide = min(before + self._room, cache.capacity)
        slots = nodes.slots_BQ[:, -1:] + 1 + numbers(masks, device)
        at = nodes.positions_BQ[:, -1:] + 1 + numbers(masks, device)
        seen = numbers(wide, device) <= slots[..., None]
        text = torch.nn.functional.pad(nodes.visible_BQW, (0, wide - before))
        both = Nodes(
            torch.cat([nodes.tokens_BQ, slots.new_full((rows, masks), self._mask)], 1),
            torch.cat([nodes.positions_BQ, at], 1),
            torch.cat([nodes.slots_BQ, slots], 1),
            torch.cat([text, seen], 1),
            nodes.settled_B,
        )
        logits = self.model.forward(cache.entries, both, last=last + masks).logits_BQV
        cache.pending_B.copy_(nodes.positions_BQ[:, -1])
        cache.guess_BDV.copy_(logits[:, -1 - masks :])
        return Output(logits[:, :last] if masks else logits, ())

    def keep(self, cache: ParallelDraftCache, first_B: Tensor, path_BD: Tensor) -> None:
        """Nothing: drafted tokens have no entries, and accepted ones are read as text."""


class PardSource(ModelSource):
    """A PARD draft model by its folder: an ordinary checkpoint that names `pard_token`.

    Raises ConfigurationError for a mask that is no token of it, UnsupportedModel for a model whose
    layers keep states.
    """

    stands_alone = False  # its guesses are of the target's own tokens

    @classmethod
    def reads(cls, given: object) -> bool:
        """Whether this names a folder with such a model."""
        fields = folder_fields(given)
        return fields.get("pard_token") is not None and formats.layout(fields) is None

    def __init__(self, target: ModelSource, given: Any) -> None:
        super().__init__(given, "draft", trust=target.trust)
        self._mask: Any = folder_fields(given)["pard_token"]
        vocab = int(self.config.vocab_size)
        if not isinstance(self._mask, int) or not 0 <= self._mask < vocab:
            raise formats.bad_head(
                Path(given),
                f"pard_token={self._mask!r} and a vocabulary of {vocab}",
                "write the token that stands for a mask into its config.json",
            )

    def driven(  # type: ignore[override]
        self, setting: Setting, device: torch.device, vocab: int, shares: bool = False
    ) -> ParallelDraftModel:
        """The model, which guesses in parallel."""
        model = super().driven(setting, device, vocab, shares)
        if model.recurrent or model.reads != "text":
            raise UnsupportedModel(
                "a PARD draft model reads its masks anew in every step, as attention can; got "
                f"{self}, whose layers keep states or read an encoder's; use another draft"
            )
        model.rounding = model.rounding._replace(rows=None)
        return ParallelDraftModel(model, self._mask)
