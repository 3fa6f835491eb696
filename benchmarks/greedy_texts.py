"""Whether greedy texts are those of transformers in float32, token by token.

    python benchmarks/greedy_texts.py MODEL [--dtype bfloat16] [--prompts 160] [--tokens 48]

MODEL is a folder or a GGUF file, of which transformers has the same weights widened to float32.
Prompts are the shipped 120 as chats, then bare. Ours are written with nothing set (drafts as the
planner likes). Transformers reads each prompt with
our text in one call: the text is its greedy one if each token is the best of those that it scores
where it stands. Where one is not, what it lacks is printed: a near tie is one of both models.
Exits with 1 if a token lacks more than --allowed.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoModelForCausalLM

import outrider
from outrider import SamplingParams, Stop
from outrider.text.prompts import encode
from outrider_lab.tasks.prompts import tasks, token_ids


def main() -> None:
    """One line a text that differs, and how many are equal."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("model", type=Path)
    asked.add_argument("--dtype", default="auto")
    asked.add_argument("--prompts", type=int, default=160)
    asked.add_argument("--tokens", type=int, default=48)
    asked.add_argument("--allowed", type=float, default=1e-2)
    args = asked.parse_args()
    torch.set_num_threads(1)
    ours = outrider.load(args.model, dtype=args.dtype, threads=1)
    print(ours.notes.weights)
    chats = [(one.kind, token_ids(ours.tokenizer, one.turns)) for one in tasks()]
    bare = [(f"{one.kind}, bare", encode(ours.tokenizer, one.turns[0])) for one in tasks()]
    prompts = (chats + bare)[: args.prompts]
    place = {"pretrained_model_name_or_path": args.model}
    if args.model.is_file():
        place = {"pretrained_model_name_or_path": args.model.parent, "gguf_file": args.model.name}
    theirs = AutoModelForCausalLM.from_pretrained(
        **place, dtype="float32", trust_remote_code=False
    ).eval()
    equal, worst = 0, 0.0
    for kind, prompt in prompts:
        stop = Stop(args.tokens)
        text = ours.generate(prompt, SamplingParams(0), stop).completions[0].token_ids
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1).values
        lacks = best - logits.gather(-1, torch.tensor(text)[:, None])[:, 0]
        at = int((lacks > 0).nonzero()[0]) if bool((lacks > 0).any()) else None
        if at is None:
            equal += 1
            continue
        worst = max(worst, float(lacks[at]))
        print(f"{kind}: token {at} of {len(text)} lacks {float(lacks[at]):.2e}")
    print(f"{equal} of {len(prompts)} texts are transformers'; the most that one lacks {worst:.2e}")
    sys.exit(worst > args.allowed)


if __name__ == "__main__":
    main()
