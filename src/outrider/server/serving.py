"""One request from its body to its answer: requests go to the engine, outputs become objects."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from outrider.engine.outputs import StepOutput
from outrider.server.batch_runners import SCORES
from outrider.server.engine_client import EngineClient
from outrider.server.engine_loop import (
    Broken,
    EngineOutput,
    EngineRequest,
    EngineStoppedError,
    QueueFullError,
)
from outrider.server.errors import response, to_response
from outrider.server.messages import JsonObject
from outrider.server.metrics import ServerMetrics
from outrider.server.model_info import TextOffsets, TokenFormatter
from outrider.server.protocol import (
    BaseRequest,
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
)
from outrider.server.request_parsing import ChoiceState, RequestParser
from outrider.server.response_builder import (
    ChatFormat,
    CompletionFormat,
    ResponseBuilder,
    append_output,
    padding,
    usage,
)
from outrider.text.output_text import TextBlock

# Where requests become answers, whoever brings them: HTTP, or a file of requests.


@dataclass(frozen=True)
class RequestHandler:
    """Reads bodies and writes answers for one model, and has what decodes for it."""

    engine: EngineClient
    parser: RequestParser
    metrics: bool = True  #: whether answers have `metrics`

    def choices(self, body: CompletionRequest | ChatCompletionRequest) -> list[ChoiceState]:
        """What a body asks for. Raises Refusal, and the engine's own errors."""
        if isinstance(body, ChatCompletionRequest):
            return self.parser.chat(body)
        return self.parser.completions(body)

    def writer(self, body: CompletionRequest | ChatCompletionRequest) -> ResponseBuilder:
        """What writes the answer to a body."""
        form = ChatFormat() if isinstance(body, ChatCompletionRequest) else CompletionFormat()
        known, name = self.parser.known, self.parser.name(body.model)
        return ResponseBuilder(
            form,
            name,
            known.fingerprint_of(name),
            TokenFormatter(known.tokenizer),
            self.metrics,
        )


JOIN_SECONDS = 2.0  #: that an engine which nobody waits for has for the step under way


@asynccontextmanager
async def running(
    engine: EngineClient, counted: Callable[[Sequence[EngineOutput]], None] | None = None
) -> AsyncIterator[None]:
    """It decodes; outputs are `counted` and dispatched on this event loop's thread, once a turn."""
    asynchronous = asyncio.get_running_loop()

    def take(outputs: list[EngineOutput]) -> None:
        if counted is not None:
            counted(outputs)
        engine.dispatch(outputs)

    def deliver(outputs: list[EngineOutput]) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            asynchronous.call_soon_threadsafe(take, outputs)

    engine.deliver = deliver
    engine.start()
    try:
        yield
    finally:
        engine.close()
        await asyncio.to_thread(engine.join, JOIN_SECONDS)


#: What choices say, as it comes.
Blocks = AsyncGenerator[tuple[ChoiceState, TextBlock], None]


async def text_blocks(
    engine: EngineClient, choices: Sequence[ChoiceState], deadline: float | None
) -> Blocks:
    """Decode choices: what they say, as it comes.

    Raises what went wrong. What is not over then, or when this is closed, is aborted.
    """
    texts = {
        EngineRequest(one.lane, one.request, deadline, one.arrived, one.priority): one
        for one in choices
        if one.reason is None
    }
    scored = {
        EngineRequest(SCORES, one.scored, deadline, one.arrived, one.priority): source
        for source, one in {one.source: one for one in choices}.items()
        if one.scored is not None
    }
    by_key = {asked.key: choice for asked, choice in texts.items()}
    sources = {asked.key: source for asked, source in scored.items()}
    left = len(texts) + len(scored)
    async with aclosing(engine.stream([*texts, *scored])) as outputs:
        async for output in outputs:
            choice = by_key.get(output.key)
            if choice is not None and choice.reason is not None:
                continue  # it was cut by a stop string: what comes behind is not wanted
            if choice is not None:
                choice.scheduled, choice.stats.cached_tokens = output.scheduled, output.cached
            if output.error is not None:
                for one in choices:
                    one.reason = one.reason or "error"
                raise output.error
            assert isinstance(output.block, StepOutput)
            if choice is None:  # of a prompt, for all choices that go on from it
                for one in choices:
                    if one.source == sources[output.key]:
                        one.scores = output.block
                left -= 1
            else:
                said = append_output(choice, output.block)
                if choice.reason is not None:
                    left -= 1
                    if not output.over:
                        engine.abort(output.key, "stop")
                yield choice, said
            if not left:
                return


#: Makes the events of a stream from its first block and what comes behind.
Flow = Callable[
    [Sequence[ChoiceState], Sequence[tuple[ChoiceState, TextBlock]], Blocks], AsyncIterator[bytes]
]


T = TypeVar("T")


class Whole(Protocol):
    """Writes whole answers."""

    def whole(self, choices: Sequence[ChoiceState], echo: bool = False) -> JsonObject:
        """The answer in one piece."""


