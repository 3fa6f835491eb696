"""States by slot: what a head is given of the tokens before it, kept like a model's entries."""

import torch
from torch import Tensor

from outrider.models.cache import SlotCache


def store(rows: int, capacity: int) -> SlotCache:
    """Room for one state per slot, of whatever width is written first."""
    return SlotCache(1, rows, capacity)


def write(states: SlotCache, slots_BQ: Tensor, wide: int, state_BQE: Tensor) -> None:
    """Put states [B, Q, E] of an even width into slots below `wide`."""
    states.begin(slots_BQ, wide, 0)
    first, second = state_BQE[:, None].chunk(2, -1)
    states.update(first, second, 0)


def read(states: SlotCache, slots_BQ: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The states [B, Q, width] of these slots; zeros while nothing was written."""
    rows, queries = slots_BQ.shape
    if not states.stacks:
        return torch.zeros(rows, queries, width, dtype=dtype, device=slots_BQ.device)
    layer = states.layers[0]
    at = slots_BQ[:, None, :, None].expand(-1, 1, -1, width // 2)
    halves = [plane[:rows].gather(2, at)[:, 0] for plane in (layer.keys, layer.values)]
    return torch.cat(halves, -1).to(dtype)
