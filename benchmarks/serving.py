"""What serving costs and withstands, on loopback with real clients.

    python benchmarks/serving.py edge     # 8 streams through HTTP against the batch alone
    python benchmarks/serving.py slow     # 7 streams beside one that is hardly read
    python benchmarks/serving.py soak     # 64 clients on 8 rows for a minute: nobody is lost
    python benchmarks/serving.py kill     # the server is killed in mid-load, another takes over
    python benchmarks/serving.py shared   # 8 prompts with 400 tokens in common, copied or read
    python benchmarks/serving.py seeds    # one seed beside 0, 4 and 12 other streams: one text

Every command takes --target (default: the shipped pair) and --processes (default: what the server
chooses), and prints one JSON document.
"""

import argparse
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
from loopback import past_proxies

PROMPTS = [
    "def fibonacci(n):\n",
    "import os\nimport re\n\n\ndef main():\n",
    "class Queue:\n    def __init__(self):\n",
    "def read_lines(path):\n    with open(path) as file:\n",
]


class Server:
    """`outrider serve` as a process of its own."""

    def __init__(self, args, rows, port=None, more=()):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = port or free.getsockname()[1]
        self.command = [
            *(sys.executable, "-m", "outrider", "serve", "--port", str(self.port)),
            *(
                "--max-num-seqs",
                str(rows),
                "--max-model-len",
                "512",
                "--threads",
                "1",
                "--dtype",
                args.dtype,
            ),
            *more,
        ]
        if args.target:
            self.command += ["--model", args.target]
        if args.processes:
            self.command += ["--processes", str(args.processes)]
        self.started = time.perf_counter()
        self.process = subprocess.Popen(self.command, stderr=subprocess.DEVNULL)
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=300
        )
        while True:
            try:
                self.name = self.client.models.list().data[0].id
                break
            except (openai.APIConnectionError, openai.InternalServerError):  # 503: it reads
                assert self.process.poll() is None, f"the server has ended: {self.command}"
                time.sleep(0.1)
        self.ready = time.perf_counter() - self.started

    def write(self, prompt, **options):
        """A completion."""
        options = {"model": self.name, "max_tokens": 48, "temperature": 0.8} | options
        return self.client.completions.create(prompt=prompt, **options)

    def worked(self):
        """Seconds that processors have worked for it: its engine is in a process of its own."""
        mine, seconds = self.process.pid, 0.0
        with open(f"/proc/{mine}/task/{mine}/children") as file:
            every = [mine, *map(int, file.read().split())]
        for process in every:
            with open(f"/proc/{process}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return seconds

    def stop(self, how=signal.SIGINT):
        """End it; SIGKILL leaves it no time for anything."""
        self.process.send_signal(how)
        self.process.wait(120)  # it may have answers to end, on busy cores


def edge(args):
    """Tokens a second of 8 streams through HTTP, and of the same requests in a live batch alone.

    Both draft alike in every step, as a planner would not. By wall time, the client included, and
    by the time that the server's processor and the batch's thread have worked.
    """
    import outrider
    from outrider.models.prefix_cache import PrefixCache
    from outrider.server.speculation_methods import COUPLED, MethodRouter

    server = Server(args, 8, more=("--planner", "fixed"))
    prompts = [PROMPTS[at % len(PROMPTS)] for at in range(8)]
    speculator = outrider.load(args.target, dtype=args.dtype, threads=1, planner="fixed")
    run = outrider.EngineRun(
        MethodRouter(speculator.engine)[COUPLED], 8, 512, prefixes=PrefixCache(256 << 20)
    )
    ends = outrider.StopConditions(96, speculator.eos_ids)
    requests = [
        outrider.Request(
            speculator.tokenizer(prompt)["input_ids"], outrider.SamplingParams(0.8, seed=at), ends
        )
        for at, prompt in enumerate(prompts)
    ]

    def alone():
        """The batch's tokens."""
        numbers, count = run.submit_all(requests), 0
        while not run.done:
            count += sum(len(block.token_ids) for block in run.step())
        for number in numbers:
            run.release(number)
        return count

    def through():
        """The streams' tokens."""
        return sum(pool.map(lambda at: streamed(server, prompts[at], at), range(8)))

    found = {"http": [], "batch": [], "http by processor": [], "batch by processor": []}
    with ThreadPoolExecutor(8) as pool:
        for turn in range(args.repeats + 2):
            for name, work, clock in (
                ("http", through, server.worked),
                ("batch", alone, time.thread_time),
            ):
                started, before = time.perf_counter(), clock()
                tokens = work()
                if turn > 1:  # the first ones warm up
                    found[name].append(tokens / (time.perf_counter() - started))
                    found[f"{name} by processor"].append(tokens / (clock() - before))
    server.stop()
    return {
        "tokens_per_second": found,
        "ratio": ratio(found["http"], found["batch"]),
        "ratio_by_processor": ratio(found["http by processor"], found["batch by processor"]),
    }


def ratio(mine, theirs):
    """The median of the turns' ratios: the machine's pace changes from turn to turn."""
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def streamed(server, prompt, seed):
    """How many tokens one stream has brought, read as bytes: the client costs next to nothing."""
    body = {"model": server.name, "prompt": prompt, "seed": seed, "max_tokens": 96}
    body |= {"temperature": 0.8, "stream": True, "stream_options": {"include_usage": True}}
    client = http.client.HTTPConnection("127.0.0.1", server.port)
    client.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    last = [line for line in client.getresponse().read().split(b"\n\n") if b'"usage"' in line][-1]
    client.close()
    return json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"]


def slow(args):
    """Tokens a second of 7 streams, and of 7 that an eighth one is hardly read beside.

    Both have an eighth beside them, of four times the length and with an event of a kilobyte for
    each token: one that is read as it comes, or a byte a second until the seven are done.
    """
    server = Server(args, 8)
    ask = {"model": server.name, "prompt": PROMPTS[0], "seed": 9, "max_tokens": 400}
    ask |= {"ignore_eos": True, "stream": True, "stream_options": {"chunk_tokens": 1}}
    data = json.dumps(ask | {"logprobs": 5}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    rates = {"read": [], "a byte a second": []}

    def beside(most, pause):
        """Tokens a second of the seven, three times each, beside a reader."""
        over = threading.Event()
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            raw.connect(("127.0.0.1", server.port))
            raw.sendall(head + b"content-length: %d\r\n\r\n" % len(data) + data)
            reads = eighth.submit(sip, raw, most, pause, over)
            started = time.perf_counter()
            each = [*range(7)] * 3
            count = sum(seven.map(lambda at: streamed(server, PROMPTS[at % 4], at), each))
            took = time.perf_counter() - started
            over.set()
            raw.shutdown(socket.SHUT_RDWR)
            reads.result()
        return count / took

    with ThreadPoolExecutor(7) as seven, ThreadPoolExecutor(1) as eighth:
        for turn in range(args.repeats + 1):
            arms = [("read", 1 << 16, 0.0), ("a byte a second", 1, 1.0)]
            for name, most, pause in arms if turn % 2 else reversed(arms):
                rate = beside(most, pause)
                if turn:  # the first ones warm up
                    rates[name].append(rate)
    server.stop()
    return {"tokens_per_second": rates, "ratio": ratio(rates["a byte a second"], rates["read"])}


def sip(raw, most, pause, over):
    """Read so many bytes at most after every pause, until it is over; what is left stays unread."""
    while not over.wait(pause) and raw.recv(most):
        pass


def soak(args):
    """Every answer is a 200 or a 429 that says when to come back; nobody waits for nothing."""
    server = Server(args, 8)
    ends = time.perf_counter() + args.seconds
    told = {"answered": 0, "full": 0, "tokens": 0, "other": 0}
    queued = []

    def client(number):
        """Ask until the time is up."""
        draws = random.Random(number)
        while time.perf_counter() < ends:
            try:
                answer = server.write(draws.choice(PROMPTS), max_tokens=draws.choice([8, 24, 64]))
            except openai.RateLimitError as error:
                told["full"] += 1
                time.sleep(float(error.response.headers["retry-after"]))
            except openai.OpenAIError:
                told["other"] += 1
            else:
                told["answered"] += 1
                told["tokens"] += answer.usage.completion_tokens
                queued.append(answer.model_extra["metrics"]["queue_time_ms"])

    with ThreadPoolExecutor(args.clients) as pool:
        list(pool.map(client, range(args.clients)))
    server.stop()
    queued.sort()
    return told | {
        "queue_ms_p50": queued[len(queued) // 2],
        "queue_ms_p99": queued[-len(queued) // 100],
    }


def kill(args):
    """Streams whose server is killed go on from another one, with the text they would have had."""
    server = Server(args, 8)
    whole = [server.write(PROMPTS[at % 4], seed=at).choices[0].text for at in range(8)]
    told = {"return_token_ids": True}
    prompts, texts, ids, over = [None] * 8, [""] * 8, [[] for _ in range(8)], [None] * 8

    def stream(at):
        """Take what comes until the server is gone."""
        try:
            for chunk in server.write(PROMPTS[at % 4], seed=at, stream=True, extra_body=told):
                for choice in chunk.choices:
                    prompts[at] = prompts[at] or choice.model_extra["prompt_token_ids"]
                    ids[at] += choice.model_extra["token_ids"]
                    texts[at] += choice.text
                    over[at] = choice.finish_reason
        except openai.OpenAIError:
            return

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream, at) for at in range(8)]
        while sum(map(len, ids)) < 8 * 12:
            time.sleep(0.01)
        server.stop(signal.SIGKILL)
        for one in streams:
            one.result()
    before = list(map(len, ids))
    killed = time.perf_counter()
    server = Server(args, 8, server.port)
    back = time.perf_counter() - killed
    for at in range(8):
        if over[at] is None:
            left = 48 - before[at]
            rest = server.write(prompts[at] + ids[at], seed=at, max_tokens=left)
            texts[at] += rest.choices[0].text
    server.stop()
    pairs = list(zip(texts, whole, strict=True))
    return {
        "back_after_seconds": back,
        "tokens_before": before,
        "same_texts": sum(mine == theirs for mine, theirs in pairs),
        "others": [pair for pair in pairs if pair[0] != pair[1]],
    }


def seeds(args):
    """How often one seeded request has its text beside others, in one server and the next."""
    found = {}
    texts = set()
    for start in range(2):
        server = Server(args, 16)
        for others in (0, 4, 12):
            with ThreadPoolExecutor(16) as pool:
                beside = [
                    pool.submit(server.write, PROMPTS[at % 4], max_tokens=200)
                    for at in range(others)
                ]
                for _ in range(args.repeats):
                    texts.add(server.write(PROMPTS[0], seed=7).choices[0].text)
                    found[f"server {start}, beside {others}"] = len(texts)
                [one.result() for one in beside]
        server.stop()
    return {"different_texts": len(texts), "after": found}


def shared(args):
    """Milliseconds to the first token of prompts that begin alike, asked one after the other."""
    head = "\n\n".join(f"def function_{at}(x):\n    return x * {at}" for at in range(28))
    waits, texts = {}, {}
    for kept in ("256", "0"):
        server = Server(args, 8, more=("--prefix-cache-mib", kept))
        server.write(PROMPTS[0], max_tokens=2)
        found = [
            server.write(f"{head}\n\ndef other_{at}(x):", seed=at, max_tokens=8) for at in range(8)
        ]
        texts[kept] = [answer.choices[0].text for answer in found]
        waits[kept] = [answer.model_extra["metrics"]["time_to_first_token_ms"] for answer in found]
        copied = [answer.usage.prompt_tokens_details.cached_tokens for answer in found]
        waits[f"copied with {kept} MiB"] = copied
        server.stop()
    return waits | {
        "prompt_tokens": found[0].usage.prompt_tokens,
        "same_texts": texts["256"] == texts["0"],
        "ratio": statistics.median(waits["0"]) / statistics.median(waits["256"]),
    }


def main():
    """One of them."""
    past_proxies()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["edge", "slow", "soak", "kill", "seeds", "shared"])
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--processes", type=int, choices=[1, 2])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps({"what": args.what} | globals()[args.what](args), indent=1))


if __name__ == "__main__":
    main()
