"""From a `LoadConfig` to a `Speculator`: resolve, choose a setting, build, check, calibrate."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from outrider.drafters.recipes import DrafterParts
from outrider.engine.engine import Engine
from outrider.engine.speculation_policy import measure
from outrider.errors import ConfigurationError, NumericalError, UnsupportedModel, usable_file
from outrider.lazy import collect_as_usual, uncollected
from outrider.load_config import LoadConfig
from outrider.models import (
    TreeDecoder,
    budget,
    calibrate,
    load_checks,
    memory,
    reads_more,
    seq2seq,
    weight_only,
)
from outrider.models.calibrate import Calibration, Setting
from outrider.models.config import is_speech, placeholders
from outrider.models.cpu_kernels import build as native
from outrider.models.decoder import media_of
from outrider.models.draft_source import DraftSource
from outrider.models.runtime_config import describe_draft_dtype, needs_kernels, resolve_runtime
from outrider.models.sources import ModelSource
from outrider.resolve_config import ResolvedConfig, resolve
from outrider.text.decoder_prompt import DecoderPrompt, ModelDefaults
from outrider.text.media_processor import MediaProcessor
from outrider.text.speculator import Speculator
from outrider.types import Drafter, LanguageModel

if TYPE_CHECKING:
    from outrider.load_config import Model
    from outrider.models.distributed import ShardedModel

    #: A target that runs.
    Target: TypeAlias = TreeDecoder | ShardedModel

_log = logging.getLogger("outrider")


@dataclass(frozen=True)
class Notes:
    """How a speculator was loaded; printed by `--verbose`."""

    target: str
    draft: str | None
    device: str
    dtype: str
    threads: int
    packed: bool
    vocab_size: int
    tree_check: float
    calibration: Calibration | None
    encoder: str | None = None  #: whose states a draft model attends to
    vocabulary: str | None = None  #: what a draft model with another tokenizer shares
    shards: int = 1  #: processes that hold a part of the target each
    means: str = ""  #: how the target runs
    draft_dtype: str | None = None  #: what draft models read is kept in, in words; None: `dtype`
    kernels: str = ""  #: which compiled library runs on a CPU, or why none does
    weights: str = ""  #: what weights are kept in, and what is computed in, in words


def load(
    target: "Model | LoadConfig | None" = None,
    draft: "Model | Sequence[Model] | None" = None,
    **options: Any,
) -> Speculator:
    """Load a target with a drafter. With no arguments: the shipped Python-code pair.

    target, draft   local paths, hub names, or loaded transformers models
    options         the other fields of `LoadConfig`, by name
    A `LoadConfig` in place of the target has all of them.

    Raises ConfigurationError and its kin before any prompt is read.

    >>> speculator = outrider.load(num_speculative_tokens=3)   # doctest: +SKIP
    """
    resolved = resolve(_config(target, draft, options))
    with budget.under(budget.unspent()), uncollected():
        setting, calibration = choose_setting(resolved)
        models = build(resolved, setting)
        tree_check = check(resolved, setting, models)
        drafter = make_drafter(resolved, models)
        notes = _notes(resolved, setting, models, tree_check, calibration)
        engine = calibrate_steps(resolved, setting, models, drafter)
    collect_as_usual()  # what is needed has been imported
    memory.trim()
    return _speculator(resolved, setting, engine, notes)


def _config(
    target: "Model | LoadConfig | None",
    draft: "Model | Sequence[Model] | None",
    options: Mapping[str, Any],
) -> LoadConfig:
    """The arguments of `load` as one object."""
    if not isinstance(target, LoadConfig):
        return LoadConfig(target=target, draft=draft, **options)
    beside = [*options] if draft is None else ["draft", *options]
    if beside:
        raise ConfigurationError(
            f"a LoadConfig has all that is loaded; got {', '.join(beside)} beside it; use "
            "dataclasses.replace(config, ...)"
        )
    return target


def _signature() -> inspect.Signature:
    """That of `load`, with every field by name: for help() and editors."""
    kinds = {"target": inspect.Parameter.POSITIONAL_OR_KEYWORD}
    kinds["draft"] = kinds["target"]
    by_name = inspect.Parameter.KEYWORD_ONLY
    ahead = sorted(fields(LoadConfig), key=lambda field: field.name not in kinds)
    given = [
        inspect.Parameter(
            field.name, kinds.get(field.name, by_name), default=field.default, annotation=field.type
        )
        for field in ahead
    ]
    return inspect.Signature(given, return_annotation=Speculator)


vars(load)["__signature__"] = _signature()


class LoadedModels(NamedTuple):
    """Models ready to run."""

    whole: TreeDecoder  #: the target in this process, before others take their parts
    target: "Target"
    drafts: tuple[LanguageModel, ...]


def choose_setting(resolved: ResolvedConfig) -> tuple[Setting, Calibration | None]:
    """The dtype, threads and packing that are wished for; of several the fastest, measured here.

    On a CPU torch has that number of threads from then on.
    """
    target, *drafts = resolved.sources
    if resolved.place.type == "cpu":
        native.start()
        if needs_kernels(resolved.runtime, target):
            native.wait()
        if native.late():
            budget.current().close()

    def built(setting: Setting) -> tuple[TreeDecoder, LanguageModel | None]:
        own = _target(resolved, setting)
        return own, _draft(resolved, 0, setting) if drafts else None

    setting, calibration = resolve_runtime(
        resolved.runtime, target, drafts, built, resolved.place, resolved.depth
    )
    if resolved.place.type == "cpu":
        torch.set_num_threads(setting.threads)
    return setting, calibration


def build(resolved: ResolvedConfig, setting: Setting) -> LoadedModels:
    """Target and draft models with their weights."""
    first, *drafts = resolved.sources
    whole = _target(resolved, setting)
    own: Target = whole
    if first.group is not None:
        from outrider.models import distributed

        own = distributed.split(whole, first.group)
    beside = tuple(_draft(resolved, at, setting) for at in range(len(drafts)))
    for draft in beside:  # a draft need not round alike in every call: no dummy nodes
        if isinstance(draft, TreeDecoder):
            draft.rounding = draft.rounding._replace(rows=None)
    return LoadedModels(whole, own, beside)


def _target(resolved: ResolvedConfig, setting: Setting) -> TreeDecoder:
    """The target, whose size says how long may be measured."""
    target, place = resolved.sources[0], resolved.place
    own = target.driven(setting, place, resolved.vocabularies.size)
    budget.current().allow(target.model(setting.dtype, place).num_parameters())
    return own


def _draft(resolved: ResolvedConfig, at: int, setting: Setting) -> LanguageModel:
    """The draft model of that number."""
    target, *drafts = resolved.sources
    words = resolved.vocabularies.drafts[at]
    size = resolved.vocabularies.size if words is None else words.draft.size
    shares = drafts[at].shares(target, resolved.share_encoder, setting.dtype, resolved.place)
    with torch.device("cpu"):  # modules of heads, which move themselves
        return drafts[at].driven(setting, resolved.place, size, shares)


def check(resolved: ResolvedConfig, setting: Setting, models: LoadedModels) -> float:
    """How far the target's scores of trees are from those of their paths, which is next to nothing.

    Raises UnsupportedModel if one does not score trees as their paths, ConfigurationError where
    nothing could be packed.
    """
    target = resolved.sources[0]
    if resolved.runtime.pack_weights is True and not models.whole.runner.packed:
        raise ConfigurationError(
            f"pack_weights=True is for linear layers; got {target}, which has none of torch's own; "
            "leave it out"
        )
    each = zip(resolved.sources, (models.target, *models.drafts), strict=True)
    worst = [
        _trees(source, model, setting, resolved.place)
        if model.trees and not model.aux_layers
        else 0.0
        for source, model in each
    ]
    return worst[0]


def _trees(
    source: DraftSource, model: LanguageModel, setting: Setting, place: torch.device
) -> float:
    """How far a model's scores of trees are from those of their paths."""
    try:
        return load_checks.trees(model, source.role)
    except NumericalError as error:
        told = source.not_numbers(error, setting.dtype, place)
        if told is error:
            raise
        raise told from error


