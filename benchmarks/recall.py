"""Drafters without a second model on prompts of six kinds: what they gain over plain.

    python benchmarks/recall.py MODEL                      # T = 0 and 0.7, 128 tokens each
    python benchmarks/recall.py MODEL --quick              # minutes: one prompt of each kind
    python benchmarks/recall.py MODEL --rows 8 16          # batches
    python benchmarks/recall.py MODEL --arms default transformers   # 48 prompts: what is promised

MODEL is a folder of a chat model, as SmolLM2-135M-Instruct. Arms take turns prompt by prompt in one
process on one thread, and the clock is that thread's CPU time, prompts included. The arm "default"
is what `outrider.load(MODEL)` makes of it, measured costs included; "transformers" is its own
prompt lookup in the same dtype, at the number of tokens that is best on the first prompts. The last
lines say which goals the default reaches, and what copies could gain at most. The prompts:
`outrider_lab.tasks`.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoModelForCausalLM

import outrider
from outrider import Engine, PromptLookup, Root, SamplingParams, StopConditions
from outrider.costs import Costs
from outrider.drafters import Recall, Suffix
from outrider.drafters.automaton import Automaton
from outrider.drafters.recall import MOST
from outrider.engine.speculation_policy import Adaptive
from outrider.types import Drafter
from outrider_lab.tasks.prompts import tasks, token_ids

torch.set_num_threads(1)

#: How each arm drafts, and whether the planner says how much.
ARMS: dict[str, tuple[Callable[[], Drafter], bool]] = {
    "plain": (Root, False),
    "prompt_lookup 8": (lambda: PromptLookup(8), False),
    "prompt_lookup": (lambda: PromptLookup(16), True),
    "suffix": (lambda: Suffix(16), True),
    "recall": (lambda: Recall(MOST), True),
    "recall, chain": (lambda: Recall(MOST, chain=True), True),
    "recall, earlier": (lambda: Recall(MOST, earlier=20_000), True),
}
DEFAULT, THEIRS = "default", "transformers"
SUM, WORST, OVER_THEIRS = 1.5, 0.95, 1.25  #: goals of the default
THEIR_SETTINGS = (3, 5, 10)


@dataclass
class Job:
    """Prompts that run side by side."""

    kind: str
    prompts: list[list[int]]
    seeds: list[int]


@dataclass
class Done:
    """What an arm made of one job."""

    texts: list[list[int]]
    seconds: float
    calls: int = 0  #: of the target, per row
    nodes: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass
class Arm:
    """A way to write text, and what it wrote."""

    run: Callable[[Job], Done]
    done: list[Done] = field(default_factory=list)


def ours(
    engine: Engine, temperature: float, most: int, eos: Sequence[int]
) -> Callable[[Job], Done]:
    """An arm of this library."""

    def run(job: Job) -> Done:
        settings = [SamplingParams(temperature, seed=seed) for seed in job.seeds]
        limits = [StopConditions(most, tuple(eos))] * len(job.prompts)
        texts: list[list[int]] = [[] for _ in job.prompts]
        started = time.thread_time()
        going = engine.run(job.prompts, settings, limits)
        for block in going:
            texts[block.row] += block.token_ids
        took = time.thread_time() - started
        sizes = going.stats.sizes
        scored = sum((size - 1) * steps for size, steps in sizes.items())
        return Done(texts, took, going.stats.engine_steps, scored)

    return run


def theirs(model: Any, temperature: float, most: int, count: int) -> Callable[[Job], Done]:
    """transformers' own prompt lookup."""

    def run(job: Job) -> Done:
        (prompt,) = job.prompts
        ids = torch.tensor([prompt])
        law = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(job.seeds[0])
        started = time.thread_time()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            prompt_lookup_num_tokens=count,
            pad_token_id=0,
            **(law if temperature else {"do_sample": False}),
        )
        return Done([out[0, len(prompt) :].tolist()], time.thread_time() - started)

    return run


def best_of_theirs(
    model: Any, temperature: float, most: int, jobs: Sequence[Job]
) -> tuple[int, Callable[[Job], Done]]:
    """Their fastest number of tokens on these jobs."""
    speeds = {}
    for count in THEIR_SETTINGS:
        done = [theirs(model, temperature, most, count)(job) for job in jobs]
        speeds[count] = sum(d.tokens for d in done) / sum(d.seconds for d in done)
    best = max(speeds, key=lambda count: speeds[count])
    return best, theirs(model, temperature, most, best)


def jobs_of(tokenizer: Any, each: int, rows: int) -> list[Job]:
    """Prompts in groups of `rows`; a group of one has a kind."""
    prompts = tasks(each)
    ids = [token_ids(tokenizer, task.turns) for task in prompts]
    numbers = range(0, len(ids), rows)
    return [
        Job(
            prompts[n].kind if rows == 1 else f"{rows} rows",
            ids[n : n + rows],
            list(range(100 + n, 100 + n + len(ids[n : n + rows]))),
        )
        for n in numbers
    ]


def play(arms: dict[str, Arm], jobs: Sequence[Job]) -> None:
    """Every arm does every job, in turn."""
    for arm in arms.values():
        arm.run(Job("warm", [jobs[0].prompts[0][:32]], [0]))
    names = list(arms)
    for number, job in enumerate(jobs):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            arms[name].done.append(arms[name].run(job))


