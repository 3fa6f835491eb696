"""The lazy CPU traversal against the reference: same draws, same path, same next token."""

import enumeration as e
import pytest
import torch

from outrider import ops, verifiers
from outrider.types import Draws

TREES = {
    "RSD-C": lambda w: e.without(w, (2, 2)),
    "RSD-S": lambda w: e.beam(w, 3, 2),
    "hub": lambda w: e.hub(w, (3, 2)),
    "placed first": lambda w: e.hub(w, (2, 2), last=True),
    "mixed": lambda w: e.mixed(w, (3, 1)),
    "merged paths": lambda w: e.merged(w, 3, 2),
    "placed": lambda w: e.placed(w, (2, 2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["random", "zeros", "equal", "disjoint", "hot target"])
@pytest.mark.parametrize("scheme", TREES)
def test_paths_and_tokens_equal_the_references(scheme, case, dtype):
    trees = TREES[scheme](e.World(4, 2, 11, (case,)))[:1000]
    draft, scores, rows = trees.draft(), trees.scores(), len(trees)
    draft = draft._replace(laws=draft.laws and _as(draft.laws, dtype))
    scores = scores._replace(laws=_as(scores.laws, dtype))
    race = torch.empty(rows, 4).exponential_(generator=torch.Generator().manual_seed(1))
    draws = Draws(torch.arange(rows) * 7919, torch.full((rows,), 100), race_BV=race)
    rule = verifiers.get("traversal")
    with ops.use("reference"):
        slow = rule(draft, scores, draws)
    with ops.use("cpu"):
        fast = rule(draft, scores, draws)
    assert torch.equal(slow.path_BD, fast.path_BD)
    assert torch.equal(slow.count_B, fast.count_B)
    assert torch.equal(slow.next_B, fast.next_B)
    if draft.laws is not None:
        torch.testing.assert_close(slow.overlap_BD, fast.overlap_BD, equal_nan=True)


def _as(laws, dtype):
    return laws._replace(
        logits_BRV=laws.logits_BRV.to(dtype),
        inverse_temperature_B=laws.inverse_temperature_B.to(dtype),
    )
