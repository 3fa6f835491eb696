"""What a user asks of a drafter, checked before a model is loaded: depth, shape and n-grams."""

from typing import Any

from outrider import arguments

PLAIN = "use the drafter 'root' for plain decoding"
CHAIN = "use the drafter 'draft_model' for a chain"


def depth(given: Any, name: str = "num_speculative_tokens") -> int | None:
    """`num_speculative_tokens`, or None if nothing was asked."""
    return None if given is None else arguments.whole(name, given, PLAIN, least=1)


def shape(
    *,
    num_speculative_tokens: Any = None,
    branching: Any = None,
    width: Any = None,
    total_tokens: Any = None,
    acceptance: Any = None,
) -> dict[str, Any]:
    """The same by name, as plain values; None where nothing was asked.

    >>> shape(branching=[3, 2])["branching"]
    (3, 2)
    """
    if branching is not None:
        branching = counts("branching", branching)
    if width is not None:
        width = arguments.whole("width", width, CHAIN, least=2)
    if total_tokens is not None:
        do = "give the number of drafted tokens"
        total_tokens = arguments.whole("total_tokens", total_tokens, do, least=1)
    if acceptance is not None:
        what, do = "numbers, one per child", "write acceptance=(0.6, 0.15, 0.05)"
        acceptance = arguments.several("acceptance", acceptance, what, do, arguments.is_number)
    return {
        "num_speculative_tokens": depth(num_speculative_tokens),
        "branching": branching,
        "width": width,
        "total_tokens": total_tokens,
        "acceptance": acceptance,
    }


def counts(name: str, given: Any) -> tuple[int, ...]:
    """Children per level."""
    what, do = "positive whole numbers, one per level", f"write {name}=(3, 2, 1)"
    found: tuple[int, ...] = arguments.several(name, given, what, do, _positive)
    return found


def _positive(value: Any) -> bool:
    return arguments.is_whole(value) and value > 0


def ngram(given: Any) -> tuple[int, int]:
    """The shortest and the longest n-gram of prompt lookup."""
    what = "the shortest and the longest n-gram, two whole numbers of at least 1"
    do = "write ngram=(1, 4)"
    found = arguments.several("ngram", given, what, do, _positive)
    if len(found) != 2 or found[0] > found[1]:
        arguments.refuse("ngram", what, given, do)
    return found[0], found[1]


def name(drafter: Any) -> None:
    """A drafter by name: objects go to an `Engine` or to a speculator's `using`."""
    if not isinstance(drafter, str):
        do = "take the speculator's using(drafter) for an object of your own"
        arguments.refuse("drafter", "a name", drafter, do)
