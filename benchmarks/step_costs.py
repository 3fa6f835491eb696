"""What steps cost: by what stood before them, by the planner's own measurement, and in attention.

    python benchmarks/step_costs.py order      # a plain step behind others and behind a large one
    python benchmarks/step_costs.py tables     # tables of costs, and steps of fixed sizes in runs
    python benchmarks/step_costs.py attention  # microseconds of a layer, by slots and queries

The shipped target in bfloat16 with two of its own layers as its draft, or layers of
SmolLM2-135M's shape; one thread. What the planner's table says is right if runs of a fixed size
take as much of a plain step: `tables` prints both.
"""

import argparse
import os
import statistics
import time
from types import SimpleNamespace

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import outrider
from outrider import SamplingParams, StopConditions
from outrider.engine.speculation_policy import FixedLength, measure
from outrider.models.cache import SlotCache
from outrider.models.cpu_kernels import layer_kernels
from outrider.models.prefill import causal
from outrider.shipped import shipped

LAYERS = (0, 7)  #: of the target, as its draft
CASES = ((64, 1), (400, 1), (400, 5), (1500, 1), (1500, 5), (1500, 16), (0, 512), (1000, 512))


def cut(**more: object) -> outrider.Speculator:
    """The target with its own layers."""
    about = {"draft_layers": LAYERS, "dtype": "bfloat16", "threads": 1, "pack_weights": True}
    return outrider.load(shipped("target"), **(about | more))  # type: ignore[arg-type]


@torch.inference_mode()
def order(looks: int = 25) -> None:
    """Medians of a plain step's milliseconds."""
    engine = cut().engine
    batch, step = measure._made_up(engine, 1, 200), engine.stepper()
    plain, *_, largest = measure._timed(engine.shapes, 1, measure.SIZES)
    batch = measure._roomy(engine, batch, largest)
    for name, before in (("plain ones", plain), ("the largest", largest)) * 2:
        took = []
        for _ in range(looks):
            measure._on_cpu(engine, step, batch, before)
            took.append(measure._on_cpu(engine, step, batch, plain)[1])
        print(f"a plain step behind {name}: {statistics.median(took):.2f} ms")


def tables(count: int = 6, tokens: int = 192) -> None:
    """One drafted token and two in tables and in runs, by the plain step."""
    engine = cut().engine
    for _ in range(count):
        curves = measure.whole(measure.measured(engine, 1)).times[1]
        each = [
            f"{context} tokens: "
            + ", ".join(f"{c.milliseconds(n) / c.times[0]:.2f}" for n in (2, 3))
            for context, c in curves.items()
        ]
        print(f"table, {'; '.join(each)}", flush=True)
    runs = {n: cut(planner=FixedLength(n)).engine for n in (0, 1, 2)}
    prompt = list(range(40, 104))
    took: dict[int, list[float]] = {n: [] for n in runs}
    for seed in range(count):
        for n, run in runs.items():
            steps = run.run([prompt], [SamplingParams(1.0, seed=seed)], StopConditions(tokens, ()))
            next(iter(steps))
            started = time.thread_time()
            behind = sum(1 for _ in steps)
            took[n].append((time.thread_time() - started) / behind)
    plain = statistics.median(took[0])
    print("runs: " + ", ".join(f"{statistics.median(took[n]) / plain:.2f}" for n in (1, 2)))


@torch.inference_mode()
def attention(layers: int = 30, rounds: int = 5) -> None:
    """The least of the rounds; each layer has a cache of its own, as in a model."""
    shape = SimpleNamespace(heads=9, kv_heads=3, size=64, eps=1e-5)
    kernels = layer_kernels.CpuKernels(shape, *torch.randn(2, 4096, 64).bfloat16())
    for behind, queries in CASES:
        stores = [SlotCache(1, 1, 2048).layers[0] for _ in range(layers)]
        for store in stores:
            for entries in store.buffers(3, 64, torch.zeros(1).bfloat16()):
                entries.normal_()
        at = behind + torch.arange(queries)[None]
        call = kernels.open(causal(at, at, -(-(behind + queries) // 64) * 64))
        qkv, took = torch.randn(1, queries, 15 * 64).bfloat16(), []
        for _ in range(rounds):
            started = time.thread_time()
            for store in stores:
                call.attend(qkv, store)
            took.append((time.thread_time() - started) / layers)
        print(f"{queries} queries behind {behind} slots: {1e6 * min(took):.0f} us a layer")


WORK = {"order": order, "tables": tables, "attention": attention}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=WORK)
    torch.set_num_threads(1)
    WORK[parser.parse_args().work]()
