"""Verification as assisted generation calls it: the walk on a CPU equals the reference."""

import pytest
import torch

from outrider.ops.cpu import law_slices
from outrider.ops.reference import walking as reference


@pytest.mark.parametrize("weight", [None, 0.3])
def test_tokens_and_counts_are_the_references(weight):
    kept = set()
    for seed in range(60):
        rng = torch.Generator().manual_seed(seed)
        target = 2 * torch.randn(1, 4, 50, generator=rng)
        drafted = target[:, :3] + torch.randn(1, 3, 50, generator=rng)
        ids = torch.stack([torch.multinomial(z.softmax(-1), 1, generator=rng) for z in drafted[0]])
        uniforms = torch.rand(5, generator=rng)
        inputs = (ids[:, 0], drafted, target, uniforms, weight)
        ours, n = law_slices.assisted(*inputs)
        theirs, count = reference.assisted(*inputs)
        assert int(n) == int(count)
        assert ours.tolist() == theirs.tolist()
        kept.add(int(n))
    assert kept == {0, 1, 2, 3}
