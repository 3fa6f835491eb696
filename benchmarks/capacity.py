"""Step times of this machine, predicted by `outrider plan`'s formula and measured.

    python benchmarks/capacity.py                                 # the shipped pair's target
    python benchmarks/capacity.py --target PATH --dtype float32 --rows 1,4,16

First rates, none of them from a decoding step: the weights' by the layers' own products of one row;
all else by pieces of prompts, of 1 to 128 tokens behind 0 and behind 1,024; the engine's by a model
of one tiny layer. Then steps of the running engine, with drafts that cost nothing (random tokens).
One thread, its own clock, the least of some looks, as a busy neighbour only ever adds time.
Exits with 1 if a prediction is off by more than `--allowed`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

import outrider
from outrider import Limits, Sampling
from outrider.drafters import Random
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.engine.run import Run
from outrider.load import shipped
from outrider.models import CausalModel, LlamaRunner
from outrider.models.linear import product
from outrider.models.nodes import causal
from outrider.models.sizes import sizes as sizes_of
from outrider.models.sources import Source
from outrider.testing import llama
from outrider.theory import capacity
from outrider.theory.capacity import Machine

NODES = (1, 2, 3, 5, 9)
PIECES = (4, 16, 128)  #: tokens of a prompt that are read in one call
BEHIND = 1024  #: tokens
SEEING = (1, 8)  #: tokens of pieces whose difference tells what seeing a slot takes
ROWS = 4  #: prompts


def nothing() -> None:
    """Leave the processor's caches as they are."""


def least(run: Callable[[], object], repeats: int, ahead: Callable[[], object] = nothing) -> float:
    """Seconds of this thread, the least of some calls; `ahead` of each is not counted."""
    run()
    found = []
    for _ in range(repeats):
        ahead()
        started = time.thread_time()
        run()
        found.append(time.thread_time() - started)
    return min(found)


def line(at: dict[int, float]) -> tuple[float, float]:
    """Intercept and slope of the straight line through two points."""
    (a, first), (b, second) = sorted(at.items())
    slope = (second - first) / (b - a)
    return first - a * slope, slope


def weights(folder: str, dtype: torch.dtype, packed: bool, repeats: int) -> float:
    """Seconds of all products of one row: every weight is read once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    runs = [(product(m.weight, None, packed), m.in_features) for m in linears]
    each = {size: torch.randn(1, 1, size, dtype=dtype) for _, size in runs}
    return least(lambda: [run(each[size]) for run, size in runs], repeats)


def reading(target: CausalModel, tokens: int, behind: int, repeats: int, rows: int = 1) -> float:
    """Seconds of one call that reads so many tokens of each prompt behind others."""
    wide = target.width(behind + tokens)
    cache, at = target.open(rows, wide), torch.arange(behind + tokens).expand(rows, -1)
    if behind:
        first = at[:, :behind]
        target.forward(cache, causal(first % target.vocab_size, first, wide), last=1)
    piece = at[:, behind:]
    nodes = causal(piece % target.vocab_size, piece, wide)
    return least(lambda: target.forward(cache, nodes), repeats)


def stepping(
    target: CausalModel,
    rows: int,
    nodes: int,
    context: int,
    steps: int,
    ahead: Callable[[], object] = nothing,
) -> float:
    """Seconds of a step of the running engine: rows of about `context` tokens."""
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
        ahead()
        started = time.thread_time()
        run.step()
        found.append(time.thread_time() - started)
    return min(found)


def engine_alone(vocab: int, repeats: int) -> tuple[float, float, float]:
    """Seconds that the engine takes of a step, a row and a node: steps of a tiny model, less it."""
    tiny = CausalModel(LlamaRunner(llama(vocab_size=vocab, num_hidden_layers=1), False))
    large = torch.zeros(1 << 25)  # a real model's weights leave nothing of the engine in caches
    found = {}
    for rows, nodes in ((1, 1), (8, 1), (8, 6)):
        at = torch.arange(64, 64 + nodes)[None].expand(rows, -1)
        cache, wide = tiny.open(rows, 128), tiny.width(64 + nodes)
        call = least(lambda: tiny.forward(cache, causal(at, at, wide)), repeats, large.sum)  # noqa: B023
        found[rows, nodes] = stepping(tiny, rows, nodes, 64, repeats, large.sum) - call
    _, node = line({8 * n: found[8, n] for n in (1, 6)})
    step, row = line({rows: found[rows, 1] for rows in (1, 8)})
    return step, max(row - node, 0.0), node


@torch.inference_mode()
def rates(target: CausalModel, folder: str, sizes: capacity.Sizes, repeats: int) -> Machine:
    """The machine, by products, pieces of prompts and a tiny model."""
    few, some, many = PIECES
    read = weights(folder, target.dtype, target.runner.packed, repeats)
    short = {tokens: reading(target, tokens, 0, repeats) for tokens in PIECES}
    slot = {}
    for tokens in SEEING:  # of rows enough that no cache of the processor holds them
        far, near = (reading(target, tokens, at, repeats, ROWS) for at in (BEHIND, 0))
        more = target.width(BEHIND + tokens) - target.width(tokens)
        slot[tokens] = (far - near) / (ROWS * more)
    cached, attended = line(slot)  # a slot of the cache is read once, and seen by every token
    assert attended > 0, f"eight tokens took no longer than one: {slot}; the machine is busy"
    bare = {n: short[n] - target.width(n) * (cached + n * attended) for n in PIECES}
    _, node = line({some: bare[some], many: bare[many]})
    call = bare[few] - few * node - read
    host, row, hosted = engine_alone(target.vocab_size, repeats)
    parts = {
        "weights": read, "rest of a call": call, "node": node, "engine": host,
        "engine a row": row, "engine a node": hosted,
        "1000 slots": 1e3 * cached, "1000 slots a node": 1e3 * attended,
    }  # fmt: skip
    print("ms:", ", ".join(f"{name} {1e3 * value:.4g}" for name, value in parts.items()))
    return Machine(
        sizes.weight_bytes / read,
        2 * sizes.parameters / (node + max(hosted, 0)),
        sizes.kv_bytes / cached,
        sizes.attention / attended,
        host=max(call + host, 0),
        host_row=row,
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
        f"outrider plan {asked.target} --dtype {asked.dtype} "
        f"--bandwidth {machine.bandwidth:.4g} --flops {machine.flops:.4g} "
        f"--cache-bandwidth {machine.cache_bandwidth:.4g} --host {1e3 * machine.host:.3g} "
        f"--host-row {1e3 * machine.host_row:.3g} --attention-flops {machine.attention_flops:.4g} "
        "--no-overlap"
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
