"""The drafters of docs/more-drafters.md: tokens a call, draft calls, alpha and speed over plain.

    python benchmarks/more_drafters.py                    # the shipped pair, T = 0 and 1
    python benchmarks/more_drafters.py MODEL              # a chat model alone, T = 0 and 0.7
    python benchmarks/more_drafters.py --quick
    python benchmarks/more_drafters.py --arms plain "draft_model 8" "cascade 8"

Every arm drafts one size in every step, so that drafters are compared and not planners. Arms take
turns prompt by prompt in one process on one thread; the clock is that thread's CPU time, prompts
included. alpha is the mean of sum min(p, q) over tested tokens, of drafts that are drawn. n-grams
of MODEL are counted in the Python library of this machine.
"""

import argparse
import os
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import outrider
from outrider import DraftModel, Engine, PromptLookup, Root, SamplingParams, StopConditions
from outrider.drafters import NgramTable, Suffix
from outrider.drafters.draft_sampling import Tempered, Warp
from outrider.drafters.ngram_table import Table, count, read
from outrider.shipped import shipped
from outrider.text.prompts import encode
from outrider.types import Drafter, LanguageModel
from outrider_lab.bench.prompts import read_prompts
from outrider_lab.drafters.cascade import Cascade
from outrider_lab.drafters.layer_skip import LayerSkip, part
from outrider_lab.drafters.lookahead import Lookahead
from outrider_lab.drafters.ngram_tree import NgramTree
from outrider_lab.drafters.random import Random
from outrider_lab.tasks.prompts import tasks, token_ids

torch.set_num_threads(1)

#: Layers that `outrider bench layers` leaves out at least loss: of MODEL (SmolLM2), of the pair.
OUT_OF_MODEL, OUT_OF_PAIR = (3, 4, 5, 6, 7, 9), (1, 3, 5, 7, 9, 11)


class Counted:
    """A draft model that counts its calls."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.calls = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.model.forward(*args, **kwargs)


@dataclass
class Arm:
    """A drafter and what came of it."""

    engine: Engine
    draft: Counted | None = None
    texts: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    calls: int = 0  #: of the target
    drafts: int = 0  #: of the draft model, prompts included
    overlap: float = 0.0
    overlaps: int = 0

    def write(
        self, prompt: Sequence[int], sampling: SamplingParams, limits: StopConditions
    ) -> None:
        """One text more."""
        before = self.draft.calls if self.draft else 0
        text: list[int] = []
        started = time.thread_time()
        run = self.engine.run([list(prompt)], [sampling], [limits])
        for block in run:
            text += block.token_ids
        self.seconds += time.thread_time() - started
        self.texts.append(text)
        self.calls += run.stats.engine_steps
        self.drafts += (self.draft.calls if self.draft else 0) - before
        self.overlap += run.stats.overlap
        self.overlaps += run.stats.overlaps


def without(target: LanguageModel, out: Sequence[int]) -> Drafter:
    """Layers of the target as a draft of four tokens."""
    have = target.runner.layers
    return LayerSkip(part(target, [n for n in range(have) if n not in out]))


def alone(target: LanguageModel, table: Table, out: Sequence[int]) -> dict[str, Drafter]:
    """Drafters that need no second model."""
    vocab = target.vocab_size
    return {
        "plain": Root(),
        "prompt_lookup 8": PromptLookup(8),
        "suffix 8": Suffix(8),
        "ngram_table 4": NgramTable(table, 4, vocab),
        "ngram_tree 8": NgramTree(table, vocab_size=vocab),
        "random 4": Random(vocab, 4),
        "lookahead": Lookahead(),
        "layer_skip 4": without(target, out),
    }


def counted() -> dict[str, Callable[[Any], Drafter]]:
    """Drafters with the pair's draft model."""
    return {
        "draft_model 4": lambda model: DraftModel(model, (1,) * 4),
        "draft_model 8": lambda model: DraftModel(model, (1,) * 8),
        "cascade 4": lambda model: Cascade(model, num_speculative_tokens=4),
        "cascade 8": lambda model: Cascade(model, num_speculative_tokens=8),
        "draft at 0.8": lambda model: Tempered(DraftModel(model, (1,) * 4), Warp(0.8)),
        "draft at 1.25": lambda model: Tempered(DraftModel(model, (1,) * 4), Warp(1.25)),
        "draft, top 20": lambda model: Tempered(DraftModel(model, (1,) * 4), Warp(top_k=20)),
    }


