"""Floors found by selection in the kernels keep the tokens that the definition keeps."""

import numpy as np
import pytest
import torch
from cases import DTYPES

from outrider import ops
from outrider.errors import BackendUnavailable
from outrider.sampling.sampling_params import SamplingParams, rows

SETTINGS = {
    "k": [SamplingParams(top_k=5), SamplingParams(top_k=1), SamplingParams(top_k=10_000)],
    "p": [
        SamplingParams(top_p=0.8),
        SamplingParams(0.4, top_p=1e-6),
        SamplingParams(1.7, top_p=0.999),
    ],
    "min": [
        SamplingParams(min_p=0.1),
        SamplingParams(1.6, min_p=1.0),
        SamplingParams(0.6, min_p=0.003),
    ],
    "k and p": [
        SamplingParams(top_k=9, top_p=0.7),
        SamplingParams(0.7, top_k=1, top_p=0.5),
        SamplingParams(top_k=40, top_p=0.99),
    ],
    "all": [
        SamplingParams(top_k=20, top_p=0.9, min_p=0.02),
        SamplingParams(0.8, top_k=7, top_p=0.95, min_p=0.3),
        SamplingParams(1.4, top_k=30, top_p=0.6, min_p=0.001),
    ],
    "each row its own": [
        SamplingParams(top_k=4),
        SamplingParams(),
        SamplingParams(0.9, top_p=0.6),
        SamplingParams(0),
        SamplingParams(min_p=0.05),
    ],
}
WHOLE = ("all", "each row its own")
LOOKS = [("fp32", "ties"), ("fp32", "masked"), ("bf16", "ties"), ("fp16", "masked")]


def _logits(settings, vocab, dtype, look, seed=0, each=1):
    rng = torch.Generator().manual_seed(seed + vocab)
    wide = 3 * torch.randn(len(settings), each, vocab + 3, generator=rng)
    if look == "ties":
        wide = wide.round()
    if look == "flat":
        wide = torch.full_like(wide, 0.25)
    logits = wide.to(dtype)[..., :vocab]  # rows are not contiguous and are read in place
    if look == "masked":
        logits[..., ::3] = -torch.inf
        logits[0] = -torch.inf
        logits[0, 0, vocab // 2] = 1.0
    return logits


def kept(row, s):
    """The definition in float64, by sorting: (must stay, may stay by rounding)."""
    z = row.double().numpy()
    inverse = 1.0 if s.temperature == 0 else 1 / s.temperature
    stay = np.ones(len(z), bool)
    free = np.zeros(len(z), bool)
    if s.temperature == 0:
        return stay, free
    if s.top_k:
        stay &= z >= np.sort(z)[::-1][min(s.top_k, len(z)) - 1]
    if s.top_p < 1:
        weight = np.where(stay, np.exp(inverse * (z - z.max())), 0)
        above = np.array([weight[z > v].sum() for v in z]) / weight.sum()
        inside = above < float(np.float32(s.top_p))
        free |= np.abs(above - s.top_p) < 1e-6
        stay &= inside | (z == z.max())
    if s.min_p:
        low = z.max() + np.log(s.min_p) / inverse
        free |= np.abs(z - low) < 1e-5
        stay &= z >= low
    return stay, free | ~np.isfinite(z)


#: By default every look with every filter at once, and every filter with one look.
LOOKED = [
    pytest.param(name, *look, marks=[] if name in WHOLE or look == LOOKS[0] else [pytest.mark.slow])
    for name in SETTINGS
    for look in LOOKS
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("name", "dtype", "look"), LOOKED)
def test_the_kernel_keeps_what_the_definition_keeps(kernels, name, look, dtype):
    settings = SETTINGS[name]
    logits = _logits(settings, 45 if look == "ties" else 33, DTYPES[dtype], look)
    with ops.use("triton"):
        ours = ops.floors(logits, rows(settings))
    with ops.use("reference"):
        theirs = ops.floors(logits, rows(settings))
    assert ours.shape == theirs.shape
    assert ours.dtype is torch.float32
    for b, setting in enumerate(settings):
        stay, free = kept(logits[b, 0], setting)
        for floor in (ours, theirs):
            found = (logits[b, 0].float() >= floor[b, 0]).numpy()
            assert np.array_equal(found | free, stay | free), setting
            assert found.any()


@pytest.mark.parametrize("name", ["k", "p", "all"])
def test_equal_logits_all_stay(kernels, name):
    settings = SETTINGS[name]
    logits = _logits(settings, 40, torch.bfloat16, "flat")
    with ops.use("triton"):
        assert ops.floors(logits, rows(settings)).eq(0.25).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_floor_is_a_logit_of_its_row(kernels, dtype):
    """Signs, subnormal numbers and the ends of the range survive the way to integers and back."""
    row = torch.tensor([-3e4, -1.5, -6e-8, -0.0, 6e-8, 2.5, 3e4, -torch.inf]).to(DTYPES[dtype])
    expected = row.float().sort(descending=True).values
    for k in range(1, 9):
        with ops.use("triton"):
            found = ops.floors(row[None, None], rows([SamplingParams(top_k=k)]))
        assert float(found) == float(expected[k - 1])


@pytest.mark.exhaustive
def test_block_sizes_change_nothing(kernels):
    from outrider.ops.triton import launch

    settings = SETTINGS["all"]
    logits = _logits(settings, 100, torch.float32, "plain")
    found = []
    for size in (32, 128):
        launch._forced.append((size, 4))
        with ops.use("triton"):
            found.append(ops.floors(logits, rows(settings)))
        launch._forced.pop()
    assert torch.equal(found[0], found[1])


def test_a_second_call_finds_its_scratch_as_the_first(kernels):
    settings = SETTINGS["k and p"]
    with ops.use("triton"):
        first, again, third = (
            ops.floors(_logits(settings, 50, torch.bfloat16, "plain", seed), rows(settings))
            for seed in (0, 1, 0)
        )
    assert torch.equal(first, third)
    assert not torch.equal(first, again)


def test_warped_laws_are_verified_by_the_kernels(kernels):
    """Filters, draws and log-sum-exps of one law, all by kernels, against the reference."""
    settings = SETTINGS["all"]
    logits = _logits(settings, 70, torch.bfloat16, "ties", each=2)
    keys = torch.arange(6).view(3, 2) * 31
    with ops.use("triton"):
        ours = ops.sample(ops.warp(logits, rows(settings)), keys)
    with ops.use("reference"):
        theirs = ops.sample(ops.warp(logits, rows(settings)), keys)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1].lse_BR, theirs[1].lse_BR, atol=2e-6, rtol=1e-6)


def test_the_law_of_a_row_does_not_depend_on_other_rows():
    """Ties at the top-k floor weigh in the nucleus, whether or not another row has a top-k."""
    logits = torch.tensor([3.0, 2.0] + [1.0] * 20).expand(2, 1, -1)
    mine = SamplingParams(top_k=3, top_p=0.6)
    with ops.use("reference"):
        alone = ops.floors(logits[:1], rows([mine]))
        beside = ops.floors(logits, rows([mine, SamplingParams()]))
    assert float(alone[0, 0]) == float(beside[0, 0]) == 1.0


def test_what_kernels_cannot_filter_is_told(kernels):
    with ops.use("triton"), pytest.raises(BackendUnavailable, match="float64"):
        ops.floors(torch.randn(1, 1, 9).double(), rows([SamplingParams(top_k=2)]))
