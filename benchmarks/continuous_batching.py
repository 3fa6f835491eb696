"""Rows that come and go, as on a server: what drafts cost and bring beside plain decoding.

    python benchmarks/continuous_batching.py SMOLLM2.gguf [--rows 8 16] [--each 3] [--tokens 48]

The prompts of `outrider bench peers` are submitted to a run of so many rows, the next one as soon
as one is over, greedily. Arms are in one process and take turns every few steps, so that they see
the same neighbours; processor time of the process. "at rest" asks the drafter and never drafts.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import outrider
from outrider import Engine, EngineRun, SamplingParams, StopConditions
from outrider.drafters import Root
from outrider.engine.request import Request
from outrider.engine.speculation_policy import Adaptive, FixedLength
from outrider.models import budget
from outrider_lab.tasks import prompts

PIECE = 8  #: steps between two arms' turns


def pieces(
    engine: Engine, texts: Sequence[list[int]], rows: int, tokens: int, told: dict[str, Any]
) -> Iterator[float]:
    """Processor seconds of some steps at a time, until all texts are written."""
    run = EngineRun(engine, rows, 1024)
    waiting, out = list(enumerate(texts)), {}
    numbers: dict[int, int] = {}
    while waiting or not run.done:
        started = time.process_time()
        for _ in range(PIECE):
            while waiting and len(numbers) - len(out) < rows:
                at, ids = waiting.pop(0)
                request = Request(ids, SamplingParams(0), StopConditions(tokens))
                numbers[run.submit(request)] = at
            for block in run.step():
                told["texts"].setdefault(numbers[block.request_id], []).extend(block.token_ids)
                if block.finish_reason is not None:
                    out[block.request_id] = True
            if run.done and not waiting:
                break
        yield time.process_time() - started
    told["sizes"] += Counter(run.stats.sizes)
    told["run"] = run.stats


def told_of(
    name: str,
    took: Sequence[float],
    plain: Sequence[float],
    count: int,
    same: bool,
    sizes: Mapping[int, int],
) -> dict[str, Any]:
    """One arm, by its processor seconds of `count` tokens in each round, and plain's."""
    over = [a / b for a, b in zip(plain, took, strict=True)]
    return {
        "engine": name,
        "ms a token": 1e3 * sum(took) / len(took) / count,
        "times plain": f"{sum(over) / len(over):.3f} [{min(over):.3f}, {max(over):.3f}]",
        "texts equal": same,
        "sizes": str(dict(sorted(sizes.items()))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--each", type=int, default=3, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seconds", type=float, default=5.0, help="that measuring steps may take")
    parser.add_argument("--out", type=Path, help="a folder for rows.json")
    given = parser.parse_args()
    ours = outrider.load(given.model, dtype=given.dtype, threads=given.threads)
    texts = [prompts.token_ids(ours.tokenizer, task.turns) for task in prompts.tasks(given.each)]
    model, drafter, rule = ours.engine.target, ours.engine.drafter, ours.engine.rule
    tables: dict[str, list[dict[str, Any]]] = {}
    for rows in given.rows:
        with budget.under(budget.Budget(given.seconds)):
            engine = Engine(model, drafter, rule, Adaptive())
            costs = engine.priced(rows)
        arms = {
            "plain": Engine(model, Root(), rule),
            "at rest": Engine(model, drafter, rule, FixedLength(0)),
            "planned": Engine(model, drafter, rule, Adaptive(), costs=costs),
        }
        assert costs is not None
        steps = {n: costs.milliseconds(n, rows, 128) for n in (1, 2, 3, 4, 6)}
        print(rows, "rows, a step by nodes:", ", ".join(f"{n}: {t:.1f}" for n, t in steps.items()))
        took: dict[str, list[float]] = {name: [] for name in arms}
        seen: dict[str, Any] = {name: {"texts": {}, "sizes": Counter()} for name in arms}
        for number in range(given.rounds + 1):
            for name in arms:
                seen[name]["texts"] = {}
            going = {n: pieces(e, texts, rows, given.tokens, seen[n]) for n, e in arms.items()}
            spent = dict.fromkeys(arms, 0.0)
            while going:
                for name in list(going)[:: 1 if number % 2 else -1]:
                    more = next(going[name], None)
                    if more is None:
                        del going[name]
                    else:
                        spent[name] += more
            if number:
                for name in arms:
                    took[name].append(spent[name])
        count = sum(map(len, seen["plain"]["texts"].values()))
        for name in arms:
            same = seen[name]["texts"] == seen["plain"]["texts"]
            sizes = seen[name]["sizes"]
            one = told_of(name, took[name], took["plain"], count, same, sizes)
            tables.setdefault(f"{rows} rows", []).append(one)
            print(" ", ", ".join(f"{key} {value}" for key, value in one.items()), flush=True)
    if given.out is not None:
        about = (
            f"Arms take turns every {PIECE} steps, {len(texts)} prompts of {given.tokens} tokens, "
            f"rounds: {given.rounds} (in brackets their least and most), threads: {given.threads}, "
            "processor time of the process."
        )
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "rows.json").write_text(json.dumps({"about": about, "tables": tables}) + "\n")


if __name__ == "__main__":
    main()
