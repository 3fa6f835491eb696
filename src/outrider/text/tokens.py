"""The tokenizer edge: encode prompts, decode incrementally, find stop strings."""

import codecs
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence, ValuesView
from numbers import Real
from typing import TypeGuard

from transformers import PreTrainedTokenizerBase

from outrider import arguments
from outrider.engine.request import token_ids
from outrider.errors import ConfigurationError, PromptError
from outrider.models.token_bytes import spelling_of
from outrider.types import Tokenizer


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


def encode(tokenizer: Tokenizer | None, prompt: object, number: int = 0) -> list[int]:
    """Token ids of a prompt; ids pass through, messages go through the chat template."""
    prompt = arguments.plain(prompt)
    if not isinstance(prompt, (Sequence, arguments.Listable)):
        raise _no_prompt(f"prompt {number}", prompt)
    if isinstance(prompt, (bytes, bytearray)):
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
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"prompt {number} is not valid text; got {prompt[error.start]!r} at character "
            f"{error.start}; give UTF-8"
        ) from error
    return tokenizer(prompt)["input_ids"]


def is_chat(prompt: object) -> TypeGuard[Sequence[object]]:
    """Whether a prompt is a conversation: a list of messages."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


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
        raise ConfigurationError(
            f"prompt {number} is a list of messages, but there is no chat template; got "
            f"{'no tokenizer' if tokenizer is None else 'a tokenizer without one'}; set "
            "tokenizer.chat_template, or give text"
        )
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise PromptError(
                f"prompt {number} has a message without role and content; got {message!r}; write "
                '{"role": "user", "content": "..."}'
            )
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


def special_stops(tokenizer: Tokenizer | None, strings: Sequence[str]) -> tuple[int, ...]:
    """Ids of the stop strings that are special tokens, which no decoded text contains.

    Raises ConfigurationError for a stop string with a special token inside: it could never match.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):  # others do not tell
        return ()
    ids = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    for id_, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            ids[token.content] = id_
    for given in strings:
        inside = next((token for token in ids if token and token in given), None)
        if inside is not None and given not in ids:
            raise ConfigurationError(
                f"a stop string must be text or one special token; got {given!r}, which contains "
                f"the special token {inside!r}; use {inside!r} alone, or token_ids=({ids[inside]},)"
            )
    return tuple(ids[given] for given in strings if given in ids)


_HALF = "\ufffd"  #: how characters end a text that are not complete
_GOES_ON = {bytes([byte]) for byte in range(0x80, 0xC0)}  #: UTF-8 within a character
_TAIL = 4  #: tokens of the prompt that are decoded along
_WINDOW = 8  #: tokens that are decoded again with the next ones


def _from_a_character(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The end of a prompt, from a token on that does not go on with a character."""
    spelling = spelling_of(tokenizer)
    sizes = range(_TAIL, min(_TAIL + 4, len(prompt)))
    first = (size for size in sizes if spelling.bytes_of(prompt[-size])[:1] not in _GOES_ON)
    return list(prompt[-next(first, _TAIL) :])


def _complete(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The characters of these tokens that are complete."""
    data = spelling_of(tokenizer).spelled(ids)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


class Detokenizer:
    """Text of a growing token sequence, and the first stop string in it.

    Decoding restarts at a recent token so that its cost does not grow with the text; characters
    that are still incomplete (a multi-byte character split between tokens) are held back. The end
    of the prompt is decoded along, because some tokenizers drop the space of a first token.

    special  whether special tokens are in the text
    behind   where in a text stop strings are looked for; None: not yet
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        prompt: Sequence[int] = (),
        special: bool = False,
        behind: Callable[[str], int | None] | None = None,
    ) -> None:
        if not all(stop_strings):
            raise ConfigurationError("a stop string is empty; got ''; remove it")
        self.tokenizer, self.stop_strings = tokenizer, tuple(stop_strings)
        self._special, self._behind = special, behind
        self.ids: list[int] = list(prompt[-_TAIL:])
        self.text = ""
        self.stopped_at: int | None = None  #: number of tokens that completed a stop string
        self._prefix, self._read, self._told = 0, len(self.ids), 0
        whole = self._text(self.ids)
        if whole.startswith(_HALF):
            self.ids = _from_a_character(tokenizer, prompt)
            self._read, whole = len(self.ids), self._text(self.ids)
        #: What is known of the text of the tokens from the prefix on: it begins with one of these.
        self._known: tuple[str, ...] = (whole,)
        if whole.endswith(_HALF):  # to be completed, or as it is
            complete = _complete(tokenizer, self.ids)
            self._known = (whole, complete, complete.removeprefix(" "), whole.rstrip(_HALF))
        self._tail = max(map(len, stop_strings), default=0)

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the new text; a stop string cuts it and what follows."""
        for token in ids if self.stop_strings else [None]:
            self.ids.extend(ids if token is None else [token])
            before = len(self.text)
            self._decode()
            if self.stop_strings and self._cut_at_stop_string(before):
                break
        sure = not self.stop_strings or self.stopped_at is not None
        return self._tell(0 if sure else self._begun())

    def finish(self) -> str:
        """What was held back; nothing the second time."""
        whole = self._text(self.ids[self._prefix :])
        rest = whole[self._had(whole) :]
        self._prefix, self._read, self._known = len(self.ids), len(self.ids), ("",)
        self.text += rest if self.stopped_at is None else ""
        return self._tell(0)

    def _tell(self, held: int) -> str:
        new = self.text[self._told : len(self.text) - held]
        self._told += len(new)
        return new

    def _begun(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        sizes = range(min(self._tail - 1, len(self.text)), 0, -1)
        ends = (n for n in sizes if any(s.startswith(self.text[-n:]) for s in self.stop_strings))
        return next(ends, 0)

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False
        )

    def _decode(self) -> None:
        """What is certain of the text now: a character that later tokens complete is not."""
        whole = self._text(self.ids[self._prefix :])
        sure, had = whole.rstrip(_HALF), self._had(whole)
        if len(sure) <= had:
            return
        self.text += sure[had:]
        self._known = (sure,)
        if sure == whole:
            if len(self.ids) - self._prefix > _WINDOW:
                self._prefix = self._read
                self._known = (self._text(self.ids[self._prefix :]),)
            self._read = len(self.ids)

    def _had(self, whole: str) -> int:
        """How much of a text is known. Half a character that a prompt ends with, and no token
        completes, is the prompt's."""
        for known in self._known:
            if whole.startswith(known):
                break
        return len(known)

    def _cut_at_stop_string(self, before: int) -> bool:
        """End the text before the first stop string, if one is there now."""
        since = 0 if self._behind is None else self._behind(self.text)
        if since is None:
            return False
        start = max(since, before - self._tail)
        found = [self.text.find(s, start) for s in self.stop_strings]
        places = [at for at in found if at >= 0]
        if not places:
            return False
        self.text = self.text[: min(places)]
        self.stopped_at = len(self.ids)
        return True
