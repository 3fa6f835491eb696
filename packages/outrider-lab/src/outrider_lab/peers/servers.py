"""Servers under so many clients at once: tokens a second, processor time a token, waiting.

Every server has a process of its own on the same cores; the clients, OpenAI's, ask from here. Each
takes the next prompt as soon as its last answer is there. Servers take turns, round by round.
"""

import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.console import Show
from outrider.errors import ConfigurationError
from outrider_lab.certify.report import Row
from outrider_lab.papers.record import Store
from outrider_lab.peers.engines import LLAMA, VLLM, EngineGone, EngineProcess
from outrider_lab.peers.text import DEFAULT, LLAMA_PLAIN, PLAIN, Arm, title_of

if TYPE_CHECKING:
    import openai


@dataclass(frozen=True)
class ServersRequest:
    """What is measured of one file.

    model    a GGUF file; `folder` the same model as a folder, for servers that read no such file
    own, peer  the Python of our server, and of the others'
    clients  how many ask at once, each a measurement
    modes    llama.cpp's n-gram modes besides plain decoding
    """

    model: Path
    folder: Path | None
    own: str
    peer: str
    engines: tuple[str, ...]
    clients: tuple[int, ...]
    modes: tuple[str, ...]
    cores: tuple[int, ...] = (0,)
    dtype: str = "auto"
    tokens: int = 64
    rounds: int = 3
    context: int = 1024


