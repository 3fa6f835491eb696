"""What a server in two processes withstands: every text is the one of an undisturbed run.

    python benchmarks/withstands.py load     # 5,000 short requests by 64 clients: memory, answers
    python benchmarks/withstands.py stopped  # its engine is stopped for a minute (SIGSTOP), goes on
    python benchmarks/withstands.py killed   # its engine is killed in mid-text, twice
    python benchmarks/withstands.py heads    # 300 connections that never finish their heads
    python benchmarks/withstands.py readers  # 8 streams that are hardly read, 8 others beside them
    python benchmarks/withstands.py full     # `outrider batch` on a disk that becomes full

Each prints one JSON document and ends with code 1 if a text was lost or is another one.
"""

import argparse
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving import PROMPTS, Server

DIFFERENT = 40  #: requests that the load is made of, again and again


def asked(server, at, **more):
    """The body of request number `at`: seeded, so that it has one text."""
    body = {"model": server.name, "prompt": PROMPTS[at % 4], "seed": at, "temperature": 0.8}
    return body | {"max_tokens": 8} | more


def post(connection, body):
    """A request's status and answer; of a stream its text, and whether it came to its end."""
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    data = answer.read()
    if answer.status != 200 or not body.get("stream"):
        said = json.loads(data)
        return answer.status, said["choices"][0]["text"] if answer.status == 200 else said
    events = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    if events[-1] != b"[DONE]":
        return 0, events[-1].decode()
    return 200, "".join(c["text"] for e in events[:-1] for c in json.loads(e)["choices"])


