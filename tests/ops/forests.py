"""Enumerated drafts verified by a backend and by the reference, with the same draws."""

import torch

from outrider import ops, verifiers
from outrider.engine import step
from outrider.types import Draws


def same_as_reference(name, forest, dtype, backend="cpu"):
    """Path, count, next token and overlap of the rule are equal on the first thousand trees."""
    trees = forest[:1000]
    draft, scores, rows = trees.draft(), trees.scores(), len(trees)
    draft = draft._replace(laws=draft.laws and _as(draft.laws, dtype))
    scores = scores._replace(laws=_as(scores.laws, dtype))
    race = torch.empty(rows, 4).exponential_(generator=torch.Generator().manual_seed(1))
    draws = Draws(torch.arange(rows) * 7919, torch.full((rows,), 100), race_BV=race)
    rule = verifiers.get(name)
    with ops.use("reference"):
        slow = step.run_kernel(rule, draft, scores, draws)
    with ops.use(backend):
        fast = step.run_kernel(rule, draft, scores, draws)
    assert torch.equal(slow.path_BD, fast.path_BD)
    assert torch.equal(slow.count_B, fast.count_B)
    assert torch.equal(slow.next_B, fast.next_B)
    if fast.overlap_BD is not None:
        torch.testing.assert_close(slow.overlap_BD, fast.overlap_BD, equal_nan=True)


def _as(laws, dtype):
    return laws._replace(
        logits_BRV=laws.logits_BRV.to(dtype),
        inverse_temperature_B=laws.inverse_temperature_B.to(dtype),
    )
