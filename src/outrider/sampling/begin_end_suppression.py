"""Tokens that are banned or forced at certain places of a text: its beginning and its end."""

import torch
from torch import Tensor

from outrider.row_params import Shaping
from outrider.sampling.prefixes import NodePrefixes, ceiling


def ban(logits_BRV: Tensor, shaping: Shaping, prefixes: NodePrefixes) -> None:
    """Stop tokens before the least length, and what must not come first. Written in place."""
    if prefixes.context.least >= shaping.opened:
        return
    if shaping.stops_BK is not None and shaping.least_B is not None:
        _ban_few(logits_BRV, shaping.stops_BK, prefixes.made_BR < shaping.least_B[:, None])
    if shaping.begin_BK is not None:
        begins = prefixes.made_BR == 0
        if shaping.first_B1 is not None:  # a text begins behind a forced first token
            begins = prefixes.made_BR == (shaping.first_B1 >= 0).long()
        _ban_few(logits_BRV, shaping.begin_BK, begins)


def force(logits_BRV: Tensor, shaping: Shaping, prefixes: NodePrefixes) -> None:
    """The first and the last token of a text, where they are given. Written in place."""
    forced, length, end_B = None, prefixes.context.length_B, shaping.end_B
    if shaping.first_B1 is not None:
        forced = torch.where(prefixes.made_BR == 0, shaping.first_B1, -1)
    # no row is longer than `bound`, and no path than the nodes: mostly no end is near
    far = prefixes.context.bound + prefixes.stop < shaping.soonest
    if shaping.last_B1 is not None and end_B is not None and not far:
        ends = (length - end_B)[:, None] + prefixes.depth_BR == -1
        other = -1 if forced is None else forced
        forced = torch.where(ends & (shaping.last_B1 >= 0), shaping.last_B1, other)
    if forced is None:
        return
    here, index = forced >= 0, forced.clamp(min=0)[..., None]
    own = torch.where(here[..., None], 0.0, logits_BRV.gather(2, index))
    logits_BRV.clamp_(max=ceiling(here)).scatter_(2, index, own)


def _ban_few(logits_BRV: Tensor, ids_BK: Tensor, where_BR: Tensor) -> None:
    """Ban a row's ids (-1: none) at these nodes, and touch nothing else."""
    count = logits_BRV.shape[1]
    banned = where_BR[..., None] & (ids_BK >= 0)[:, None]
    least = torch.where(banned, -torch.inf, torch.inf).to(logits_BRV.dtype)
    index = ids_BK.clamp(min=0)[:, None].expand(-1, count, -1)
    logits_BRV.scatter_reduce_(2, index, least, "amin")
