"""What is asked for: a prompt, its sampling and its ends, checked before any work is done."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from outrider import arguments
from outrider.errors import CapacityError, ConfigurationError, PromptError, UnknownName
from outrider.models import load_checks
from outrider.models.decoder import adapters_of, media_of
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import (
    CONTEXT,
    LENGTH,
    PLAIN,
    DraftShape,
    Inputs,
    LanguageModel,
    MultiModalInputs,
)

LogprobsMode = Literal["processed", "shaped", "raw"]


@dataclass(frozen=True)
class Logprobs:
    """What a request wants to be told of its tokens.

    top  how many of the likeliest tokens at each place, with theirs
    mode "processed": of what the token was drawn from, penalties, temperature and filters in
         (greedy requests, which draw nothing, are told of "shaped"); "shaped": penalties,
         biases and processors in, at temperature 1; "raw": the model's own

    Raises ConfigurationError for a number that is none, UnknownName for another mode.

    >>> Logprobs(5, "raw").top
    5
    """

    top: int = 0
    mode: LogprobsMode = "processed"

    def __post_init__(self) -> None:
        arguments.wholes(self, "use 0 for the emitted token alone", top=0)
        if self.mode not in get_args(LogprobsMode):
            raise UnknownName("mode of log-probabilities", self.mode, get_args(LogprobsMode))


@dataclass(frozen=True)
class StopConditions:
    """When a row ends: a token budget and stop token ids. (Stop strings are looked for in the text,
    by `outrider.text.output_text.Detokenizer`.)

    max_new_tokens  token budget; None, the default, runs to the end of the model's context
    stop_ids        tokens that end the row; none by default
    """

    max_new_tokens: int | None = None
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            do = "give a number of tokens (in Python None is the rest of the context)"
            budget = arguments.whole("max_new_tokens", self.max_new_tokens, do, least=1)
            object.__setattr__(self, "max_new_tokens", budget)
        what, do = "a tuple of token ids", "write stop_ids=(2,)"
        ids = arguments.several(
            "stop_ids", self.stop_ids, what, do, arguments.is_whole, ordered=False
        )
        object.__setattr__(self, "stop_ids", ids)


@dataclass(frozen=True)
class Request:
    """One text to be written: what it begins with, how it is sampled, when it ends.

    Raises PromptError for a prompt that is no list of token ids, ConfigurationError for settings of
    another kind.

    >>> Request((5, 6), SamplingParams(0), StopConditions(16)).prompt
    (5, 6)
    """

    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    limits: StopConditions = field(default_factory=StopConditions)
    #: what it reads besides its text, one row: an encoder's, or images and sound of the prompt
    inputs: Inputs | MultiModalInputs | None = None
    reference: Sequence[int] = ()  #: tokens to copy from; none: those of the source
    watched: int | None = (
        None  #: a place of the prompt: `EngineRun.prompt_logits` tells the logits behind it
    )
    logprobs: Logprobs | None = None  #: what blocks tell of its tokens
    trace: bool = False  #: whether blocks tell what was drafted
    lora_name: str | None = None  #: the adapter that writes it; None: the target alone
    #: no draft deeper than this; 0 decodes it plainly. None: what the planner says
    num_speculative_tokens: int | None = None
    #: how many of the prompt's last tokens are its answer's already: a text that another run began
    written: int = 0
    #: of the inputs: images and sound of its prompt, or what an encoder reads
    media: MultiModalInputs | None = field(init=False, repr=False, compare=False, default=None)
    source: Inputs | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if isinstance(self.inputs, MultiModalInputs):
            object.__setattr__(self, "media", self.inputs)
        elif isinstance(self.inputs, Inputs):
            object.__setattr__(self, "source", self.inputs)
        object.__setattr__(self, "prompt", tuple(token_ids(self.prompt)))
        object.__setattr__(self, "reference", tuple(token_ids(self.reference)))
        for name, kind in (("sampling", SamplingParams), ("limits", StopConditions)):
            given = vars(self)[name]
            if not isinstance(given, kind):
                do = f"write {name}={kind.__name__}(...)"
                arguments.refuse(name, f"a {kind.__name__}", given, do)
        if self.num_speculative_tokens is not None:
            do = "use 0 for no drafts, or None to leave it to the planner"
            given = self.num_speculative_tokens
            depth = arguments.whole("num_speculative_tokens", given, do, least=0)
            object.__setattr__(self, "num_speculative_tokens", depth)
        do = "leave at least one token of the prompt in front of the answer"
        written = arguments.whole("written", self.written, do, least=0)
        if written and written >= len(self.prompt):
            what = f"less than the prompt's {len(self.prompt)} tokens"
            arguments.refuse("written", what, self.written, do)
        object.__setattr__(self, "written", written)
        if not isinstance(self.logprobs, Logprobs | None):
            arguments.refuse("logprobs", "a Logprobs or None", self.logprobs, "write Logprobs()")
        if self.watched is not None:
            do = "give the place of one of the prompt's tokens, or None"
            place = arguments.whole("watched", self.watched, do, least=0)
            if place >= len(self.prompt):
                what = f"a place in the prompt of {len(self.prompt)} tokens"
                arguments.refuse("watched", what, self.watched, do)

    @property
    def asked(self) -> Sequence[int]:
        """The prompt without what is the answer's."""
        return self.prompt[: len(self.prompt) - self.written]

    @property
    def key(self) -> tuple[int, ...]:
        """The prompt as others are told from it: placeholders by what they stand for."""
        if self.media is None:
            return tuple(self.prompt)
        return self.media.key(self.asked) + tuple(self.prompt[len(self.asked) :])

    def left(self, length: int) -> int | None:
        """Tokens of its budget that are left at this committed length; None without one."""
        budget = self.limits.max_new_tokens
        return None if budget is None else len(self.prompt) + budget - length

    def end(self, context: int) -> tuple[int, int]:
        """The committed length at which it ends in a model with this context, and why."""
        budget = self.limits.max_new_tokens
        wanted = context if budget is None else len(self.prompt) + budget
        why = CONTEXT if budget is None or wanted > context else LENGTH
        return min(wanted, context), why


