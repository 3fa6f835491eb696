"""Children drawn without replacement in a tree of fixed shape: Sequoia; RSD-C if it is even."""

from outrider.drafters.draft_model import DraftModel
from outrider.drafters.shapes import recipe
from outrider.types import LanguageModel


def SampledTree(
    model: LanguageModel,
    counts: tuple[int, ...] = (3, 2, 2, 1),
    parents: tuple[int, ...] | None = None,
) -> DraftModel:
    """`DraftModel` by another name, with the shapes of the other trees.

    >>> SampledTree(model, parents=optimal((0.6, 0.2), 8, 3))                # doctest: +SKIP
    """
    return DraftModel(model, counts, parents=parents, name="sampled_tree")


RECIPE = recipe(SampledTree)
