"""What users give to be answered, as the engine takes it: prompts, sources, and what goes along."""

from collections.abc import Collection, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider import arguments, drafters
from outrider.engine.request import token_ids
from outrider.errors import ConfigurationError, PromptError, UnknownName
from outrider.models.config import read
from outrider.text.decoder_prompt import DecoderPrompt
from outrider.text.media_processor import MediaProcessor, has_media
from outrider.types import Drafter, Inputs, LanguageModel, MultiModalInputs, Tokenizer

# Which adapter writes each answer, as it is asked for: by its name, or by vLLM's LoRARequest.


class NamedAdapter(Protocol):
    """What vLLM calls a LoRARequest: its name is read, and nothing else of it."""

    lora_name: str


Adapter: TypeAlias = str | NamedAdapter | None  #: None: the target alone


def adapter_names(given: Adapter | Sequence[Adapter], rows: int) -> list[str | None]:
    """One name a row, from one for all or one for each.

    >>> adapter_names("sql", 2), adapter_names([None, "sql"], 2)
    (['sql', 'sql'], [None, 'sql'])
    """
    if given is None:
        return [None] * rows
    if not isinstance(given, (list, tuple)):
        return [_name(given)] * rows
    if len(given) != rows:
        raise ConfigurationError(
            f"lora_request must be one adapter or one per prompt; got {len(given)} for {rows} "
            "prompts; give one to use it for all"
        )
    return [_name(one) for one in given]


def _name(given: object) -> str | None:
    if given is None or isinstance(given, str):
        return given
    name = read(given, "lora_name", str)
    if name is None:
        do = "give the name that it has in lora_modules, or None"
        arguments.refuse("lora_request", "an adapter by name", given, do)
    return name


def separate(prompts: object) -> list[object]:
    """The prompts of a call, which gives one or several: text, token ids or conversations.

    Raises PromptError for what is no prompt at all; each prompt is looked at by `encode`.

    >>> separate([5, 6]), separate(["a", "b"])
    ([[5, 6]], ['a', 'b'])
    """
    if isinstance(prompts, arguments.Listable):  # a tensor or an array of token ids
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(
        prompts, (Sequence, Iterator, KeysView, ValuesView)
    ):  # a mapping, a table or a set would be read as its names, or in any order
        raise _no_prompt("a prompt", prompts)
    every = list(prompts)
    first = arguments.plain(every[0]) if every and isinstance(prompts, Sequence) else None
    if isinstance(first, Real) or (isinstance(first, Mapping) and "input_ids" not in first):
        return [every]
    return every


def _no_prompt(what: str, given: object) -> PromptError:
    """The error for something that is no prompt, with what to do about it."""
    do = "give a string, a list of whole numbers, or a list of them for several prompts"
    if isinstance(given, (bytes, bytearray)):
        do = "decode it first: prompt.decode()"
    elif isinstance(given, Mapping) and "input_ids" in given:
        do = 'pass the token ids alone, ["input_ids"] of it, one list per prompt without padding'
    elif isinstance(given, Mapping):
        do = 'a conversation is a list of messages: [{"role": "user", "content": "..."}]'
    elif isinstance(given, (set, frozenset)):
        do = "a set has no order; give a list"
    kind = type(given).__name__
    return PromptError(
        f"{what} must be text, token ids or messages; got a value of type {kind}; {do}"
    )


