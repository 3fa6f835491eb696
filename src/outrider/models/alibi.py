"""ALiBi families: the bias depends on the key's position alone, so it is rebuilt from positions.

The models build it from a 2-D padding mask (BLOOM, Falcon) or from slot numbers (MPT); both are
wrong on a tree, where siblings share a position. Softmax ignores what is equal for all keys of a
query, so slope * key position serves every query.
"""

from contextlib import AbstractContextManager
from threading import RLock

import torch
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from outrider.models.hf import TransformersRunner
from outrider.models.model_lock import alone, instead

_LOCK = RLock()  #: Falcon's builder belongs to all its models
_FALCON = modeling_falcon.build_alibi_tensor


class BloomRunner(TransformersRunner):
    """BLOOM: the bias builder is a method of the decoder."""

    tracks = True

    def around(
        self, keys_BW: Tensor | None, positions_BQ: Tensor, visible_BQW: Tensor
    ) -> AbstractContextManager[None]:
        """Swap the builder."""
        assert keys_BW is not None

        def build(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
            slopes = modeling_bloom._get_alibi_slopes(heads, keys_BW.device)
            bias = slopes[:, None] * keys_BW[:, None, :]
            built: Tensor = bias.flatten(0, 1)[:, None].to(dtype)
            return built

        return instead(alone(self.model), self.model.transformer, "build_alibi_tensor", build)


class FalconRunner(TransformersRunner):
    """Falcon with ALiBi: the builder is a function of its module, swapped under a lock."""

    tracks = True

    def around(
        self, keys_BW: Tensor | None, positions_BQ: Tensor, visible_BQW: Tensor
    ) -> AbstractContextManager[None]:
        """Swap the builder."""
        assert keys_BW is not None

        def build(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
            # rows of the model's own builder, picked by position: its rounding is part of the model
            ones = torch.ones_like(keys_BW[:1])  # a position never exceeds its slot
            table: Tensor = _FALCON(ones, heads, dtype)[:, 0]  # [H, positions]
            return table[:, keys_BW].transpose(0, 1).flatten(0, 1)[:, None]

        return instead(_LOCK, modeling_falcon, "build_alibi_tensor", build)


class _PerRow:
    """A bias [B, H, 1, W] where MPT's attention expects [H, 1, W] and slices its end."""

    def __init__(self, bias_BH1W: Tensor) -> None:
        self.bias, self.shape = bias_BH1W, bias_BH1W.shape[1:]

    def size(self, dim: int) -> int:
        return int(self.shape[dim])

    def __getitem__(self, _: object) -> Tensor:
        return self.bias


class MptRunner(TransformersRunner):
    """MPT: the builder counts slots, and its result has no batch dimension."""

    tracks = True

    def around(
        self, keys_BW: Tensor | None, positions_BQ: Tensor, visible_BQW: Tensor
    ) -> AbstractContextManager[None]:
        """Swap the builder."""
        assert keys_BW is not None

        def build(
            heads: int, length: int, alibi_bias_max: int = 8, device: object = None
        ) -> _PerRow:
            two = modeling_mpt.build_mpt_alibi_tensor(heads, 2, alibi_bias_max, keys_BW.device)
            slopes = two[:, :, 1:] - two[:, :, :1]  # [H, 1, 1]: one step of position
            return _PerRow(slopes * (keys_BW[:, None, None, :] + (1 - length)))

        return instead(alone(self.model), self.model.transformer, "build_mpt_alibi_tensor", build)
