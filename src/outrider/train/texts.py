"""What a draft is trained on: files of texts, and prompts that the target answers itself."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outrider.errors import ConfigurationError
from outrider.text.prompts import encode
from outrider.train.features import TrainText
from outrider.types import Tokenizer

#: What is read of a folder.
ENDINGS = {".txt", ".md", ".rst", ".py", ".json", ".jsonl"}
LENGTH = 256  #: tokens of a piece of a longer text
LEAST = 1024  #: tokens that training and held-out texts must have together
SHARE = 20  #: every so manieth text is held out, if none says so itself


class TextPiece(NamedTuple):
    """A text or prompt as it stands in a file."""

    prompt: str  #: what is not to be learnt, only read; "" for texts
    text: str  #: "" for prompts that wait for an answer
    held_out: bool | None = None  #: None: nothing is said


def read(paths: Sequence[Path], fields: tuple[str, ...]) -> list[TextPiece]:
    """The pieces of these files and folders. JSON lines must have the first of `fields`.

    Raises ConfigurationError for a file that is not there, cannot be read, or has nothing in it.
    """
    pieces = []
    for path in (each for given in paths for each in _files(given)):
        try:
            whole = path.read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"cannot read training text; got {str(path)!r} ({error}); give UTF-8 files"
            ) from error
        found = (
            list(_rows(path, whole, fields))
            if path.suffix in (".json", ".jsonl")
            else _plain(whole, fields[0])
        )
        if not found:
            raise ConfigurationError(
                f"a training file has no text; got {str(path)!r}; leave it out, or fill it"
            )
        pieces += found
    return pieces


def _files(given: Path) -> list[Path]:
    if given.is_dir():
        files = sorted(path for path in given.rglob("*") if path.suffix in ENDINGS)
        if not files:
            raise ConfigurationError(
                f"the folder has no training text; got {str(given)!r}; put files of "
                f"{', '.join(sorted(ENDINGS))} there"
            )
        return files
    return [given]


def _plain(whole: str, field: str) -> list[TextPiece]:
    """A file of plain text: one text, or one prompt a line."""
    if field == "prompt":
        return [TextPiece(line.strip(), "") for line in whole.splitlines() if line.strip()]
    return [TextPiece("", whole)] if whole.strip() else []


def _rows(path: Path, whole: str, fields: tuple[str, ...]) -> Iterator[TextPiece]:
    for number, line in enumerate(whole.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row: dict[str, Any] = json.loads(line)
            values = {field: row.get(field, "") for field in ("prompt", "text")}
            held = row.get("held_out")
            if not all(isinstance(value, str) for value in values.values()):
                raise ValueError("prompt and text must be strings")
            if not values[fields[0]].strip():
                raise ValueError(f"it has no {fields[0]}")
        except (ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"line {number} of {str(path)!r} is no JSON object with a {fields[0]!r} field; got "
                f"{line[:60]!r} ({error}); correct it"
            ) from error
        yield TextPiece(values["prompt"], values["text"], None if held is None else bool(held))


def tokenized(
    pieces: Sequence[TextPiece], tokenizer: Tokenizer
) -> list[tuple[TrainText, bool | None]]:
    """Texts in tokens, long ones in pieces, each with whether it is held out."""
    found = []
    for piece in pieces:
        prompt = encode(tokenizer, piece.prompt) if piece.prompt else []
        tokens = [*prompt, *encode(tokenizer, piece.text)]
        for first in range(0, len(tokens), LENGTH):
            part = tuple(tokens[first : first + LENGTH])
            start = max(1, len(prompt) - first)
            if len(part) > start + 8:
                found.append((TrainText(part, start), piece.held_out))
    return found


def split(
    texts: Sequence[tuple[TrainText, bool | None]],
) -> tuple[list[TrainText], list[TrainText]]:
    """Texts to train on, and texts held out. Raises ConfigurationError if there are too few."""
    said = any(held for _, held in texts)
    out = [bool(held) if said else n % SHARE == SHARE // 2 for n, (_, held) in enumerate(texts)]
    sides = (
        [text for (text, _), held in zip(texts, out, strict=True) if held == side]
        for side in (False, True)
    )
    learnt, held = sides
    count = sum(len(text.tokens) for text in (*learnt, *held))
    if count < LEAST or not learnt or not held:
        raise ConfigurationError(
            f"too little text to train on; got {count} tokens in {len(learnt)} pieces and "
            f"{len(held)} held out; give at least {LEAST} tokens in {SHARE} pieces, better some "
            "hundred thousand, or --prompts"
        )
    return learnt, held
