"""Families that count positions, or read windows of them, otherwise than by argument."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.models.cache import SlotCache
from outrider.models.hf import Mask, TransformersRunner
from outrider.models.model_lock import alone, evaluating, instead
from outrider.types import Inputs, Output


class OffsetPositionsRunner(TransformersRunner):
    """The RoBERTa kin: the first token stands at `pad_token_id + 1`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._first = int(self.config.pad_token_id) + 1
        self.context -= self._first

    def _run(
        self,
        cache: SlotCache,
        tokens_BQ: Tensor,
        positions_BQ: Tensor,
        mask: Mask | None,
        last: int | None,
        taps: tuple[int, ...],
    ) -> Output:
        """The model's own forward, with positions as it counts them."""
        return super()._run(cache, tokens_BQ, positions_BQ + self._first, mask, last, taps)


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
        steps = torch.arange(tokens_1Q.shape[1], device=tokens_1Q.device)[None]
        seen = steps[:, :, None] >= steps[:, None]
        mask = self.masks(seen, steps, steps)
        with evaluating(self.model, self._parts):
            logits: Tensor = self.model(
                input_ids=tokens_1Q, attention_mask=mask, use_cache=False
            ).logits
        return logits
