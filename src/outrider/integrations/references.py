"""Texts that rows may copy from, as callers of `generate` give them."""

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from outrider import arguments
from outrider.drafters import ReferenceLookup
from outrider.engine.request import token_ids
from outrider.errors import ConfigurationError
from outrider.integrations.windows import GenerateWindows
from outrider.types import Drafter, Inputs

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
