"""What copying from the source is worth: the shipped corrector on held-out damaged code.

    python benchmarks/corrector.py --pairs 40 --dtype float32 bfloat16

For every drafter: tokens a step of the target, how many texts are plain decoding's, and the
processor time of one thread, plain over drafted, arms in turn on every pair.
"""

import argparse
import statistics
import time

import torch

import outrider
from outrider import PromptLookup, ReferenceLookup, SamplingParams, Stop
from outrider.shipped import CORRECTOR, shipped
from outrider_lab.bench.measure import turns
from outrider_lab.bench.prompts import read_rows

DRAFTERS = {
    "prompt lookup, 8": PromptLookup(8),
    "reference lookup, 4": ReferenceLookup(4),
    "reference lookup, 8": ReferenceLookup(8),
    "reference lookup, 16": ReferenceLookup(16),
}


def measured(dtype: str, temperature: float, count: int) -> None:
    """One table."""
    plain = outrider.load(CORRECTOR, drafter="none", dtype=dtype, threads=1)
    arms = {"plain": plain} | {name: plain.using(d) for name, d in DRAFTERS.items()}
    rows = read_rows(shipped(CORRECTOR) / "heldout_pairs.jsonl", "source")[:count]
    texts: dict[str, dict[int, str]] = {name: {} for name in arms}
    seconds: dict[str, dict[int, float]] = {name: {} for name in arms}
    steps, tokens = dict.fromkeys(arms, 0), dict.fromkeys(arms, 0)
    for _, number, name in turns(list(arms), len(rows)):
        source = rows[number]["source"]
        stop = Stop(len(plain.tokenizer(source)["input_ids"]) + 32)
        started = time.thread_time()
        result = arms[name].generate(source, SamplingParams(temperature, seed=number), stop)
        seconds[name][number] = time.thread_time() - started
        texts[name][number] = result.texts[0]
        steps[name] += result.stats.steps
        tokens[name] += result.stats.new_tokens
    for name in DRAFTERS:
        same = sum(texts[name][n] == texts["plain"][n] for n in texts[name])
        ratio = statistics.median(seconds["plain"][n] / seconds[name][n] for n in texts[name])
        print(
            f"{dtype:9s} T = {temperature:g}  {name:22s} {tokens[name] / steps[name]:5.2f} tokens "
            f"a step, {same}/{len(rows)} texts as plain, {ratio:.2f}x",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in args.dtype:
        for temperature in args.temperature:
            measured(dtype, temperature, args.pairs)


if __name__ == "__main__":
    main()
