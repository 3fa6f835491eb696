"""Runs and batches for tests: all tokens of a run, a batch for steps by hand, restless shapes."""

import random
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from outrider.drafters.root import bare
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


class Restless:
    """A drafter that drafts in another of its shapes in every step, and less in some rows.

    Both are chosen at random, before anything is drawn. `seen` holds the keys of the shapes.
    """

    def __init__(self, drafter: Drafter, seed: int = 0) -> None:
        self.drafter, self.random = drafter, random.Random(seed)
        self.name, self.kinds, self.shapes = drafter.name, drafter.kinds, drafter.shapes
        self.taps = drafter.taps
        self.seen: set[Hashable] = set()

    def open(self, context: Context, capacity: int) -> Any:
        """The drafter's memory."""
        return self.drafter.open(context, capacity)

    def propose(self, memory: Any, context: Context, shape: DraftShape) -> Draft:
        """Its draft in a shape of ours or none, whatever was asked for."""
        shape = self.random.choice((*self.shapes, PLAIN))
        self.seen.add(shape.key)
        if shape == PLAIN:
            return bare(context)
        draft = self.drafter.propose(memory, context, shape)
        rows = range(context.length_B.shape[0])
        return shallower(
            draft, torch.tensor([self.random.randint(0, shape.max_depth) for _ in rows])
        )

    def commit(
        self, memory: Any, context: Context, draft: Draft, verdict: Verdict, scores: Scores
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
        rows[block.row].extend(block.token_ids)
    return rows, run


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
