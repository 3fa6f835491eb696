"""Models whose prompts may hold images or sound: read once, by the model's own forward.

A prompt's beginning, up to its last placeholder, is read in one call in which the model gets what
its processor made and makes masks and positions itself: image blocks whose tokens see each other,
positions of several axes, compressed tokens are its own business. It writes to the slots of our
cache like any call. From there on a row is text, but for positions: behind an image they go on from
where the model says (`rope_deltas`), which is kept for each row.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from outrider.errors import (
    ConfigurationError,
    OutriderError,
    PromptError,
    UnsupportedModel,
    first_line,
)
from outrider.models.cache import SlotCache
from outrider.models.config import closers, found, placeholders, read
from outrider.models.encoder_cache import EncoderCache
from outrider.models.hf import ForwardCall, TransformersRunner, layers_asked
from outrider.models.model_lock import alone, evaluating, parts_of
from outrider.models.prefill import causal
from outrider.row_params import RowTable
from outrider.types import MultiModalInputs, Output, RowStore
from outrider.types.models import PER_TOKEN, SEEN, ImageAhead


@dataclass(frozen=True)
class RowPositions(RowTable):
    """How far the positions of each row's text are from its slots. A `RowStore`."""

    delta_B: Tensor


class MultiModalRunner(TransformersRunner):
    """Runs a model whose prompts may hold images or sound through its own forward."""

    ahead: ImageAhead | None = None  #: what its processor leaves to be put ahead of a prompt

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.whole = model  #: what reads images or sound
        self._hands_on = self._takes  # arguments of the whole's forward
        self.placeholders, self.closers = placeholders(model.config), closers(model.config)
        self.known: set[frozenset[str]] = set()  #: kinds of inputs that were checked
        # parts that count positions on several axes
        self._axes = [part for part in model.modules() if "rope_deltas" in vars(part)]

    def examine_media(self, prompt: Sequence[int], inputs: MultiModalInputs) -> None:
        """Refuse what the model's forward does not take, and prompts without a place for it.

        Raises ConfigurationError and PromptError.
        """
        names = sorted(name for name in inputs.kwargs if name not in PER_TOKEN)
        strange = [name for name in names if name not in self._hands_on]
        if strange or not names:
            has = ", ".join(strange) if strange else "nothing but token ids"
            raise ConfigurationError(
                f"{self.name} cannot read what it was given beside the prompt; got {has}; give "
                "what the model's own processor makes of images or sound it was trained with"
            )
        if not inputs.last(prompt):
            raise PromptError(
                "a prompt has a placeholder where an image or a sound stands; got one with "
                f"{', '.join(names)} and without any of the tokens {sorted(self.placeholders)}; "
                "make it with the model's processor or its chat template"
            )
        if len(prompt) in (inputs.last(prompt), 0 if inputs.block else inputs.end(prompt)):
            raise PromptError(
                "a prompt goes on behind its last image or sound; got one that ends with a "
                "placeholder, or with the mark of its end; put text behind it"
            )
        for name in PER_TOKEN & set(inputs.kwargs):
            given = inputs.kwargs[name]
            if not isinstance(given, Tensor) or list(given.shape[:2]) != [1, len(prompt)]:
                shape = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
                raise ConfigurationError(
                    f"{name} has one place for each of the prompt's {len(prompt)} tokens; got "
                    f"{shape}; give what the processor made of this one prompt, without padding"
                )
        seen = inputs.kwargs.get("attention_mask")
        if isinstance(seen, Tensor) and not bool(seen.bool().all()):
            raise ConfigurationError(
                "a prompt has no padding; got an attention_mask with zeros; give what the "
                "processor made of one prompt, not of a padded batch"
            )

    def read_media(
        self,
        cache: SlotCache,
        prompt: Sequence[int],
        inputs: MultiModalInputs,
        aux_layers: tuple[int, ...] = (),
        known: EncoderCache | None = None,
    ) -> tuple[int, tuple[Tensor, ...]]:
        """Read a row's prompt up to its last placeholder, in one call of the model's own.

        The cache has this row alone. Images that are `known` are not read. Returns how many tokens
        were read, and their states at the aux layers. Raises PromptError where it cannot read them.
        """
        assert cache.rows == 1, "rows with images are read one by one"
        count = inputs.end(prompt)
        tokens = self.tokens(torch.tensor([prompt[:count]], device=self.device))
        slots = torch.arange(count, device=self.device)[None]
        given = self._given(inputs.beginning(count))
        cache.begin(slots, count, 0)
        if cache.recurrent is not None:  # all of it is text that nothing takes back
            settled_B = torch.tensor([count], device=self.device)
            cache.recurrent.begin(causal(tokens, slots, count, settled_B))
        few = {} if aux_layers or "logits_to_keep" not in self._takes else {"logits_to_keep": 1}
        with self._counting() as delta:
            try:
                with (
                    torch.device("cpu"),  # what the model makes, whatever the caller's default
                    evaluating(self.whole, self._parts),
                    nullcontext() if known is None else known.standing_in(self.whole),
                    self._listening(-1 in aux_layers) as heard,
                ):
                    output = self.whole(
                        input_ids=tokens,
                        past_key_values=cache,
                        use_cache=True,
                        **given,
                        **few,
                        **layers_asked(aux_layers),
                    )
            except OutriderError:
                raise
            except Exception as error:  # whatever a family says of images that do not fit
                raise PromptError(
                    f"{self.name} cannot read the images or sound of a prompt of {len(prompt)} "
                    f"tokens: {first_line(error)}; give as many as the prompt has places for, as "
                    "the model's own processor makes them"
                ) from error
            cache.inputs = self.keep_media(output, given, delta() - count + tokens.shape[1])
        text = output.get("language_model_outputs", output)
        return count, self._aux_states(aux_layers, heard, text, output.logits.shape[1])

    def keep_media(
        self, output: ModelOutput, given: Mapping[str, object], delta_1: Tensor
    ) -> RowStore:
        """What a row keeps of the call that has read its images, which was `given` them."""
        return RowPositions(delta_1)

    def opened_media(self, rows: int) -> RowStore:
        """Positions that are slots."""
        return RowPositions(torch.zeros(rows, dtype=torch.int64, device=self.device))

    def _run(self, cache: SlotCache, call: ForwardCall) -> Output:
        """The model's own forward, each row's positions counted on from its images."""
        if isinstance(cache.inputs, RowPositions):
            at_BQ = call.positions_BQ + cache.inputs.delta_B[:, None]
            call = call._replace(positions_BQ=at_BQ.clamp(min=0))  # nodes may only fill a call up
        return super()._run(cache, call)

    def tokens(self, tokens_1Q: Tensor) -> Tensor:
        """What the model's forward is given of a prompt's tokens, or a text's."""
        return tokens_1Q

    def plain_media(self, tokens_1Q: Tensor, inputs: MultiModalInputs) -> Tensor:
        """Logits of a whole text that begins with the prompt: no cache and no mask of ours."""
        given = self._given(_longer(inputs, tokens_1Q.shape[1]))
        with self._counting(), evaluating(self.whole, self._parts):
            ids = self.tokens(tokens_1Q)
            logits: Tensor = self.whole(input_ids=ids, use_cache=False, **given).logits
        return logits

    def _given(self, kwargs: Mapping[str, object]) -> dict[str, object]:
        """Those that its forward takes, where the model can read them and in its dtype."""
        return {
            name: _moved(value, self.device, self.dtype)
            for name, value in kwargs.items()
            if name in self._hands_on and name != "attention_mask"
        }

    @contextmanager
    def _counting(self) -> Iterator[Callable[[], Tensor]]:
        """A function that tells how far positions went on from slots in a call; [1].

        What the model remembers of it is as it was before, for whoever else runs it.
        """
        before = [part.rope_deltas for part in self._axes]

        def delta() -> Tensor:
            found = [part.rope_deltas for part in self._axes if part.rope_deltas is not None]
            none = torch.zeros(1, dtype=torch.int64, device=self.device)
            return found[0].reshape(-1)[:1].to(none) if found else none

        with alone(self.whole):
            for part in self._axes:
                part.rope_deltas = None
            try:
                yield delta
            finally:
                for part, value in zip(self._axes, before, strict=True):
                    part.rope_deltas = value


