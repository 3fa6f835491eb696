"""Text to copy from: captions, plain text, another recogniser's transcript, window by window."""

import difflib
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
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


def is_name(given: str) -> bool:
    """Whether a text is the name of a file.

    >>> is_name("talk.srt"), is_name("what was said")
    (True, False)
    """
    return "\n" not in given and given.strip().lower().endswith(_SUFFIXES)


def _text(given: str | Path) -> str:
    if isinstance(given, str) and not is_name(given):
        return given
    try:
        return Path(arguments.at_home(given)).read_text("utf-8-sig")
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


# A reference as tokens to copy from, for each window: by its times, or by what was said so far.

_AHEAD = 250  #: words of a window at most
_SLACK = 30  #: words of doubt about where a window begins


class ReferenceAligner:
    """One recording's reference.

    Lines with times give what is said in a window. Without times the text is followed: behind
    what was copied last where windows come one after another, else about where the window's share
    of the recording is.
    """

    def __init__(
        self, lines: Sequence[CaptionLine], encode: Callable[[str], list[int]], seconds: float
    ) -> None:
        self._lines, self._encode, self._seconds = lines, encode, seconds
        self._words = " ".join(line.text for line in lines).split()
        self._at = 0

    def tokens(self, start: float, end: float, following: bool) -> list[int]:
        """What a window between two times may copy; `following` windows come in order."""
        said = between(self._lines, start, end)
        if said is None:
            first = self._at
            if not following:
                share = len(self._words) / self._seconds
                first = max(int(start * share) - _SLACK, 0)
            said = " ".join(self._words[first : first + _AHEAD])
        said = " ".join(said.split())
        return self._encode(f" {said}") if said else []

    def follow(self, text: str) -> None:
        """This was said: the next window is looked for behind it."""
        heard = [_plain(word) for word in text.split()]
        near = [_plain(word) for word in self._words[self._at : self._at + 2 * len(heard) + _SLACK]]
        blocks = difflib.SequenceMatcher(None, near, heard, autojunk=False).get_matching_blocks()
        found = [block for block in blocks if block.size]
        if found:
            last = found[-1]
            rest = len(heard) - (last.b + last.size)  # what was said behind the last match
            self._at = min(self._at + last.a + last.size + rest, len(self._words))


def _plain(word: str) -> str:
    return re.sub(r"\W", "", word.lower())
