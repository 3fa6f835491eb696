"""Sampling parameters and shaping of a batch: data per row, as rows come, move and go.

Made by `sampling_params.rows` and `logits_processors.build`, read by `ops.warp` and `apply`. Values
are tensors with one row each; what is in use anywhere is known on the host beside them, as an upper
bound.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

#: A function of (input_ids, scores), as transformers' LogitsProcessor.
Processor = Callable[[Tensor, Tensor], Tensor]
Greedy = Literal["none", "some", "all"]
NEVER = 1 << 62  #: a length that no row reaches
T = TypeVar("T")


def scatter_rows(mine: Tensor, into: Sequence[int], theirs: Tensor, fill: float = 0) -> Tensor:
    """`mine` with the rows of `theirs` at these rows; narrower rows are filled up.

    >>> scatter_rows(torch.tensor([[1, 2], [3, 4]]), [2, 0], torch.tensor([[5], [6]]), -1).tolist()
    [[6, -1], [3, 4], [5, -1]]
    """
    rows = max(mine.shape[0], 1 + max(into, default=-1))
    wide = [max(a, b) for a, b in zip(mine.shape[1:], theirs.shape[1:], strict=True)]
    both = mine.new_full((rows, *wide), fill)
    both[tuple(slice(size) for size in mine.shape)] = mine
    for row, at in enumerate(into):
        both[at] = fill
        both[at][tuple(slice(size) for size in theirs.shape[1:])] = theirs[row]
    return both


def scatter_items(mine: Sequence[T], into: Sequence[int], theirs: Sequence[T]) -> tuple[T, ...]:
    """The same for a host value per row."""
    both = dict(enumerate(mine)) | dict(zip(into, theirs, strict=True))
    return tuple(both[row] for row in range(len(both)))


def copy_rows(table: Tensor, rows: Sequence[int]) -> Tensor:
    """Copies of these rows."""
    return torch.stack([table[row] for row in rows]) if rows else table[:0]


def gather_rows(part: Any, rows: Sequence[int]) -> Any:
    """Copies of these rows of a part: a tensor, a `RowStore`, several of them, or None."""
    if part is None:
        return None
    if type(part) is tuple:
        return tuple(gather_rows(one, rows) for one in part)
    return copy_rows(part, rows) if isinstance(part, Tensor) else part.take(rows)


def first_rows(part: Any, rows: int) -> Any:
    """The first rows of a part."""
    if part is None:
        return None
    if type(part) is tuple:
        return tuple(first_rows(one, rows) for one in part)
    return part[:rows] if isinstance(part, Tensor) else part.narrow(rows)


def put_rows(part: Any, into: Sequence[int], other: Any) -> Any:
    """A part with the rows of another one at these rows; None if one of the sides has nothing."""
    if part is None or other is None:
        return None
    if type(part) is tuple:
        return tuple(put_rows(mine, into, its) for mine, its in zip(part, other, strict=True))
    return scatter_rows(part, into, other) if isinstance(part, Tensor) else part.put(into, other)


@dataclass(frozen=True)
class RowTable:
    """A `RowStore` whose fields are its parts: each keeps something of every row.

    >>> @dataclass(frozen=True)
    ... class Pair(RowTable):
    ...     left_B: Tensor
    ...     right_B: Tensor | None = None
    >>> Pair(torch.tensor([5, 6])).take([1]).left_B.tolist()
    [6]
    """

    def take(self, rows: Sequence[int]) -> Self:
        return replace(self, **{name: gather_rows(part, rows) for name, part in vars(self).items()})

    def put(self, into: Sequence[int], other: Self) -> Self:
        """The rows of `other` at these rows, shorter ones padded with zeros.

        A part that only one side has is in the result no more.
        """
        its = vars(other)
        return replace(self, **{n: put_rows(mine, into, its[n]) for n, mine in vars(self).items()})

    def narrow(self, rows: int) -> Self:
        return replace(self, **{name: first_rows(part, rows) for name, part in vars(self).items()})


#: What changes nothing in the columns of `Shaping` where that is not 0.
_OFF = {
    "repetition_B": 1,
    **dict.fromkeys(("source_BS", "stops_BK", "begin_BK", "timestamps_B3"), -1),
    **dict.fromkeys(("first_B1", "last_B1"), -1),
}


class Shaping(NamedTuple):
    """Penalties, biases, bans and processors of a batch; None where no row asks. A `RowStore`.

    Ids are -1 padded. Rows that ask for nothing have what changes nothing: `_OFF`, or else 0.
    """

    prompt_B: Tensor  #: prompt length
    bias_BV: Tensor | None = None
    repetition_B: Tensor | None = None
    frequency_B: Tensor | None = None
    presence_B: Tensor | None = None
    ngram_B: Tensor | None = None
    source_ngram_B: Tensor | None = None
    source_BS: Tensor | None = None  #: source ids of rows that must not repeat its n-grams
    least_B: Tensor | None = None  #: new tokens before a stop token may come
    stops_BK: Tensor | None = None  #: stop tokens of rows with a least length
    begin_BK: Tensor | None = None  #: what must not come first
    timestamps_B3: Tensor | None = None  #: no_timestamps_id, end_id, max_initial
    first_B1: Tensor | None = None  #: the first token, where it is forced
    last_B1: Tensor | None = None  #: the last one
    end_B: Tensor | None = None  #: committed length at which the row ends, if that is forced
    ngrams: tuple[int, ...] = ()  #: host constant: the n-gram sizes in use
    source_ngrams: tuple[int, ...] = ()  #: the same for sources
    marks: tuple[tuple[int, ...], ...] = ()  #: and the (no_timestamps_id, end_id)
    soonest: int = NEVER  #: no last token is forced before this length
    opened: int = NEVER  #: from this length on no ban of a beginning is in force in any row
    processors: tuple[tuple[Processor, ...], ...] = ()  #: per row
    padding: tuple[tuple[int, ...], ...] = ()  #: per row: ids that processors see ahead of it
    ends: tuple[frozenset[int], ...] = ()  #: per row: stop tokens; nothing is seen behind one
    masks: bool = True  #: whether a node may be left without any possible token

    @property
    def processed(self) -> bool:
        """Whether any row has processors."""
        return any(self.processors)

    @classmethod
    def neutral(cls, rows: int, device: torch.device) -> "Shaping":
        """Rows that ask for nothing."""
        nothing: tuple[tuple[()], ...] = ((),) * rows
        prompt_B = torch.zeros(rows, dtype=torch.int64, device=device)
        ends = (frozenset[int](),) * rows
        return cls(prompt_B, opened=0, processors=nothing, padding=nothing, ends=ends, masks=False)

    def take(self, rows: Sequence[int]) -> "Shaping":
        return self._replace(
            **_columns(self, lambda table: copy_rows(table, rows)),
            processors=tuple(self.processors[row] for row in rows),
            padding=tuple(self.padding[row] for row in rows),
            ends=tuple(self.ends[row] for row in rows),
        )

    def put(self, into: Sequence[int], other: "Shaping") -> "Shaping":
        """The rows of `other` at these rows; what one side lacks has no effect in its rows."""
        ours, theirs = _columns(self), _columns(other)
        columns: dict[str, Any] = {}
        for name in ours | theirs:
            off = _OFF.get(name, 0)
            like = ours[name] if name in ours else theirs[name]
            sides = [
                side[name] if name in side else like.new_full((rows, *like.shape[1:]), off)
                for side, rows in ((ours, len(self.processors)), (theirs, len(other.processors)))
            ]
            columns[name] = scatter_rows(sides[0], into, sides[1], off)
        return self._replace(
            **columns,
            ngrams=tuple(sorted({*self.ngrams, *other.ngrams})),
            source_ngrams=tuple(sorted({*self.source_ngrams, *other.source_ngrams})),
            marks=tuple(sorted({*self.marks, *other.marks})),
            soonest=min(self.soonest, other.soonest),
            opened=max(self.opened, other.opened),
            processors=scatter_items(self.processors, into, other.processors),
            padding=scatter_items(self.padding, into, other.padding),
            ends=scatter_items(self.ends, into, other.ends),
            masks=self.masks or other.masks,
        )

    def narrow(self, rows: int) -> "Shaping":
        return self._replace(
            **_columns(self, lambda table: table[:rows]),
            processors=self.processors[:rows],
            padding=self.padding[:rows],
            ends=self.ends[:rows],
        )


class SamplingRows(NamedTuple):
    """Sampling parameters of a batch, with host constants for what is in use. A `RowStore`."""

    inverse_temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B: Tensor
    greedy: Greedy
    most_top_k: int  #: largest top_k in use; 0 if none
    all_top_k: bool  #: every sampled row limits top_k
    any_top_p: bool
    any_min_p: bool
    shaping: Shaping | None = None  #: penalties, bans and processors, if any row has some

    @property
    def any_filter(self) -> bool:
        """Whether any row leaves tokens without a chance: a new filter is asked for here, too."""
        return self.most_top_k > 0 or self.any_top_p or self.any_min_p

    def take(self, rows: Sequence[int]) -> "SamplingRows":
        """A copy of these rows. Host constants stay: they are upper bounds."""
        return self._replace(
            **_columns(self, lambda table: copy_rows(table, rows)),
            shaping=None if self.shaping is None else self.shaping.take(rows),
        )

    def put(self, into: Sequence[int], other: "SamplingRows") -> "SamplingRows":
        """The rows of `other` at these rows. Host constants hold for both."""
        rows, device = self.seed_B.shape[0], self.seed_B.device
        if rows == 0:
            return other
        shaping = None
        if self.shaping is not None or other.shaping is not None:
            mine = self.shaping or Shaping.neutral(rows, device)
            newcomers = other.shaping or Shaping.neutral(other.seed_B.shape[0], device)
            shaping = mine.put(into, newcomers)
        theirs = _columns(other)
        return self._replace(
            **{name: scatter_rows(t, into, theirs[name]) for name, t in _columns(self).items()},
            greedy=self.greedy if self.greedy == other.greedy else "some",
            most_top_k=max(self.most_top_k, other.most_top_k),
            all_top_k=self.all_top_k and other.all_top_k,
            any_top_p=self.any_top_p or other.any_top_p,
            any_min_p=self.any_min_p or other.any_min_p,
            shaping=shaping,
        )

    def narrow(self, rows: int) -> "SamplingRows":
        return self._replace(
            **_columns(self, lambda table: table[:rows]),
            shaping=None if self.shaping is None else self.shaping.narrow(rows),
        )


def _columns(
    store: Shaping | SamplingRows, change: Callable[[Tensor], Tensor] = lambda table: table
) -> dict[str, Any]:
    """The tensors of a store by name, changed: each has a row for each of its rows."""
    named = zip(store._fields, store, strict=True)
    return {name: change(value) for name, value in named if isinstance(value, Tensor)}
