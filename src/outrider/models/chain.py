"""The fallback where trees cannot be exact: one row at a time, a chain, the model's own mask.

The cache is shown to the model with the exact length it expects, so whatever the model derives from
that length is right. Rows have different lengths, so each is run alone.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from outrider.models.cache import SlotCache
from outrider.models.hf import TransformersRunner
from outrider.types import Nodes, Output


class ChainRunner(TransformersRunner):
    """Runs each row's chain with `attention_mask=None`."""

    trees = False

    def __call__(
        self, cache: SlotCache, nodes: Nodes, last: int | None, aux_layers: tuple[int, ...]
    ) -> Output:
        """Logits of the (last) nodes of every row's chain, and their states at the aux layers."""
        slots_BQ = nodes.slots_BQ
        starts: list[int] = slots_BQ[:, 0].tolist()
        repeated: list[bool] = (slots_BQ[:, :1] == slots_BQ[:, 1:2]).any(1).tolist()
        rows: list[Output] = []
        skips: list[int] = []
        for row, start in enumerate(starts):
            # a one-token prompt re-feeds its only token twice, into one slot
            skip = int(repeated[row])
            tokens, positions, slots, _ = (t[row : row + 1, skip:] for t in nodes[:4])
            own = cache.row(row)
            own.begin(slots, start + slots.shape[1], start)
            assert own.size == cache.size, "a row sees more slots than the whole batch"
            output = self._run(own, tokens, positions, None, None, aux_layers)
            if not cache.stacks:  # the first call of all has made the row's buffers
                cache.put([row], own)
            rows.append(output)
            skips.append(skip)
        wanted = slice(None if last is None else -last, None)

        def whole(parts: Iterable[Tensor]) -> Tensor:
            each = zip(parts, skips, strict=True)
            return torch.cat([torch.cat([x[:, :skip], x], 1) for x, skip in each])[:, wanted]

        states = zip(*(output.hidden for output in rows), strict=True)
        return Output(whole(output.logits_BQV for output in rows), tuple(map(whole, states)))