def whole(server, count, **more):
    """The texts of requests 0 to `count`, one after the other."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    told = [post(connection, asked(server, at, **more)) for at in range(count)]
    assert all(status == 200 for status, _ in told), told
    return [text for _, text in told]


def processes(server):
    """Its own process, and that of its engine."""
    mine = server.process.pid
    threads = Path(f"/proc/{mine}/task").iterdir()  # a later engine is another thread's child
    children = [one for thread in threads for one in (thread / "children").read_text().split()]
    return [mine, *(one for one in map(int, children) if "spawn_main" in command(one))]


def command(process):
    return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")


def resident(server):
    """MiB of memory that each of its processes holds."""
    sizes = []
    for process in processes(server):
        status = Path(f"/proc/{process}/status").read_text()
        sizes.append(int(status.partition("VmRSS:")[2].split()[0]) / 1024)
    return sizes


def load(args):
    """Every answer comes and is right, and memory stays what it was after the first 500."""
    server = Server(args, 8)
    texts, counts = whole(server, DIFFERENT), {"answered": 0, "full": 0, "lost": 0, "other text": 0}
    lock, numbers, sizes = threading.Lock(), iter(range(args.requests)), {}

    def client(_):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        while True:
            with lock:
                number = next(numbers, None)
                if number in (500, args.requests // 2, args.requests - 1):
                    sizes[number] = resident(server)
            if number is None:
                return
            body = asked(server, number % DIFFERENT, stream=number % 2 == 1)
            status, text = post(connection, body)
            while status == 429:
                counts["full"] += 1
                time.sleep(0.2)
                status, text = post(connection, body)
            kind = "lost" if status != 200 else "answered"
            if status == 200 and text != texts[number % DIFFERENT]:
                kind = "other text"
            with lock:
                counts[kind] += 1

    with ThreadPoolExecutor(args.clients) as pool:
        list(pool.map(client, range(args.clients)))
    sizes[args.requests] = resident(server)
    server.stop()
    first, last = sum(sizes[500]), sum(sizes[args.requests])
    told = {"mib": sizes, "growth": last / first - 1}
    bad = counts["lost"] + counts["other text"] + (counts["answered"] != args.requests)
    return counts | told, bad + (last > 1.05 * first)


def beside(server, count, disturb, **more):
    """Streams of `count` requests while something is done: statuses, and which texts are others."""
    texts = whole(server, count, **more)

    def stream(at):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        return post(connection, asked(server, at, stream=True, **more))

    with ThreadPoolExecutor(count) as pool:
        going = [pool.submit(stream, at) for at in range(count)]
        time.sleep(1.0)
        done = disturb()
        told = [one.result() for one in going]
    statuses = [status for status, _ in told]
    others = [at for at, (_, text) in enumerate(told) if text != texts[at]]
    return done | {"statuses": statuses, "other texts": others}, len(others)


def stopped(args):
    """A minute without a turn is less than --still: nothing is ended, nothing is told twice."""
    server = Server(args, 8)

    def disturb():
        engine = processes(server)[1]
        os.kill(engine, signal.SIGSTOP)
        time.sleep(args.seconds)
        os.kill(engine, signal.SIGCONT)
        return {"stopped for seconds": args.seconds, "same engine": processes(server)[1] == engine}

    told, bad = beside(server, 8, disturb, max_tokens=300)
    server.stop()
    return told, bad + (not told["same engine"])


def killed(args):
    """Its engine is started again, and who reads notices nothing but the pause."""
    server = Server(args, 8)
    engines = []

    def disturb():
        for _ in range(2):
            engines.append(processes(server)[1])
            os.kill(engines[-1], signal.SIGKILL)
            while len(processes(server)) < 2 or processes(server)[1] in engines:
                time.sleep(0.1)
            time.sleep(8.0)
        return {"kills": len(engines)}

    told, bad = beside(server, 8, disturb, max_tokens=400)
    server.stop()
    return told, bad


def heads(args):
    """Who never finishes a head is closed in time, and others are answered meanwhile."""
    server = Server(args, 8)
    texts, started = whole(server, 8), time.perf_counter()
    half = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    for one in half:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-half: ")
        one.settimeout(90)
    again = whole(server, 8)
    closed = 0
    for one in half:
        with one:
            answer = one.recv(1000)
            closed += answer.startswith(b"HTTP/1.1 408") or answer == b""
    took = time.perf_counter() - started
    server.stop()
    told = {"closed": closed, "of": 300, "after seconds": took, "same texts beside": again == texts}
    return told, (closed != 300) + (again != texts)


def readers(args):
    """Streams of which a kilobyte is read every second, and others beside them."""
    server = Server(args, 16)
    more = {"max_tokens": 120, "logprobs": 5, "stream_options": {"chunk_tokens": 1}}
    texts, brief = whole(server, 8, max_tokens=120), whole(server, 8, max_tokens=60)

    def sipped(at):
        data = json.dumps(asked(server, at, stream=True, **more)).encode()
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            raw.connect(("127.0.0.1", server.port))
            head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
            head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
            raw.sendall(head + data)
            got = b""
            while part := raw.recv(1024):
                got += part
                time.sleep(0.02 if len(got) > 40_000 else 0.2)
        lines = (line for line in got.split(b"\n") if line.startswith(b"data: {"))
        return "".join(c["text"] for line in lines for c in json.loads(line[6:])["choices"])

    def quick(at):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        return post(connection, asked(server, at, stream=True, max_tokens=60))

    started = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        slow = [pool.submit(sipped, at) for at in range(8)]
        time.sleep(1.0)
        fast = [one.result() for one in [pool.submit(quick, at) for at in range(8)]]
        quick_took = time.perf_counter() - started
        told = [one.result() for one in slow]
    took = time.perf_counter() - started
    server.stop()
    bad = sum(a != b for a, b in zip(told, texts, strict=True))
    bad_fast = sum(text != b for (_, text), b in zip(fast, brief, strict=True))
    seconds = {"others done after seconds": quick_took, "slow ones after": took}
    return seconds | {"slow texts wrong": bad, "other texts wrong": bad_fast}, bad + bad_fast


def full(args):
    """A file that cannot grow says where it stopped; with room the same command goes on."""
    rows = 24
    with tempfile.TemporaryDirectory() as folder:
        wanted, answers = Path(folder, "wanted.jsonl"), Path(folder, "answers.jsonl")
        undisturbed = Path(folder, "undisturbed.jsonl")
        about = {"model": "outrider-pair", "temperature": 0.8, "max_tokens": 24}
        if args.target:
            about["model"] = Path(args.target).name
        lines = [
            {
                "custom_id": str(at),
                "method": "POST",
                "url": "/v1/completions",
                "body": about | {"prompt": PROMPTS[at % 4], "seed": at},
            }
            for at in range(rows)
        ]
        wanted.write_text("".join(json.dumps(line) + "\n" for line in lines))

        def run(file, room=None):
            order = [sys.executable, "-m", "outrider", "batch", str(wanted), str(file)]
            order += ["--dtype", args.dtype] + (["--model", args.target] if args.target else [])

            def limit():
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

            made = subprocess.run(
                order, capture_output=True, text=True, preexec_fn=limit if room else None
            )
            return made.returncode, made.stderr.strip().splitlines()[-1]

        def texts(file):
            said = map(json.loads, file.read_text().splitlines())
            return {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in said}

        told = {"undisturbed": run(undisturbed)}
        size = undisturbed.stat().st_size
        told["full"] = run(answers, size // 2)
        told["there then"] = answers.read_text().count("\n")
        told["again"] = run(answers)
        same = texts(answers) == texts(undisturbed)
    bad = told["full"][0] != 2 or told["again"][0] != 0 or "Traceback" in told["full"][1]
    return told | {"rows": rows, "same texts": same}, bad + (not same)


def main():
    """One of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    scenes = ["load", "stopped", "killed", "heads", "readers", "full"]
    parser.add_argument("what", choices=scenes)
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    args.processes = 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    told, bad = globals()[args.what](args)
    print(json.dumps({"what": args.what} | told | {"holds": not bad}, indent=1))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
