"""What the machine is: versions, tools, packages, and the ceilings that everything else is read
against."""

import importlib.metadata
import os
import platform
import shutil
import time
from typing import Any

import torch

from gpu_stages.card import Card
from gpu_stages.command import command
from gpu_stages.plan import Failed, Item
from outrider.models import isa

NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "typer", "rich",
          "pytest", "scipy")  # fmt: skip
OPTIONAL = ("pytest-xdist", "hypothesis", "flashinfer-python", "matplotlib")
TOOLS = ("nvidia-smi", "nvcc", "compute-sanitizer", "ncu", "g++")


def items(card: Card) -> list[Item]:
    """Cheap and first."""
    return [
        Item("machine", lambda: machine(card), 60),
        Item("packages", packages, 60),
        Item("ceilings", lambda: ceilings(card), 60),
    ]


def machine(card: Card) -> dict[str, Any]:
    """Hardware, driver and tools."""
    told: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "processor": isa.processor(), "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "tools": {name: shutil.which(name) for name in TOOLS},
    }  # fmt: skip
    if not card.rehearse:
        has = torch.cuda.get_device_properties(0)
        told |= {
            "gpu": has.name, "memory_gb": has.total_memory / 1e9, "cuda": torch.version.cuda,
            "multiprocessors": has.multi_processor_count, "l2_mb": has.L2_cache_size / 1e6,
            "capability": f"{has.major}.{has.minor}",
        }  # fmt: skip
    if told["tools"]["nvidia-smi"]:
        asked = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"
        told["nvidia-smi"] = command(["nvidia-smi", asked, "--format=csv"], 20)["tail"]
    return told


def packages() -> dict[str, Any]:
    """Versions; a missing one that the other stages need is a failure that says what to do."""
    told: dict[str, Any] = {}
    for name in (*NEEDED, *OPTIONAL):
        try:
            told[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            told[name] = None
    missing = [name for name in NEEDED if told[name] is None]
    if missing:
        raise Failed(f"missing: {', '.join(missing)}; docs/gpu.md says how to bring wheels", told)
    import outrider

    return told | {"outrider": outrider.__version__}


def ceilings(card: Card) -> dict[str, Any]:
    """Copy bandwidth, a matrix product, and what a launch costs."""
    size = card.pick(8192, 64)
    a, b = (torch.randn(size, size, device=card.device, dtype=card.dtype) for _ in range(2))
    tiny = torch.zeros(1, device=card.device)

    def launches() -> None:
        for _ in range(100):
            tiny.add_(0)

    return {
        "copy_tb_s": card.bandwidth() / 1e12,
        "matmul_tflop_s": 2 * size**3 / card.seconds(lambda: a @ b) / 1e12,
        "launch_us": 1e4 * card.seconds(launches),
        "blocking_read_us": 1e6 * card.seconds(lambda: tiny.add_(0).item(), 50),
        "empty_kernel_in_graph_us": card.clock(
            {"empty": (lambda i: tiny.add_(0), True)}, 1, 50
        )["empty"]["median_us"],
    }  # fmt: skip