def table(arms: dict[str, Arm], jobs: Sequence[Job], title: str) -> None:
    """Speed over plain, by kind, in sum and on the worst prompt."""
    kinds = list(dict.fromkeys(job.kind for job in jobs))
    plain = arms["plain"].done
    heads = "".join(f"{kind[:9]:>10}" for kind in kinds)
    print(
        f"\n{title}\n{'':18}{heads}       all    median     worst  tokens/call  nodes  same texts"
    )
    for name, arm in arms.items():
        cells = ""
        for kind in [*kinds, None]:
            picked = [at for at, job in enumerate(jobs) if kind in (None, job.kind)]
            cells += f"{_speed(arm.done, picked) / _speed(plain, picked):10.2f}"
        ratios = sorted(
            (_speed(arm.done, [at]) / _speed(plain, [at]), at)
            for at in range(len(jobs))
            if plain[at].tokens >= 16 * len(jobs[at].prompts)
        )
        calls = sum(done.calls for done in arm.done)
        rest = ""
        if calls:
            rows = sum(
                done.calls * len(job.prompts) for done, job in zip(arm.done, jobs, strict=True)
            )
            same = sum(a.texts == b.texts for a, b in zip(arm.done, plain, strict=True))
            tokens = sum(done.tokens for done in arm.done)
            nodes = sum(done.nodes for done in arm.done)
            rest = f"{tokens / rows:13.2f}{nodes / calls:7.1f}{same:8} of {len(jobs)}"
        (worst, at), median = ratios[0], ratios[len(ratios) // 2][0]
        print(f"{name:18}{cells}{median:10.2f}{worst:7.2f} #{at:<2}{rest}", flush=True)


def ceiling(arms: dict[str, Arm], jobs: Sequence[Job], costs: Costs) -> None:
    """What copies could gain if it were known ahead how many of them are right, prefill left out.

    At every place of plain decoding's texts: the tokens behind the longest match that are right,
    and the way through the text that takes the least time by the costs of steps.
    """
    took, best = 0.0, 0.0
    for job, done in zip(jobs, arms["plain"].done, strict=True):
        for prompt, text in zip(job.prompts, done.texts, strict=True):
            right = right_copies(prompt, text)
            left = [0.0] * (len(text) + 1)
            for at in reversed(range(len(text))):
                here = len(prompt) + at
                took += costs.milliseconds(1, 1, here)
                left[at] = min(
                    costs.milliseconds(1 + count, 1, here) + left[at + 1 + count]
                    for count in range(right[at] + 1)
                )
            best += left[0]
    print(f"copies whose number is known ahead: {took / best:.2f} of plain decoding", flush=True)


def right_copies(prompt: Sequence[int], text: Sequence[int]) -> list[int]:
    """At each place of a text: how many of the tokens behind its longest match are right."""
    read, found = Automaton(prompt), []
    for at, token in enumerate(text):
        true, same = text[at : at + MOST], 0
        for guess, right in zip(read.ahead(MOST), true, strict=False):
            if guess != right:
                break
            same += 1
        found.append(min(same, len(text) - at - 1))  # the last one is the target's own
        read.push(token)
    return found


def goals(arms: dict[str, Arm], jobs: Sequence[Job]) -> None:
    """What the default reaches: in sum, on its worst prompt, and beside transformers."""
    every = range(len(jobs))
    speeds = {name: _speed(arm.done, every) for name, arm in arms.items()}
    plain, ours = arms["plain"].done, arms[DEFAULT].done
    worst = min(
        _speed(ours, [at]) / _speed(plain, [at])
        for at in every
        if plain[at].tokens >= 16 * len(jobs[at].prompts)
    )
    reached = [("sum", speeds[DEFAULT] / speeds["plain"], SUM), ("worst prompt", worst, WORST)]
    theirs = [name for name in arms if name.startswith(THEIRS)]
    reached += [(f"over {name}", speeds[DEFAULT] / speeds[name], OVER_THEIRS) for name in theirs]
    for name, value, least in reached:
        holds = "holds" if value >= least else "is missed"
        print(f"{DEFAULT}, {name}: {value:.3f}, at least {least:g}: {holds}", flush=True)


def _speed(done: Sequence[Done], picked: Sequence[int]) -> float:
    return sum(done[at].tokens for at in picked) / sum(done[at].seconds for at in picked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--quick", action="store_true", help="one prompt of each kind, 48 tokens")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--arms", nargs="+", default=[*ARMS, DEFAULT, THEIRS])
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()
    each, tokens = (1, 48) if asked.quick else (asked.limit, asked.tokens)
    speculator = outrider.load(asked.model, drafter="none", dtype=asked.dtype, threads=1)
    target, eos = speculator.engine.target, speculator.eos_ids
    usual = outrider.load(asked.model, dtype=asked.dtype, threads=1)
    model = None
    if THEIRS in asked.arms:
        dtype = getattr(torch, asked.dtype)
        model = AutoModelForCausalLM.from_pretrained(
            asked.model, dtype=dtype, trust_remote_code=False
        )
    for rows in asked.rows:
        jobs = jobs_of(speculator.tokenizer, each, rows)
        for temperature in asked.temperature:
            arms = {}
            for name, (make, planned) in ARMS.items():
                if name in asked.arms or name == "plain":
                    engine = Engine(target, make(), planner=Adaptive() if planned else None)
                    engine.priced(rows)
                    arms[name] = Arm(ours(engine, temperature, tokens, eos))
            if DEFAULT in asked.arms:
                usual.engine.priced(rows)
                arms[DEFAULT] = Arm(ours(usual.engine, temperature, tokens, eos))
            if model is not None and rows == 1:
                count, run = best_of_theirs(model, temperature, tokens, jobs[:6])
                arms[f"{THEIRS} {count}"] = Arm(run)
            play(arms, jobs)
            table(arms, jobs, f"T = {temperature}, {rows} row(s): speed over plain decoding")
            if DEFAULT in arms:
                goals(arms, jobs)
                costs = usual.engine.costs
                if costs is not None and rows == 1:
                    ceiling(arms, jobs, costs)


if __name__ == "__main__":
    main()
