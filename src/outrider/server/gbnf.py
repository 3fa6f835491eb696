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
_CHARACTER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", re.DOTALL)
#: One, or two with a - between them, whatever they are.
_RANGE = re.compile(rf"({_CHARACTER.pattern})(?:-({_CHARACTER.pattern}))?", re.DOTALL)
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
    inner = text[1:-1]
    if text[0] == "[":
        negation = "^" if inner[:1] == "^" else ""
        return f"[{negation}{_RANGE.sub(_range, inner[len(negation) :])}]"
    made = "".join(_in_string(_character(found[0])) for found in _CHARACTER.finditer(inner))
    return f'("{made}")' if '" [' in made else f'"{made}"'


def _range(found: re.Match[str]) -> str:
    return "-".join(_in_class(_character(one)) for one in found.groups() if one)


def _character(text: str) -> str:
    """What a character or an escape stands for; other letters behind a backslash are an error."""
    if len(text) > 2:
        return chr(int(text[2:], 16))
    if len(text) == 2 and text[1].isalnum() and text[1] not in _LETTERS:
        what = f"the escape {text} is none of GBNF, which has \\n, \\r, \\t, \\x41, \\u0041 and "
        raise ValueError(f"{what}\\U00000041; write the characters that are meant")
    return _LETTERS.get(text[1], text[1]) if len(text) == 2 else text


def _in_string(one: str) -> str:
    if (one < " " or one == "\x7f") and one not in _NAMES:  # Lark's strings have none of these
        return f'" [{one}] "'
    return _NAMES.get(one, f"\\{one}" if one in '"\\' else one)


def _in_class(one: str) -> str:
    return _NAMES.get(one, f"\\x{ord(one):02x}" if one in r'[]\^-&~"' else one)
