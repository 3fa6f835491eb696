"""Rows of printed tables, and numbers in sentences: what the readers of all papers share.

A row is {"paper", "table", "row": what it stands for, "values": what is printed}. Percentages stay
percentages. The texts came out of PDF files, so each paper is read by the shape that its tables
were left in; where a copy lost the order of some cells, `note` says how they were put back.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]
NUMBER = r"-?\d+(?:\.\d+)?"


def row(paper: str, table: str, what: Row, values: Row) -> Row:
    """One row; what is not printed in it is left out."""
    kept = {name: value for name, value in values.items() if value is not None}
    return {"paper": paper, "table": table, "row": what, "values": kept}


def numbers(text: str) -> list[float]:
    """Every number of a piece of text.

    >>> numbers("4.17±0.81 and 11.9%")
    [4.17, 0.81, 11.9]
    """
    return [float(found) for found in re.findall(NUMBER, text)]


def stated(paper: str, text: str, found: Sequence[tuple[str, str, str]]) -> Iterator[Row]:
    """Numbers in sentences: (what it is, its unit, the words around it as a pattern)."""
    for what, unit, pattern in found:
        match = re.search(pattern, text)
        if match is None:
            raise ValueError(f"{paper} does not say {what!r}: nothing matches {pattern!r}")
        values = [float(value.replace(",", "")) for value in match.groups()]
        printed = dict(zip(("value", "to"), values, strict=False))
        yield row(paper, "text", {"what": what, "unit": unit}, printed)
