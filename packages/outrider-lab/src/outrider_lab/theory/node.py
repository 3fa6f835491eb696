"""How often each rule follows a draft at one node: exact, in float64.

`target` and `draft` are laws [..., V]; leading dimensions broadcast, so a file of recorded laws is
one call. Every function returns the probability that the next token is one of the drafted ones.

>>> p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
>>> round(float(single(p, q)), 6), round(float(k_seq(p, q, 2)), 6)
(0.6, 0.658443)
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def laws(*given: Array) -> tuple[Array, ...]:
    """float64 copies, summing to one along the last axis."""
    found = [np.asarray(law, dtype=np.float64) for law in given]
    for law in found:
        if law.size and ((law < 0).any() or not np.allclose(law.sum(-1), 1, atol=1e-6)):
            raise ValueError("a law must be non-negative and sum to one along its last axis")
    return tuple(law / law.sum(-1, keepdims=True) for law in found)


def total_variation(target: Array, draft: Array) -> Array:
    """TV = 1/2 sum |p - q| (Leviathan's D_LK)."""
    p, q = laws(target, draft)
    return np.asarray(np.abs(p - q).sum(-1) / 2)


def single(target: Array, draft: Array) -> Array:
    """One sampled token under `rejection`, or any optimal rule: sum min(p, q) = 1 - TV."""
    p, q = laws(target, draft)
    return np.asarray(np.minimum(p, q).sum(-1))


def match(target: Array, draft: Array) -> Array:
    """One sampled token under `match`: sum p q, never more than `single`."""
    p, q = laws(target, draft)
    return np.asarray((p * q).sum(-1))


def coupled(target: Array, draft: Array) -> Array:
    """One coupled token: sum_x 1 / sum_v max(p_v / p_x, q_v / q_x) (Daliri et al. 2025).

    Between (1 - TV) / (1 + TV) and 1 - TV.
    """
    p, q = laws(target, draft)
    total = np.zeros(np.broadcast_shapes(p.shape, q.shape)[:-1])
    for x in range(p.shape[-1]):  # one token at a time: V numbers of memory instead of V^2
        px, qx = p[..., x], q[..., x]
        both = (px > 0) & (qx > 0)
        px, qx = np.where(both, px, 1), np.where(both, qx, 1)
        worst = np.maximum(p / px[..., None], q / qx[..., None]).sum(-1)
        total += np.where(both, 1 / worst, 0)
    return total


def non_iterative(target: Array, draft: Array) -> Array:
    """One sampled token under `non_iterative`: 1 / max p / q, zero if q misses a token of p."""
    p, q = laws(target, draft)
    with np.errstate(divide="ignore"):
        ratio = np.where(p > 0, p / np.where(q > 0, q, 1), 0)
        ratio = np.where((p > 0) & (q == 0), np.inf, ratio)
    return np.asarray(1 / ratio.max(-1))


def lenient(target: Array, draft: Array, lenience: float) -> Array:
    """One sampled token under `lenience`: sum min(p / l, q)."""
    p, q = laws(target, draft)
    return np.asarray(np.minimum(p / lenience, q).sum(-1))


def top_k(target: Array, draft: Array, drafts: int) -> Array:
    """The draft's top K tokens, placed: p(T), optimal for a set that was not drawn."""
    p, q = laws(target, draft)
    tops = np.argsort(-q, axis=-1, kind="stable")[..., :drafts]
    tops, _ = np.broadcast_arrays(tops, p[..., :1])
    taken = np.take_along_axis(np.broadcast_to(p, (*tops.shape[:-1], p.shape[-1])), tops, -1)
    present = np.take_along_axis(np.broadcast_to(q, (*tops.shape[:-1], q.shape[-1])), tops, -1) > 0
    return np.asarray(np.where(present, taken, 0).sum(-1))


def hub(target: Array, draft: Array, drafts: int) -> Array:
    """T = the draft's top K - 1 placed, one child from m = norm(q without T): p(T) + sum min(p, m).

    Optimal for this draft (Hu et al. 2025). Nothing is drawn where q has no mass outside T.
    """
    p, q = np.broadcast_arrays(*laws(target, draft))
    tops = np.argsort(-q, axis=-1, kind="stable")[..., : drafts - 1]
    rest = q.copy()
    np.put_along_axis(rest, tops, 0, -1)
    mass = rest.sum(-1, keepdims=True)
    drawn = np.minimum(p, rest / np.where(mass > 0, mass, 1)).sum(-1)
    return np.asarray(top_k(p, q, drafts - 1) + np.where(mass[..., 0] > 0, drawn, 0))


def multi_round(target: Array, draft: Array, drafts: int) -> Array:
    """K i.i.d. tokens under `multi_round`: 1 - prod (1 - sum min(p^k, q)).

    The residuals p^k do not depend on which tokens were refused, so this is no enumeration.
    """
    p, q = laws(target, draft)
    refused = np.ones(np.broadcast_shapes(p.shape, q.shape)[:-1])
    for _ in range(drafts):
        left = np.maximum(p - q, 0)
        total = left.sum(-1)
        refused = refused * total
        p = np.where(total[..., None] > 0, left / np.where(total > 0, total, 1)[..., None], p)
    return 1 - refused


def division_factor(target: Array, draft: Array, drafts: int) -> Array:
    """K-SEQ's g: the root of g beta(g) = 1 - (1 - beta(g))^K in [1, K], by bisection from above."""
    p, q = laws(target, draft)

    def enough(factor: Array) -> Array:
        beta = np.minimum(q, p / factor[..., None]).sum(-1)
        return np.asarray(factor * beta >= 1 - np.clip(1 - beta, 0, None) ** drafts)

    low = np.ones(np.broadcast_shapes(p.shape, q.shape)[:-1])
    high = np.where(enough(low), low, float(drafts))
    for _ in range(60):
        middle = (low + high) / 2
        valid = enough(middle)
        low, high = np.where(valid, low, middle), np.where(valid, middle, high)
    return np.asarray(high)


def k_seq(target: Array, draft: Array, drafts: int) -> Array:
    """K i.i.d. tokens under `kseq`: 1 - (1 - beta(g))^K."""
    p, q = laws(target, draft)
    factor = division_factor(p, q, drafts)
    beta = np.minimum(q, p / factor[..., None]).sum(-1)
    return np.asarray(1 - np.clip(1 - beta, 0, None) ** drafts)


def recursive(target: Array, draft: Array, drafts: int) -> float:
    """K tokens without replacement under `rejection` (RSD), by enumerating refused tokens.

    One pair of laws [V]. Costs up to V^(K - 1) steps: K = 2 at any V, more for small V.
    """
    p, q = laws(target, draft)
    if p.ndim != 1 or q.ndim != 1:
        raise ValueError("recursive takes one pair of laws [V]; call it for each prefix")

    def kept(p: Array, q: Array, left: int) -> float:
        if left == 0 or q.sum() <= 0:
            return 0.0
        guess = q / q.sum()
        here = float(np.minimum(p, guess).sum())
        surplus = np.maximum(p - guess, 0)
        if left == 1 or surplus.sum() <= 0:
            return here
        rest, refused = surplus / surplus.sum(), np.maximum(guess - p, 0)
        for x in np.flatnonzero(refused):
            without = q.copy()
            without[x] = 0
            here += float(refused[x]) * kept(rest, without, left - 1)
        return here

    return kept(p, q, drafts)
