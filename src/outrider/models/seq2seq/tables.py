"""Positions of families that count cache entries: their own tables, read by position.

The BART kin add an embedding by the cache's length, the T5 kin a bias by slot. Both are wrong on a
tree, where siblings share a position. Each is asked once, on a plain chain, what it answers there;
for the time of a call the answers are looked up by position instead. Learned or sinusoidal tables,
offsets and buckets so need no knowledge of the family. The tables are copies: they are made when
the runner is.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.models.config import read

Forward = Callable[..., Any]


class Patch(Protocol):
    """A function of a module that is replaced for the time of one call."""

    @property
    def owner(self) -> torch.nn.Module:
        """The module whose function is replaced."""

    @property
    def name(self) -> str:
        """The function's name."""

    @property
    def by_key(self) -> bool:
        """Whether it needs the positions of the keys, too."""

    def at(self, positions_BQ: Tensor, keys_BW: Tensor | None) -> Callable[..., Tensor]:
        """What stands in for the function."""


class ByPosition:
    """An embedding of positions, `embed_positions` in the BART kin."""

    name, by_key = "forward", False

    def __init__(self, owner: torch.nn.Module, most: int, like: Tensor) -> None:
        """`most` positions; `like` has the width, dtype and device of the decoder's states."""
        self.owner = owner
        self.table_PE = _asked(owner, most, like)

    def at(self, positions_BQ: Tensor, keys_BW: Tensor | None) -> Callable[..., Tensor]:
        """Rows of the table, whatever the module is asked."""
        rows = self.table_PE[positions_BQ]
        return lambda *_, **__: rows


class ByDistance:
    """A bias by the distance from query to key, `compute_bias` in the T5 kin."""

    name, by_key = "compute_bias", True

    def __init__(self, owner: torch.nn.Module) -> None:
        self.owner = owner
        far = read(owner, "relative_attention_max_distance", int)
        assert far, f"{type(owner).__name__} names no distance from which on its bias is constant"
        chain = owner.compute_bias(far + 1, far + 1)  # type: ignore[operator]
        self.table_DH: Tensor = chain[0, :, -1].flip(-1).T.contiguous()  # the last query's keys

    def at(self, positions_BQ: Tensor, keys_BW: Tensor | None) -> Callable[..., Tensor]:
        """The bias [B, H, Q, W] by position. What lies ahead is masked anyway."""
        assert keys_BW is not None
        apart = (positions_BQ[:, :, None] - keys_BW[:, None]).clamp(0, len(self.table_DH) - 1)
        bias = self.table_DH[apart].permute(0, 3, 1, 2)
        return lambda *_, **__: bias


#: Types whose decoder looks at its mask in calls of several tokens alone: a lone token is taken to
#: see all entries, and a cache with slots that are empty or another branch's has more.
UNMASKED_ALONE = frozenset({"led"})


def masked_alone(decoder: torch.nn.Module, mask: Tensor) -> list[tuple[torch.nn.Module, Forward]]:
    """Self-attention modules of such a decoder, each with a forward that is given the mask."""

    def seeing(owner: torch.nn.Module) -> Forward:
        own = partial(type(owner).forward, owner)
        return lambda *given, **named: own(*given, **(named | {"attention_mask": mask}))

    owners = [one for name, one in decoder.named_modules() if name.split(".")[-1] == "self_attn"]
    return [(owner, seeing(owner)) for owner in owners]


def embeddings(decoder: torch.nn.Module, most: int, like: Tensor) -> list[Patch]:
    """The tables of positions that a decoder adds by the length of its cache."""
    named = decoder.named_modules()
    owners = [module for name, module in named if name.split(".")[-1] == "embed_positions"]
    return [ByPosition(owner, most, like) for owner in owners]


def biases(decoder: torch.nn.Module) -> list[Patch]:
    """The position biases that a decoder computes by slot."""
    owners = [m for m in decoder.modules() if read(m, "has_relative_attention_bias", bool)]
    return [ByDistance(owner) for owner in owners]


def _asked(owner: torch.nn.Module, most: int, like: Tensor) -> Tensor:
    """What a position embedding answers on a chain of `most` tokens: [P, E]."""
    first = list(inspect.signature(type(owner).forward).parameters)[1]
    if first == "input_ids_shape":
        answer = owner(torch.Size((1, most)))
    elif first == "inputs_embeds":
        answer = owner(like.new_zeros(1, most, like.shape[-1]))
    else:
        padding = read(owner, "padding_idx", int) or 0
        answer = owner(torch.full((1, most), padding + 1, device=like.device))
    table: Tensor = answer if answer.dim() == 2 else answer[0]
    return table.detach().to(like.dtype).clone()
