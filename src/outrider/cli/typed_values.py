"""Values typed as one text: numbers with commas between them, names with what they stand for."""

import ast
from collections.abc import Callable
from typing import TypeVar

from outrider import arguments

Number = TypeVar("Number", int, float)


def branching(given: str | None) -> tuple[int, ...] | None:
    """ "3,2,1" to (3, 2, 1)."""
    counts = numbers("--branching", given, int, "3,2,1")
    if counts is not None and min(counts) < 1:
        arguments.refuse("--branching", "positive numbers separated by commas", given, "try 3,2,1")
    return counts


def numbers(
    option: str, given: str | None, kind: Callable[[str], Number], example: str
) -> tuple[Number, ...] | None:
    """ "0.6,0.15" to (0.6, 0.15)."""
    if given is None:
        return None
    try:
        return tuple(kind(part) for part in given.split(","))
    except ValueError:
        arguments.refuse(option, "numbers separated by commas", given, f"try {example}")


def by_name(option: str, given: list[str] | None, example: str) -> dict[str, object] | None:
    """["lenience=0.3"] to {"lenience": 0.3}; what is no Python literal stays text."""
    values: dict[str, object] = {}
    for text in given or ():
        name, sign, value = text.partition("=")
        if not (sign and name.strip()) or name.strip() in values:
            arguments.refuse(option, "name=value, each name once", text, f"try {option} {example}")
        try:
            values[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            values[name.strip()] = value
    return values or None


def folders(option: str, given: list[str] | None) -> dict[str, str] | None:
    """["sql=adapters/sql"] to {"sql": "adapters/sql"}."""
    found: dict[str, str] = {}
    for text in given or ():
        name, _, folder = text.partition("=")
        if not (name and folder) or name in found:
            arguments.refuse(
                option, "name=folder, each name once", text, f"try {option} sql=adapters/sql"
            )
        found[name] = folder
    return found or None
