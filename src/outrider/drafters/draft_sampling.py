"""A draft's law with a temperature and filters of its own.

A draft may be drawn from any law, if that is the law it declares. The best one is seldom the
target's setting applied to the draft model: at a high temperature a colder draft is often closer to
the target, and a narrow one wastes no draws on what will be refused. Greedy rows stay greedy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from outrider import arguments
from outrider.models.model_wrapper import capturable
from outrider.row_params import SamplingRows
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import Context, Draft, Drafter, DraftShape, DrawKind, Scores, Verdict


class Warp(NamedTuple):
    """Temperature and filters in place of the rows' own; None leaves a row's as it is.

    Raises ConfigurationError, by `checked`, for what `SamplingParams` refuses and for temperature
    0.

    >>> Warp(temperature=0.7, top_k=20).checked().top_k
    20
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    @classmethod
    def given(cls, options: Mapping[str, object]) -> "Warp":
        """What a user gives by name; `checked` says whether it can be."""
        return cls(**options)  # type: ignore[arg-type]

    def checked(self) -> "Warp":
        """The same as Python's numbers."""
        given = {name: value for name, value in self._asdict().items() if value is not None}
        how = SamplingParams(**given)
        if self.temperature is not None and not how.temperature:
            do = "use drafter='static_tree' for a draft of the most probable tokens"
            arguments.refuse("a draft's temperature", "above 0", self.temperature, do)
        return Warp(**{name: vars(how)[name] for name in given})

    def of(self, rows: SamplingRows) -> SamplingRows:
        """The rows with what is given here, but for greedy ones."""
        hot_B = torch.isinf(rows.inverse_temperature_B)
        if self.temperature is not None:
            inverse_B = torch.where(hot_B, torch.inf, 1.0 / self.temperature)
            rows = rows._replace(inverse_temperature_B=inverse_B)
        if self.top_k is not None:
            top_k_B = torch.where(hot_B, 0, self.top_k)
            rows = rows._replace(top_k_B=top_k_B, most_top_k=self.top_k, all_top_k=self.top_k > 0)
        if self.top_p is not None:
            top_p_B = torch.where(hot_B, 1.0, self.top_p)
            rows = rows._replace(top_p_B=top_p_B, any_top_p=self.top_p < 1)
        if self.min_p is not None:
            min_p_B = torch.where(hot_B, 0.0, self.min_p)
            rows = rows._replace(min_p_B=min_p_B, any_min_p=self.min_p > 0)
        return rows


@dataclass(frozen=True)
class Tempered:
    """A drafter that draws, under a temperature and filters of its own.

    >>> Tempered(DraftModel(model), Warp(temperature=0.8))                   # doctest: +SKIP
    """

    drafter: Drafter
    warp: Warp

    def __post_init__(self) -> None:
        object.__setattr__(self, "warp", self.warp.checked())

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def kinds(self) -> frozenset[DrawKind]:
        return self.drafter.kinds

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        return self.drafter.shapes

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.drafter.aux_layers

    @property
    def capturable(self) -> bool:
        return capturable(self.drafter)

    def open(self, context: Context, capacity: int) -> Any:
        return self.drafter.open(context, capacity)

    def propose(self, memory: object, context: Context, shape: DraftShape) -> Draft:
        """Its tree, drawn from the law that is declared: the draft's under `warp`."""
        own = context._replace(sampling=self.warp.of(context.sampling))
        return self.drafter.propose(memory, own, shape)

    def commit(
        self, memory: object, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        self.drafter.commit(memory, context, draft, verdict, scores)
