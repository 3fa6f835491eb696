"""The most probable tokens of laws: the CPU's and the reference's are the same."""

import pytest
import torch

from outrider import ops
from outrider.types import Laws


def laws(vocab, dtype=torch.float32, floors=False):
    draws = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(2, 3, vocab, generator=draws)).to(dtype)
    floor = logits.float().amax(-1) - 1.5 if floors else None
    return Laws(logits, torch.ones(2), floor)


@pytest.mark.parametrize("floors", [False, True])
@pytest.mark.parametrize("gap", [0.5, 3.0, 50.0])
@pytest.mark.parametrize("vocab", [3, 40, 700])
def test_backends_agree(vocab, gap, floors):
    law = laws(vocab, floors=floors)
    found = ops.likely(law, 8, gap)
    with ops.use("reference"):
        assert torch.equal(found, ops.likely(law, 8, gap))
    assert found.shape == (2, 3, 8)
    least = law.logits_BRV.amax(-1) - (min(gap, 1.5) if floors else gap)
    for b in range(2):
        for r in range(3):
            tokens = [token for token in found[b, r].tolist() if token >= 0]
            values = law.logits_BRV[b, r, tokens]
            assert torch.equal(
                values, law.logits_BRV[b, r].sort(descending=True).values[: len(tokens)]
            )
            assert len(tokens) == min(8, int((law.logits_BRV[b, r] >= least[b, r]).sum()))


def test_a_law_in_half_precision_and_one_that_is_at_fault():
    half = ops.likely(laws(40, torch.bfloat16), 4, 3.0)
    assert int((half >= 0).sum()) >= 6
    broken = laws(40)
    broken.logits_BRV[0, 0, 3] = torch.nan
    assert ops.likely(broken, 4, 3.0)[0, 0].tolist() == [-1] * 4
