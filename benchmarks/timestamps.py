"""Milliseconds of Whisper's rules at the nodes of a tree: ours, and transformers' processors.

    python benchmarks/timestamps.py [--nodes 9] [--vocab 51865] [--rows 1] [--rounds 100]

Thread CPU time of one thread, turn and turn about; the minimum and the median over the rounds.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import GenerationConfig, WhisperTimeStampLogitsProcessor
from transformers.generation import (
    SuppressTokensAtBeginLogitsProcessor as AtBegin,
    SuppressTokensLogitsProcessor as Suppress,
)

from outrider import SamplingParams, Timestamps
from outrider.sampling import logits_processors
from outrider.sampling.sampling_params import rows
from outrider.tree import from_parents
from outrider.types import Context

torch.set_num_threads(1)
PROMPT = 4


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--nodes", type=int, default=9)
    args.add_argument("--vocab", type=int, default=51_865)
    args.add_argument("--rows", type=int, default=1)
    args.add_argument("--rounds", type=int, default=100)
    given = args.parse_args()
    first = given.vocab - 1501
    rule = Timestamps(no_timestamps_id=first - 1, end_id=first - 107)
    random = torch.Generator().manual_seed(0)
    never = torch.randint(0, first - 107, (88,), generator=random).tolist()
    begin = (220, rule.end_id)
    tree = from_parents([-1, *((n - 1) // 2 for n in range(1, given.nodes))])
    length = PROMPT + 30
    tokens = torch.randint(0, first - 107, (given.rows, 448), generator=random)
    tokens[:, PROMPT] = first
    context = Context(
        tokens,
        torch.full((given.rows,), length),
        length,
        rows([SamplingParams(0)] * given.rows),
    )
    nodes = torch.randint(first - 700, given.vocab, (given.rows, given.nodes), generator=random)
    nodes = nodes.where(torch.rand(nodes.shape, generator=random) < 0.3, nodes % (first - 200))
    logits = torch.randn(given.rows, given.nodes, given.vocab, generator=random) * 3

    ban = dict.fromkeys(never, -torch.inf)
    alone = SamplingParams(timestamps=rule)
    every = SamplingParams(logit_bias=ban, begin_suppress_tokens=begin, timestamps=rule)

    def ours(how: SamplingParams) -> Callable[[], torch.Tensor]:
        prompts, stops = [[1] * PROMPT] * given.rows, [()] * given.rows
        built = logits_processors.build([how] * given.rows, prompts, stops, given.vocab, "cpu")
        assert built is not None
        return lambda: logits_processors.apply(logits, built, context, nodes, tree)

    config = GenerationConfig(eos_token_id=rule.end_id)
    config.no_timestamps_token_id = rule.no_timestamps_id
    config.max_initial_timestamp_index = rule.max_initial
    theirs = [WhisperTimeStampLogitsProcessor(config, begin_index=PROMPT)]
    chain = [AtBegin(begin, PROMPT), Suppress(never), *theirs]
    texts = []
    for row in range(given.rows):
        for node in range(given.nodes):
            path = nodes[row, tree.ancestors_BNN[0, node]]
            texts.append(torch.cat([tokens[row, : length - 1], path])[None])

    def replayed(processors: list) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            made = []
            for text, line in zip(texts, logits.flatten(0, 1), strict=True):
                scores = line[None]
                for processor in processors:
                    scores = processor(text, scores)
                made.append(scores)
            return torch.cat(made).view_as(logits)

        return run

    arms = {
        "a copy of the logits": logits.clone,
        "timestamps": ours(alone),
        "suppress, begin, timestamps": ours(every),
        "transformers: timestamps": replayed(theirs),
        "transformers: suppress, begin, timestamps": replayed(chain),
    }
    names = list(arms)
    for mine, other in ((1, 3), (2, 4)):
        assert torch.equal(arms[names[mine]](), arms[names[other]]())
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(given.rounds):
        for name, run in arms.items():
            began = time.thread_time()
            run()
            times[name].append(1e3 * (time.thread_time() - began))
    print(f"{given.rows} rows of {given.nodes} nodes, vocabulary {given.vocab}, ms of CPU")
    for name, found in times.items():
        print(f"{name:<44} {min(found):7.3f}   median {statistics.median(found):6.3f}")


if __name__ == "__main__":
    main()
