"""The engine behind one call of `generate`: models checked once, settings on every call."""

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import generation as hf

from outrider import check
from outrider.drafters import NgramTable, Root, asked
from outrider.drafters.make import WITH_MODEL, prompt_lookup, with_model
from outrider.drafters.ngram_file import read
from outrider.drafters.ngram_table import Table
from outrider.engine import Engine
from outrider.errors import ConfigurationError, UnknownName
from outrider.keywords import CONFIGURED, SHAPE
from outrider.models import CausalModel, refusals, runner_of
from outrider.models.guard import CONFIGURATION
from outrider.types import Drafter

#: Drafters without a model, and the setting that is theirs alone.
WITHOUT_MODEL = {"prompt_lookup": "ngram", "ngram_table": "table", "root": None}
#: Outputs of one family are padded to multiples of at most this.
_PADDING = 1024
#: What a model was when it passed its check. Nothing here keeps a model alive.
_CHECKED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def named(config: Any) -> dict[str, Any]:
    """Speculative keywords of a generation configuration.

    transformers fills in its defaults before we are called, so a value equal to the default is
    taken as not given.
    """
    defaults: dict[str, Any] = hf.GenerationConfig._get_default_generation_params()
    named = {name: getattr(config, name, None) for name in CONFIGURED}
    return {name: value for name, value in named.items() if value != defaults.get(name)}


def driven(model: Any, role: str) -> CausalModel:
    """The model behind a runner of its own that reads its live weights.

    Checked when it is first seen, and again after any change of its configuration.
    """
    name = "draft_model" if role == "draft" else "model"
    if isinstance(model, (str, Path)):
        raise ConfigurationError(
            f"{name} must be a loaded model here; got {str(model)!r}; load it with "
            "AutoModelForCausalLM.from_pretrained first"
        )
    refusals.check_loaded(model, name, "one loaded model")
    with CONFIGURATION:
        config: Any = model.config
        text = config.get_text_config(decoder=True)
        state = (model.device, model.dtype, text._attn_implementation, text.to_dict())
        if _CHECKED.get(model) != state:
            refusals.check(model)
            check.paths(CausalModel(runner_of(model)(model)), role)
            _CHECKED[model] = state
        return CausalModel(runner_of(model)(model))


def engine_for(model: Any, settings: dict[str, Any]) -> Engine:
    """Target, drafter and rule for merged settings (`load`'s names); unused ones are refused."""
    target = driven(model, "target")
    small = settings.get("draft")
    gamma = asked.shape(**{n: settings.get(n) for n in SHAPE if n != "coupled"})[
        "num_speculative_tokens"
    ]
    lookup = prompt_lookup(gamma, settings.get("ngram"))
    kind = settings.get("drafter") or ("draft_model" if small is not None else "prompt_lookup")
    rule, coupled = settings.get("rule"), bool(settings.get("coupled"))
    made: Drafter
    asked.name(kind)
    if kind not in (*WITH_MODEL, *WITHOUT_MODEL):
        raise UnknownName("drafter", kind, (*WITH_MODEL, *WITHOUT_MODEL))
    idle = [own for name, own in WITHOUT_MODEL.items() if own and name != kind]
    if kind not in WITH_MODEL:
        idle += ["draft", "branching", "width", "total_tokens", "acceptance"]
    if kind == "root":
        idle.append("num_speculative_tokens")
    for name in idle:
        if settings.get(name) is not None:
            raise ConfigurationError(
                f"drafter {kind!r} has no use for {name}; got {name}={_short(settings[name])}; "
                "leave it out or choose another drafter"
            )
    if kind in WITH_MODEL:
        if small is None:
            raise ConfigurationError(
                f"drafter {kind!r} needs a draft model; pass draft_model=... (generate keeps "
                "assistant_model= to itself)"
            )
        draft = driven(small, "draft")
        sizes = {"target": target.vocab_size, "draft": draft.vocab_size}
        if abs(sizes["target"] - sizes["draft"]) >= _PADDING:
            check.vocabulary(None, None, sizes)
        # one family, padded differently: the target's law stays whole, ids unknown to the draft
        # model have draft probability 0
        draft = CausalModel(draft.runner, target.vocab_size)
        made = with_model(kind, draft, **{n: settings[n] for n in SHAPE if n in settings})
    elif kind == "prompt_lookup":
        made = lookup
    elif kind == "ngram_table":
        counted = settings.get("table")
        if counted is None:
            raise ConfigurationError(
                "drafter 'ngram_table' needs a table; got table=None; give a file or a Table: "
                "drafters.ngram_table.count counts a text, drafters.ngram_file.write keeps it"
            )
        counted = counted if isinstance(counted, Table) else read(counted)
        made = NgramTable(counted, gamma or 4, target.vocab_size)
    else:
        made = Root()
    if rule is None and coupled:
        rule = "match"
    return Engine(target, made, rule)


def _short(given: Any) -> str:
    """A setting for a message: a model's repr fills the screen."""
    return type(given).__name__ if hasattr(given, "parameters") else repr(given)
