"""Where requests become answers, whoever brings them: HTTP, or a file of requests."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import outrider
from outrider.engine.logprobs import Logprobs
from outrider.engine.request import Limits, Request
from outrider.engine.run import Run
from outrider.laws.sampling import Sampling
from outrider.models.prefixes import Prefixes
from outrider.server.answers import Chats, Completions, Writer
from outrider.server.bodies import ChatBody, CompletionBody
from outrider.server.lanes import Lanes
from outrider.server.loop import Event, Loop, Ticket, spread
from outrider.server.orders import Choice, Orders
from outrider.server.words import Words
from outrider.text.speculator import Speculator

KEPT_BYTES = 256 << 20  #: of prompts that were read, for requests that begin alike


def fingerprint(speculator: Speculator) -> str:
    """Names what a seeded text depends on: weights, dtype, processor, libraries, version.

    A hash of what the model says of a few tokens, to the last bit.
    """
    engine, said = speculator.engine, []
    vocab = engine.target.vocab_size
    prompt = [1 + 7 * at % (vocab - 1) for at in range(24)]
    run = Run(engine, 1, 256)
    run.submit(Request(prompt, Sampling(0), Limits(4), logprobs=Logprobs(8, "raw")))
    run.close()
    for block in run:
        said.append((block.token_ids, block.logprobs, block.likeliest))
    identity = repr((said, vocab, outrider.__version__)).encode()
    return "fp_" + hashlib.sha256(identity).hexdigest()[:16]


@dataclass(frozen=True)
class Desk:
    """One speculator at work: its loop, and what reads bodies and writes answers for it."""

    loop: Loop
    orders: Orders
    words: Words
    fingerprint: str
    metrics: bool = True  #: whether answers have `metrics`

    @classmethod
    def open(
        cls,
        speculator: Speculator,
        names: tuple[str, ...],
        rows: int,
        capacity: int,
        most_waiting: int,
        kept_bytes: int,
        metrics: bool = True,
    ) -> "Desk":
        """For a speculator that is called by these names; its loop is not yet started."""
        speculator.engine.priced(rows)  # measured now, not while the first client waits
        lanes, prefixes = Lanes(speculator.engine), Prefixes(kept_bytes)

        def opened(lane: str) -> Run:
            return Run(lanes[lane], rows, capacity, prefixes=prefixes)

        loop = Loop(opened, rows, most_waiting)
        orders = Orders(speculator, lanes, names, rows, capacity)
        return cls(loop, orders, Words(speculator.tokenizer), fingerprint(speculator), metrics)

    def choices(self, body: CompletionBody | ChatBody) -> list[Choice]:
        """What a body asks for. Raises Refusal, and the engine's own errors."""
        orders = self.orders
        return orders.chat(body) if isinstance(body, ChatBody) else orders.completions(body)

    def writer(self, body: CompletionBody | ChatBody) -> Writer:
        """What writes the answer to a body."""
        form = Chats() if isinstance(body, ChatBody) else Completions()
        return Writer(form, body.model, self.fingerprint, self.words, self.metrics)


@asynccontextmanager
async def running(loop: Loop) -> AsyncIterator[None]:
    """The thread that decodes runs; its events come to this event loop's thread, once a turn."""
    asynchronous = asyncio.get_running_loop()

    def deliver(events: list[tuple[Ticket, Event]]) -> None:
        asynchronous.call_soon_threadsafe(spread, events)

    loop.deliver = deliver
    loop.start()
    try:
        yield
    finally:
        loop.close()
        await asyncio.to_thread(loop.join, 10)
