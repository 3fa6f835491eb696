"""One call over layers with states: which state each node starts from, and what lies before it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.models.config import read
from outrider.models.cpu_kernels.mixers import Windows, convolve
from outrider.tree import numbers
from outrider.types import Nodes

PIECE = 64  #: tokens of a text that are taken at once; pieces end at multiples of it


def has_states(model: object) -> bool:
    """Whether some of a model's layers keep a state: its texts are read by pieces then."""
    return bool(read(model, "recurrent", bool))


class TextPiece(NamedTuple):
    """Some of the nodes of a call that reads text."""

    nodes: slice
    ancestors_BQQ: Tensor  #: bool [B, PIECE, PIECE], itself included
    real_BQ: Tensor  #: bool [B, PIECE]: which nodes are text, and not another one once more
    settled_BQ: Tensor | None  #: which of them are settled; None: all


class StateCall:
    """The tables of one call, the same for all layers.

    A call that settles none of its nodes is a tree, or a chain, that grows: each node has a parent,
    in this call or before it. One that does reads text.
    """

    def __init__(self, nodes: Nodes, ring: int, parent_BQ: Tensor, depth_BQ: Tensor) -> None:
        self.slots_BQ, self.parent_BQ, self.ring = nodes.slots_BQ, parent_BQ, ring
        self.depth_BQ = depth_BQ  #: tokens of each node's text
        self.settled_B = nodes.settled_B
        self._rows = torch.arange(len(self.slots_BQ), device=self.slots_BQ.device)[:, None]
        self.pieces: list[TextPiece] = []
        self.lines_BQ: Tensor | None = None  #: [B, Q] ring places of the nodes, of a tree
        self._text: tuple[Tensor, Tensor] | None = None  # [B, R] node of each place, and if any
        self._before: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._walk: tuple[Tensor, Tensor] | None = None
        self.origins: list[list[int]] = []
        self.outside_BED: Tensor | None = None

    # ------------------------------------------------------------------ of the two kinds

    @classmethod
    def growing(
        cls, nodes: Nodes, base_B: Tensor, parent_BR: Tensor, depth_BR: Tensor
    ) -> "StateCall":
        """Nodes that may all be rejected. A node's parent sees all that it sees but itself.

        `origins` says of each row where its nodes start from: 0 is the row's state, 1 + n is node
        n, and what is beyond is outside of the call: a path behind the state, `outside_BED`.
        """
        slots_BQ, ring = nodes.slots_BQ, parent_BR.shape[1]
        low = max(int(base_B.min()) - 1, 0)
        seen = nodes.visible_BQW[..., low:]
        wide = numbers(low + seen.shape[-1], slots_BQ.device)[low:]
        depth_BQ = seen.sum(-1) + low
        known_BW = torch.where(wide < base_B[:, None], wide + 1, depth_BR[:, wide % ring])
        known_BW.scatter_(1, slots_BQ - low, depth_BQ)
        above = seen & (known_BW[:, None] == depth_BQ[..., None] - 1)
        parent_BQ = torch.where(above, wide, -1).amax(-1)
        parent_BQ = torch.maximum(parent_BQ, base_B[:, None] - 1)
        call = cls(nodes, ring, parent_BQ, depth_BQ)
        call.lines_BQ = (slots_BQ % ring).contiguous()
        call._walk = base_B.clone(), parent_BR
        call._start(base_B.tolist(), slots_BQ.tolist(), parent_BQ.tolist(), parent_BR)
        return call

    @classmethod
    def reading(cls, nodes: Nodes, ring: int) -> "StateCall":
        """Text, of which the part below `settled_B` is applied to the states in this call."""
        slots_BQ = nodes.slots_BQ
        queries = slots_BQ.shape[1]
        device = slots_BQ.device
        call = cls(nodes, ring, slots_BQ - 1, slots_BQ + 1)
        real_BQ = pad(slots_BQ[:, 1:] > slots_BQ[:, :-1], (1, 0), value=True)
        last_B = torch.minimum(slots_BQ[:, -1], nodes.settled_B + ring // 2 - 1)
        place = numbers(ring, device)
        slot_BR = last_B[:, None] - (last_B[:, None] - place) % ring
        call._text = (
            torch.searchsorted(slots_BQ.contiguous(), slot_BR.clamp(min=0).contiguous()),
            slot_BR >= slots_BQ[:, :1],
        )
        call.settled_B = torch.minimum(nodes.settled_B, slots_BQ[:, -1] + 1)
        start, first = 0, int(slots_BQ[0, 0])
        while start < queries:
            stop = min((first + start) // PIECE * PIECE + PIECE - first, queries)
            some = slice(start, stop)
            more = PIECE - (stop - start)
            slot = pad(slots_BQ[:, some], (0, more), value=-1)
            real = pad(real_BQ[:, some], (0, more), value=False)
            ancestors = (slot[:, None, :] < slot[..., None]) & real[:, None, :]
            ancestors |= numbers(PIECE, device)[:, None] == numbers(PIECE, device)
            on = real & (slot < nodes.settled_B[:, None])
            whole = torch.equal(on, real)
            call.pieces.append(TextPiece(some, ancestors, real, None if whole else on))
            start = stop
        return call

    def _start(
        self, base: list[int], slots: list[list[int]], parents: list[list[int]], parent_BR: Tensor
    ) -> None:
        """Where nodes start from; paths to parents that were written by an earlier call."""
        outside: list[list[list[int]]] = []
        earlier: list[list[int]] | None = None
        for row, (end, places, above) in enumerate(zip(base, slots, parents, strict=True)):
            here = {slot: 1 + node for node, slot in reversed(list(enumerate(places)))}
            here[end - 1] = 0
            paths: list[list[int]] = []
            for parent in above:
                if parent in here:
                    continue
                if earlier is None:
                    earlier = parent_BR.tolist()
                path, at = [], parent
                while at >= end:
                    path.append(at)
                    at = earlier[row][at % self.ring]
                here[parent] = 1 + len(places) + len(paths)
                paths.append(path[::-1])
            self.origins.append([here[parent] for parent in above])
            outside.append(paths)
        most = max(map(len, outside), default=0)
        if most:
            deep = max(len(path) for paths in outside for path in paths)
            table = [
                [path + [-1] * (deep - len(path)) for path in [*paths, *[[]] * (most - len(paths))]]
                for paths in outside
            ]
            self.outside_BED = torch.tensor(table, device=self.slots_BQ.device)

    # ------------------------------------------------------------------ what layers ask

    @cached_property
    def none_B(self) -> Tensor:
        """No entries, of each row."""
        return torch.zeros_like(self.settled_B)

    @cached_property
    def _flat(self) -> Tensor:
        """The ring places of a tree's nodes [B Q], rows behind one another."""
        assert self.lines_BQ is not None
        return (self.lines_BQ + self._rows * self.ring).flatten()

    @cached_property
    def origins_BQ(self) -> Tensor | None:
        """`origins` as a table; None if some nodes start from states of earlier calls."""
        return torch.tensor(self.origins, device="cpu") if self.outside_BED is None else None

    def note(self, ring_BR: Tensor, entry_BQ: Tensor) -> None:
        """Write the nodes' entries [B, Q, ...] to a ring [B, R, ...]; of text, the last ones."""
        # by whole entries: scatter and gather take each number of an entry by itself, ten times
        # as long, and indexing by two tables three times
        if self.lines_BQ is not None:
            entries = entry_BQ.to(ring_BR.dtype).flatten(0, 1)
            ring_BR.view(-1, *ring_BR.shape[2:]).index_copy_(0, self._flat, entries)
            return
        assert self._text is not None
        node_BR, there_BR = self._text
        found = entry_BQ[self._rows, node_BR.clamp(max=entry_BQ.shape[1] - 1)]
        there = there_BR.view(*there_BR.shape, *[1] * (entry_BQ.dim() - 2))
        ring_BR.copy_(torch.where(there, found, ring_BR))

    def convolve(
        self,
        ring_BRC: Tensor,
        x_BQC: Tensor,
        weight_CK: Tensor,
        bias_C: Tensor | None,
        activation: str | None,
    ) -> Tensor:
        """Write inputs; what a convolution [B, Q, C] has of them, compiled."""
        size = weight_CK.shape[1]
        lines = self.lines_BQ
        source = ring_BRC if lines is not None else self._source(ring_BRC, x_BQC, size)
        windows = Windows(*self._windows(size), lines)
        return convolve(source, windows, x_BQC, weight_CK, bias_C, activation)

    def _source(self, ring_BRC: Tensor, x_BQC: Tensor, size: int) -> Tensor:
        """Write inputs; the table in which windows of so many lie."""
        if self.lines_BQ is not None:
            self.note(ring_BRC, x_BQC)
            return ring_BRC
        before = self.slots_BQ[:, :1] - torch.arange(size - 1, 0, -1, device=x_BQC.device)
        source = torch.cat([ring_BRC[self._rows, before % self.ring], x_BQC], 1)
        self.note(ring_BRC, x_BQC)
        return source

    def windows(self, ring_BRC: Tensor, x_BQC: Tensor, size: int) -> Tensor:
        """Write inputs; those of each node and of the nodes before it, [B, Q, size, C]."""
        rows, queries, wide = x_BQC.shape
        place, there = self._windows(size)
        source = self._source(ring_BRC, x_BQC, size)
        flat = (place.flatten(1) + self._rows * source.shape[1]).flatten()
        found = source.view(-1, wide).index_select(0, flat).view(rows, queries, size, wide)
        return found if there is None else found * there[..., None]

    def _windows(self, size: int) -> tuple[Tensor, Tensor | None]:
        """Places [B, Q, size] of each node and those before it; which are there, None: all."""
        if size in self._before:
            return self._before[size]
        if self._walk is None:
            back = torch.arange(size - 1, -1, -1, device=self.slots_BQ.device)
            slot = self.slots_BQ[..., None] - back
            ahead = slot - self.slots_BQ[:, :1, None]  # below 0: before this call
            inside = torch.searchsorted(
                self.slots_BQ.contiguous(), slot.flatten(1).contiguous()
            ).view_as(slot)
            table = torch.where(ahead < 0, ahead, inside) + size - 1
        else:
            base_B, parent_BR = self._walk
            at, slots = self.slots_BQ, []
            for _ in range(size):
                slots.append(at)
                above = parent_BR.gather(1, at.clamp(min=0) % self.ring)
                at = torch.where(at < base_B[:, None], at - 1, above).clamp(min=-1)
            slot = torch.stack(slots[::-1], -1)
            table = slot % self.ring
        there = slot >= 0
        self._before[size] = table.contiguous(), None if bool(there.all()) else there.contiguous()
        return self._before[size]

    def read(
        self, recurrence: "Recurrence", state: Tensor, inputs: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Outputs and entries of text, and the rows' states behind what is settled of it."""
        outs, logged, settled = [], [], state
        for piece in self.pieces:
            size = piece.nodes.stop - piece.nodes.start
            some = [_filled(x[:, piece.nodes]) for x in inputs]
            out, entries = recurrence.over_text(state, piece.ancestors_BQQ, *some)
            outs.append(out[:, :size])
            logged.append([entry[:, :size] for entry in entries])
            behind = recurrence.settle(state, piece.real_BQ, entries, *some)
            if piece.settled_BQ is None:
                settled = behind
            else:  # rows that end here stay; the others' text goes on
                part = recurrence.settle(state, piece.settled_BQ, entries, *some)
                on_B = piece.settled_BQ.any(1).view(-1, *[1] * (state.dim() - 1))
                settled = torch.where(on_B, part, settled)
            state = behind
        return torch.cat(outs, 1), tuple(map(_joined, zip(*logged, strict=True))), settled


class NodeStates:
    """The states that one layer's nodes start from, while a call goes through them in order."""

    def __init__(
        self,
        call: StateCall,
        recurrence: "Recurrence",
        base: Tensor,
        log: tuple[Tensor, ...],
        due: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._call, self._recurrence, self.base, self.log = call, recurrence, base, log
        #: the entries of each row that the state is to be advanced by ahead of the nodes: the first
        #: slot and how many; None: it is done, and entries of nodes are written for them
        self.due = due
        self._by_node: list[tuple[int, ...]] = []

    @property
    def lines_BQ(self) -> Tensor:
        """The nodes' places in the ring."""
        assert self._call.lines_BQ is not None
        return self._call.lines_BQ

    @property
    def origins_BQ(self) -> Tensor | None:
        """Where nodes start from, as `StateCall.origins`; None if paths of earlier calls do."""
        return self._call.origins_BQ

    def _open(self) -> None:
        """Find which states are made, and until when, before the first of them is asked for."""
        call, base = self._call, self.base
        self._at = -1, base  # the last node that was asked about, and where it starts from
        nodes = len(call.origins[0])
        by_node = list(zip(*call.origins, strict=True))
        self._same = [at[0] if len(set(at)) == 1 else None for at in by_node]
        self._by_node = by_node
        self._last: dict[int, int] = {}  # of each state, the last node that starts from it
        for node, origins in enumerate(by_node):
            self._last.update(dict.fromkeys(origins, node))
        self._made: dict[int, Tensor] = {0: base}
        for number in range(0 if call.outside_BED is None else call.outside_BED.shape[1]):
            self._made[1 + nodes + number] = self._replayed(base, self.log, number)

    def of_parent(self, node: int) -> Tensor:
        """The state [B, ...] that a node starts from; nobody may write to it."""
        if not self._by_node:
            self._open()
        if self._at[0] != node:
            same = self._same[node]
            if same is not None:
                state = self._made[same]
            else:
                each = enumerate(self._by_node[node])
                state = torch.stack([self._made[origin][row] for row, origin in each])
            self._at = node, state
        return self._at[1]

    def advance(self, node: int, entries: Sequence[Tensor]) -> None:
        """Make the state behind a node, if another one starts from it."""
        if 1 + node in self._last:
            same = self._same[node]
            spare = same is None or (same > 0 and self._last[same] == node)
            before = self.of_parent(node)
            self._made[1 + node] = self._recurrence.advance(
                before, entries, before if spare else None
            )
        self._leave(node)

    def place(self, node: int, state: Tensor) -> None:
        """Take the state behind a node, for those that start from it."""
        if 1 + node in self._last:
            self._made[1 + node] = state
        self._leave(node)

    def _leave(self, node: int) -> None:
        """Drop the states that no node behind this one starts from."""
        for origin in set(self._by_node[node]):
            if origin and self._last[origin] == node:
                del self._made[origin]

    def _replayed(self, base: Tensor, log: tuple[Tensor, ...], number: int) -> Tensor:
        """The states behind parents that an earlier call has written, from the log."""
        assert self._call.outside_BED is not None
        slots_BD = self._call.outside_BED[:, number]
        rows = torch.arange(slots_BD.shape[0], device=base.device)
        state: Tensor | None = None
        for slot_B in slots_BD.unbind(1):
            on_B = slot_B >= 0
            entries = [ring[rows, slot_B % self._call.ring] for ring in log]
            if not bool(on_B.all()):
                entries = self._recurrence.idle(entries, on_B)
            before = base if state is None else state
            state = self._recurrence.advance(before, entries, state)
        return base if state is None else state


class Recurrence(ABC):
    """A rule by which tokens update a state. Tables are [B, Q, ...], one line for each node."""

    @abstractmethod
    def shapes(self, *inputs: Tensor) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Of a row's state, and of one node's entries in the log."""

    def begin(self, state: Tensor) -> None:
        """Fill new states with what an empty text has: zeros, by default."""
        state.zero_()

    def takes_due(self, state: Tensor) -> bool:
        """Whether `over_nodes` first applies what is due, and writes the nodes' entries itself."""
        return False

    @abstractmethod
    def over_nodes(self, nodes: NodeStates, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Outputs of a call's nodes and their entries, each from its parent's state.

        No entries where it has written them: where something is due, be it nothing.
        """

    @abstractmethod
    def over_text(
        self, state: Tensor, ancestors_BQQ: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same of a piece of text that stands behind `state`, all at once."""

    @abstractmethod
    def settle(
        self, state: Tensor, on_BQ: Tensor, entries: tuple[Tensor, ...], *inputs: Tensor
    ) -> Tensor:
        """The state behind those tokens of a piece that are `on`."""

    @abstractmethod
    def advance(self, state: Tensor, entries: Sequence[Tensor], into: Tensor | None) -> Tensor:
        """The state behind one node with these entries, written to `into`: it may be `state`."""

    @abstractmethod
    def idle(self, entries: Sequence[Tensor], on_B: Tensor) -> list[Tensor]:
        """Entries that leave the states of other rows as they are, bit for bit."""

    def apply(
        self, state: Tensor, log: tuple[Tensor, ...], first_B: Tensor, count_B: Tensor
    ) -> None:
        """Advance rows' states in place by so many entries of their logs [B, R, ...] each, one
        after the other, from the one in slot `first_B` on."""
        rows = torch.arange(len(state), device=state.device)
        for step in range(int(count_B.max())):
            on_B = count_B > step
            entries = [ring[rows, (first_B + step) % ring.shape[1]] for ring in log]
            if not bool(on_B.all()):
                entries = self.idle(entries, on_B)
            self.advance(state, entries, state)


def _filled(x_BQ: Tensor) -> Tensor:
    """A piece with zeros behind it, so that every piece is computed by the same operations."""
    return pad(x_BQ, (*[0] * (2 * x_BQ.dim() - 3), PIECE - x_BQ.shape[1]))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), 1)
