"""Llama 3.2 Vision: some of its layers attend to images, whose keys and values each row keeps.

Its prompts hold one placeholder for an image, not its tokens: layers of cross attention look at the
image's states, as far as the processor's `cross_attention_mask` lets a token see them. The states
are made in the call that reads the image, and their keys and values stay beside the slots, row by
row. A row of text alone has values that are zeros and a mask that hides them: such a layer adds
nothing to it, as transformers leaves it out where no row has an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models.cache import SlotCache
from outrider.models.encoder_cache import EncoderCache
from outrider.models.multi_modal import MultiModalRunner
from outrider.row_params import RowTable
from outrider.types import MultiModalInputs

_MASK = "cross_attention_mask"


@dataclass(frozen=True)
class CrossAttentionRows(RowTable):
    """What rows' texts see of their images behind the last of them. A `RowStore`.

    keys, values  of each layer of cross attention, [B, H, M P, E]: M tiles of P patches
    seen_BM       which tiles they are, 0 or 1; zeros alone for a row without an image
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    seen_BM: Tensor


class CrossAttentionLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer's keys and values of images, which do not grow with the text."""

    is_sliding = False

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = keys is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to be made: what is given is kept."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return 0, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class MllamaRunner(MultiModalRunner):
    """Runs a model with layers of cross attention to images: Llama 3.2 Vision, text beside it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        layers = model.get_decoder().layers
        self._crossing = [n for n, layer in enumerate(layers) if hasattr(layer, "cross_attn")]
        if self._crossing != list(self.config.cross_attention_layers):
            raise UnsupportedModel(
                f"{self.name} attends to images in its layers "
                f"{list(self.config.cross_attention_layers)}; got one with such layers at "
                f"{self._crossing}: some of its layers cannot be its draft; leave draft_layers out"
            )

    def examine_media(self, prompt: Sequence[int], inputs: MultiModalInputs) -> None:
        """As for all models; and what sees an image behind the last one has to see it for good."""
        super().examine_media(prompt, inputs)
        mask = inputs.kwargs.get(_MASK)
        if mask is None:
            raise ConfigurationError(
                f"{self.name} reads images with a {_MASK}; got "
                f"{', '.join(sorted(inputs.kwargs))}; give what the model's own processor makes"
            )
        assert isinstance(mask, Tensor)  # `examine_media` has looked
        if mask.dim() != 4:
            raise ConfigurationError(
                f"{_MASK} is [1, tokens, images, tiles]; got {list(mask.shape)}; give what the "
                "model's own processor makes"
            )
        behind = mask[:, inputs.end(prompt) - 1 :]
        if bool((behind != behind[:, :1]).any()):
            raise ConfigurationError(
                f"all tokens behind the last image see the same; got a {_MASK} that changes "
                "behind the last placeholder; give what the model's own processor makes"
            )

    def read_media(
        self,
        cache: SlotCache,
        prompt: Sequence[int],
        inputs: MultiModalInputs,
        taps: tuple[int, ...] = (),
        known: EncoderCache | None = None,
    ) -> tuple[int, tuple[Tensor, ...]]:
        """Read a row's prompt up to its last placeholder: see `MultiModalRunner`."""
        made = [CrossAttentionLayer() for _ in self._crossing]
        self._lend(cache, made)
        count, states = super().read_media(cache, prompt, inputs, taps, known)
        mask = inputs.kwargs[_MASK]
        assert isinstance(mask, Tensor)
        seen = mask[:, count - 1].reshape(1, -1).to(self.device, self.dtype)
        keys, values = (tuple(getattr(one, name) for one in made) for name in ("keys", "values"))
        cache.inputs = CrossAttentionRows(keys, values, seen)
        return count, states

    def opened_media(self, rows: int) -> CrossAttentionRows:
        """Rows without images: no tiles."""
        heads = self.config.num_key_value_heads
        size = self.config.hidden_size // self.config.num_attention_heads
        none = torch.zeros(rows, heads, 0, size, dtype=self.dtype, device=self.device)
        each = (none,) * len(self._crossing)
        return CrossAttentionRows(each, each, none[:, 0, :, 0])

    def beside(self, cache: SlotCache, queries: int) -> dict[str, object]:
        """The mask over the rows' tiles, if a row has some; their keys lie in the cache."""
        rows = cache.inputs
        assert isinstance(rows, CrossAttentionRows)
        pairs = zip(rows.keys, rows.values, strict=True)
        self._lend(cache, [CrossAttentionLayer(*pair) for pair in pairs])
        tiles = rows.seen_BM.shape[1]
        if not tiles:
            return {}
        return {_MASK: rows.seen_BM[:, None, None].expand(-1, queries, 1, -1)}

    def _lend(self, cache: SlotCache, layers: Sequence[CrossAttentionLayer]) -> None:
        """Let a call find these in the cache where its layers of cross attention look."""
        for number, layer in zip(self._crossing, layers, strict=True):
            cache.layers[number] = layer
