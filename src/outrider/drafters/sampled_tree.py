"""Children drawn without replacement in a tree of fixed shape: Sequoia; RSD-C if it is even.

Gumbel-top-k (Vieira 2014): the k largest of log q + Gumbel are k draws without replacement, in
order. A CPU draws them one by one instead, the same law.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from outrider import ops
from outrider.drafters.shape_tables import Level
from outrider.drafters.shaped import Shaped
from outrider.types import Kind, Laws


@dataclass(frozen=True)
class SampledTree(Shaped):
    """Like `draft_model` with a branching vector, for any shape."""

    name: ClassVar[str] = "sampled_tree"
    drawn: ClassVar[frozenset[Kind]] = frozenset({Kind.WITHOUT})

    def fill(self, law: Laws, level: Level, keys_Bn: Tensor) -> tuple[Tensor, Tensor, Laws]:
        """Draws without replacement, in order."""
        return ops.several(law, keys_Bn, level.most)
