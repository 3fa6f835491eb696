"""The device that is measured. In a rehearsal it is the CPU, and only the code is exercised."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import timing
import torch
import verify

ROOT = Path(__file__).parents[2]
T = TypeVar("T")
R = TypeVar("R")


class Card:
    """A CUDA device, or a stand-in for it with tiny sizes and a wall clock."""

    def __init__(
        self, rehearse: bool, model: Path | None = None, draft: Path | None = None
    ) -> None:
        if not rehearse and not torch.cuda.is_available():
            raise RuntimeError("no CUDA device here; --rehearse runs all of it on the CPU, tiny")
        self.rehearse = rehearse
        self.model, self.draft = model, draft  #: of the stage `pretrained`; None: the shipped pair
        self.device = "cpu" if rehearse else "cuda"
        self.dtype = torch.float32 if rehearse else torch.bfloat16
        if rehearse:
            torch.set_num_threads(1)

    def pick(self, full: T, small: T) -> T:
        """The real thing, or what a rehearsal does instead."""
        return small if self.rehearse else full

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if not self.rehearse:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], repeats: int = 10, warm: int = 3) -> float:
        """Median time of one call, the device's work included."""
        for _ in range(warm if not self.rehearse else 1):
            run()
        times = []
        for _ in range(repeats if not self.rehearse else 1):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def peak_mb(self, run: Callable[[], R]) -> tuple[R, float | None]:
        """What a call returns, and the most device memory above what was in use before it."""
        if self.rehearse:
            return run(), None
        self.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = run()
        self.wait()
        return result, (torch.cuda.max_memory_allocated() - before) / 1e6

    def bandwidth(self) -> float:
        """Bytes per second of a large copy, read and written ones counted."""
        if not self.rehearse:
            return verify.copy_bandwidth()
        source = torch.ones(1 << 20)
        return 2 * 4 * source.numel() / self.seconds(source.clone)

    def clock(
        self, runs: dict[str, tuple[timing.Run, bool]], sets: int, repeats: int
    ) -> dict[str, dict[str, Any]]:
        """`timing.on_gpu`; in a rehearsal one call of each on a wall clock."""
        if not self.rehearse:
            return timing.on_gpu(runs, sets, repeats)
        found = {}
        for name, (run, _) in runs.items():
            start = time.perf_counter()
            run(sets - 1)
            seconds = time.perf_counter() - start
            found[name] = timing.deciles([seconds]) | {"host_us": 1e6 * seconds}
        return found

    def free(self) -> None:
        """Give back what Python no longer holds."""
        if not self.rehearse:
            torch.cuda.empty_cache()
