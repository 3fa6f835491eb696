"""Tiny Llama models from configurations: no file, no network, the same weights every time."""

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider import DraftModel, Engine, Limits, PromptLookup, Root, Sampling
from outrider.drafters import Beam, DynamicTree, HubTree, Paths, SampledTree, StaticTree
from outrider.drafters.ngram_table import NgramTable, count
from outrider.drafters.shapes import optimal
from outrider.engine import step
from outrider.engine.request import Request
from outrider.models import CausalModel, LlamaRunner, TransformersRunner
from outrider.tree import shallower

VOCAB = 32
PROMPTS = ([3, 1, 4, 1, 5, 9], [2, 7], [8, 2, 8, 1, 8, 2, 8, 1, 8], [6], [1, 2, 3, 1, 2, 3, 1, 2])


def llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """A random model whose laws are peaked enough to disagree about."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(sizes | settings))).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases are not left at 1 and 0
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def perturbed(model: LlamaForCausalLM, size: float, seed: int = 1) -> LlamaForCausalLM:
    """A copy with noise on every weight: a draft model that often, not always, agrees."""
    torch.manual_seed(seed)
    copy = LlamaForCausalLM(model.config).eval()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(size * parameter.std() * torch.randn_like(parameter))
    return copy


RUNNERS = {"lean": lambda m: LlamaRunner(m, False), "transformers": TransformersRunner}


@lru_cache
def pair(
    size: float = 0.12, vocab: int = VOCAB, runner: str = "lean", context: int = 256
) -> tuple[CausalModel, CausalModel]:
    """A target and a draft model that agrees more or less, by the size of its noise."""
    target = llama(vocab_size=vocab, max_position_embeddings=context)
    made = [CausalModel(RUNNERS[runner](m)) for m in (target, perturbed(target, size))]
    return made[0], made[1]


#: A drafter of every kind and shape; contract tests check that none that is registered is missing.
DRAFTERS = {
    "root": lambda small: Root(),
    "prompt_lookup": lambda small: PromptLookup(4),
    "n-gram table": lambda small: NgramTable(count(list(range(VOCAB)) * 3, VOCAB), 3),
    "chain": lambda small: DraftModel(small, (1, 1, 1, 1)),
    "tree": lambda small: DraftModel(small, (3, 2, 1)),
    "wide tree": lambda small: DraftModel(small, (4, 2)),
    "sampled tree": lambda small: SampledTree(small, parents=optimal((0.6, 0.2, 0.1), 8, 3)),
    "beam": lambda small: Beam(small, 3, 3),
    "paths": lambda small: Paths(small, 3, 3),
    "paths of two models": lambda small: Paths(small, 3, 3, more=(small,)),
    "hub tree": lambda small: HubTree(small, (3, 2, 1)),
    "static tree": lambda small: StaticTree(small, (3, 2, 1)),
    "dynamic tree": lambda small: DynamicTree(small, 7, 4, 3),
    "coupled chain": lambda small: DraftModel(small, (1, 1, 1, 1), coupled=True),
    "coupled tree": lambda small: DraftModel(small, (2, 2, 1), coupled=True),
    "coupled dynamic tree": lambda small: DynamicTree(small, 7, 4, 3, coupled=True),
}


class Restless:
    """A drafter that drafts in another of its shapes in every step, and less in some rows.

    Both are chosen at random, before anything is drawn.
    """

    hidden = False

    def __init__(self, drafter: Any, seed: int = 0) -> None:
        self.drafter, self.random = drafter, random.Random(seed)
        self.name, self.kinds, self.shapes = drafter.name, drafter.kinds, drafter.shapes
        self.seen: set[Any] = set()

    def open(self, context: Any, capacity: int) -> Any:
        return self.drafter.open(context, capacity)

    def propose(self, memory: Any, context: Any, shape: Any) -> Any:
        shape = self.random.choice(self.shapes)
        self.seen.add(shape.key)
        draft = self.drafter.propose(memory, context, shape)
        rows = range(context.length_B.shape[0])
        return shallower(
            draft, torch.tensor([self.random.randint(0, shape.max_depth) for _ in rows])
        )

    def commit(self, memory: Any, context: Any, draft: Any, verdict: Any, scores: Any) -> None:
        self.drafter.commit(memory, context, draft, verdict, scores)


def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Any = None,
    limits: Any = None,
    **how: Any,
) -> tuple[list[list[int]], Any]:
    """All tokens of a run, by row, and the run itself."""
    run = engine.run(prompts, sampling or Sampling(0), limits or Limits(24), **how)
    rows: list[list[int]] = [[] for _ in prompts]
    for block in run:
        rows[block.row].extend(block.token_ids)
    return rows, run


def begun(
    target: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[Sampling],
    capacity: int = 128,
    *,
    limit: int | Sequence[int] = 60,
    stop_ids: Sequence[Sequence[int]] | None = None,
) -> Any:
    """A batch whose rows end at these committed lengths, for steps by hand."""
    limits = [limit] * len(prompts) if isinstance(limit, int) else limit
    stops = stop_ids or [()] * len(prompts)
    requests = [
        Request(prompt, how, Limits(most - len(prompt), tuple(ids)))
        for prompt, how, most, ids in zip(prompts, settings, limits, stops, strict=True)
    ]
    return step.begin(target, drafter, requests, capacity)
