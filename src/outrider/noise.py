"""Counter-based randomness: a value depends on its keys alone, never on what was drawn before.

A stream is named by (seed, position, purpose); word i of a stream is SplitMix64's output i
(Steele, Lea and Flood 2014). SplitMix64 rather than Philox because ten integer operations a word,
instead of about a hundred, keep noise below a percent of a step in plain PyTorch, while streams
stay independent of batch order, devices and graph replays.

    uniform      u = top 24 bits / 2^24, in [0, 1)
    exponential  E = -log1p(-v), v = (top 40 bits + 1/2) / 2^40: fine near 0, where races are won
"""

from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

from outrider.tree import numbers
from outrider.types import Draws

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)
_BELOW_ONE = 1.0 - 2.0**-24


class Purpose(IntEnum):
    """What a stream is for. Distinct purposes never share noise."""

    TARGET = 1  #: keyed by absolute position alone: match and coupled rules
    ACCEPT = 2
    RESIDUAL = 3
    DRAFT = 4


def _mix(word: Tensor) -> Tensor:
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * _MIX1
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return word ^ ((word >> 31) & 0x1FFFFFFFF)


@lru_cache(maxsize=256)
def _steps(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(1, count + 1, dtype=torch.int64, device=device) * _GOLDEN


def stream(seed: Tensor, position: Tensor, purpose: Purpose) -> Tensor:
    """Keys of streams, int64, with the broadcast shape of `seed` and `position`."""
    salt = (int(purpose) * _GOLDEN) % (1 << 64)
    salt -= (salt >> 63) << 64  # as a signed word
    return _mix(_mix(seed + salt) ^ position * _MIX1)


def split(keys: Tensor, count: int) -> Tensor:
    """`count` further streams of each stream: keys [..., count]."""
    return words(keys, count)


def words(keys: Tensor, count: int) -> Tensor:
    """The first `count` 64-bit words of each stream: [..., count]."""
    return _mix(keys[..., None] + _steps(count, keys.device))


def uniforms(keys: Tensor, count: int) -> Tensor:
    """float32 uniforms in [0, 1): [..., count].

    >>> keys = stream(torch.tensor([7]), torch.tensor([0]), Purpose.ACCEPT)
    >>> bool((uniforms(keys, 4) == uniforms(keys, 9)[:, :4]).all())
    True
    """
    return ((words(keys, count) >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def exponentials(keys: Tensor, count: int) -> Tensor:
    """float32 Exp(1) variables, never 0 and never infinite: [..., count].

    `argmax(weight / exponential)` draws an index in proportion to `weight` without its sum.
    """
    v = ((words(keys, count) >> 24) & 0xFFFFFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-40)
    return v.clamp_(max=_BELOW_ONE).neg_().log1p_().neg_()


def accept_uniforms(draws: Draws, nodes: int, most_draws: int) -> Tensor:
    """[B, N, K]: the uniform that tests draw k at node n."""
    if draws.uniform_BNK is not None:
        return draws.uniform_BNK
    keys = stream(draws.seed_B, draws.start_B, Purpose.ACCEPT)
    return uniforms(keys, nodes * most_draws).view(-1, nodes, most_draws)


def residual_race(draws: Draws, vocab: int) -> Tensor:
    """[B, V]: the race of the residual or bonus draw."""
    if draws.race_BV is not None:
        return draws.race_BV
    return exponentials(stream(draws.seed_B, draws.start_B, Purpose.RESIDUAL), vocab)


def target_race(draws: Draws, depth: int, vocab: int) -> Tensor:
    """[B, D + 1, V]: the target's own noise for the tokens after depth 0..D."""
    if draws.target_race_BDV is not None:
        return draws.target_race_BDV
    return target_race_at(draws.seed_B, draws.start_B, depth + 1, vocab)


def target_race_at(seed_B: Tensor, start_B: Tensor, count: int, vocab: int) -> Tensor:
    """[B, count, V]: noise of the tokens at positions start + 1, ..., start + count.

    Match and coupled rules and coupled drafters all read this one stream.
    """
    ahead = numbers(count + 1, start_B.device)[1:]
    keys = stream(seed_B[:, None], start_B[:, None] + ahead, Purpose.TARGET)
    return exponentials(keys, vocab)
