"""Classifier-free guidance: two rows of one model whose logits are combined (Ho and Salimans 2022).

    guided logits = unconditional + guidance_scale (conditional - unconditional)

The second row reads other tokens where the prompt has conditions: a null class for a class, padding
for words. Everything behind is written for both. The law that this gives is the target's as any
model's is: drafters, trees, rules and samplers know nothing of it, and stay exact.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider import arguments
from outrider.errors import ConfigurationError
from outrider.models.model_wrapper import ModelWrapper
from outrider.types import Cache, Inputs, LanguageModel, Nodes, Output


def twice(rows: Iterable[int]) -> list[int]:
    """The two rows behind each of these: the conditional one, then the other."""
    return [2 * row + half for row in rows for half in (0, 1)]


class GuidedCache:
    """A cache of two rows for each. A `RowStore`."""

    def __init__(self, own: Cache) -> None:
        self.own = own

    @property
    def capacity(self) -> int:
        """Slots of a row."""
        return self.own.capacity

    def take(self, rows: Sequence[int]) -> "GuidedCache":
        """A copy of these rows, in this order."""
        return GuidedCache(self.own.take(twice(rows)))

    def put(self, into: Sequence[int], other: "GuidedCache") -> "GuidedCache":
        """The rows of `other` at these rows."""
        return GuidedCache(self.own.put(twice(into), other.own))

    def narrow(self, rows: int) -> "GuidedCache":
        """The first rows."""
        return GuidedCache(self.own.narrow(2 * rows))


class GuidedModel(ModelWrapper[LanguageModel]):
    """A `LanguageModel` whose law is guided: twice the rows in every call of `model`.

    guidance_scale  1 is the model's own law, more follows the prompt further
    unconditional   what the second row reads in place of tokens: class ids to the null class, for
                    instance; other tokens it reads as they are, what is written among them

    A draft model may be guided, too, by any scale: that is a matter of speed. Heads are not, as
    they read the states of one row. Raises ConfigurationError for tokens that are none.

    >>> from outrider.testing import pair
    >>> GuidedModel(pair()[0], 3.0, {5: 0}).guidance_scale
    3.0
    """

    def __init__(
        self, model: LanguageModel, guidance_scale: float, unconditional: Mapping[int, int]
    ) -> None:
        if model.aux_layers or not model.follows:
            raise ConfigurationError(
                "a model that reads another model's states cannot be guided; got "
                f"{type(model).__name__}; guide a draft model, or draft without"
            )
        super().__init__(model)
        what, do = "a finite number", "1 is the model's own law"
        scale = arguments.number("guidance_scale", guidance_scale, what, do)
        if not abs(scale) < float("inf"):
            arguments.refuse("guidance_scale", what, guidance_scale, do)
        wrong = [t for pair in unconditional.items() for t in pair if not 0 <= t < self.vocab_size]
        if wrong:
            raise ConfigurationError(
                f"unconditional maps tokens to tokens; got {wrong[:3]} for a vocabulary of "
                f"{self.vocab_size}; leave out what the second row reads unchanged"
            )
        self.guidance_scale = float(scale)
        self._other_V = torch.arange(self.vocab_size, device=model.device)
        for token, other in unconditional.items():
            self._other_V[token] = other

    def open(self, rows: int, capacity: int, inputs: Inputs | None = None) -> GuidedCache:
        """An empty cache."""
        both = None if inputs is None else inputs.take(twice(range(rows)))
        return GuidedCache(self.model.open(2 * rows, capacity, both))

    def forward(
        self,
        cache: GuidedCache,
        nodes: Nodes,
        *,
        last: int | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> Output:
        """The guided logits [B, Q, V]; the states are those of the conditional rows."""
        tokens = nodes.tokens_BQ
        both = torch.stack((tokens, self._other_V[tokens]), 1).flatten(0, 1)
        rest = (doubled(table, len(tokens)) for table in nodes[1:])
        output = self.model.forward(cache.own, Nodes(both, *rest), last=last, aux_layers=aux_layers)
        logits = output.known_BQK.float() if output.known_BQK.itemsize < 4 else output.known_BQK
        given, without = logits[0::2], logits[1::2]
        guided = without + self.guidance_scale * (given - without)
        guided = torch.where(given == -torch.inf, given, guided)
        hidden = tuple(states[0::2] for states in output.hidden)
        return output._replace(known_BQK=guided, hidden=hidden)

    def keep(self, cache: GuidedCache, first_B: Tensor, path_BD: Tensor) -> None:
        """Move the accepted paths' entries next to their roots, in both rows."""
        rows = len(first_B)
        self.model.keep(cache.own, doubled(first_B, rows), doubled(path_BD, rows))

    def learn(self, cache: Any, *args: Any) -> None:
        """There is nothing to be told: it reads no other model's states."""


def doubled(table: Tensor, rows: int) -> Tensor:
    """Each of `rows` rows twice; a row that all share stays one.

    >>> doubled(torch.tensor([[1], [2]]), 2).tolist()
    [[1], [1], [2], [2]]
    """
    return table if table.shape[0] == 1 and rows > 1 else table.repeat_interleave(2, 0)
