"""Grammars in GBNF, llama.cpp's notation, as llguidance reads them.

llguidance makes Lark of GBNF, and a regular expression of each class: some escapes get lost on the
way, and characters that mean nothing in GBNF mean something there. They are written otherwise.
"""

import re
from collections import Counter

from llguidance import grammar_from

_RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
#: Strings, classes, comments, any character; and what stands between them.
_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\.|[^"\[#.]+|.', re.DOTALL)
_CHARACTERS = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", re.DOTALL)
_NAMES = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}


def is_gbnf(text: str) -> bool:
    """Whether a grammar has a rule of GBNF; Lark's are `name: ...`.

    >>> is_gbnf('root ::= "a"'), is_gbnf('start: "::="')
    (True, False)
    """
    return _RULE.search(text) is not None


def convert(text: str) -> str:
    """The grammar as llguidance has it. Raises ValueError for one that cannot be read.

    >>> "start" in convert('root ::= "a"')
    True
    """
    names = _RULE.findall(text)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"the rule {twice[0]!r} is given more than once; name each rule once")
    return str(grammar_from("grammar", "".join(_part(found[0]) for found in _PARTS.finditer(text))))


def _part(text: str) -> str:
    if text[0] == "#":
        return ""
    if text == ".":  # in Lark all but an end of line
        return r'(. | "\n")'
    if text[0] not in '"[' or len(text) < 2:
        return text
    ends, inner = text[0] + text[-1], [found[0] for found in _CHARACTERS.finditer(text[1:-1])]
    made = list(map(_in_string if ends == '""' else _in_class, inner))
    if ends == "[]":  # a set: twice is once, and in a regular expression an operator
        made = [one for at, one in enumerate(made) if one not in ("&", "~") or one not in made[:at]]
    return ends[0] + "".join(made) + ends[1]


def _character(escape: str) -> str:
    """What an escape stands for."""
    if len(escape) > 2:
        return chr(int(escape[2:], 16))
    return _LETTERS.get(escape[1], escape[1])


def _in_string(text: str) -> str:
    if len(text) == 1:
        return text
    one = _character(text)
    return _NAMES.get(one, f"\\{one}" if one in '"\\' else one)


def _in_class(text: str) -> str:
    if len(text) == 1 and text != "[":  # - between two and ^ in front mean what they say
        return text
    one = text if len(text) == 1 else _character(text)
    return _NAMES.get(one, f"\\x{ord(one):02x}" if one in r'[]\^-"' else one)
