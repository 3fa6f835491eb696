"""Build the corpus: deduplicated Python source with licences, and the modules held out of it.

    python -m training.corpus --out corpus --python ~/.pyenv/versions/3.11.7 ...

Writes `train.jsonl` and `heldout.jsonl` (`{"name", "text"}` per line) and `manifest.jsonl`
(path, package, licence, SHA-256 of the file, characters kept).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator
from itertools import chain, groupby, islice
from pathlib import Path

from training.filters import is_worth_learning, tidy
from training.heldout import is_held_out
from training.sources import Source, installed_packages, standard_libraries

# A block starts at column 0, or at a method of a top-level class.
BLOCK = re.compile(r"(@|[A-Za-z_])|    (@|def |async def |class )")
SHORTEST_BLOCK = 200  # characters; shorter repeats carry no information and cost no harm
SHORTEST_DOCUMENT = 600


def blocks(text: str) -> list[str]:
    """Cut at definitions and top-level statements; a decorator stays with what it decorates."""
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        current = found[-1]
        if current and BLOCK.match(line) and not current[-1].lstrip().startswith("@"):
            found.append([])
        found[-1].append(line)
    return ["\n".join(block) for block in found]


def fingerprint(block: str) -> bytes:
    """Equal for blocks that differ in white space only."""
    return hashlib.md5(" ".join(block.split()).encode(), usedforsecurity=False).digest()


class Corpus:
    """Collects documents; what was seen once is not taken again."""

    def __init__(self) -> None:
        self.train: list[dict[str, str]] = []
        self.heldout: list[dict[str, str]] = []
        self.manifest: list[dict[str, object]] = []
        self._seen: set[bytes] = set()
        self._paths: set[str] = set()
        self._first_package: str | None = None
        self._heldout_marks: frozenset[bytes] = frozenset()

    def shield(self, source: Source, text: str) -> None:
        """Mark the blocks of a held-out file as seen, so that no copy elsewhere is trained on."""
        self._seen.update(fingerprint(b) for b in blocks(text) if len(b) > SHORTEST_BLOCK)
        # One version is enough to measure on; the first one listed is the one we keep.
        self._first_package = self._first_package or source.package
        if source.package == self._first_package:
            self.heldout.append({"name": f"{source.package}/{source.path}", "text": text})
            self._note(source, text, "heldout", len(text))

    def add(self, source: Source, text: str) -> None:
        """Take a new file whole, or of a known one only the blocks that are new."""
        parts = [(block, fingerprint(block)) for block in blocks(text)]
        known_path = source.path in self._paths
        self._paths.add(source.path)
        fresh = sum(len(block) for block, mark in parts if mark not in self._seen)
        shielded = fresh < len(text)
        whole = not known_path and fresh > 0.5 * len(text)
        kept = text
        if not whole or (shielded and self._hides_heldout(parts)):
            kept = "\n".join(
                block
                for block, mark in parts
                if len(block) > SHORTEST_BLOCK and mark not in self._seen
            )
        self._seen.update(mark for _, mark in parts)
        if kept is text or len(kept) > SHORTEST_DOCUMENT:
            self.train.append({"name": f"{source.package}/{source.path}", "text": kept})
            self._note(source, text, "train", len(kept))

    def freeze_heldout(self) -> None:
        """Remember which fingerprints belong to held-out files, before training files come."""
        self._heldout_marks = frozenset(self._seen)

    def _hides_heldout(self, parts: list[tuple[str, bytes]]) -> bool:
        return any(mark in self._heldout_marks for _, mark in parts)

    def _note(self, source: Source, text: str, split: str, kept: int) -> None:
        digest = hashlib.sha256(source.file.read_bytes()).hexdigest()
        self.manifest.append(
            {
                "package": source.package,
                "path": source.path,
                "licence": source.licence,
                "sha256": digest,
                "split": split,
                "characters": len(text),
                "kept": kept,
            }
        )


def readable(sources: Iterator[Source]) -> Iterator[tuple[Source, str]]:
    """The files that decode and pass the filters, tidied."""
    for source in sources:
        try:
            text = tidy(source.file.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, OSError):
            continue
        if is_worth_learning(source.path, text):
            yield source, text


def capped(sources: Iterator[Source], most: int) -> Iterator[Source]:
    """At most so many bytes of each package, files in an order that only their paths decide.

    Without a cap the two largest packages would be two thirds of everything.
    """
    for _, group in groupby(sources, key=lambda source: source.package):
        taken = 0
        for source in sorted(group, key=lambda s: fingerprint(s.path)):
            taken += source.file.stat().st_size
            if taken <= most:
                yield source


def build(sources: Iterator[Source], seed: int = 0) -> Corpus:
    """Held-out files first (all versions), then the rest in the order of the sources."""
    corpus = Corpus()
    later = []
    for source, text in readable(sources):
        if is_held_out(source.path):
            corpus.shield(source, text)
        else:
            later.append((source, text))
    corpus.freeze_heldout()
    for source, text in later:
        corpus.add(source, text)
    random.Random(seed).shuffle(corpus.train)
    return corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--python", type=Path, nargs="*", help="installation roots, most important first"
    )
    parser.add_argument(
        "--packages",
        type=Path,
        nargs="*",
        help="add permissive packages: of these folders, or without one of this environment",
    )
    parser.add_argument("--cap", type=float, default=3.0, help="most MB of any one package")
    parser.add_argument("--limit", type=int, help="read only this many files (smoke test)")
    args = parser.parse_args()
    sources: Iterator[Source] = standard_libraries(args.python or [Path(sys.base_prefix)])
    if args.packages is not None:
        folders: list[Path | None] = [*args.packages] or [None]
        found = chain.from_iterable(installed_packages(folder) for folder in folders)
        sources = chain(sources, capped(found, int(args.cap * 1e6)))
    corpus = build(islice(sources, args.limit))
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("train", "heldout", "manifest"):
        rows = getattr(corpus, name)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (args.out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    for name in ("train", "heldout"):
        rows = getattr(corpus, name)
        size = sum(len(row["text"].encode()) for row in rows) / 1e6
        print(f"{name}: {len(rows)} documents, {size:.2f} MB")


if __name__ == "__main__":
    main()
