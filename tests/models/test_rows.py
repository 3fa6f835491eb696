"""A cache whose rows come, move and go equals a plain list of rows, each with its own entries."""

from dataclasses import dataclass, field
from itertools import count
from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st

from outrider.models import cache
from outrider.models.cache import SlotCache
from outrider.types import Inputs

CAPACITY = 40
HEADS = ([2, 2], [2, 1], [1, 2, 4])


@dataclass
class Row:
    """A row of the plain model: a number for every entry that has been committed."""

    entries: list[int]
    fresh: list[int] = field(default_factory=list)  #: written behind them by the last call


class Pair:
    """A cache and the list of rows that it should equal."""

    def __init__(self, heads, tracks, numbers, lengths=()):
        self.heads, self.tracks, self.numbers = heads, tracks, numbers
        self.cache = SlotCache(len(heads), max(len(lengths), 1), CAPACITY).narrow(len(lengths))
        self.rows = [Row([]) for _ in lengths]
        if lengths and max(lengths):  # right-padded prompts, as they are read
            self.write(max(lengths), siblings=False)
            for row, length in zip(self.rows, lengths, strict=True):
                row.entries, row.fresh = row.fresh[:length], []

    def state(self, ids, heads, layer, side):
        """Keys or values [B, H, Q, 1] that tell what they are the entries of."""
        places = 1000 * (10 * layer + 2 * torch.arange(heads) + side)
        return (torch.tensor(ids)[:, None] + places[:, None])[..., None].double()

    def write(self, queries, wider=0, siblings=True):
        """One call: `queries` new nodes behind each row's committed entries."""
        if not self.rows:
            return
        firsts = torch.tensor([len(row.entries) for row in self.rows])
        slots = firsts[:, None] + torch.arange(queries)
        ids = [[next(self.numbers) for _ in range(queries)] for _ in self.rows]
        width = min(int(firsts.max()) + queries + wider, CAPACITY)
        self.cache.begin(slots, width, 0)
        for row, new in zip(self.rows, ids, strict=True):
            row.fresh = new
        if self.tracks:  # siblings share a position
            positions = firsts[:, None].expand(-1, queries) if siblings else slots
            table = self.cache.place(positions)
            for at, row in enumerate(self.rows):
                first = len(row.entries)
                assert table[at, :first].tolist() == list(range(first))
                assert torch.equal(table[at, first : first + queries], positions[at])
        for layer, heads in enumerate(self.heads):
            sides = [self.state(ids, heads, layer, side) for side in (0, 1)]
            for side, seen in enumerate(self.cache.layers[layer].update(*sides)):
                assert seen.shape == (len(self.rows), heads, width, 1)
                assert torch.isfinite(seen).all()
                for at, row in enumerate(self.rows):
                    whole = self.state([row.entries + row.fresh], heads, layer, side)[0]
                    assert torch.equal(seen[at, :, : whole.shape[1]], whole)

    def keep(self, paths):
        """Commit the node 0 and a path of each row."""
        depth = max((len(path) for path in paths), default=0)
        firsts = torch.tensor([len(row.entries) for row in self.rows], dtype=torch.int64)
        padded = [list(path) + [-1] * (depth - len(path)) for path in paths]
        self.cache.keep(firsts, torch.tensor(padded).view(len(paths), depth).long())
        for row, path in zip(self.rows, paths, strict=True):
            row.entries += [row.fresh[0]] + [row.fresh[node] for node in path]
            row.fresh = []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rows_come_move_and_go_as_in_a_list(data):
    draw = data.draw
    heads, tracks, numbers = draw(st.sampled_from(HEADS)), draw(st.booleans()), count(1)
    with mock.patch.object(cache, "FIRST", 4):
        pair = Pair(heads, tracks, numbers, draw(st.lists(st.integers(0, 9), max_size=3)))
        for _ in range(draw(st.integers(1, 8))):
            longest = max((len(row.entries) for row in pair.rows), default=0)
            action = draw(st.sampled_from(("step", "step", "join", "leave", "take", "replace")))
            rows = len(pair.rows)
            if action == "step" and rows and longest <= CAPACITY - 5:
                pair.write(draw(st.integers(1, 4)), wider=draw(st.integers(0, 6)))
                nodes = len(pair.rows[0].fresh)
                path = st.sets(st.integers(1, nodes - 1)).map(sorted) if nodes > 1 else st.just([])
                pair.keep([draw(path) for _ in range(rows)])
            elif action == "join":
                other = Pair(heads, tracks, numbers, draw(st.lists(st.integers(0, 30), max_size=3)))
                pair.cache = pair.cache.put([rows + i for i in range(len(other.rows))], other.cache)
                pair.rows += other.rows
            elif action == "replace" and rows:
                other = Pair(heads, tracks, numbers, [draw(st.integers(0, 30))])
                seat = draw(st.integers(0, rows))
                pair.cache = pair.cache.put([seat], other.cache)
                pair.rows[seat : seat + 1] = other.rows
            elif action == "leave" and rows:
                hole, last = draw(st.integers(0, rows - 1)), rows - 1
                pair.cache = pair.cache.put([hole], pair.cache.take([last])).narrow(last)
                pair.rows[hole] = pair.rows[last]
                pair.rows.pop()
            elif action == "take" and rows:
                order = draw(st.permutations(range(rows)))[: draw(st.integers(1, rows))]
                before, pair.cache = pair.cache, pair.cache.take(order)
                for stack in before.stacks:  # nothing is shared
                    stack.fill_(torch.nan)
                pair.rows = [pair.rows[row] for row in order]
        if max((len(row.entries) for row in pair.rows), default=0) < CAPACITY:
            pair.write(1)


