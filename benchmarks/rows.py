"""What it costs to come into a running batch: prompts of unlike length, and joining long rows.

    python benchmarks/rows.py [--context 2000] [--rows 8] [--repeats 5]

The shipped pair with its default drafter; the least of the repeats.
"""

import argparse
import os
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import outrider
from outrider.engine.batch import begin, slab
from outrider.engine.engine import Engine
from outrider.engine.request import Request

LONG, SHORT, MANY = 400, 10, 7


def prefill(engine: Engine, lengths: list[int], text: list[int]) -> float:
    """Milliseconds until rows of these lengths run: all of them are submitted at once."""
    greedy, limits = outrider.SamplingParams(0), outrider.StopConditions(4)
    run = engine.run([text[:length] for length in lengths], greedy, limits)
    run.step()
    return run.stats.prefill_ms


def join(engine: Engine, rows: int, context: int, text: list[int]) -> float:
    """Seconds outside the newcomer's own prefill when it sits down beside `rows` long rows."""
    capacity = context + 256
    limits = outrider.StopConditions(64)
    request = Request(text[:context], outrider.SamplingParams(1.0, seed=1), limits)
    batch = slab(engine.target, engine.drafter, rows + 1, capacity)
    long = begin(engine.target, engine.drafter, [request], capacity)
    for row in range(rows):
        batch = batch.put([row], long.take([0]))
    newcomer = Request(text[:100], outrider.SamplingParams(0.8, seed=2), limits)
    least_time = float("inf")
    for _ in range(5):  # the first request of a row touches its memory
        one = begin(engine.target, engine.drafter, [newcomer], capacity)
        started = time.thread_time()
        batch = batch.put([rows], one)
        least_time = min(least_time, time.thread_time() - started)
        batch = batch.narrow(rows)
    return least_time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    speculator = outrider.load(threads=1)
    engine = speculator.engine
    text = [(7 * i) % 4000 + 20 for i in range(max(given.context, LONG))]

    def timed(lengths: list[int]) -> float:
        return min(prefill(engine, lengths, text) for _ in range(given.repeats))

    timed([LONG])
    together, long, short = timed([LONG, *[SHORT] * MANY]), timed([LONG]), timed([SHORT] * MANY)
    print(
        f"prefill of {LONG} tokens and {MANY} x {SHORT}: {together:.0f} ms together, "
        f"{long:.0f} + {short:.0f} ms apart: {together / (long + short):.2f}x"
    )
    took = 1e3 * join(engine, given.rows, given.context, text)
    print(
        f"joining {given.rows} rows of {given.context} tokens: {took:.2f} ms outside the "
        "newcomer's own prefill"
    )


if __name__ == "__main__":
    main()