@dataclass
class ServersFigures:
    """What came of every server: its rounds by number of clients, and why some are left out.

    rounds  wall, worked (processor seconds), tokens, texts, waits (seconds of each answer), memory;
            of servers that were there to the end
    """

    rounds: dict[int, dict[str, list[Row]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def arms(asked: ServersRequest) -> list[Arm]:
    """Every server that is there, plain and drafting."""
    usual: dict[str, Any] = {
        "model": str(asked.model),
        "threads": max(len(asked.cores), 1),
        "cores": list(asked.cores),
        "rows": max(asked.clients),
        "context": asked.context,
    }
    mine = usual | {"engine": "outrider, server", "dtype": asked.dtype}
    found = [
        Arm(PLAIN, asked.own, mine | {"more": ["--drafter", "none"]}),
        Arm(DEFAULT, asked.own, mine | {"more": []}),
    ]
    if LLAMA.name in asked.engines:
        for mode in ("NONE", *asked.modes):
            name = LLAMA_PLAIN if mode == "NONE" else f"llama.cpp {mode}"
            words = usual | {"engine": "llama.cpp, server", "mode": mode}
            found.append(Arm(name, asked.peer, words, {"cache_prompt": False}))
    if VLLM.name in asked.engines and asked.folder is not None:
        words = usual | {"engine": "vLLM, server", "model": str(asked.folder)}
        ngram = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
        found.append(Arm("vLLM bf16", asked.peer, words | {"more": []}))
        more = ["--speculative-config", ngram]
        found.append(Arm("vLLM bf16, n-grams", asked.peer, words | {"more": more}))
    return found


class RunningServer:
    """A server of one arm, and a client of it.

    Raises EngineGone with the arm's name where the server does not answer, or not as it should.
    """

    def __init__(self, arm: Arm) -> None:
        import openai

        self.arm, self.process = arm, EngineProcess(arm.python, arm.words)
        # Every answer has a connection of its own: a server may close an idle one at any time. It
        # goes past proxies of the environment.
        anew = openai.DefaultHttpxClient(headers={"Connection": "close"}, trust_env=False)
        self.client = openai.OpenAI(
            base_url=f"{self.process.ready['address']}/v1",
            api_key="none",
            max_retries=0,
            timeout=600,
            http_client=anew,
        )
        try:
            self.name = self.client.models.list().data[0].id
        except openai.OpenAIError as error:
            gone = self._gone(error)
            self.close()
            raise gone from error

    def _gone(self, error: Exception) -> EngineGone:
        """What is said of a server that failed: whose it is, and why, down to the first cause."""
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        why = "; ".join(dict.fromkeys(f"{type(one).__name__}: {one}" for one in causes))
        return EngineGone(f"the server of {self.arm.name} gave no answer: {why[:400]}")

    def answer(self, prompt: list[int], tokens: int) -> tuple[str, int, float]:
        """Text, tokens and seconds of one greedy answer."""
        started = time.perf_counter()
        told: openai.types.Completion = self.client.completions.create(
            model=self.name,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            extra_body=self.arm.ask,
        )
        assert told.usage is not None
        took = time.perf_counter() - started
        return told.choices[0].text, told.usage.completion_tokens, took

    def round(self, prompts: Sequence[list[int]], clients: int, tokens: int) -> Row:
        """All prompts, asked by so many clients."""
        import openai

        before, started = self.process.ask()["worked"], time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            try:
                every = list(pool.map(lambda prompt: self.answer(prompt, tokens), prompts))
            except openai.OpenAIError as error:
                pool.shutdown(cancel_futures=True)
                raise self._gone(error) from error
        wall, after = time.perf_counter() - started, self.process.ask()["worked"]
        return {
            "wall": wall,
            "worked": after - before,
            "tokens": sum(count for _, count, _ in every),
            "texts": [text for text, _, _ in every],
            "waits": [took for _, _, took in every],
        }

    def close(self) -> None:
        """End it."""
        self.client.close()
        self.process.close()


def run(
    asked: ServersRequest, prompts: Sequence[list[int]], store: Store, progress: Show
) -> ServersFigures:
    """Measure what the store does not have yet: round by round, by clients, server by server."""
    if not os.path.exists("/proc/self/task"):
        raise ConfigurationError(
            "servers are measured by what Linux says of processes in /proc; got a system without "
            "it; leave --clients out"
        )
    title, found = title_of(asked.model), ServersFigures()
    servers: list[RunningServer] = []
    try:
        for arm in arms(asked):
            progress(f"{title}: server of {arm.name} starts", 0, 1)
            try:
                servers.append(RunningServer(arm))
            except EngineGone as gone:
                found.left_out[arm.name] = str(gone)
        rounds = [(number, c) for number in (-1, *range(asked.rounds)) for c in asked.clients]
        found.rounds = {c: {server.arm.name: [] for server in servers} for c in asked.clients}
        for done, (number, clients) in enumerate(rounds):
            for server in list(servers):
                name = server.arm.name
                progress(f"{title}: {clients} clients, {name}", done, len(rounds))
                key = f"{title}: {clients} clients, {name}, round {number}"
                try:
                    if number < 0:  # warm
                        server.round(prompts[:clients], clients, 4)
                        continue
                    row = store.get(key, server.round, prompts, clients, asked.tokens)
                except EngineGone as gone:
                    found.left_out[name] = f"{gone} ({clients} clients, round {number})"
                    servers.remove(server)
                    server.close()
                else:
                    found.rounds[clients][name].append(row)
        for theirs in found.rounds.values():
            for name in [name for name, rows in theirs.items() if len(rows) < asked.rounds]:
                del theirs[name]
    finally:
        for server in servers:
            server.close()
    return found


def table(found: ServersFigures) -> list[Row]:
    """A row for each number of clients and server.

    Sums over rounds; brackets have the least and the most of single rounds. Processor time is
    compared with the best way of each other server, and with our plain decoding.
    """
    rows: list[Row] = []
    first = [arms[PLAIN] for _, arms in sorted(found.rounds.items()) if PLAIN in arms]
    meant = first[0][0]["texts"] if first else []
    for clients, arms in found.rounds.items():
        others = [
            min(theirs, key=lambda name: _each(arms[name]))
            for peer in (LLAMA.name, VLLM.name)
            if (theirs := [name for name in arms if name.startswith(peer)])
        ]
        for name, its in arms.items():
            waits = [wait for one in its for wait in one["waits"]]
            row: Row = {
                "clients": clients,
                "engine": name,
                "ms a token, CPU": _each(its),
                "tokens a second, wall": 1e3 / _each(its, "wall"),
                "answer, s (median)": statistics.median(waits),
            }
            for best in others:
                row[f"times {best.split(maxsplit=1)[0]}'s best"] = _times(arms[best], its)
            if PLAIN in arms:
                row["times our plain"] = _times(arms[PLAIN], its)
            if meant:
                pairs = zip(its[0]["texts"], meant, strict=True)
                same = sum(a.strip() == b.strip() for a, b in pairs)
                row["texts as our plain's of few clients"] = f"{same} of {len(meant)}"
            rows.append(row)
    return rows


def _each(rows: Sequence[Row], name: str = "worked") -> float:
    """Milliseconds a token of all rounds."""
    return float(1e3 * sum(row[name] for row in rows) / sum(row["tokens"] for row in rows))


def _times(others: Sequence[Row], mine: Sequence[Row]) -> str:
    """How many times less processor time, and its least and most of single rounds, if several."""
    each = [_each([a]) / _each([b]) for a, b in zip(others, mine, strict=True)]
    around = f" [{min(each):.2f}, {max(each):.2f}]" if len(each) > 1 else ""
    return f"{_each(others) / _each(mine):.2f}{around}"
