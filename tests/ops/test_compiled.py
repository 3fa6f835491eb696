"""Compiled calls have the bits of what Python does row by row: block verification, draws, races."""

import numpy as np
import pytest
import torch
from cases import Case, build

from outrider import ops
from outrider.models.cpu_kernels import build as compiler
from outrider.noise import Purpose
from outrider.ops.cpu import block, compiled, keys, match
from outrider.ops.cpu.batched_without_replacement import DrawsWithoutReplacement
from outrider.types import DrawKind, Laws

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
    whole = block.verify(draft, scores, draws)
    same(whole, block.walked(draft, scores, draws, True, range(4)), range(4))


def test_placed_children_alone():
    draft, scores, draws = drawn(Case(counts=(1,) * 4, batch=5, kind=DrawKind.FIXED))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [5, 64, 1000, 20000])
def test_a_draw_of_every_urn_is_its_own(vocab, dtype):
    draws = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(6, 1, vocab, generator=draws, dtype=dtype)
    logits[3] = -torch.inf
    urns = DrawsWithoutReplacement(Laws(logits, torch.ones(6), greedy="none"))
    names = np.arange(24).reshape(6, 4)[:, 1]  # a column of a table
    for index in range(3):
        tokens, masses = urns.draw(names, index)
        uniforms = [keys.fine_uniform(int(name), index) for name in names]
        alone = [urns.draw_one(row, uniform) for row, uniform in enumerate(uniforms)]
        assert [*zip(tokens.tolist(), masses.tolist(), strict=True)] == alone
        other = [urns.draw_one(row, 1 - uniform)[0] for row, uniform in enumerate(uniforms)]
        assert tokens.tolist() != other
        urns.take(tokens)


@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0, 3000.0])
@pytest.mark.parametrize("vocab", [1, 15, 16, 4099])
def test_who_wins_a_race_is_among_its_contenders(vocab, scale):
    draws = torch.Generator().manual_seed(vocab)
    few = []
    for seed in range(40):
        z = (scale * torch.randn(vocab, generator=draws)).numpy()
        if seed % 3 == 1:
            z[::2] = -np.inf
        inverse, key = (1.0, 1 / 0.7, 20.0)[seed % 3], keys.stream(seed, 7, Purpose.TARGET)
        winner = int((z * np.float32(inverse) - keys.log_race(key, vocab)).argmax())
        found = match.contenders(z, inverse, key)
        assert winner in found
        few.append(len(found))
    if vocab > 1000 and scale >= 1:  # an even law leaves everybody a chance
        assert np.median(few) < vocab / 10


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_at_fault_have_a_contender(value):
    row = np.full(40, value, dtype=np.float32)
    assert len(match.contenders(row, 1.0, 7))
