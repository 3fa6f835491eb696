"""Step times of this machine, predicted by `outrider plan --measure` and measured.

    python benchmarks/capacity.py                                 # the shipped pair's target
    python benchmarks/capacity.py --target PATH --dtype float32 --rows 2,8 --contexts 64,1000

The machine's rates (`outrider_lab.bench.rates`), none of them from a step of this model, and steps
of the running engine are timed in turns: a round of the rates, then one step of each kind, and so
on, as a machine's pace changes between one second and the next. One thread, its own clock, medians
of the rounds; rates are the same for all steps. Exits with 1 if a prediction is off by more than
`--allowed`.
"""

import argparse
import json
import sys

import torch

import outrider
from outrider.models.sources import ModelSource
from outrider.shipped import shipped
from outrider_lab.bench.rates import Rates, Steps
from outrider_lab.flops import sizes as sizes_of
from outrider_lab.theory import capacity


def numbers(text):
    """ "1,4" to [1, 4]."""
    return [int(one) for one in text.split(",")]


def main() -> int:
    """Print rates, predictions and measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=str(shipped("target")))
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--nodes", type=numbers, default=[1, 2, 3, 5, 9])
    parser.add_argument("--contexts", type=numbers, default=[300])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--allowed", type=float, default=0.2)
    parser.add_argument("--json", help="keep everything in this file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    target = outrider.load(
        asked.target, drafter="recall", dtype=asked.dtype, threads=1, planner="fixed"
    ).engine.target
    sizes = sizes_of(ModelSource(asked.target, "target"), asked.dtype)
    rates = Rates(target, sizes, asked.rounds)
    nodes = tuple(asked.nodes)
    groups = {
        (context, rows): Steps(target, rows, nodes, context, asked.rounds)
        for context in asked.contexts
        for rows in asked.rows
    }
    for _ in range(asked.rounds):
        rates.round()
        for group in groups.values():
            group.round()
    machine = rates.machine()
    found, worst = [], 0.0
    print("context rows nodes  predicted  measured ms    off")
    for (context, rows), group in groups.items():
        for n, seconds in group.seconds().items():
            told = capacity.step(sizes, machine, rows, n, context)
            off = told / seconds - 1
            worst = max(worst, abs(off))
            cell = {"context": context, "rows": rows, "nodes": n, "predicted": told}
            found.append(cell | {"measured": seconds})
            print(
                f"{context:7} {rows:4} {n:5} {1e3 * told:10.2f} {1e3 * seconds:12.2f} {off:+7.0%}"
            )
    within = sum(abs(one["predicted"] / one["measured"] - 1) <= asked.allowed for one in found)
    print(f"within {asked.allowed:.0%}: {within} of {len(found)}; the worst is {worst:.0%} off")
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine._asdict(), "steps": found}, file, indent=1)
    return int(worst > asked.allowed)


if __name__ == "__main__":
    sys.exit(main())
