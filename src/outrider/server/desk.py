"""Where requests become answers, whoever brings them: HTTP, or a file of requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from outrider.server.answers import Chats, Completions, Writer
from outrider.server.bodies import ChatBody, CompletionBody
from outrider.server.loop import Decoder, Delivery, Event, Ticket, spread
from outrider.server.orders import Choice, Orders
from outrider.server.words import Words


@dataclass(frozen=True)
class Desk:
    """Reads bodies and writes answers for one model, and has what decodes for it."""

    loop: Decoder
    orders: Orders
    metrics: bool = True  #: whether answers have `metrics`

    def choices(self, body: CompletionBody | ChatBody) -> list[Choice]:
        """What a body asks for. Raises Refusal, and the engine's own errors."""
        orders = self.orders
        return orders.chat(body) if isinstance(body, ChatBody) else orders.completions(body)

    def writer(self, body: CompletionBody | ChatBody) -> Writer:
        """What writes the answer to a body."""
        form = Chats() if isinstance(body, ChatBody) else Completions()
        known = self.orders.known
        return Writer(form, body.model, known.fingerprint, Words(known.tokenizer), self.metrics)


@asynccontextmanager
async def running(loop: Decoder, heard: Delivery = spread) -> AsyncIterator[None]:
    """It decodes; `heard` has its events on this event loop's thread, once a turn."""
    asynchronous = asyncio.get_running_loop()

    def deliver(events: list[tuple[Ticket, Event]]) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            asynchronous.call_soon_threadsafe(heard, events)

    loop.deliver = deliver
    loop.start()
    try:
        yield
    finally:
        loop.close()
        await asyncio.to_thread(loop.join, 10)
