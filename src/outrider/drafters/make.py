"""A drafter with a model from its name and the shape that a user asked for."""

from collections.abc import Callable, Sequence
from typing import Any

from outrider.drafters import asked, shapes
from outrider.drafters.beam import Beam
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.dynamic_tree import DynamicTree, candidates, fits
from outrider.drafters.hub_tree import HubTree
from outrider.drafters.paths import Paths
from outrider.drafters.prompt_lookup import PromptLookup
from outrider.drafters.sampled_tree import SampledTree
from outrider.drafters.static_tree import StaticTree
from outrider.errors import ConfigurationError
from outrider.types import Drafter, LanguageModel

#: Drafters that run a draft model, by what shapes them: a branching vector, any tree of fixed
#: shape, width and depth, or the draft's own confidence.
CHAIN: dict[str, Callable[..., Drafter]] = {"draft_model": DraftModel}
SHAPED: dict[str, Callable[..., Drafter]] = {
    "sampled_tree": SampledTree,
    "hub_tree": HubTree,
    "static_tree": StaticTree,
}
WIDTH: dict[str, Callable[..., Drafter]] = {"beam": Beam, "paths": Paths}
DYNAMIC: dict[str, Callable[..., Drafter]] = {"dynamic_tree": DynamicTree}
WITH_MODEL = (*CHAIN, *SHAPED, *WIDTH, *DYNAMIC)
#: What each of them has a use for besides its depth.
USES = {
    **dict.fromkeys(CHAIN, ("branching", "coupled")),
    **dict.fromkeys(SHAPED, ("branching", "acceptance", "total_tokens")),
    **dict.fromkeys(WIDTH, ("width",)),
    **dict.fromkeys(DYNAMIC, ("width", "total_tokens", "coupled")),
}
#: Children per level of a tree whose shape nobody asked for, at most as deep as was asked for.
USUAL = (3, 2, 2, 1)
OTHERS = {
    "branching": "width and depth shape drafter='beam'; drafter='dynamic_tree' takes total_tokens",
    "width": "give branching, or use drafter='beam'",
    "total_tokens": "use drafter='dynamic_tree', or give branching",
    "acceptance": "use drafter='static_tree', 'sampled_tree' or 'hub_tree'",
    "coupled": "use drafter='draft_model' or 'dynamic_tree'",
}


def with_model(
    name: str,
    model: LanguageModel,
    *,
    num_speculative_tokens: int | None = None,
    branching: Sequence[int] | None = None,
    width: int | None = None,
    total_tokens: int | None = None,
    acceptance: Sequence[float] | None = None,
    coupled: bool = False,
    more: Sequence[LanguageModel] = (),
) -> Drafter:
    """A drafter by name; every option is used or refused.

    num_speculative_tokens  the depth: tokens of a chain, a path, or the longest path of a tree;
                            None: the number of `branching` factors, 5 levels of a dynamic tree,
                            else 4
    branching               children per level; its length is the depth
    width                   paths of "beam" and "paths"; of "dynamic_tree" the nodes expanded per
                            level and the children of each (EAGLE-2's top_k)
    total_tokens            drafted tokens in all: of "dynamic_tree" (EAGLE-2's total_tokens;
                            None: 16 where width and depth allow it), or of the best shape for
                            `acceptance`
    acceptance              chance that the k-th child of a node is the one that is kept: the tree
                            of fixed shape with the most expected tokens (`shapes.optimal`)
    coupled                 draw with the target's noise
    more                    further draft models of "paths", which share its paths evenly

    Raises ConfigurationError if the drafter has no use for what was given, or two of them disagree.
    """
    shape = asked.shape(
        num_speculative_tokens=num_speculative_tokens,
        branching=branching,
        width=width,
        total_tokens=total_tokens,
        acceptance=acceptance,
    )
    depth = shape.pop("num_speculative_tokens")
    branching, width, total_tokens, acceptance = shape.values()
    given: dict[str, Any] = {**shape, "coupled": coupled or None}
    if more and name != "paths":
        raise ConfigurationError(
            f"drafter {name!r} takes one draft model; got {1 + len(more)}; use drafter='paths'"
        )
    for option, value in given.items():
        if value is not None and option not in USES[name]:
            raise ConfigurationError(
                f"drafter {name!r} takes no {option}; got {option}={value!r}; {OTHERS[option]}"
            )
    if branching is not None and depth is not None and len(branching) != depth:
        raise ConfigurationError(
            f"the depth of a tree is the length of its branching; got branching={branching} "
            f"and num_speculative_tokens={depth}; leave num_speculative_tokens out"
        )
    if name in DYNAMIC:
        depth = DynamicTree.depth if depth is None else depth
        few = DynamicTree.top_k if width is None else width
        if total_tokens is None:  # the usual number, if a tree of this depth and width can have it
            total_tokens = max(depth, min(DynamicTree.total_tokens, candidates(depth, few)))
        fits(total_tokens, depth, few, model.vocab_size, ("num_speculative_tokens", "width"))
        return DYNAMIC[name](model, total_tokens, depth, few, coupled)
    if name in WIDTH:
        if more and (Paths.count if width is None else width) <= len(more):
            raise ConfigurationError(
                f"every draft model needs a path; got {1 + len(more)} models for "
                f"{Paths.count if width is None else width} paths; give width={1 + len(more)}"
            )
        how: dict[str, Any] = {"more": tuple(more)} if more else {}
        return WIDTH[name](model, *(() if width is None else (width,)), depth=depth or 4, **how)
    if acceptance is not None or total_tokens is not None:
        return SHAPED[name](model, parents=_optimal(branching, acceptance, total_tokens, depth))
    if branching is not None:
        counts = branching
    elif name in CHAIN:
        counts = (1,) * (depth or 4)
    else:
        counts = (USUAL + (1,) * (depth or 0))[: depth or len(USUAL)]
    if name in CHAIN:
        return CHAIN[name](model, counts, coupled=coupled)
    return SHAPED[name](model, counts)


def prompt_lookup(
    num_speculative_tokens: int | None = None, ngram: tuple[int, int] | None = None
) -> PromptLookup:
    """Prompt lookup with what was asked for, and its own defaults for the rest.

    >>> prompt_lookup(ngram=(2, 3)).num_speculative_tokens
    8
    """
    usual = PromptLookup()
    sizes = (usual.least_ngram, usual.most_ngram) if ngram is None else asked.ngram(ngram)
    depth = asked.depth(num_speculative_tokens) or usual.num_speculative_tokens
    return PromptLookup(depth, most_ngram=sizes[1], least_ngram=sizes[0])


def _optimal(
    branching: Sequence[int] | None,
    acceptance: Sequence[float] | None,
    total_tokens: int | None,
    depth: int | None,
) -> tuple[int, ...]:
    if branching is not None or acceptance is None or total_tokens is None:
        raise ConfigurationError(
            "the best shape follows from acceptance and total_tokens, without branching; got "
            f"acceptance={acceptance!r}, total_tokens={total_tokens!r}, branching={branching!r}; "
            "give both, and num_speculative_tokens to limit the depth"
        )
    return shapes.optimal(acceptance, total_tokens + 1, depth or total_tokens)
