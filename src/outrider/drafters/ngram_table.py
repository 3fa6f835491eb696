"""An n-gram table with a true law as a draft model: Leviathan et al. 2023, section 3.6.

Interpolated Kneser-Ney of orders 1..n: the law after a context is

    q_n(v) = (count_n(v) - d)+ / total_n + d distinct_n / total_n q_{n-1}(v),   q_0 = 1 / V

so it is positive everywhere and says with what probability a token was drawn. Order 1 is a unigram
model, order 2 a bigram model with back-off. Costs look-ups, no model; a chain is drawn from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider import arguments, ops
from outrider.drafters import recipes, tree_drafting
from outrider.drafters.memory import Forgetful, NoMemory
from outrider.drafters.tree_drafting import Children, DrawKeys, TreeBuilder, TreeLevel, shapes
from outrider.errors import ConfigurationError, VocabularyMismatch
from outrider.models import tensor_file
from outrider.tree import numbers, parents_of
from outrider.types import Context, Draft, DraftShape, DrawKind, Laws, Output

DISCOUNT = 0.75


@dataclass(frozen=True, eq=False)
class Table:
    """Counts by order: sorted keys of `n` tokens packed into one integer (the last one follows).

    >>> table = count([1, 2, 1, 2, 1, 3], 4, order=2)
    >>> table.probs(torch.tensor([[1]])).argmax().item()
    2
    """

    keys: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]
    sums: tuple[Tensor, ...]  #: counts summed up to each key, a zero in front
    most: tuple[int, ...]  #: most followers of one context: host constants
    vocab_size: int

    @property
    def order(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.keys)

    @property
    def bits(self) -> int:
        """Bits of one token in a key."""
        return int(self.vocab_size - 1).bit_length()

    def probs(self, context_BC: Tensor) -> Tensor:
        """[B, V] float32: the law after each row's last tokens (-1: no token there)."""
        table = _placed(self, context_BC.device)
        rows, device = context_BC.shape[0], context_BC.device
        law = torch.full(
            (rows, self.vocab_size), 1.0 / self.vocab_size, dtype=torch.float64, device=device
        )
        there = torch.ones(rows, dtype=torch.bool, device=device)
        prefix = torch.zeros(rows, dtype=torch.int64, device=device)
        for n in range(1, min(self.order, context_BC.shape[1] + 1) + 1):
            if n > 1:
                token = context_BC[:, -(n - 1)]
                there = there & (token >= 0)
                prefix = prefix | (token.clamp(min=0) << (self.bits * (n - 2)))
            if not table.most[n - 1]:
                continue  # pruned to nothing
            keys, counts, sums = table.keys[n - 1], table.counts[n - 1], table.sums[n - 1]
            first = torch.searchsorted(keys, prefix << self.bits)
            last = torch.searchsorted(keys, (prefix + 1) << self.bits)
            # Of a pruned table a longer context may be kept where a shorter one is not.
            known = there & (last > first)
            total = torch.where(known, sums[last] - sums[first], 1)
            lower = torch.where(known, DISCOUNT * (last - first) / total, 1.0)
            at = first[:, None] + numbers(self.most[n - 1], device)
            inside = (at < last[:, None]) & known[:, None]
            at = at.clamp(max=len(keys) - 1)
            share = torch.where(inside, (counts[at].double() - DISCOUNT) / total[:, None], 0.0)
            follower = keys[at] & ((1 << self.bits) - 1)
            law = (law * lower[:, None]).scatter_add(1, follower, share)
        return law.float()


@lru_cache(maxsize=8)
def _placed(table: Table, device: torch.device) -> Table:
    if table.keys[0].device == device:
        return table
    keys, counts, sums = (
        tuple(t.to(device) for t in ts) for ts in (table.keys, table.counts, table.sums)
    )
    return Table(keys, counts, sums, table.most, table.vocab_size)


