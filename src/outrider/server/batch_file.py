"""Files of requests and files of answers, in OpenAI's batch format, one JSON object a line.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    {"id": "batch_req_..", "custom_id": "a", "response": {"status_code": 200, "request_id": "..",
     "body": {...}}, "error": null}

A line that is no request becomes a row with an `error` and no response. The `id` of a row is made
of its request, so that it is the same in every run: one that was stopped goes on where it was.
"""

import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from contextlib import nullcontext, suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

from pydantic import ValidationError

from outrider.errors import ConfigurationError, OutriderError
from outrider.server.chat_prompts import Parsers
from outrider.server.engine_client import InProcessClient
from outrider.server.engine_factory import EngineConfig
from outrider.server.engine_loop import EngineStoppedError
from outrider.server.errors import APIError, content, rejected, to_response
from outrider.server.messages import JsonObject
from outrider.server.model_info import TextModelInfo
from outrider.server.protocol import ChatCompletionRequest, CompletionRequest
from outrider.server.request_parsing import RequestParser
from outrider.server.serving import RequestHandler, running, text_blocks
from outrider.text.speculator import Speculator

if sys.platform != "win32":
    import fcntl

#: What a line may ask for.
URLS = ("/v1/completions", "/v1/chat/completions")

#: A line of a file of answers.
Row = JsonObject


class BatchLine(NamedTuple):
    """One line of a file of requests: what it asks for, or in `fault` why it asks for nothing."""

    name: str  #: the `id` of its row
    custom_id: str | None
    url: str = ""
    body: JsonObject | None = None
    fault: str | None = None

    def answered(self, status: int, body: JsonObject) -> Row:
        """Its row, with what a server would have sent."""
        response = {"status_code": status, "request_id": self.name, "body": body}
        return {"id": self.name, "custom_id": self.custom_id, "response": response, "error": None}

    def refused(self) -> Row:
        """Its row, if it is no request."""
        error = {"code": "invalid_line", "message": self.fault}
        return {"id": self.name, "custom_id": self.custom_id, "response": None, "error": error}


def _good(row: Row) -> bool:
    """Whether a row has an answer, not an error."""
    return (row["response"] or {}).get("status_code") == 200


def requests(path: Path) -> Iterator[BatchLine]:
    """Every line of a file of requests but empty ones. Whatever is in a line: it raises nothing."""
    places: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            wanted = _read(line, number)
            if wanted.fault is None and wanted.custom_id is not None:
                before = places.setdefault(wanted.custom_id, number)
                if before != number:
                    why = f"custom_id {wanted.custom_id!r} was given in line {before}; give another"
                    wanted = _faulty(line, number, why)
            yield wanted


def _read(line: bytes, number: int) -> BatchLine:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError) as error:
        return _faulty(line, number, f"no JSON ({error})")
    if not isinstance(told, dict):
        return _faulty(line, number, "no JSON object; write {...}")
    custom_id, body = told.get("custom_id"), told.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return _faulty(line, number, f"custom_id must be a text; got {custom_id!r}")
    if told.get("method") != "POST":
        return _faulty(line, number, f"method must be POST; got {told.get('method')!r}", custom_id)
    if (url := told.get("url")) not in URLS:
        return _faulty(line, number, f"url must be {' or '.join(URLS)}; got {url!r}", custom_id)
    if not isinstance(body, dict):
        return _faulty(line, number, f"body must be an object; got {body!r}", custom_id)
    if more := told.keys() - {"custom_id", "method", "url", "body"}:
        return _faulty(line, number, f"unknown field {min(more)!r}; leave it out", custom_id)
    asked = json.dumps([custom_id, url, body], sort_keys=True)
    return BatchLine(_name(asked.encode()), custom_id, url, body)


def _faulty(line: bytes, number: int, why: str, custom_id: str | None = None) -> BatchLine:
    name, fault = _name(b"%d %s" % (number, line)), f"line {number}: {why[:400]}"
    return BatchLine(name, custom_id, fault=fault)


def _name(text: bytes) -> str:
    return "batch_req_" + hashlib.sha256(text).hexdigest()[:24]


