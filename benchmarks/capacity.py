"""Step times of this machine, predicted by `outrider plan`'s formula and measured.

    python benchmarks/capacity.py                                 # the shipped pair's target
    python benchmarks/capacity.py --target PATH --dtype float32 --rows 1,4,16

First rates, none of them from a decoding step: weights and products by the layers' own kernels, at
1 and at 64 to 256 rows; attention by its kernel over as many buffers as the model has layers; what
else a call does by reading prompts; what the engine does by a model of one tiny layer. Then steps
of the running engine, with drafts that cost nothing (random tokens). One thread, its own clock.
Exits with 1 if a prediction is off by more than `--allowed`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

import outrider
from outrider import Limits, Sampling
from outrider.drafters import Random
from outrider.engine.engine import Engine, Run
from outrider.engine.request import Request
from outrider.load import shipped
from outrider.models import CausalModel, LlamaRunner, attention
from outrider.models.linear import product
from outrider.models.nodes import causal
from outrider.models.sizes import sizes as sizes_of
from outrider.models.sources import Source
from outrider.testing import llama
from outrider.theory import capacity
from outrider.theory.capacity import Machine

NODES = (1, 2, 3, 5, 9)
WIDE = (64, 256)  #: rows of products whose difference tells operations a second
PROMPTS = (16, 128)  #: tokens of prompts whose reading tells what else a call does


def least(run: Callable[[], object], repeats: int) -> float:
    """Seconds of this thread, the least of some calls."""
    run()
    found = []
    for _ in range(repeats):
        started = time.thread_time()
        run()
        found.append(time.thread_time() - started)
    return min(found)


def line(at: dict[int, float]) -> tuple[float, float]:
    """Intercept and slope of the straight line through two points."""
    (a, first), (b, second) = sorted(at.items())
    slope = (second - first) / (b - a)
    return first - a * slope, slope


class Kernels:
    """The kernels that a model's layers call, on data of their shapes."""

    def __init__(self, target: CausalModel, folder: str) -> None:
        runner = target.runner
        assert isinstance(runner, LlamaRunner), "this benchmark knows the lean runner's kernels"
        self.runner, self.dtype = runner, runner.dtype
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=runner.dtype)
        linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        self.products = [(product(m.weight, None, runner.packed), m.in_features) for m in linears]
        groups = runner.heads // runner.kv_heads
        self.attend, _ = attention.steady(
            attention.fused, runner.kv_heads, groups, runner.size, linears[0].weight
        )

    def multiply(self, rows: int, repeats: int) -> float:
        """Seconds of all products over so many rows."""
        each = {size: torch.randn(1, rows, size, dtype=self.dtype) for _, size in self.products}
        return least(lambda: [run(each[size]) for run, size in self.products], repeats)

    def look(self, rows: int, nodes: int, width: int, repeats: int) -> float:
        """Seconds of attention in all layers, each over a cache of its own."""
        r = self.runner
        shape = (2 * r.layers, rows, r.kv_heads, width, r.size)
        cache = torch.randn(shape, dtype=self.dtype)
        query = torch.randn(rows, r.heads, nodes, r.size, dtype=self.dtype)
        mask = self.attend.mask(torch.zeros(rows, 1, nodes, width, dtype=self.dtype))
        pairs = list(zip(cache[::2], cache[1::2], strict=True))
        return least(lambda: [self.attend(query, k, v, mask) for k, v in pairs], repeats)


def reading(target: CausalModel, tokens: int, repeats: int) -> float:
    """Seconds of one call that reads a prompt of so many tokens."""
    at = torch.arange(tokens)[None]
    cache = target.open(1, target.width(tokens))
    nodes = causal(at % target.vocab_size, at, target.width(tokens))
    return least(lambda: target.forward(cache, nodes), repeats)


def stepping(target: CausalModel, rows: int, nodes: int, context: int, steps: int) -> float:
    """Seconds of a step of the running engine, median: rows of about `context` tokens."""
    drafter = Random(target.vocab_size, nodes - 1) if nodes > 1 else outrider.Root()
    engine = Engine(target, drafter, planner="fixed")
    run = Run(engine, seats=rows, capacity=context + (steps + 5) * nodes + 1)
    prompt = [5 + (7 * at) % 90 for at in range(context)]
    for row in range(rows):
        run.submit(Request(prompt, Sampling(1.0, seed=row), Limits((steps + 4) * nodes)))
    run.step()  # reads the prompts
    run.step()
    found = []
    for _ in range(steps):
        started = time.thread_time()
        run.step()
        found.append(time.thread_time() - started)
    return statistics.median(found)


