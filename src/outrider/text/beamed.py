"""Answers by beam search: the finished beams as texts."""

from collections.abc import Sequence
from typing import Any

import torch

from outrider.engine.beam_search import Beams
from outrider.engine.beam_search.decode import search
from outrider.engine.beam_search.step import Close
from outrider.engine.engine import Engine
from outrider.engine.request import Request, StopConditions
from outrider.errors import ConfigurationError
from outrider.sampling.sampling_params import SamplingParams
from outrider.stats import RequestStats, Stats
from outrider.text.prompts import EncodedPrompts
from outrider.text.results import Completion, Generation, NearTie
from outrider.text.stop import Stop
from outrider.text.tokens import Detokenizer
from outrider.types import Inputs

#: Gaps between log-probabilities that the order of sums may close, by the model's dtype.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


def beamed(
    engine: Engine,
    tokenizer: Any,
    asked: EncodedPrompts,
    settings: Sequence[SamplingParams],
    limits: Sequence[StopConditions],
    beams: Beams,
    adapters: Sequence[str | None],
) -> Generation:
    """The best `num_return_sequences` beams of each prompt, one prompt after another.

    A completion's `steps` are calls of the target, which all prompts share.
    """
    given: Sequence[Inputs | None] = asked.inputs or [None] * len(asked.prompts)
    every = zip(asked.prompts, settings, limits, given, asked.references, strict=True)
    rows = zip(every, adapters, strict=True)
    requests = [Request(*each, lora_name=name) for each, name in rows]
    most = engine.drafter.shapes[0].max_depth
    with engine.paces.lent(most, beams.num_beams, len(requests)) as pace:
        found = search(engine.target, engine.drafter, requests, beams, pace=pace)
    completions = []
    each_row = zip(requests, found.hypotheses, found.counts.close, strict=True)
    for request, row, close in each_row:
        tie = None
        if close is not None and close.margin < ROUNDING[engine.target.dtype]:
            tie = _tie(close, request.prompt, tokenizer)
        stops = request.limits.stop_ids
        for one in row:
            ids = one.token_ids
            ended = bool(ids) and ids[-1] in stops
            stats = RequestStats(
                prompt_tokens=len(request.prompt), new_tokens=len(ids), steps=found.counts.calls
            )
            stats.seconds = found.seconds
            text = _text(tokenizer, request.prompt, ids[:-1] if ended else ids)
            reason = "stop" if ended else "length"
            if not ended and len(request.prompt) + len(ids) >= engine.target.context:
                reason = "context"
            done = Completion(text, ids, reason, stats, score=one.score, near_tie=tie)
            completions.append(done)
    totals = Stats(engine_steps=found.counts.calls)
    for completion in completions:
        totals.add(completion.stats)
    totals.steps, totals.seconds = found.counts.calls, found.seconds
    return Generation(completions, totals)


def _tie(close: Close, prompt: Sequence[int], tokenizer: Any) -> NearTie:
    kept, dropped = (one.tokens()[len(prompt) :] for one in (close.kept, close.dropped))
    said = [_text(tokenizer, prompt, ids) for ids in (kept, dropped)]
    return NearTie(close.margin, said[0], said[1], kept, dropped)


def _text(tokenizer: Any, prompt: Sequence[int], ids: list[int]) -> str:
    """What is written behind a prompt; nothing without a tokenizer."""
    if tokenizer is None:
        return ""
    words = Detokenizer(tokenizer, (), prompt)
    return words.push(ids) + words.finish()


def check(stops: Sequence[Stop], useless: dict[str, object]) -> None:
    """Refuse what a beam search has no use for: ConfigurationError."""
    named = [name for name, value in useless.items() if value is not None]
    if named:
        raise ConfigurationError(
            f"a beam search has no use for {', '.join(named)}; got beams=..., too; leave "
            f"{'it' if len(named) == 1 else 'them'} out (Beams has num_return_sequences of its own)"
        )
    if any(stop.strings for stop in stops):
        raise ConfigurationError(
            "stop strings end texts between tokens, which no beam's score says; got strings in "
            "Stop for a beam search; use token_ids, or cut the texts"
        )
