"""How prompts enter a cache, and how wide a cache a call sees: shared by the step and drafters."""

from typing import Any

import torch
from torch import Tensor

from outrider.nodes import causal
from outrider.types import LanguageModel

#: Visible widths are multiples of this, so that bf16 sums run in one order (docs/log.md).
ROUND = 128
#: Prompt tokens per prefill call, which bounds the mask's size.
CHUNK = 512


def width(bound: int, nodes: int, capacity: int) -> int:
    """Visible cache width for rows of at most `bound` tokens and a tree of `nodes`."""
    return min(-(-(bound + nodes) // ROUND) * ROUND, capacity)


@torch.inference_mode()
def ingest(model: LanguageModel, cache: Any, tokens_BL: Tensor, count: int) -> None:
    """Write the first `count` tokens of every row, right-padded rows included, in chunks.

    Entries beyond a row's own length are never visible to it and are overwritten later.
    """
    device = tokens_BL.device
    rows = tokens_BL.shape[0]
    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)
        at = torch.arange(start, stop, device=device)[None].expand(rows, -1)
        wide = width(stop, 0, cache.capacity)
        model.forward(cache, causal(tokens_BL[:, start:stop], at, wide), last=1)
