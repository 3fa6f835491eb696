"""What a lossy rule costs: how far the law of the next token is from the target's.

Exact for one drafted token at one prefix, through the rule's own `outcome`, whatever the rule.

>>> from outrider.verifiers import get
>>> p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
>>> round(price(get("rejection"), p, q).total_variation, 12)
0.0
>>> round(price(get("lenience"), p, q).total_variation, 6)
0.2
"""

from typing import NamedTuple

import numpy as np
import torch

from outrider.tree import chain, children
from outrider.types import Draft, DrawKind, Laws, Scores, Verifier
from outrider_lab.theory.node import Array, laws


class Price(NamedTuple):
    """Of the emitted token's law against the target's, and what was bought with it."""

    total_variation: float  #: 1/2 sum |emitted - target|; 0 for an exact rule
    largest_ratio: float  #: max emitted / target; inf if an impossible token can come out
    acceptance: float  #: chance that the drafted token is kept
    exact_acceptance: float  #: sum min(target, draft): the most an exact rule can keep


def emitted(rule: Verifier, target: Array, draft: Array) -> tuple[Array, Array]:
    """Law [..., V] of the next token after one drafted token, and its acceptance [...].

    The drafted token is drawn from `draft`. Multiplied out, not sampled.
    """
    p, q = np.broadcast_arrays(*laws(target, draft))
    vocab, shape = p.shape[-1], p.shape[:-1]
    p, q = p.reshape(-1, vocab), q.reshape(-1, vocab)
    law, kept = np.zeros_like(p), np.zeros(len(p))
    for token in range(vocab):
        drawn = q[:, token] > 0
        if not drawn.any():
            continue
        stop, following = _verified(rule, p[drawn], q[drawn], token)
        weight = q[drawn, token]
        law[drawn] += (weight * stop[:, 0])[:, None] * following[:, 0]
        law[drawn, token] += weight * stop[:, 1]
        kept[drawn] += weight * stop[:, 1]
    return law.reshape(*shape, vocab), kept.reshape(shape)


def price(rule: Verifier, target: Array, draft: Array) -> Price:
    """The price of one drafted token, averaged over leading dimensions (the ratio: the largest)."""
    p, q = np.broadcast_arrays(*laws(target, draft))
    law, kept = emitted(rule, p, q)
    ratio = np.where(law > 1e-15, law / np.where(p > 0, p, 1), 0)
    ratio = np.where((p == 0) & (law > 1e-15), np.inf, ratio)
    return Price(
        float((np.abs(law - p).sum(-1) / 2).mean()),
        float(ratio.max()),
        float(kept.mean()),
        float(np.minimum(p, q).sum(-1).mean()),
    )


def _verified(rule: Verifier, p: Array, q: Array, token: int) -> tuple[Array, Array]:
    """Stop probabilities [n, 2] and next-token laws [n, 2, V] when `token` was drafted."""
    rows = len(p)
    table = children((1,))
    inverse = torch.ones(rows, dtype=torch.float64, device="cpu")
    kind = DrawKind.WITHOUT if rule.kinds & {DrawKind.WITHOUT, DrawKind.WITH} else DrawKind.FIXED

    def stacked(law: Array) -> Laws:
        logits = torch.from_numpy(law.copy()).log()
        return Laws(torch.stack([logits, logits], 1), inverse, greedy="none")

    draft = Draft(
        torch.tensor([[0, token]], device="cpu").expand(rows, 2),
        chain(1),
        table,
        torch.full_like(table, int(kind)),
        torch.where(table >= 0, 0, -1),
        stacked(q),
        frozenset({kind}),
    )
    outcome = rule.outcome(draft, Scores(stacked(p)))
    return outcome.stop_BN.numpy(), outcome.next_BNV.numpy()
