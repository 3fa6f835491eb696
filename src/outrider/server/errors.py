"""What went wrong, in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

import re
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse

from outrider.errors import (
    AudioError,
    CapacityError,
    ConfigurationError,
    ImageError,
    OutriderError,
    PromptError,
)
from outrider.server.engine_loop import Broken, EngineStoppedError, QueueFullError
from outrider.server.messages import FieldError, JsonObject


class APIError(Exception):
    """A request that cannot be answered, with the field that is to blame."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def unknown_model(name: str, served: Sequence[str]) -> APIError:
    """Nobody of this name is served."""
    message = f"no model {name!r} here; served: {', '.join(served)}"
    return APIError(message, "model", 404, "model_not_found")


#: How pydantic names a kind that it tried: list[str], InputMessage; not a form's field[].
_TRIED = re.compile(r"str|.*\[.+\]|[A-Z]\w+(Item|Message|Tool|Choice)")
_OBJECT = ("model_type", "model_attributes_type", "dict_type")
#: What a request itself is to blame for; other errors of ours are the server's.
_ITS_OWN = (ConfigurationError, PromptError, CapacityError, AudioError, ImageError)
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "overloaded_error"}


def content(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> JsonObject:
    """The body of an error."""
    usual = "invalid_request_error" if status < 500 else "server_error"
    kind = _TYPES.get(status, usual)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def to_response(error: BaseException) -> tuple[int, JsonObject]:
    """Status and body for an error of a request. What is not the request's own says nothing."""
    if isinstance(error, APIError):
        return error.status, content(str(error), error.status, error.param, error.code)
    if isinstance(error, QueueFullError):
        return 429, content("the queue is full; try again", 429, code="queue_full")
    if isinstance(error, TimeoutError):
        return 504, content("the answer took longer than its deadline", 504, code="deadline")
    if isinstance(error, _ITS_OWN):
        return 400, content(str(error), 400)
    if isinstance(error, OutriderError):
        return 500, content(str(error), 500, code="decoding_failed")
    if isinstance(error, EngineStoppedError):
        return 503, content("the server is closing", 503, code="closing")
    if isinstance(error, Broken):
        return 503, content("the engine has stopped", 503, code="engine_stopped")
    return 500, content(f"internal error: {type(error).__name__}", 500, code="internal_error")


def response(error: BaseException) -> JSONResponse:
    """An error as an answer; a full queue says when to come back."""
    status, body = to_response(error)
    return JSONResponse(body, status, {"Retry-After": "1"} if status == 429 else None)


def _tried_in_vain(error: Any) -> bool:
    """Whether it says of one kind that a field may be that something else was sent."""
    kind, last, given = error["type"], error["loc"][-1:], error.get("input")
    word = kind == "literal_error" and str(*last).startswith("literal[")
    return (kind, last) == ("string_type", ("str",)) or (word and isinstance(given, dict))


def rejected(errors: Sequence[Any]) -> JsonObject:
    """The body of an error: the first of pydantic's, with the field's name.

    Where text or a list may stand, what is wrong in a list is said, not that it is no text; of an
    object that may be a word, what is wrong in it.
    """
    first = next((one for one in errors if not _tried_in_vain(one)), errors[0])
    broken = first["type"] == "json_invalid"  # its place is a character, no field
    place = [] if broken else [str(part) for part in first["loc"] if part != "body"]
    extra = first["type"] == "extra_forbidden"
    # where a field may be of several kinds, pydantic adds the one that it tried, which nobody sent
    sent = place if extra else [part for part in place if not _TRIED.fullmatch(part)]
    reason = str(first["msg"]).removeprefix("Value error, ")
    if broken:
        at, why = first["loc"][-1], first.get("ctx", {}).get("error")
        reason = f"the body is no JSON: {why}, at character {at}"
    elif first["type"] == "missing" and not place:
        reason = "the body is empty; send a JSON object"
    if isinstance(blamed := first.get("ctx", {}).get("error"), FieldError):
        return content(reason, 400, ".".join([*sent, blamed.param]))
    if first["type"] in _OBJECT:
        reason = "an object is wanted"
    elif first["type"] == "list_type" and errors[0]["type"] == "string_type":
        reason = "text or a list is wanted"
    param = ".".join(sent) or None
    if extra:
        reason = "this field is not supported; leave it out"
    message = f"{param}: {reason}" if param else reason
    return content(message, 400, param)
