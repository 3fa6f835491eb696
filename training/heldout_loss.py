"""Loss on held-out text: the figure that every change to the recipe is judged by."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def windows(
    tokens: np.ndarray, length: int, rows: int, every: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Consecutive windows with their next tokens, `rows` at a time; of the windows each `every`-th.

    All batches have the same size, so that a compiled model sees one shape; the rest is dropped.
    """
    starts = range(0, len(tokens) - length, length * every)
    for first in range(0, len(starts) - rows + 1, rows):
        picked = [tokens[s : s + length + 1] for s in starts[first : first + rows]]
        block = torch.from_numpy(np.stack(picked).astype(np.int64))
        yield block[:, :-1].contiguous(), block[:, 1:].contiguous()


@torch.no_grad()
def mean_loss(
    model: Callable[[Tensor], Tensor],
    tokens: np.ndarray,
    length: int = 512,
    rows: int = 8,
    every: int = 1,
    device: torch.device | None = None,
) -> float:
    """Nats per token of `model` (tokens to logits), every window from an empty context."""
    losses = []
    for inputs, targets in windows(tokens, length, rows, every):
        logits = model(inputs.to(device)).flatten(0, 1).float()
        losses.append(F.cross_entropy(logits, targets.to(device).flatten()).item())
    return float(np.mean(losses))
