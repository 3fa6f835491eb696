"""Unlikelihood of loops (Welleck et al. 2019): to say the same again is made less likely.

A small model that continues its own greedy text soon says the same for ever. Such text flatters
every drafter, so the target is taught out of it on texts that loop: corpus text made to loop here,
and what the model itself writes (`own_loops.py`). Corpora hold none, so nothing else tells a model
what comes after a second copy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

GRAM = 4  # tokens that make a repetition
SHORTEST = 3  # tokens of the lines repeated
LONGEST = 16  # tokens of a loop within a line
SEEN = 3  # tokens of a copy that may be chance
AT_LEAST = 8  # tokens of all copies together: fewer may be a list
REFERENCE_TEMPERATURE = 0.5


def distinct_share(row: list[int], size: int = GRAM) -> float:
    """Distinct n-grams over all n-grams; 1 when nothing repeats.

    >>> distinct_share([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4])
    0.4444444444444444
    """
    grams = [tuple(row[i : i + size]) for i in range(len(row) - size + 1)]
    return len(set(grams)) / max(1, len(grams))


def loops(row: list[int]) -> bool:
    """The project's measure: fewer than half of the 4-grams are new."""
    return distinct_share(row) < 0.5


class Loops(NamedTuple):
    """`[rows, length]` texts that loop, and the tokens to push down in them."""

    texts: Tensor
    marks: Tensor


def written_loops(
    tokens: np.ndarray, newlines: np.ndarray, rows: int, length: int, seed: int
) -> Loops:
    """Texts that fall into a loop and leave it, made without decoding (Xu et al. 2022).

    Corpus text in which one to four lines, or a few tokens of a line, come several times before it
    goes on as it did. Marked are the copies, from the tokens by which one can see that they are.
    """
    rng = np.random.default_rng(seed)
    texts = np.empty((rows, length), dtype=np.int64)
    marks = np.zeros((rows, length), dtype=bool)
    row = 0
    for _ in range(1000 * rows):
        start = rng.integers(0, len(tokens) - length)
        text = np.asarray(tokens[start : start + length]).astype(np.int64)
        begin, end = some_lines(text, newlines, rng) if row % 2 else some_tokens(text, rng)
        size = end - begin
        if size == 0:
            continue
        fewest = math.ceil(AT_LEAST / size)
        most = min((length - end) // size, max(6, 2 * fewest))
        if most < fewest:
            continue
        out = end + size * rng.integers(fewest, most + 1)
        texts[row, :end] = text[:end]
        texts[row, end:out] = np.resize(text[begin:end], out - end)
        texts[row, out:] = text[end : end + length - out]
        marks[row, end + max(SEEN, AT_LEAST - size) : out] = True
        row += 1
        if row == rows:
            return Loops(torch.from_numpy(texts), torch.from_numpy(marks))
    raise SystemExit("the corpus has too few short lines to write loops of; train without --unloop")


def some_lines(text: np.ndarray, newlines: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    """Begin and end of one to four lines in the first half of a text; equal when it has none."""
    ends = np.flatnonzero(np.isin(text, newlines))
    first, lines = rng.integers(1, 8), rng.integers(1, 5)
    if len(ends) <= first + lines:
        return 0, 0
    begin, end = ends[first], ends[first + lines]
    fits = SHORTEST <= end - begin <= len(text) // 4 and begin < len(text) // 2
    return (int(begin), int(end)) if fits else (0, 0)


def some_tokens(text: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    """Begin and end of a few tokens anywhere in the first half of a text, short ones oftener."""
    begin = int(rng.integers(1, len(text) // 2))
    return begin, begin + int(LONGEST ** rng.random())


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


def anchored(logits: Tensor, reference: Tensor, texts: Tensor, marks: Tensor) -> Tensor:
    """Mean KL, over the marked tokens, from a reference's law without the token.

    Mere unlikelihood leaves open what to say instead, and a model may settle on one odd token that
    is never part of a loop. Here it is what a reference would say that must not repeat. `logits`
    and `reference` are `[rows, length - 1, vocabulary]`. Where nothing is marked the reference is
    not asked: it loops. Its law is taken at temperature 1/2, so that greedy decoding leaves the
    loop as soon as the token is about as likely as the rest.
    """
    others = (
        (reference.float() / REFERENCE_TEMPERATURE)
        .scatter(-1, texts[:, 1:, None], -torch.inf)
        .softmax(-1)
    )
    far = F.kl_div(logits.float().log_softmax(-1), others, reduction="none").sum(-1)
    weight = marks[:, 1:].to(far.dtype)
    return (far * weight).sum() / weight.sum().clamp(min=1)