def encode(
    tokenizer: Tokenizer | None, prompt: object, number: int = 0, special: bool = True
) -> list[int]:
    """Token ids of a prompt; ids pass through, messages go through the chat template.

    special  whether a text gets the tokens that the tokenizer puts around one
    """
    if not isinstance(prompt, str):
        prompt = arguments.plain(prompt)
        listed = isinstance(prompt, (Sequence, arguments.Listable))
        if not listed or isinstance(prompt, (bytes, bytearray)):
            raise _no_prompt(f"prompt {number}", prompt)
        if is_chat(prompt):
            return chat(tokenizer, prompt, number)
        if not isinstance(prompt, str):
            return token_ids(prompt, number)
    if not prompt:
        raise PromptError(
            f"prompt {number} is empty; got ''; give at least one character, or the ids of the BOS "
            "token to start from nothing"
        )
    if tokenizer is None:
        raise ConfigurationError(
            "a text prompt needs a tokenizer; none was loaded; pass tokenizer=... or give token ids"
        )
    _valid(prompt, number)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        if not special:
            raise ConfigurationError(
                "a text without special tokens (add_special_tokens=False) needs a tokenizer of "
                f"transformers; got a {type(tokenizer).__name__}; set add_special_tokens=True"
            )
        return tokenizer(prompt)["input_ids"]
    # how much fits is checked elsewhere: what transformers warns of is of another model's context
    ids: list[int] = tokenizer(prompt, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def is_chat(prompt: object) -> TypeGuard[Sequence[object]]:
    """Whether a prompt is a conversation: a list of messages."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _valid(text: str, number: int) -> None:
    """Refuse half characters: bytes of a terminal or a file that are no UTF-8 come as such."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"prompt {number} is not valid text; got {text[error.start]!r} at character "
            f"{error.start}; give UTF-8"
        ) from error


