"""Unlikelihood of loops (Welleck et al. 2019): what greedy decoding repeats is made less likely.

A small model that continues its own greedy text soon says the same line for ever. Such text
flatters every drafter, so the target is taught out of it: greedy continuations are written, and
where one loops, the tokens that complete an already written run are pushed down.
"""

from __future__ import annotations

import torch
from torch import Tensor


def distinct_share(row: list[int], size: int = 4) -> float:
    """Distinct n-grams over all n-grams; 1 when nothing repeats.

    >>> distinct_share([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4])
    0.4444444444444444
    """
    grams = [tuple(row[i : i + size]) for i in range(len(row) - size + 1)]
    return len(set(grams)) / max(1, len(grams))


def loops(row: list[int]) -> bool:
    """The project's measure: fewer than half of the 4-grams are new."""
    return distinct_share(row) < 0.5


def repeats(row: list[int], size: int) -> list[bool]:
    """Which tokens complete a run of `size` that was written before."""
    seen: set[tuple[int, ...]] = set()
    marks = [False] * min(size - 1, len(row))
    for i in range(size - 1, len(row)):
        gram = tuple(row[i - size + 1 : i + 1])
        marks.append(gram in seen)
        seen.add(gram)
    return marks


def loop_marks(texts: Tensor, start: int, size: int = 8) -> Tensor:
    """`[rows, length]` tokens to push down: repeats, written by the model, in rows that loop.

    Runs of eight, longer than the four of the measure: code repeats four tokens for good reason.
    """
    marks = torch.zeros_like(texts, dtype=torch.bool)
    for mark, row in zip(marks, texts.tolist(), strict=True):
        if loops(row[start:]):
            mark[start:] = torch.tensor(repeats(row[start:], size))
    return marks


def unlikelihood(logits: Tensor, texts: Tensor, marks: Tensor) -> Tensor:
    """Mean of `-log(1 - prob)` over the marked tokens; zero when none is marked.

    `logits` is `[rows, length - 1, vocabulary]`, the prediction of `texts[:, 1:]`.
    """
    # -log(1 - prob) as a difference of two sums: where a loop is certain `1 - prob` rounds to
    # zero, but the difference stays finite and its slope near one, so the model is still pushed.
    scores, tokens = logits.float(), texts[:, 1:, None]
    others = scores.scatter(-1, tokens, -torch.inf)
    penalty = scores.logsumexp(-1) - others.logsumexp(-1)
    weight = marks[:, 1:].to(penalty.dtype)
    return (penalty * weight).sum() / weight.sum().clamp(min=1)
