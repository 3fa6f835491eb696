"""A model on the meta device, where reading any value is an error: verbs show that they do not."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.testing.models import HIDDEN, VOCAB
from outrider.types import Inputs, Nodes, Output, Reads


@dataclass(frozen=True)
class MetaCache:
    """Holds nothing."""

    capacity: int

    def take(self, rows: Sequence[int]) -> "MetaCache":
        """Nothing of these rows."""
        return self

    def put(self, into: Sequence[int], other: "MetaCache") -> "MetaCache":
        """Nothing more."""
        return self

    def narrow(self, rows: int) -> "MetaCache":
        """Nothing less."""
        return self


class MetaModel:
    """A LanguageModel on the meta device: logits have a shape and no values.

    >>> MetaModel().device
    device(type='meta')
    """

    vocab_size, context, device = VOCAB, 256, torch.device("meta")
    dtype, trees, trees_alike = torch.float32, True, True
    reads: Reads = "text"
    taps: tuple[int, ...] = ()
    follows = True

    def width(self, slots: int) -> int:
        """Any width is as good as any other."""
        return slots

    def examine(self, inputs: Inputs) -> None:
        """Refused: it reads text alone."""
        self.encode(inputs)

    def encode(self, inputs: Inputs) -> Inputs:
        """Refused: it reads text alone."""
        raise ValueError(f"a model of text alone encodes nothing; got {type(inputs).__name__}")

    def open(self, rows: int, capacity: int, inputs: Inputs | None = None) -> MetaCache:
        """An empty cache."""
        return MetaCache(capacity)

    def forward(
        self, cache: MetaCache, nodes: Nodes, *, last: int | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        """Logits (and states) without values; raises ValueError for tables of wrong shapes."""
        rows, queries = nodes.tokens_BQ.shape
        shapes = [tuple(table.shape) for table in nodes]
        if shapes[:3] != [(rows, queries)] * 3 or shapes[3][:2] != (rows, queries):
            raise ValueError(f"a model reads nodes [B, Q] and masks [B, Q, W]; got {shapes}")
        count = queries if last is None else min(last, queries)
        states = torch.empty(rows, count, HIDDEN, device="meta")
        logits = torch.empty(rows, count, self.vocab_size, device="meta")
        return Output(logits, (states,) * len(taps))

    def keep(self, cache: MetaCache, first_B: Tensor, path_BD: Tensor) -> None:
        """Nothing is there to move; raises ValueError for tensors of another device."""
        if not (first_B.is_meta and path_BD.is_meta):
            raise ValueError(f"a path lies with its model; got {first_B.device}, {path_BD.device}")

    def learn(
        self,
        cache: MetaCache,
        slots_BQ: Tensor,
        positions_BQ: Tensor,
        wide: int,
        hidden: tuple[Tensor, ...],
        known_B: Tensor,
    ) -> None:
        """It reads no other model's states."""

    def probe(self, rows: int) -> None:
        """It reads text alone."""
