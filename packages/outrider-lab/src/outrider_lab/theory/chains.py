"""Tokens per call of a rule on a chain: every draft enumerated, the rule's own outcome multiplied.

For rules that look at more than one position (`block`, `traversal`) no product of acceptances gives
this. Laws depend on the position only, not on the tokens; V^gamma drafts, so tiny V and gamma.

>>> from outrider.verifiers import get
>>> p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
>>> round(expected_tokens(get("rejection"), p, q, 2) * 9, 9)
19.0
>>> round(expected_tokens(get("block"), p, q, 2) * 9, 9)
20.0
"""

import numpy as np
import torch

from outrider.tree import chain, children
from outrider.types import Draft, DrawKind, Laws, Scores, Verifier
from outrider_lab.theory.node import Array, laws

_MOST = 1 << 16


def expected_tokens(rule: Verifier, target: Array, draft: Array, gamma: int) -> float:
    """Accepted tokens and one more, for chains of `gamma` tokens drawn from `draft`.

    target and draft are laws [V], the same at every position, or [gamma + 1, V] and [gamma, V].

    Raises ValueError for laws of another shape and for more than 65,536 drafts.
    """
    p, q = laws(target, draft)
    vocab = p.shape[-1]
    p, q = np.broadcast_to(p, (gamma + 1, vocab)), np.broadcast_to(q, (gamma, vocab))
    if vocab**gamma > _MOST:
        raise ValueError(
            f"at most {_MOST} drafts can be enumerated; got {vocab} tokens at {gamma} positions, "
            f"{vocab**gamma} drafts; use fewer of either"
        )
    paths = np.indices((vocab,) * gamma).reshape(gamma, -1).T
    weight = np.prod([q[i, paths[:, i]] for i in range(gamma)], axis=0)
    paths, weight = paths[weight > 0], weight[weight > 0]
    rows = len(paths)
    inverse = torch.ones(rows, dtype=torch.float64, device="cpu")

    def each(law: Array) -> Laws:
        logits = torch.from_numpy(law.copy()).log()
        return Laws(logits.expand(rows, *logits.shape), inverse, greedy="none")

    table = children((1,) * gamma)
    kind = DrawKind.WITHOUT if rule.kinds & {DrawKind.WITHOUT, DrawKind.WITH} else DrawKind.FIXED
    node = torch.arange(gamma + 1, device="cpu")[None, :, None]
    tokens = np.concatenate([np.zeros((rows, 1), dtype=np.int64), paths], 1)
    made = Draft(
        torch.from_numpy(tokens),
        chain(gamma),
        table,
        torch.full_like(table, int(kind)),
        torch.where(table >= 0, node, -1),
        each(np.concatenate([q, q[-1:]])),
        frozenset({kind}),
    )
    stop = rule.outcome(made, Scores(each(p))).stop_BN.numpy()
    return float((weight * (stop * np.arange(1, gamma + 2)).sum(-1)).sum())
