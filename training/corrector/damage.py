"""Ways in which people damage Python while typing, and their repair known.

Every kind of damage takes a text and a random generator and gives the damaged text, or `None`
where the text has no place for it. All are small enough that the text around says what was meant.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable

# Words long enough to be known again after one slip.
WORD = re.compile(r"[A-Za-z]{4,}")
NAME = re.compile(r"\b[A-Za-z_][A-Za-z_]{3,}\b")
BRACKETS = re.compile(r"[()\[\]{}]")
QUOTES = re.compile(r"[\"']")
COLON_AT_END = re.compile(r":$", re.MULTILINE)
INDENTED = re.compile(r"^ +(?=\S)", re.MULTILINE)
SPACED_WORD = re.compile(r"(?<=\s)\w+(?= )")
KEYS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")

Damage = Callable[[str, random.Random], str | None]


def neighbours(letter: str) -> str:
    """The letters beside and above or below it on a keyboard, in its own case.

    >>> neighbours("a"), neighbours("M")
    ('sqwz', 'NJK')
    """
    row = next((n for n, keys in enumerate(KEYS) if letter.lower() in keys), None)
    if row is None:
        return ""
    at = KEYS[row].index(letter.lower())
    beside = KEYS[row][max(at - 1, 0) : at] + KEYS[row][at + 1 : at + 2]
    above = KEYS[row - 1][at : at + 2] if row else ""
    below = KEYS[row + 1][max(at - 1, 0) : at + 1] if row < 2 else ""
    found = beside + above + below
    return found.upper() if letter.isupper() else found


def slip(word: str, rng: random.Random) -> str:
    """One slip of the finger: a letter dropped, doubled, hit beside, or two swapped."""
    at = rng.randrange(len(word))
    kind = rng.randrange(4)
    if kind == 0:
        return word[:at] + word[at + 1 :]
    if kind == 1:
        return word[:at] + word[at] + word[at:]
    if kind == 2:
        near = neighbours(word[at])
        return word[:at] + rng.choice(near) + word[at + 1 :] if near else word[:at] + word[at + 1 :]
    at = min(at, len(word) - 2)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def _replace(text: str, match: re.Match[str], new: str) -> str:
    return text[: match.start()] + new + text[match.end() :]


def _anywhere(pattern: re.Pattern[str], text: str, rng: random.Random) -> re.Match[str] | None:
    matches = list(pattern.finditer(text))
    return rng.choice(matches) if matches else None


def typo(text: str, rng: random.Random) -> str | None:
    match = _anywhere(WORD, text, rng)
    return match and _replace(text, match, slip(match[0], rng))


def misspelt_name(text: str, rng: random.Random) -> str | None:
    """A slip in a name that stands elsewhere in the text as it should."""
    matches = list(NAME.finditer(text))
    counts = Counter(match[0] for match in matches)
    repeated = [match for match in matches if counts[match[0]] > 1]
    if not repeated:
        return None
    match = rng.choice(repeated)
    return _replace(text, match, slip(match[0], rng))


def bracket(text: str, rng: random.Random) -> str | None:
    """A bracket is missing, or is one of another kind."""
    match = _anywhere(BRACKETS, text, rng)
    if match is None:
        return None
    side = "([{" if match[0] in "([{" else ")]}"
    return _replace(text, match, rng.choice(["", "", side.replace(match[0], "")[rng.randrange(2)]]))


def quote(text: str, rng: random.Random) -> str | None:
    """A quote is missing, or is the other one."""
    match = _anywhere(QUOTES, text, rng)
    if match is None:
        return None
    return _replace(text, match, rng.choice(["", '"' if match[0] == "'" else "'"]))


def colon(text: str, rng: random.Random) -> str | None:
    """The colon at the end of a line is missing or a semicolon."""
    match = _anywhere(COLON_AT_END, text, rng)
    return match and _replace(text, match, rng.choice(["", "", ";"]))


def indentation(text: str, rng: random.Random) -> str | None:
    """A line stands one to three blanks too far in or out."""
    match = _anywhere(INDENTED, text, rng)
    if match is None:
        return None
    moved = len(match[0]) + rng.choice([-3, -2, -1, 1, 2, 3])
    return _replace(text, match, " " * max(moved, 0))


def doubled_word(text: str, rng: random.Random) -> str | None:
    match = _anywhere(SPACED_WORD, text, rng)
    return match and _replace(text, match, f"{match[0]} {match[0]}")


#: Each kind and how often it is taken.
KINDS: dict[Damage, int] = {
    typo: 8,
    misspelt_name: 4,
    bracket: 3,
    quote: 2,
    colon: 2,
    indentation: 2,
    doubled_word: 1,
}


def damage(text: str, times: int, rng: random.Random) -> str:
    """The text after so many random damages; fewer where there is no place for them."""
    for kind in rng.choices(list(KINDS), weights=list(KINDS.values()), k=times):
        text = kind(text, rng) or text
    return text
