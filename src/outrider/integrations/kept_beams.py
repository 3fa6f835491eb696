"""What a beam search went through, as transformers tells it: scores, beam indices, attention.

Its tables have a row for every beam of every prompt, and say for each token of a text which of them
it went on from.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.engine.beam_search.run import Hypothesis
from outrider.engine.beam_search.step import State

Layers: TypeAlias = tuple[Tensor, ...]


class KeptBeams:
    """Log-probabilities of every step of every prompt's search."""

    def __init__(self, rows: int) -> None:
        self._rows: list[list[Tensor]] = [[] for _ in range(rows)]

    def observe(self, row: int, state: State, logs_WV: Tensor) -> None:
        """A step of a prompt's search is taken."""
        self._rows[row].append(logs_WV)

    def scores(self) -> tuple[Tensor, ...]:
        """Log-probabilities of every step, [B * W, V] each; 0 where a search was over."""
        nothing = torch.zeros_like(self._rows[0][0])
        longest = max(map(len, self._rows))
        every = [row + [nothing] * (longest - len(row)) for row in self._rows]
        return tuple(torch.cat(step) for step in zip(*every, strict=True))


def indices(texts: Sequence[Sequence[Hypothesis]], beams: int) -> Tensor:
    """For each token of each text the row [B * W] of the beam that it went on from, -1 padded."""
    lines = [
        [row * beams + beam for beam in one.beams]
        for row, found in enumerate(texts)
        for one in found
    ]
    longest = max(map(len, lines))
    padded = [line + [-1] * (longest - len(line)) for line in lines]
    return torch.tensor(padded, dtype=torch.int32)


def spread(steps: Sequence[Layers], indices_BL: Tensor, rows: int) -> tuple[Layers, ...]:
    """Attention of texts, [B, ...] at every step, in the rows of the beams that they went on from.

    What beams that came to nothing looked at is not there: 0. Nobody's word times need it, but for
    those of the shorter texts of a batch, which transformers takes from another text's row.
    """

    def placed(layer: Tensor, at_B: Tensor) -> Tensor:
        there = at_B >= 0
        wide = layer.new_zeros(rows, *layer.shape[1:])
        wide[at_B[there].long()] = layer[there]
        return wide

    each = zip(steps, indices_BL.to(steps[0][0].device).unbind(1), strict=True)
    return tuple(tuple(placed(layer, at_B) for layer in layers) for layers, at_B in each)
