"""One way of generating, timed: ours plain and speculative, transformers' plain and assisted."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_stages.card import Card
from outrider import DraftModel, Engine, Root, SamplingParams, StopConditions
from outrider.models import adapt
from outrider.stats import GRAPHS, VERBS
from outrider_lab.papers.wagner import WagnerPair, generate

PARTS = (*VERBS, *GRAPHS, "host")
CHAIN, TREE = (1,) * 4, (3, 2, 1)


def ours(
    card: Card,
    pair: WagnerPair,
    counts: tuple[int, ...],
    batch: int,
    tokens: int,
    temperature: float,
    graphs: bool = False,
) -> dict[str, Any]:
    """Our engine with a draft model of this branching; () is plain decoding."""
    drafter = DraftModel(adapt(pair.draft), counts) if counts else Root()
    engine = Engine(adapt(pair.target), drafter, graphs=graphs)
    prompts = [row[0].tolist() for row in rows(pair, batch)]

    def run(length: int) -> Any:
        settings = [SamplingParams(temperature, seed=7 + i) for i in range(len(prompts))]
        work = engine.run(prompts, settings, StopConditions(length))
        for _ in work:
            pass
        return work.stats

    run(min(tokens, 16))
    start = time.perf_counter()
    stats, peak = card.peak_mb(lambda: run(tokens))
    wall = time.perf_counter() - start
    told = stats.as_dict()
    steps = max(stats.engine_steps, 1)
    captures, replays = stats.captures, stats.replays
    parts = {name: told[f"{name}_ms"] / steps for name in PARTS}
    return {
        "tokens_s": stats.tokens_per_second, "wall_s": wall, "new_tokens": stats.new_tokens,
        "steps": stats.engine_steps, "ms_per_step": 1e3 * stats.seconds / steps,
        "ms_of": parts, "alpha": stats.alpha, "prefill_ms": stats.prefill_ms,
        "tokens_per_step": stats.block_efficiency, "peak_mb": peak,
        "captures": captures, "replays": replays, "why_eager": stats.why_eager,
        "replay_ms": stats.graph_ms / replays if replays else None,
    }  # fmt: skip


def theirs(
    card: Card, pair: WagnerPair, assisted: bool, batch: int, tokens: int, temperature: float
) -> dict[str, Any]:
    """transformers' generate; assisted generation takes one request at a time."""

    def run(length: int) -> int:
        torch.manual_seed(7)
        if assisted:
            return len(generate(pair, 0, length, len(CHAIN), 7, temperature))
        return plain(pair, rows(pair, batch), length, temperature)

    run(min(tokens, 16))
    card.wait()
    start = time.perf_counter()
    count, peak = card.peak_mb(lambda: run(tokens))
    card.wait()
    seconds = time.perf_counter() - start
    return {"tokens_s": count / seconds, "wall_s": seconds, "new_tokens": count, "peak_mb": peak}


def rows(pair: WagnerPair, batch: int) -> Sequence[Tensor]:
    """The first prompts, again from the front if they are too few."""
    ids = [prompt.arguments["input_ids"] for prompt in pair.prompts]
    return [ids[i % len(ids)] for i in range(batch)]


def plain(pair: WagnerPair, prompts: Sequence[Tensor], tokens: int, temperature: float) -> int:
    """New tokens of transformers' own sampling; shorter prompts are padded on the left."""
    longest = max(row.shape[1] for row in prompts)
    pad = [longest - row.shape[1] for row in prompts]
    ids = torch.cat(
        [torch.nn.functional.pad(row, (n, 0)) for row, n in zip(prompts, pad, strict=True)]
    )
    mask = torch.ones_like(ids)
    for row, count in enumerate(pad):
        mask[row, :count] = 0
    text = pair.target.generate(
        ids, attention_mask=mask, do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
        max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0,
    )  # fmt: skip
    return int(text.shape[0] * (text.shape[1] - longest))
