"""What products with packed weights cost: all linear layers of SmolLM2-135M, by format and rows.

    python benchmarks/packed_linear.py --formats bf16 q8_0 q4_1 --rows 1 2 3 4 5 6 8 16 64 512

One thread; processor time, the least of some repeats, in ms. In brackets what it costs beside one
row, and for 64 rows or more the share of GFLOP/s that torch's own float32 product reaches. Under
OUTRIDER_ISA=avx2 the same with AVX2 alone. K formats are timed with 512 inputs in place of 576.
"""

import argparse
import time

import torch

from outrider.models.cpu_kernels import build
from outrider.models.cpu_kernels.packed_formats import FORMATS
from outrider.models.cpu_kernels.packed_linear import PackedLinear, PackedWeight

LAYERS = [(576, 960), (576, 576), (576, 3072), (1536, 576)]  #: inputs and outputs
COUNT, HEAD = 30, (576, 49152)


def made(format: str, outputs: int, inputs: int) -> PackedWeight:
    """A weight of random bits: what numbers they are costs nothing, but exponents stay small."""
    one = FORMATS[format]
    bits = torch.randint(0, 256, (outputs, inputs * one.block // one.chunk), dtype=torch.uint8)
    bits[:, 1::2] = 0x2C
    return PackedWeight.from_blocks(bits, format, inputs)


def model(format: str) -> list[PackedLinear]:
    """All layers, each with weights of its own."""
    sizes = [*LAYERS * COUNT, HEAD]
    if FORMATS[format].chunk == 256:
        sizes = [(inputs - inputs % 256, outputs) for inputs, outputs in sizes]
    return [PackedLinear(made(format, outputs, inputs)) for inputs, outputs in sizes]


def cost(layers: list[PackedLinear], rows: int, repeats: int) -> float:
    """Processor time of all layers, in ms."""
    inputs = {run.inputs: torch.randn(rows, run.inputs) for run in layers}
    least = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        for run in layers:
            run(inputs[run.inputs])
        least = min(least, time.thread_time() - start)
    return least * 1e3


def torch_rate(rows: int) -> float:
    """GFLOP/s of torch's float32 product."""
    x, w = torch.randn(rows, 576), torch.randn(3072, 576)
    least = float("inf")
    for _ in range(20):
        start = time.thread_time()
        x @ w.T
        least = min(least, time.thread_time() - start)
    return 2e-9 * rows * w.numel() / least


def main() -> None:
    """One line a format."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--formats", nargs="+", default=["bf16", "q8_0", "q4_1"])
    asked.add_argument("--rows", nargs="+", type=int, default=[1, 2, 3, 4, 5, 6, 7, 8, 16, 64, 512])
    asked.add_argument("--repeats", type=int, default=7)
    args = asked.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(build.describe())
    for format in args.formats:
        layers = model(format)
        numbers = sum(run.inputs * run.outputs for run in layers)
        size = sum(one.nbytes for run in layers for one in run.weights)
        line, first = [f"{format:6}{size / 1e6:5.0f} MB"], None
        for rows in args.rows:
            ms = cost(layers, rows, args.repeats if rows < 64 else 2)
            first = first or ms
            told = f"{ms / first:.2f}"
            if rows >= 64:
                told = f"{2e-6 * rows * numbers / ms / torch_rate(rows):.0%} of torch"
            line.append(f"{rows}: {ms:.1f} ({told})")
        print("  ".join(line), flush=True)


if __name__ == "__main__":
    main()