def chat(
    tokenizer: Tokenizer | None,
    messages: Sequence[object],
    number: int = 0,
    template: Mapping[str, object] | None = None,
) -> list[int]:
    """Token ids of a conversation, with the opening of the assistant's next turn.

    template  what the chat template is told besides, such as `tools`
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or tokenizer.chat_template is None:
        own = isinstance(tokenizer, PreTrainedTokenizerBase)
        do = "load the model with chat_template=... (--chat-template FILE), or " if own else ""
        raise ConfigurationError(
            f"prompt {number} is a list of messages, but there is no chat template; got "
            f"{'no tokenizer' if tokenizer is None else 'a tokenizer without one'}; {do}give text"
        )
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise PromptError(
                f"prompt {number} has a message without role and content; got {message!r}; write "
                '{"role": "user", "content": "..."}'
            )
        if isinstance(said := message["content"], str):
            _valid(said, number)
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            list(messages),
            **{"add_generation_prompt": True, **(template or {})},
            tokenize=True,
            return_dict=False,
        )
    except Exception as error:  # a template is a program of its own, which may refuse messages
        raise PromptError(
            f"the chat template does not take the messages of prompt {number}; got "
            f"{type(error).__name__}: {error}; change the messages, or give text"
        ) from error
    return ids


#: A text or its token ids.
Text: TypeAlias = str | Sequence[int]
T = TypeVar("T")


class EncodedPrompts(NamedTuple):
    """One entry for each answer that is to be written."""

    prompts: list[list[int]]  #: the tokens that the answer goes on from
    inputs: Sequence[Inputs | MultiModalInputs | None] | None  #: what is read besides
    references: list[list[int]]  #: what may be copied

    @property
    def sources(self) -> list[Inputs]:
        """What an encoder reads for them."""
        return [one for one in self.inputs or () if isinstance(one, Inputs)]

    def repeated(self, copies: int) -> "EncodedPrompts":
        """Each so many times, one after another."""
        prompts, given, references = self
        inputs = None if given is None else _times(given, copies)
        return EncodedPrompts(_times(prompts, copies), inputs, _times(references, copies))


def _times(part: Sequence[T], copies: int) -> list[T]:
    return [one for one in part for _ in range(copies)]


@dataclass(frozen=True)
class PromptEncoder:
    """What turns users' prompts into requests."""

    target: LanguageModel
    tokenizer: Tokenizer | None
    opening: DecoderPrompt | None
    eos_ids: Sequence[int]
    media: MediaProcessor | None = None  #: of a model whose prompts may hold images or sound
    drafter: Drafter | None = None  #: what is to copy from references

    def read(
        self, prompts: object, begun: object = None, reference: object = None
    ) -> EncodedPrompts:
        """Prompts, the beginnings of answers and references of one call.

        `begun` and `reference` are one for all prompts, or a list of one for each.

        Raises PromptError for what is no prompt, ConfigurationError for what this model cannot use.
        """
        given: Sequence[Inputs | MultiModalInputs | None] | None
        if self.target.reads == "text":
            ids, given = self._of_texts(prompts, begun)
        else:
            several = (list, tuple, Inputs, Tensor, np.ndarray)
            seen = self.media is not None and not self.media.recordings_alone
            one_image = seen and not isinstance(prompts, several)
            batch = [prompts] if one_image else sources(prompts)
            given = [self._source(source, number) for number, source in enumerate(batch)]
            answers = _each("decoder_prompts", begun, len(batch))
            ids = [self._started(answer, number) for number, answer in enumerate(answers)]
        copied: list[list[int]] = [[]] * len(ids)
        if reference is not None:
            copied = self._references(reference, len(ids))
        return EncodedPrompts(ids, given, copied)

    def _of_texts(
        self, prompts: object, begun: object
    ) -> tuple[list[list[int]], list[MultiModalInputs | None] | None]:
        """For a model that goes on from its prompt."""
        if begun is not None:
            raise ConfigurationError(
                "decoder_prompts= are the beginnings of an encoder-decoder's answers; got them for "
                "a model that goes on from its prompt; put them behind the prompt"
            )
        ids, media, seen = [], [], False
        for number, one in enumerate(sources(prompts)):
            array = not isinstance(one, str) and is_features(one) and one.ndim > 1
            if array or isinstance(one, Inputs):
                raise ConfigurationError(
                    "the model reads text alone; got features; give text or token ids, or load a "
                    "model that reads audio or pixels"
                )
            tokens, inputs = self._prompt(one, number)
            ids.append(tokens)
            media.append(inputs)
            seen = seen or inputs is not None
        return ids, media if seen else None

    def _prompt(self, prompt: object, number: int) -> tuple[list[int], MultiModalInputs | None]:
        """Token ids of a prompt, and its images or sound."""
        if isinstance(prompt, Mapping):  # a model of text has no use for a tokenizer's output
            text = self.media is None and not set(prompt) - _OF_TEXT
        else:
            text = isinstance(prompt, str) or not has_media(prompt)
        if text:
            return encode(self.tokenizer, prompt, number), None
        if self.media is None:
            raise ConfigurationError(
                f"the model reads text alone; got prompt {number} with images or sound; give text "
                "or token ids, or load an image-text or audio language model"
            )
        if not isinstance(prompt, Mapping):
            assert isinstance(prompt, Sequence)
            return self.media.conversation(prompt, number)
        if "input_ids" in prompt:
            return self.media.ready(prompt, number)
        return self.media.prompt(prompt, number)

    def _source(self, given: object, number: int) -> Inputs:
        """One row that the encoder reads."""
        device = self.target.device
        if isinstance(given, Inputs):
            return given
        media = self.media
        if media is not None and not media.recordings_alone and not is_features(given):
            if media.pixels_alone:
                given = media.pixels(given, number)
            elif not media.text_alone or isinstance(given, Mapping) or has_media(given):
                return self._seen(given, number)
        if is_features(given):
            features = torch.as_tensor(given, device=device)[None]
            there = 1 if features.dim() == 4 else features.shape[1]  # pixels are read as a whole
            mask = torch.ones(1, there, dtype=torch.bool, device=device)
            return Inputs(None, features, mask)
        ids = torch.tensor([encode(self.tokenizer, given, number)], device=device)
        return Inputs(ids, None, torch.ones_like(ids, dtype=torch.bool))

    def _seen(self, given: object, number: int) -> Inputs:
        """An image and what is asked of it, read by one encoder."""
        assert self.media is not None
        if isinstance(given, Mapping):
            ready = "input_ids" in given
            made = self.media.ready(given, number) if ready else self.media.prompt(given, number)
        elif has_media(given):
            assert isinstance(given, Sequence)
            made = self.media.conversation(given, number)
        else:
            made = [], None
        ids, beside = made
        if beside is None or "pixel_values" not in beside.kwargs:
            raise PromptError(
                f"the model reads an image and a text; got prompt {number} without an image; write "
                "{'prompt': ..., 'multi_modal_data': {'image': ...}}"
            )
        device = self.target.device
        row = torch.tensor([ids], device=device)
        pixels = torch.as_tensor(beside.kwargs["pixel_values"], device=device)
        if len(pixels) != 1:
            raise PromptError(
                f"the model's encoder reads one image beside a text; got {len(pixels)} in prompt "
                f"{number}; give one prompt for each"
            )
        return Inputs(row, pixels, torch.ones_like(row, dtype=torch.bool))

    def _started(self, answer: Text | None, number: int) -> list[int]:
        """The decoder's prompt: its start, and what the answer is given to begin with."""
        ids = [] if answer is None else self.answer_ids(answer, number)
        if self.opening is None:
            if not ids:
                raise ConfigurationError(
                    "what answers begin with is not known, as this speculator was not made by "
                    "load; got no decoder_prompts; give decoder_prompts=[start token id]"
                )
            return ids
        start = self.opening.start
        return ids if ids[:1] == [start] else [start, *ids]

    def begin(self) -> list[int]:
        """What an answer begins with where it is given nothing."""
        return self._started(None, 0)

    def answer_ids(self, text: Text, number: int = 0) -> list[int]:
        """Token ids of a text as answers are written, without special tokens at its ends."""
        if not isinstance(text, str):
            return token_ids(text, number)
        if not isinstance(self.tokenizer, PreTrainedTokenizerBase):
            return encode(self.tokenizer, text, number)
        if self.target.reads == "text":
            told = {"text": text}
        else:  # some families write answers in another vocabulary than they read
            told = {"text_target": text}
        ids: list[int] = self.tokenizer(**told, add_special_tokens=False, verbose=False).input_ids
        return ids

    def _references(self, given: object, rows: int) -> list[list[int]]:
        """Tokens to copy from. A text that is copied to its end is over there."""
        if self.drafter is not None:
            drafters.check_reference(self.drafter)
        references = []
        for number, one in enumerate(_each("reference", given, rows)):
            ids = [] if one is None or one == "" else self.answer_ids(one, number)
            over = self.eos_ids[:1] if isinstance(one, str) and ids else ()
            references.append([*ids, *over])
        return references


