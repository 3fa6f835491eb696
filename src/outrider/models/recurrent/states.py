"""What layers with a state keep of rows: a state of the settled text, and a log behind it.

A row's state stands at the end of its settled text (`base_B`). What later nodes add to it lies in a
ring by slot: the entries of the update, inputs of convolutions, the slot of each node's parent, and
how long its text is.
Nothing is undone: an entry that was rejected is written over, an accepted path is moved next to its
root (`keep`), and settled entries are applied one by one, by the operation that made the nodes' own
states, so that a state has the same bits whether its text was drafted or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.models.recurrent.call import NodeStates, Recurrence, StateCall
from outrider.types import Nodes

RING = 32  #: slots of a log to begin with; doubled for larger trees
UNLIMITED = (0.0, float("inf"))
BEHIND = 8  #: slots ahead of the state whose convolution inputs are still read, at least


@dataclass
class StateLog:
    """One layer's states, and the entries of what came behind them."""

    recurrence: Recurrence
    state: Tensor  #: [max_rows, ...] float32
    entries: tuple[Tensor, ...]  #: [max_rows, R, ...] each


class RecurrentStates:
    """States, logs and convolution inputs of all layers that have some. A `RowStore`.

    A row's part has one size however long its text:

    >>> states = RecurrentStates(2, torch.device("cpu"))
    >>> states.take([1]).base_B.tolist()
    [0]
    """

    def __init__(
        self, rows: int, device: torch.device, limit: tuple[float, float] = UNLIMITED
    ) -> None:
        self.rows, self.max_rows, self.ring, self.behind = rows, rows, RING, BEHIND
        self.base_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self._parent_BR = torch.full((rows, RING), -1, device=device)
        self._depth_BR = torch.zeros_like(self._parent_BR)  # tokens of each node's text
        self.logs: dict[tuple[int, int], StateLog] = {}  # by layer and number
        self.inputs: dict[tuple[int, int], Tensor] = {}  # layer, number -> [max_rows, R, C]
        self._call: StateCall | None = None
        self._torn = False  #: whether some layers' states stand behind others'
        #: by layer and number, the first slot and the number of each row's entries that its state
        #: is advanced by in the call, by the kernel that reads it anyway
        self._due: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.limit = limit  #: what a model's whole forward cuts the steps of its recurrences to

    # ------------------------------------------------------------------ calls

    def begin(self, nodes: Nodes) -> Nodes:
        """Apply what is settled, and set what the next forward reads; the nodes that it reads.

        Nodes in slots that are settled already are the first one behind them once more: they write
        what it writes, where it does.
        """
        base_B, slots_BQ = self.base_B[: self.rows], nodes.slots_BQ
        first_B = slots_BQ.amin(1)
        before_B = base_B.clone()
        self._apply((torch.minimum(nodes.settled_B, first_B) - base_B).clamp(min=0))
        if bool((first_B < base_B).any()):
            nodes = _behind(nodes, base_B)
            slots_BQ = nodes.slots_BQ
            first_B = torch.maximum(first_B, base_B)
        if bool((nodes.settled_B > first_B).any()):
            self.flush()
            self._call = StateCall.reading(nodes, self.ring)
            self.base_B[: self.rows] = torch.maximum(base_B, self._call.settled_B)
        else:
            # with room for what is due: a row's entries are written before others' are applied
            self._fit(self.max_rows, int((slots_BQ.amax(1) - before_B).max()) + 1 + self.behind)
            tables = (table[: self.rows] for table in (self._parent_BR, self._depth_BR))
            self._call = StateCall.growing(nodes, base_B, *tables)
        self._call.note(self._parent_BR[: self.rows], self._call.parent_BQ)
        self._call.note(self._depth_BR[: self.rows], self._call.depth_BQ)
        return nodes

    def windows(self, layer: int, number: int, x_BCQ: Tensor, size: int) -> Tensor:
        """Write inputs of a layer's convolution; of each node and those before it [B, C, Q, K]."""
        ring_BRC = self._inputs((layer, number), x_BCQ, size)
        return self._here().windows(ring_BRC, x_BCQ.mT, size).permute(0, 3, 1, 2)

    def convolve(
        self,
        layer: int,
        number: int,
        x_BCQ: Tensor,
        weight_CK: Tensor,
        bias_C: Tensor | None,
        activation: str | None,
    ) -> Tensor:
        """Write them; what the convolution has of each node [B, C, Q], compiled."""
        ring_BRC = self._inputs((layer, number), x_BCQ, weight_CK.shape[1])
        call = self._here()
        return call.convolve(ring_BRC, x_BCQ.mT, weight_CK, bias_C, activation).mT

    def _inputs(self, place: tuple[int, int], x_BCQ: Tensor, size: int) -> Tensor:
        """The ring [B, R, C] of the inputs of a layer's convolution."""
        if size > self.behind:  # in a model's first call, before anything is left out
            self.behind = 1 << size.bit_length()
        if place not in self.inputs:
            self.inputs[place] = x_BCQ.new_zeros(self.max_rows, self.ring, x_BCQ.shape[1])
        return self.inputs[place][: self.rows]

    def recur(self, layer: int, number: int, recurrence: Recurrence, *inputs: Tensor) -> Tensor:
        """Outputs [B, Q, ...] of a layer's recurrence over the call's nodes, written to its log."""
        call, rows = self._here(), self.rows
        if (layer, number) not in self.logs:
            self.logs[layer, number] = self._log(recurrence, inputs)
        log = self.logs[layer, number]
        log.recurrence = recurrence
        state = log.state[:rows]
        if call.pieces:
            out, entries, settled = call.read(recurrence, state, inputs)
            state.copy_(settled)
        else:
            some, due = tuple(ring[:rows] for ring in log.entries), None
            if call.origins_BQ is not None and recurrence.takes_due(state):
                due = self._due.get((layer, number)) or (self.base_B[:rows], call.none_B)
            else:
                self.flush((layer, number))
            nodes = NodeStates(call, recurrence, state, some, due)
            out, entries = recurrence.over_nodes(nodes, *inputs)
            self._due.pop((layer, number), None)
            if due is not None:
                return out
        for ring, entry in zip(log.entries, entries, strict=True):
            call.note(ring[:rows], entry)
        return out

    def keep(self, first_B: Tensor, path_BD: Tensor) -> None:
        """Move the accepted path (node numbers, -1 padded) next to its root at slot `first_B`."""
        depth = path_BD.shape[1]
        if not depth:
            return
        to = first_B[:, None] + torch.arange(1, depth + 1, device=path_BD.device)
        source = torch.where(path_BD >= 0, first_B[:, None] + path_BD, to)
        into, of = to % self.ring, source % self.ring
        row = torch.arange(self.rows, device=to.device)[:, None] * self.ring
        lines, source = (into + row).flatten(), (of + row).flatten()
        logs = (ring for log in self.logs.values() for ring in log.entries)
        for table in (*self.inputs.values(), *logs):  # by whole entries, as `StateCall.note` says
            flat = table.view(-1, *table.shape[2:])
            flat.index_copy_(0, lines, flat.index_select(0, source))
        self._parent_BR.view(-1).index_copy_(0, lines, (to - 1).flatten())
        self._depth_BR.view(-1).index_copy_(0, lines, (to + 1).flatten())

    # ------------------------------------------------------------------ rows come and go

    def take(self, rows: Sequence[int]) -> "RecurrentStates":
        self.flush()
        few = RecurrentStates(len(rows), self.base_B.device, self.limit)
        at = torch.tensor(list(rows), dtype=torch.int64, device=self.base_B.device)
        few.ring, few.behind = self.ring, self.behind
        few._change(self, lambda table: table.index_select(0, at))
        return few

    def checkpoint(self, row: int) -> "RecurrentStates":
        """A copy of one row's state, and of the inputs that convolutions still read: no log."""
        one = self.take([row])
        one._turn(one.behind)
        return one

    def put(self, into: Sequence[int], other: "RecurrentStates") -> Self:
        """Write the rows of `other` at these rows; returns this object."""
        self.flush()
        other.flush()
        rows = max(self.rows, 1 + max(into, default=-1))
        if other.ring < self.ring:
            other = other.take(range(other.rows))
        ring, self.behind = max(self.ring, other.ring), max(self.behind, other.behind)
        other._fit(other.max_rows, ring)
        self._fit(rows, ring)
        self.rows, self._call = rows, None
        for place, log in other.logs.items():
            if place not in self.logs:
                tables = [_empty_rows(t, self.max_rows) for t in (log.state, *log.entries)]
                self.logs[place] = StateLog(log.recurrence, tables[0], tuple(tables[1:]))
                log.recurrence.begin(tables[0])
        for name, table in other.inputs.items():
            self.inputs.setdefault(name, _empty_rows(table, self.max_rows))
        at = torch.tensor(list(into), dtype=torch.int64, device=self.base_B.device)
        known = other._tables()
        for each, mine in self._tables().items():
            theirs = known.get(each)
            if theirs is None:  # nothing was read there yet
                mine.index_fill_(0, at, 0)
            else:
                mine.index_copy_(0, at, theirs[: other.rows])
        for unread in self.logs.keys() - other.logs.keys():
            empty = _empty_rows(self.logs[unread].state, len(at))
            self.logs[unread].recurrence.begin(empty)
            self.logs[unread].state.index_copy_(0, at, empty)
        return self

    def narrow(self, rows: int) -> Self:
        """The first rows; those behind them are free for `put`."""
        self.flush()
        self.rows, self._call = rows, None
        return self

    @property
    def bytes(self) -> int:
        """What all rows take."""
        return sum(table.numel() * table.element_size() for table in self._tables().values())

    # ------------------------------------------------------------------ inside

    def _here(self) -> StateCall:
        assert self._call is not None, "a forward without `begin`"
        return self._call

    def _log(self, recurrence: Recurrence, inputs: Sequence[Tensor]) -> StateLog:
        """Zeroed tables for a layer with inputs like these."""
        state, entries = recurrence.shapes(*inputs)
        made = [
            torch.zeros(self.max_rows, *shape, dtype=torch.float32, device=inputs[0].device)
            for shape in (state, *((self.ring, *entry) for entry in entries))
        ]
        recurrence.begin(made[0])
        return StateLog(recurrence, made[0], tuple(made[1:]))

    def _apply(self, count_B: Tensor) -> None:
        """Advance the rows' states by so many entries of the log each."""
        base_B = self.base_B[: self.rows]
        if self._torn:
            raise MemoryError("states of some layers only were advanced, as memory ran out")
        self.flush()
        if bool((count_B > 0).any()):
            self._torn, due = True, (base_B.clone(), count_B)
            for place, log in self.logs.items():
                self._due[place] = due
                if not log.recurrence.takes_due(log.state[: self.rows]):
                    self.flush(place)
            self._torn = False
        base_B += count_B

    def flush(self, place: tuple[int, int] | None = None) -> None:
        """Apply what is due: of one layer, or of all that the last call left out."""
        for each in [place] if place is not None else [*self._due]:
            if (due := self._due.get(each)) is not None:
                log = self.logs[each]
                entries = tuple(ring[: self.rows] for ring in log.entries)
                log.recurrence.apply(log.state[: self.rows], entries, *due)
                del self._due[each]

    def _tables(self) -> dict[tuple[object, ...], Tensor]:
        """All tables by name, [max_rows, ...] each."""
        tables: dict[tuple[object, ...], Tensor] = {
            ("base",): self.base_B,
            ("parent",): self._parent_BR,
            ("depth",): self._depth_BR,
        }
        for part, table in self.inputs.items():
            tables["inputs", *part] = table
        for part, log in self.logs.items():
            for number, table in enumerate((log.state, *log.entries)):
                tables["log", *part, number] = table
        return tables

    def _change(self, source: "RecurrentStates", to: Callable[[Tensor], Tensor]) -> None:
        """Take the tables of `source`, each changed in the same way."""
        self.base_B, self._parent_BR = to(source.base_B), to(source._parent_BR)
        self._depth_BR = to(source._depth_BR)
        self.inputs = {name: to(table) for name, table in source.inputs.items()}
        self.logs = {
            place: replace(log, state=to(log.state), entries=tuple(map(to, log.entries)))
            for place, log in source.logs.items()
        }

    def _fit(self, max_rows: int, ring: int) -> None:
        """Longer tables if there are fewer rows or slots."""
        if ring > self.ring or max_rows > self.max_rows:
            self.flush()
        if ring > self.ring:
            self._turn(1 << (ring - 1).bit_length())
        if max_rows > self.max_rows:
            self.max_rows = max(max_rows, 2 * self.max_rows)
            self._change(self, lambda table: _padded(table, self.max_rows))

    def _turn(self, ring: int) -> None:
        """Give the logs so many slots: those from `behind` ahead of the states on."""
        place = torch.arange(ring, device=self.base_B.device)
        lowest = self.base_B[:, None] - self.behind
        # the slot of each new place that is nearest above the lowest that is still read
        at = (lowest + (place - lowest) % ring) % self.ring
        # all or nothing: there may be no memory for it
        parents, depths = (table.gather(1, at) for table in (self._parent_BR, self._depth_BR))
        inputs = {n: t.gather(1, _wide(at, t)) for n, t in self.inputs.items()}
        entries = [
            tuple(t.gather(1, _wide(at, t)) for t in log.entries) for log in self.logs.values()
        ]
        self.ring, self._parent_BR, self._depth_BR, self.inputs = ring, parents, depths, inputs
        for log, longer in zip(self.logs.values(), entries, strict=True):
            log.entries = longer


def _behind(nodes: Nodes, base_B: Tensor) -> Nodes:
    """The nodes of chains, those below `base_B` replaced by the first one that is not."""
    queries = nodes.slots_BQ.shape[1]
    known_B1 = (nodes.slots_BQ < base_B[:, None]).sum(1, keepdim=True)
    assert bool((known_B1 < queries).all()), "a call reads settled text alone"
    at = torch.maximum(torch.arange(queries, device=base_B.device), known_B1)
    tokens, positions, slots, seen = (table.gather(1, _wide(at, table)) for table in nodes[:4])
    return Nodes(tokens, positions, slots, seen, nodes.settled_B)


def _wide(at_BQ: Tensor, table: Tensor) -> Tensor:
    """An index [B, Q] as `gather` and `scatter_` want it for a table [B, R, ...]."""
    at = at_BQ.view(*at_BQ.shape, *[1] * (table.dim() - 2))
    return at.expand(-1, -1, *table.shape[2:])


def _padded(table: Tensor, max_rows: int) -> Tensor:
    return pad(table, (*[0] * (2 * table.dim() - 1), max_rows - table.shape[0]))


def _empty_rows(table: Tensor, max_rows: int) -> Tensor:
    return table.new_zeros(max_rows, *table.shape[1:])
