"""What PyTorch's profiler and the operating system say of one call: its time, its memory."""

import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from outrider_lab.quiet import quiet_profiler

Result = TypeVar("Result")
_NAME = "outrider: profiled call"
_STATUS, _REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def profiled(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """What a call returns, and its profiled seconds.

    On CUDA the time of its kernels on the device, as Wagner et al. count it; on a CPU the time from
    its first to its last instruction, which includes what is no operation of PyTorch.
    """
    cuda = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with quiet_profiler(), profile(activities=kinds) as seen:
        with record_function(_NAME):
            result = call()
        if cuda:
            torch.cuda.synchronize(device)
    if cuda:
        return result, 1e-6 * sum(event.self_device_time_total for event in seen.events())
    own = next(event for event in seen.events() if event.name == _NAME)
    return result, 1e-6 * float(own.cpu_time_total)


def allocated(call: Callable[[], object]) -> float:
    """Megabytes that one call allocates on the host: PyTorch's allocations and NumPy's peak."""
    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    torch_bytes = sum(max(event.self_cpu_memory_usage, 0) for event in seen.events())
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return float(torch_bytes + peak) / 1e6


class Peak:
    """The most memory in use since it was made, in megabytes.

    On CUDA what PyTorch had allocated on that device; on Linux what the process had resident.
    Elsewhere nobody tells: None.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._told = True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            _REFERENCES.write_text("5")  # forgets the highest resident size, proc(5)
        except OSError:
            self._told = False

    def megabytes(self) -> float | None:
        """Until now."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e6
        if not self._told:
            return None
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        return None if found is None else 1.024e-3 * int(found[1])
