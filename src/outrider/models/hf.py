"""The unmodified forward of a transformers model as a runner: any device, any attention backend."""

import inspect
from typing import Any

import torch
from torch import Tensor

from outrider.models.cache import SlotCache
from outrider.models.causal import additive


class TransformersRunner:
    """Positions, slots and a 4-D additive mask are given; everything else is the model's own."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.context = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
        self.layers: int = config.num_hidden_layers
        self._positions = "position_ids" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        """Where inputs must lie."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def __call__(
        self,
        cache: SlotCache,
        tokens_BQ: Tensor,
        positions_BQ: Tensor,
        visible_BQW: Tensor,
        last: int | None,
    ) -> Tensor:
        """Logits of the (last) nodes."""
        extra = {"position_ids": positions_BQ} if self._positions else {}
        logits: Tensor = self.model(
            input_ids=tokens_BQ,
            attention_mask=additive(visible_BQW, self.dtype),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last or 0,
            **extra,
        ).logits
        return logits
