"""Transcripts as files: plain text, captions (SubRip, WebVTT), tab-separated values, JSON.

The same transcript gives the same bytes: no times of day, no statistics, lines end in one newline.
"""

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from outrider.errors import UnknownName

if TYPE_CHECKING:
    from outrider.speech.result import Segment, Transcript

TIMES = ("none", "segment", "word")  #: that transcripts may have


class Cue(NamedTuple):
    """One caption."""

    start: float
    end: float
    text: str


def written(transcript: "Transcript", kind: str) -> str:
    """The transcript in a format of `FORMATS`. Raises UnknownName for another."""
    if kind not in FORMATS:
        raise UnknownName("format", kind, FORMATS)
    return FORMATS[kind](transcript)


def clock(seconds: float, mark: str) -> str:
    """Hours, minutes and seconds with three places behind `mark`.

    >>> clock(3661.5, ",")
    '01:01:01,500'
    """
    thousandths = max(round(seconds * 1000), 0)
    whole, rest = divmod(thousandths, 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02d}:{minute:02d}:{second:02d}{mark}{rest:03d}"


def cues(transcript: "Transcript") -> Iterator[Cue]:
    """A caption for each segment that says something, or for each of its words with times.

    A model may tell times behind the recording's end, and the last word of a window may last into
    the next window: on a screen a caption ends with the recording, and where the next one begins.
    """
    last = None
    for cue in _said(transcript.segments):
        if last is not None:
            yield _until(last, cue.start)
        last = cue
    if last is not None:
        yield _until(last, transcript.duration)


def _until(cue: Cue, end: float) -> Cue:
    return cue._replace(end=min(cue.end, end)) if cue.start < end else cue


def _said(segments: "tuple[Segment, ...]") -> Iterator[Cue]:
    for segment in segments:
        if segment.words is None:
            text = " ".join(segment.text.split())
            if text:
                yield Cue(segment.start, segment.end, text)
            continue
        for word in segment.words:
            if word.word.strip():
                yield Cue(word.start, word.end, word.word.strip())


def _txt(transcript: "Transcript") -> str:
    lines = [segment.text.strip() for segment in transcript.segments]
    return "".join(f"{line}\n" for line in lines if line)


def _srt(transcript: "Transcript") -> str:
    return "".join(
        f"{number}\n{clock(cue.start, ',')} --> {clock(cue.end, ',')}\n"
        f"{cue.text.replace('-->', '->')}\n\n"
        for number, cue in enumerate(cues(transcript), 1)
    )


def _vtt(transcript: "Transcript") -> str:
    return "WEBVTT\n\n" + "".join(
        f"{clock(cue.start, '.')} --> {clock(cue.end, '.')}\n{_escaped(cue.text)}\n\n"
        for cue in cues(transcript)
    )


def _escaped(text: str) -> str:
    for mark, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(mark, name)
    return text


def _tsv(transcript: "Transcript") -> str:
    return "start\tend\ttext\n" + "".join(
        f"{round(1000 * cue.start)}\t{round(1000 * cue.end)}\t{cue.text}\n"
        for cue in cues(transcript)
    )


def _json(transcript: "Transcript") -> str:
    document = {
        "text": transcript.text,
        "language": transcript.language,
        "duration": round(transcript.duration, 3),
        "segments": [_segment(at, each) for at, each in enumerate(transcript.segments)],
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def _segment(number: int, segment: "Segment") -> dict[str, object]:
    row: dict[str, object] = {
        "id": number,
        "window": segment.window,
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": round(segment.avg_logprob, 4),
        "compression_ratio": round(segment.compression_ratio, 4),
        "no_speech_prob": round(segment.no_speech_prob, 4),
    }
    if segment.words is not None:
        row["words"] = [
            {
                "word": word.word,
                "start": round(word.start, 3),
                "end": round(word.end, 3),
                "probability": round(word.probability, 4),
            }
            for word in segment.words
        ]
    return row


FORMATS: "dict[str, Callable[[Transcript], str]]" = {
    "txt": _txt,
    "srt": _srt,
    "vtt": _vtt,
    "tsv": _tsv,
    "json": _json,
}
