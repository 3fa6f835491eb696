"""How a drafter is made by name: what it needs, which options it takes, and what these may be.

    Recipe(Echo)                                             # needs nothing, takes nothing
    Recipe(beam, ("model",), ("num_speculative_tokens", "width"))

`outrider.drafters` has the registry, and asks the recipes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from outrider import arguments
from outrider.drafters.draft_sampling import Tempered, Warp
from outrider.errors import ConfigurationError
from outrider.types import Drafter, LanguageModel

if TYPE_CHECKING:
    from outrider.drafters.ngram_table import Table

PLAIN = "use the drafter 'none' for plain decoding"
CHAIN = "use the drafter 'draft_model' for a chain"

Need = Literal["model", "models", "translated", "table", "vocab_size", "target"]


@dataclass(frozen=True)
class DraftOptions:
    """What a user asks of a drafter; None (False for `shared_noise`) where nothing was asked.

    num_speculative_tokens  the depth: tokens of a chain, of a path, or of a tree's longest path
    branching               children per level
    width                   paths, or nodes of a level
    total_tokens            drafted tokens in all
    tree_acceptance         chance that a node's k-th child is kept, k = 1, 2, ...
    ngram                   shortest and longest n-gram that is looked up
    shared_noise            draw with the target's noise
    own                     options that one drafter has for itself, by name

    Raises ConfigurationError for a value that would be nonsense for any drafter.

    >>> DraftOptions(branching=[3, 2]).asked()
    {'branching': (3, 2)}
    """

    num_speculative_tokens: int | None = None
    branching: Sequence[int] | None = None
    width: int | None = None
    total_tokens: int | None = None
    tree_acceptance: Sequence[float] | None = None
    ngram: Sequence[int] | None = None
    shared_noise: bool = False
    own: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.shared_noise, bool):
            arguments.refuse(
                "shared_noise", "True or False", self.shared_noise, "leave it out for False"
            )
        for name, read in _READ.items():
            if vars(self)[name] is not None:
                object.__setattr__(self, name, read(vars(self)[name]))

    @property
    def sized(self) -> bool:
        """Whether a size was asked for: then it is drafted in every step."""
        return any(vars(self)[name] is not None for name in SIZES)

    def asked(self) -> dict[str, object]:
        """What was asked for, by name."""
        common = {name: vars(self)[name] for name in COMMON}
        asked = {n: v for n, v in common.items() if v is not None and v is not False}
        return asked | dict(self.own or {})


#: The options that drafters share; any other one is some drafter's own.
COMMON = tuple(field.name for field in fields(DraftOptions) if field.name != "own")

#: Those that say how much is drafted.
SIZES = ("num_speculative_tokens", "branching", "width", "total_tokens", "tree_acceptance")


def counts(name: str, given: object) -> tuple[int, ...]:
    """Children per level."""
    what, do = "positive whole numbers, one per level", f"write {name}=(3, 2, 1)"
    return arguments.several(name, given, what, do, arguments.is_count)


def one_depth(branching: tuple[int, ...] | None, depth: int | None) -> None:
    """Refuse a branching vector and a depth that disagree."""
    if branching is not None and depth is not None and len(branching) != depth:
        raise ConfigurationError(
            f"the depth of a tree is the length of its branching; got branching={branching} "
            f"and num_speculative_tokens={depth}; leave num_speculative_tokens out"
        )


def _whole(name: str, least: int, do: str) -> Callable[[object], int]:
    return lambda given: arguments.whole(name, given, do, least=least)


def _chances(given: object) -> tuple[float, ...]:
    what, do = "numbers, one per child", "write tree_acceptance=(0.6, 0.15, 0.05)"
    return arguments.several("tree_acceptance", given, what, do, arguments.is_number)


def _ngram(given: object) -> tuple[int, ...]:
    what = "the shortest and the longest n-gram, two whole numbers of at least 1"
    sizes: tuple[int, ...] = arguments.several(
        "ngram", given, what, "write ngram=(1, 4)", arguments.is_count
    )
    if len(sizes) != 2 or sizes[0] > sizes[1]:
        arguments.refuse("ngram", what, given, "write ngram=(1, 4)")
    return sizes


def _own(given: object) -> dict[str, object]:
    options = arguments.by_name("drafter_options", given)
    for name in (*COMMON, "draft", "table"):
        if name in options:
            raise ConfigurationError(
                f"drafter_options are those that one drafter has for itself; got {name}="
                f"{arguments.shown(options[name])}; give {name} beside them, not in them"
            )
    return options


_READ: dict[str, Callable[[object], object]] = {
    "num_speculative_tokens": _whole("num_speculative_tokens", 1, PLAIN),
    "branching": partial(counts, "branching"),
    "width": _whole("width", 2, CHAIN),
    "total_tokens": _whole("total_tokens", 1, "give the number of drafted tokens"),
    "tree_acceptance": _chances,
    "ngram": _ngram,
    "own": _own,
}


class DrafterParts(NamedTuple):
    """What is loaded before a drafter is made."""

    models: tuple[LanguageModel, ...] = ()  #: draft models
    table: "Table | None" = None  #: n-gram counts
    vocab_size: int = 0  #: of the target
    target: LanguageModel | None = None  #: for a drafter that is made of it


@dataclass(frozen=True)
class Recipe:
    """How a drafter is made by name.

    build  a class or function; it gets what the recipe needs, and those of the options it takes
           that the user asked for, as keywords: what was not asked for is its own default's matter
    needs  "model" (one draft model), "models" (a tuple of one or more), "translated" (one whose
           tokenizer is another than the target's), "table" (n-gram counts), "vocab_size" (the
           target's), "target" (the model itself)
    takes  names of options: those of `DraftOptions`, and any other names of its own. What needs a
           draft model or a table takes the `temperature`, `top_k`, `top_p` and `min_p` of their
           law besides (`drafters.draft_sampling`)
    depth  tokens it drafts in a row if nobody asks
    deepest  and those that a planner may choose up to then; None: no more than that
    copies whether it has a use for a request's reference (`Context.reference_BS`)
    law    whether it has such a law without a draft model or a table

    >>> from outrider.drafters.root import Root
    >>> Recipe(Root).make(DrafterParts(), DraftOptions()).name
    'none'
    """

    build: Callable[..., Drafter]
    needs: tuple[Need, ...] = ()
    takes: tuple[str, ...] = ()
    depth: int = 4
    deepest: int | None = None
    copies: bool = False
    law: bool = False

    def __post_init__(self) -> None:
        known = get_args(Need)
        if not isinstance(self.needs, tuple) or not set(self.needs) <= set(known):
            what = f"a tuple of {', '.join(known)}"
            arguments.refuse("needs", what, self.needs, 'write needs=("model",)')
        if not isinstance(self.takes, tuple):
            arguments.refuse("takes", "a tuple of names", self.takes, 'write takes=("width",)')

    @property
    def warps(self) -> tuple[str, ...]:
        """Options of the law that it draws from: of a model's or a table's. Its own go first."""
        law = self.law or self.drafts_with_models or "table" in self.needs
        return tuple(name for name in Warp._fields if law and name not in self.takes)

    @property
    def drafts_with_models(self) -> bool:
        """Whether it needs a draft model, or several."""
        return not {"model", "models", "translated"}.isdisjoint(self.needs)

    def wants(self, option: str) -> bool:
        """Whether it has a use for an option, a "draft" model or a "table".

        Coupling a drafter without a model is the rule's matter alone.
        """
        if option == "draft":
            return self.drafts_with_models
        if option == "shared_noise" and not self.drafts_with_models:
            return True
        known = (*self.takes, *self.warps)
        return option in known or (option == "table" and "table" in self.needs)

    def has(self, parts: DrafterParts) -> bool:
        """Whether all that it needs is there."""
        there: dict[str, object] = {
            "model": parts.models,
            "models": parts.models,
            "table": parts.table is not None,
            "vocab_size": parts.vocab_size,
            "target": parts.target is not None,
        }
        if "translated" in self.needs:
            from outrider.models.cross_tokenizer_model import TranslatedModel

            there["translated"] = any(isinstance(one, TranslatedModel) for one in parts.models)
        return all(there[need] for need in self.needs)

    def make(self, parts: DrafterParts, options: DraftOptions) -> Drafter:
        """The drafter; what it has no use for must have been refused (`drafters.check`)."""
        first = parts.models[0] if parts.models else None
        there = {
            "model": first,
            "models": parts.models,
            "translated": first,
            "table": parts.table,
            "vocab_size": parts.vocab_size,
            "target": parts.target,
        }
        asked = options.asked()
        if "shared_noise" not in self.takes:
            asked.pop("shared_noise", None)  # the rule's matter alone
        warp = {name: asked.pop(name) for name in self.warps if name in asked}
        drafter = self.build(**{need: there[need] for need in self.needs}, **asked)
        unread = {layer for model in parts.models for layer in model.aux_layers} - set(
            drafter.aux_layers
        )
        if unread:
            raise ConfigurationError(
                f"drafter {drafter.name!r} hands no states of the target to its draft model; got a "
                "head, which reads them; use 'draft_model', 'dynamic_tree' or another tree"
            )
        return Tempered(drafter, Warp.given(warp)) if warp else drafter