def library(tokenizer: Any, vocab: int, most: int = 400_000) -> Table:
    """Trigrams of Python's own library."""
    ids: list[int] = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids += encode(tokenizer, file.read_text("utf-8", "replace"))
        if len(ids) > most:
            break
    return count(ids[:most], vocab, 3)


def show(arms: dict[str, Arm], title: str) -> None:
    """A line for each arm."""
    print(f"\n{title}\n{'':16} tokens/call  draft calls  speed   alpha  same texts")
    plain = arms["plain"]
    for name, arm in arms.items():
        tokens = sum(map(len, arm.texts))
        speed = tokens / arm.seconds * plain.seconds / sum(map(len, plain.texts))
        # each prompt is one call of the draft model besides
        calls = (arm.drafts - len(arm.texts)) / arm.calls if arm.draft else 0.0
        alpha = f"{arm.overlap / arm.overlaps:8.3f}" if arm.overlaps else " " * 8
        same = sum(a == b for a, b in zip(arm.texts, plain.texts, strict=True))
        row = f"{name:16}{tokens / arm.calls:12.2f}{calls:13.2f}{speed:7.2f}{alpha}"
        print(f"{row}{same:8} of {len(plain.texts)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a chat model's folder; default: the shipped pair")
    parser.add_argument("--quick", action="store_true", help="six prompts, 48 tokens")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, nargs="+")
    parser.add_argument("--arms", nargs="+", help="some of them; plain is always there")
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()
    most, tokens = (6, 48) if asked.quick else (asked.prompts, asked.tokens)
    fixed = {"dtype": asked.dtype, "threads": 1, "num_speculative_tokens": 4}
    makers: dict[str, Callable[[Any], Drafter]] = {}
    if asked.model is None:
        speculator = outrider.load(**fixed)
        target, out = speculator.engine.target, OUT_OF_PAIR
        table = read(shipped("ngram.safetensors"))
        prompts = [encode(speculator.tokenizer, text) for text in read_prompts(count=most)]
        draft = speculator.engine.drafter.model
        makers = counted()
    else:
        del fixed["num_speculative_tokens"]
        speculator = outrider.load(asked.model, drafter="none", **fixed)
        target, out = speculator.engine.target, OUT_OF_MODEL
        table = library(speculator.tokenizer, target.vocab_size)
        asked_of = tasks(-(-most // 6))
        prompts = [token_ids(speculator.tokenizer, task.turns) for task in asked_of]
    eos = () if asked.model is None else tuple(speculator.eos_ids)
    for temperature in asked.temperature or ([0.0, 1.0] if asked.model is None else [0.0, 0.7]):
        arms = {n: Arm(Engine(target, one)) for n, one in alone(target, table, out).items()}
        for name, make in makers.items():
            model = Counted(draft)
            arms[name] = Arm(Engine(target, make(model)), model)
        if asked.arms:
            arms = {n: arm for n, arm in arms.items() if n in asked.arms or n == "plain"}
        for number, prompt in enumerate(prompts):
            names = list(arms)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                arms[name].write(
                    prompt, SamplingParams(temperature, seed=number), StopConditions(tokens, eos)
                )
        show(arms, f"T = {temperature:g}, {len(prompts)} prompts, {tokens} tokens each")


if __name__ == "__main__":
    main()
