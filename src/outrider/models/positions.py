"""Families that count positions, or read windows of them, otherwise than by argument."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import RLock

import torch
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from outrider.models.config import read
from outrider.models.hf import TransformersRunner
from outrider.models.model_lock import alone, instead, mine
from outrider.models.multi_modal import MultiModalRunner
from outrider.types import Inputs

# ALiBi families: the bias depends on the key's position alone, so it is rebuilt from positions.
#
# The models build it from a 2-D padding mask (BLOOM, Falcon) or from slot numbers (MPT); both are
# wrong on a tree, where siblings share a position. Softmax ignores what is equal for all keys of a
# query, so slope * key position serves every query.

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
            two = torch.ones(1, 2, dtype=torch.long, device=keys_BW.device)
            slopes = modeling_bloom.build_alibi_tensor(two, heads, torch.float32)[:, 0, 1]
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


# GPT-Neo: its local layers cut a window out of an internal table indexed by slot.
#
# For the time of a call the table answers with the window by position instead, and the global
# layers' table with everything: what may be seen is in the mask that the model adds afterwards.


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


class OffsetPositionsRunner(TransformersRunner):
    """The RoBERTa kin: the first token stands at `pad_token_id + 1`."""

    first_position = None


class _Rows:
    """A table [B, Q, E] of rows where RoFormer expects one for all, which it indexes to 4 axes."""

    def __init__(self, table_BQE: Tensor) -> None:
        self.table_BQE = table_BQE

    def __getitem__(self, _: object) -> Tensor:
        return self.table_BQE[:, None]


class RoFormerRunner(TransformersRunner):
    """RoFormer: rotations from a table that is read by the number of cached tokens."""

    def around(
        self, keys_BW: Tensor | None, positions_BQ: Tensor, visible_BQW: Tensor
    ) -> AbstractContextManager[None]:
        """Swap the reading of the table."""
        table = self.model.roformer.encoder.embed_positions

        def read(*_: object, **__: object) -> _Rows:
            return _Rows(torch.nn.functional.embedding(positions_BQ, table.weight))

        answer: Callable[..., object] = read
        return instead(alone(self.model), table, "forward", answer)


class MoshiRunner(TransformersRunner):
    """Moshi: a window that its cache has and its mask has not.

    transformers' `generate` sees `sliding_window` tokens because its cache drops older ones, but
    reads a prompt, and a text without a cache, in one call that sees all. Here every token sees
    its window, as `generate` has it for prompts that fit in one.
    """

    def plain(self, tokens_1Q: Tensor, inputs: Inputs | None = None) -> Tensor:
        """Logits of a whole text by the model's own forward, behind a windowed mask."""
        return self.logits_of(tokens_1Q, attention_mask=self.windows(tokens_1Q))


# Attention that an indexer makes sparse: DeepSeek V3.2, GLM with DSA and their kin.
#
# Each token attends to the `index_topk` tokens of its prefix that the indexer scores highest. The
# indexer is the model's own and adds the mask that it is given before it chooses, so a tree's node
# chooses among its own ancestors; its keys lie in the slots of the cache, beside keys and values.


class IndexedRunner(TransformersRunner):
    """Runs a model whose layers choose what they attend to; a check narrows the choice as well."""

    @contextmanager
    def short_windows(self, size: int) -> Iterator[None]:
        """Windows, chunks and choices of `size`, so that a short text reaches past them.

        Choices stay in half precision, where the last bit of a score may turn one.
        """
        with super().short_windows(size), ExitStack() as swaps:
            for module in self._parts.modules if self.dtype.itemsize >= 4 else ():
                if read(module, "index_topk", int):
                    swaps.enter_context(_choosing(self.model, module, size))
            yield


class IndexedMultiModalRunner(MultiModalRunner, IndexedRunner):
    """The same, of a model whose prompts may hold images: Mistral Large 4."""


@contextmanager
def _choosing(model: torch.nn.Module, indexer: torch.nn.Module, size: int) -> Iterator[None]:
    """An indexer that chooses `size` tokens, in this thread alone."""
    other = copy.copy(indexer)  # with the same weights
    vars(other)["index_topk"] = min(size, int(vars(indexer)["index_topk"]))
    with instead(alone(model), indexer, "forward", type(indexer).forward.__get__(other)):
        yield
