"""The law of short texts that an engine emits, by chi-square with fixed seeds."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.engine import Engine
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import StopConditions
from outrider.sampling.sampling_params import SamplingParams
from outrider.testing.runs import decode
from outrider.types import Inputs

USUAL = SamplingParams(1.0)
LEAST = 8.0  #: texts that are expected less often are counted together


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X >= statistic) for a chi-square variable.

    >>> round(chi_square_tail(27.877, 9), 5)
    0.001
    """
    if freedom < 1:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
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
    ids = torch.tensor([(*prompt, *text) for text in texts])
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
    place = torch.tensor([vocab**at for at in reversed(range(length))])
    seen = torch.bincount((torch.tensor(texts) * place).sum(1), minlength=vocab**length).double()
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
