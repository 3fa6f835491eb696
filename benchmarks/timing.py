"""Interleaved timing: A B C ... A B C, medians and deciles, one process.

On a CPU the clock is this thread's CPU time, which other load on the machine disturbs least. On
CUDA a contestant without host reads is captured in a graph over rotating inputs that exceed the L2
cache; one that reads the host is timed by events around eager calls. Host time per call is given as
well.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Run = Callable[[int], Any]


def deciles(seconds: Sequence[float]) -> dict[str, float]:
    """Median, p10 and p90 in microseconds."""
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return 1e6 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    return {"median_us": at(0.5), "p10_us": at(0.1), "p90_us": at(0.9)}


def on_cpu(runs: dict[str, Run], repeats: int) -> dict[str, dict[str, float]]:
    """Time of one call of each run, interleaved. `run(i)` works on input set i."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(0)
    for i in range(repeats):
        for name, run in runs.items():
            start = time.thread_time()
            run(i)
            found[name].append(time.thread_time() - start)
    return {name: deciles(times) for name, times in found.items()}


def on_gpu(runs: dict[str, tuple[Run, bool]], sets: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Device time of one call: graphs of 20 calls, or events around eager calls.

    A run that cannot be captured is not timed; it has the reason under `dropped` instead.
    """
    graphs: dict[str, Any] = {}
    dropped: dict[str, Any] = {}
    for name, (run, capture) in runs.items():
        for i in range(3):
            run(i % sets)
        torch.cuda.synchronize()
        if capture:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    for i in range(20):
                        run(i % sets)
            except RuntimeError as error:
                dropped[name] = {"dropped": f"not captured: {str(error)[:200]}"}
                continue
            graphs[name] = graph
    runs = {name: run for name, run in runs.items() if name not in dropped}
    found: dict[str, list[float]] = {name: [] for name in runs}
    host: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(repeats):
        for name, (run, _) in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start = time.perf_counter()
            begin.record()
            if name in graphs:
                graphs[name].replay()
            else:
                run(i % sets)
            end.record()
            host[name].append(time.perf_counter() - start)
            torch.cuda.synchronize()
            calls = 20 if name in graphs else 1
            found[name].append(begin.elapsed_time(end) * 1e-3 / calls)
    return dropped | {
        name: deciles(times) | {"host_us": deciles(host[name])["median_us"]}
        for name, times in found.items()
    }
