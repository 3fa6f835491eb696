"""Which draft and rule is fastest at T = 1: token-level chains against block, trees and hubs.

    python benchmarks/wall_clock.py [--choosing 8 --judging 16 --tokens 64] [--json out.json]

Arms are interleaved in one process, same weights and dtype. The best of each family is chosen on
some prompts and judged on others, so that the winner is not the luckiest. Run it on an idle machine
with OMP_WAIT_POLICY=PASSIVE.
"""

import argparse
import json
import os
import statistics
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import torch

import outrider
from outrider import verifiers
from outrider.drafters import DrafterParts, DraftModel, DraftOptions, make
from outrider.text.speculator import Speculator
from outrider_lab.bench import measure
from outrider_lab.bench.prompts import read_prompts

#: family -> (label, drafter's name, its options, rule)
CHAINS = (2, 3, 4, 5, 6, 8)
TREES = ((2, 1, 1), (2, 1, 1, 1), (2, 1, 1, 1, 1), (3, 1, 1, 1), (2, 2, 1, 1))


def families(base: Speculator) -> dict[str, dict[str, Speculator]]:
    """Every arm, grouped by what it stands for."""
    drafter = base.engine.drafter
    assert isinstance(drafter, DraftModel)
    model = drafter.model

    def chain(rule: str) -> dict[str, Speculator]:
        return {
            f"{rule} {k}": base.using(DraftModel(model, (1,) * k), verifiers.get(rule))
            for k in CHAINS
        }

    def tree(name: str) -> dict[str, Speculator]:
        return {
            f"{name} {'-'.join(map(str, counts))}": base.using(
                make(name, DrafterParts((model,)), DraftOptions(branching=counts)),
                verifiers.get("traversal"),
            )
            for counts in TREES
        }

    def coupled() -> dict[str, Speculator]:
        rule = verifiers.get("match")
        return {
            f"coupled chain {k}": base.using(DraftModel(model, (1,) * k, True), rule)
            for k in CHAINS
        }

    return {
        "token-level chain": chain("rejection"),
        "block chain": chain("block"),
        "coupled chain": coupled(),
        "sampled tree, traversal": tree("sampled_tree"),
        "hub tree, traversal": tree("hub_tree"),
    }


def run(arms: dict[str, Speculator], prompts: list[str], tokens: int, seed: int) -> Any:
    return measure.interleave(
        arms,
        prompts,
        lambda n: outrider.SamplingParams(1.0, seed=seed + n),
        outrider.Stop(tokens, token_ids=()),
    )


def rate(trials: Any, arm: str) -> float:
    """Tokens per second over all of an arm's trials."""
    mine = [t for t in trials if t.arm == arm]
    return float(sum(t.tokens for t in mine) / sum(t.seconds for t in mine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choosing", type=int, default=8)
    parser.add_argument("--judging", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", dest="path")
    given = parser.parse_args()
    texts = read_prompts()
    first, second = texts[: given.choosing], texts[given.choosing :][: given.judging]
    base = outrider.load(dtype=given.dtype, threads=1)
    groups = families(base)
    plain = {"plain": base.plain()}

    tried = run({k: v for g in groups.values() for k, v in g.items()}, first, given.tokens, 0)
    best = {family: max(arms, key=lambda a: rate(tried, a)) for family, arms in groups.items()}
    for family, arms in groups.items():
        print(family, "  ".join(f"{a.split()[-1]}: {rate(tried, a):.0f}" for a in arms), "tokens/s")

    finalists = {best[f]: groups[f][best[f]] for f in groups} | plain
    trials = run(finalists, second, given.tokens, 1000)
    yard = best["token-level chain"]
    report = []
    for arm in finalists:
        mine = [t for t in trials if t.arm == arm]
        over = measure.ratio(trials, arm, yard)
        stats = [t.result.stats for t in mine]
        steps = sum(s.engine_steps for s in stats)
        per_step = 1e3 * sum(t.seconds for t in mine) / steps
        outside = sum(1e3 * s.seconds - s.propose_ms - s.score_ms for s in stats) / steps
        length = statistics.fmean(t.tokens for t in mine) * len(mine) / steps
        row = {
            "arm": arm,
            "tokens_per_second": rate(trials, arm),
            "over_token_level": over.row(),
            "tokens_per_call": length,
            "ms_per_step": per_step,
            "ms_outside": outside,
        }
        report.append(row)
        print(
            f"{arm:26} {row['tokens_per_second']:5.0f} tokens/s  over {yard}: {over.times()}  "
            f"{length:.2f} tokens per call, {per_step:.2f} ms a step, {outside:.2f} outside models",
            flush=True,
        )
    if given.path:
        with open(given.path, "w", encoding="utf-8") as out:
            json.dump({"torch": torch.__version__, "rows": report}, out, indent=1)


if __name__ == "__main__":
    main()
