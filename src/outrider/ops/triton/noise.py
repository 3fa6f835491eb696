# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""The streams of `outrider.noise` inside a kernel: the same words for the same keys, bit for bit.

SplitMix64 (Steele, Lea and Flood 2014) on wrapping int64. Keys are made from seeds and positions
that the kernel reads from device memory, so a replayed graph draws fresh noise for a new position.
"""

import triton
import triton.language as tl

from outrider.noise import Purpose


def _signed(word: int) -> int:
    word %= 1 << 64
    return word - ((word >> 63) << 64)


GOLDEN = tl.constexpr(_signed(0x9E3779B97F4A7C15))
_MIX1 = tl.constexpr(_signed(0xBF58476D1CE4E5B9))
_MIX2 = tl.constexpr(_signed(0x94D049BB133111EB))
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_SALT = 0x9E3779B97F4A7C15
TARGET = tl.constexpr(_signed(Purpose.TARGET * _SALT))
ACCEPT = tl.constexpr(_signed(Purpose.ACCEPT * _SALT))
RESIDUAL = tl.constexpr(_signed(Purpose.RESIDUAL * _SALT))


@triton.jit
def mix(word):
    """SplitMix64's finaliser; the masks make arithmetic shifts logical."""
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * _MIX1
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return word ^ ((word >> 31) & 0x1FFFFFFFF)


@triton.jit
def stream(seed, position, salt: tl.constexpr):
    """Key of the stream (seed, position, purpose)."""
    return mix(mix(seed + salt) ^ (position * _MIX1))


@triton.jit
def word(key, index):
    """Word `index` of a stream."""
    return mix(key + (index.to(tl.int64) + 1) * GOLDEN)


@triton.jit
def uniform(key, index):
    """24-bit uniform in [0, 1), as `noise.uniforms`."""
    return ((word(key, index) >> 40) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def exponential(key, index):
    """Exp(1) variable, as `noise.exponentials`: fine near 0, where races are won."""
    bits = (word(key, index) >> 24) & 0xFFFFFFFFFF
    v = (bits.to(tl.float32) + 0.5) * 9.094947017729282e-13
    v = tl.minimum(v, _BELOW_ONE)
    near = 1.0 - v  # -log1p(-v) by Kahan's correction of the rounding in 1 - v
    same = near == 1.0
    slope = tl.log(near) / tl.where(same, 1.0, near - 1.0)
    return tl.where(same, v, v * slope)
