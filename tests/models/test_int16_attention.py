"""Attention in whole numbers of 16 bits: as near as half precision, whatever stands beside it."""

import pytest
import torch
from torch.nn import functional as F

from outrider.models import isa
from outrider.models.cpu_kernels import build, int16_attention

needs_kernels = pytest.mark.skipif(build.unbuilt() is not None, reason=str(build.unbuilt()))


def made(slots, heads, size, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(slots, 3, heads, size, generator=random)


def exact(qkv, scale):
    """In float64: [T, H, E]."""
    q, k, v = qkv.double().permute(1, 2, 0, 3)
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(0, 1)


@needs_kernels
@pytest.mark.parametrize(
    ("slots", "heads", "size"), [(1, 1, 16), (31, 2, 16), (33, 3, 80), (300, 2, 64), (14, 1, 512)]
)
@pytest.mark.parametrize("sharp", [0.3, 1.0, 4.0])
def test_it_is_attention(slots, heads, size, sharp):
    qkv = made(slots, heads, size)
    qkv[:, 1] *= 3.0  # keys, and values of which a few are larger
    qkv[::7, 2, :, 3] *= 20.0
    scale = sharp * size**-0.5
    found, expected = int16_attention.attend(qkv, scale), exact(qkv, scale)
    assert found.shape == (slots, heads, size)
    assert (found - expected).norm() < 4e-3 * expected.norm()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(int16_attention.attend(qkv, scale), found)
    finally:
        torch.set_num_threads(before)
    one = qkv[:, :, heads - 1 :]  # a head alone
    assert torch.equal(int16_attention.attend(one, scale), found[:, heads - 1 :])


@needs_kernels
def test_the_largest_numbers_do_not_overflow():
    qkv = torch.ones(200, 3, 1, 512)
    qkv[:, 0] = -1.0
    qkv[100:, 1] = -1.0
    qkv[100:, 2] = 1e30
    torch.testing.assert_close(
        int16_attention.attend(qkv, 1.0).double(), exact(qkv, 1.0), rtol=1e-3, atol=0
    )
    same = torch.ones(200, 3, 1, 16)  # all weights are the largest
    torch.testing.assert_close(int16_attention.attend(same, 1.0), torch.ones(200, 1, 16))
    assert torch.equal(int16_attention.attend(same * 0, 1.0), torch.zeros(200, 1, 16))


@needs_kernels
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_is_not_finite_stays_so(bad, part):
    qkv = made(70, 2, 32)
    qkv[40, part, 1, 5] = bad
    found = int16_attention.attend(qkv, 0.2)
    assert found[:, 0].isfinite().all()
    if part == 0:
        assert not found[40, 1].isfinite().any()
        assert found[:40, 1].isfinite().all()
        assert found[41:, 1].isfinite().all()
    else:
        assert not (found[:, 1] if part == 1 else found[:, 1, 5]).isfinite().any()


def test_what_cannot_be_is_said(monkeypatch):
    assert "multiple of 16 numbers, 512 at most; got 24" in int16_attention.unsupported_reason(24)
    assert "got 528" in int16_attention.unsupported_reason(528)
    monkeypatch.setattr(isa, "holds", lambda name: False)
    assert "no products of 16 bits" in int16_attention.unsupported_reason(64)
    with pytest.raises(ValueError, match=r"float32 \[T, 3, H, E\] is wanted; got \[4, 3, 1, 24\]"):
        int16_attention.attend(made(4, 1, 24), 1.0)
    with pytest.raises(ValueError, match="is wanted"):
        int16_attention.attend(made(4, 1, 16).double(), 1.0)
