"""Registry of drafters: one file and one line each.

A drafter of your own is reached by name once it is here, from outside as well: by a call,

    outrider.drafters.register("echo", Echo)

or, for every program that finds it installed, by an entry point in the group `outrider.drafters`.
"""

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING

from outrider import arguments, lazy, plugins
from outrider.errors import ConfigurationError, UnknownName

if TYPE_CHECKING:
    import torch

    from outrider.drafters.beam import Beam
    from outrider.drafters.cross_tokenizer import StringMatch, Translated
    from outrider.drafters.draft_model import DraftModel
    from outrider.drafters.dynamic_tree import DynamicTree
    from outrider.drafters.either import Either
    from outrider.drafters.ngram_table import NgramTable
    from outrider.drafters.paths import Paths
    from outrider.drafters.prompt_lookup import PromptLookup
    from outrider.drafters.recall import Recall
    from outrider.drafters.recipes import DrafterParts, DraftOptions, Recipe
    from outrider.drafters.reference_lookup import ReferenceLookup
    from outrider.drafters.root import Root
    from outrider.drafters.suffix import Suffix
    from outrider.drafters.trees import HubTree, SampledTree, StaticTree
    from outrider.types import Drafter


def _recipe(given: object) -> "Recipe":
    """What `register` and entry points may give: a recipe, or what makes a drafter of nothing."""
    from outrider.drafters.recipes import Recipe

    if isinstance(given, Recipe):
        return given
    verbs = ("open", "propose", "commit")
    if not callable(given) or (
        isinstance(given, type) and not all(hasattr(given, verb) for verb in verbs)
    ):
        what = "a Recipe, a class with open, propose and commit, or a function that makes a drafter"
        arguments.refuse("recipe", what, given, "write Recipe(MyDrafter)")
    return Recipe(given)


#: Drafters that other distributions bring.
PLUGINS = plugins.PluginGroup(
    "outrider.drafters",
    "drafter",
    _recipe,
    ("cascade", "layer_skip", "lookahead", "ngram_tree", "random"),
)

#: How each is made, in order; imported when it is looked up.
_BUILTIN = {
    "none": "outrider.drafters.root:RECIPE",
    "draft_model": "outrider.drafters.draft_model:RECIPE",
    "sampled_tree": "outrider.drafters.trees:SAMPLED_TREE",
    "beam": "outrider.drafters.beam:RECIPE",
    "paths": "outrider.drafters.paths:RECIPE",
    "hub_tree": "outrider.drafters.trees:HUB_TREE",
    "static_tree": "outrider.drafters.trees:STATIC_TREE",
    "dynamic_tree": "outrider.drafters.dynamic_tree:RECIPE",
    "prompt_lookup": "outrider.drafters.prompt_lookup:RECIPE",
    "suffix": "outrider.drafters.suffix:RECIPE",
    "recall": "outrider.drafters.recall:RECIPE",
    "reference_lookup": "outrider.drafters.reference_lookup:RECIPE",
    "ngram_table": "outrider.drafters.ngram_table:RECIPE",
    "either": "outrider.drafters.either:RECIPE",
    "string_match": "outrider.drafters.cross_tokenizer:STRING_MATCH",
    "translated": "outrider.drafters.cross_tokenizer:RECIPE",
}
DRAFTERS: MutableMapping[str, "Recipe"] = lazy.Registry(_BUILTIN, PLUGINS.load)


def names() -> list[str]:
    """All by name, those of plug-ins too; nothing is imported for this.

    >>> "recall" in names()
    True
    """
    return sorted({*_BUILTIN, *PLUGINS.names()})


def register(name: str, recipe: "Recipe | Callable[..., Drafter]") -> None:
    """Make a drafter known by name to `load`, `model.generate`, the commands and `certify`.

    recipe  a `Recipe`, which says what the drafter needs and takes, or a class or function that
            makes one of nothing

    Raises ConfigurationError for a name that is taken, and for what makes no drafter.

    >>> from outrider import Root
    >>> register("still", Root)
    >>> get("still").needs, DRAFTERS.pop("still").build
    ((), <class 'outrider.drafters.root.Root'>)
    """
    PLUGINS.refuse_taken(name, DRAFTERS)
    DRAFTERS[name] = _recipe(recipe)


def get(name: str) -> "Recipe":
    """The recipe of that name."""
    if not isinstance(name, str):
        do = "take the speculator's using(drafter) for an object of your own"
        arguments.refuse("drafter", "a name", name, do)
    if name not in DRAFTERS:
        PLUGINS.refuse_broken(name)
        raise UnknownName("drafter", name, DRAFTERS)
    return DRAFTERS[name]


def check(
    name: str, options: "DraftOptions", draft: object = None, table: object = None
) -> "Recipe":
    """The recipe of that name, if it has a use for all that is given, and all it needs is there.

    draft, table  as the user gave them: a model, or for "paths" a list; a table or its file
    """
    recipe = get(name)
    beside = {"draft": draft, "table": table}
    given = options.asked() | {n: v for n, v in beside.items() if v is not None}
    for option, value in given.items():
        if not recipe.wants(option):
            _refuse(name, recipe, option, value)
    if recipe.drafts_with_models:
        _check_models(name, recipe, draft)
    if "table" in recipe.needs and table is None:
        raise ConfigurationError(
            f"drafter {name!r} needs a table; got none; give a file (table=..., --table) or a "
            "Table: drafters.ngram_table.count counts a text, drafters.ngram_table.write keeps it"
        )
    return recipe


