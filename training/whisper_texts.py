"""Sentences to be spoken: public domain or permissively licensed, in English, French, German.

| what | languages | licence |
|---|---|---|
| messages of Home Assistant (a wheel of PyPI's `homeassistant`) | en, fr, de | Apache-2.0 |
| World English Bible (Debian's `sword-text-web`) | en | public domain |
| topics of Python's help (`pydoc_data`) | en | PSF-2.0 |
| sentences with numbers, below | en, fr, de | this project's |
"""

from __future__ import annotations

import json
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

LANGUAGES = ("en", "fr", "de")

#: What a speech synthesiser reads otherwise than it is written, or not at all.
_UNSPEAKABLE = re.compile(r"[{}\[\]<>`*_/\\|#%=:@()\"“”„«»+~^]|--|\.\.|\d{5}|[A-Z]{5}")

_NUMBERED = {
    "en": [
        "Dial {a} {b} {c} to hear the news again.",
        "The train to London leaves at {d} fifteen from platform {a}.",
        "There are {d} people waiting before you, and it will take about {e} minutes.",
        "My telephone number is {a} {b} {c}, {c} {a} {b}.",
        "That is {d} point {a}, which is less than {e}.",
        "If this is not what you wanted, choose {a}, or stay on the line for help.",
        "Between {e} and {d} they sold {f} of them.",
    ],
    "fr": [
        "Composez le {a} {b} {c} pour écouter les nouvelles une seconde fois.",
        "Le train de Lyon part à {d} heures quinze, voie {a}.",
        "Il y a {d} personnes avant vous, ce qui prendra environ {e} minutes.",
        "Mon numéro de téléphone est le {a} {b} {c}, {c} {a} {b}.",
        "Cela fait {d} virgule {a}, ce qui est moins que {e}.",
        "Si ce n'est pas votre choix, faites le {a}, ou restez en ligne pour parler à quelqu'un.",
        "Entre {e} et {d}, ils en ont vendu {f}.",
    ],
    "de": [
        "Wählen Sie {a} {b} {c}, um die Nachrichten noch einmal zu hören.",
        "Der Zug nach Hamburg fährt um {d} Uhr fünfzehn von Gleis {a}.",
        "Vor Ihnen warten {d} Leute, das dauert etwa {e} Minuten.",
        "Meine Telefonnummer ist {a} {b} {c}, {c} {a} {b}.",
        "Das sind {d} Komma {a}, also weniger als {e}.",
        "Wenn Sie etwas anderes wollten, nehmen Sie die {a}, oder bleiben Sie am Apparat.",
        "Zwischen {e} und {d} haben sie {f} davon verkauft.",
    ],
}


def sentences(language: str, homeassistant: Path, bible: Path, seed: int = 0) -> list[str]:
    """All sentences of a language in a random order that `seed` decides, none of them twice."""
    texts = [*_messages(homeassistant, language)]
    if language == "en":
        texts += topics.values()
    pieces = {piece for text in texts for piece in _pieces(text)}
    order = random.Random(seed)
    if language == "en":
        verses = sorted({piece for book in _verses(bible) for piece in _pieces(book)} - pieces)
        pieces |= set(order.sample(verses, min(len(verses), len(pieces))))
    # As many with numbers as a tenth of the rest: people say numbers, messages seldom do.
    numbered = [_numbered(language, order) for _ in range(len(pieces) // 10)]
    found = sorted(pieces | set(numbered))
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


def _numbered(language: str, order: random.Random) -> str:
    numbers = {name: order.randint(0, 9) for name in "abc"}
    numbers |= {"d": order.randint(2, 24), "e": order.randint(10, 99), "f": order.randint(100, 999)}
    return order.choice(_NUMBERED[language]).format(**numbers)