class BatchResults:
    """A file of answers, open for more of them: none twice, and none that is cut off.

    Rows with a status of 200 stay. Rows with errors and a last line that was cut off go: what they
    answered is asked again.

    Raises ConfigurationError for a file that is none of answers, and for one that is being written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: set[str] = set()  #: of the requests that have their row
        self.dropped = 0  #: rows that were there, to be asked again
        self.faults = 0  #: rows with an error that were written
        self._file = self._locked(path)
        try:
            kept = self._kept()
            if self.dropped:
                self._rewrite(kept)
        except BaseException:
            self._file.close()
            raise

    def write(self, row: Row) -> bool:
        """Add a row, unless it is there; whether it was added."""
        if row["id"] in self.names:
            return False
        self.names.add(row["id"])
        self.faults += not _good(row)
        try:
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            there = len(self.names) - 1
            raise ConfigurationError(
                f"cannot write to {self.path} ({error.strerror}); got {there} answers there; make "
                "room, and give the same command: it goes on behind them"
            ) from error
        return True

    def check(self, names: set[str], source: Path) -> None:
        """Refuse to mix answers to `source`, which asks for `names`, with those to other requests.

        Raises ConfigurationError.
        """
        if others := len(self.names - names):
            raise ConfigurationError(
                f"{self.path} has answers to other requests than {source}; got {others} such rows; "
                "name another file for the answers, or give the requests as they were"
            )

    def _kept(self) -> list[bytes]:
        """The lines that stay."""
        lines = []
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            row = self._row(line, number) if line.endswith(b"\n") else None
            if row is None or not _good(row):
                self.dropped += 1
            else:
                self.names.add(row["id"])
                lines.append(line)
        return lines

    def _row(self, line: bytes, number: int) -> Row:
        try:
            row: Row = json.loads(line)
            if {"id", "custom_id", "response", "error"} <= row.keys():
                return row
        except (ValueError, AttributeError):
            pass
        raise ConfigurationError(
            f"line {number} of {self.path} is no answer of a batch; got {line[:60]!r}; "
            "name another file for the answers"
        )

    def _rewrite(self, lines: list[bytes]) -> None:
        """The file with these lines alone: there is one of the two at any time."""
        beside = self.path.with_name(self.path.name + ".part")
        beside.unlink(missing_ok=True)
        file = self._locked(beside)
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
        os.replace(beside, self.path)
        self._file.close()
        self._file = file

    def _locked(self, path: Path) -> IO[bytes]:
        file = path.open("a+b")
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                raise ConfigurationError(
                    f"another process writes to {self.path}; wait for it, or name another file"
                ) from None
        return file

    def __enter__(self) -> "BatchResults":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError) if kind is not None else nullcontext():  # a full disk was told
            self._file.close()


__all__ = ["URLS", "BatchLine", "BatchResults", "Row", "requests"]


# Requests of a file, answered by one loop in this process: the server without HTTP.

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
    most = 2 * _AHEAD * rows * rows  # a request is `rows` choices at most, and scores of prompts
    engine = InProcessClient(speculator, EngineConfig(rows, capacity, most))
    known = engine.known
    assert isinstance(known, TextModelInfo)
    parser = RequestParser(known, (name,), rows, capacity, Parsers.of(known.tokenizer, None, None))
    every = _running(RequestHandler(engine, parser), wanted)

    async def following() -> Row | None:
        return await anext(every, None)

    with asyncio.Runner() as runner:
        try:
            while (row := runner.run(following())) is not None:
                yield row
        finally:
            runner.run(every.aclose())


async def _running(
    handler: RequestHandler, wanted: Iterable[BatchLine]
) -> AsyncGenerator[Row, None]:
    """Rows in the order in which they are ready; some more requests than rows are under way."""
    source, under_way = iter(wanted), set[asyncio.Task[Row]]()
    async with running(handler.engine):
        try:
            while True:
                free = _AHEAD * handler.engine.rows - len(under_way)
                under_way |= {
                    asyncio.create_task(_row(handler, one)) for one in islice(source, free)
                }
                if not under_way:
                    return
                done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                errors = [error for task in done if (error := task.exception())]
                for task in done:
                    if task.exception() is None:
                        yield task.result()
                if errors:  # all of them are told the same of an engine that has stopped
                    raise handler.engine.fault or errors[0]
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)


async def _row(handler: RequestHandler, wanted: BatchLine) -> Row:
    if wanted.body is None:
        return wanted.refused()
    return wanted.answered(*await _answer(handler, wanted.url, wanted.body))


async def _answer(handler: RequestHandler, url: str, asked: JsonObject) -> tuple[int, JsonObject]:
    """Status and body of what is said to a request's body."""
    try:
        body = _BODIES[url].model_validate(asked)
        if body.stream:
            raise APIError("a file of answers has no streams; leave stream out", "stream")
        choices = await asyncio.to_thread(handler.choices, body)
        wait = None if body.timeout is None else time.monotonic() + body.timeout
        async for _ in text_blocks(handler.engine, choices, wait):
            pass
    except ValidationError as error:
        return 400, rejected(error.errors())
    except (APIError, OutriderError, TimeoutError) as error:
        if handler.engine.fault is not None:
            raise
        return to_response(error)
    except Exception as error:
        if handler.engine.fault is not None or isinstance(error, EngineStoppedError):
            raise
        return 500, content(f"internal error: {type(error).__name__}: {error}", 500)
    echo = isinstance(body, CompletionRequest) and body.echo
    return 200, handler.writer(body).whole(choices, echo)