def make_drafter(resolved: ResolvedConfig, models: LoadedModels) -> Drafter:
    """The drafter over these models. Raises UnsupportedModel for trees of what scores chains."""
    words, options = resolved.vocabularies, resolved.options
    beside = words.over(models.drafts)
    parts = DrafterParts(beside, resolved.table, words.size, models.target)
    drafter = resolved.recipe.make(parts, options)
    for source, model in zip(resolved.sources[1:], models.drafts, strict=True):
        if not drafter.shapes[0].is_chain and not model.trees:
            raise UnsupportedModel(
                f"the draft model {source} scores chains but not trees; got drafter "
                f"{drafter.name!r} with branching={options.branching}; use drafter='draft_model' "
                "without it"
            )
    return drafter


def calibrate_steps(
    resolved: ResolvedConfig, setting: Setting, models: LoadedModels, drafter: Drafter
) -> Engine:
    """The engine, with the costs given, or with those measured for one row, here or earlier."""
    target, rule, planner = models.target, resolved.rule, resolved.planner
    if resolved.step_costs is not None:
        return Engine(target, drafter, rule, planner, resolved.step_costs)
    sources = resolved.sources
    about: tuple[object, ...] = (setting, resolved.place, drafter.name, drafter.shapes, rule)
    about += (sources[0].shards, measure.CONTEXTS)
    stored = tuple(source.stored_types for source in sources)
    about += stored if any(stored) else ()
    if resolved.place.type == "cuda":  # as graphs, steps cost a fraction of what they did
        about += ("graphs",)
    key = calibrate.key(*(source.config for source in sources), about=repr(about))
    engine = Engine(
        target,
        drafter,
        rule,
        planner,
        calibrate.recall_costs(key),
        kept=lambda found: calibrate.remember_costs(key, found),
    )
    engine.priced(1, again=True)
    return engine