def engine_alone(vocab: int, repeats: int) -> tuple[float, float]:
    """Seconds that the engine takes of a step, and of each node: steps of a tiny model, less it."""
    tiny = CausalModel(LlamaRunner(llama(vocab_size=vocab, num_hidden_layers=1), False))
    found = {}
    for rows, nodes in ((1, 2), (8, 4)):
        at = torch.arange(64, 64 + nodes)[None].expand(rows, -1)
        cache, wide = tiny.open(rows, 128), tiny.width(64 + nodes)
        call = least(lambda: tiny.forward(cache, causal(at, at, wide)), repeats)  # noqa: B023
        found[rows * nodes] = stepping(tiny, rows, nodes, 64, repeats) - call
    return line(found)


@torch.inference_mode()
def rates(target: CausalModel, folder: str, sizes: capacity.Sizes, repeats: int) -> Machine:
    """The machine, by kernels and prompts."""
    kernels = Kernels(target, folder)
    weights = kernels.multiply(1, repeats)
    _, node = line({rows: kernels.multiply(rows, repeats) for rows in WIDE})
    width = 384
    one, many = (kernels.look(4, nodes, width, repeats) for nodes in (4, 8))
    slots = 4 * width
    attended = max(many - one, 0) / (4 * slots)
    cached = one / slots - 4 * attended
    rest = {}
    for tokens in PROMPTS:
        kernel = kernels.multiply(tokens, repeats)
        kernel += kernels.look(1, tokens, target.width(tokens), repeats)
        rest[tokens] = reading(target, tokens, repeats) - kernel
    call, more = line(rest)
    host, hosted = engine_alone(target.vocab_size, repeats)
    parts = {
        "weights": weights, "node": node, "rest of a call": call, "rest of a node": more,
        "engine": host, "engine a node": hosted, "1000 slots": 1e3 * cached,
        "1000 slots a node": 1e3 * attended,
    }  # fmt: skip
    print("ms:", ", ".join(f"{name} {1e3 * value:.4g}" for name, value in parts.items()))
    return Machine(
        sizes.weight_bytes / weights,
        2 * sizes.parameters / (node + max(more, 0) + max(hosted, 0)),
        sizes.kv_bytes / cached,
        sizes.attention / attended if attended else None,
        host=max(call, 0) + max(host, 0),
        overlaps=False,
    )


def main() -> int:
    """Print rates, predictions and measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=str(shipped("target")))
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--allowed", type=float, default=0.2)
    parser.add_argument("--json", help="keep everything in this file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    speculator = outrider.load(
        asked.target, drafter="recall", dtype=asked.dtype, threads=1, packed=True, planner="fixed"
    )
    target = speculator.engine.target
    sizes = sizes_of(Source(asked.target, "target"), asked.dtype)
    machine = rates(target, asked.target, sizes, asked.repeats)
    print(
        f"outrider plan --model-bytes {sizes.weight_bytes:.4g} --kv-bytes {sizes.kv_bytes:.4g} "
        f"--bandwidth {machine.bandwidth:.4g} --flops {machine.flops:.4g} "
        f"--cache-bandwidth {machine.cache_bandwidth:.4g} --host {1e3 * machine.host:.3g} "
        f"--no-overlap (attention at {machine.attention_flops or 0:.4g} a second)"
    )
    found, worst = [], 0.0
    print("rows nodes  predicted  measured ms    off")
    for rows in map(int, asked.rows.split(",")):
        for nodes in NODES:
            took = stepping(target, rows, nodes, asked.context, asked.repeats)
            wide = target.width(asked.context + 4 * nodes)  # what a call reads of each row
            told = capacity.step(sizes, machine, rows, nodes, wide)
            off = told / took - 1
            worst = max(worst, abs(off))
            found.append({"rows": rows, "nodes": nodes, "predicted": told, "measured": took})
            print(
                f"{rows:4} {nodes:5} {1e3 * told:10.2f} {1e3 * took:12.2f} {off:+7.0%}", flush=True
            )
    print(f"worst {worst:.0%} of {len(found)} steps, allowed {asked.allowed:.0%}")
    if asked.json:
        about = {"sizes": sizes._asdict(), "machine": machine._asdict(), "steps": found}
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(about, file, indent=1)
    return int(worst > asked.allowed)


if __name__ == "__main__":
    sys.exit(main())
