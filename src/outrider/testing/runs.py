"""Runs and batches for tests: a run's tokens, a batch for steps by hand, restless shapes, laws."""

import random
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Generic

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import TypeVar

from outrider.drafters.tree_drafting import bare
from outrider.engine import step
from outrider.engine.batch import Batch
from outrider.engine.engine import Engine
from outrider.engine.engine_run import EngineRun, Observer
from outrider.engine.request import Request, StopConditions
from outrider.sampling.sampling_params import SamplingParams
from outrider.tree import shallower
from outrider.types import (
    PLAIN,
    Context,
    Draft,
    Drafter,
    DraftShape,
    Inputs,
    LanguageModel,
    Scores,
    Verdict,
)

M = TypeVar("M", default=Any)  #: what a drafter keeps of rows


class Restless(Generic[M]):
    """A drafter that drafts in another of its shapes in every step, and less in some rows.

    Both are chosen at random, before anything is drawn. `seen` holds the keys of the shapes.
    """

    def __init__(self, drafter: Drafter[M], seed: int = 0) -> None:
        self.drafter, self.random = drafter, random.Random(seed)
        self.name, self.kinds, self.shapes = drafter.name, drafter.kinds, drafter.shapes
        self.aux_layers = drafter.aux_layers
        self.seen: set[Hashable] = set()

    def open(self, context: Context, capacity: int) -> M:
        """The drafter's memory."""
        return self.drafter.open(context, capacity)

    def propose(self, memory: M, context: Context, shape: DraftShape) -> Draft:
        """Its draft in a shape of ours or none, whatever was asked for."""
        shape = self.random.choice((*self.shapes, PLAIN))
        self.seen.add(shape.key)
        if shape == PLAIN:
            return bare(context)
        draft = self.drafter.propose(memory, context, shape)
        rows = range(context.length_B.shape[0])
        depths = [self.random.randint(0, shape.max_depth) for _ in rows]
        return shallower(draft, torch.tensor(depths, device="cpu"))

    def commit(
        self, memory: M, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """The drafter learns."""
        self.drafter.commit(memory, context, draft, verdict, scores)


def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    limits: StopConditions | Sequence[StopConditions] | None = None,
    *,
    capacity: int | None = None,
    observe: Observer | None = None,
    inputs: Sequence[Inputs | None] | None = None,
    references: Sequence[Sequence[int]] | None = None,
) -> tuple[list[list[int]], EngineRun]:
    """All tokens of a run, by row, and the run itself; greedy and 24 tokens if nothing is said.

    >>> from outrider import Root
    >>> from outrider.testing import pair
    >>> texts, run = decode(Engine(pair()[0], Root()), [[3, 1]], limits=StopConditions(4))
    >>> len(texts[0]), run.stats.new_tokens
    (4, 4)
    """
    run = engine.run(
        prompts,
        sampling or SamplingParams(0),
        limits or StopConditions(24),
        capacity=capacity,
        observe=observe,
        inputs=inputs,
        references=references,
    )
    rows: list[list[int]] = [[] for _ in prompts]
    for block in run:
        rows[block.request_id].extend(block.token_ids)
    return rows, run


def finished(
    engine: Engine, max_num_seqs: int, requests: Sequence[Request]
) -> tuple[list[list[int]], EngineRun]:
    """All tokens of requests that wait for so few rows, and the run."""
    run = EngineRun(engine, max_num_seqs, 128)
    run.submit_all(requests)
    run.close()
    texts: list[list[int]] = [[] for _ in requests]
    for block in run:
        texts[block.request_id] += block.token_ids
    return texts, run


def begun(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[SamplingParams],
    capacity: int = 128,
    *,
    limit: int | Sequence[int] = 60,
    stop_ids: Sequence[Sequence[int]] | None = None,
) -> Batch:
    """A batch whose rows end at these committed lengths, for steps by hand."""
    limits = [limit] * len(prompts) if isinstance(limit, int) else limit
    stops = stop_ids or [()] * len(prompts)
    requests = [
        Request(prompt, how, StopConditions(most - len(prompt), tuple(ids)))
        for prompt, how, most, ids in zip(prompts, settings, limits, stops, strict=True)
    ]
    return step.begin(target, drafter, requests, capacity)


# The law of short texts that an engine emits, by chi-square with fixed seeds.

USUAL = SamplingParams(1.0)
LEAST = 8.0  #: texts that are expected less often are counted together


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X >= statistic) for a chi-square variable.

    >>> round(chi_square_tail(27.877, 9), 5)
    0.001
    """
    if freedom < 1:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64, device="cpu")
    return float(torch.special.gammaincc(half[0], half[1]))


def text_law(
    model: PreTrainedModel, prompt: Sequence[int], length: int, sampling: SamplingParams = USUAL
) -> Tensor:
    """Probability of every text of `length` tokens, [V ** length] in float64.

    From transformers' own forward over every prefix, at the temperature and top_k of `sampling`
    (its other fields are left aside); the first token counts most in the index.

    >>> from outrider.testing import llama
    >>> text_law(llama(vocab_size=4), (1, 3), 2).shape
    torch.Size([16])
    """
    texts = list(product(range(model.config.vocab_size), repeat=length))
    ids = torch.tensor([(*prompt, *text) for text in texts], device="cpu")
    with torch.inference_mode():
        logits = model(ids).logits[:, len(prompt) - 1 : -1].double() / sampling.temperature
    if sampling.top_k:
        floor = logits.topk(sampling.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    each: Tensor = logits.softmax(-1).gather(2, ids[:, len(prompt) :, None])[..., 0].prod(1)
    return each


def p_value(
    engine: Engine,
    law: Tensor,
    prompt: Sequence[int],
    length: int,
    seeds: int,
    sampling: SamplingParams = USUAL,
    *,
    reference: Sequence[int] = (),
    inputs: Inputs | None = None,
) -> tuple[float, EngineRun]:
    """Chance of texts as far from `law` as those of the seeds 0, 1, ..., and the run.

    `law` is `text_law` of the engine's target under `sampling`. A text that has no probability
    makes it 0. Every text has the same `reference` to copy from, and reads the same `inputs`.
    """
    rows = [replace(sampling, seed=seed) for seed in range(seeds)]
    texts, run = decode(
        engine,
        [prompt] * seeds,
        rows,
        StopConditions(length),
        references=[reference] * seeds,
        inputs=None if inputs is None else [inputs] * seeds,
    )
    vocab = engine.target.vocab_size
    place = torch.tensor([vocab**at for at in reversed(range(length))], device="cpu")
    numbers = (torch.tensor(texts, device="cpu") * place).sum(1)
    seen = torch.bincount(numbers, minlength=vocab**length).double()
    expected = law * seeds
    if seen[expected == 0].any():
        return 0.0, run
    rare = expected < LEAST
    if expected[rare].sum() > 0:
        seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    else:
        seen, expected = seen[~rare], expected[~rare]
    statistic = float(((seen - expected) ** 2 / expected).sum())
    return chi_square_tail(statistic, len(seen) - 1), run
