"""Whether texts for the same seeds stayed what they were: the shipped pair, every drafter.

    python benchmarks/same_texts.py write before.json             # in the checkout of before
    python benchmarks/same_texts.py check before.json [NAME ...]  # in this one

Compares token ids, steps, drafted and accepted tokens and finish reasons in float32. Exits with 1
if any differs.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

import outrider
from outrider import SamplingParams, Stop

CONFIGURATIONS: dict[str, dict] = {
    "none": {"drafter": "none"},
    "chain4": {"drafter": "draft_model", "num_speculative_tokens": 4},
    "tree": {"drafter": "draft_model", "branching": (3, 2, 1)},
    "coupled": {"drafter": "draft_model", "num_speculative_tokens": 4, "shared_noise": True},
    "coupled_tree": {"drafter": "draft_model", "branching": (2, 2, 1), "shared_noise": True},
    "sampled": {"drafter": "sampled_tree", "tree_acceptance": (0.6, 0.2, 0.1), "total_tokens": 8},
    "hub": {"drafter": "hub_tree", "branching": (3, 2, 2, 1)},
    "static": {"drafter": "static_tree", "branching": (3, 2, 1)},
    "beam": {"drafter": "beam", "width": 3},
    "paths": {"drafter": "paths", "width": 3},
    "dynamic": {"drafter": "dynamic_tree"},
    "dynamic_coupled": {"drafter": "dynamic_tree", "shared_noise": True},
    "lookup": {"drafter": "prompt_lookup"},
    "ngram": {"drafter": "ngram_table"},
}
SAMPLINGS = {
    "t0": SamplingParams(0),
    "t1": SamplingParams(1.0, seed=5),
    "top_p": SamplingParams(0.8, top_p=0.9, top_k=50, seed=6),
    "penalty": SamplingParams(0.7, repetition_penalty=1.2, no_repeat_ngram_size=4, seed=7),
    "mixed": [
        SamplingParams(0),
        SamplingParams(1.0, seed=8),
        SamplingParams(0.6, min_p=0.05, seed=9),
    ],
}
PROMPTS = [
    "def add(a, b):\n",
    "import os\n\nfor name in os.listdir('.'):\n    print(name)\n\nfor name in ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push",
]


def decoded(name: str) -> dict[str, list]:
    """What a configuration writes, by sampling and batch."""
    settings = CONFIGURATIONS[name]
    speculator = outrider.load(
        dtype="float32", threads=1, pack_weights=False, planner="fixed", **settings
    )
    texts = {}
    for how, sampling in SAMPLINGS.items():
        for prompts in [PROMPTS] if how == "mixed" else [PROMPTS, PROMPTS[:1]]:
            rows = speculator.generate(prompts, sampling, Stop(24)).completions
            texts[f"{name}/{how}/{len(prompts)}"] = [
                [c.token_ids, c.stats.steps, c.stats.drafted, c.stats.accepted, c.finish_reason]
                for c in rows
            ]
    return texts


def main() -> int:
    """Write the texts, or compare them with those that were written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["write", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CONFIGURATIONS)}; none: all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    texts: dict[str, list] = {}
    for name in given.names or CONFIGURATIONS:
        texts |= decoded(name)
    if given.what == "write":
        given.file.write_text(json.dumps(texts), "utf-8")
        return 0
    before = json.loads(given.file.read_text("utf-8"))
    wrong = [key for key, rows in texts.items() if before[key] != rows]
    for key in wrong:
        print("differs:", key)
    print(f"{len(texts) - len(wrong)} of {len(texts)} equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
