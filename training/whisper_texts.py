"""Sentences to be spoken: public domain or permissively licensed, in English, French, German.

| what | languages | licence |
|---|---|---|
| messages of Home Assistant (a wheel of PyPI's `homeassistant`) | en, fr, de | Apache-2.0 |
| World English Bible (Debian's `sword-text-web`) | en | public domain |
| examples of WordNet (Debian's `wordnet-base`) | en | WordNet 3.0 (permissive) |
| topics of Python's help (`pydoc_data`) | en | PSF-2.0 |
| menus, voice mail, numbers of `whisper_prompts` | en, fr, de | this project's |
"""

from __future__ import annotations

import argparse
import json
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from training.whisper_prompts import made_up

LANGUAGES = ("en", "fr", "de")

#: What a speech synthesiser reads otherwise than it is written, or not at all.
_UNSPEAKABLE = re.compile(r"[{}\[\]<>`*_/\\|#%=:@()\"“”„«»+~^]|--|\.\.|\d{5}|[A-Z]{5}")


class Sources(NamedTuple):
    """Where the packages were unpacked."""

    homeassistant: Path
    bible: Path
    wordnet: Path

    @classmethod
    def arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Ask for them on a command line."""
        parser.add_argument("--homeassistant", type=Path, required=True, help="the wheel")
        parser.add_argument("--bible", type=Path, required=True, help="unpacked sword-text-web")
        parser.add_argument("--wordnet", type=Path, required=True, help="unpacked wordnet-base")


def sentences(language: str, sources: Sources, seed: int = 0) -> list[str]:
    """All sentences of a language in a random order that `seed` decides, none of them twice."""
    texts = [*_messages(sources.homeassistant, language)]
    if language == "en":
        texts += topics.values()
    pieces = {piece for text in texts for piece in _pieces(text)}
    order = random.Random(seed)
    count = len(pieces)
    if language == "en":
        told = {_examples(sources.wordnet): 1.5, _verses(sources.bible): 1.0}
        for lines, share in told.items():
            more = sorted({piece for line in lines for piece in _pieces(line)} - pieces)
            pieces |= set(order.sample(more, min(len(more), int(share * count))))
    # Telephones say other things than messages do: as many again.
    made = {made_up(language, order) for _ in range(count)}
    found = sorted(pieces | made)
    order.shuffle(found)
    return found


def _pieces(text: str) -> Iterator[str]:
    """The sentences of a text that a voice can read, of 4 to 30 words."""
    for piece in re.split(r"(?<=[.!?]) +", re.sub(r"\s+", " ", text).strip()):
        if 4 <= len(piece.split()) <= 30 and not _UNSPEAKABLE.search(piece):
            yield piece


def _messages(wheel: Path, language: str) -> Iterator[str]:
    """Every string of the translations of a `homeassistant` wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(f"translations/{language}.json"):
                yield from _strings(json.loads(archive.read(name)))


def _strings(tree: object) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from _strings(branch)


def _examples(folder: Path) -> Iterator[str]:
    """The sentences in quotes of WordNet's glosses, with a capital and a full stop."""
    files = sorted(folder.rglob("data.*"))
    if not files:
        raise SystemExit(f"no data.* under {folder}; unpack Debian's wordnet-base there")
    for file in files:
        for line in file.read_text().splitlines():
            for example in re.findall(r'"([^"]+)"', line.partition(" | ")[2]):
                said = example[0].upper() + example[1:]
                yield said if said[-1] in ".!?" else f"{said}."


def _verses(folder: Path) -> Iterator[str]:
    """The books of a SWORD module in blocks (`.bzs`: where each is, `.bzz`: the blocks)."""
    places = sorted(folder.rglob("*.bzs"))
    if not places:
        raise SystemExit(f"no *.bzs under {folder}; unpack Debian's sword-text-web there")
    for place in places:
        packed = place.with_suffix(".bzz").read_bytes()
        for start, size, _ in struct.iter_unpack("<III", place.read_bytes()):
            marked = zlib.decompress(packed[start : start + size]).decode()
            marked = re.sub(r"<note.*?</note>|<title.*?</title>", "", marked)
            yield re.sub(r"<[^>]*>", "", marked)
