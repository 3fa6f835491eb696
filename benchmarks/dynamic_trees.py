"""Tokens per target call of dynamic, static and coupled trees of the same number of drafted tokens.

    python benchmarks/dynamic_trees.py --budget 14 --budget 30 --temperature 0 --temperature 1

The shipped pair in float32 over held-out prompts, the same seeds for every tree, so that
differences to the static tree of the same size are paired by prompt.
"""

import argparse
import json

import outrider
from outrider import SamplingParams, Stop, verifiers
from outrider.drafters import DraftModel, DynamicTree, HubTree, StaticTree
from outrider.drafters.trees import optimal
from outrider.shipped import shipped
from outrider_lab.bench.intervals import interval

#: Budget -> branching of the static trees, and depth and top_k of the dynamic ones.
SHAPES = {14: ((2, 2, 2), 5, 4), 30: ((2, 2, 2, 2), 6, 5)}


def trees(draft, budget, acceptance):
    """Name -> drafter and rule; all of them draft `budget` tokens."""
    counts, depth, few = SHAPES[budget]
    best = optimal(acceptance, budget + 1, depth)
    dashed = "-".join(map(str, counts))
    return {
        f"static {dashed}": (StaticTree(draft, counts), "match"),
        "static, optimal shape": (StaticTree(draft, parents=best), "match"),
        "dynamic": (DynamicTree(draft, budget, depth, few), "match"),
        f"coupled {dashed}": (DraftModel(draft, counts, shared_noise=True), "coupled"),
        "coupled dynamic": (DynamicTree(draft, budget, depth, few, shared_noise=True), "coupled"),
        f"hub {dashed}": (HubTree(draft, counts), "traversal"),
    }


def measure(pair, drafter, rule, prompts, temperature, tokens):
    """(tokens, steps) of every prompt."""
    how = [SamplingParams(temperature, seed=i) for i in range(len(prompts))]
    made = pair.using(drafter, verifiers.get(rule)).generate(prompts, how, Stop(tokens, (), ()))
    return [(c.stats.new_tokens, c.stats.steps) for c in made.completions]


def efficiency(found, units):
    """Tokens per target call over some prompts."""
    return sum(found[u][0] for u in units) / sum(found[u][1] for u in units)


def main() -> None:
    """Print one table per temperature and budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=int, action="append", choices=sorted(SHAPES))
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--count", type=int, default=32, help="prompts")
    parser.add_argument("-n", "--tokens", type=int, default=96)
    asked = parser.parse_args()
    pair = outrider.load(dtype="float32", threads=1)
    draft = pair.engine.drafter.model
    lines = shipped("heldout_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"].rstrip() for line in lines][: asked.count]
    for temperature in asked.temperature or [0.0, 1.0]:
        acceptance = (0.65, 0.12, 0.05, 0.03, 0.02) if temperature == 0 else (0.4, 0.1, 0.05, 0.03)
        for budget in asked.budget or list(SHAPES):
            print(f"temperature {temperature:g}, {budget} drafted tokens, {len(prompts)} prompts")
            base = None
            for name, (drafter, rule) in trees(draft, budget, acceptance).items():
                found = measure(pair, drafter, rule, prompts, temperature, asked.tokens)
                base = base or found
                tau = efficiency(found, range(len(found)))
                gap = interval(
                    lambda units, f=found, b=base: efficiency(f, units) - efficiency(b, units),
                    len(found),
                )
                print(f"  {name:22} {tau:.3f}  {gap.value:+.3f} {gap.text(3, signed=True)}")


if __name__ == "__main__":
    main()
