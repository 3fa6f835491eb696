"""bfloat16 on a CPU: whether texts stay what they are, and what that costs against a checkout.

    python benchmarks/half_precision.py neighbours             # the shipped pair by a longer row
    python benchmarks/half_precision.py chains MODEL [--tokens 96] [--count 48] [--trees]
    python benchmarks/half_precision.py speed OLD [MODEL] [--rounds 5]

`neighbours` counts coupled texts (T = 0.8, prompts of 60, 130, 200 and 250 tokens) that are the
same alone and beside a row of 330 tokens; `chains` counts texts of prompt lookup and of a draft
made of the target's own layers that equal plain decoding's, greedy and coupled at T = 0.7, with
`--trees` those of recall's trees, too, which are the same where kernels are compiled; both exit
with 1 if one differs. `speed` runs the same work here and in another checkout (made with
`git worktree add OLD COMMIT`), in turns, and prints the ratio of the least times: one thread's CPU
time per step, prefill left out.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import outrider
from outrider import EngineRun, Request, SamplingParams, Stop, StopConditions
from outrider_lab.tasks.prompts import tasks, token_ids

HERE = Path(__file__).resolve().parent.parent
PAIR = Path(outrider.__file__).parent / "pair"
LENGTHS = (60, 130, 200, 250)
HOW: dict[str, Any] = {"dtype": "bfloat16", "threads": 1, "pack_weights": True}
#: (name, rows, tokens in each prompt, drafted tokens): 0 drafted is plain decoding
WORK = (
    ("plain, 1 row", 1, 120, 0),
    ("plain, 8 rows", 8, 120, 0),
    ("plain, 8 rows, long", 8, 300, 0),
    ("chain of 4, 1 row", 1, 120, 4),
    ("chain of 4, 1 row, long", 1, 300, 4),
    ("chain of 4, 8 rows", 8, 120, 4),
)
STEPS = 24


def held_out(tokenizer: Any) -> list[list[int]]:
    lines = (PAIR / "heldout_prompts.jsonl").read_text().splitlines()
    return [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]


def report(what: str, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """One line; whether all are equal."""
    parted = [
        next(
            (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
        for a, b in pairs
        if list(a) != list(b)
    ]
    print(f"{what}: {len(pairs) - len(parted)} of {len(pairs)} texts equal", end="")
    print(f"; they part at tokens {parted}" if parted else "", flush=True)
    return not parted


def neighbours() -> bool:
    speculator = outrider.load(shared_noise=True, **HOW)
    texts = held_out(speculator.tokenizer)
    long = [token for text in texts for token in text][:330]
    stop, found = Stop(48, token_ids=()), []
    for length in LENGTHS:
        prompts = [(text * 8)[:length] for text in texts if len(text) >= 40][:6]
        settings = [SamplingParams(0.8, seed=length + row) for row in range(len(prompts))]
        each = zip(prompts, settings, strict=True)
        alone = [speculator.generate(ids, how, stop).completions[0].token_ids for ids, how in each]
        beside = speculator.generate(
            [*prompts, long], [*settings, SamplingParams(1.0, seed=1)], Stop(60, token_ids=())
        ).completions[:-1]
        pairs = [(a, b.token_ids[:48]) for a, b in zip(alone, beside, strict=True)]
        report(f"prompts of {length} tokens", pairs)
        found += pairs
    return report("beside a longer row", found)


def chains(asked: Any) -> bool:
    plain = outrider.load(asked.model, drafter="none", **HOW)
    lookup = {"drafter": "prompt_lookup", "num_speculative_tokens": 8}
    layers = len(plain.engine.target.open(1, 128).layers)
    draft = {"draft_layers": (0, 1, layers - 2, layers - 1), "num_speculative_tokens": 4}
    tree = {"drafter": "recall", "drafter_options": {"chain": False}, "planner": "fixed"}
    prompts = [token_ids(plain.tokenizer, one.turns) for one in tasks(asked.count // 6)]
    good = True
    for temperature in asked.temperatures:
        shared = {"shared_noise": True} if temperature else {}
        settings = [SamplingParams(temperature, seed=seed) for seed in range(len(prompts))]
        stop = Stop(asked.tokens, token_ids=())
        usual = plain.plain(shared_noise=bool(temperature))
        texts = [
            texts_of(usual, ids, how, stop) for ids, how in zip(prompts, settings, strict=True)
        ]
        arms = [("lookup 8", lookup), ("draft chain 4", draft)]
        if asked.trees:
            arms.append(("recall's trees", tree))
        for name, how in arms:
            extra = {"rule": "match"} if temperature and how is not draft else shared
            made = outrider.load(asked.model, **how, **extra, **HOW)
            each = zip(texts, prompts, settings, strict=True)
            pairs = [(text, texts_of(made, ids, one, stop)) for text, ids, one in each]
            good &= report(f"T = {temperature}, {name}", pairs)
    return good


def texts_of(speculator: Any, ids: list[int], how: SamplingParams, stop: Stop) -> tuple[int, ...]:
    return speculator.generate(ids, how, stop).completions[0].token_ids


def child(model: str) -> None:
    """Answer with CPU milliseconds per step for each line of stdin: a place in WORK."""
    torch.set_num_threads(1)
    given = [] if model == "-" else [model]
    shown: dict[int, Any] = {}
    for depth in (0, 4):
        options: dict[str, Any] = {"drafter": "none"}
        if depth:
            options = {"num_speculative_tokens": depth}
            options |= {"drafter": "prompt_lookup"} if given else {}
        shown[depth] = outrider.load(*given, **options, **HOW)
    texts = [token for text in held_out(shown[0].tokenizer) for token in text]
    print("ready", flush=True)
    for line in sys.stdin:
        _, rows, length, depth = WORK[int(line)]
        run = EngineRun(shown[depth].engine, rows, length + 6 * STEPS + 16)
        for row in range(rows):
            ids = texts[50 * row : 50 * row + length]
            run.submit(Request(ids, SamplingParams(0), StopConditions(6 * STEPS)))
        for _ in range(3):
            run.step()
        started = time.thread_time()
        for _ in range(STEPS):
            run.step()
        print(1e3 * (time.thread_time() - started) / STEPS, flush=True)


def speed(asked: Any) -> None:
    arms = {"before": Path(asked.old), "now": HERE}
    children: dict[str, Any] = {}
    for name, root in arms.items():
        children[name] = subprocess.Popen(
            [sys.executable, __file__, "child", asked.model or "-"],
            env={**os.environ, "PYTHONPATH": str(root / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert children[name].stdout.readline() == "ready\n", f"{root} does not run"
    for number, (name, *_) in enumerate(WORK):
        times: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(asked.rounds):
            for arm, process in children.items():
                process.stdin.write(f"{number}\n")
                process.stdin.flush()
                times[arm].append(float(process.stdout.readline()))
        before, now = (min(times[arm]) for arm in arms)
        print(f"{name:22s} {before:7.2f} -> {now:7.2f} ms a step, {before / now:.2f}x", flush=True)
    for process in children.values():
        process.stdin.close()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("neighbours")
    two = commands.add_parser("chains")
    two.add_argument("model")
    two.add_argument("--tokens", type=int, default=96)
    two.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    two.add_argument("--count", type=int, default=48)
    two.add_argument("--trees", action="store_true")
    three = commands.add_parser("speed")
    three.add_argument("old")
    three.add_argument("model", nargs="?")
    three.add_argument("--rounds", type=int, default=5)
    commands.add_parser("child").add_argument("model")
    asked = parser.parse_args()
    if asked.command == "child":
        child(asked.model)
    elif asked.command == "speed":
        speed(asked)
    else:
        return 0 if (neighbours() if asked.command == "neighbours" else chains(asked)) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
