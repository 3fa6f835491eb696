"""The engine behind one call of `generate`: models checked once, settings on every call."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel
from transformers import generation as hf

from outrider import drafters, verifiers
from outrider.drafters.ngram_file import opened
from outrider.drafters.recipes import COMMON, DraftOptions, Parts
from outrider.engine.engine import Engine
from outrider.errors import ConfigurationError
from outrider.keywords import CONFIGURED
from outrider.models import CausalModel, check, refusals, runner_of
from outrider.models.config import decoder_of, read
from outrider.models.guard import CONFIGURATION

#: Outputs of one family are padded to multiples of at most this.
_PADDING = 1024
#: What a model was when it passed its check. Nothing here keeps a model alive.
_CHECKED: WeakKeyDictionary[PreTrainedModel, tuple[object, ...]] = WeakKeyDictionary()


def named(config: hf.GenerationConfig) -> dict[str, object]:
    """Speculative keywords of a generation configuration.

    transformers fills in its defaults before we are called, so a value equal to the default is
    taken as not given.
    """
    defaults: dict[str, object] = hf.GenerationConfig._get_default_generation_params()
    named = {name: read(config, name, object) for name in CONFIGURED}
    return {name: value for name, value in named.items() if value != defaults.get(name)}


def driven(model: PreTrainedModel, role: str) -> CausalModel:
    """The model behind a runner of its own that reads its live weights.

    Checked when it is first seen, and again after any change of its configuration.
    """
    name = "draft_model" if role == "draft" else "model"
    if isinstance(model, (str, Path)):
        raise ConfigurationError(
            f"{name} must be a loaded model here; got {str(model)!r}; load it with "
            "transformers' from_pretrained first"
        )
    refusals.check_loaded(model, name, "one loaded model")
    with CONFIGURATION:
        text = decoder_of(model.config)
        state = (model.device, model.dtype, text._attn_implementation, model.config.to_dict())
        if _CHECKED.get(model) != state:
            refusals.check(model)
            check.paths(CausalModel(runner_of(model)(model)), role)
            _CHECKED[model] = state
        return CausalModel(runner_of(model)(model))


class Arranged(NamedTuple):
    """An engine, and the draft model that has an encoder of its own, if there is one."""

    engine: Engine
    encoder: PreTrainedModel | None


def arranged(model: PreTrainedModel, settings: Mapping[str, Any]) -> Arranged:
    """Target, drafter and rule for merged settings (`load`'s names); unused ones are refused."""
    target = driven(model, "target")
    draft, table = settings.get("draft"), settings.get("table")
    common = {n: settings[n] for n in COMMON if settings.get(n) is not None}
    options = DraftOptions(**common, own=settings.get("drafter_options"))
    recipe = drafters.check(settings.get("drafter", drafters.usual(draft)), options, draft, table)
    rule = verifiers.chosen(settings.get("rule"), settings.get("rule_options"), options.coupled)
    given = drafters.models(draft)
    models = tuple(_beside(target, one) for one in given)
    own = (one for one, model in zip(given, models, strict=True) if model.reads == "source")
    parts = Parts(models, opened(table), target.vocab_size)
    return Arranged(Engine(target, recipe.make(parts, options), rule), next(own, None))


def _beside(target: CausalModel, model: PreTrainedModel) -> CausalModel:
    """A draft model with as many outputs as the target.

    One family is padded differently: the target's law stays whole, ids unknown to the draft model
    have draft probability 0.
    """
    draft = driven(model, "draft")
    sizes = {"target": target.vocab_size, "draft": draft.vocab_size}
    if abs(sizes["target"] - sizes["draft"]) >= _PADDING:
        check.vocabulary(None, None, sizes)
    return CausalModel(draft.runner, target.vocab_size)
