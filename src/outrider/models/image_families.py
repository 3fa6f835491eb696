"""Families whose images stand in prompts in a way of their own: Kosmos, PaliGemma, GIT."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.errors import ConfigurationError, PromptError
from outrider.models.cache import SlotCache
from outrider.models.config import found
from outrider.models.hf import FULL, ForwardCall
from outrider.models.model_lock import alone, instead
from outrider.models.multi_modal import InnerModelRunner, MultiModalRunner
from outrider.types import Inputs, MultiModalInputs, Output
from outrider.types.models import ImageAhead


class KosmosRunner(InnerModelRunner):
    """Kosmos-2 and 2.5: a mask beside the prompt says where its image stands.

    The language model counts positions from behind its padding id; that of Kosmos-2 adds what it
    makes of a mask to a causal one by the cache's length.
    """

    inside = "text_model"
    first_position = None

    @contextmanager
    def around(
        self, keys_BW: Tensor | None, positions_BQ: Tensor, visible_BQW: Tensor
    ) -> Iterator[None]:
        """Our mask, where the language model makes one of what it is given."""
        layers, name = self.model.model, "_prepare_decoder_attention_mask"
        if not found(layers, name):
            yield
            return
        mask = self.masks(visible_BQW, positions_BQ, keys_BW)
        with instead(alone(self.whole), layers, name, lambda *_, **__: mask):
            yield


class PaliGemmaRunner(MultiModalRunner):
    """PaliGemma: a prompt is one block, whose tokens see each other, and is read as one.

    A text alone is read as any decoder reads it. Positions begin with 1. Its outer forward makes
    one mask of what it is given; layers of more than one type are handed theirs behind it.
    """

    first_position = 1

    def examine_media(self, prompt: Sequence[int], inputs: MultiModalInputs) -> None:
        """As for all models; and the types of its tokens, 0 all of them, have to be there."""
        super().examine_media(prompt, inputs)
        if inputs.block != len(prompt):
            raise ConfigurationError(
                f"{self.name} reads a prompt as one block: token_type_ids [1, {len(prompt)}] of "
                f"zeros; got {', '.join(sorted(inputs.kwargs))}; give what the model's own "
                "processor makes of a prompt without a suffix"
            )
        window = self._reach["sliding_window"]
        if window and len(prompt) > window:  # its last token sees the whole block once more
            raise PromptError(
                f"{self.name} reads prompts of at most {window} tokens, which its windows see "
                f"whole; got one of {len(prompt)}; ask in fewer words"
            )

    def _run(self, cache: SlotCache, call: ForwardCall) -> Output:
        mask = call.mask
        if not isinstance(mask, dict):
            return super()._run(cache, call)
        layers: torch.nn.Module = self.model.model.language_model
        own = layers.forward

        def forward(**given: object) -> object:
            return own(**(given | {"attention_mask": mask}))

        with instead(alone(self.whole), layers, "forward", forward):
            return super()._run(cache, call._replace(mask=mask[FULL]))

    def plain(self, tokens_1Q: Tensor, inputs: Inputs | None = None) -> Tensor:
        """Logits of a text alone, which is what follows a block for its own forward."""
        return self.logits_of(tokens_1Q, token_type_ids=torch.ones_like(tokens_1Q))


class GitRunner(MultiModalRunner):
    """GIT: an image's states are put ahead of the prompt, which has no token for them.

    Here it has: as many padding tokens as the image takes. Positions are the text's alone.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.padding = int(self.config.pad_token_id)
        self.placeholders = frozenset({self.padding})
        vision = self.config.vision_config
        patches = (int(vision.image_size) // int(vision.patch_size)) ** 2
        self.ahead = ImageAhead(self.padding, 1 + patches, self.config.eos_token_id)

    def examine_media(self, prompt: Sequence[int], inputs: MultiModalInputs) -> None:
        """As for all models; and the image stands ahead of the text."""
        super().examine_media(prompt, inputs)
        if not all(inputs.places(prompt)[: inputs.last(prompt)]):
            raise PromptError(
                f"{self.name} reads its image ahead of the text; got a prompt with words ahead of "
                f"a token {self.padding}, which stands for it; put these tokens first"
            )

    def tokens(self, tokens_1Q: Tensor) -> Tensor:
        """Those of the text."""
        return tokens_1Q[:, tokens_1Q[0].eq(self.padding).long().cumprod(0).sum() :]
