"""A fleet on two local Ray nodes, and what becomes of its work when a process is killed.

    python benchmarks/fleet.py streams    # 8 streams, a replica is killed in mid-stream
    python benchmarks/fleet.py batch      # 200 requests in a file, a worker is killed

Both compare with a run that nobody disturbs: `streams` with the same streams before, `batch` with
the same file without Ray. Everything stays on loopback. Prints one JSON document.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from loopback import past_proxies

NAME = "served"
PROMPTS = [
    "def fibonacci(n):\n",
    "import os\nimport re\n\n\ndef main():\n",
    "class Queue:\n    def __init__(self):\n",
    "def read_lines(path):\n    with open(path) as file:\n",
]


def free_port():
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


#: `ray start` on loopback: Ray takes the machine's outer address, whatever it is told.
START = """
import ray._private.services as services
services.get_node_ip_address = lambda *address: "127.0.0.1"
from ray.scripts.scripts import main
main()
"""


@contextmanager
def two_nodes():
    """A cluster of two nodes with one processor each; its address."""
    address = f"127.0.0.1:{free_port()}"
    common = ["--node-ip-address=127.0.0.1", "--num-cpus=2", "--object-store-memory=100000000"]
    head = ["--head", f"--port={address.split(':')[1]}", "--include-dashboard=false"]
    start = [sys.executable, "-c", START, "start", "--block", *common]
    nodes = []
    try:
        for more in (head, [f"--address={address}"]):
            plain = os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": plain}
            nodes.append(subprocess.Popen([*start, *more], **quiet))
            time.sleep(12)
            if nodes[-1].poll() is not None:  # on a core that is busy it may give up
                raise SystemExit(f"a node of Ray's ended while it started ({more[0]}); try again")
        yield address
    finally:
        for node in reversed(nodes):
            node.send_signal(signal.SIGTERM)
            node.wait(60)


def processes(name):
    """Ids of Ray's workers whose title has this in it."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if name in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return [pid for pid in found if pid != os.getpid()]


def streams(args):
    """Kill a replica under 8 streams."""
    import openai
    import ray
    from ray import serve

    from outrider_ray.replicas import ReplicaConfig, application

    started = time.perf_counter()
    with two_nodes() as address:
        ray.init(address=address, log_to_driver=False)
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = ReplicaConfig(
            target=args.target,
            name=NAME,
            dtype=args.dtype,
            threads=1,
            max_num_seqs=8,
            max_model_len=512,
            deployment={"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}},
            ingress={"ray_actor_options": {"num_cpus": 0}},
        )
        serve.run(application(settings))
        up = time.perf_counter() - started
        past_proxies()
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300
        )
        came = [0] * 8

        def stream(at):
            """A stream's text, and the longest time between two of its events."""
            text, last, gap = "", None, 0.0
            chunks = client.completions.create(
                model=settings.name,
                prompt=PROMPTS[at % 4],
                max_tokens=args.tokens,
                temperature=0.8,
                seed=at,
                stream=True,
                stream_options={"include_usage": True},
            )
            for chunk in chunks:
                now = time.perf_counter()
                gap, last = max(gap, now - (last or now)), now
                text += "".join(choice.text for choice in chunk.choices)
                came[at] += 1
                if chunk.usage is not None:
                    usage = chunk.usage
            return text, gap, usage.completion_tokens

        def every():
            with ThreadPoolExecutor(8) as pool:
                return list(pool.map(stream, range(8)))

        whole = every()
        replicas = processes("ray::ServeReplica:default:outrider")
        came[:] = [0] * 8

        def kill():
            while sum(came) < 40:
                time.sleep(0.01)
            os.kill(replicas[0], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        again = every()
        killer.join()
        serve.shutdown()
        ray.shutdown()
    pairs = zip(again, whole, strict=True)
    return {
        "replicas": len(replicas),
        "seconds_up": up,
        "same_texts": sum(mine[0] == theirs[0] for mine, theirs in pairs),
        "tokens": [count for _, _, count in again],
        "longest_gaps_undisturbed": [round(gap, 2) for _, gap, _ in whole],
        "longest_gaps": [round(gap, 2) for _, gap, _ in again],
    }


def batch(args):
    """Kill a worker under a file of requests."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        lines = []
        for at in range(args.requests):
            body = {"model": NAME, "prompt": PROMPTS[at % 4], "seed": at}
            body |= {"max_tokens": 8 + at % 17, "temperature": 0.8}
            line = {"custom_id": f"{at}", "method": "POST", "url": "/v1/completions", "body": body}
            lines.append(json.dumps(line))
        source.write_text("\n".join(lines) + "\n")
        alone, alone_seconds = answered(args, source, Path(folder) / "alone.jsonl")
        with two_nodes() as address:
            killed = []

            def kill():
                while not (found := processes("ray::MapWorker")):
                    time.sleep(0.1)
                time.sleep(args.after)
                killed.append(found[0])
                os.kill(found[0], signal.SIGKILL)

            killer = threading.Thread(target=kill, daemon=True)
            killer.start()
            rows, seconds = answered(args, source, Path(folder) / "fleet.jsonl", address)
    names = [row["custom_id"] for row in rows]
    said = {row["custom_id"]: text(row) for row in rows}
    return {
        "rows": len(rows),
        "different": len(set(names)),
        "lost": args.requests - len(set(names)),
        "workers_killed": len(killed),
        "same_texts_as_without_ray": sum(said.get(row["custom_id"]) == text(row) for row in alone),
        "seconds": seconds,
        "seconds_without_ray": alone_seconds,
    }


def text(row):
    """What a row says."""
    return row["response"]["body"]["choices"][0]["text"]


def answered(args, source, target, address=None):
    """The rows of `outrider batch`, and how long it took."""
    command = [sys.executable, "-m", "outrider", "batch", source, target, "--threads", 1]
    command += ["--max-num-seqs", 8, "--max-model-len", 256, "--dtype", args.dtype]
    command += ["--served-model-name", NAME]
    command += ["--model", args.target] if args.target else []
    command += ["--ray", 2] if address else []
    more = {"RAY_ADDRESS": address} if address else {}
    started = time.perf_counter()
    subprocess.run(list(map(str, command)), env=os.environ | more, check=True)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    return rows, time.perf_counter() - started


def main():
    """One of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["streams", "batch"])
    parser.add_argument("--target", help="default: the shipped pair")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--after", type=float, default=12.0, help="seconds until the kill")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # who connects is on loopback, too
    print(json.dumps({"what": args.what} | globals()[args.what](args)))


if __name__ == "__main__":
    main()
