"""What is left at a node, where it is hard: several draft laws, or one with little left."""

import pytest
import torch
from cases import Case, build, same, twin

from outrider.tree import branching, children
from outrider.types import Draft, DrawKind, Draws, Laws, Scores


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("op", ["tree", "traversal"])
def test_draws_of_one_node_come_from_several_drafts(kernels, op, seed):
    """Independent draws, each with its own law row (SpecInfer with several drafts)."""
    draft, scores, draws = build(Case(counts=(3,), kind=DrawKind.WITH, seed=seed, vocab=33))
    draft.row_BNK[:, 0] = torch.tensor([1, 0, 2])
    same(kernels.ops[f"verify:{op}"](draft, scores, draws), twin(op, draft, scores, draws))


def _peaked():
    """A draft sure of token 0 but for 3e-7, and a target that cannot say it."""
    q = torch.tensor([1 - 3e-7, 2e-7, 1e-7], dtype=torch.float64)
    p = torch.tensor([0.0, 0.25, 0.75])
    ones = torch.ones(1)
    node = torch.full((1, 3, 2), -1)
    row = node.clone()
    row[:, 0] = 0
    target = Laws(p.log().expand(1, 3, -1).clone(), ones, greedy="none")
    drafted = Laws(q.log().float().expand(1, 1, -1).clone(), ones, greedy="none")
    draft = Draft(
        torch.tensor([[2, 0, 1]]),
        branching((2,)),
        children((2,)),
        torch.full_like(node, int(DrawKind.WITHOUT)),
        row,
        drafted,
        frozenset({DrawKind.WITHOUT}),
    )
    return draft, Scores(target), Draws(torch.zeros(1).long(), torch.zeros(1).long())


@pytest.mark.parametrize(("uniform", "kept"), [(0.36, 1), (0.39, 0)])
@pytest.mark.parametrize("op", ["tree", "traversal"])
def test_a_draft_law_with_little_left_keeps_its_precision(kernels, op, uniform, kept):
    """After token 0 the draft's law is (2/3, 1/3): token 1 is kept with 0.25 / (2/3) = 0.375."""
    draft, scores, draws = _peaked()
    draws = draws._replace(uniform_BNK=torch.full((1, 3, 2), uniform))
    assert kernels.ops[f"verify:{op}"](draft, scores, draws).count_B.tolist() == [kept]
    assert twin(op, draft, scores, draws).count_B.tolist() == [kept]