def count(tokens: Sequence[int] | Tensor, vocab_size: int, order: int = 3) -> Table:
    """Count a text. Below the highest order a count is the number of different tokens in front."""
    bits = int(vocab_size - 1).bit_length()
    if order < 1 or order * bits > 62:
        raise ConfigurationError(
            f"n-grams of {order} tokens of {bits} bits do not fit into a key; "
            f"use an order from 1 to {62 // bits}"
        )
    text = torch.as_tensor(tokens, dtype=torch.int64, device="cpu")
    if text.dim() != 1 or len(text) < order:
        raise ConfigurationError(
            f"a count needs one row of at least {order} tokens; got shape {tuple(text.shape)}; "
            "join texts into one"
        )
    least, most = int(text.min()), int(text.max())
    if least < 0 or most >= vocab_size:
        raise ConfigurationError(
            f"the text has tokens from {least} to {most}, outside a vocabulary of {vocab_size}; "
            "give vocab_size as the model has it"
        )
    packed = torch.zeros(len(text) - order + 1, dtype=torch.int64, device="cpu")
    for place in range(order):
        packed = packed << bits | text[place : place + len(packed)]
    found = [torch.unique(packed, return_counts=True)]
    for n in range(order - 1, 0, -1):
        found.insert(0, torch.unique(found[0][0] & ((1 << bits * n) - 1), return_counts=True))
    return table_of([k for k, _ in found], [c for _, c in found], vocab_size)


def table_of(keys: Sequence[Tensor], counts: Sequence[Tensor], vocab_size: int) -> Table:
    """A table from sorted keys and their counts, orders from 1 on."""
    bits = int(vocab_size - 1).bit_length()
    return Table(
        tuple(keys),
        tuple(counts),
        tuple(torch.nn.functional.pad(c.cumsum(0), (1, 0)) for c in counts),
        tuple(
            max(torch.unique(k >> bits, return_counts=True)[1].tolist(), default=0) for k in keys
        ),
        vocab_size,
    )


@dataclass(frozen=True)
class NgramTable(shapes.Chains, Forgetful):
    """A chain drawn from an n-gram table, token by token.

    `vocab_size` is the target's number of outputs if it has more than the table knows tokens
    (padding): those are never drafted.
    """

    table: Table
    num_speculative_tokens: int = 4
    vocab_size: int | None = None
    name: ClassVar[str] = "ngram_table"
    draw_kinds: ClassVar[tuple[DrawKind, ...]] = (DrawKind.WITHOUT,)
    kinds: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.FIXED, DrawKind.WITHOUT})

    def __post_init__(self) -> None:
        arguments.wholes(self, recipes.PLAIN, num_speculative_tokens=1)
        followers(self.table, self.vocab_size)

    def propose(self, memory: NoMemory, context: Context, shape: DraftShape) -> Draft:
        """Draw each token from the table's law after the ones before it."""
        depth = shape.max_depth
        layout = shapes.fixed(parents_of((1,) * depth), context.length_B.device)
        source = followers(self.table, self.vocab_size)
        return tree_drafting.grow([source], context, layout, self).draft(self.draw_kinds)

    def children(self, law: Laws, level: TreeLevel, keys: DrawKeys) -> Children:
        tokens, there, law = ops.several(law, keys.own(level.start, level.stop), 1)
        return Children(tokens[..., 0], None if there is None else there[..., 0], law)


class Followers(NamedTuple):
    """A table as a source of laws."""

    table: Table
    unknown: int  #: outputs of the target that the table has no token for

    def output(self, tree: TreeBuilder, level: TreeLevel) -> Output:
        """[B, n, V] log-probabilities after the text and the path to each node of the level."""
        context, tokens, parent = tree.context, tree.tokens_BM, tree.tree.parent_BN
        rows, size = tokens.shape[0], max(self.table.order - 1, 1)
        node = numbers(level.stop, tokens.device)[level.start :].expand(rows, -1)
        path = [tokens.gather(1, node)]
        while len(path) < min(size, level.depth + 1):
            node = parent.expand(rows, -1).gather(1, node)
            path.insert(0, tokens.gather(1, node))
        ahead = size - len(path)  # of the text, in front of the pending token
        at = context.length_B[:, None] - 1 + (numbers(ahead, tokens.device) - ahead)
        tail = context.tokens_BL.gather(1, at.clamp(min=0)).masked_fill(at < 0, -1)
        text = torch.cat([tail[:, None].expand(-1, node.shape[1], -1), torch.stack(path, -1)], -1)
        law = self.table.probs(text.flatten(0, 1)).view(*node.shape, -1)
        return Output(torch.nn.functional.pad(law, (0, self.unknown)).log())


