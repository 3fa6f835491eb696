"""Marginal test: the first token of many runs of one prompt against its exact law (G-test)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.certify.report import Test
from outrider.certify.statistics import chi_square_tail, noncentrality

LEAST = 5.0  #: smallest expected count of a bin


def bins(law_V: Tensor, samples: int, most: int = 50) -> Tensor:
    """A bin for each token, [V]: the likeliest tokens alone, the rest together."""
    order = law_V.argsort(descending=True)
    alone = min(int((law_V * samples >= LEAST).sum()), most - 1)
    where = torch.full_like(order, alone)
    where[order[:alone]] = torch.arange(alone, device=order.device)
    rest = float(law_V[order[alone:]].sum()) * samples
    if rest < LEAST and alone > 0:
        where[where == alone] = alone - 1
    return where


def test(law_V: Tensor, tokens: Sequence[int], level: float, power: float) -> Test:
    """G = 2 sum O log(O / E); w is Cohen's effect sqrt(sum (p1 - p0)^2 / p0) that it finds."""
    law = law_V.to("cpu", torch.float64)
    law = law / law.sum()
    count = len(tokens)
    where = bins(law, count)
    size = int(where.max()) + 1
    expected = torch.zeros(size, dtype=torch.float64).scatter_add_(0, where, law) * count
    observed = torch.zeros(size, dtype=torch.float64)
    observed.scatter_add_(0, where[torch.tensor(tokens)], torch.ones(count, dtype=torch.float64))
    name = "marginal"
    if size < 2:
        detail = "one token has all the probability: not judged"
        return Test(name, 0.0, None, count, True, detail, judged=False)
    seen = observed > 0
    g = 2 * float((observed[seen] * (observed[seen] / expected[seen]).log()).sum())
    p_value = chi_square_tail(g, size - 1)
    found = math.sqrt(noncentrality(size - 1, level, power) / count)
    detail = f"first token in {size} bins; finds w = {found:.3f}"
    return Test(name, g, p_value, count, p_value >= level, detail, found)
