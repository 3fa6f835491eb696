"""`outrider serve` on the device: whether it answers, its texts, and its tokens per second.

The server is a process of its own, as it is for a user; clients are threads here, each with one
request at a time. The model is `--model` with `--draft`; without them the shipped pair.
"""

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu_stages.card import ROOT, Card
from gpu_stages.correctness import environment
from gpu_stages.plan import Failed, Item
from outrider.models.pretrained import read_tokenizer
from outrider.shipped import shipped
from outrider_lab.tasks.prompts import tasks, token_ids

ARMS = ("nothing set", "plain", "draft")
CLIENTS = (1, 8, 16)
NEEDED = ("fastapi", "uvicorn")


def items(card: Card) -> list[Item]:
    """A server for each way to draft: each is asked by few clients, then by many."""
    return [Item(arm, lambda arm=arm: served(card, arm), 150) for arm in card.pick(ARMS, ARMS[:1])]


def options(card: Card, arm: str) -> list[str] | None:
    """The command's options of one arm; None: there is no draft to be had."""
    model = ["--model", str(card.model or shipped("target"))]
    draft = card.draft or (None if card.model else shipped("draft"))
    more = {
        "plain": ["--drafter", "none"],
        "nothing set": [],
        "draft": ["--draft-model", str(draft)] if draft else None,
    }[arm]
    dtype = str(card.dtype).removeprefix("torch.")
    return None if more is None else [*model, *more, "--device", card.device, "--dtype", dtype]


def served(card: Card, arm: str) -> dict[str, Any]:
    """Start, ask, end: seconds until it listens, tokens per second by clients, equal texts."""
    for name in NEEDED:
        try:
            __import__(name)
        except ImportError:
            return {"arm": arm, "absent": f"{name} is not installed"}
    given = options(card, arm)
    if given is None:
        return {"arm": arm, "absent": "no draft was given"}
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    command = [sys.executable, "-m", "outrider", "serve", "--port", str(port), *given]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment(card))
    try:
        return {"arm": arm, "command": " ".join(command[1:])} | _asked(card, process, port, start)
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def _asked(
    card: Card, process: "subprocess.Popen[bytes]", port: int, start: float
) -> dict[str, Any]:
    while True:
        if process.poll() is not None:
            raise Failed(f"the server ended with code {process.returncode}; log.txt says why", {})
        try:
            if _request(port, "GET", "/health")[0] == 200:
                break
        except OSError:
            pass
        time.sleep(0.1)
    told: dict[str, Any] = {"ready_s": time.perf_counter() - start}
    read = read_tokenizer(str(card.model or shipped("target")), False)
    prompts = [token_ids(read, one.turns) for one in tasks(card.pick(4, 1))]
    tokens = card.pick(128, 4)
    before: list[str] = []
    for clients in card.pick(CLIENTS, (1, 2)):
        warm = prompts[: 2 * clients]
        _round(port, warm, clients, tokens)
        seconds, answers = _round(port, prompts, clients, tokens)
        texts = [text for text, _ in answers]
        told[f"{clients} clients"] = {
            "tokens_s": sum(count for _, count in answers) / seconds,
            "texts": len(texts),
            "as_alone": sum(a == b for a, b in zip(texts, before or texts, strict=True)),
        }
        before = before or texts
    return told


def _round(
    port: int, prompts: Sequence[list[int]], clients: int, tokens: int
) -> tuple[float, list[tuple[str, int]]]:
    """Wall seconds of all prompts by so many clients, and each answer's text and tokens."""

    def ask(prompt: list[int]) -> tuple[str, int]:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        status, answer = _request(port, "POST", "/v1/completions", body)
        if status != 200:
            raise Failed(f"the server answered {status}: {answer}", {})
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(ask, prompts))
    return time.perf_counter() - start, answers


def _request(port: int, verb: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(verb, path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        read = answer.read()
        return answer.status, json.loads(read) if read.strip() else {}
    finally:
        connection.close()
