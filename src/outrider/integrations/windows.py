"""Which window of which recording each row of a call is, where Whisper's `generate` calls.

It decodes window after window, leaves out recordings that are over and those that need no other
temperature, and tells a custom function none of it. What belongs to a recording (a reference, the
frames of a draft model) is found by its own tables, in the frame of the call.
"""

from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple, TypeVar

from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

T = TypeVar("T")
_FAR = 8  #: frames between a custom function and Whisper's `generate`


class GenerateWindows(NamedTuple):
    """The rows of one call."""

    rows: list[int]  #: the recording of each
    starts: list[int]  #: its first frame
    recordings: int  #: in all; those of several sequences count as often

    def own(self, each: Sequence[T]) -> list[T]:
        """For each row what belongs to its recording."""
        return [each[row * len(each) // self.recordings] for row in self.rows]


def windows_of(caller: FrameType | None) -> GenerateWindows | None:
    """The windows that a call is about; None if it is not Whisper's `generate` that calls."""
    method = WhisperGenerationMixin.generate_with_fallback.__code__
    for _ in range(_FAR):
        if caller is None or caller.f_code is method:
            break
        caller = caller.f_back
    if caller is None or caller.f_code is not method:
        return None
    seek, recordings = caller.f_locals["seek"].tolist(), caller.f_locals["batch_idx_map"]
    rows = [recordings[row] for row in caller.f_locals["fallback_index_map"]]
    return GenerateWindows(rows, [seek[row] for row in rows], len(seek))
