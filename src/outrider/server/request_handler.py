"""Where requests become answers, whoever brings them: HTTP, or a file of requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from outrider.server.engine_loop import (
    EngineProtocol,
    OutputCallback,
    OutputEvent,
    PendingRequest,
    dispatch,
)
from outrider.server.protocol import ChatCompletionRequest, CompletionRequest
from outrider.server.request_parsing import ChoiceState, RequestParser
from outrider.server.response_builder import (
    ChatFormat,
    CompletionFormat,
    ResponseBuilder,
)
from outrider.server.token_formatter import TokenFormatter


@dataclass(frozen=True)
class RequestHandler:
    """Reads bodies and writes answers for one model, and has what decodes for it."""

    loop: EngineProtocol
    orders: RequestParser
    metrics: bool = True  #: whether answers have `metrics`

    def choices(self, body: CompletionRequest | ChatCompletionRequest) -> list[ChoiceState]:
        """What a body asks for. Raises Refusal, and the engine's own errors."""
        orders = self.orders
        return (
            orders.chat(body)
            if isinstance(body, ChatCompletionRequest)
            else orders.completions(body)
        )

    def writer(self, body: CompletionRequest | ChatCompletionRequest) -> ResponseBuilder:
        """What writes the answer to a body."""
        form = ChatFormat() if isinstance(body, ChatCompletionRequest) else CompletionFormat()
        known = self.orders.known
        return ResponseBuilder(
            form,
            body.model,
            known.fingerprint_of(body.model),
            TokenFormatter(known.tokenizer),
            self.metrics,
        )


@asynccontextmanager
async def running(loop: EngineProtocol, heard: OutputCallback = dispatch) -> AsyncIterator[None]:
    """It decodes; `heard` has its events on this event loop's thread, once a turn."""
    asynchronous = asyncio.get_running_loop()

    def deliver(events: list[tuple[PendingRequest, OutputEvent]]) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            asynchronous.call_soon_threadsafe(heard, events)

    loop.deliver = deliver
    loop.start()
    try:
        yield
    finally:
        loop.close()
        await asyncio.to_thread(loop.join, 10)
