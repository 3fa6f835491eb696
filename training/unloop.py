"""Unlikelihood of loops (Welleck et al. 2019): to say the same lines again is made less likely.

A small model that continues its own greedy text soon says the same line for ever. Such text
flatters every drafter, so the target is taught out of it on texts that loop. Corpora hold none,
so nothing else tells a model what comes after a second copy.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SHORTEST = 3  # tokens of the lines repeated
SEEN = 3  # tokens of a copy that may be chance


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


def written_loops(
    tokens: np.ndarray, newlines: np.ndarray, rows: int, length: int, seed: int
) -> tuple[Tensor, Tensor]:
    """`[rows, length]` texts that fall into a loop, and the tokens to push down in them.

    Corpus text, then one to four of its lines again and again: what greedy decoding ends in, made
    without decoding (Xu et al. 2022). Marked is every copy but the first, after the tokens by
    which one can see that it is a copy.
    """
    rng = np.random.default_rng(seed)
    texts = np.empty((rows, length), dtype=np.int64)
    marks = np.zeros((rows, length), dtype=bool)
    row = 0
    for _ in range(1000 * rows):
        start = rng.integers(0, len(tokens) - length)
        text = np.asarray(tokens[start : start + length]).astype(np.int64)
        ends = np.flatnonzero(np.isin(text, newlines))
        first, lines = rng.integers(1, 8), rng.integers(1, 5)
        if len(ends) <= first + lines:
            continue
        begin, end = ends[first], ends[first + lines]
        if not (SHORTEST <= end - begin <= length // 4 and begin < length // 2):
            continue
        texts[row, :begin] = text[:begin]
        texts[row, begin:] = np.resize(text[begin:end], length - begin)
        marks[row, end + SEEN :] = True
        row += 1
        if row == rows:
            return torch.from_numpy(texts), torch.from_numpy(marks)
    raise SystemExit("the corpus has too few short lines to write loops of; train without --unloop")


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
