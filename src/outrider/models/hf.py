"""The unmodified forward of a transformers model as a runner: any device, eager and sdpa attention.

Positions, slots and 4-D additive masks are given; everything else is the model's own. Windows and
chunks are cut by position, never by slot: siblings of a tree share a position. The few families
that derive something from the cache's length have a subclass each (alibi.py, gpt_neo.py).
"""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from outrider.models.cache import SlotCache
from outrider.models.causal import additive
from outrider.models.guard import CONFIGURATION, evaluating

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_REACH = ("sliding_window", "attention_chunk_size")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


UNLIMITED = 1 << 30  #: a model that says nothing of its context


def steady_context(config: Any) -> int:
    """Positions at which the rotary frequencies do not depend on the length of the text.

    `longrope` and `dynamic` switch frequencies for a whole call once a position passes the original
    length, so a block across it would score its first nodes otherwise than plain decoding does.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    settings = [rope, *(s for s in rope.values() if isinstance(s, dict))]
    if not any(s.get("rope_type") in ("longrope", "dynamic") for s in settings):
        return UNLIMITED
    original = [s.get("original_max_position_embeddings") for s in settings]
    original.append(getattr(config, "original_max_position_embeddings", None))
    original.append(getattr(config, "max_position_embeddings", None))
    return min(int(n) for n in original if n)


class TransformersRunner:
    """Runs a decoder through `ForCausalLM.forward`, so soft-caps and logit scales stay in."""

    trees = True  #: whether nodes may branch
    tracks = False  #: whether it reads the position of every cache slot

    def __init__(self, model: Any) -> None:
        self.model = model
        self._parts = list(model.modules())  # a chance of dropout in each
        self.config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = self.config.vocab_size
        with CONFIGURATION:  # another thread may be narrowing it for a check
            self._reach = {name: getattr(self.config, name, None) for name in _REACH}
        sizes = (getattr(self.config, name, None) for name in _CONTEXT)
        self.context = next((int(n) for n in sizes if isinstance(n, int) and n > 0), UNLIMITED)
        self.context = min(self.context, steady_context(self.config))
        self.layers: int = self.config.num_hidden_layers
        takes = inspect.signature(model.forward).parameters
        self._positions = "position_ids" in takes
        self._keeps = "logits_to_keep" in takes
        kinds = getattr(self.config, "layer_types", None)
        self._kinds: tuple[str, ...] | None = tuple(sorted(set(kinds))) if kinds else None
        self.tracks = type(self).tracks or self._cuts()

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
        keys_BW = cache.place(positions_BQ)[:, : cache.width] if self.tracks else None
        extra: dict[str, Any] = {"position_ids": positions_BQ} if self._positions else {}
        if self._keeps:
            extra["logits_to_keep"] = last or 0
        with evaluating(self.model, self._parts), self.around(keys_BW, positions_BQ, visible_BQW):
            logits: Tensor = self.model(
                input_ids=tokens_BQ,
                attention_mask=self.masks(visible_BQW, positions_BQ, keys_BW),
                past_key_values=cache,
                use_cache=True,
                **extra,
            ).logits
        return logits if last is None or self._keeps else logits[:, -last:]

    def masks(
        self, visible_BQW: Tensor, positions_BQ: Tensor, keys_BW: Tensor | None
    ) -> Tensor | dict[str, Tensor]:
        """The mask the model asks for: one tensor, or one for each of its layer types."""
        window, chunk = self._reach["sliding_window"], self._reach["attention_chunk_size"]

        def cut(kind: str) -> Tensor:
            seen = visible_BQW
            if kind != FULL and keys_BW is not None:
                here, there = positions_BQ[:, :, None], keys_BW[:, None]
                if kind == SLIDING and window:
                    seen = seen & (here - there < window)
                elif kind == CHUNKED and chunk:
                    seen = seen & (here // chunk == there // chunk)
            return additive(seen, self.dtype)

        if self._kinds is not None:
            return {kind: cut(kind) for kind in self._kinds}
        return cut(SLIDING if window else CHUNKED if chunk else FULL)

    def _cuts(self) -> bool:
        if self._kinds is not None:
            return self._kinds != (FULL,)
        return any(self._reach.values())

    def around(
        self, keys_BW: Tensor | None, positions_BQ: Tensor, visible_BQW: Tensor
    ) -> AbstractContextManager[None]:
        """What an exceptional family changes for the time of one call."""
        return nullcontext()

    def plain(self, tokens_1Q: Tensor) -> Tensor:
        """Logits of a whole sequence by the model's own means: no cache and no mask of ours."""
        with evaluating(self.model, self._parts):
            logits: Tensor = self.model(input_ids=tokens_1Q, use_cache=False).logits
        return logits

    @contextmanager
    def narrowed(self, size: int) -> Iterator[None]:
        """Windows and chunks of `size` for a check, so that a short text reaches past them.

        The model's own configuration is narrowed too, because `plain` reads it. Runners that exist
        already keep what they have read, and new ones wait until it is whole again.
        """
        with CONFIGURATION:
            before = {name: value for name, value in self._reach.items() if value}
            try:
                for name, value in before.items():
                    self._reach[name] = min(size, value)
                    setattr(self.config, name, self._reach[name])
                yield
            finally:
                for name, value in before.items():
                    self._reach[name] = value
                    setattr(self.config, name, value)
