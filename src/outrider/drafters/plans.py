"""Constant tables of a tree shape as its NumPy drafters read them."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.shape_tables import Level, Tables, tables
from outrider.types import Kind

Array = np.ndarray[Any, np.dtype[Any]]


class Plan(NamedTuple):
    """Constant tables of one shape, as tensors and as lists."""

    table: Tables
    depth_N: Array
    levels: tuple[tuple[Level, Array, Array, Array], ...]  #: with parent, rank and fan
    kind_BNK: Tensor
    row_BNK: Tensor
    lists: tuple[Any, Any, Any]  #: draws, kinds and rows of one batch row
    placed: tuple[Array, Array, Array]  #: parent, node and rank of every child but the first ones


@lru_cache(maxsize=64)
def plan(parents: tuple[int, ...], hub: bool) -> Plan:
    """The tables of a shape, by the parent of each node; with `hub` later children are placed."""
    table = tables(parents)
    draws = table.draws_BNK
    kind = torch.full_like(draws, int(Kind.WITHOUT))
    if hub:
        kind[..., 1:] = int(Kind.FIXED)
    row = rows(draws, kind)
    parent, rank = np.nonzero(draws[0].numpy()[:, 1:] >= 0)
    return Plan(
        table,
        table.tree.depth_BN[0].numpy(),
        tuple((v, v.parent_m.numpy(), v.rank_m.numpy(), v.fan_n.numpy()) for v in table.levels),
        kind,
        row,
        tuple(t[0].tolist() for t in (draws, kind, row)),  # type: ignore[arg-type]
        (parent, draws[0].numpy()[parent, rank + 1], rank + 1),
    )


def rows(draws_BNK: Tensor, kind_BNK: Tensor) -> Tensor:
    """The law row of each draw: its node, or -1 where nothing is drawn."""
    node = torch.arange(draws_BNK.shape[1])[None, :, None]
    return torch.where((draws_BNK >= 0) & (kind_BNK != Kind.FIXED), node, -1)
