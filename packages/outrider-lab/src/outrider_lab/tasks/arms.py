"""Every drafter that can be made of what is there, each at its usual size, beside plain decoding.

The registry says which these are: without a draft model the lookups, n-grams, lookahead and the
target's own layers; with one the chains and trees besides. `default` is what `outrider.load` gives
to somebody who names nothing, planner included.
"""

import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider import Engine
from outrider.drafters import (
    DRAFTERS,
    DrafterParts,
    DraftModel,
    DraftOptions,
    Root,
    Translated,
)
from outrider.drafters.ngram_table import Table, count
from outrider.errors import ConfigurationError, UnknownName
from outrider.models import TreeDecoder
from outrider.text.speculator import Speculator
from outrider.types import LanguageModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN, DEFAULT = "plain", "default"
ORDER = 3  #: of n-grams that are counted here


@dataclass(frozen=True)
class Arms:
    """Engines on one target by name, and why some drafters are not among them."""

    engines: dict[str, Engine]
    left_out: dict[str, str] = field(default_factory=dict)


def arms(
    base: Speculator, table: Table | None, skip: Sequence[int], chosen: Sequence[str] | None = None
) -> Arms:
    """All engines, or plain decoding and those `chosen`.

    base   as it was loaded: its target, its draft model if it has one, and the default
    table  n-gram counts with the target's tokenizer; None if none of the `chosen` needs them
    skip   layers of the target that `layer_skip` leaves out

    Raises UnknownName for a name that is none, ConfigurationError for one that cannot be made here.
    """
    target = base.engine.target
    parts = DrafterParts(_drafts(base), table, target.vocab_size, target)
    known = [DEFAULT, *(name for name, recipe in DRAFTERS.items() if recipe.has(parts))]
    known.remove(Root.name)
    for name in chosen or ():
        if name not in known:
            raise UnknownName("drafter", name, known)
    found = Arms({PLAIN: Engine(target, Root())})
    for name in known if chosen is None else chosen:
        if name == DEFAULT:
            found.engines[name] = base.engine
            continue
        own = {"skip": tuple(skip)} if "skip" in DRAFTERS[name].takes else None
        try:
            made = DRAFTERS[name].make(parts, DraftOptions(own=own))
            found.engines[name] = Engine(target, made)
        except ConfigurationError as error:
            if chosen is not None:
                raise
            found.left_out[name] = str(error)
    return found


def _drafts(base: Speculator) -> tuple[LanguageModel, ...]:
    drafter = base.engine.drafter
    return (drafter.model,) if isinstance(drafter, (DraftModel, Translated)) else ()


def counts(chosen: Sequence[str] | None) -> bool:
    """Whether any of the chosen drafters needs n-gram counts."""
    names = DRAFTERS if chosen is None else DRAFTERS.keys() & set(chosen)
    return any("table" in DRAFTERS[name].needs for name in names)


def usual_skip(target: LanguageModel) -> tuple[int, ...]:
    """Layers to leave out if nobody says: the second tenth of them.

    `outrider bench layers` finds better ones; of SmolLM2-135M's thirty it loses least without 3, 4
    and 5, which are these.
    """
    have = target.runner.layers if isinstance(target, TreeDecoder) else 0
    return second_tenth(have) or (1,)


def second_tenth(layers: int) -> tuple[int, ...]:
    """The second tenth of a model's layers; () of a model with few.

    >>> second_tenth(30), second_tenth(4)
    ((3, 4, 5), ())
    """
    return tuple(range(layers // 10, layers // 5)) if layers >= 10 else ()


def documentation(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> Table:
    """n-grams of Python's documentation on this machine, for a target without a table."""
    pages = (page for _, page in sorted(pydoc_data.topics.topics.items()))
    lines = (line for page in pages for line in page.splitlines(keepends=True))
    ids: list[int] = []
    for line in lines:
        ids += tokenizer(line, add_special_tokens=False)["input_ids"]
    return count(ids, vocab_size, ORDER)
