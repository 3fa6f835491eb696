"""A trained head against recall on free text: questions and stories, at temperature 0 and 0.7.

    python benchmarks/trained_head.py MODEL HEAD [--limit 8] [--tokens 128] [--kinds question story]

HEAD is a folder that `outrider train-draft` made, or a shipped draft's name. All arms share one
target; they take turns prompt by prompt on one thread, and the clock is that thread's CPU time. The
prompts: `outrider_lab.tasks`. Heads were not trained on them.
"""

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import recall as lookups
import torch

import outrider
from outrider import DraftModel, Engine, Root
from outrider.drafters import DynamicTree, Either, Recall
from outrider.drafters.recall import MOST
from outrider.engine.speculation_policy import Adaptive
from outrider.text.speculator import Speculator

torch.set_num_threads(1)


def engines(base: Speculator) -> dict[str, Engine]:
    """Every way to draft: the head in chains and trees, planned and not, and what needs no head."""
    drafter, target = base.engine.drafter, base.engine.target
    assert isinstance(drafter, DraftModel)
    model = drafter.model
    chains = {f"head {n}": Engine(target, DraftModel(model, (1,) * n)) for n in (1, 2, 3, 4)}
    trees = {
        f"head tree {n}": Engine(target, DynamicTree(model, n, width, depth))
        for n, width, depth in ((3, 2, 2), (7, 3, 3))
    }
    return {
        "plain": Engine(target, Root()),
        "recall": Engine(target, Recall(MOST), planner=Adaptive()),
        "head": base.engine,
        "either": Engine(
            target, Either(Recall(MOST), DraftModel(model, (1,) * 4)), planner=Adaptive()
        ),
        **chains,
        **trees,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("head")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--kinds", nargs="+", default=["question", "story"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--arms", nargs="+", help="those to run; all if left out")
    asked = parser.parse_args()
    base = outrider.load(asked.model, asked.head, drafter="draft_model", threads=1)
    jobs = [
        job for job in lookups.jobs_of(base.tokenizer, asked.limit, 1) if job.kind in asked.kinds
    ]
    for temperature in asked.temperatures:
        arms = {
            name: lookups.Arm(lookups.ours(engine, temperature, asked.tokens, base.eos_ids))
            for name, engine in engines(base).items()
            if not asked.arms or name in ("plain", *asked.arms)
        }
        lookups.play(arms, jobs)
        lookups.table(arms, jobs, f"temperature {temperature:g}, {asked.head}")


if __name__ == "__main__":
    main()
