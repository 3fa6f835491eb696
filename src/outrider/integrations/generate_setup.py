"""The engine behind one call of `generate`: settings are read on every call."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel, generation as hf

from outrider import arguments, drafters, verifiers
from outrider.costs import Costs
from outrider.drafters import DRAFTERS, PLUGINS, models
from outrider.drafters.ngram_table import opened
from outrider.drafters.recipes import COMMON, DrafterParts, DraftOptions
from outrider.engine import speculation_policy as planners
from outrider.engine.engine import Engine
from outrider.errors import ConfigurationError, UnknownName
from outrider.load_config import OPTIONS, RUNTIME
from outrider.models import (
    TreeDecoder,
    heads,
    layer_subset,
    load_checks,
    own_forward,
    reads_more,
    unsupported,
)
from outrider.models.calibrate import Setting
from outrider.models.config import decoder_of, read
from outrider.models.cross_tokenizer_model import TranslatedModel
from outrider.models.layer_subset import LayerSubset, LayerSubsetSource
from outrider.models.model_lock import CONFIGURATION
from outrider.models.pretrained import resolve_tokenizer
from outrider.models.sources import ModelSource, ShareEncoder
from outrider.models.token_remap import VocabularyMap, vocabulary_map
from outrider.types import LanguageModel

# Other libraries' names for what `outrider.load` takes: vLLM's, transformers' and our own.
#
#     outrider.load(target, **load_arguments({"model": draft, "num_speculative_tokens": 5}))
#     outrider.load(target, **load_arguments({"method": "ngram", "prompt_lookup_max": 4}))
#     outrider.load(target, **load_arguments({"assistant_model": draft, "num_assistant_tokens": 5}))
#
# What cannot be honoured is an error, never dropped.

#: What drafts and what verifies: all but the target, and how models run.
OURS = tuple(name for name in OPTIONS if name not in RUNTIME)
NGRAM = "ngram"  #: vLLM's name for prompt lookup; its other methods have our names
RULES = {"standard": "rejection", "strict": "rejection", "block": "block"}
#: Names that a generation configuration of transformers carries.
CONFIGURED = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_ensemble_weight",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "use_mtp",
)
KNOWN = (
    *OURS,
    "model",
    "draft_model",
    "method",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "rejection_sample_method",
    "draft_sample_method",
    "assistant_model",
    "assistant_tokenizer",
    *CONFIGURED,
)


def load_arguments(given: Mapping[str, object]) -> dict[str, Any]:
    """Arguments of `outrider.load` from a `speculative_config` or transformers' keywords.

    >>> load_arguments({"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3})
    {'num_speculative_tokens': 6, 'drafter': 'prompt_lookup', 'ngram': (1, 3)}
    """
    for key in given:
        if key not in KNOWN:
            raise UnknownName("speculative setting", key, KNOWN)
    asked = {key: value for key, value in given.items() if value is not None}
    found: dict[str, Any] = {key: asked[key] for key in OURS if key in asked}

    def put(name: str, value: object, source: str) -> None:
        if name in found and found[name] is not value and found[name] != value:
            raise ConfigurationError(
                f"{source}={value!r} contradicts {name}={found[name]!r}; give one of them"
            )
        found[name] = value

    for name in ("model", "draft_model", "assistant_model"):
        if name in asked:
            put("draft", asked[name], name)
    if asked.get("use_mtp"):
        put("draft", heads.MTP, "use_mtp")
    if "assistant_tokenizer" in asked:
        put("draft_tokenizer", asked["assistant_tokenizer"], "assistant_tokenizer")
    for name in ("num_assistant_tokens", "prompt_lookup_num_tokens"):
        if name in asked:
            count = arguments.whole(name, asked[name], "give at least 1, or leave it out", least=1)
            put("num_speculative_tokens", count, name)
    if "method" in asked:
        method = str(asked["method"])
        if method not in (NGRAM, *DRAFTERS):
            PLUGINS.refuse_broken(method)
            raise UnknownName("speculative method", method, (NGRAM, *DRAFTERS))
        put("drafter", "prompt_lookup" if method == NGRAM else method, "method")
    if "prompt_lookup_num_tokens" in asked:
        put("drafter", "prompt_lookup", "prompt_lookup_num_tokens")
    if isinstance(found.get("ngram"), list):
        found["ngram"] = tuple(found["ngram"])  # as the other names for it are read
    _ngram(asked, put)
    if "rejection_sample_method" in asked:
        method = str(asked["rejection_sample_method"])
        if method not in RULES:
            raise UnknownName("rejection_sample_method", method, RULES)
        put("rule", RULES[method], "rejection_sample_method")
    _refuse(asked)
    return found


def _ngram(asked: Mapping[str, object], put: Callable[[str, object, str], None]) -> None:
    """The n-grams of prompt lookup, under the names that vLLM and transformers have for them."""
    sizes = {
        name: arguments.whole(name, asked[name], "give at least 1, or leave it out", least=1)
        for name in ("prompt_lookup_min", "prompt_lookup_max", "max_matching_ngram_size")
        if name in asked
    }
    if not sizes:
        return
    least = sizes.pop("prompt_lookup_min", 1)
    for name, most in (sizes or {"prompt_lookup_min": max(4, least)}).items():
        if most < least:
            what = f"a whole number of at least prompt_lookup_min, {least}"
            arguments.refuse(name, what, most, "lower prompt_lookup_min")
        put("ngram", (least, most), name)


def _refuse(asked: Mapping[str, object]) -> None:
    if asked.get("draft_sample_method", "probabilistic") != "probabilistic":
        raise ConfigurationError(
            "draft_sample_method must be 'probabilistic': drafts are drawn from the draft model's "
            f"own law; got {asked['draft_sample_method']!r}; leave it out"
        )
    if asked.get("num_assistant_tokens_schedule", "constant") != "constant":
        raise ConfigurationError(
            "num_assistant_tokens_schedule must be 'constant'; got "
            f"{asked['num_assistant_tokens_schedule']!r}; set num_assistant_tokens alone"
        )
    if asked.get("assistant_confidence_threshold", 0):
        raise ConfigurationError(
            "assistant_confidence_threshold is not supported: drafts have a fixed length; got "
            f"{asked['assistant_confidence_threshold']!r}; leave it out"
        )
    if asked.get("assistant_ensemble_weight") is not None:
        raise ConfigurationError(
            "assistant_ensemble_weight changes the law of the text; got "
            f"{asked['assistant_ensemble_weight']!r}; leave it out, or ask for a lossy rule by name"
        )


# Models behind `generate`: checked once, and again after any change, their weights live.

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


def driven(model: PreTrainedModel, role: str, shares: bool = False) -> TreeDecoder:
    """The model behind a runner of its own that reads its live weights.

    Checked when it is first seen, and again after any change of its configuration. A draft that
    `shares` attends to the states of the target's encoder.
    """
    name = "draft_model" if role == "draft" else "model"
    if isinstance(model, (str, Path)):
        raise ConfigurationError(
            f"{name} must be a loaded model here; got {str(model)!r}; load it with "
            "transformers' from_pretrained first"
        )
    unsupported.check_loaded(model, name, "one loaded model")
    with CONFIGURATION:
        text = decoder_of(model.config)
        state = (model.device, model.dtype, text._attn_implementation, model.config.to_dict())
        if _CHECKED.get(model) != state:
            unsupported.check(model)
            load_checks.paths(TreeDecoder(own_forward(model)), role)
            _CHECKED[model] = state
        return TreeDecoder(own_forward(model, shares))


# Draft models beside a target: loaded models, layers of the target itself, folders of layers or of
# a head.

Draft: TypeAlias = "PreTrainedModel | LayerSubset | str | Path"
#: Outputs of one family are padded to multiples of at most this.
_PADDING = 1024


class _LayerDraft(NamedTuple):
    """A draft made of a target's own tensors."""

    of: tuple[int, ...]  #: those tensors: another target, if they are replaced
    model: PreTrainedModel
    ids_K: torch.Tensor | None  #: the tokens that it proposes, if not all


class _Head(NamedTuple):
    """A head that borrows from a target."""

    of: tuple[int, ...]  #: the target's tensors
    model: LanguageModel


#: Per target and folder. They borrow tensors, and keep no model alive.
_HEADS: WeakKeyDictionary[PreTrainedModel, dict[str, _Head]] = WeakKeyDictionary()
#: Per target and what was asked for. No weight is copied.
_LAYER_DRAFTS: WeakKeyDictionary[PreTrainedModel, dict[str, _LayerDraft]] = WeakKeyDictionary()


def translation(target: object, draft_tokenizer: object, draft: object) -> VocabularyMap | None:
    """How a draft model with another tokenizer is translated; None if it has the target's."""
    if draft_tokenizer is None:
        return None
    load_checks.draft_tokenizer(draft_tokenizer, models(draft))
    if target is None:
        raise ConfigurationError(
            "a draft model's tokenizer is compared with the target's; got assistant_tokenizer= "
            "(draft_tokenizer=) alone; pass tokenizer=..., too"
        )
    ours, theirs = (resolve_tokenizer(one) for one in (target, draft_tokenizer))
    return vocabulary_map(ours, theirs)


def beside(
    target: TreeDecoder,
    model: PreTrainedModel,
    draft: Draft,
    share: ShareEncoder = "auto",
    words: VocabularyMap | None = None,
) -> LanguageModel:
    """A draft model over the target's tokens; its own are `words`, if they are others.

    One family is padded differently: the target's law stays whole, ids unknown to the draft model
    have draft probability 0. A draft whose encoder equals the target's attends to its states.
    """
    given = isinstance(draft, (str, Path, PreTrainedModel))
    head = _head(target, model, draft) if given else None
    if head is not None:
        return head
    if words is not None:
        return _translated(target, model, draft, words)
    if LayerSubsetSource.reads(draft):
        if share is False and reads_more(model.config):
            raise ConfigurationError(
                "layers of the target read what its encoder made; got share_encoder=False; leave "
                "it out"
            )
        return _cut(target, model, draft)
    made = driven(draft, "draft", _shares(model, draft, share))
    sizes = {"target": target.vocab_size, "draft": made.vocab_size}
    if abs(sizes["target"] - sizes["draft"]) >= _PADDING:
        load_checks.vocabulary(None, None, sizes)
    return TreeDecoder(made.runner, target.vocab_size)


def _translated(
    target: TreeDecoder, model: PreTrainedModel, draft: Draft, words: VocabularyMap
) -> TranslatedModel:
    if LayerSubsetSource.reads(draft) or reads_more(model.config):
        raise ConfigurationError(
            "only draft models of text alone are translated, for targets of text alone; got "
            f"draft_tokenizer={words.draft.name} with {arguments.shown(draft)}; leave it out, or "
            "use a draft model with the target's tokenizer"
        )
    made = driven(draft, "draft")
    return TranslatedModel(TreeDecoder(made.runner, words.draft.size), words, target.vocab_size)


def layers_of(given: object, draft: object) -> object:
    """`draft_layers` as the draft."""
    if given is None:
        return draft
    if draft is not None:
        raise ConfigurationError(
            f"draft_layers makes a draft of the target; got {arguments.shown(draft)} as a draft "
            "model, too; leave one of them out"
        )
    return LayerSubset(given)  # type: ignore[arg-type]


def _shares(model: PreTrainedModel, draft: object, share: ShareEncoder) -> bool:
    if not isinstance(draft, PreTrainedModel) or not draft.config.is_encoder_decoder:
        return False  # a decoder alone always does, other things are refused
    if not model.config.is_encoder_decoder or share is False:
        return False
    if share is True:
        unsupported.check_widths(model.config, draft.config)
        return True
    return load_checks.same_encoder(model, draft)


def _head(target: TreeDecoder, model: PreTrainedModel, given: Draft) -> LanguageModel | None:
    """A head of the target, read once; None: another draft is meant."""
    made, of = _HEADS.setdefault(model, {}), tuple(map(id, model.parameters()))
    key = str(id(given) if isinstance(given, PreTrainedModel) else given)
    if key not in made or made[key].of != of:
        setting = Setting(torch.get_num_threads(), str(model.dtype).removeprefix("torch."), False)
        source = heads.source_of(given, ModelSource(model, "target"))
        if source is None:
            return None
        with torch.device("cpu"):  # modules of heads, which move themselves
            driven = source.driven(setting, torch.device(model.device), target.vocab_size)
        made[key] = _Head(of, driven)
    return made[key].model


def _cut(
    target: TreeDecoder, model: PreTrainedModel, draft: LayerSubset | str | Path
) -> TreeDecoder:
    """Layers of the target as a model, put together once."""
    made, of = _LAYER_DRAFTS.setdefault(model, {}), tuple(map(id, model.parameters()))
    key = str(draft if isinstance(draft, LayerSubset) else Path(draft).resolve())
    if key not in made or made[key].of != of:
        source = LayerSubsetSource(ModelSource(model, "target"), draft)
        dtype = str(model.dtype).removeprefix("torch.")
        small = source.model(dtype, torch.device(model.device))
        if source.ids_K is not None:
            layer_subset.trim(small, source.ids_K)
        made[key] = _LayerDraft(of, small, source.ids_K)
    _, small, ids = made[key]
    causal = TreeDecoder(own_forward(small, reads_more(small.config)), target.vocab_size)
    causal.ids_K = None if ids is None else ids.to(small.device)
    return causal


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
