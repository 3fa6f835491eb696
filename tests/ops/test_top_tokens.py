"""The most probable tokens of laws: the CPU's and the reference's are the same."""

import pytest
import torch
from cases import Case, build, same

from outrider import ops
from outrider.ops.cpu import BACKEND as CPU, top_tokens
from outrider.types import DrawKind, Laws


def laws(vocab, dtype=torch.float32, floors=False):
    draws = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(2, 3, vocab, generator=draws)).to(dtype)
    floor = logits.float().amax(-1) - 1.5 if floors else None
    return Laws(logits, torch.ones(2), floor)


def top(law, count, gap):
    """Of every row."""
    return list(map(ops.top_tokens(law, count, gap), range(law.logits_BRV.shape[0])))


@pytest.mark.parametrize("floors", [False, True])
@pytest.mark.parametrize("gap", [0.5, 3.0, 50.0])
@pytest.mark.parametrize("vocab", [3, 40, 700])
def test_backends_agree(vocab, gap, floors):
    law = laws(vocab, floors=floors)
    found = top(law, 8, gap)
    with ops.use("reference"):
        assert found == top(law, 8, gap)
    assert [len(each) for each in found] == [3, 3]
    least = law.logits_BRV.amax(-1) - (min(gap, 1.5) if floors else gap)
    for b in range(2):
        for r in range(3):
            tokens = found[b][r]
            values = law.logits_BRV[b, r, tokens]
            assert torch.equal(
                values, law.logits_BRV[b, r].sort(descending=True).values[: len(tokens)]
            )
            assert len(tokens) == min(8, int((law.logits_BRV[b, r] >= least[b, r]).sum()))


def test_a_law_in_half_precision_and_one_that_is_at_fault():
    half = top(laws(40, torch.bfloat16), 4, 3.0)
    assert sum(len(tokens) for each in half for tokens in each) >= 6
    broken = laws(40)
    broken.logits_BRV[0, 0, 3] = torch.nan
    assert top(broken, 4, 3.0)[0][0] == []


@pytest.mark.parametrize("floors", [False, True])
@pytest.mark.parametrize("vocab", [3, 40, 700])
def test_what_is_cached_is_what_is_found_each_time(vocab, floors):
    law = laws(vocab, floors=floors)
    law.logits_BRV[1, 0, :3] = law.logits_BRV[1, 0].max() + 1  # equals: the first
    for at, value in ((0, torch.nan), (1, torch.inf), (2, None)):
        if value is not None:
            law.logits_BRV[0, at, 1] = value
        elif not floors:
            law.logits_BRV[0, at] = -torch.inf
    found = ops.cache_top_tokens(law)
    for count, gap in ((8, 3.0), (4, 0.5), (8, 3.0), (9, 50.0)):
        assert top(found, count, gap) == top(law, count, gap)
    cut = law._replace(logits_BRV=law.logits_BRV[1:].contiguous(), floor_BR=None)
    whole, cached = ops.cache_top_tokens(cut), top_tokens.cached_top_tokens
    best = [row[0] for row in cached(whole).tokens]
    assert best == whole.logits_BRV[0].argmax(-1).tolist()
    assert cached(law) is cached(found._replace(floor_BR=None)) is None


@pytest.mark.parametrize("hot", ["all", "some"])
def test_a_greedy_row_matches_what_was_cached(hot):
    for seed in range(6):
        draft, scores, draws = build(Case(counts=(2, 1), hot=hot, seed=seed, kind=DrawKind.FIXED))
        logits = scores.laws.logits_BRV
        logits[0, 0, 7] = logits[0, 0].max()
        if seed == 5:
            logits[1, 1, 3] = torch.nan
        found = scores._replace(laws=ops.cache_top_tokens(scores.laws))
        same(*(CPU.ops["verify:match"](draft, each, draws) for each in (found, scores)))
