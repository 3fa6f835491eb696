"""Top-p floors without a full sort keep the same tokens as the plain way."""

import pytest
import torch

from outrider import ops
from outrider.sampling.sampling_params import SamplingParams, rows

SETTINGS = [
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.3, temperature=0.6),
    SamplingParams(top_p=0.999, temperature=1.7),
    SamplingParams(top_p=0.8, top_k=7),
    SamplingParams(top_k=3),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=0.9, min_p=0.05),
    SamplingParams(),
    SamplingParams(temperature=0),
]


@pytest.mark.parametrize("vocab", [5, 300, 5000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_the_same_tokens_stay_in(vocab, spread):
    rng = torch.Generator().manual_seed(vocab)
    logits = spread * torch.randn(len(SETTINGS), 3, vocab, generator=rng)
    logits[:, 0, ::3] = -torch.inf
    logits = (logits * 8).round() / 8  # ties
    sampling = rows(SETTINGS)
    with ops.use("reference"):
        theirs = ops.floors(logits, sampling)
    with ops.use("cpu"):
        ours = ops.floors(logits, sampling)
    sizes, expected = ((logits >= f[..., None]).sum(-1) for f in (ours, theirs))
    if spread == 0:  # flat: every boundary is a tie
        assert torch.equal(ours, theirs)
    share = torch.minimum(sizes, expected) / torch.maximum(sizes, expected)
    assert float(share.min()) > 0.99  # float32 and float64 sums may part at one tied value
    probs = (logits * (1 / torch.tensor(1.0))).softmax(-1)
    mass = torch.where(logits >= ours[..., None], probs, 0).sum(-1)
    assert bool((mass[0] >= 0.9 - 1e-5).all())


def test_a_row_without_filters_keeps_everything():
    logits = torch.randn(2, 1, 50)
    with ops.use("cpu"):
        found = ops.floors(logits, rows([SamplingParams(), SamplingParams(top_p=0.5)]))
    assert float(found[0, 0]) == -torch.inf
    assert float(found[1, 0]) > -torch.inf


def test_half_precision_is_read():
    logits = torch.randn(1, 2, 400).bfloat16()
    with ops.use("cpu"):
        ours = ops.floors(logits, rows([SamplingParams(top_p=0.7)]))
    with ops.use("reference"):
        theirs = ops.floors(logits, rows([SamplingParams(top_p=0.7)]))
    torch.testing.assert_close(ours, theirs)
