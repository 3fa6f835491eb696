"""Which calls round alike in half precision on this processor: found by trying, not written down.

A row's text must not depend on who stands beside it, on the drafter, or on how its prompt was cut
into chunks. But kernels choose their path by the shape of a call, and paths add in another order: a
single query goes through another product than five, a width of 256 slots through another than 384.
In half precision such a difference turns into another token sooner or later. So the forms of a
model's calls are tried once, on data whose sums cancel, where another order shows in every number;
calls are then padded, or cut, to forms that agree. What was found is kept beside calibrations.

In float32, and on other devices, nothing is tried: forms are as they come.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models import budget, calibrate

#: (q [B, H, R, E], keys and values [B, H, W, E], mask [B, 1, R, W]) -> [B, H, R, E]
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
#: x [..., I] -> [..., O]
Product: TypeAlias = Callable[[Tensor], Tensor]

UNIT = 128  #: visible widths are multiples of this where they do not matter
#: Where they do: (up to this width, multiples of this). The narrower, the less is read for nothing.
LADDER = ((1024, 64), (2048, 128), (1 << 62, 512))
_BOUNDS = [most for most, _ in LADDER]
_FARTHEST = 4096  #: widths are tried so far; a kernel goes through wider caches piece by piece
_TRUTH = 8  #: rows of a call that others are compared with
HEADS = 4  #: heads are gone through one by one; there are kernels for four or more
_FEW = 64  #: counts of rows that are told apart one by one
_MANY = (64, 96, 192, 256, 512)
_SUMS = 2048  #: that are compared at least, of up to `_FEW` rows
_STEPS = (1, 2, 4, 8, 16, 32)
_SEEN = (50, 120, 180, 250, 490, 1000)  #: how far rows see when widths are compared; and
_SHORT = 14  #: by so much less than each width: the last piece of a wide cache counts if it is seen
_VERSION = 4


class PaddingPolicy(NamedTuple):
    """How many rows a call may have so that each is rounded as in any other call.

    >>> PaddingPolicy((4, 5, 6, 8), 4).padded(1), PaddingPolicy((4, 5, 6, 8), 4).padded(
    ...     7), PaddingPolicy((1,), 1).padded(9)
    (4, 8, 9)
    >>> PaddingPolicy((2, 4), 0).padded(7), PaddingPolicy((2, 4), 0).pieces(8)
    (8, [slice(0, 4, None), slice(4, 8, None)])
    """

    few: tuple[int, ...] = (1,)  #: the counts, up to the last of these
    step: int = 1  #: more rows: a multiple of this; 0: pieces of the last count

    def padded(self, rows: int) -> int:
        """The least count of at least so many rows."""
        most = self.few[-1]
        if rows <= most:
            return self.few[bisect_left(self.few, rows)]
        if self.step:
            return -(-rows // self.step) * self.step
        whole = rows // most * most
        return whole + self.padded(rows - whole) if rows > whole else whole

    def pieces(self, padded: int) -> list[slice]:
        """The calls that a padded count of rows takes."""
        size = padded if self.step else self.few[-1]
        return [slice(first, min(first + size, padded)) for first in range(0, padded, size)]

    def over(self, run: Product, x: Tensor) -> Tensor:
        """`run` over the rows of x [..., R, I], padded and cut: [..., R, O]."""
        count = x.shape[-2]
        padded = self.padded(count)
        if padded > count:
            x = F.pad(x, (0, 0, 0, padded - count))
        pieces = self.pieces(padded)
        parts = [run(x[..., some, :]) for some in pieces] if len(pieces) > 1 else [run(x)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
        return whole[..., :count, :] if padded > count else whole

    def _whole(self, rows: int) -> bool:
        """Whether a call of so many is neither padded nor cut."""
        return self.padded(rows) == rows and len(self.pieces(rows)) == 1

    @property
    def free(self) -> bool:
        """Whether every count is as good as any other."""
        return self.few[0] == 1 and self.step == 1 and len(self.few) == self.few[-1]

    def beside(self, other: "PaddingPolicy") -> "PaddingPolicy":
        """Counts that are good for both, for calls that can be padded but not cut.

        >>> PaddingPolicy((1, 2, 4), 2).beside(PaddingPolicy((2, 3, 4), 1))
        PaddingPolicy(few=(2, 4), step=2)
        """
        few = range(1, max(self.few[-1], other.few[-1]) + 1)
        good = tuple(n for n in few if self._whole(n) and other._whole(n))
        return PaddingPolicy(good, max(self.step, other.step, 1))


class BatchInvariance(NamedTuple):
    """Which calls of a model round alike; the value that `TreeDecoder.rounding` carries.

    >>> found = BatchInvariance(skipped=(256, 320))
    >>> found.width(130), found.width(200), found.width(2100), BatchInvariance().width(130)
    (192, 384, 2560, 256)
    """

    rows: PaddingPolicy | None = None  #: nodes of a call; None: as many as there are
    #: Visible widths that round otherwise than the rest of `LADDER`; None: `UNIT` sets them
    skipped: tuple[int, ...] | None = None
    trees: bool = False  #: whether a tree's node rounds as the same text does in a row

    def width(self, slots: int) -> int:
        """The least visible width of so many slots."""
        wide = max(slots, 1)
        if self.skipped is None:
            return -(-wide // UNIT) * UNIT
        while True:
            unit = LADDER[bisect_left(_BOUNDS, wide)][1]
            wide = -(-wide // unit) * unit
            if wide not in self.skipped:
                return wide
            wide += 1


def applies_to(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether forms have to be tried: half precision on a CPU."""
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)


