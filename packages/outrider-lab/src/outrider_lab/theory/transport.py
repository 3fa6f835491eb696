"""The most any exact rule can accept at one node: optimal transport with membership cost.

Given the law Q of the drafted set S, the largest chance that the emitted token lies in S is
(SpecTr, Sun et al. 2023; by max-flow = min-cut)

    alpha* = min over token sets H of  p(H) + 1 - Q(S inside H)

For independent drafts and for two without replacement the minimiser is a prefix of the order
"q / p descending" (Hu et al. 2025): one sort and one scan. Laws are [..., V], float64.

>>> p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
>>> round(float(independent(p, q, 2)), 6)
0.69
"""

from collections.abc import Callable
from itertools import combinations

import numpy as np

from outrider_lab.theory.node import Array, laws


def independent(target: Array, draft: Array, drafts: int) -> Array:
    """alpha* of K drafts with replacement: Q(S inside H) = q(H)^K."""
    p, q = _by_ratio(target, draft)
    return _least(np.cumsum(p, -1) + 1 - np.cumsum(q, -1) ** drafts)


def pair_without_replacement(target: Array, draft: Array) -> Array:
    """alpha* of two drafts without replacement: Q(S inside H) = sum over i in H of
    q_i (q(H) - q_i) / (1 - q_i). A draft with one possible token proposes only that.
    """
    p, q = _by_ratio(target, draft)
    sure = q >= 1
    odds = np.where(sure, 0, q / np.where(sure, 1, 1 - q))
    whole = np.cumsum(q, -1)
    inside = whole * np.cumsum(odds, -1) - np.cumsum(odds * q, -1)
    inside = inside + np.cumsum(sure, -1)
    return _least(np.cumsum(p, -1) + 1 - inside)


def by_subsets(target: Array, inside: Callable[[tuple[int, ...]], float]) -> float:
    """alpha* of any draft law at one node by trying every H: V <= 20, for tests and oddities.

    `inside(H)` is the probability that every drafted token lies in H.
    """
    (p,) = laws(target)
    best = 1.0
    for size in range(1, len(p) + 1):
        for tokens in combinations(range(len(p)), size):
            best = min(best, float(p[list(tokens)].sum()) + 1 - inside(tokens))
    return best


def _by_ratio(target: Array, draft: Array) -> tuple[Array, Array]:
    p, q = np.broadcast_arrays(*laws(target, draft))
    ratio = np.where(p > 0, q / np.where(p > 0, p, 1), np.where(q > 0, np.inf, -1))
    order = np.argsort(-ratio, axis=-1, kind="stable")
    return np.take_along_axis(p, order, -1), np.take_along_axis(q, order, -1)


def _least(cut: Array) -> Array:
    return np.asarray(np.clip(np.minimum(cut.min(-1), 1), 0, 1))
