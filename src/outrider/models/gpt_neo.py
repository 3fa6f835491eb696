"""GPT-Neo: its local layers cut a window out of an internal table indexed by slot.

For the time of a call the table answers with the window by position instead, and the global layers'
table with everything: what may be seen is in the mask that the model adds afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from outrider.models.hf import TransformersRunner
from outrider.models.model_lock import alone, mine


class _Answer:
    """Whatever is sliced from it, it is this mask; another thread's plain call gets the table."""

    def __init__(self, mask: Tensor, table: Tensor) -> None:
        self._answer = mine(lambda _: mask, lambda index: table[index])

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self._answer(index)


class GPTNeoRunner(TransformersRunner):
    """GPT-Neo with windows by position."""

    tracks = True

    @contextmanager
    def around(
        self, keys_BW: Tensor | None, positions_BQ: Tensor, visible_BQW: Tensor
    ) -> Iterator[None]:
        """Hide the attention modules' tables."""
        assert keys_BW is not None
        near = positions_BQ[:, :, None] - keys_BW[:, None] < self.config.window_size
        masks = {"local": near[:, None]}
        everything = torch.ones_like(near[:1, :1, :1])[:, None]
        modules = [block.attn.attention for block in self.model.transformer.h]
        with alone(self.model):
            try:
                for attention in modules:  # in front of the buffer, which stays where it is
                    mask = masks.get(attention.attention_type, everything)
                    attention.__dict__["bias"] = _Answer(mask, attention._buffers["bias"])
                yield
            finally:
                for attention in modules:
                    attention.__dict__.pop("bias", None)
