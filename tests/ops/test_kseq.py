"""K-SEQ on a CPU against the reference: the same factor, path, next token and overlap."""

from dataclasses import replace

import enumeration as e
import own_trees
import pytest
import torch
from forests import same_as_reference

from outrider.types import DrawKind
from outrider.verifiers.kseq import division_factor

TREES = {
    "two": lambda w: own_trees.merged(w, 2, 2),
    "three": lambda w: own_trees.merged(w, 3, 2),
    "four": lambda w: own_trees.merged(w, 4, 1),
}


CASES = ["random", "zeros", "disjoint", "hot target"]


# Equal laws leave the factor open by (1 - beta)^K, in float32 more than rounding: float64 only.
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in CASES for dtype in (torch.float32, torch.float64)]
    + [("equal", torch.float64)],
)
@pytest.mark.parametrize("scheme", TREES)
def test_paths_and_tokens_equal_the_references(scheme, case, dtype):
    same_as_reference("kseq", TREES[scheme](e.World(4, 2, 11, (case,))), dtype)


def test_placed_children_are_verified_as_the_reference_does():
    """At the root of every second tree, as beside rows at temperature 0."""
    forest = TREES["two"](e.World(4, 2, 11, ("random",)))
    kinds = forest.kind_RNK.copy()
    kinds[::2, 0] = int(DrawKind.FIXED)
    both = frozenset({DrawKind.FIXED, DrawKind.WITH})
    same_as_reference("kseq", replace(forest, kind_RNK=kinds, kinds=both), torch.float64)


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("vocab", [2, 5, 300])
def test_the_factor_is_the_smallest_valid_one(count, vocab):
    from outrider.ops.cpu.kseq import smallest_factor

    rng = torch.Generator().manual_seed(vocab)
    for spread in (0.0, 0.3, 3.0, 30.0):
        q = torch.randn(1, 1, vocab, generator=rng, dtype=torch.float64)
        p = (q + spread * torch.randn(1, 1, vocab, generator=rng)).softmax(-1)
        q = q.softmax(-1)
        p, q = p[0, 0], q[0, 0]
        ours = smallest_factor(p.numpy(), q.numpy(), count)
        assert gap(p, q, ours, count) >= -1e-14
        many = torch.full((1, 1), float(count), dtype=torch.float64)
        want = division_factor(p[None, None], q[None, None], many).item()
        if spread > 1:  # nearly equal laws leave the factor open: the gap is (1 - beta)^K
            assert ours == pytest.approx(want, abs=1e-9)
            assert ours == 1 or gap(p, q, ours - 1e-6, count) < 0


def gap(p, q, factor, count):
    """What the factor's condition leaves, at least 0 where the factor is valid."""
    beta = torch.minimum(q, p / factor).sum().item()
    return factor * beta - (1 - (1 - beta) ** count)


def test_draws_of_two_laws_are_left_to_the_reference():
    drafts = own_trees.merged(e.World(4, 2, 11, ("random",)), 2, 2).draft()
    from outrider.ops.cpu.kseq import fits

    assert fits(drafts)
    other = drafts.row_BNK.clone()
    other[..., 1] = torch.where(other[..., 1] >= 0, 0, -1)
    other[..., 0] = torch.where(other[..., 0] >= 0, 1, -1)
    assert not fits(drafts._replace(row_BNK=other))
    partly = drafts.kind_BNK.clone()
    partly[..., 1] = int(DrawKind.FIXED)
    assert not fits(drafts._replace(kind_BNK=partly))
