"""The most probable tokens of laws on a CPU: two passes over each, and nothing is sorted whole."""

import numpy as np
import torch
from torch import Tensor

from outrider.ops.cpu import compiled, host_tables
from outrider.types import Laws


def likely(laws: Laws, count: int, gap: float) -> Tensor:
    """As `outrider.ops.reference.draws.likely`; of equals the first."""
    logits = laws.logits_BRV.detach()
    native = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    shape = (*logits.shape[:2], count)
    floor_BR = laws.floor_BR
    whole = native.numpy().reshape(-1, logits.shape[-1])
    at_once = compiled.likely(
        whole, None if floor_BR is None else floor_BR.numpy().ravel(), count, gap
    )
    if at_once is not None:
        return torch.from_numpy(at_once).view(shape)
    floors = None if floor_BR is None else floor_BR.tolist()
    found = []
    for b, rows in enumerate(native.numpy()):
        for r, z in enumerate(rows):
            least = z.max() - gap
            if floors is not None:
                least = max(least, floors[b][r])
            index = np.flatnonzero(z >= least)
            best = index[np.argsort(-z[index], kind="stable")[:count]].tolist()
            found.append(best + [-1] * (count - len(best)))
    return host_tables.numbers(found).view(shape)