def of_attention(attend: Attend, heads: int, size: int, dtype: torch.dtype) -> BatchInvariance:
    """Rows and visible widths with which attention over `heads` heads of `size` rounds alike."""
    heads = min(heads, HEADS)

    def find() -> list[list[int]]:
        rows = _attention_rows(attend, heads, size, dtype)
        return [list(rows.few), [rows.step], list(_odd_widths(attend, rows, heads, size, dtype))]

    name = f"{attend.__name__}-{heads}x{size}-{dtype}"
    few, (step,), skipped = _kept(name, 3, find)
    return BatchInvariance(PaddingPolicy(tuple(few), step), tuple(skipped))


def of_product(
    make: Callable[[Tensor], Product], outputs: int, inputs: int, dtype: torch.dtype, kind: str
) -> PaddingPolicy:
    """Counts of rows with which x @ weight.T rounds alike, for weights [O, I] of this shape.

    `make` makes the product of a weight, `kind` names how.
    """

    def find() -> list[list[int]]:
        rows = _product_rows(make, outputs, inputs, dtype)
        return [list(rows.few), [rows.step]]

    few, (step,) = _kept(f"{kind}-{outputs}x{inputs}-{dtype}", 2, find)
    return PaddingPolicy(tuple(few), step)


def _attention_rows(attend: Attend, heads: int, size: int, dtype: torch.dtype) -> PaddingPolicy:
    """Two rows of a batch are compared with one alone, in narrow and in wide caches."""
    found = []
    for slots, most in ((128, _FEW), (512, _MANY[-1] + 3 * _STEPS[-1])):
        q, keys, values, mask = _example(slots - 30, slots, most, heads, size, dtype)

        table = q, torch.cat([keys, keys]), torch.cat([values, values]), mask

        def run(some: slice, table: tuple[Tensor, Tensor, Tensor, Tensor] = table) -> Tensor:
            q, keys, values, mask = table
            batch = slice(0, 1 if some.stop - some.start == _TRUTH else 2)
            asked = q[:, :, some].expand(batch.stop, -1, -1, -1).contiguous()
            x = attend(asked, keys[batch], values[batch], mask[:, :, some])
            return x[-1].transpose(0, 1)

        found.append(_alike(run, most, range(1, _FEW + 1)))
    narrow, wide = found
    return PaddingPolicy(tuple(n for n in wide.few if n in narrow.few), wide.step)