class InnerModelRunner(MultiModalRunner):
    """BLIP-2, InstructBLIP: a language model of its own class inside of one that reads images.

    The outer forward wants images at every call, so it reads prompts with some; the inner model
    runs from there on, and reads texts without any.
    """

    inside = "language_model"  #: the attribute that holds it

    def __init__(self, model: PreTrainedModel) -> None:
        inner = found(model, self.inside)
        if read(inner.config, "is_encoder_decoder", bool):
            raise UnsupportedModel(
                f"{type(model).__name__} with a language model that is an encoder-decoder is not "
                f"supported; got {type(inner).__name__}; take one with a decoder (OPT, Vicuna)"
            )
        super().__init__(inner)
        self.whole, self.name, self._parts = model, type(model).__name__, parts_of(model)
        self._hands_on = frozenset(inspect.signature(model.forward).parameters)
        self.placeholders = placeholders(model.config)


def _moved(value: object, device: torch.device, dtype: torch.dtype) -> object:
    """A tensor on the model's device, numbers with a point in its dtype; or several."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else value.dtype)
    if isinstance(value, (list, tuple)):
        return [_moved(one, device, dtype) for one in value]
    return value


def _longer(inputs: MultiModalInputs, count: int) -> dict[str, object]:
    """The arguments for a text of `count` tokens that goes on behind the prompt."""
    found = dict(inputs.kwargs)
    for name in PER_TOKEN & set(found):
        value = found[name]
        assert isinstance(value, Tensor)
        more = value[:, -1:] if name in SEEN else torch.zeros_like(value[:, :1])
        if name == "token_type_ids" and inputs.block:  # what is written sees no token behind itself
            more = torch.ones_like(more)
        found[name] = torch.cat([value, *[more] * (count - value.shape[1])], 1)[:, :count]
    return found
