"""Answers that follow a JSON schema, a regular expression or a grammar, by llguidance.

A grammar is a processor of the row: it masks the laws of target and draft at every node of a draft
tree, each by the text that leads to it, so drafts stay lawful and the law is the target's under the
mask. One matcher walks from text to text by rollback: neighbouring nodes share most of their way.
"""

import json
from copy import copy
from functools import lru_cache
from typing import Any, NamedTuple

import llguidance.numpy
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider.errors import ConfigurationError
from outrider.server.errors import APIError
from outrider.server.protocol import GUIDED, BaseRequest

MOST_BYTES = 64 << 10  #: of a schema or a grammar
_PRIVATE = 0x100000  #: the last plane of Unicode, for private use


@lru_cache(maxsize=4)
def vocabulary(
    tokenizer: PreTrainedTokenizerBase, size: int, eos_ids: tuple[int, ...] = ()
) -> LLTokenizer:
    """The tokenizer as llguidance reads it, for logits of `size` tokens.

    eos_ids  tokens that end an answer which is whole; none: the tokenizer's own

    Special tokens are never a way to write text: a constant or a key "<|im_end|>" is spelled in
    ordinary tokens. llguidance cuts text that is forced as the tokenizer does, which makes a
    special token of a special token's name; so it reads a tokenizer whose special tokens are called
    what nobody writes. A Lark grammar names special tokens by their ids, `<[2]>`.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigurationError(
            f"schemas and grammars need a tokenizer of the tokenizers library; got "
            f"{type(tokenizer).__name__}; leave them out"
        )
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    text = json.dumps(unwritten(json.loads(backend.to_str())))
    count = max(size, len(tokenizer))
    return LLTokenizer(text, n_vocab=count, eos_token=list(eos_ids) or tokenizer.eos_token_id)


def unwritten(said: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json whose special tokens have names of private characters.

    >>> said = {"added_tokens": [{"id": 2, "content": "</s>", "special": True}], "model": {}}
    >>> unwritten(said)["added_tokens"][0]["content"]
    '\\U00100000'
    """
    special = [one["content"] for one in said["added_tokens"] if one["special"]]
    # by their order: ids are larger than a plane of Unicode
    names = {content: chr(_PRIVATE + at) for at, content in enumerate(special)}
    added = [
        one | {"content": names.get(one["content"], one["content"])} for one in said["added_tokens"]
    ]
    model = dict(said["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return said | {"added_tokens": added, "model": model, "post_processor": None}


class GrammarAsked(NamedTuple):
    """A grammar that a request asks for: by which field, of what kind, and its text."""

    field: str
    kind: str  #: json, regex, choice or grammar
    given: Any


def asked_for(body: BaseRequest) -> GrammarAsked | None:
    """What a request asks for; None: free text."""
    form, structured = body.response_format, body.structured_outputs
    if form is not None and form.type != "text":
        schema = {"type": "object"} if form.json_schema is None else form.json_schema.schema_
        return GrammarAsked("response_format", "json", schema)
    if structured is not None:
        field, kinds = "structured_outputs", structured.model_dump(by_alias=True, exclude_none=True)
        if "json_object" in kinds:
            return GrammarAsked(field, "json", {"type": "object"})
        return GrammarAsked(field, *next(iter(kinds.items())))
    for field in GUIDED:
        if (given := getattr(body, field)) is not None:
            return GrammarAsked(field, field.removeprefix("guided_"), given)
    return None


def grammar_field(body: BaseRequest) -> str:
    """The field by which a request asks for a grammar, if it does; else its tools do."""
    asked = asked_for(body)
    return "tools" if asked is None else asked.field


def grammar_of(body: BaseRequest) -> str | None:
    """The grammar that a request asks for; None for free text. Raises Refusal."""
    asked = asked_for(body)
    if asked is None:
        return None
    name, kind, given = asked
    try:
        text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
    except ValueError as error:
        what = "a number in the schema is infinite or not a number; JSON has no such values"
        raise APIError(what, name) from error
    if len(text.encode()) > MOST_BYTES:
        raise APIError(f"{name} has more than {MOST_BYTES} bytes; shorten it", name)
    try:
        if kind == "regex":
            return str(LLMatcher.grammar_from_regex(text))
        if kind == "grammar":
            return str(LLMatcher.grammar_from_lark(text))
        if kind == "choice":
            ways = " | ".join(json.dumps(one) for one in given)
            return str(LLMatcher.grammar_from_lark(f"start: {ways}"))
        compact = {"whitespace_flexible": False}
        return str(LLMatcher.grammar_from_json_schema(text, overrides=compact))
    except ValueError as error:
        raise APIError(f"{name} cannot be read: {error}", name) from error


class Grammar:
    """A processor for one row whose prompt has `prompt` tokens.

    Raises ConfigurationError for a grammar that does not compile.
    """

    def __init__(self, words: LLTokenizer, text: str, prompt: int) -> None:
        self._matcher = LLMatcher(words, text)
        error = self._matcher.get_error()
        if error:
            raise ConfigurationError(f"the schema or grammar does not compile: {error}")
        self._given = words, text, prompt
        self._prompt, self._read = prompt, list[int]()
        self._mask = llguidance.numpy.allocate_token_bitmask(1, words.vocab_size)
        self._bits = torch.arange(32, dtype=torch.int32)

    def __reduce__(self) -> tuple[type["Grammar"], tuple[LLTokenizer, str, int]]:
        """A matcher that has read nothing, where it is unpickled."""
        return Grammar, self._given

    def __call__(self, texts_NL: Tensor, scores_NV: Tensor) -> Tensor:
        """The scores with -inf for what may not follow each text."""
        allowed = torch.stack([self._allowed(text) for text in texts_NL.tolist()])
        allowed = allowed[:, : scores_NV.shape[1]].to(scores_NV.device)
        short = scores_NV.shape[1] - allowed.shape[1]
        allowed = torch.nn.functional.pad(allowed, (0, short), value=False)
        return scores_NV.masked_fill(~allowed, -torch.inf)

    def _allowed(self, text: list[int]) -> Tensor:
        """[V]: which tokens may follow."""
        said, read = text[self._prompt :], self._read
        same = 0
        while same < min(len(said), len(read)) and said[same] == read[same]:
            same += 1
        if same < len(read):
            self._matcher.rollback(len(read) - same)
            del read[same:]
        fresh = said[same:]
        taken = self._matcher.try_consume_tokens(fresh) if fresh else 0
        read += fresh[:taken]
        if taken < len(fresh):  # a text that the grammar forbids: nothing of it can be emitted
            error = self._matcher.get_error()
            if error:
                raise ConfigurationError(f"the schema or grammar is too large to follow: {error}")
            return torch.zeros(self._mask.shape[1] * 32, dtype=torch.bool)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask, 0)
        words = torch.from_numpy(self._mask[0])
        return ((words[:, None] >> self._bits) & 1).bool().flatten()
