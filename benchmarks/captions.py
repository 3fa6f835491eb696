"""A captioner of printed lines, trained here: what it reads right, and what drafts are worth.

    python benchmarks/captions.py                     # trains for seven minutes, then reads
    python benchmarks/captions.py --lines 50          # the trained reader comes from the cache

A ViT with a TrOCR decoder reads pictures of lines that it has not seen (`text_lines.py`), loaded
by `outrider.load` from its folder, its prompts being pictures. For every drafter: lines that are
read without an error, texts that are plain decoding's, target calls (the reading of the picture is
none), tokens a call, and the processor time of one thread, plain over drafted: arms in turn on
every picture.

    plain           no draft
    recall          copies from lines that were read before
    suffix          the same, by suffixes
    shallow         the first and the last layer of the reader's own decoder as its draft
    assistant       a decoder of one layer, half as wide, trained on the reader's states
"""

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from text_lines import ReaderSize, pictures, trained

import outrider
from outrider import SamplingParams, Stop
from outrider_lab.bench import machine
from outrider_lab.bench.measure import turns


def speculators(target: Path, draft: Path, ahead: int) -> dict[str, Any]:
    """One for each arm."""
    common: dict[str, Any] = {"dtype": "float32", "threads": 1, "device": "cpu"}
    length = {**common, "num_speculative_tokens": ahead}
    return {
        "plain": outrider.load(str(target), drafter="none", **common),
        "recall": outrider.load(str(target), drafter="recall", **length),
        "suffix": outrider.load(str(target), drafter="suffix", **length),
        "shallow": outrider.load(str(target), draft_layers=(0, 2), **length),
        "assistant": outrider.load(str(target), str(draft), **length),
    }


def measured(arms: dict[str, Any], count: int, temperature: float = 0.0) -> list[dict[str, Any]]:
    """A row for each arm on so many pictures of unseen lines."""
    right, images = pictures(count, seed=10**6)
    texts: dict[str, dict[int, str]] = {name: {} for name in arms}
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for _, number, name in turns(list(arms), count):
        started = time.thread_time()
        how = SamplingParams(temperature, seed=number)
        result = arms[name].generate(images[number], how, Stop(40))
        seconds[name] += time.thread_time() - started
        texts[name][number] = result.texts[0]
        calls[name] += result.stats.steps
        tokens[name] += result.stats.new_tokens
    return [
        {
            "arm": name,
            "read": sum(texts[name][at].strip() == right[at] for at in range(count)) / count,
            "as plain": sum(texts[name][at] == texts["plain"][at] for at in range(count)),
            "calls": calls[name],
            "tokens a call": tokens[name] / calls[name],
            "fewer calls": calls["plain"] / calls[name],
            "less time": seconds["plain"] / seconds[name],
        }
        for name in arms
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=ReaderSize.steps)
    parser.add_argument("--draft-steps", type=int, default=ReaderSize.draft_steps)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    size = ReaderSize(steps=asked.steps, draft_steps=asked.draft_steps)
    arms = speculators(*trained(size), asked.num_speculative_tokens)
    print(machine.environment())
    rows = measured(arms, asked.lines, asked.temperature)
    for row in rows:
        print(
            f"{row['arm']:10s} {row['read']:6.1%} read right, {row['as plain']}/{asked.lines} as "
            f"plain, {row['calls']:6d} calls, {row['tokens a call']:5.2f} tokens a call, "
            f"{row['fewer calls']:5.2f}x fewer calls, {row['less time']:5.2f}x less time",
            flush=True,
        )


if __name__ == "__main__":
    main()
