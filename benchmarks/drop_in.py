"""Our verification inside transformers' assisted generation: prefix, law and time, one command.

    python benchmarks/drop_in.py             # minutes on one core
    python benchmarks/drop_in.py --tokens 2000 --samples 256

Shipped pair, T = 1, no filters:

    prefix   both functions on every step of real generations, with the same uniforms
    law      texts of patched generation against the target's law (outrider_lab.certify.foreign)
    time     CPU time inside the function, ours and transformers' in turn, and a second pair with
             random weights and V = 151,936, whose agreement is constructed
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.generation import utils

from outrider.sampling.sampling_params import SamplingParams
from outrider_lab.baselines import assisted_generation as fast
from outrider_lab.certify import Power, foreign
from outrider_lab.papers.wagner import compare, generate, methods
from outrider_lab.papers.wagner_pairs import (
    WagnerPair,
    continued,
    shipped_pair,
    tiny_pair,
)


def prefixes(pair: WagnerPair, prompts: int, tokens: int) -> dict[str, int]:
    """Steps, and how many of them accept another prefix than transformers' function."""
    found = {"steps": 0, "accepted": 0, "other_prefix": 0}
    original = fast.checked()

    def both(*inputs: Any, **named: Any) -> Any:
        state = torch.get_rng_state()
        theirs, n = original(*inputs, **named)
        torch.set_rng_state(state)
        ours, m = fast.speculative_sampling(*inputs, **named)
        same = int(n) == int(m) and torch.equal(ours[:, :n], theirs[:, :n])
        found["steps"] += 1
        found["accepted"] += int(m)
        found["other_prefix"] += not same
        return ours, m

    setattr(utils, fast.NAME, both)
    try:
        for number in range(prompts):
            generate(pair, number, tokens, 5, seed=number)
    finally:
        setattr(utils, fast.NAME, original)
    return found


def law(pair: WagnerPair, tokens: int, samples: int) -> dict[str, Any]:
    """The certificate of texts that patched assisted generation wrote, and how it was called."""
    power = Power(tokens=tokens, samples=samples, new_tokens=24, rows=8, effect=0.1)
    ids = [prompt.arguments["input_ids"][0, :32].tolist() for prompt in pair.prompts]
    started = replace(pair, prompts=[continued(row, "", str(pair.device)) for row in ids])
    numbers = {tuple(row): i for i, row in enumerate(ids)}
    seeds = iter(range(10**9))

    def write(prompts: list[list[int]]) -> list[list[int]]:
        return [
            generate(started, numbers[tuple(p)], power.new_tokens, 5, seed=next(seeds))
            for p in prompts
        ]

    with fast.patched() as calls:
        report = foreign(
            write, pair.target, list(numbers), SamplingParams(), power, draft=pair.draft
        )  # fmt: skip
    return {
        "verdict": report.verdict, "detectable": report.detectable, "failed": report.failed,
        "calls": calls.count,
        "drafted": calls.drafted, "accepted": calls.accepted,
        "tests": [
            {"name": test.name, "p_value": test.p_value, "samples": test.count}
            for test in report.tests
        ],
    }  # fmt: skip


def timed(pair: WagnerPair, prompts: int, tokens: int) -> dict[str, Any]:
    """Time inside the function per step, and its share of the generation."""
    every = methods()
    arms = {name: every[name] for name in ("transformers", "outrider")}
    theirs, ours = compare(pair, arms, tokens=tokens, gamma=5, seed=1, prompts=prompts)
    row, base = ours.row(theirs, pair.score.name), theirs.row(theirs, pair.score.name)
    return {
        "pair": pair.name, "vocab": ours.texts[0].calls.vocab, "theirs_ms": base["step ms"],
        "ours_ms": row["step ms"], "less": row["step less %"] / 100, "their_share":
        base["share of wall %"] / 100, "our_share": row["share of wall %"] / 100,
        "calls": row["calls"],
    }  # fmt: skip


def main() -> None:
    """Prefix, law, time; exits with 1 if a prefix differs or a law test fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4_096, help="tokens of the conditional tests")
    parser.add_argument("--samples", type=int, default=128, help="runs of the marginal test")
    parser.add_argument("--out", type=Path, help="where to write the JSON document")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pair = shipped_pair(8)
    start = time.perf_counter()
    found: dict[str, Any] = {"prefix": prefixes(pair, 8, 48)}
    print("prefix:", found["prefix"], flush=True)
    found["time"] = [timed(pair, 8, 48), timed(tiny_pair(151_936), 4, 48)]
    for row in found["time"]:
        print(
            f"time, {row['pair']}: {row['theirs_ms']:.3f} -> {row['ours_ms']:.3f} ms a step "
            f"({-100 * row['less']:+.0f} %), share of the generation "
            f"{100 * row['their_share']:.1f} -> {100 * row['our_share']:.1f} %",
            flush=True,
        )
    found["law"] = law(pair, given.tokens, given.samples)
    print(
        f"law: {found['law']['verdict']}, a shift of {found['law']['detectable']} a token would "
        f"show; {found['law']['calls']} calls"
    )
    for test in found["law"]["tests"]:
        p_value = "-" if test["p_value"] is None else f"{test['p_value']:.3f}"
        print(f"  {test['name']:28} {test['samples']:7} samples  p = {p_value}")
    print(f"{time.perf_counter() - start:.0f} s")
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    if found["prefix"]["other_prefix"] or found["law"]["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
