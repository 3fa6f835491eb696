"""A draft model that was never trained: is it told, is it dropped, and what does it cost?

    python benchmarks/useless_draft.py SMOLLM2                  # four layers, 256 wide
    python benchmarks/useless_draft.py SMOLLM2 --drafters either --temperature 0.7

The draft has the target's tokenizer and random weights. Requests of eight kinds of text are
decoded in turn by plain decoding and with nothing set but the draft model and the drafter, by
processor time of whole calls; the first requests pay for looking, the later ones must cost nothing.
"""

import argparse
import logging
import os
import statistics
import tempfile
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider import SamplingParams, Stop

PROMPTS = (
    "What is a good way to learn the names of trees?",
    "Write a function in Python that returns the median of a list.",
    "Tell me a short story about a lighthouse.",
    "Why is the sky blue? Answer in three sentences.",
    "List ten things that one finds in a kitchen.",
    "Summarise: The river rose for three days. On the fourth it was in the cellars of the town.",
    "Rewrite politely: I want my money back and I want it now.",
    "Explain what an index is to somebody who has never used a database.",
)


def untrained(folder: str, into: str, layers: int, width: int) -> str:
    """A model of the target's family and tokenizer, with weights that nobody has trained."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.num_hidden_layers, config.hidden_size = layers, width
    config.num_attention_heads = config.num_key_value_heads = width // 64
    config.intermediate_size = 4 * width
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    config.head_dim = 64
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(into)
    AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(into)
    return into


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--drafters", nargs="*", default=["draft_model", "either"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with tempfile.TemporaryDirectory() as into:
        draft = untrained(arguments.model, into, arguments.layers, arguments.width)
        for drafter in arguments.drafters:
            one(arguments, draft, drafter)


def one(arguments: argparse.Namespace, draft: str, drafter: str) -> None:
    """The lines of one drafter."""
    mine = outrider.load(arguments.model, draft, drafter=drafter, threads=1)
    arms = {"plain": mine.plain(), drafter: mine}
    if drafter == "either":  # what it is without the model
        arms["recall"] = outrider.load(arguments.model, drafter="recall", threads=1)
    stop = Stop(arguments.new, token_ids=())
    for arm in arms.values():
        arm.generate(["Say something."], SamplingParams(0.0), Stop(4, token_ids=()))
    for round_number in range(arguments.rounds):
        spent: dict[str, list[float]] = {name: [] for name in arms}
        drafted, equal, why = 0, 0, ""
        for number, prompt in enumerate(PROMPTS):
            order = list(arms) if number % 2 else list(arms)[::-1]
            told = {}
            for name in order:
                started = time.thread_time()
                how = SamplingParams(arguments.temperature, seed=number)
                told[name] = arms[name].generate([prompt], how, stop)
                spent[name].append(time.thread_time() - started)
            texts = [result.completions[0].token_ids for result in told.values()]
            equal += all(text == texts[0] for text in texts)
            drafted += told[drafter].stats.drafted
            why = told[drafter].stats.why_dropped or why
        each = {
            name: [a / b for a, b in zip(spent["plain"], times, strict=True)]
            for name, times in spent.items()
        }
        line = ", ".join(
            f"{name} {sum(spent['plain']) / sum(spent[name]):.3f} of plain (prompts "
            f"{min(own):.3f} to {max(own):.3f}, median {statistics.median(own):.3f})"
            for name, own in each.items()
            if name != "plain"
        )
        print(
            f"{drafter}, requests {8 * round_number + 1} to {8 * round_number + 8}: {line}; "
            f"{drafted} drafted; {equal} of {len(PROMPTS)} texts the same; "
            f"{'dropped' if why else 'not dropped'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