def _speculator(
    resolved: ResolvedConfig, setting: Setting, engine: Engine, notes: Notes
) -> Speculator:
    """The engine with what its target says of texts: how they begin and end, whether it hears."""
    first = resolved.sources[0]
    eos_ids, tokenizer = first.eos_ids(), resolved.tokenizer
    model = first.model(setting.dtype, resolved.place)
    opening, defaults = None, ModelDefaults()
    with usable_file(str(first), "generation_config.json"):
        if reads_more(first.config):
            opening = DecoderPrompt.of(first.settings(), eos_ids, str(first))
            if opening.start >= engine.target.vocab_size:
                raise ValueError(f"decoder_start_token_id={opening.start} is no token")
        elif resolved.follow:
            defaults = ModelDefaults.of(first.settings(), eos_ids)
    if defaults.left_out:
        _log.warning(
            "%s: its generation configuration sets %s, which outrider does not follow",
            first,
            ", ".join(defaults.left_out),
        )
    configs = [source.config for source in resolved.sources[1:]]
    hearing = None
    if is_speech(model.config):
        from outrider.speech import speech_model

        hearing = speech_model.opened(str(first), first.given, model, tokenizer, configs)
    reader, media = media_of(engine.target), None
    if reader is not None:
        stands, behind = reader.placeholders, reader.closers
        media = MediaProcessor(
            resolved.processor, stands, first.trust, closers=behind, ahead=reader.ahead
        )
    elif opening is not None and model.main_input_name in _IMAGES:
        media = MediaProcessor(resolved.processor, frozenset(), first.trust, pixels_alone=True)
    elif opening is not None and hearing is None and _hears_samples(model):
        media = MediaProcessor(
            resolved.processor,
            frozenset(),
            first.trust,
            recordings_alone=True,
            moment=seq2seq.moment(model.config),
        )
    elif opening is not None and (stands := placeholders(model.config)):
        alone = model.config.model_type in seq2seq.TEXT_ALONE
        media = MediaProcessor(resolved.processor, stands, first.trust, text_alone=alone)
    if media is not None and resolved.chat_template is not None:
        media = replace(media, template=resolved.chat_template)
    return Speculator(engine, tokenizer, eos_ids, notes, opening, hearing, defaults, media)


#: Names of what encoders of one image read.
_IMAGES = ("pixel_values", "flattened_patches")
#: The same of encoders of sound, Whisper's aside.
_SOUND = ("inputs", "input_values", "input_features")


def _hears_samples(model: Any) -> bool:
    """Whether its encoder of sound, Whisper's aside, is given what a feature extractor makes."""
    return model.main_input_name in _SOUND or model.config.model_type == "kyutai_speech_to_text"


#: What a draft model attends to, by what it reads.
_WHOSE = {"states": "the target's", "source": "its own"}


def _notes(
    resolved: ResolvedConfig,
    setting: Setting,
    models: LoadedModels,
    tree_check: float,
    calibration: Calibration | None,
) -> Notes:
    target, *drafts = resolved.sources
    place, words = resolved.place, resolved.vocabularies
    reads = [_WHOSE[model.reads] for model in models.drafts if model.reads != "text"]
    return Notes(
        target=str(target),
        draft=", ".join(map(str, drafts)) or resolved.table_name,
        device=str(place),
        dtype=setting.dtype,
        threads=setting.threads,
        packed=models.whole.runner.packed,
        vocab_size=words.size,
        tree_check=tree_check,
        calibration=calibration,
        encoder=", ".join(reads) or None,
        vocabulary="; ".join(str(other) for other in words.drafts if other is not None) or None,
        shards=target.shards,
        means=models.whole.runner.means,
        draft_dtype=describe_draft_dtype(resolved.runtime, drafts, setting, place),
        kernels=native.describe() if place.type == "cpu" else "",
        weights=_weights(target, setting, place),
    )


def _weights(target: ModelSource, setting: Setting, place: torch.device) -> str:
    """What weights are kept in, and what is computed in."""
    if not target.keeps(setting.dtype, place):
        return f"{setting.dtype}, and so are states"
    found = weight_only.formats(target.model(setting.dtype, place))
    sizes = ", ".join(f"{count / 1e6:.0f} MB {name}" for name, count in sorted(found.items()))
    said = f"{sizes}; states and sums float32"
    return f"{said}; {target.widened}" if target.widened else said
