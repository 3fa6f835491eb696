"""Folders of recordings with transcripts, for word error rates."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import AudioError

KINDS = (".wav", ".flac", ".ogg", ".mp3", ".m4a")


@dataclass(frozen=True)
class SpokenText:
    """A recording and what is said in it."""

    file: Path
    text: str


def read_folder(folder: Path) -> list[SpokenText]:
    """The recordings of a folder (and those below it) that have a transcript, by name.

    A transcript is a text file beside a recording, `talk.txt` for `talk.wav`, or a line of a file
    `*.trans.txt`, as LibriSpeech has them: a recording's name without suffix, a space, its text.

    Raises AudioError if there is none.
    """
    if not folder.is_dir():
        raise AudioError(f"no folder of recordings; got {str(folder)!r}; give one that exists")
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in KINDS)
    lists = {path: dict(_lines(path)) for path in sorted(folder.rglob("*.trans.txt"))}
    found = []
    for file in files:
        beside = file.with_suffix(".txt")
        if beside.is_file():
            text = beside.read_text(encoding="utf-8-sig")
        else:
            near = (lines for path, lines in lists.items() if path.parent == file.parent)
            text = next((lines[file.stem] for lines in near if file.stem in lines), "")
        if text.strip():
            found.append(SpokenText(file, " ".join(text.split())))
    if not found:
        raise AudioError(
            f"no recording with a transcript; got {len(files)} recordings in {str(folder)!r}; put "
            "talk.txt beside talk.wav, or a line into a *.trans.txt as in LibriSpeech"
        )
    return found


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text(encoding="utf-8-sig").splitlines():
        name, _, text = line.strip().partition(" ")
        yield name, text
