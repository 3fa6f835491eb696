"""What to draft in the next step: one of the drafter's shapes, or nothing (docs/planner.md)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outrider.drafters.recipes import DraftOptions, Recipe
from outrider.engine.speculation_policy.adaptive import (
    Adaptive as Adaptive,
    AdaptiveState as AdaptiveState,
)
from outrider.engine.speculation_policy.protocol import (
    BatchView as BatchView,
    FixedLength as FixedLength,
    PlannedRow as PlannedRow,
    Planner as Planner,
    PlanReport as PlanReport,
    StepReport as StepReport,
)
from outrider.errors import UnknownName

PLANNERS: dict[str, Callable[[], Planner[Any]]] = {"fixed": FixedLength, "adaptive": Adaptive}


def named(planner: str | Planner[Any] | None) -> Planner[Any]:
    """The planner of that name; None: `FixedLength`."""
    if not isinstance(planner, str):
        return FixedLength() if planner is None else planner
    if planner not in PLANNERS:
        raise UnknownName("planner", planner, PLANNERS)
    return PLANNERS[planner]()


def chosen(
    planner: str | Planner[Any] | None, recipe: Recipe, options: DraftOptions
) -> tuple[Planner[Any], DraftOptions]:
    """The planner of a drafter, and its options: deep enough for a planner that weighs.

    Who asks for a size and names no planner gets that size in every step.
    """
    usual = "fixed" if options.sized else "adaptive"
    made = named(usual if planner is None else planner)
    if isinstance(made, Adaptive) and not options.sized and recipe.deepest:
        options = replace(options, num_speculative_tokens=recipe.deepest)
    return made, options
