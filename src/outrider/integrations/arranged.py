"""The engine behind one call of `generate`: settings are read on every call."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from outrider import drafters, verifiers
from outrider.drafters.ngram_file import opened
from outrider.drafters.recipes import COMMON, DraftOptions, Parts
from outrider.engine.engine import Engine
from outrider.integrations.drafts import beside, layers_of, translation
from outrider.integrations.driven import driven
from outrider.types import LanguageModel


class Arranged(NamedTuple):
    """An engine, and the draft model that has an encoder of its own, if there is one."""

    engine: Engine
    encoder: PreTrainedModel | None


def arranged(model: PreTrainedModel, settings: Mapping[str, Any], copies: bool = False) -> Arranged:
    """Target, drafter and rule for merged settings (`load`'s names); unused ones are refused.

    `copies` says whether there is a reference to copy from.
    """
    target = driven(model, "target")
    draft, table = settings.get("draft"), settings.get("table")
    draft = layers_of(settings.get("draft_layers"), draft)
    common = {n: settings[n] for n in COMMON if settings.get(n) is not None}
    options = DraftOptions(**common, own=settings.get("drafter_options"))
    words = translation(settings.get("tokenizer"), settings.get("draft_tokenizer"), draft)
    usual = drafters.usual(draft, copies or target.reads != "text", words is not None)
    recipe = drafters.check(settings.get("drafter", usual), options, draft, table)
    rule = verifiers.chosen(settings.get("rule"), settings.get("rule_options"), options.coupled)
    given, share = drafters.models(draft), settings.get("share_encoder", "auto")
    models: tuple[LanguageModel, ...] = tuple(
        beside(target, model, one, share, words) for one in given
    )
    own = (one for one, model in zip(given, models, strict=True) if model.reads == "source")
    parts = Parts(models, opened(table), target.vocab_size)
    return Arranged(Engine(target, recipe.make(parts, options), rule), next(own, None))
