"""Task scores of completions of Python code."""

import ast
import difflib
import textwrap


def parses(prompt: str, completion: str, spare: int = 3) -> bool:
    """Whether prompt and completion are Python, up to a last statement that was cut short.

    A prompt may begin inside a class or function. The last `spare` lines may be dropped, because
    a completion ends where its budget ends.

    >>> parses("def add(a, b):", " return a + b\\n")
    True
    >>> parses("def add(a, b):", " return ) +\\n x = 1\\n y = 2\\n z = 3\\n w = 4\\n v = 5")
    False
    """
    lines = (prompt + completion).splitlines()
    for drop in range(spare + 1):
        text = "\n".join(lines[: len(lines) - drop] if drop else lines)
        for whole in (text, textwrap.dedent(text), "if 1:\n" + text, text + "\n pass"):
            try:
                ast.parse(whole)
            except (SyntaxError, ValueError, MemoryError, RecursionError):
                continue
            return True
    return False


def similarity(text: str, reference: str) -> float:
    """Edit similarity in [0, 1] to the beginning of the reference, of equal length.

    >>> similarity("abc", "abcdef")
    1.0
    """
    reference = reference[: len(text)]
    return difflib.SequenceMatcher(None, text, reference, autojunk=False).ratio()