@dataclass(frozen=True)
class Serving:
    """Answers requests by one engine."""

    engine: EngineClient
    counts: ServerMetrics
    timeout: float

    async def answer(
        self,
        http: HttpRequest,
        body: BaseRequest,
        choices: Sequence[ChoiceState],
        writer: Whole,
        flow: Flow,
        echo: bool = False,
    ) -> Response:
        """The whole answer, or a stream of it: `flow` makes its events."""
        wait = min(body.timeout or self.timeout, self.timeout)
        blocks = text_blocks(self.engine, choices, time.monotonic() + wait)
        try:
            first = await unless_gone(http, _opening(blocks))
        except Exception as error:
            return self._unscheduled(choices, error)
        if first is None:
            await blocks.aclose()
            self.counts.on_finish(choices)
            return Response(status_code=499)
        if body.stream:
            events = self._until_over(choices, blocks, flow(choices, first, blocks))
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        return await self._whole(http, blocks, choices, writer, echo)

    def _unscheduled(self, choices: Sequence[ChoiceState], error: Exception) -> Response:
        """The answer to a request that came to no text."""
        if isinstance(error, QueueFullError):
            self.counts.refused.inc()
        elif not isinstance(error, EngineStoppedError):
            self.counts.on_finish(choices)
        return response(error if self.engine.fault is None else Broken(str(self.engine.fault)))

    async def _whole(
        self,
        http: HttpRequest,
        blocks: Blocks,
        choices: Sequence[ChoiceState],
        writer: Whole,
        echo: bool,
    ) -> Response:
        async def rest() -> bool:
            async for _ in blocks:
                pass
            return True

        try:
            done = await unless_gone(http, rest())
        except Exception as error:
            return response(error)
        finally:
            self.counts.on_finish(choices)
        return JSONResponse(writer.whole(choices, echo)) if done else Response(status_code=499)

    async def _until_over(
        self, choices: Sequence[ChoiceState], blocks: Blocks, events: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """The events, and the end of what nobody waits for."""
        try:
            async for event in events:
                yield event
        finally:
            await blocks.aclose()
            self.counts.on_finish(choices)


@dataclass(frozen=True)
class Events:
    """Server-sent events of completions and chats. A `Flow`."""

    options: StreamOptions
    writer: ResponseBuilder
    echo: bool

    async def __call__(
        self,
        choices: Sequence[ChoiceState],
        first: Sequence[tuple[ChoiceState, TextBlock]],
        blocks: Blocks,
    ) -> AsyncIterator[bytes]:
        """A fault in mid-stream is an event of its own, and no [DONE]."""
        options, writer = self.options, self.writer
        try:
            for choice in choices:
                opening = writer.opening(choice, self.echo)
                if opening is not None:
                    yield event(writer.event([opening], **writer.more(choice)), options)
            for choice, said in first:
                for part in _chunks(choice, said, choices, writer, options):
                    yield part
            async for choice, said in blocks:
                for part in _chunks(choice, said, choices, writer, options):
                    yield part
            if options.include_usage:
                yield event(writer.event([], **writer.tail(choices)), options)
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield b"data: " + json.dumps(to_response(error)[1]).encode() + b"\n\n"


async def _opening(blocks: Blocks) -> list[tuple[ChoiceState, TextBlock]]:
    """The first block; none of a request that was over before."""
    async for first in blocks:
        return [first]
    return []


def _chunks(
    choice: ChoiceState,
    said: TextBlock,
    choices: Sequence[ChoiceState],
    writer: ResponseBuilder,
    options: StreamOptions,
) -> list[bytes]:
    """The events of one block: one, or one for each token."""
    since, choice.told = choice.told, len(choice.answer.tokens)
    more: dict[str, object] = {}
    trace = said.block.trace
    if options.include_trace and trace is not None:
        more["trace"] = {
            "tokens": [writer.words.entry(token, 0.0)["token"] for token in trace.tokens],
            "parents": trace.parents,
            "accepted": trace.accepted,
            "next_is_bonus": trace.next_is_bonus,
            "emitted": [writer.words.entry(token, 0.0)["token"] for token in said.token_ids],
        }
    reason = said.finish_reason
    if options.chunk_tokens is None or len(said.token_ids) < 2:
        pieces = [writer.delta(choice, said.text, since, reason, **more)]
    else:
        pieces = _by_token(choice, said, since, reason, writer, more)
    beside = {"usage": usage(choices)} if options.continuous_usage_stats else {}
    return [event(writer.event([piece], **beside), options) for piece in pieces]


def _by_token(
    choice: ChoiceState,
    said: TextBlock,
    since: int,
    reason: str | None,
    writer: ResponseBuilder,
    more: dict[str, object],
) -> list[JsonObject]:
    """A block's text cut where its tokens begin."""
    ends = TextOffsets(writer.words).since(said.token_ids, 0, len(said.token_ids))[1:]
    cuts = [0, *(min(end, len(said.text)) for end in ends), len(said.text)]
    pieces = [said.text[start:stop] for start, stop in pairwise(cuts)]
    logs = writer.logs(choice, since)
    parts = []
    for at, piece in enumerate(pieces):
        last = at == len(pieces) - 1
        extra: dict[str, object] = {"logprobs": _nth(logs, at)}
        if choice.tells_ids:
            extra["token_ids"] = said.token_ids[at : at + 1]
        if last:
            extra |= more
        parts.append(writer.delta(choice, piece, since + at, reason if last else None, **extra))
    return parts


def _nth(logs: JsonObject | None, at: int) -> JsonObject | None:
    """The log-probabilities of one token of a block."""
    if logs is None:
        return None
    return {
        name: value[at : at + 1] if isinstance(value, list) else value
        for name, value in logs.items()
    }


def event(chunk: bytes, options: StreamOptions) -> bytes:
    """A chunk on its way, filled up so that its size says nothing of the tokens in it."""
    if options.include_obfuscation:
        size = len(chunk) + len(b',"obfuscation":""')
        chunk = b'%b,"obfuscation":"%b"}' % (chunk[:-1], padding(size))
    return b"data: " + chunk + b"\n\n"


async def unless_gone(http: HttpRequest, work: Awaitable[T]) -> T | None:
    """What `work` gives, or None once nobody waits for it any more."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task})
        return None
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()


async def _disconnected(http: HttpRequest) -> None:
    """Returns once the client is gone."""
    while True:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            return
