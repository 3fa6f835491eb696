"""Layers that attend to images beside the text: Llama 3.2 Vision, Idefics.

Their prompts hold one placeholder for an image, not its tokens: layers of cross attention look at
the image's states, as far as a mask that the processor makes lets a token see them. The states are
made in the call that reads the image; of Llama's kind their keys and values stay beside the slots,
row by row, of Idefics the states themselves, as its layers keep neither. A row of text alone has
zeros and a mask that hides them: such a layer adds nothing to it, as transformers leaves it out, or
shuts its gate, where no row has an image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import ModelOutput

from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models.cache import SlotCache
from outrider.models.config import found
from outrider.models.encoder_cache import EncoderCache
from outrider.models.hf import filled_layer
from outrider.models.multi_modal import MultiModalRunner
from outrider.row_params import RowTable
from outrider.types import Inputs, MultiModalInputs


@dataclass(frozen=True)
class CrossAttentionRows(RowTable):
    """What rows' texts see of their images behind the last of them. A `RowStore`.

    keys, values  of each layer of cross attention, [B, H, M P, E]: M tiles of P patches
    seen_BM       which tiles they are, 0 or 1; zeros alone for a row without an image
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    seen_BM: Tensor


class ImageCrossAttentionRunner(MultiModalRunner):
    """What both kinds have: a mask of what each token sees."""

    mask = "cross_attention_mask"  #: the argument
    axes: tuple[str, ...] = ("tokens", "images", "tiles")  #: its own, behind that of prompts

    def examine_media(self, prompt: Sequence[int], inputs: MultiModalInputs) -> None:
        """As for all models; and what sees an image behind the last one has to see it for good."""
        super().examine_media(prompt, inputs)
        mask = inputs.kwargs.get(self.mask)
        if mask is None:
            raise ConfigurationError(
                f"{self.name} reads images with a {self.mask}; got "
                f"{', '.join(sorted(inputs.kwargs))}; give what the model's own processor makes"
            )
        assert isinstance(mask, Tensor)  # `examine_media` has looked
        if mask.dim() != 1 + len(self.axes):
            raise ConfigurationError(
                f"{self.mask} is [1, {', '.join(self.axes)}]; got {list(mask.shape)}; give what "
                "the model's own processor makes"
            )
        behind = mask[:, inputs.end(prompt) - 1 :]
        if bool((behind != behind[:, :1]).any()):
            raise ConfigurationError(
                f"all tokens behind the last image see the same; got a {self.mask} that changes "
                "behind the last placeholder; give what the model's own processor makes"
            )

    def seen(self, given: Mapping[str, object]) -> Tensor:
        """Which images or tiles are seen behind the last of them: [1, M]."""
        mask = given[self.mask]
        assert isinstance(mask, Tensor)
        return mask[:, -1].reshape(1, -1).to(self.device, self.dtype)


class MllamaRunner(ImageCrossAttentionRunner):
    """Runs Llama 3.2 Vision, text beside images."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        layers = model.get_decoder().layers
        self._crossing = [n for n, layer in enumerate(layers) if found(layer, "cross_attn")]
        if self._crossing != list(self.config.cross_attention_layers):
            raise UnsupportedModel(
                f"{self.name} attends to images in its layers "
                f"{list(self.config.cross_attention_layers)}; got one with such layers at "
                f"{self._crossing}: some of its layers cannot be its draft; leave draft_layers out"
            )

    def read_media(
        self,
        cache: SlotCache,
        prompt: Sequence[int],
        inputs: MultiModalInputs,
        aux_layers: tuple[int, ...] = (),
        known: EncoderCache | None = None,
    ) -> tuple[int, tuple[Tensor, ...]]:
        self._lend(cache, [DynamicLayer() for _ in self._crossing])
        return super().read_media(cache, prompt, inputs, aux_layers, known)

    def keep_media(
        self, output: ModelOutput, given: Mapping[str, object], delta_1: Tensor
    ) -> CrossAttentionRows:
        """Keys and values of the images."""
        made = [output.past_key_values.layers[number] for number in self._crossing]
        keys, values = zip(*((one.keys, one.values) for one in made), strict=True)
        return CrossAttentionRows(keys, values, self.seen(given))

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
        self._lend(cache, [filled_layer(*pair) for pair in pairs])
        tiles = rows.seen_BM.shape[1]
        if not tiles:
            return {}
        cache.seen = 1  # an empty cache has no images (transformers 5.17): a token ahead of ours
        return {self.mask: rows.seen_BM[:, None, None].expand(-1, 1 + queries, 1, -1)}

    def _lend(self, cache: SlotCache, layers: Sequence[DynamicLayer]) -> None:
        """Let a call find these in the cache where its layers of cross attention look."""
        for number, layer in zip(self._crossing, layers, strict=True):
            cache.layers[number] = layer


@dataclass(frozen=True)
class ImageStateRows(RowTable):
    """States of rows' images, and which of them their texts see. A `RowStore`.

    states_BMTE  M images of T states
    seen_BM      0 or 1; zeros alone for a row without an image
    """

    states_BMTE: Tensor
    seen_BM: Tensor


class IdeficsRunner(ImageCrossAttentionRunner):
    """Runs Idefics 1: each call is given the states of the rows' images once more.

    Its tokenizer has the token of an image behind the vocabulary, the last of those added to it.
    """

    mask = "image_attention_mask"
    axes = ("tokens", "images")

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        more = int(self.config.additional_vocab_size)
        self.vocab_size += more
        self.placeholders = frozenset({self.vocab_size - 1} if more else ())
        resampled = bool(self.config.use_resampler)
        self._states = "perceiver_embeddings" if resampled else "image_encoder_embeddings"
        vision = self.config.vision_config
        self._wide = int(vision.embed_dim)

    def keep_media(
        self, output: ModelOutput, given: Mapping[str, object], delta_1: Tensor
    ) -> ImageStateRows:
        """The images' states."""
        return ImageStateRows(output.image_hidden_states, self.seen(given))

    def opened_media(self, rows: int) -> ImageStateRows:
        """Rows without images: one of zeros, which nobody sees."""
        none = torch.zeros(rows, 1, 1, self._wide, dtype=self.dtype, device=self.device)
        return ImageStateRows(none, none[:, :, 0, 0])

    def beside(self, cache: SlotCache, queries: int) -> dict[str, object]:
        """States and mask of the rows' images."""
        rows = cache.inputs
        assert isinstance(rows, ImageStateRows)
        mask = rows.seen_BM[:, None].expand(-1, queries, -1)
        return {self._states: rows.states_BMTE, self.mask: mask}

    def plain(self, tokens_1Q: Tensor, inputs: Inputs | None = None) -> Tensor:
        """Logits of a text alone: beside an image that nobody sees."""
        none = self.opened_media(1)
        mask = none.seen_BM[:, None].expand(-1, tokens_1Q.shape[1], -1)
        return self.logits_of(tokens_1Q, **{self._states: none.states_BMTE, self.mask: mask})
