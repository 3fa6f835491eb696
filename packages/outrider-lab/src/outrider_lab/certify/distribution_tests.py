"""Conditional tests, pooled over contexts: set tests and the randomised PIT.

Under the null hypothesis every emitted token x_t follows p_t given everything before it. A set A_t
chosen from the laws alone then holds x_t with probability p_t(A_t), and

    Z = sum (1[x_t in A_t] - p_t(A_t)) / sqrt(sum p_t(A_t) (1 - p_t(A_t)))

is standard normal, whatever the contexts are (a martingale). The PIT u_t = F_t(x_t-) + U p_t(x_t),
with the vocabulary in any order chosen from the laws, is uniform. Two orders and four sets, since
no single one finds every mistake: {q > p} finds a wrong residual or a rule that keeps too much,
the draft's top tokens find a draft that is not what it says, {p/4 < q < p} a residual that is drawn
with the draft's noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.testing.runs import chi_square_tail
from outrider_lab.certify.report import Test
from outrider_lab.certify.statistics import (
    Surplus,
    kolmogorov_tail,
    noncentrality,
    uniform_distance,
)

# Marginal test: the first token of many runs of one prompt against its exact law (G-test).

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
    observed = law.new_zeros(size)
    expected = observed.scatter_add(0, where, law) * count
    observed.scatter_add_(0, where[torch.tensor(tokens, device="cpu")], law.new_ones(count))
    name = "marginal"
    if size < 2:
        detail = "one token has all the probability: inconclusive"
        return Test(name, 0.0, None, count, True, detail, conclusive=False)
    seen = observed > 0
    g = 2 * float((observed[seen] * (observed[seen] / expected[seen]).log()).sum())
    p_value = chi_square_tail(g, size - 1)
    found = math.sqrt(noncentrality(size - 1, level, power) / count)
    detail = f"first token in {size} bins; finds w = {found:.3f}"
    return Test(name, g, p_value, count, p_value >= level, detail, found)


SETS = ("set q > p", "set p/4 < q < p", "set top 1 of q", "set top 8 of q")
ORDERS = ("PIT by q / p", "PIT by q")
TOP = 8


@dataclass
class PooledTest:
    """Sums over all tokens seen so far."""

    sums: dict[str, Surplus] = field(default_factory=lambda: {name: Surplus() for name in SETS})
    ranks: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in ORDERS})
    tokens: int = 0
    overlap: float = 0.0  #: sum of sum min(p, q), for the report

    def add(
        self,
        law_BTV: Tensor,
        guess_BTV: Tensor,
        token_BT: Tensor,
        valid_BT: Tensor,
        uniform_BT: Tensor,
    ) -> None:
        """Count these tokens; `uniform_BT` randomises the PIT."""
        self.tokens += int(valid_BT.sum())
        shared = torch.minimum(law_BTV, guess_BTV).sum(-1)
        self.overlap += float(shared[valid_BT].sum())
        top = guess_BTV.topk(min(TOP, guess_BTV.shape[-1]), -1)
        token = token_BT[..., None]

        surplus = guess_BTV > law_BTV
        self._set(SETS[0], (law_BTV * surplus).sum(-1), surplus.gather(-1, token)[..., 0], valid_BT)
        near = (4 * guess_BTV > law_BTV) & ~surplus
        self._set(SETS[1], (law_BTV * near).sum(-1), near.gather(-1, token)[..., 0], valid_BT)
        for name, count in ((SETS[2], 1), (SETS[3], TOP)):
            ids = top.indices[..., :count]
            there = top.values[..., :count] > 0
            mass = (law_BTV.gather(-1, ids) * there).sum(-1)
            self._set(name, mass, ((ids == token) & there).any(-1), valid_BT)

        ratio = guess_BTV.log() - law_BTV.log()
        for name, order in ((ORDERS[0], ratio), (ORDERS[1], guess_BTV)):
            here = order.gather(-1, token)
            below = (law_BTV * (order < here)).sum(-1)
            equal = (law_BTV * (order == here)).sum(-1)
            rank = (below + uniform_BT * equal).clamp(0, 1)
            self.ranks[name].append(rank[valid_BT].to("cpu", torch.float64))

    def _set(self, name: str, mass_BT: Tensor, inside_BT: Tensor, valid_BT: Tensor) -> None:
        mass = mass_BT[valid_BT].double().clamp(0, 1)
        self.sums[name].add(inside_BT[valid_BT], mass, mass * (1 - mass))

    @property
    def alpha(self) -> float:
        """Mean sum min(p, q) over all prefixes."""
        return self.overlap / max(self.tokens, 1)

    def results(self, level: float, power: float) -> list[Test]:
        """One test per set and order, each at this level."""
        sets = [self.sums[name].test(name, level, power, "token") for name in SETS]
        return sets + [self._rank_test(name, level) for name in ORDERS]

    def _rank_test(self, name: str, level: float) -> Test:
        values = torch.cat(self.ranks[name])
        distance = uniform_distance(values)
        p_value = kolmogorov_tail(distance, values.numel())
        mean = float(values.mean())
        detail = f"mean rank {mean:.4f} (1/2 if exact)"
        return Test(name, distance, p_value, values.numel(), p_value >= level, detail)
