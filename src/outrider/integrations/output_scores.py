"""Scores and logits of every emitted token, gathered step by step and given as `generate` does."""

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.types import Draft, Scores, StepTensors, Verdict


class OutputScores:
    """One pair for every token of every row: what it was drawn from, and the model's own logits."""

    def __init__(self, rows: int, scores: bool, logits: bool) -> None:
        self.scores, self.logits = scores, logits
        self._rows: list[list[tuple[Tensor | None, Tensor | None]]] = [[] for _ in range(rows)]

    @property
    def wanted(self) -> bool:
        """Whether anything is gathered."""
        return self.scores or self.logits

    def observe(
        self, draft: Draft, scores: Scores, verdict: Verdict, block: StepTensors, rows: list[int]
    ) -> None:
        """What a step emitted, in the way of the engine's observers."""
        laws = scores.laws
        raw = scores.raw_BNV if scores.raw_BNV is not None else laws.logits_BRV
        emitted = block.emitted_B.tolist()
        path = verdict.path_BD.tolist()
        for at, request in enumerate(rows):
            for node in [0, *path[at]][: emitted[at]]:
                processed = None
                if self.scores:
                    processed = laws.logits_BRV[at, node].float().clone()
                    if laws.floor_BR is not None:
                        processed[processed < laws.floor_BR[at, node]] = -torch.inf
                    if laws.greedy == "none":
                        processed *= laws.inverse_temperature_B[at]
                kept = raw[at, node].float().clone() if self.logits else None
                self._rows[request].append((processed, kept))

    def scored(self, row: int, at: int) -> Tensor:
        """The scores [V] of a row's token."""
        scores = self._rows[row][at][0]
        assert scores is not None
        return scores

    def stacked(
        self, which: int, longest: int, over: Callable[[int, int], bool]
    ) -> tuple[Tensor, ...]:
        """Scores (0) or logits (1) of every column, [B, V] each; 0 in rows that were over."""
        steps = []
        for at in range(longest):
            lines = [
                None if at >= len(row) or over(number, at) else row[at][which]
                for number, row in enumerate(self._rows)
            ]
            some = next(line for line in lines if line is not None)
            ended = torch.zeros_like(some)
            steps.append(torch.stack([ended if line is None else line for line in lines]))
        return tuple(steps)
