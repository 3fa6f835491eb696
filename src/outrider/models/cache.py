"""Slot-addressed key/value cache: the only place where cache entries live and move.

A row writes at the slots it is told to and sees the slots its mask allows. Rolling back is doing
nothing: an entry above a row's length is invisible and gets overwritten. Only an accepted tree path
moves, next to its root. The transformers cache interface is met so that any of its models can write
here; nothing else of transformers is used.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

FIRST = 4096  #: slots of a row to begin with
SPARE = 8  #: slots behind the visible ones that dummy nodes may be written to


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    is_compileable = True
    is_croppable = True
    is_sliding = False  # windows are the mask's business: a ring buffer could not be rolled back

    def __init__(self, owner: "SlotCache", index: int) -> None:
        super().__init__()
        # Weak: a cycle would keep the buffers of every finished run until the collector comes.
        self._owner, self.index = weakref.ref(owner), index

    @property
    def owner(self) -> "SlotCache":
        """The cache that this is a layer of; it lives as long as anybody decodes with it."""
        owner = self._owner()
        assert owner is not None
        return owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self.owner.room(2 * self.index, key_states)
        self.values = self.owner.room(2 * self.index + 1, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self.owner
        keys, values = self.keys, self.values
        if owner.rows == 1:
            keys.index_copy_(2, owner.line, key_states)
            values.index_copy_(2, owner.line, value_states)
        else:
            # a flat index_copy_: scatter_ costs O(buffer) for half-precision tensors on a CPU
            flat = owner.flat(keys.shape[1])
            keys.view(-1, keys.shape[3]).index_copy_(0, flat, key_states.flatten(0, 2))
            values.view(-1, values.shape[3]).index_copy_(0, flat, value_states.flatten(0, 2))
        return keys[:, :, : owner.width], values[:, :, : owner.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.width, 0

    def get_seq_length(self) -> int:
        return self.owner.seen

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length


class SlotCache(Cache):  # type: ignore[misc]
    """Key/value slots of one model: `rows` rows of up to `capacity` entries each.

    Buffers are allocated at the first write, because only then heads, dtype and device are known
    (tensor parallel shards, multi-query heads). Layers of one shape share one allocation, so that a
    tree path moves in two operations whatever the depth of the model. A row begins with `FIRST`
    slots and has them doubled as the text grows: a request without a token budget on a model with a
    context of 128 k tokens does not take the memory of 128 k tokens.
    """

    def __init__(self, layers: int, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.size = min(capacity, FIRST)  #: slots that are there
        self.width, self.seen = capacity, 0
        self.depth = layers
        self.stack: Tensor | None = None  # [2 * layers, B, H, S, E]
        self.loose: list[Tensor] = []
        self._slots: Tensor | None = None
        self._flat: dict[int, Tensor] = {}
        self._positions_BS: Tensor | None = None
        super().__init__(layers=[_SlotLayer(self, i) for i in range(layers)])

    def room(self, index: int, like: Tensor) -> Tensor:
        """A zeroed buffer for keys (even index) or values (odd) shaped like these entries."""
        rows, heads, _, size = like.shape
        shape = (rows, heads, self.size, size)
        # zeros, never empty: masked garbage could be NaN, and 0 * NaN poisons a row
        if self.stack is None:
            self.stack = like.new_zeros(2 * self.depth, *shape)
        if self.stack.shape[1:] == shape and self.stack.dtype == like.dtype:
            if self.stack.device == like.device:
                return self.stack[index]
        own = like.new_zeros(shape)
        self.loose.append(own)
        return own

    def begin(self, slots_BQ: Tensor, width: int, seen: int) -> None:
        """Set where the next forward writes and how many slots it sees."""
        needed = min(width + SPARE, self.capacity)
        if needed > self.size:
            self._grow(min(max(needed, 2 * self.size), self.capacity))
        self._slots, self.width, self.seen = slots_BQ, width, seen
        self._flat.clear()

    def _grow(self, size: int) -> None:
        """More slots; entries keep theirs. The width is known to the host: nothing is read."""
        more, old = size - self.size, self.stack
        self.size, self.loose = size, []
        if old is not None:
            self.stack = _longer(old, more)
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            for name, index in (("keys", 2 * layer.index), ("values", 2 * layer.index + 1)):
                buffer = getattr(layer, name)
                if old is not None and buffer.data_ptr() == old[index].data_ptr():
                    assert self.stack is not None
                    setattr(layer, name, self.stack[index])
                else:
                    self.loose.append(_longer(buffer, more))
                    setattr(layer, name, self.loose[-1])

    def place(self, positions_BQ: Tensor) -> Tensor:
        """Note the positions of the entries being written; returns those of all slots [B, S].

        Only models with windows or position biases ask for it. A committed entry's position is its
        slot; a tree's nodes are the exception, until `keep` has moved the path.
        """
        assert self._slots is not None
        if self._positions_BS is None:
            every = torch.arange(self.capacity, device=positions_BQ.device)
            self._positions_BS = every.repeat(self.rows, 1)
        return self._positions_BS.scatter_(1, self._slots, positions_BQ)

    @property
    def line(self) -> Tensor:
        """Slots [Q] of the only row."""
        assert self._slots is not None
        return self._slots[0]

    def flat(self, heads: int) -> Tensor:
        """Row numbers of the slots in a buffer viewed as [B * H * S, E]."""
        if heads not in self._flat:
            assert self._slots is not None
            self._flat[heads] = self._lines(self._slots, self.rows * heads, heads)
        return self._flat[heads]

    def _lines(self, slots_BQ: Tensor, planes: int, heads: int) -> Tensor:
        base = torch.arange(planes, device=slots_BQ.device).view(-1, self.rows, heads, 1)
        return (base * self.size + slots_BQ[:, None, :]).flatten()

    def keep(self, first_B: Tensor, path_BD: Tensor) -> None:
        """Move the accepted path (node numbers, -1 padded) next to its root at slot `first_B`."""
        depth = path_BD.shape[1]
        if depth == 0 or (self.stack is None and not self.loose):
            return
        to = first_B[:, None] + torch.arange(1, depth + 1, device=path_BD.device)
        # padding moves an entry onto itself
        source = torch.where(path_BD >= 0, first_B[:, None] + path_BD, to)
        if self._positions_BS is not None:
            self._positions_BS.scatter_(1, to, to)
        for buffer in ([] if self.stack is None else [self.stack]) + self.loose:
            if self.rows == 1:
                buffer.index_copy_(-2, to[0], buffer.index_select(-2, source[0]))
                continue
            heads, size = buffer.shape[-3], buffer.shape[-1]
            planes = buffer.numel() // (self.size * size)
            flat = buffer.view(-1, size)
            moved = flat.index_select(0, self._lines(source, planes, heads))
            flat.index_copy_(0, self._lines(to, planes, heads), moved)

    def take(self, rows_B: Tensor) -> "SlotCache":
        """A cache with only these rows, in this order."""
        few = SlotCache(self.depth, rows_B.shape[0], self.capacity)
        few.size = self.size
        stack = None if self.stack is None else self.stack.index_select(1, rows_B)
        few.stack = stack
        if self._positions_BS is not None:
            few._positions_BS = self._positions_BS.index_select(0, rows_B)
        for mine, theirs in zip(self.layers, few.layers, strict=True):
            if not mine.is_initialized:
                continue
            for name, index in (("keys", 2 * mine.index), ("values", 2 * mine.index + 1)):
                buffer = getattr(mine, name)
                shared = (
                    self.stack is not None and buffer.data_ptr() == self.stack[index].data_ptr()
                )
                if shared:
                    assert stack is not None
                    setattr(theirs, name, stack[index])
                else:
                    own = buffer.index_select(0, rows_B)
                    few.loose.append(own)
                    setattr(theirs, name, own)
            theirs.is_initialized = True
        return few


def _longer(buffer: Tensor, more: int) -> Tensor:
    """Zeroed slots at the end of each row."""
    return torch.nn.functional.pad(buffer, (0, 0, 0, more))
