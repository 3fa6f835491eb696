"""A head as a draft model: what all of them have in common, over what each does with states."""

from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.errors import ConfigurationError
from outrider.models.batch_invariance import BatchInvariance
from outrider.models.decoder import fitted
from outrider.types import Inputs, Nodes, Output, Reads


class HeadRunner(Protocol):
    """Keeps what a head is told, and makes laws of it."""

    taps: tuple[int, ...]  #: the target's states that it reads
    follows: bool  #: whether it keeps entries of the text, too
    ids_K: Tensor | None  #: the tokens that it can propose; None: all
    device: torch.device  #: where its weights lie
    dtype: torch.dtype

    def open(self, rows: int, capacity: int) -> Any:
        """An empty cache."""

    def learn(
        self,
        cache: Any,
        slots_BQ: Tensor,
        positions_BQ: Tensor,
        wide: int,
        hidden: tuple[Tensor, ...],
        known_B: Tensor,
    ) -> None:
        """Be told the target's states of the tokens in these slots; `known_B` are true from now."""

    def keep(self, cache: Any, first_B: Tensor, path_BD: Tensor) -> None:
        """Move what it was told of accepted paths next to their roots."""

    def logits(self, cache: Any, nodes: Nodes, last: int | None) -> Tensor:
        """[B, Q or last, K], over the tokens that it can propose; -inf where none is possible."""


class HeadModel:
    """A `LanguageModel` over a head. Its law of a token that it cannot propose is 0.

    >>> HeadModel(AutoregressiveHead(head), vocab_size=49152).taps  # doctest: +SKIP
    (2, 15, 27)
    """

    trees = True
    trees_alike = False  #: nobody has tried
    reads: Reads = "text"

    def __init__(self, runner: HeadRunner, vocab_size: int, context: int = 1 << 30) -> None:
        self.runner, self.vocab_size, self.context = runner, vocab_size, context
        self.taps, self.follows = runner.taps, runner.follows
        self.device, self.dtype = runner.device, runner.dtype

    def width(self, slots: int) -> int:
        """The least visible width of so many slots: what a draft is rounded to is of no account."""
        return BatchInvariance().width(slots)

    def examine(self, inputs: Inputs) -> None:
        """Refused: it reads states."""
        self.encode(inputs)

    def encode(self, inputs: Inputs) -> Inputs:
        """Refused: it reads states."""
        raise ConfigurationError(
            "a head reads its target's states alone; got inputs; leave them out"
        )

    def probe(self, rows: int) -> None:
        """It needs no inputs."""

    def open(self, rows: int, capacity: int, inputs: Inputs | None = None) -> Any:
        """An empty cache."""
        if inputs is not None:
            self.examine(inputs)
        return self.runner.open(rows, capacity)

    def learn(
        self,
        cache: Any,
        slots_BQ: Tensor,
        positions_BQ: Tensor,
        wide: int,
        hidden: tuple[Tensor, ...],
        known_B: Tensor,
    ) -> None:
        """Be told the target's states of the tokens in these slots; `known_B` are true from now."""
        self.runner.learn(cache, slots_BQ, positions_BQ, wide, hidden, known_B)

    def keep(self, cache: Any, first_B: Tensor, path_BD: Tensor) -> None:
        """Move what it was told of accepted paths next to their roots."""
        self.runner.keep(cache, first_B, path_BD)

    def forward(
        self, cache: Any, nodes: Nodes, *, last: int | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        """The logits [B, Q, V] of (the last `last` of) Q nodes."""
        if taps:
            raise ConfigurationError(
                f"a head has no layers to read states of; got taps={taps}; read the target's"
            )
        logits = self.runner.logits(cache, nodes, last)
        return fitted(logits, (), self.runner.ids_K, self.vocab_size)