def followers(table: Table, vocab_size: int | None) -> Followers:
    """The table's laws over `vocab_size` outputs of the target; None: over its own tokens.

    Raises VocabularyMismatch if the table knows more.
    """
    unknown = 0 if vocab_size is None else vocab_size - table.vocab_size
    if unknown < 0:
        raise VocabularyMismatch(
            f"the n-gram table knows {table.vocab_size} tokens, the target {vocab_size}; count one "
            "with the target's tokenizer"
        )
    return Followers(table, unknown)


def _made(
    table: Table, vocab_size: int, num_speculative_tokens: int = NgramTable.num_speculative_tokens
) -> NgramTable:
    return NgramTable(table, num_speculative_tokens, vocab_size)


RECIPE = recipes.Recipe(_made, ("table", "vocab_size"), ("num_speculative_tokens",), deepest=12)


# N-gram tables in files: what `training/ngram.py` writes, and what `write` keeps of a count.
#
# A safetensors file with, for each order n, `keys_n` (int64, sorted: n tokens packed into one
# number, the follower last) and `counts_n` (uint16 or int64), and the vocabulary's size as
# metadata.


def write(table: Table, file: str | Path) -> None:
    """Keep a table.

    >>> write(count(tokens, vocab_size=4096, order=4), "mine.safetensors")  # doctest: +SKIP
    """
    arrays: dict[str, torch.Tensor] = {}
    for n, (keys, counts) in enumerate(zip(table.keys, table.counts, strict=True), 1):
        arrays |= {f"keys_{n}": keys.contiguous(), f"counts_{n}": counts.contiguous()}
    tensor_file.write(arrays, file, {"vocabulary": str(table.vocab_size)})


def opened(table: str | Path | Table | None) -> Table | None:
    """A table that was given as one or as its file, or not at all."""
    return table if table is None or isinstance(table, Table) else read(table)


def read(file: str | Path) -> Table:
    """The table in a file. Raises ConfigurationError if there is none.

    >>> read("mine.safetensors").order  # doctest: +SKIP
    4
    """
    if not isinstance(file, (str, Path)):
        arguments.refuse("table", "a Table or the path of its file", file, "see ngram_table.write")
    try:
        changed = Path(file).stat()
        return _read(str(file), changed.st_mtime_ns, changed.st_size)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigurationError(
            f"cannot read an n-gram table; got {str(file)!r} ({type(error).__name__}: {error}); "
            "give a file written by outrider.drafters.ngram_table.write or python -m training.ngram"
        ) from error


@lru_cache(maxsize=4)
def _read(file: str, changed: int, size: int) -> Table:
    """Kept while the file stays as it is: reading takes longer than many a request."""
    with safe_open(file, "pt") as opened:
        vocab_size = int((opened.metadata() or {})["vocabulary"])
        orders = range(1, len(set(opened.keys())) // 2 + 1)
        keys = [opened.get_tensor(f"keys_{n}").to(torch.int64) for n in orders]
        counts = [opened.get_tensor(f"counts_{n}").to(torch.int64) for n in orders]
    bits = int(vocab_size - 1).bit_length()
    if not keys or len(keys) * bits > 62:
        raise ValueError(f"{len(keys)} orders of {vocab_size} tokens")
    for n, (key, count) in enumerate(zip(keys, counts, strict=True), 1):
        if key.dim() != 1 or key.shape != count.shape:
            raise ValueError(f"order {n}: keys {tuple(key.shape)}, counts {tuple(count.shape)}")
        if not len(key):
            continue
        follower = key & ((1 << bits) - 1)
        rising = bool((key[1:] > key[:-1]).all())
        inside = key[0] >= 0 and follower.max() < vocab_size
        if not rising or not inside or count.min() < 1:
            raise ValueError(f"order {n}: keys must rise, name known tokens and be counted")
    return table_of(keys, counts, vocab_size)
