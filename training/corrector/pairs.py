"""Pairs of damaged and whole code, cut from documents, and batches of them.

Pair `n` of a seed is always the same pair, so a run that is stopped and goes on sees what an
uninterrupted one sees.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.corrector.damage import damage
from training.tokens import read_documents

CHARACTERS_PER_TOKEN = 3.0
FEWEST, MOST = 16, 240  # tokens of a window, about
LEAST_TOKENS, MOST_TOKENS = 4, 272  # what is left out beyond


class Pair(NamedTuple):
    """What was typed and what was meant."""

    damaged: str
    whole: str


class Batch(NamedTuple):
    """Token ids, padded: what the encoder reads, what the decoder reads, what it should say."""

    sources_BS: Tensor
    inputs_BT: Tensor
    targets_BT: Tensor  # -100 where nothing is asked


@dataclass(frozen=True)
class Pairs:
    """An endless row of pairs from these documents.

    `identity` of them are not damaged; the others once or more often: about once in so many
    characters, drawn for each between the two `characters`, small numbers more often: copying is
    learnt from anything, correcting from damages alone.
    """

    texts: list[str]
    seed: int
    identity: float = 0.1
    characters: tuple[float, float] = (12, 300)
    _ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", list(itertools.accumulate(map(len, self.texts))))

    def __getitem__(self, number: int) -> Pair:
        rng = random.Random(f"{self.seed} {number}")
        whole = ""
        while not whole.strip():
            whole = self._window(rng)
        if rng.random() < self.identity:
            return Pair(whole, whole)
        fewest, most = map(math.log, self.characters)
        times = 1 + int(len(whole) / math.exp(rng.uniform(fewest, most)))
        return Pair(damage(whole, times, rng), whole)

    def _window(self, rng: random.Random) -> str:
        """Whole lines from a line that is not empty, of `FEWEST` to `MOST` tokens or so."""
        place = rng.randrange(self._ends[-1])
        text = self.texts[bisect.bisect_right(self._ends, place)]
        start = text.rfind("\n", 0, rng.randrange(len(text))) + 1
        size = int(CHARACTERS_PER_TOKEN * rng.uniform(FEWEST, MOST))
        lines = text[start : start + size].split("\n")
        # The last line is cut off somewhere unless the text ends there.
        kept = lines if start + size >= len(text) or len(lines) < 2 else lines[:-1]
        # A file ends with a newline, a piece of one need not.
        return "\n".join(kept).strip("\n") + "\n" * (rng.random() < 0.3)


def read_texts(folder: Path, split: str) -> list[str]:
    """The documents of a corpus folder (`train` or `heldout`)."""
    return [row["text"] for row in read_documents(folder / f"{split}.jsonl")]


@dataclass(frozen=True)
class Batches:
    """Batches of about `size` target tokens, of pairs of like length."""

    pairs: Pairs
    tokenizer: Tokenizer
    size: int
    pool: int = 1024  # pairs that are sorted by length together

    @property
    def end(self) -> int:
        return int(self.tokenizer.token_to_id("<|endoftext|>"))

    @property
    def pad(self) -> int:
        return int(self.tokenizer.token_to_id("<|pad|>"))

    def of_pool(self, number: int) -> list[Batch]:
        """All batches of the `number`-th pool, in an order that its number decides."""
        first = number * self.pool
        pairs = [self.pairs[n] for n in range(first, first + self.pool)]
        sources, targets = zip(*pairs, strict=True)
        # A source begins with the document mark, as the tokenizer puts it; so does the decoder.
        read = self.tokenizer.encode_batch(list(sources))
        meant = self.tokenizer.encode_batch(list(targets), add_special_tokens=False)
        rows = [
            (source, target)
            for source, target in zip(
                *([e.ids for e in side] for side in (read, meant)), strict=True
            )
            if LEAST_TOKENS <= len(target) and max(len(source), len(target)) <= MOST_TOKENS
        ]
        rows.sort(key=lambda row: (max(map(len, row)), row))
        batches, start = [], 0
        while start < len(rows):
            # Pairs are sorted, so the last one of a batch is its longest.
            end = start + 1
            while end < len(rows) and (end + 1 - start) * max(map(len, rows[end])) <= self.size:
                end += 1
            batches.append(self.of_rows(rows[start:end]))
            start = end
        random.Random(f"{self.pairs.seed} order {number}").shuffle(batches)
        return batches

    def of_rows(self, rows: list[tuple[list[int], list[int]]]) -> Batch:
        """The decoder begins with the document mark, and ends with it."""
        sources, targets = zip(*rows, strict=True)
        return Batch(
            _padded(list(sources), self.pad),
            _padded([[self.end, *ids] for ids in targets], self.pad),
            _padded([[*ids, self.end] for ids in targets], -100),
        )


def _padded(rows: list[list[int]], value: int) -> Tensor:
    # Lengths are rounded up: few shapes, and rows of whole vector registers.
    width = -(-max(map(len, rows)) // 16) * 16
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])
