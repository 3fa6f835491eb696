# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""Draft topology for kernels: tokens, draw table, kinds and law rows with their strides.

Fields of these tuples are typed as the host fills them: inside a kernel a tensor is a pointer.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.types import Draft, Draws


class DeviceTables(NamedTuple):
    """Tables [B, N] and [B, N, K]; a leading stride of 0 shares a table between rows."""

    tokens: Tensor
    token_b: int
    draws: Tensor
    draw_b: int
    kinds: Tensor
    kind_b: int
    rows: Tensor
    row_b: int
    most: int  #: K, the stride of a node


class NoiseKeys(NamedTuple):
    """Seeds and start positions, and injected noise for tests."""

    seed: Tensor
    start: Tensor
    uniform: Tensor
    uniform_b: int
    race: Tensor
    race_b: int


@triton.jit
def kid_of(tables, b, node, k):
    """Child of draw k at a node, -1 if there is none."""
    return tl.load(tables.draws + b * tables.draw_b + node * tables.most + k)


@triton.jit
def kind_of(tables, b, node, k):
    """Kind of draw k at a node."""
    return tl.load(tables.kinds + b * tables.kind_b + node * tables.most + k)


@triton.jit
def row_of(tables, b, node, k):
    """Law row of draw k at a node, 0 for a point mass."""
    return tl.maximum(tl.load(tables.rows + b * tables.row_b + node * tables.most + k), 0)


@triton.jit
def token_of(tables, b, kid):
    """Token of a node."""
    return tl.load(tables.tokens + b * tables.token_b + tl.maximum(kid, 0))


def _wide(table: Tensor, batch: int) -> tuple[Tensor, int]:
    table = table.contiguous()
    return table, table.stride(0) if table.shape[0] == batch and batch > 1 else 0


def tables_of(draft: Draft) -> DeviceTables:
    """Pointers to a draft's topology."""
    batch = draft.tokens_BN.shape[0]
    tokens = draft.tokens_BN.contiguous()
    draws, draw_b = _wide(draft.draws_BNK, batch)
    kinds, kind_b = _wide(draft.kind_BNK, batch)
    rows, row_b = _wide(draft.row_BNK, batch)
    return DeviceTables(
        tokens, tokens.stride(0), draws, draw_b, kinds, kind_b, rows, row_b,
        draft.draws_BNK.shape[2],
    )  # fmt: skip


def keys_of(draws: Draws, race: Tensor | None = None) -> tuple[NoiseKeys, bool, bool]:
    """Pointers to the keys, and whether uniforms and a race are injected."""
    device = draws.seed_B.device
    none = torch.empty(1, dtype=torch.float32, device=device)
    uniform = none if draws.uniform_BNK is None else draws.uniform_BNK.float().contiguous()
    noise = none if race is None else race.float().contiguous()
    keys = NoiseKeys(
        draws.seed_B.contiguous(),
        draws.start_B.contiguous(),
        uniform,
        uniform.stride(0) if uniform.dim() > 1 else 0,
        noise,
        noise.stride(0) if noise.dim() > 1 else 0,
    )
    return keys, draws.uniform_BNK is not None, race is not None
