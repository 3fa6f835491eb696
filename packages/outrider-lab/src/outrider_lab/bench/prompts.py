"""Files of prompts: JSON lines or plain text, and the shipped held-out set."""

import json
from pathlib import Path

from outrider.errors import PromptError
from outrider.shipped import shipped
from outrider_lab.certify.report import Row


def read_rows(path: str | Path | None = None, field: str = "prompt") -> list[Row]:
    """Prompts of a file as dictionaries with `prompt` and whatever else their lines say.

    A file has one JSON object with a `prompt` field a line, or one prompt a line; only a line feed
    ends a line. None is the shipped held-out set, whose rows have a `reference` as well. `field` is
    "source" for what encoder-decoders read. Raises PromptError with the line.

    >>> "reference" in read_rows()[0]
    True
    """
    where = Path(path) if path is not None else shipped("heldout_prompts.jsonl")
    try:
        # some editors write a byte order mark; U+2028 and form feeds are parts of a text
        lines = where.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(
            f"cannot read prompts; got {str(where)!r}: {error}; give a UTF-8 file with one JSON "
            "object or one prompt a line"
        ) from error
    rows = []
    for number, line in enumerate((one.rstrip("\r") for one in lines), start=1):
        if not line.strip():
            continue
        row: Row = {field: line}
        if line.lstrip().startswith("{"):
            try:
                row = json.loads(line)
                row[field]
            except (ValueError, KeyError) as error:
                raise PromptError(
                    f"line {number} of {str(where)!r} is no JSON object with a {field} field; got "
                    f"{line[:60]!r}; correct it"
                ) from error
        if not isinstance(row[field], str) or not row[field].strip():
            raise PromptError(f"line {number} of {str(where)!r} has no text in {field}; remove it")
        rows.append(row)
    if not rows:
        raise PromptError(f"no prompt; got an empty file {str(where)!r}; add at least one line")
    return rows


def read_prompts(path: str | Path | None = None, count: int | None = None) -> list[str]:
    """The texts alone, of the first `count` prompts, without white space at their ends."""
    return [row["prompt"].rstrip() for row in read_rows(path)[:count]]
