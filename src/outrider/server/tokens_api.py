"""`/tokenize` and `/detokenize`, as vLLM has them."""

from pydantic import StrictBool, ValidationError, model_validator

from outrider.models.config import found
from outrider.server.chat_prompts import chat_prompt, of_transformers, text_ids
from outrider.server.errors import APIError, rejected
from outrider.server.messages import Body, FieldError, JsonObject, Message, Tool
from outrider.server.model_info import TokenFormatter
from outrider.server.protocol import ChatCompletionRequest, Size, broken
from outrider.server.request_parsing import RequestParser
from outrider.server.tool_parsers import chat_template


class TokenizeBody(Body):
    """`POST /tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool = False

    @model_validator(mode="before")
    @classmethod
    def _content(cls, given: object) -> object:
        """llama.cpp's server says `content`, and puts no tokens around it unless it is told to."""
        if not isinstance(given, dict) or given.get("content") is None:
            return given
        given = {name: one for name, one in given.items() if one is not None}
        if "prompt" in given:
            return given
        if "add_special" in given and "add_special_tokens" in given:
            what = "add_special_tokens and add_special are one thing: give one"
            raise FieldError("add_special_tokens", what)
        given["prompt"] = given.pop("content")
        return {"add_special_tokens": given.pop("add_special", False)} | given

    @model_validator(mode="after")
    def _one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "prompt or messages: give one of them")
        if broken(self.prompt):
            what = "prompt has half a character (a lone surrogate); leave it out"
            raise FieldError("prompt", what)
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            raise ValueError("tools and chat_template_kwargs go with messages")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: list[Size]
    model: str | None = None


def tokenized(orders: RequestParser, body: TokenizeBody) -> JsonObject:
    """The tokens of a prompt. Raises Refusal."""
    known, name = orders.known, orders.name(body.model)
    if body.messages is not None:
        given = body.model_dump(include={"messages", "tools", "chat_template_kwargs"})
        try:
            chat = ChatCompletionRequest.model_validate({"model": name} | given)
        except ValidationError as error:
            raise APIError(rejected(error.errors())["error"]["message"], "messages") from error
        ids = chat_prompt(known, orders.parsers, chat).ids
    elif not body.prompt:
        ids = known.tokenizer("")["input_ids"] if body.add_special_tokens else []
    else:
        ids = text_ids(known.tokenizer, body.prompt, 0, body.add_special_tokens)
    told: JsonObject = {
        "count": len(ids),
        "max_model_len": known.room(orders.capacity),
        "tokens": list(ids),
    }
    if body.return_token_strs:
        words = of_transformers(known.tokenizer, "return_token_strs")
        told["token_strs"] = words.convert_ids_to_tokens(ids)
    return told


def detokenized(orders: RequestParser, body: DetokenizeBody) -> JsonObject:
    """The text of tokens, special ones with it. Raises Refusal."""
    known = orders.known
    orders.name(body.model)
    strange = next((token for token in body.tokens if token >= known.vocab_size), None)
    if strange is not None:
        what = f"token {strange} is outside the vocabulary of {known.vocab_size}"
        raise APIError(what, "tokens")
    text = TokenFormatter(known.tokenizer).whole(body.tokens)
    return {"prompt": text, "content": text}  # vLLM's name, and llama.cpp's


def tokenizer_info(orders: RequestParser) -> JsonObject:
    """What the tokenizer is: vLLM's `/tokenizer_info`, which lm-evaluation-harness asks."""
    tokenizer = orders.known.tokenizer
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": orders.known.room(orders.capacity),
        **{name: found(tokenizer, name) for name in names},
        "chat_template": chat_template(tokenizer) or None,
    }
