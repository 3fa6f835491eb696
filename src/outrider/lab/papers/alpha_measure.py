"""Acceptance, cost and speed of drafters: what Leviathan's formulas need, and what they predict."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider import ops, verifiers
from outrider.certify.laws import Text, score
from outrider.drafters import Root
from outrider.drafters.ngram_table import Table
from outrider.engine.engine import Engine
from outrider.engine.request import Limits
from outrider.lab import measure
from outrider.lab.papers import record
from outrider.lab.papers.alpha_drafters import Source
from outrider.lab.papers.toy import METHODS
from outrider.laws.sampling import Sampling
from outrider.text.speculator import Speculator
from outrider.text.stop import Stop
from outrider.types import LanguageModel, Verifier

LENIENCES = (1.0, 0.5, 0.3, 0.1)
Prompts = Sequence[dict[str, str]]


@torch.inference_mode()
def alphas(
    pair: Speculator,
    prompts: Prompts,
    sources: dict[str, Source],
    temperature: float,
    *,
    tokens: int,
    new_tokens: int,
    seed: int,
) -> record.Row:
    """alpha of every drafter at every lenience, on text that the target wrote.

    Above temperature 0: the mean of sum min(p / l, q). At temperature 0: how often the drafter's
    argmax x has p(x) >= l max p, with p at temperature 1; at l = 1 the agreement of the argmaxes.
    """
    plain = Engine(pair.engine.target, Root(), verifiers.get("match"))
    ids = [tuple(pair.tokenizer.encode(p["prompt"].rstrip())[-64:]) for p in prompts]
    levels = torch.tensor(LENIENCES, dtype=torch.float64)
    sums = {name: torch.zeros(len(levels), dtype=torch.float64) for name in sources}
    seen = row = 0
    while seen < tokens:
        batch = [(ids[(row + i) % len(ids)], seed + row + i) for i in range(16)]
        row += len(batch)
        texts = _written(plain, batch, temperature, new_tokens)
        law = ops.probs(score(pair.engine.target, texts, Sampling(temperature or 1.0)).laws)
        law = law.flatten(0, 1)
        seen += len(law)
        for name, source in sources.items():
            guess = source.laws(texts, Sampling(temperature))
            sums[name] += _kept(law, guess, levels, greedy=temperature == 0)
        if temperature == 0 and row >= len(ids):
            break  # greedy text repeats itself from here on
    means = {name: (total / seen).tolist() for name, total in sums.items()}
    return {"alpha": {n: m[0] for n, m in means.items()}, "lenient": means, "tokens": seen}


def _written(
    plain: Engine, batch: Sequence[tuple[tuple[int, ...], int]], temperature: float, new: int
) -> list[Text]:
    how = [Sampling(temperature, seed=s) for _, s in batch]
    found: list[list[int]] = [[] for _ in batch]
    for block in plain.run([p for p, _ in batch], how, Limits(new)):
        found[block.row] += block.token_ids
    return [Text(p, tuple(t), s) for (p, s), t in zip(batch, found, strict=True)]


def _kept(law: Tensor, guess: Tensor, levels: Tensor, *, greedy: bool) -> Tensor:
    """Per lenience, the sum over positions of what is accepted."""
    if greedy:
        token = guess.argmax(-1, keepdim=True)
        share = (law.gather(1, token)[:, 0] / law.amax(-1)).double()
        return (share[:, None] >= levels).double().sum(0)
    return torch.stack([torch.minimum(law / level, guess).sum().double() for level in levels])


@torch.inference_mode()
def two_drafts(
    pair: Speculator,
    prompts: Prompts,
    model: LanguageModel,
    temperature: float,
    *,
    laws: int,
    seed: int,
) -> record.Row:
    """Acceptance of two drafts at one node under each rule, and the bound, on recorded laws."""
    plain = Engine(pair.engine.target, Root(), verifiers.get("match"))
    ids = [tuple(pair.tokenizer.encode(p["prompt"].rstrip())[-64:]) for p in prompts]
    batch = [(ids[i % len(ids)], seed + i) for i in range(16)]
    texts = _written(plain, batch, temperature, -(-laws // 16))
    sides = (
        ops.probs(score(m, texts, Sampling(temperature)).laws).flatten(0, 1).double().numpy()
        for m in (pair.engine.target, model)
    )
    p, q = (side[:laws] / side[:laws].sum(-1, keepdims=True) for side in sides)
    slow = "one: coupled"  # V^2 at V = 4,096
    return {
        name: record.mean_interval(np.asarray(rule(p, q)).tolist())
        for name, rule in METHODS.items()
        if name != slow
    }


def costs(pair: Speculator, prompts: Prompts, sources: dict[str, Source]) -> record.Row:
    """c of each drafter: its time per drafted token over the target's time per plain step."""
    text = prompts[0]["prompt"].rstrip()
    stop, how = Stop(48, token_ids=()), Sampling(1.0, seed=0)
    pair.plain().generate(text, how, stop)
    stats = pair.plain().generate(text, how, stop).stats
    step = stats.score_ms / stats.engine_steps
    found: record.Row = {}
    for name, source in sources.items():
        if isinstance(source.of, Table):
            context = torch.tensor([pair.tokenizer.encode(text)[-8:]])
            started = time.perf_counter()
            for _ in range(50):
                source.of.probs(context)
            found[name] = 1e3 * (time.perf_counter() - started) / 50 / step
            continue
        timed = measure.Timed(source.of)
        chained = pair.using(Source(timed).drafter(4))
        chained.generate(text, how, stop)
        before = timed.seconds
        steps = chained.generate(text, how, stop).stats.engine_steps
        found[name] = 1e3 * (timed.seconds - before) / steps / 4 / step
    return found


def speed(
    pair: Speculator,
    fast: Speculator,
    prompts: Prompts,
    temperature: float,
    *,
    repeats: int,
    new_tokens: int,
    seed: int,
) -> record.Row:
    """Plain over speculative time per token, interleaved."""
    trials = measure.interleave(
        {"plain": pair.plain(), "fast": fast},
        [p["prompt"].rstrip() for p in prompts],
        lambda number: Sampling(temperature, seed=seed + number),
        Stop(new_tokens, token_ids=()),
        repeats,
    )
    ratio = measure.ratio(trials, "fast", "plain")
    return {"median": ratio.median, "low": ratio.low, "high": ratio.high}


def rule_at(temperature: float, lenience: float) -> Verifier:
    """The rule of A.5; at lenience 1 the exact one that it becomes."""
    if lenience == 1:
        return verifiers.get("match" if temperature == 0 else "rejection")
    from outrider.verifiers.lenience import Lenience, LenienceArgmax

    return LenienceArgmax(lenience) if temperature == 0 else Lenience(lenience)
