"""Slot-addressed key/value cache: the only place where cache entries live and move.

A row writes at the slots it is told to and sees the slots its mask allows. Rolling back is doing
nothing: an entry above a row's length is invisible and gets overwritten. Only an accepted tree path
moves, next to its root. Rows come and go by `put`, `take` and `narrow`, each of which copies the
entries of the rows it names and of no others. The transformers cache interface is met so that any
of its models can write here; nothing else of transformers is used.
"""

import weakref
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from outrider.models import memory
from outrider.models.recurrent.hooks import ConvolutionInputs, LayerHandles, StateHandle, ask
from outrider.models.recurrent.states import RecurrentStates
from outrider.row_params import scatter_items
from outrider.types import RowStore

FIRST = 4096  #: slots of a row to begin with
_LARGE = 1 << 24  #: bytes of entries that are not to be there twice


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's part of the cache, as transformers' layers of a cache are."""

    is_compileable = True
    is_croppable = True
    is_sliding = False  # windows are the mask's business: a ring buffer could not be rolled back
    record_past = True  #: this and the handles: as `SlotCache` says in newer versions
    conv_states = property(lambda self: LayerHandles(self.owner.get_conv_state, self.index))
    recurrent_states = property(
        lambda self: LayerHandles(self.owner.get_recurrent_state, self.index)
    )

    def __init__(self, owner: "SlotCache", index: int) -> None:
        super().__init__()
        # Weak: a cycle would keep the buffers of every finished run until the collector comes.
        self._owner, self.index = weakref.ref(owner), index
        #: [max_rows, 1, S, E], where attention has an indexer
        self.index_keys: Tensor | None = None

    @property
    def owner(self) -> "SlotCache":
        """The cache that this is a layer of; it lives as long as anybody decodes with it."""
        owner = self._owner()
        assert owner is not None
        return owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.owner.allocate(self.index, key_states, value_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.owner.allocate(self.index, key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    @property
    def indexer_position_ids(self) -> Tensor:
        """Positions [3, B, W] of the slots in sight, by text, row and column, as of text."""
        return self.owner.positions()[1].expand(3, -1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: object) -> None:
        """Nothing is left to do: the cache has noted them by slot."""

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write an indexer's keys [B, Q, E]; returns those of the slots in sight [B, W, E]."""
        entries = indexer_key_states[:, None]
        if self.index_keys is None:
            self.owner.allocate_indexer(self.index, entries)
        assert self.index_keys is not None
        return self._write(self.index_keys, entries)[:, 0]

    def _write(self, buffer: Tensor, entries: Tensor) -> Tensor:
        """Entries [B, H, Q, E] to their slots of a buffer; what is in sight of it [B, H, W, E]."""
        owner, rows = self.owner, self.owner.rows
        if rows == 1:
            if owner.max_rows > 1:
                buffer = buffer[:1]
            buffer.index_copy_(2, owner.line, entries)
        else:
            # a flat index_copy_: scatter_ costs O(buffer) for half-precision tensors on a CPU
            flat = owner.flat(buffer.shape[1])
            lines = buffer.view(buffer.shape[:3].numel(), buffer.shape[3])  # of no width, too
            lines.index_copy_(0, flat, entries.flatten(0, 2))
        return buffer[:rows, :, : owner.width]

    def buffers(self, heads: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """All slots of keys and values, [max_rows, heads, S, size] each, to write there by hand.

        They are made, with the dtype of `like`, if nothing has been written yet.
        """
        if not self.is_initialized:
            entry = like.new_empty(0, heads, 0, size)
            self.owner.allocate(self.index, entry, entry)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.width, 0

    def get_seq_length(self) -> int:
        return self.owner.seen

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length


class SlotCache(Cache):  # type: ignore[misc]
    """Key/value slots of one model: `rows` rows of up to `capacity` entries each. A `RowStore`.

    Buffers are allocated at the first write, because only then heads, dtype and device are known
    (tensor parallel shards, multi-query heads). Layers of one shape share one allocation, so that a
    tree path moves in two operations whatever the depth of the model. A row begins with `FIRST`
    slots and has them doubled as the text grows: a request without a token budget on a model with a
    context of 128 k tokens does not take the memory of 128 k tokens.

    The buffers have `max_rows` rows, of which the first `rows` are in use. A slab of 8 free rows:

    >>> slab = SlotCache(layers=2, rows=8, capacity=100).narrow(0)
    >>> slab.rows, slab.max_rows
    (0, 8)
    """

    #: What follows from the buffers, or is said ahead of every call.
    derived = frozenset({"layers", "width", "seen", "planes", "_slots", "_flat"})

    def __init__(self, layers: int, rows: int, capacity: int) -> None:
        self.rows, self.max_rows, self.capacity = rows, rows, capacity
        self.size = min(capacity, FIRST)  #: slots that are there
        self.width = 0  #: slots that the last forward saw: no row has entries of use beyond them
        self.seen = 0
        self.inputs: RowStore | None = None  #: what a runner has read of the rows' inputs
        self.recurrent: RecurrentStates | None = None  #: of layers that keep a state
        self.numbers: Sequence[int] = range(layers)  #: of its layers, as their states know them
        self.adapters: tuple[str | None, ...] = ()  #: of each row, by name; (): of none
        self.stacks: list[Tensor] = []  #: [planes, max_rows, H, size, E] each
        self.shared = False  #: whether they are another cache's
        self.leaving = False  #: whether nobody reads it once another cache has been given its rows
        #: keys 2 i, values 2 i + 1, an indexer's keys -1 - i -> stack, plane
        self._places: dict[int, tuple[int, int]] = {}
        self._slots: Tensor | None = None
        self._flat: dict[int, Tensor] = {}
        #: The first layer's keys, and where all layers' keys and values lie: of a compiled call's
        #: keeping, and None whenever they lie elsewhere.
        self.planes: tuple[Tensor, Tensor] | None = None
        self._positions_BS: Tensor | None = None
        super().__init__(layers=list(map(SlotLayer, repeat(self, layers), self.numbers)))

    def allocate(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Zeroed buffers for a layer with entries like these."""
        for index, like in ((2 * layer, keys), (2 * layer + 1, values)):
            shape = (self.max_rows, like.shape[1], self.size, like.shape[3])
            # zeros, never empty: masked garbage could be NaN, and 0 * NaN poisons a row
            if not self.stacks:
                self.stacks.append(_zeros(like, 2 * len(self.layers), *shape))
            first = self.stacks[0]
            if first.shape[1:] == shape and first.dtype == like.dtype:
                if first.device == like.device:
                    self._places[index] = (0, index)
                    continue
            self.stacks.append(_zeros(like, 1, *shape))
            self._places[index] = (len(self.stacks) - 1, 0)
        self._attach(self.layers[layer : layer + 1])

    def allocate_indexer(self, layer: int, keys: Tensor) -> None:
        """Zeroed buffers for the keys of a layer's indexer: planes of one stack for all layers."""
        known = next((place[0] for index, place in self._places.items() if index < 0), None)
        if known is None:
            known = len(self.stacks)
            shape = (self.max_rows, keys.shape[1], self.size, keys.shape[3])
            self.stacks.append(_zeros(keys, len(self.layers), *shape))
        self._places[-1 - layer] = (known, layer)
        self._attach(self.layers[layer : layer + 1])

    def begin(self, slots_BQ: Tensor, width: int, seen: int) -> None:
        """Set where the next forward writes and how many slots it sees."""
        if self.size < min(width, self.capacity):
            self._fit(self.max_rows, min(width, self.capacity))
        self._slots, self.width, self.seen = slots_BQ, width, seen
        self._flat.clear()

    def place(self, positions_BQ: Tensor) -> Tensor:
        """Note the positions of the entries being written; returns those of all slots [B, S].

        Only models with windows or position biases ask for it. A committed entry's position is its
        slot; a tree's nodes are the exception, until `keep` has moved the path.
        """
        assert self._slots is not None
        table = self._positions(positions_BQ.device)[: self.rows]
        return table.scatter_(1, self._slots, positions_BQ)

    def positions(self) -> tuple[Tensor, Tensor]:
        """Positions of the nodes being written [B, Q], and of the slots in sight [B, W]."""
        assert self._slots is not None
        table = self._positions(self._slots.device)[: self.rows]
        return table.gather(1, self._slots), table[:, : self.width]

    @property
    def line(self) -> Tensor:
        """Slots [Q] of the only row, which the next forward writes to."""
        found = self._flat.get(0)
        if found is None:
            assert self._slots is not None, "`begin` says where entries go"
            found = self._flat[0] = self._slots[0]
        return found

    def flat(self, heads: int) -> Tensor:
        """Row numbers of the slots in a buffer viewed as [max_rows * H * S, E]."""
        if heads not in self._flat:
            assert self._slots is not None
            self._flat[heads] = self._lines(self._slots, 1, heads)
        return self._flat[heads]

    def keep(self, first_B: Tensor, path_BD: Tensor) -> None:
        """Move the accepted path (node numbers, -1 padded) next to its root at slot `first_B`."""
        if self.recurrent is not None:
            self.recurrent.keep(first_B, path_BD)
        depth = path_BD.shape[1]
        if depth == 0 or not self.stacks:
            return
        to = first_B[:, None] + torch.arange(1, depth + 1, device=path_BD.device)
        # padding moves an entry onto itself
        source = torch.where(path_BD >= 0, first_B[:, None] + path_BD, to)
        if self._positions_BS is not None:
            self._positions_BS[: self.rows].scatter_(1, to, to)
        for stack in self.stacks:
            if self.rows == 1:
                row = stack[:, :1]
                row.index_copy_(-2, to[0], row.index_select(-2, source[0]))
                continue
            planes, _, heads, _, entry = stack.shape
            flat = stack.view(stack.shape[:-1].numel(), entry)  # of no width, too
            moved = flat.index_select(0, self._lines(source, planes, heads))
            flat.index_copy_(0, self._lines(to, planes, heads), moved)

    def take(self, rows: Sequence[int], slots: int | None = None) -> "SlotCache":
        """A cache of its own with copies of these rows, in this order: of the slots that are used,
        as many as the longest row has, or of the first `slots` of these."""
        few = SlotCache(len(self.layers), len(rows), self.capacity)
        few.width = min(self.width, slots or self.width)
        used = slice(0, few.width)
        if self.inputs is not None:
            few.inputs = self.inputs.take(rows)
        if self.recurrent is not None:
            few.recurrent = self.recurrent.take(rows)
        few.adapters = tuple(self.adapters[row] for row in rows if self.adapters)
        if self.stacks:
            few.size = few.width
            few.stacks = [
                torch.cat([s[:, :0, :, used], *(s[:, r : r + 1, :, used] for r in rows)], 1)
                for s in self.stacks
            ]
            few._places = dict(self._places)
            few._attach()
        table = self._positions_BS
        if table is not None:
            own = slice(0, few.size)
            few._positions_BS = torch.cat([table[:0, own], *(table[r : r + 1, own] for r in rows)])
        return few

    def put(self, into: Sequence[int], other: "SlotCache", slots: int | None = None) -> Self:
        """Write the rows of `other` at these rows, their used slots alone; returns this cache.

        With `slots`, no more than their first ones.

        Numbers behind the last row add rows. Nobody else's entries are copied, unless the rows are
        used up or a row of `other` is longer than the slots that are there: buffers grow then.
        """
        rows = max(self.rows, 1 + max(into, default=-1))
        assert len(into) == other.rows, f"{other.rows} rows at {len(into)} places"
        assert set(into) >= set(range(self.rows, rows)), f"rows {list(into)} leave a hole"
        if self.inputs is None or other.inputs is None:
            assert self.rows == 0 or self.inputs is other.inputs, "rows with and without inputs"
            self.inputs = other.inputs
        else:
            self.inputs = self.inputs.put(into, other.inputs)
        if self.recurrent is not None and other.recurrent is not None:
            self.recurrent.put(into, other.recurrent)
        if self.adapters or other.adapters:
            names = self.adapters or (None,) * self.rows
            self.adapters = scatter_items(names, into, other.adapters or (None,) * other.rows)
        wide = other.width if slots is None else slots
        self.width = max(self.width if self.rows else 0, wide)
        self.capacity = max(self.capacity, other.capacity if slots is None else slots)
        self._fit(rows, self.width)
        self._show(rows)
        if not self.stacks and other.stacks:
            self.stacks = [
                _zeros(s, s.shape[0], self.max_rows, s.shape[2], self.size, s.shape[4])
                for s in other.stacks
            ]
            self._places = dict(other._places)
            self._attach()
        table = other._positions_BS if self._positions_BS is None else self._positions_BS
        if table is not None:
            here, there = self._positions(table.device), other._positions(table.device)
            for row, at in enumerate(into):
                here[at, :wide].copy_(there[row, :wide])
        leaving = other.leaving and not other.shared
        if leaving:
            other.rows = 0  # if this is interrupted it cannot be put again
        for mine, theirs in zip(self.stacks, other.stacks, strict=bool(other.stacks)):
            _copy(mine, into, theirs, wide, leaving)
        return self

    def narrow(self, rows: int) -> Self:
        """This cache with its first `rows` rows; those behind them are free for `put`."""
        assert rows <= self.rows, f"{rows} of {self.rows} rows"
        if self.inputs is not None:
            self.inputs = self.inputs.narrow(rows)
        if self.recurrent is not None:
            self.recurrent.narrow(rows)
        self.adapters = self.adapters[:rows]
        self._show(rows)
        return self

    def row(self, row: int) -> "SlotCache":
        """One row as a cache that shares its buffers: for runners that run rows one by one."""
        one = SlotCache(len(self.layers), 1, self.capacity)
        one.size, one.width = self.size, self.width
        one.inputs = None if self.inputs is None else self.inputs.take([row])
        one.adapters = self.adapters[row : row + 1]
        one.stacks, one.shared = [stack[:, row : row + 1] for stack in self.stacks], True
        one._places = dict(self._places)
        one._attach()
        return one

    def part(self, numbers: Sequence[int]) -> "SlotCache":
        """Some layers as a cache that shares their buffers, for a model made of these layers."""
        few = SlotCache(len(numbers), self.rows, self.capacity)
        few.max_rows, few.size, few.width = self.max_rows, self.size, self.width
        few.inputs = self.inputs
        few.adapters = self.adapters
        few.stacks, few._positions_BS, few.shared = self.stacks, self._positions_BS, True
        few.recurrent, few.numbers = self.recurrent, [self.numbers[n] for n in numbers]
        for at, number in enumerate(numbers):
            for entry in (0, 1):
                if 2 * number in self._places:  # not of a layer that keeps a state alone
                    few._places[2 * at + entry] = self._places[2 * number + entry]
            if -1 - number in self._places:
                few._places[-1 - at] = self._places[-1 - number]
        few._attach()
        return few

    # -- what mixers of transformers ask a cache for: they hand the handles on to functions of ours

    def is_recording_past(self, layer_idx: int) -> bool:
        """Yes: one token goes the way of several."""
        return True

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Yes: a handle stands for the state, be it zeros."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> StateHandle:
        """The handle of a layer's convolution inputs."""
        assert self.recurrent is not None
        return StateHandle(self.recurrent, self.numbers[layer_idx], state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> StateHandle:
        """The handle of a layer's state; some mixers hand it to no function that needs it."""
        handle = self.get_conv_state(layer_idx, state_idx)
        ask(handle)
        return handle

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> ConvolutionInputs:
        """Inputs [B, C, Q] of a convolution, for the function that the mixer hands them to."""
        return ConvolutionInputs(self.get_conv_state(layer_idx, state_idx), conv_states)

    @property
    def rnn_state(self) -> list[tuple[StateHandle, ...]]:
        """The handles of all layers' states, where a model hands them on itself: xLSTM."""
        return [(self.get_conv_state(layer),) * 3 for layer in range(len(self.layers))]

    def update_recurrent_state(
        self, recurrent_states: object, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> object:
        """Nothing is left to do: the function that was given the handle has written to it."""
        return recurrent_states

    def derive(self) -> None:
        """Other buffers of the same shapes have taken the places of its own."""
        self._attach()
        self._show(self.rows)

    def _show(self, rows: int) -> None:
        """Let this many rows be in use; what the next forward writes has to be said anew."""
        self.rows, self._slots = rows, None
        self._flat.clear()

    def _fit(self, max_rows: int, slots: int) -> None:
        """Longer buffers if there are fewer rows or slots: doubled, so that growing stays rare."""
        old_rows, old_size = self.max_rows, self.size
        new_rows, new_size = old_rows, old_size
        if max_rows > old_rows:
            new_rows = max(max_rows, 2 * old_rows)
        if slots > old_size:
            new_size = min(max(slots, 2 * old_size), self.capacity)
        more_rows, more = new_rows - old_rows, new_size - old_size
        if more_rows or more:  # all or nothing: there may be no memory for it
            longer = [
                _zeros(s, s.shape[0], new_rows, s.shape[2], new_size, s.shape[4])
                for s in self.stacks
            ]
            before, self.stacks = self.stacks, []  # an interrupted copy has lost some, and all go
            for new, old in zip(longer, before, strict=True):
                _copy(new, range(self.rows), old, min(self.width, old_size), not self.shared)
            self.stacks, self.max_rows, self.size = longer, new_rows, new_size
            self._attach()
            table, self._positions_BS = self._positions_BS, None
            if table is not None:
                self._positions(table.device)[:old_rows, :old_size].copy_(table)

    def _attach(self, layers: Sequence[object] | None = None) -> None:
        """Give layers, all of them by default, their part of the buffers."""
        self.planes = None
        for layer in self.layers if layers is None else layers:
            if not isinstance(layer, SlotLayer):
                continue  # a runner's own
            place = self._places.get(2 * layer.index)
            if place is not None:
                layer.keys = self.stacks[place[0]][place[1]]
                stack, plane = self._places[2 * layer.index + 1]
                layer.values = self.stacks[stack][plane]
                layer.is_initialized = True
            if -1 - layer.index in self._places:
                stack, plane = self._places[-1 - layer.index]
                layer.index_keys = self.stacks[stack][plane]

    def _positions(self, device: torch.device) -> Tensor:
        """The position of every slot of every row: its number, if nobody said otherwise."""
        if self._positions_BS is None:
            every = torch.arange(self.size, device=device)
            self._positions_BS = every.repeat(self.max_rows, 1)
        return self._positions_BS

    def _lines(self, slots_BQ: Tensor, planes: int, heads: int) -> Tensor:
        """Row numbers of these slots in a stack viewed as [planes * max_rows * H * S, E]."""
        device = slots_BQ.device
        plane = torch.arange(planes, device=device).view(-1, 1, 1, 1) * (self.max_rows * heads)
        head = torch.arange(self.rows * heads, device=device).view(self.rows, heads, 1)
        return ((plane + head) * self.size + slots_BQ[:, None, :]).flatten()


def _copy(stack: Tensor, into: Sequence[int], other: Tensor, used: int, leaving: bool) -> None:
    """Write the first rows of another stack at these rows, their first slots.

    One that is `leaving` is given back plane by plane: of many entries no more are there twice.
    """
    apart = leaving and other.device.type == "cpu"
    apart = apart and other[:, : len(into), :, :used].nbytes > _LARGE
    planes: Sequence[int | slice] = range(len(other)) if apart else (slice(None),)
    for plane in planes:
        for row, at in enumerate(into):
            stack[plane, at, ..., :used, :].copy_(other[plane, row, ..., :used, :])
        if apart:
            memory.forget(other[plane])


def _zeros(like: Tensor, planes: int, rows: int, heads: int, slots: int, entry: int) -> Tensor:
    """Zeros [planes, rows, heads, slots, entry], whose pages are there when they are first touched.

    A single row that has outgrown its first slots is in pages of 2 MiB where there are any: reading
    all of it, as every step does, waits less for addresses then, and half of it is full. Beside a
    long row short ones would be given whole pages, too, so that several rows are in small ones.
    """
    large = rows == 1 and slots > FIRST
    return memory.zeros(like, (planes, rows, heads, slots, entry), large_pages=large)
