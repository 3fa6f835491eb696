"""The streams of `outrider.noise`, one word at a time in Python integers, or a row in NumPy.

Equal bit for bit to `noise.stream`, `noise.uniforms` and `noise.exponentials`' words.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from outrider.noise import Purpose
from outrider.ops.cpu.host_tables import Array

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_WORD = (1 << 64) - 1
_FEW = 4  #: rows up to which integers of Python are faster than NumPy's
_BELOW_ONE = np.float32(1.0 - 2.0**-24)


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MIX1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX2) & _WORD
    return word ^ (word >> 31)


def _mixed(words: Array) -> Array:
    """`_mix` of every word, in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(_MIX1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_MIX2)
    words ^= words >> np.uint64(31)
    return words


def stream(seed: int, position: int, purpose: Purpose) -> int:
    """Key of a stream, unsigned."""
    return _mix(_mix((seed + purpose * _GOLDEN) & _WORD) ^ ((position * _MIX1) & _WORD))


def uniform(key: int, index: int) -> float:
    """Word `index` as the 24-bit uniform that accept tests use."""
    return (_mix((key + (index + 1) * _GOLDEN) & _WORD) >> 40) * 2.0**-24


def fine_uniform(key: int, index: int) -> float:
    """Word `index` as a 53-bit uniform, for draws by inverse transform."""
    return (_mix((key + (index + 1) * _GOLDEN) & _WORD) >> 11) * 2.0**-53


@lru_cache(maxsize=16)
def _steps(vocab: int) -> Array:
    return np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


def log_race(key: int, vocab: int, index: Array | None = None) -> Array:
    """Log of the Exp(1) race of a stream, float32, for all tokens or those at `index`."""
    steps = _steps(vocab)
    word = _mixed((steps if index is None else steps[index]) + np.uint64(key))
    word >>= np.uint64(24)
    v = word.view(np.int64).astype(np.float32)
    v += np.float32(0.5)
    v *= np.float32(2.0**-40)
    np.minimum(v, _BELOW_ONE, out=v)
    np.negative(v, out=v)
    np.log1p(v, out=v)
    np.negative(v, out=v)
    return np.log(v, out=v)


def split(seed_B: Tensor, position_B: Tensor, purpose: Purpose, count: int) -> Tensor:
    """`noise.split` of `noise.stream`: `count` keys of each row, [B, count]."""
    if seed_B.shape[0] > _FEW:
        seeds, positions = (each.numpy().view(np.uint64) for each in (seed_B, position_B))
        keys = _mixed(seeds + np.uint64(purpose * _GOLDEN & _WORD)) ^ positions * np.uint64(_MIX1)
        return torch.from_numpy(_mixed(_mixed(keys)[:, None] + _steps(count)).view(np.int64))
    pairs = zip(seed_B.tolist(), position_B.tolist(), strict=True)
    names = (stream(seed, position, purpose) for seed, position in pairs)
    words = [[_mix((key + k * _GOLDEN) & _WORD) for k in range(1, count + 1)] for key in names]
    signed = [[word - ((word >> 63) << 64) for word in row] for row in words]
    return torch.from_numpy(np.array(signed, dtype=np.int64)).view(len(words), count)
