"""The compiled call of block verification has the bits of the walk in NumPy."""

import pytest
import torch
from cases import Case, build

from outrider import ops
from outrider.models.native import build as compiler
from outrider.noise import Purpose
from outrider.ops.cpu import block, compiled
from outrider.types import Kind

CASES = {
    "plain": {},
    "one row": {"batch": 1},
    "near": {"spread": 0.1},
    "equal": {"spread": 0.0},
    "far": {"spread": 4.0},
    "floor": {"floor": True, "temperature": 0.6},
    "ragged": {"ragged": True},
    "masked": {"mask": True},
    "mixed": {"mixed": True},
    "half": {"dtype": "bf16"},
    "wide": {"vocab": 1027},
}


@pytest.fixture(autouse=True)
def built():
    if compiler.unbuilt():
        pytest.skip(f"kernels are not compiled here: {compiler.unbuilt()}")


def drawn(case):
    """A draft whose laws keep the weights that they were drawn from."""
    draft, scores, draws = build(case)
    if draft.laws is None:
        return draft, scores, draws
    levels = []
    for row in range(draft.laws.logits_BRV.shape[1]):
        law = draft.laws._replace(logits_BRV=draft.laws.logits_BRV[:, row : row + 1].float())
        if law.floor_BR is not None:
            law = law._replace(floor_BR=law.floor_BR[:, row : row + 1])
        keys = ops.streams(draws.seed_B, draws.start_B + row, Purpose.DRAFT, 1)
        levels.append(ops.several(law, keys, 1)[2])
    return draft._replace(laws=ops.stack(levels)), scores, draws


def same(ours, theirs, rows):
    for mine, other in zip(ours[:4], theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.dtype == other.dtype
            torch.testing.assert_close(mine[rows], other[rows], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_every_row_has_the_bits_of_the_walk(name, seed):
    given = {"batch": 5, "vocab": 130} | CASES[name]
    draft, scores, draws = drawn(Case(counts=(1,) * 4, seed=seed, **given))
    rows = list(range(given["batch"]))
    for overlap in (True, False):
        found = compiled.block(draft, scores, draws, overlap)
        assert found is not None
        assert found.left == []
        same(found, block.walked(draft, scores, draws, overlap, rows), rows)


def test_other_noise_gives_another_verdict():
    draft, scores, draws = drawn(Case(counts=(1,) * 4, batch=16, vocab=130))
    found = compiled.block(draft, scores, draws, True)
    other = draws._replace(start_B=draws.start_B + 1)
    theirs = block.walked(draft, scores, other, True, range(16))
    assert found.count_B.tolist() != theirs.count_B.tolist()
    assert found.next_B.tolist() != theirs.next_B.tolist()


def test_rows_that_the_kernel_leaves_are_walked():
    """A greedy row, one whose weights leave float32, and one that cannot be read."""
    draft, scores, draws = drawn(Case(counts=(1,) * 4, batch=4, vocab=130, hot="some"))
    scores.laws.logits_BRV[2] *= 400
    draft.tokens_BN[3, 1] = -1
    found = compiled.block(draft, scores, draws, True)
    assert found.left == [0, 2, 3]
    whole = block.judge(draft, scores, draws)
    same(whole, block.walked(draft, scores, draws, True, range(4)), range(4))


def test_placed_children_alone():
    draft, scores, draws = drawn(Case(counts=(1,) * 4, batch=5, kind=Kind.FIXED))
    found = compiled.block(draft, scores, draws, True)
    assert found.left == []
    same(found, block.walked(draft, scores, draws, True, range(5)), range(5))


@pytest.mark.parametrize("why", ["long rows", "no weights", "injected", "float64"])
def test_what_it_does_not_take(why):
    vocab = 9000 if why == "long rows" else 65
    draft, scores, draws = drawn(Case(vocab=vocab))
    if why == "no weights":
        draft = draft._replace(laws=draft.laws._replace(host=None))
    if why == "injected":
        draws = draws._replace(uniform_BNK=torch.rand(2, 4, 1))
    if why == "float64":
        laws = scores.laws._replace(logits_BRV=scores.laws.logits_BRV.double())
        scores = scores._replace(laws=laws)
    assert compiled.block(draft, scores, draws, True) is None
