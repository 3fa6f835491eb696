"""Where requests become answers, whoever brings them: HTTP, or a file of requests."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import outrider
from outrider.engine.logprobs import Logprobs
from outrider.engine.request import Limits, Request
from outrider.laws.sampling import Sampling
from outrider.server.answers import Chats, Completions, Writer
from outrider.server.bodies import ChatBody, CompletionBody
from outrider.server.loop import Event, Loop, Ticket, spread
from outrider.server.orders import Choice, Orders
from outrider.server.words import Words
from outrider.text.speculator import Speculator


def fingerprint(speculator: Speculator) -> str:
    """Names what a seeded text depends on: weights, dtype, processor, libraries, version.

    A hash of what the model says of a few tokens, to the last bit.
    """
    engine, said = speculator.engine, []
    vocab = engine.target.vocab_size
    prompt = [1 + 7 * at % (vocab - 1) for at in range(24)]
    run = outrider.Run(engine, 1, 256)
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
        cls, speculator: Speculator, names: tuple[str, ...], loop: Loop, metrics: bool = True
    ) -> "Desk":
        """For a speculator that is called by these names; `loop` is not yet started."""
        orders = Orders(speculator, loop.lanes, names, loop.rows, loop.capacity)
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
    async def running(self) -> AsyncIterator[None]:
        """The loop decodes; events come to the sinks on this event loop's thread."""
        asynchronous = asyncio.get_running_loop()

        def deliver(events: list[tuple[Ticket, Event]]) -> None:
            asynchronous.call_soon_threadsafe(spread, events)

        self.loop.deliver = deliver
        self.loop.start()
        try:
            yield
        finally:
            self.loop.close()
            await asyncio.to_thread(self.loop.join, 10)