def source_ids(inputs: Inputs | MultiModalInputs | None) -> list[int]:
    """The ids of what a row's encoder reads, without padding; none if they are not known."""
    if not isinstance(inputs, Inputs) or inputs.ids_BS is None:
        return []
    ids: list[int] = inputs.ids_BS[0][inputs.mask_BS[0]].tolist()
    return ids


def assign_adapters(cache: Any, requests: Sequence[Request]) -> None:
    """Let the rows of a target's new cache have their requests' adapters."""
    for request in requests:
        if request.lora_name is not None:
            cache.adapters = tuple(one.lora_name for one in requests)
            return


def token_ids(prompt: Any, number: int = 0) -> list[int]:
    """A prompt of token ids as a list of Python's integers: a list, a tuple, an array, a tensor.

    Raises PromptError, which names the first that is none: text, a float, a boolean, None.

    >>> token_ids((5, 6))
    [5, 6]
    """
    if not isinstance(prompt, (list, tuple)) and isinstance(prompt, arguments.Listable):
        prompt = prompt.tolist()  # asking for a method takes longer than all else here
    if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray)):
        if set(map(type, prompt)) <= {int}:
            return list(prompt)
        ids = [arguments.plain(token) for token in prompt]
        wrong = next((token for token in ids if not arguments.is_whole(token)), None)
        if all(map(arguments.is_whole, ids)):
            return [operator.index(token) for token in ids]
        do = "token ids are whole numbers; encode text with the target's tokenizer"
        if isinstance(wrong, (list, tuple)):
            do = "give each prompt as one flat list of ids"
    else:
        wrong, do = prompt, "encode text with the target's tokenizer; give a list of whole numbers"
    raise PromptError(
        f"prompt {number} must be token ids here; got {arguments.shown(wrong)} "
        f"({type(wrong).__name__}); {do}"
    )


def broadcast_setting(name: str, given: Any, fallback: Any, rows: int) -> list[Any]:
    """One setting per row from one value, a list, or nothing."""
    if given is None:
        return [fallback] * rows
    for one in given if isinstance(given, (list, tuple)) else [given]:
        if not isinstance(one, type(fallback)):
            kind = type(fallback).__name__
            raise ConfigurationError(
                f"{name} must be a {kind} or one {kind} per prompt; got {one!r}; write {kind}(...)"
            )
    if not isinstance(given, (list, tuple)):
        return [given] * rows
    if len(given) != rows:
        raise ConfigurationError(
            f"{name} must be one value or one per prompt; got {len(given)} for {rows} prompts; "
            "give one value to use it for all"
        )
    return list(given)