def usual(
    draft: object,
    reads: bool = False,
    differs: bool = False,
    device: "str | torch.device" = "cpu",
    options: "DraftOptions | None" = None,
) -> str:
    """The drafter of a user who names none.

    reads    whether the target reads a source, or there is a text to copy from
    differs  whether the draft model has another tokenizer than the target
    device   the target's
    options  who asks for n-grams looks them up
    """
    if draft is not None:
        return "translated" if differs else "draft_model"
    if reads:
        return "reference_lookup"
    if options is not None and options.ngram is not None:
        return "prompt_lookup"
    return "recall" if str(device).partition(":")[0] == "cpu" else "suffix"


def models(draft: object) -> tuple[object, ...]:
    """Draft models one by one: none, one, or a list of them."""
    if draft is None:
        return ()
    return tuple(draft) if isinstance(draft, (list, tuple)) else (draft,)


def make(name: str, parts: "DrafterParts", options: "DraftOptions | None" = None) -> "Drafter":
    """A drafter by name from loaded parts; every option is used or refused.

    >>> from outrider.drafters.recipes import DraftOptions, DrafterParts
    >>> make("prompt_lookup", DrafterParts(), DraftOptions(ngram=(2, 3))).shapes[0].max_nodes
    9
    """
    from outrider.drafters.recipes import DraftOptions

    options = options or DraftOptions()
    models = list(parts.models) if len(parts.models) > 1 else next(iter(parts.models), None)
    return check(name, options, models, parts.table).make(parts, options)


def _refuse(name: str, recipe: "Recipe", option: str, value: object) -> None:
    beside = [part for part in ("draft", "table") if recipe.wants(part)]
    takes = ", ".join([*beside, *recipe.takes, *recipe.warps]) or "no options"
    able = (n for n, other in DRAFTERS.items() if option in (*other.takes, *other.warps))
    others = ", ".join(sorted(able))
    raise ConfigurationError(
        f"drafter {name!r} has no use for {option}; got {option}={arguments.shown(value)}; it "
        f"takes {takes}; leave {option} out" + (f", or use one of {others}" if others else "")
    )


def _check_models(name: str, recipe: "Recipe", draft: object) -> None:
    if draft is None:
        raise ConfigurationError(
            f"drafter {name!r} needs a draft model; got none; give one (draft=..., --draft-model; "
            "in model.generate draft_model=..., as it keeps assistant_model= to itself), or use "
            "the drafter 'prompt_lookup'"
        )
    if not isinstance(draft, (list, tuple)):
        return
    if not draft:
        raise ConfigurationError("no draft model; got an empty list; give at least one")
    if "models" not in recipe.needs:
        raise ConfigurationError(
            f"drafter {name!r} takes one draft model; got {len(draft)} in a list; use "
            "drafter='paths' for several"
        )


def check_reference(drafter: "Drafter") -> None:
    """Refuse a reference for a drafter that copies from none; plain decoding needs no draft."""
    recipe = DRAFTERS.get(drafter.name)
    if recipe is None or recipe.copies or not drafter.shapes[0].max_depth:
        return
    able = ", ".join(repr(name) for name, other in DRAFTERS.items() if other.copies)
    raise ConfigurationError(
        f"drafter {drafter.name!r} copies from no reference; got reference=...; load with "
        f"drafter={able}, take speculator.using(outrider.ReferenceLookup()), or leave it out"
    )


__all__ = [
    "DRAFTERS",
    "Beam",
    "DraftModel",
    "DraftOptions",
    "DrafterParts",
    "DynamicTree",
    "Either",
    "HubTree",
    "NgramTable",
    "Paths",
    "PromptLookup",
    "Recall",
    "Recipe",
    "ReferenceLookup",
    "Root",
    "SampledTree",
    "StaticTree",
    "StringMatch",
    "Suffix",
    "Translated",
]

#: Where each class is imported from when it is first asked for.
_EXPORTS = {
    "Beam": "outrider.drafters.beam",
    "DraftModel": "outrider.drafters.draft_model",
    "DynamicTree": "outrider.drafters.dynamic_tree",
    "Either": "outrider.drafters.either",
    "HubTree": "outrider.drafters.trees",
    "NgramTable": "outrider.drafters.ngram_table",
    "Paths": "outrider.drafters.paths",
    "PromptLookup": "outrider.drafters.prompt_lookup",
    "Recall": "outrider.drafters.recall",
    "DraftOptions": "outrider.drafters.recipes",
    "DrafterParts": "outrider.drafters.recipes",
    "Recipe": "outrider.drafters.recipes",
    "ReferenceLookup": "outrider.drafters.reference_lookup",
    "Root": "outrider.drafters.root",
    "SampledTree": "outrider.drafters.trees",
    "StaticTree": "outrider.drafters.trees",
    "StringMatch": "outrider.drafters.cross_tokenizer",
    "Suffix": "outrider.drafters.suffix",
    "Translated": "outrider.drafters.cross_tokenizer",
}
__getattr__, __dir__ = lazy.exports(__name__, _EXPORTS)
