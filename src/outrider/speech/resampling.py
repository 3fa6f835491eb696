"""Sound at another rate: a polyphase filter, as `scipy.signal.resample_poly` makes by default.

Importing that takes as long as hearing half a minute, and this is all of it that speech needs.
"""

import math

import numpy as np
from numpy.typing import NDArray

_ZEROS = 10  #: of the filter's sine on each side, in samples of the lower rate
_BETA = 5.0  #: of the Kaiser window around it
_ROWS = 1 << 15  #: of windows that are multiplied at a time


def resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """The same sound with `wanted` samples per second.

    Between two samples `up - 1` zeros are put, all are filtered, and every `down`-th is kept; only
    those are computed. Kept samples that lie alike between two given ones see the same taps.

    >>> resampled(np.ones(400, np.float32), 8000, 16000)[400].item() > 0.99
    True
    """
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    if up == down or not len(samples):
        return samples
    half = _ZEROS * max(up, down)
    taps = np.sinc(np.arange(-half, half + 1) / max(up, down)) * np.kaiser(2 * half + 1, _BETA)
    taps *= up / taps.sum()
    made = np.empty(-(-len(samples) * up // down), np.float32)
    seen, before = 2 * half // up + 1, half // up
    padded = np.pad(samples.astype(np.float32, copy=False), (before, seen + down))
    windows = np.lib.stride_tricks.sliding_window_view(padded, seen)
    for phase in range(min(up, len(made))):
        first = -((half - phase * down) // up)  # given sample that the first of these sees
        at = half + phase * down - up * (first + np.arange(seen))
        own = np.where(at >= 0, taps[at.clip(0)], 0.0).astype(np.float32)
        of_phase = made[phase::up]
        rows = windows[first + before :: down][: len(of_phase)]
        for start in range(0, len(of_phase), _ROWS):
            of_phase[start : start + _ROWS] = rows[start : start + _ROWS] @ own
    return made