def check(request: Request, number: int, target: LanguageModel, reads: bool) -> None:
    """Refuse what this model cannot decode; `number` names the request.

    `reads` says whether the model reads inputs besides the text.

    Raises PromptError for an empty prompt, one outside the vocabulary and one as long as the
    context, CapacityError for a text without any end, ConfigurationError for inputs that are
    missing, useless or unreadable.
    """
    prompt, context, vocab = request.prompt, target.context, target.vocab_size
    if not prompt:
        raise PromptError(
            f"prompt {number} has no tokens; got an empty prompt; give at least one token "
            "(the BOS token starts from nothing)"
        )
    if request.media is None:
        worst = max(prompt)
    else:
        _check_reads_media(request, number, target)
        stands = request.media.placeholders
        worst = max((token for token in prompt if token not in stands), default=0)
    if worst >= vocab or min(prompt) < 0:
        raise PromptError(
            f"prompt {number} has token id {worst if worst >= vocab else min(prompt)} outside "
            f"the vocabulary of {vocab}; encode it with the target's tokenizer"
        )
    if request.lora_name is not None and request.lora_name not in (own := adapters_of(target)):
        raise UnknownName("adapter", request.lora_name, own)
    for token in request.reference:
        if not 0 <= token < vocab:
            raise PromptError(
                f"the reference of request {number} has token id {token} outside the vocabulary "
                f"of {vocab}; encode it with the target's tokenizer"
            )
    if len(prompt) >= context:
        raise PromptError(
            f"prompt {number} has {len(prompt)} tokens, but the model's context is {context}; "
            "shorten it so that at least one token fits"
        )
    if request.limits.max_new_tokens is None and context >= 1 << 30:
        raise CapacityError(
            f"prompt {number} has no token budget and the model names no context to end at; "
            "got max_new_tokens=None; give max_new_tokens"
        )
    if request.media is not None:
        _check_media(request, number, target)
    elif reads != (request.inputs is not None):
        have, do = ("no inputs", "give") if reads else ("inputs", "leave out")
        what = "something besides the text" if reads else "text alone"
        raise ConfigurationError(
            f"the model reads {what}; got request {number} with {have}; {do} inputs"
        )
    source = request.source
    if source is not None and source.mask_BS.shape[0] != 1:
        raise ConfigurationError(
            f"the inputs of a request are one row; got {source.mask_BS.shape[0]} for "
            f"request {number}; take its own: inputs.take([row])"
        )
    if request.sampling.encoder_no_repeat_ngram_size and not source_ids(source):
        raise ConfigurationError(
            f"encoder_no_repeat_ngram_size bans what a source of token ids says; got request "
            f"{number} without source ids; leave it out, or give inputs with ids_BS"
        )
    if source is not None:
        target.examine(source)


def _check_reads_media(request: Request, number: int, target: LanguageModel) -> None:
    """Refuse images and sound for a model that reads none."""
    assert request.media is not None
    if media_of(target) is None:
        raise ConfigurationError(
            "the model reads no images or sound in its prompts; got "
            f"{', '.join(sorted(request.media.kwargs))} for request {number}; leave them out, or "
            "load an image-text or audio language model"
        )


def _check_media(request: Request, number: int, target: LanguageModel) -> None:
    """Refuse images and sound that this model cannot read, before any of them is read."""
    reader, inputs = media_of(target), request.media
    assert reader is not None
    assert inputs is not None
    reader.examine_media(request.asked, inputs)
    if request.watched is not None and request.watched < inputs.end(request.asked):
        raise ConfigurationError(
            f"what a model says within or ahead of an image is not told; got watched="
            f"{request.watched} for request {number}, whose last image or sound ends at "
            f"{inputs.end(request.asked)}; watch a place behind it"
        )
    load_checks.media(target, request.asked, inputs)


def clip_shape(shape: DraftShape, requests: Sequence[Request]) -> DraftShape:
    """The shape, with no row's draft deeper than its own request allows.

    >>> rows = [Request([1]), Request([1], num_speculative_tokens=2)]
    >>> clip_shape(DraftShape(4, 5, 4, True), rows).most_B.tolist(), clip_shape(PLAIN, rows).most_B
    ([4, 2], None)
    """
    most = [request.num_speculative_tokens for request in requests]
    if all(depth is None or depth >= shape.max_depth for depth in most):
        return shape
    if not any(depth is None or depth > 0 for depth in most):
        return PLAIN
    told = [shape.max_depth if depth is None else depth for depth in most]
    most_B = torch.tensor(told, device="cpu")
    if shape.most_B is not None:
        most_B = torch.minimum(most_B, shape.most_B.to(most_B.device))
    return shape._replace(most_B=most_B)
