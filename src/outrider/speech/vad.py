"""Where a recording may be cut: windows that end where nobody speaks, without asking the model.

Windows that do not begin where the last one ended can be decoded side by side.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from outrider import arguments
from outrider.errors import ConfigurationError
from outrider.speech.audio import Samples

#: Seconds between which somebody speaks; or what finds them in samples.
Spans: TypeAlias = Sequence[tuple[float, float]]
Vad: TypeAlias = "Spans | Callable[[Samples], Iterable[tuple[float, float]]]"

_FRAME = 0.02  #: seconds over which loudness is measured
_BREATH = 0.3  #: seconds that a pause should have


def loudness(samples: Samples, rate: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Decibels of full scale in every frame of 20 ms."""
    size = int(rate * _FRAME)
    padded = np.pad(samples, (0, -len(samples) % size)).reshape(-1, size).astype(np.float64)
    return np.asarray(10 * np.log10(np.maximum((padded**2).mean(1), 1e-10)))


def at_pauses(samples: Samples, rate: int, longest: float) -> list[tuple[float, float]]:
    """Windows of at most `longest` seconds, [(start, end)], that tile the recording.

    Each ends in the quietest moment of its second half; among equals the last.

    >>> at_pauses(np.zeros(16000 * 3, np.float32), 16000, 10.0)
    [(0.0, 3.0)]
    """
    level, total = loudness(samples, rate), len(samples) / rate
    width = max(int(_BREATH / _FRAME), 1)
    smooth = np.convolve(np.pad(level, width // 2, mode="edge"), np.ones(width) / width, "same")
    smooth = smooth[width // 2 : width // 2 + len(level)]
    spans, start = [], 0.0
    while total - start > longest:
        low, high = int((start + longest / 2) / _FRAME), int((start + longest) / _FRAME)
        quiet = smooth[low:high]
        at = high - 1 - int(np.argmin(quiet[::-1]))
        end = round(at * _FRAME, 2)
        spans.append((start, end))
        start = end
    return [*spans, (start, total)]


def of_speech(
    vad: Vad, samples: Samples, rate: int, longest: float, name: str
) -> list[tuple[float, float]]:
    """Windows of at most `longest` seconds that hold the given spans of speech and the short
    silences between them; nothing else is decoded. Longer spans are cut at pauses.

    Raises ConfigurationError for spans that are none: not in order, of no length, too late.
    """
    total = len(samples) / rate
    given = vad(samples) if callable(vad) else vad
    spans: list[tuple[float, float]] = []
    for start, end in checked(given, total, name):
        if end - start > longest:
            cut = samples[int(start * rate) : int(end * rate)]
            spans += [(a + start, b + start) for a, b in at_pauses(cut, rate, longest)]
        elif spans and end - spans[-1][0] <= longest:
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
    return spans


def checked(given: Any, total: float, name: str) -> list[tuple[float, float]]:
    """Spans of speech as pairs of seconds within the recording."""
    what, do = "pairs of (start, end) in seconds, in order", "write vad=[(0.0, 2.5), (4.0, 9.0)]"
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        arguments.refuse("vad", what, given, do)
    spans: list[tuple[float, float]] = []
    for pair in given:
        if isinstance(pair, (str, bytes)) or not isinstance(pair, Sequence) or len(pair) != 2:
            arguments.refuse("vad", what, pair, do)
        start, end = (float(arguments.number("vad", one, what, do)) for one in pair)
        late = start >= total
        if not 0 <= start < end or late or (spans and start < spans[-1][1]):
            raise ConfigurationError(
                f"vad must be {what}, within the {total:.2f} s of {name}; got ({start:g}, {end:g})"
                f"{f' behind {spans[-1]}' if spans else ''}; {do}"
            )
        spans.append((start, min(end, total)))
    return spans
