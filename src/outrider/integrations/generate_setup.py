"""The engine behind one call of `generate`: settings are read on every call."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from outrider import drafters, verifiers
from outrider.costs import Costs
from outrider.drafters.ngram_file import opened
from outrider.drafters.recipes import COMMON, DrafterParts, DraftOptions
from outrider.engine import speculation_policy as planners
from outrider.engine.engine import Engine
from outrider.integrations.drafts import beside, layers_of, translation
from outrider.integrations.wrapped_models import driven
from outrider.types import LanguageModel

#: What steps of a target cost, by what drafts beside it: measured in the first call.
_COSTS: WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], Costs]] = WeakKeyDictionary()


class GenerateSetup(NamedTuple):
    """An engine, and the draft model that has an encoder of its own, if there is one."""

    engine: Engine
    encoder: PreTrainedModel | None


def generate_setup(
    model: PreTrainedModel, settings: Mapping[str, Any], copies: bool = False
) -> GenerateSetup:
    """Target, drafter and rule for merged settings (`load`'s names); unused ones are refused.

    `copies` says whether there is a reference to copy from.
    """
    target = driven(model, "target")
    draft, table = settings.get("draft"), settings.get("table")
    draft = layers_of(settings.get("draft_layers"), draft)
    common = {n: settings[n] for n in COMMON if settings.get(n) is not None}
    options = DraftOptions(**common, own=settings.get("drafter_options"))
    words = translation(settings.get("tokenizer"), settings.get("draft_tokenizer"), draft)
    reads, differs = copies or target.reads != "text", words is not None
    usual = drafters.usual(draft, reads, differs, target.device, options)
    recipe = drafters.check(settings.get("drafter", usual), options, draft, table)
    rule = verifiers.chosen(
        settings.get("rule"), settings.get("rule_options"), options.shared_noise
    )
    given, share = drafters.models(draft), settings.get("share_encoder", "auto")
    models: tuple[LanguageModel, ...] = tuple(
        beside(target, model, one, share, words) for one in given
    )
    own = (one for one, model in zip(given, models, strict=True) if model.reads == "source")
    parts = DrafterParts(models, opened(table), target.vocab_size, target)
    planner, options = planners.chosen(settings.get("planner"), recipe, options)
    drafter = recipe.make(parts, options)
    beside_it = (target.device, target.dtype, drafter.name, drafter.shapes, *map(id, given))
    costs, kept = _costs(model, settings.get("step_costs"), beside_it)
    return GenerateSetup(Engine(target, drafter, rule, planner, costs, kept=kept), next(own, None))


def _costs(
    model: PreTrainedModel, given: Costs | str | Path | None, key: tuple[object, ...]
) -> tuple[Costs | None, Callable[[Costs], object] | None]:
    """The costs given; or those measured in an earlier call, and where to keep more of them."""
    if given is not None:
        return given if isinstance(given, Costs) else Costs.read(given), None
    known = _COSTS.setdefault(model, {})
    return known.get(key), lambda found: known.update({key: found})