def sources(prompts: object) -> list[object]:
    """The sources of a call one by one; an array of numbers with a point is one source.

    >>> sources("Hello"), sources([[5, 6], [7]])
    (['Hello'], [[5, 6], [7]])
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Inputs):
        return [prompts.take([row]) for row in range(len(prompts.mask_BS))]
    if is_features(prompts) or _is_ready(prompts):
        return [prompts]
    if isinstance(prompts, (list, tuple)):
        several = (is_features(one) or isinstance(one, Inputs) or _is_ready(one) for one in prompts)
        if any(several):
            return list(prompts)
    return separate(prompts)


#: What a tokenizer makes of a text.
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids"}


def _is_ready(given: object) -> bool:
    """Whether it is a prompt with its images: a processor's output, or a mapping as vLLM's."""
    return isinstance(given, Mapping) and not {"input_ids", "multi_modal_data"}.isdisjoint(given)


def is_features(given: object) -> TypeGuard[Tensor | NDArray[Any]]:
    """Whether it is an array of samples, frames or pixels."""
    if isinstance(given, Tensor):
        return given.is_floating_point() and given.dim() > 0
    return isinstance(given, np.ndarray) and given.dtype.kind == "f" and given.ndim > 0


def _each(name: str, given: Any, rows: int) -> Iterable[Any]:
    """One for each row of what is given: one text for all, or a list."""
    if given is None or isinstance(given, str):
        return [given] * rows
    each = separate(given)
    if len(each) == 1 and each[0] is not given[0]:
        return each * rows  # one list of token ids
    if len(each) != rows:
        raise ConfigurationError(
            f"{name} is one for all prompts, or a list with one for each; got {len(each)} for "
            f"{rows} prompts; give as many as prompts"
        )
    return each


def refuse_unknown(
    options: Mapping[str, object], known: Collection[str], parts: Mapping[str, type[Any]]
) -> None:
    """Refuse a name that is no option of `generate`, and say of which part it is a field."""
    for name in options:
        for part, kind in parts.items():
            if name in {field.name for field in fields(kind)}:
                raise ConfigurationError(
                    f"{name} is a field of {kind.__name__}; got it beside the prompts; write "
                    f"{part}={kind.__name__}({name}=...)"
                )
        if name not in known:
            raise UnknownName("option of generate", name, known)
