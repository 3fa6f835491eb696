"""An n-gram table with a true law: interpolated Kneser-Ney, every distribution sums to one.

    python -m training.ngram --data corpus --out ngram.safetensors

A drafter that costs a table look-up. Unlike "the most frequent follower" it says with what
probability it drew a token, so exact rules for sampled drafts can judge it.

The file holds for each order `n` two sorted arrays: `keys_n` (a context of `n - 1` tokens and a
follower, packed into one integer) and `counts_n`. Below the highest order a count is the number
of different tokens seen in front, not of occurrences: a word that follows everything is a better
guess after an unknown context than one that is frequent in a single place.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from training.tokens import read_tokens

DISCOUNT = 0.75  # taken from every count and given to the lower order


@dataclass(frozen=True)
class NgramTable:
    """`keys[n]`, `counts[n]` for `n` tokens (follower included); `bits` per token in a key."""

    keys: dict[int, np.ndarray]
    counts: dict[int, np.ndarray]
    vocabulary: int

    @property
    def bits(self) -> int:
        return int(self.vocabulary - 1).bit_length()

    @property
    def order(self) -> int:
        return max(self.keys)

    def law(self, context: list[int]) -> np.ndarray:
        """The next-token law after `context`, `[vocabulary]` in float64."""
        law = np.full(self.vocabulary, 1 / self.vocabulary)
        for n in range(1, min(self.order, len(context) + 1) + 1):
            start = pack(np.array(context[len(context) - n + 1 :], dtype=np.int64), self.bits)
            first, end = np.searchsorted(
                self.keys[n], [start << self.bits, (start + 1) << self.bits]
            )
            if first == end:
                continue  # pruned, or never seen; a longer context may have been kept all the same
            followers = self.keys[n][first:end] & ((1 << self.bits) - 1)
            counts = self.counts[n][first:end].astype(np.float64)
            total = counts.sum()
            law *= DISCOUNT * len(followers) / total
            law[followers] += (counts - DISCOUNT) / total
        return law

    def save(self, file: Path) -> None:
        arrays = {f"keys_{n}": k for n, k in self.keys.items()}
        arrays |= {f"counts_{n}": c for n, c in self.counts.items()}
        save_file(arrays, file, metadata={"vocabulary": str(self.vocabulary)})

    @staticmethod
    def load(file: Path, vocabulary: int) -> NgramTable:
        arrays = load_file(file)
        orders = sorted(int(name.removeprefix("keys_")) for name in arrays if "keys" in name)
        return NgramTable(
            {n: arrays[f"keys_{n}"] for n in orders},
            {n: arrays[f"counts_{n}"] for n in orders},
            vocabulary,
        )


def pack(tokens: np.ndarray, bits: int) -> int:
    """Tokens as the digits of one number, the oldest first."""
    key = 0
    for token in tokens:
        key = key << bits | int(token)
    return key


def count_ngrams(
    tokens: np.ndarray, vocabulary: int, order: int = 4, at_least: int = 2
) -> NgramTable:
    """Count a corpus; of two tokens and more, those rarer than `at_least` are dropped."""
    bits = int(vocabulary - 1).bit_length()
    if order * bits > 62:
        raise ValueError(
            f"{order} tokens of {bits} bits do not fit into one key; use order <= {62 // bits}"
        )
    tokens = tokens.astype(np.int64)
    size = len(tokens) - order + 1
    packed = np.zeros(size, dtype=np.int64)
    for place in range(order):
        packed = packed << bits | tokens[place : place + size]
    keys, counts = {}, {}
    keys[order], counts[order] = np.unique(packed, return_counts=True)
    for n in range(order - 1, 0, -1):
        # Each longer n-gram counts once for its last n tokens: distinct tokens in front.
        keys[n], counts[n] = np.unique(keys[n + 1] & ((1 << bits * n) - 1), return_counts=True)
    for n in range(2, order + 1):
        often = counts[n] >= at_least
        keys[n], counts[n] = keys[n][often], counts[n][often]
    # Two bytes are enough: beyond 65,535 only the order of the commonest tokens would change.
    small = {n: c.clip(max=np.iinfo(np.uint16).max).astype(np.uint16) for n, c in counts.items()}
    return NgramTable(keys, small, vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.bin")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--order", type=int, default=4, help="longest n-gram, follower included")
    parser.add_argument("--at-least", type=int, default=4, help="prune rarer n-grams (n >= 2)")
    args = parser.parse_args()
    table = count_ngrams(
        np.asarray(read_tokens(args.data / "train.bin")), args.vocabulary, args.order, args.at_least
    )
    table.save(args.out)
    entries = {n: len(k) for n, k in table.keys.items()}
    print(f"n-grams kept: {entries}; {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
