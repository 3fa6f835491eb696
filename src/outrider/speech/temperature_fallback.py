"""Whether a window's text will do: how probable, how repetitive, and whether anyone speaks."""

import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """Beyond which a window is decoded again at the next temperature, or left out as silence.

    compression_ratio  a text that compresses better repeats itself: again
    logprob            a text whose mean log-probability is lower: again
    no_speech          a window whose start is more probably silence, and whose text is no more
                       probable than `logprob`: left out
    None switches one off.
    """

    compression_ratio: float | None = 2.4
    logprob: float | None = -1.0
    no_speech: float | None = 0.6


def compression_ratio(text: str) -> float:
    """How much shorter zlib makes a text: above 2.4 it repeats itself.

    >>> round(compression_ratio("so it goes, " * 20), 1)
    10.4
    """
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data))


def silent(limits: Thresholds, no_speech: float, logprob: float) -> bool:
    """Whether nobody speaks: the window is left out."""
    if limits.no_speech is None or no_speech <= limits.no_speech:
        return False
    return limits.logprob is None or logprob <= limits.logprob


def needs_fallback(limits: Thresholds, ratio: float, logprob: float, no_speech: float) -> bool:
    """Whether another temperature is to be tried."""
    unlikely = limits.logprob is not None and logprob < limits.logprob
    if unlikely and limits.no_speech is not None and no_speech > limits.no_speech:
        return False  # silence: no text will be more probable
    return unlikely or (limits.compression_ratio is not None and ratio > limits.compression_ratio)
