"""Text to copy from: captions, plain text, another recogniser's transcript, window by window."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from outrider import arguments
from outrider.errors import ConfigurationError
from outrider.speech.result import Transcript

#: A path, text (SubRip, WebVTT, JSON of a recogniser, or plain), or a transcript.
Reference: TypeAlias = "str | Path | Transcript | Mapping[str, Any]"

_TIME = r"(?:(\d+):)?(\d{1,2}):(\d{2})[.,](\d{1,3})"
_ARROW = re.compile(rf"{_TIME}\s*-->\s*{_TIME}")
_SUFFIXES = (".srt", ".vtt", ".txt", ".json", ".tsv")


class CaptionLine(NamedTuple):
    """Some text, and the seconds between which it is said, if they are known."""

    text: str
    start: float | None = None
    end: float | None = None


def read(given: Reference) -> list[CaptionLine]:
    """The lines of a reference, in order.

    A string is the name of a file if it ends like one and has no line break, else it is the text.

    Raises ConfigurationError for a file that cannot be read, and for what says nothing.
    """
    if isinstance(given, Transcript):
        lines = [CaptionLine(s.text, s.start, s.end) for s in given.segments]
    elif isinstance(given, Mapping):
        lines = _of_mapping(given)
    elif isinstance(given, (str, Path)):
        lines = _of_text(_text(given))
    else:
        do = "give captions as a path or as text, or a transcript"
        arguments.refuse("reference", "text, a path or a transcript", given, do)
    lines = [line for line in lines if line.text.strip()]
    if not lines:
        raise ConfigurationError(
            f"the reference says nothing; got {arguments.shown(given)}; leave it out"
        )
    return lines


def _text(given: str | Path) -> str:
    named = isinstance(given, Path) or (
        "\n" not in given and given.strip().lower().endswith(_SUFFIXES)
    )
    if not named:
        return str(given)
    try:
        return Path(given).read_text("utf-8-sig")
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the reference; got {str(given)!r} ({error.strerror}); check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"the reference {str(given)!r} is not valid UTF-8 at byte {error.start}; convert it "
            "first (for example with iconv)"
        ) from error


def _of_text(text: str) -> list[CaptionLine]:
    if text.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        if isinstance(document, Mapping):
            return _of_mapping(document)
    if _ARROW.search(text):
        return _captions(text)
    if text.startswith("start\tend\ttext"):
        rows = [row.split("\t", 2) for row in text.splitlines()[1:]]
        named = [dict(zip(("start", "end", "text"), row, strict=False)) for row in rows]
        return [
            line._replace(start=(line.start or 0) / 1e3, end=(line.end or 0) / 1e3)
            for line in _of_mapping({"segments": named})
        ]
    return [CaptionLine(line) for line in text.splitlines()]


def _of_mapping(document: Mapping[str, Any]) -> list[CaptionLine]:
    """What recognisers write: `segments` with start and end, `chunks` with a timestamp, a text."""
    lines = []
    try:
        for part in document.get("segments") or ():
            lines.append(CaptionLine(str(part["text"]), float(part["start"]), float(part["end"])))
        for part in () if lines else document.get("chunks") or ():
            start, end = part["timestamp"]
            lines.append(
                CaptionLine(str(part["text"]), float(start), None if end is None else float(end))
            )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"segments of the reference have text, start and end; got {arguments.shown(part)}; "
            "write them so, or give captions"
        ) from error
    if not lines and isinstance(document.get("text"), str):
        lines = [CaptionLine(line) for line in document["text"].splitlines()]
    return lines


def _captions(text: str) -> list[CaptionLine]:
    """The cues of SubRip and WebVTT: markup and numbers go."""
    lines: list[CaptionLine] = []
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        found = _ARROW.search(block)
        if found is None:
            continue
        start, end = _seconds(found.groups()[:4]), _seconds(found.groups()[4:])
        said = block[found.end() :].split("\n", 1)  # the arrow's line may have settings
        plain = html.unescape(re.sub(r"<[^>]*>|\{\\[^}]*\}", "", said[1] if said[1:] else ""))
        lines.append(CaptionLine(" ".join(plain.split()), start, end))
    return lines


def _seconds(parts: Sequence[str | None]) -> float:
    hours, minutes, seconds, rest = (part or "0" for part in parts)
    return 3600 * int(hours) + 60 * int(minutes) + int(seconds) + int(rest.ljust(3, "0")) / 1e3


def between(lines: Sequence[CaptionLine], start: float, end: float) -> str | None:
    """What timed lines say between two times; None for lines without times."""
    if any(line.start is None for line in lines):
        return None
    return " ".join(
        line.text.strip()
        for line in lines
        if line.start is not None and line.start < end and (line.end or line.start + 1) > start
    )