def held(lengths, heads=(2, 2)):
    return Pair(list(heads), False, count(1), lengths)


def test_a_row_that_joins_or_leaves_disturbs_no_buffer_of_its_neighbours():
    pair = held([9, 5, 7])
    slab = SlotCache(2, 4, CAPACITY).narrow(0).put([0, 1, 2], pair.cache)
    storage = slab.stacks[0].data_ptr()
    before = slab.stacks[0].clone()
    slab = slab.put([3], held([3]).cache)
    assert torch.equal(slab.stacks[0][:, :3], before[:, :3])
    slab = slab.put([0], slab.take([3])).narrow(3)
    assert torch.equal(slab.stacks[0][:, 1:3], before[:, 1:3])
    assert torch.equal(slab.stacks[0][:, 0, :, 9:], before[:, 0, :, 9:])  # beyond what is used
    assert slab.stacks[0].data_ptr() == storage
    assert slab.narrow(1).put([1], pair.cache.take([2])).stacks[0].data_ptr() == storage


def test_seats_are_added_when_none_is_free_and_slots_when_a_row_is_longer():
    slab = SlotCache(2, 2, 10).narrow(0)
    slab = slab.put([0, 1], held([4, 2]).cache)
    assert (slab.max_rows, slab.size, slab.capacity) == (2, 10, CAPACITY)
    assert slab.put([2], held([1]).cache).max_rows == 4
    with mock.patch.object(cache, "FIRST", 4):
        short = SlotCache(2, 1, CAPACITY).narrow(0)
        assert short.size == 4
        assert short.put([0], held([11]).cache).size == 11


@pytest.mark.parametrize("rows", [[2], [0, 1]])
def test_a_hole_or_a_missing_row_is_refused(rows):
    with pytest.raises(AssertionError):
        held([1]).cache.put(rows, held([1]).cache)


def source(lengths, first=0):
    """Sources of these lengths, told apart by their numbers."""
    wide = max(lengths)
    ids = first + torch.arange(len(lengths))[:, None] * 100 + torch.arange(1, wide + 1)
    mask = torch.arange(wide) < torch.tensor(lengths)[:, None]
    return Inputs(ids * mask, (ids * mask)[..., None].float(), mask)


def texts(inputs):
    """What each row reads."""
    assert torch.equal(inputs.features[..., 0].long(), inputs.ids_BS)
    assert not inputs.ids_BS[~inputs.mask_BS].any()
    rows = zip(inputs.ids_BS, inputs.mask_BS, strict=True)
    return [ids[mask].tolist() for ids, mask in rows]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_inputs_of_other_lengths_are_padded_and_follow_their_rows(lengths, data):
    inputs, other = (
        source(lengths),
        source(data.draw(st.lists(st.integers(1, 9), min_size=1)), 1000),
    )
    rows, more = texts(inputs), texts(other)
    seat = data.draw(st.integers(0, len(rows)))
    places = [*range(seat, seat + len(more))]
    joined = inputs.put(places, other)
    rows[seat : seat + len(more)] = more
    assert texts(joined) == rows
    order = data.draw(st.permutations(range(len(rows))))
    assert texts(joined.take(order)) == [rows[row] for row in order]
    assert texts(joined.narrow(seat)) == rows[:seat]


def test_a_cache_takes_its_rows_inputs_along():
    def holding(lengths, first):
        one = SlotCache(1, len(lengths), CAPACITY)
        one.inputs = source(lengths, first)
        return one

    slab = SlotCache(1, 4, CAPACITY).narrow(0).put([0, 1], holding([3, 5], 0))
    slab = slab.put([2], holding([7], 1000))
    expected = texts(source([3, 5])) + texts(source([7], 1000))
    assert texts(slab.inputs) == expected
    slab = slab.put([0], slab.take([2])).narrow(2)
    assert texts(slab.inputs) == [expected[2], expected[1]]
    with pytest.raises(AssertionError, match="with and without inputs"):
        slab.put([0], held([1]).cache)


def test_one_row_of_a_cache_writes_into_the_whole():
    pair = held([3, 2, 4])
    before = pair.cache.stacks[0].clone()
    one = pair.cache.row(1)
    one.begin(torch.tensor([[2]]), 3, 2)
    for layer in one.layers:
        keys, _ = layer.update(
            torch.full((1, 2, 1, 1), 7.0).double(), torch.zeros(1, 2, 1, 1).double()
        )
        assert keys.shape == (1, 2, 3, 1)
    after = pair.cache.stacks[0]
    assert (after[::2, 1, :, 2] == 7).all()
    assert not after[1::2, 1, :, 2].any()
    assert torch.equal(after[:, [0, 2]], before[:, [0, 2]])
    assert torch.equal(after[:, 1, :, :2], before[:, 1, :, :2])
