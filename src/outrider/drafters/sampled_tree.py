"""Children drawn without replacement in a tree of fixed shape: Sequoia; RSD-C if it is even.

Gumbel-top-k (Vieira 2014): the k largest of log q + Gumbel are k draws without replacement, in
order. A CPU draws them one by one instead, the same law.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.drafters.shape_tables import Level
from outrider.drafters.shaped import Shaped
from outrider.types import Kind, Laws


@dataclass(frozen=True)
class SampledTree(Shaped):
    """Like `draft_model` with a branching vector, for any shape."""

    name: ClassVar[str] = "sampled_tree"
    drawn: ClassVar[frozenset[Kind]] = frozenset({Kind.WITHOUT})

    def fill(self, law: Laws, level: Level, keys_Bn: Tensor) -> tuple[Tensor, Tensor, Laws]:
        """The largest perturbed log-probabilities, in descending order, or draws one by one."""
        vocab = law.logits_BRV.shape[-1]
        drawn = ops.several(law, keys_Bn, min(level.most, vocab))
        if drawn is not None:
            return *drawn, law
        merit = ops.scaled(law) - noise.exponentials(keys_Bn, vocab).log_()
        top = merit.topk(min(level.most, vocab), -1)
        return top.indices, top.values > -torch.inf, law
