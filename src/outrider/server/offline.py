"""Requests of a file, answered by one loop in this process: the server without HTTP."""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Iterable
from itertools import islice
from typing import Any

from pydantic import ValidationError

from outrider.errors import OutriderError
from outrider.server.batch_file import URLS, BatchLine, Row
from outrider.server.chat_prompts import Parsers
from outrider.server.engine_factory import EngineConfig, build_engine
from outrider.server.engine_loop import EngineStoppedError
from outrider.server.errors import APIError, content, rejected, to_response
from outrider.server.model_info import TextModelInfo
from outrider.server.protocol import ChatCompletionRequest, CompletionRequest
from outrider.server.request_handler import RequestHandler, running
from outrider.server.request_parsing import RequestParser
from outrider.server.serving import ActiveStream
from outrider.text.speculator import Speculator

_BODIES: dict[str, type[CompletionRequest | ChatCompletionRequest]] = dict(
    zip(URLS, (CompletionRequest, ChatCompletionRequest), strict=True)
)
_AHEAD = 2  #: requests under way for each row: a row that is free finds the next one waiting


def answers(
    speculator: Speculator, name: str, rows: int, capacity: int, wanted: Iterable[BatchLine]
) -> Generator[Row]:
    """The row of every line, as it is there.

    name      what the requests call the model
    rows      requests decoded side by side
    capacity  slots of each of them: prompt, answer and draft

    Raises what has stopped the engine. Whatever is wrong with a request is told in its row.
    """
    most = _AHEAD * rows * rows  # a request asks for `rows` choices at most
    known, loop = build_engine(speculator, EngineConfig(rows, capacity, most))
    assert isinstance(known, TextModelInfo)
    orders = RequestParser(known, (name,), rows, capacity, Parsers.of(known.tokenizer, None, None))
    every = _running(RequestHandler(loop, orders), wanted)

    async def following() -> Row | None:
        return await anext(every, None)

    with asyncio.Runner() as runner:
        try:
            while (row := runner.run(following())) is not None:
                yield row
        finally:
            runner.run(every.aclose())


async def _running(desk: RequestHandler, wanted: Iterable[BatchLine]) -> AsyncGenerator[Row, None]:
    """Rows in the order in which they are ready; some more requests than seats are under way."""
    source, under_way = iter(wanted), set[asyncio.Task[Row]]()
    async with running(desk.loop):
        try:
            while True:
                free = _AHEAD * desk.loop.rows - len(under_way)
                under_way |= {asyncio.create_task(_row(desk, one)) for one in islice(source, free)}
                if not under_way:
                    return
                done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                errors = [error for task in done if (error := task.exception())]
                for task in done:
                    if task.exception() is None:
                        yield task.result()
                if errors:  # all of them are told the same of an engine that has stopped
                    raise desk.loop.fault or errors[0]
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)


async def _row(desk: RequestHandler, wanted: BatchLine) -> Row:
    if wanted.body is None:
        return wanted.refused()
    return wanted.answered(*await _answer(desk, wanted.url, wanted.body))


async def _answer(
    desk: RequestHandler, url: str, asked: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Status and body of what is said to a request's body."""
    try:
        body = _BODIES[url].model_validate(asked)
        if body.stream:
            raise APIError("a file of answers has no streams; leave stream out", "stream")
        choices = await asyncio.to_thread(desk.choices, body)
        wait = None if body.timeout is None else time.monotonic() + body.timeout
        async for _ in ActiveStream(desk.loop, choices, wait).blocks():
            pass
    except ValidationError as error:
        return 400, rejected(error.errors())
    except (APIError, OutriderError, TimeoutError) as error:
        if desk.loop.fault is not None:
            raise
        return to_response(error)
    except Exception as error:
        if desk.loop.fault is not None or isinstance(error, EngineStoppedError):
            raise
        return 500, content(f"internal error: {type(error).__name__}: {error}", 500)
    echo = isinstance(body, CompletionRequest) and body.echo
    return 200, desk.writer(body).whole(choices, echo)
