"""GPT-Neo: its local layers cut a window out of an internal table indexed by slot.

For the time of a call the table answers with the window by position instead, and the global layers'
table with everything: what may be seen is in the mask that the model adds afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from outrider.models.hf import TransformersRunner


class _Answer:
    """Whatever is sliced from it, it is this mask."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __getitem__(self, _: Any) -> Tensor:
        return self.mask


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
        answers = {"local": _Answer(near[:, None])}
        everything = _Answer(torch.ones_like(near[:1, :1, :1])[:, None])
        hidden = []
        try:
            for block in self.model.transformer.h:
                attention = block.attn.attention
                hidden.append((attention, attention._buffers.pop("bias")))
                kind = answers.get(attention.attention_type, everything)
                attention.__dict__["bias"] = kind
            yield
        finally:
            for attention, table in hidden:
                del attention.__dict__["bias"]
                attention._buffers["bias"] = table
