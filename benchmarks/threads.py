"""What a step takes by threads, on free cores and where another program spins on one of them.

    python benchmarks/threads.py MODEL [--threads 1 2] [--rows 1 4 16] [--steps 30] [--busy CORE]

Mean and least milliseconds by the clock on the wall, and processor time, of steps of one node a row
behind 256 tokens. --busy pins a process that does nothing else to that core (`taskset` of
util-linux). Without OMP_WAIT_POLICY torch's threads wait as they do for users who set nothing.
"""

import argparse
import statistics
import subprocess
import sys
import time

import torch

import outrider
from outrider.models.prefill import causal

BEHIND, ROOM = 256, 640


@torch.inference_mode()
def steps(model: str, threads: int, rows: list[int], count: int) -> None:
    """Print a line for each number of rows."""
    target = outrider.load(model, threads=threads).engine.target
    for some in rows:
        cache = target.open(some, ROOM, target.probe(some))
        at = torch.arange(BEHIND)[None].repeat(some, 1)
        target.forward(cache, causal(at % 1000, at, ROOM), last=1)
        at = torch.full((some, 1), BEHIND)
        wall, worked = [], []
        for _ in range(count):
            began, spent = time.perf_counter(), time.process_time()
            target.forward(cache, causal(at, at, ROOM))
            wall.append((time.perf_counter() - began) * 1e3)
            worked.append((time.process_time() - spent) * 1e3)
        means = f"{statistics.mean(wall):.1f} ms (least {min(wall):.1f})"
        print(
            f"{threads} threads, {some} rows: {means}, processor {statistics.mean(worked):.1f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--busy", metavar="CORE")
    asked = parser.parse_args()
    spinning = None
    if asked.busy is not None:
        command = ["taskset", "-c", asked.busy, sys.executable, "-c", "while True: pass"]
        spinning = subprocess.Popen(command)
    try:
        for threads in asked.threads:
            steps(asked.model, threads, asked.rows, asked.steps)
    finally:
        if spinning is not None:
            spinning.kill()


if __name__ == "__main__":
    main()
