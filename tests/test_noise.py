"""Counter-based noise: even, independent across keys, and a function of its keys alone."""

import math

import pytest
import torch
from scipy.stats import chi2, kstest

from outrider import noise
from outrider.noise import Purpose, exponentials, stream, uniforms, words

SEEDS = [0, 1, -1, 2**62, 123456789]


def keys(seed=7, count=4096, purpose=Purpose.ACCEPT):
    return stream(torch.full((count,), seed), torch.arange(count), purpose)


@pytest.mark.parametrize("seed", SEEDS)
def test_uniforms_are_even(seed):
    values = uniforms(keys(seed), 64).flatten()
    assert 0 <= float(values.min())
    assert float(values.max()) < 1
    counts = torch.histc(values, 256, 0, 1).double()
    expected = values.numel() / 256
    assert 1e-4 < chi2.sf(float(((counts - expected) ** 2 / expected).sum()), 255) < 1 - 1e-4


@pytest.mark.parametrize("seed", SEEDS)
def test_exponentials_are_exponential(seed):
    values = exponentials(keys(seed, 512), 128).flatten()
    assert float(values.min()) > 0
    assert torch.isfinite(values).all()
    assert kstest(values.double().numpy(), "expon").pvalue > 1e-4


def _correlation(a, b):
    """In standard deviations of what independence allows."""
    return float(torch.corrcoef(torch.stack([a, b]).double())[0, 1]) * math.sqrt(a.numel())


@pytest.mark.parametrize("purpose", Purpose)
def test_neighbouring_keys_share_nothing(purpose):
    here = uniforms(keys(7, purpose=purpose), 64)
    others = {
        "next word": (here[:, :-1].flatten(), here[:, 1:].flatten()),
        "next position": (here[:-1].flatten(), here[1:].flatten()),
        "next seed": (here.flatten(), uniforms(keys(8, purpose=purpose), 64).flatten()),
        "seed and position": (
            here[1:].flatten(),
            uniforms(keys(8, purpose=purpose), 64)[:-1].flatten(),
        ),
    }
    for other in Purpose:
        if other != purpose:
            others[other.name] = (here.flatten(), uniforms(keys(7, purpose=other), 64).flatten())
    for name, (a, b) in others.items():
        assert abs(_correlation(a, b)) < 4.5, name


def test_bits_of_words_are_fair():
    bits = words(keys(3), 16).flatten()
    for bit in range(64):
        ones = float(((bits >> bit) & 1).sum())
        z = (ones - bits.numel() / 2) / math.sqrt(bits.numel() / 4)
        assert abs(z) < 4.5, bit


def test_no_two_streams_are_the_same():
    seeds = torch.arange(-200, 200)[:, None].expand(-1, 400)
    positions = torch.arange(400)[None].expand(400, -1)
    found = torch.cat([stream(seeds, positions, purpose).flatten() for purpose in Purpose])
    assert found.unique().numel() == found.numel()


def test_a_value_depends_on_its_keys_alone():
    whole = exponentials(keys(5, 100), 50)
    assert torch.equal(exponentials(keys(5, 100)[40:41], 20), whole[40:41, :20])
    order = torch.randperm(100)
    assert torch.equal(exponentials(keys(5, 100)[order], 50), whole[order])


def test_target_noise_is_keyed_by_absolute_position():
    seed = torch.tensor([3])
    early = noise.target_race_at(seed, torch.tensor([10]), 6, 9)
    late = noise.target_race_at(seed, torch.tensor([13]), 3, 9)
    assert torch.equal(early[:, 3:], late)


def test_races_draw_in_proportion():
    weights = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawn = (weights / exponentials(keys(11, 40_000), 4)).argmax(-1)
    seen = torch.bincount(drawn, minlength=4).double()
    expected = weights.double() * 40_000
    assert chi2.sf(float(((seen - expected) ** 2 / expected).sum()), 3) > 1e-4
