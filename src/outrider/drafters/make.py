"""A drafter with a model from its name and the shape that a user asked for."""

from collections.abc import Callable, Sequence

from outrider.drafters.beam import Beam
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.hub_tree import HubTree
from outrider.drafters.paths import Paths
from outrider.drafters.sampled_tree import SampledTree
from outrider.drafters.static_tree import StaticTree
from outrider.errors import ConfigurationError
from outrider.types import Drafter, LanguageModel

#: Drafters that run a draft model, by what shapes them: a branching vector, or width and depth.
BRANCHING: dict[str, Callable[..., Drafter]] = {
    "draft_model": DraftModel,
    "sampled_tree": SampledTree,
    "hub_tree": HubTree,
    "static_tree": StaticTree,
}
WIDTH: dict[str, Callable[..., Drafter]] = {"beam": Beam, "paths": Paths}
WITH_MODEL = (*BRANCHING, *WIDTH)


def with_model(
    name: str,
    model: LanguageModel,
    *,
    num_speculative_tokens: int,
    branching: Sequence[int] | None = None,
    width: int | None = None,
    coupled: bool = False,
) -> Drafter:
    """`num_speculative_tokens` is the depth; `branching` or `width` make a tree of it.

    Raises ConfigurationError if the drafter has no use for what was given.
    """

    def refuse(what: str, do: str) -> ConfigurationError:
        return ConfigurationError(f"drafter {name!r} takes no {what}; {do}")

    if coupled and name != "draft_model":
        raise refuse("coupled=True", "use drafter='draft_model'")
    if name in WIDTH:
        if branching is not None:
            raise refuse(f"branching; got {tuple(branching)}", "give width and depth instead")
        return WIDTH[name](
            model, *(() if width is None else (width,)), depth=num_speculative_tokens
        )
    if width is not None:
        raise refuse(f"width; got {width}", "give branching, or use drafter='beam'")
    chain = (1,) * num_speculative_tokens if name == "draft_model" else None
    counts = tuple(branching) if branching is not None else chain
    how = {"coupled": coupled} if name == "draft_model" else {}
    return BRANCHING[name](model, *(() if counts is None else (counts,)), **how)
