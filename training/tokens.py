"""Turn documents into one long array of token numbers, and cut batches from it.

    python -m training.tokens --corpus corpus --tokenizer tokenizer.json

Every document begins with `<|endoftext|>`; the arrays are `uint16` files beside the corpus:
`train.bin`, `heldout.bin`, `library.bin` (the part of `train.bin` from standard libraries), and the
numbers of the tokens that hold a newline, `newlines.bin`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.sources import LIBRARY


def read_documents(file: Path) -> list[dict[str, str]]:
    """The rows of a JSON-lines file."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def encode(texts: list[str], tokenizer_file: Path) -> np.ndarray:
    """All documents in a row, each after an end-of-text token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    start = tokenizer.token_to_id("<|endoftext|>")
    if start is None:
        raise SystemExit(f"{tokenizer_file} has no <|endoftext|>; make it with training.tokenizer")
    rows = (np.array([start, *e.ids], dtype=np.uint16) for e in tokenizer.encode_batch(texts))
    return np.concatenate(list(rows))


def newlines(tokenizer_file: Path) -> np.ndarray:
    """The tokens that hold a newline."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    size = tokenizer.get_vocab_size()
    held = [n for n in range(size) if "\n" in tokenizer.decode([n], skip_special_tokens=False)]
    return np.array(held, dtype=np.uint16)


@dataclass(frozen=True)
class Windows:
    """Fixed windows of the training array in a shuffled order that depends on the seed alone.

    Window `n` of a run is the same whatever the number of processes or restarts, so a run that
    is stopped and resumed sees what an uninterrupted one sees. A new epoch is shuffled anew
    and cut at another offset, so that no boundary is always the same.
    """

    tokens: np.ndarray
    length: int
    seed: int

    @property
    def per_epoch(self) -> int:
        # One window is given up to leave room for the offset.
        count = (len(self.tokens) - 1) // self.length - 1
        if count < 1:
            raise SystemExit(
                f"{len(self.tokens)} tokens hold no two windows of {self.length}; "
                "read more files or shorten --context"
            )
        return count

    def __getitem__(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self.per_epoch)
        start = self._starts(epoch)[place]
        return self.tokens[start : start + self.length + 1]

    def _starts(self, epoch: int) -> np.ndarray:
        cached = getattr(self, "_cache", (None, None))
        if cached[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            offset = rng.integers(self.length)
            cached = (epoch, rng.permutation(self.per_epoch) * self.length + offset)
            object.__setattr__(self, "_cache", cached)
        return cached[1]

    def batch(self, numbers: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each `[len(numbers), length]`."""
        rows = torch.from_numpy(np.stack([self[n] for n in numbers]).astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@dataclass(frozen=True)
class Mixture:
    """Windows of the whole corpus, and in place of some of them windows of the library alone."""

    corpus: Windows
    library: Windows

    def batch(self, numbers: Iterable[int], share: float) -> tuple[Tensor, Tensor]:
        """As `Windows.batch`; `share` of the windows are the library's, and come last."""
        numbers = list(numbers)
        # Multiples of the golden ratio fall evenly: every batch has about the same share.
        own = [n for n in numbers if n * 0.618034 % 1 < share]
        rest = [n for n in numbers if n not in own]
        parts = [part.batch(n) for part, n in ((self.corpus, rest), (self.library, own)) if n]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def read_mixture(folder: Path, length: int, seed: int) -> Mixture:
    """The windows of a corpus folder's `train.bin` and `library.bin`."""
    corpus, library = (read_tokens(folder / f"{name}.bin") for name in ("train", "library"))
    return Mixture(Windows(corpus, length, seed), Windows(library, length, seed))


def read_tokens(file: Path) -> np.ndarray:
    """The array of a token file, mapped, not loaded."""
    if not file.is_file():
        raise SystemExit(f"no {file}; write it with training.tokens")
    return np.memmap(file, dtype=np.uint16, mode="r")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    args = parser.parse_args()
    if not args.tokenizer.is_file():
        raise SystemExit(f"no tokenizer at {args.tokenizer}; make one with training.tokenizer")
    rows = {name: read_documents(args.corpus / f"{name}.jsonl") for name in ("train", "heldout")}
    rows["library"] = [row for row in rows["train"] if row["name"].startswith(LIBRARY)]
    for name, documents in rows.items():
        if not documents:
            raise SystemExit(f"{args.corpus} has no {name} documents; build the corpus again")
        texts = [row["text"] for row in documents]
        tokens = encode(texts, args.tokenizer)
        tokens.tofile(args.corpus / f"{name}.bin")
        size = sum(len(text.encode()) for text in texts)
        print(f"{name}: {len(tokens):,} tokens, {size / len(tokens):.3f} bytes per token")
    newlines(args.tokenizer).tofile(args.corpus / "newlines.bin")


if __name__ == "__main__":
    main()
