"""Drafts by some of the target's own layers (Draft & Verify, Zhang et al. 2024; LayerSkip, Elhoushi
et al. 2024): no second model, no second cache.

The layers that are left in read the entries that the whole target has written for the text, and
write their own for the tokens that they draft; verification writes those anew. `skip` leaves layers
out, `exit` all from one on. A draft costs its share of the layers, and the output layer once a
token. A model that was not trained for it puts up with few layers less, so this pays for large
models alone: `outrider bench layers` prints what can be gained, and docs/shallow-drafts.md has an
honest table.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from outrider import arguments
from outrider.drafters import recipes, tree_drafting
from outrider.drafters.draft_model import Coupled, Drawn
from outrider.drafters.memory import Forgetful, NoMemory
from outrider.drafters.tree_drafting import Policy, shapes
from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models import layer_subset
from outrider.models.decoder import ModelRunner, TreeDecoder
from outrider.models.hf import TransformersRunner
from outrider.models.llama import LlamaRunner
from outrider.models.model_wrapper import capturable
from outrider.tree import parents_of
from outrider.types import Context, Draft, DraftShape, DrawKind, LanguageModel

# Some decoder layers of a model, run on the model's own cache: no weight and no entry is copied.
#
# What they write lies in the slots of the layers that they are, at and behind the pending token.
# The whole model writes these anew when it scores a draft, so they never outlive it.


def part(model: LanguageModel, layers: Sequence[int]) -> TreeDecoder:
    """These layers of a decoder as a model, for caches of the whole one.

    Raises UnsupportedModel for encoder-decoders and models that score no trees, ConfigurationError
    for layers that are not there.
    """
    if not isinstance(model, TreeDecoder) or model.reads != "text" or not model.trees:
        raise UnsupportedModel(
            "layers of a target run on its cache if it is a decoder that scores trees; got "
            f"{model.runner.name if isinstance(model, TreeDecoder) else type(model).__name__}; "
            "use draft_layers=..., which makes a draft model with a cache of its own"
        )
    numbers, have = tuple(layers), model.runner.layers
    ordered = bool(numbers) and list(numbers) == sorted(set(numbers))
    if not ordered or numbers[0] < 0 or numbers[-1] >= have:
        raise ConfigurationError(
            f"the target has {have} decoder layers, counted from 0; got {numbers}; name some of "
            "them, in their order"
        )
    small = TreeDecoder(_few(model.runner, numbers), model.vocab_size)
    small.of = numbers
    return small


def _few(runner: ModelRunner, numbers: tuple[int, ...]) -> ModelRunner:
    """A runner of these layers."""
    if isinstance(runner, LlamaRunner):
        few = copy.copy(runner)
        few.keep_layers(numbers)
        return few
    assert isinstance(runner, TransformersRunner), "every other runner reads more, or is one"
    return type(runner)(layer_subset.cut(runner.model, numbers))


@dataclass(frozen=True)
class LayerSkip(Forgetful):
    """A chain, or `counts[l]` children below every node of level l, from layers of the target.

    model  runs on the target's cache: `outrider_lab.drafters.layer_skip.part` of the target

    >>> LayerSkip(part(target, (0, 1, 4)), (1, 1, 1))                        # doctest: +SKIP
    """

    model: LanguageModel
    counts: tuple[int, ...] = (1, 1, 1, 1)
    shared_noise: bool = False
    name: ClassVar[str] = "layer_skip"

    def __post_init__(self) -> None:
        counts, _ = shapes.parents_for(self.name, self.counts, None)
        object.__setattr__(self, "counts", counts)

    @property
    def _parents(self) -> tuple[int, ...]:
        return parents_of(self.counts)

    @property
    def policy(self) -> Policy:
        """As a draft model's."""
        return Coupled() if self.shared_noise else Drawn()

    @property
    def capturable(self) -> bool:
        """Whether the target is."""
        return capturable(self.model)

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """Greedy rows place their children."""
        return frozenset({DrawKind.FIXED, *self.policy.drawn})

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """The tree, and cut at each depth."""
        return shapes.of_tree(self._parents)

    def propose(self, memory: NoMemory, context: Context, shape: DraftShape) -> Draft:
        """Fill the tree level by level, one call of the layers each."""
        layout = shapes.fixed(self._parents[: shape.max_nodes], context.length_B.device)
        assert context.cache is not None
        source = tree_drafting.TreeModel(self.model, context.cache, shared=True)
        return tree_drafting.grow([source], context, layout, self.policy).draft(self.policy.drawn)


def layers(have: int, skip: Sequence[int] | None, leave: int | None) -> tuple[int, ...]:
    """The layers that are left of so many: without `skip`, and none from `leave` on.

    >>> layers(6, (2, 3), 5)
    (0, 1, 4)
    """
    do = (
        "write drafter_options={'skip': (3, 4)} or {'exit': 8} (--drafter-option skip=3,4 or "
        "exit=8); see outrider bench layers"
    )
    if skip is None and leave is None:
        raise ConfigurationError(
            f"drafter 'layer_skip' needs to know which of the target's {have} layers to leave out; "
            f"got neither skip nor exit; {do}"
        )
    end = have if leave is None else arguments.whole("exit", leave, do, least=1)
    what = f"layers of the target, numbers from 0 to {have - 1}"
    if isinstance(skip, int):
        skip = (skip,)
    out = arguments.several("skip", skip or (), what, do, arguments.is_whole, ordered=False)
    wrong = [number for number in out if not 0 <= number < have]
    if wrong or end > have:
        arguments.refuse("skip" if wrong else "exit", what, wrong[0] if wrong else end, do)
    return tuple(number for number in range(end) if number not in out)


def _made(
    target: LanguageModel,
    num_speculative_tokens: int | None = None,
    branching: tuple[int, ...] | None = None,
    shared_noise: bool = False,
    skip: Sequence[int] | None = None,
    exit: int | None = None,
) -> LayerSkip:
    recipes.one_depth(branching, num_speculative_tokens)
    counts = (1,) * (num_speculative_tokens or 4) if branching is None else branching
    have = target.runner.layers if isinstance(target, TreeDecoder) else 0
    left = layers(have, skip, exit) if have else ()
    return LayerSkip(part(target, left), counts, shared_noise)


RECIPE = recipes.Recipe(
    _made,
    ("target",),
    ("num_speculative_tokens", "branching", "shared_noise", "skip", "exit"),
    law=True,
)
