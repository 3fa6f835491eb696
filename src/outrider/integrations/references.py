"""Texts that rows may copy from, as callers of `generate` give them."""

from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple, TypeAlias, TypeVar

from torch import Tensor
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from outrider import arguments
from outrider.drafters import ReferenceLookup
from outrider.engine.request import token_ids
from outrider.errors import ConfigurationError
from outrider.types import Drafter, Inputs

# Which window of which recording each row of a call is, where Whisper's `generate` calls.
#
# It decodes window after window, leaves out recordings that are over and those that need no other
# temperature, and tells a custom function none of it. What belongs to a recording (a reference, the
# frames of a draft model) is found by its own tables, in the frame of the call.

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


#: Token ids: one list, or a list for each prompt.
Ids: TypeAlias = Tensor | Sequence[int] | Sequence[Sequence[int]]


def references(
    given: Ids | None, rows: int, windows: GenerateWindows | None = None
) -> list[Sequence[int]] | None:
    """Tokens that each row may copy from.

    One list serves all rows; of several there must be one for each prompt, or recording.
    """
    if given is None:
        return None
    each = lists("reference", given)
    if len(each) == 1:
        return each * rows
    of = rows if windows is None else windows.recordings
    if of % len(each):
        raise ConfigurationError(
            f"reference= has one list of token ids for each prompt, or one for all; got "
            f"{len(each)} for {of} rows; give as many as there are prompts"
        )
    if windows is not None:
        return windows.own(each)
    return [ids for ids in each for _ in range(rows // len(each))]


def check(
    drafter: Drafter,
    named: str | None,
    inputs: Sequence[Inputs] | None,
    copied: Sequence[Sequence[int]] | None,
) -> None:
    """Refuse a reference that nobody looks into, and looking by name where there is none."""
    looks = isinstance(drafter, ReferenceLookup)
    if copied is not None and not looks:
        raise ConfigurationError(
            f"reference= is what drafter='reference_lookup' copies from; got {drafter.name!r}, "
            "which has no use for it; leave one of them out"
        )
    known = copied is not None or (inputs is not None and inputs[0].ids_BS is not None)
    if looks and named is not None and not known:
        raise ConfigurationError(
            f"drafter={named!r} copies from a reference, and there is none: no token ids of a "
            "source have come this far; pass reference=..., or source_ids=... if generate was "
            "given encoder_outputs instead of input_ids"
        )


def lists(name: str, given: Ids) -> list[Sequence[int]]:
    """Lists of token ids from a tensor, one list or several."""
    plain = given.tolist() if isinstance(given, Tensor) else given
    if not isinstance(plain, (list, tuple)) or not plain:
        do = f"write {name}=tokenizer(texts).input_ids"
        arguments.refuse(name, "token ids: one list, or a list for each prompt", given, do)
    if not isinstance(plain[0], (list, tuple, Tensor)):
        plain = [plain]
    return [token_ids(ids, number) for number, ids in enumerate(plain)]