def _odd_widths(
    attend: Attend, rows: PaddingPolicy, heads: int, size: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """Widths that differ from most, for rows that see no more than the narrower of them."""
    widths, every = [0], BatchInvariance(skipped=())
    while widths[-1] < _FARTHEST:
        widths.append(every.width(widths[-1] + 1))
    del widths[0]
    odd: set[int] = set()
    reference = 0
    for seen in sorted({*_SEEN, *(wide - _SHORT for wide in widths)}):
        counts = {rows.padded(1), rows.padded(_TRUTH)}
        q, keys, values, mask = _example(seen, _FARTHEST, max(counts), heads, size, dtype)
        for count in counts:
            answers: dict[int, Tensor] = {}
            for wide in [wide for wide in widths if wide >= seen]:
                cut = slice(0, wide)
                asked, some = q[:, :, :count].contiguous(), mask[:, :, :count, cut].contiguous()
                answers[wide] = attend(asked, keys[:, :, cut], values[:, :, cut], some)
            if not reference:
                reference = _usual(answers)
            odd |= {w for w, x in answers.items() if not torch.equal(x, answers[reference])}
    return tuple(sorted(odd))


def _usual(answers: dict[int, Tensor]) -> int:
    """The widest of those that agree with most others."""
    agree = {
        wide: sum(torch.equal(x, other) for other in answers.values())
        for wide, x in answers.items()
    }
    return max(agree, key=lambda wide: (agree[wide], wide))


def _product_rows(
    make: Callable[[Tensor], Product], outputs: int, inputs: int, dtype: torch.dtype
) -> PaddingPolicy:
    random = torch.Generator().manual_seed(inputs)
    pairs = torch.randperm(inputs, generator=random, device="cpu")[: inputs // 2 * 2].view(2, -1)
    large = outputs * inputs > 1 << 24  # an output layer: it is never asked for a whole chunk
    most = _MANY[1] if large else _MANY[-1] + 3
    weight = _spread(random, min(outputs, 256), inputs)
    weight[:, pairs[1]] = -weight[:, pairs[0]]
    x = _spread(random, most, inputs)
    x[:, pairs[1]] = x[:, pairs[0]]
    x = x.to(dtype)
    times = -(-outputs // weight.shape[0])
    run = make(weight.to(dtype).repeat(times, 1)[:outputs].contiguous())
    counts = [*range(1, 18), 24, 25, 31, 32, 33, 48, 49, 63, _FEW]
    return _alike(lambda some: run(x[some]), most, counts, (1,))


def _alike(
    run: Callable[[slice], Tensor], most: int, counts: Sequence[int], steps: Sequence[int] = _STEPS
) -> PaddingPolicy:
    """Counts whose rows have the bits that they have in calls of a few; `run` computes some rows.

    A count that is not tried is good if the next ones on both sides are.
    """
    calls = range(0, most, _TRUTH)
    truth = torch.cat([run(slice(first, first + _TRUTH)) for first in calls])

    @cache
    def right(count: int) -> bool:
        # sums of a few numbers may agree by chance: so many are looked at that some would not
        calls = min(_FEW, -(-_SUMS // truth[0].numel())) // count
        parts = [slice(at, at + count) for at in range(0, max(calls, 1) * count, count)]
        return all(torch.equal(run(part), truth[part]) for part in parts)

    def between(count: int) -> bool:
        at = bisect_left(counts, count)
        return right(counts[at]) and (counts[at] == count or right(counts[at - 1]))

    few = tuple(count for count in range(1, _FEW + 1) if between(count))
    for step in steps:
        tried = [many + more for many in _MANY for more in (0, step, 3 * step)]
        if all(right(count) for count in tried if count <= most):
            return PaddingPolicy(few, step)
    return PaddingPolicy(few, 0)


def _example(
    seen: int, slots: int, rows: int, heads: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and a mask behind `seen`: equal keys in pairs, opposite values.

    What attention sums to is nothing but the rounding of its sums, so it shows their order.
    """
    random = torch.Generator().manual_seed(seen)
    keys = 1.5 * _normal(random, 1, heads, seen, size)
    values = _spread(random, 1, heads, seen, size)
    one, other = torch.randperm(seen // 2 * 2, generator=random, device="cpu").view(2, -1)
    keys[:, :, other], values[:, :, other] = keys[:, :, one], -values[:, :, one]
    keys, values = (F.pad(table, (0, 0, 0, slots - seen)) for table in (keys, values))
    q = _normal(random, 1, heads, rows, size)
    mask = torch.zeros(1, 1, rows, slots, dtype=torch.float32, device="cpu")
    mask[..., seen:] = torch.finfo(dtype).min
    return q.to(dtype), keys.to(dtype), values.to(dtype), mask.to(dtype)


def _spread(random: torch.Generator, *shape: int) -> Tensor:
    """Numbers of very different size: sums of like ones may be exact in any order."""
    size = torch.rand(shape, generator=random, dtype=torch.float32, device="cpu")
    return _normal(random, *shape) * 10 ** (3 * size - 2)


def _normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")


_found: dict[str, list[list[int]]] = {}


def _kept(name: str, parts: int, find: Callable[[], list[list[int]]]) -> list[list[int]]:
    """What was found under this name on this machine, in this process or an earlier one: counts of
    rows, a step and whatever else makes so many parts."""
    name = f"{name}-{torch.get_num_threads()}"
    if name not in _found:
        path = calibrate.cache_dir() / f"rounding-{_VERSION}-{calibrate.key()}.json"
        known = _read(path)
        if name in known and len(known[name]) == parts:
            _found[name] = known[name]
        else:
            trying = budget.Budget()  # of its own: a text depends on what is found, speed does not
            with (
                budget.current().apart(),
                trying.measuring("which calls round alike"),
                torch.inference_mode(),
                torch._C.DisableTorchFunction(),  # what pads would find every count alike
            ):
                _found[name] = find()
            calibrate.keep(path, json.dumps(known | {name: _found[name]}, indent=1))
    return _found[name]


def _read(path: Path) -> dict[str, list[list[int]]]:
    """What is kept in a file; nothing of what cannot be a finding, whoever wrote it."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {n: each for n, each in kept.items() if _fits(each)} if isinstance(kept, dict) else {}


def _fits(each: object) -> bool:
    """Whether these are counts of rows, ascending, a step, and perhaps more whole numbers."""
    if not isinstance(each, list) or len(each) < 2:
        return False
    if not all(isinstance(some, list) and all(type(n) is int for n in some) for some in each):
        return False
    few, step = each[:2]
    return bool(few) and few[0] > 0 and few == sorted(few) and len(step) == 1 and step[0] >= 0
