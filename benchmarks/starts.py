"""How long a start takes on one busy core: the first token, an answering server, a transcript.

    python benchmarks/starts.py --model MODEL --whisper MODEL --recording FILE [--cap] [--core 0]
                                [--compiled] [--only generate serve transcribe]

Each is timed by the clock on the wall three times, pinned to one core on which another process
spins (`taskset` of util-linux), which has half of it: with an empty cache; again, when a checkout
may still have kernels to compile and something to measure with them; and once more. --cap leaves
AVX2 alone, --compiled begins with the library there and nothing else, as a wheel does.
"""

import argparse
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from loopback import past_proxies

CAP = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OUTRIDER_ISA": "avx2"}
LIMIT = 600.0  #: seconds after which a start is given up


def outrider(pinned: list[str], words: list[str], environment: dict[str, str]) -> subprocess.Popen:
    command = [*pinned, sys.executable, "-u", "-m", "outrider", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)


def processor_seconds() -> float:
    """Of all processes that were started here and have ended, and of theirs."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def compiled(environment: dict[str, str]) -> None:
    """Have the library of kernels made in this cache."""
    waits = "from outrider.models.cpu_kernels import build; build.wait()"
    subprocess.run([sys.executable, "-c", waits], env=environment, check=True)


def first_output(process: subprocess.Popen) -> float:
    """Seconds until it writes its first byte."""
    started = time.monotonic()
    process.stdout.read(1)
    took = time.monotonic() - started
    process.terminate()
    process.wait()
    return took


def status(port: int) -> int | None:
    """What /health answers; None: nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def serving(process: subprocess.Popen, port: int) -> tuple[float, float]:
    """Seconds until /health answers at all, and until it answers 200."""
    started = time.monotonic()
    listens = None
    while (found := status(port)) != 200 and time.monotonic() - started < LIMIT:
        if found is not None and listens is None:
            listens = time.monotonic() - started
        time.sleep(0.1)
    ready = time.monotonic() - started
    process.terminate()
    process.wait()
    return listens or ready, ready


def main() -> None:
    past_proxies()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--whisper")
    parser.add_argument("--recording")
    parser.add_argument("--cap", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--core", default="0")
    every = ("generate", "serve", "transcribe")
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    given = parser.parse_args()
    environment = os.environ | (CAP if given.cap else {})
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled once, as is usual
    pinned = ["taskset", "-c", given.core]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    generate = [
        "generate",
        "The capital of France is",
        "--model",
        str(given.model),
        "--stream",
        "-n",
        "8",
    ]
    server = ["serve", "--model", str(given.model), "--port", str(port)]
    hear = ["transcribe", str(given.recording), "-m", str(given.whisper)]
    spin = subprocess.Popen([*pinned, sys.executable, "-c", "while True: pass"])
    try:
        for what in given.only:
            if (given.whisper if what == "transcribe" else given.model) is None:
                continue
            with tempfile.TemporaryDirectory() as cache:
                here = environment | {"XDG_CACHE_HOME": cache}
                if given.compiled:
                    compiled(here)
                for state in ("empty cache", "the next start", "third start"):
                    before = processor_seconds()
                    if what == "serve":
                        listens, ready = serving(outrider(pinned, server, here), port)
                        told = f"listens {listens:.1f} s, ready {ready:.1f} s"
                    else:
                        words = generate if what == "generate" else hear
                        told = f"{first_output(outrider(pinned, words, here)):.1f} s"
                    cpu = processor_seconds() - before
                    print(f"{what}, {state}: {told}, processor {cpu:.1f} s", flush=True)
    finally:
        spin.kill()


if __name__ == "__main__":
    main()
