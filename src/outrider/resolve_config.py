"""From a `LoadConfig` to what is to be loaded, before any weight is read: names become objects."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from outrider import arguments, drafters, verifiers
from outrider.costs import Costs
from outrider.drafters.recipes import COMMON, DraftOptions, Recipe
from outrider.engine import speculation_policy as planners
from outrider.engine.speculation_policy import Planner
from outrider.errors import ConfigurationError, VocabularyMismatch
from outrider.load_config import PATHS, LoadConfig
from outrider.models import heads, isa, load_checks, reads_more, unsupported
from outrider.models.config import is_speech, vocabulary_of
from outrider.models.draft_source import DraftSource
from outrider.models.placement import usable
from outrider.models.pretrained import is_processor, resolve_tokenizer, with_chat_template
from outrider.models.runtime_config import RuntimeOptions
from outrider.models.sources import ModelSource, ShareEncoder
from outrider.shipped import CORRECTOR, DRAFTS, SMOLLM2_HEAD, is_shipped, shipped
from outrider.types import LanguageModel, Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from outrider.drafters.ngram_table import Table
    from outrider.load_config import Model, Tokenizers
    from outrider.models.distributed import Group
    from outrider.models.layer_subset import LayerSubset
    from outrider.models.token_remap import VocabularyMap

    #: What a user may give as a draft, once its layers are read.
    AnyDraft: TypeAlias = Model | LayerSubset | Sequence[Model] | None

#: The target ahead of its draft models.
Sources: TypeAlias = tuple[ModelSource, *tuple[DraftSource, ...]]


class VocabularyPair(NamedTuple):
    """The target's vocabulary, and how draft models with another one are translated into it."""

    size: int
    drafts: "tuple[VocabularyMap | None, ...]" = ()  #: None: the target's own vocabulary

    def over(self, models: Sequence[LanguageModel]) -> tuple[LanguageModel, ...]:
        """Draft models over the target's tokens."""
        if all(words is None for words in self.drafts):
            return tuple(models)
        from outrider.models.cross_tokenizer_model import TranslatedModel

        each = zip(models, self.drafts, strict=True)
        return tuple(
            model if words is None else TranslatedModel(model, words, self.size)
            for model, words in each
        )


def shared(
    sources: Sources, tokenizer: "PreTrainedTokenizerBase | None", other: "Tokenizers | None"
) -> VocabularyPair:
    """How many tokens the target has, and which of them its draft models share."""
    load_checks.draft_tokenizer(other, sources[1:])
    own = None if other is None else resolve_tokenizer(other, sources[0].trust)
    most, *rest = (vocabulary_of(source.config) for source in sources)
    found = VocabularyPair(load_checks.vocabulary(tokenizer, None, {"target": most}))
    if is_speech(sources[0].config):  # tokenizers of older checkpoints lack the timestamps
        found = VocabularyPair(most)
    for source, size in zip(sources[1:], rest, strict=True):
        each = {"target": most, "draft": size}
        told = own or source.tokenizer()
        words = None
        if tokenizer is None or told is None:
            load_checks.vocabulary(tokenizer, None, each)
        elif not (source.stands_alone and _of_text(sources[0]) and _of_text(source)):
            load_checks.vocabulary(tokenizer, told, each)
        elif told.get_vocab() == tokenizer.get_vocab():
            load_checks.vocabulary(tokenizer, None, each)
        else:
            from outrider.models.token_remap import vocabulary_map

            words = vocabulary_map(tokenizer, told)
        found = found._replace(drafts=(*found.drafts, words))
    return found


def _of_text(source: DraftSource) -> bool:
    return not reads_more(source.config)


@dataclass(frozen=True)
class ResolvedConfig:
    """What is to be loaded: nothing is left to be named or looked up."""

    sources: Sources
    runtime: RuntimeOptions  #: dtypes, threads and packing as they are wished for
    place: torch.device
    share_encoder: ShareEncoder
    tokenizer: "PreTrainedTokenizerBase | None"
    vocabularies: VocabularyPair
    recipe: Recipe  #: how the drafter is made
    options: DraftOptions
    depth: int  #: tokens that a step drafts, for what is measured
    table: "Table | None"
    table_name: str | None  #: of the table, for `Notes`
    rule: Verifier | None  #: None: the drafter's usual one
    planner: Planner[Any]
    step_costs: Costs | None  #: None: to be measured
    #: what reads images and sound of prompts, or where it lies; None: nobody knows
    processor: Any
    chat_template: str | None  #: one that was given, and stands for the processor's, too
    follow: bool  #: whether the target's generation configuration holds


def resolve(config: LoadConfig) -> ResolvedConfig:
    """Read every option, and find what it names; configurations and tokenizers are read.

    Raises ConfigurationError and its kin for what cannot be had.

    >>> resolve(LoadConfig(drafter="prompt_lookup", ngram=(2, 3))).depth
    8
    """
    config = replace(config, **arguments.at_home(arguments.fields_of(config, PATHS)))
    isa.level()  # a misspelt one is said before anything is read
    if config.generation_config not in ("auto", "none"):
        what, given = "'auto' or 'none'", config.generation_config
        arguments.refuse("generation_config", what, given, "use 'auto'")
    common = arguments.fields_of(config, COMMON)
    options = DraftOptions(**common, own=config.drafter_options)
    rule = verifiers.chosen(config.rule, config.rule_options, config.shared_noise)
    runtime = RuntimeOptions(config.dtype, config.threads, config.pack_weights, config.draft_dtype)
    target, draft, table = _shipped(config, options)
    cut = config.tensor_parallel
    group = None
    if cut is not None:
        from outrider.models import distributed

        group = distributed.join(cut, config.device)
    first = seen(target, group, config.trust_remote_code)
    if config.lora_modules is not None:
        first.serve(config.lora_modules)
    sources = _sources(first, drafters.models(draft), config.share_encoder)
    place = _place(sources, config.device)
    tokenizer, template = _tokenizer(first, config.tokenizer), None
    if config.chat_template is not None:
        if reads_more(first.config):
            raise ConfigurationError(
                "chat_template is for models that answer conversations; got one that reads a "
                f"source beside its own text ({first}); leave it out"
            )
        tokenizer = with_chat_template(tokenizer, config.chat_template)
        template = tokenizer.chat_template
    words = shared(sources, tokenizer, config.draft_tokenizer)
    name = config.drafter or _usual(first, draft, words, place, options, rule)
    recipe = drafters.check(name, options, draft, table)
    depth = options.num_speculative_tokens or recipe.depth
    planner, options = planners.chosen(config.planner, recipe, options)
    costs = config.step_costs
    return ResolvedConfig(
        sources=sources,
        runtime=runtime,
        place=place,
        share_encoder=config.share_encoder,
        tokenizer=tokenizer,
        vocabularies=words,
        recipe=recipe,
        options=options,
        depth=depth,
        rule=rule,
        planner=planner,
        step_costs=Costs.read(costs) if isinstance(costs, (str, Path)) else costs,
        table=_counts(table, words.size),
        table_name=_name(table),
        processor=_processor(first, config.tokenizer),
        chat_template=template,
        follow=config.generation_config == "auto",
    )


def seen(
    target: "Model | None", group: "Group | None" = None, trust_remote_code: bool = False
) -> ModelSource:
    """A target before its weights are read, with its configuration; shipped where there is none.

    >>> seen("corrector").config.is_encoder_decoder
    True
    """
    if target is None or target == CORRECTOR:
        target = shipped("target" if target is None else CORRECTOR)
    return ModelSource(target, "target", group, trust_remote_code)


def _shipped(
    config: LoadConfig, options: DraftOptions
) -> "tuple[Model, AnyDraft, str | Path | Table | None]":
    """Target, draft and table, shipped where there is no target.

    What a drafter lacks that is named is said before anything is read.
    """
    target, table, drafter = config.target, config.table, config.drafter
    draft = _draft(config.draft, config.draft_layers)
    if target is None:
        name = drafter or drafters.usual(shipped("draft"))
        target, draft, table = _shipped_parts(drafters.get(name), draft, table)
    if drafter is not None:
        drafters.check(drafter, options, draft, table)
    return target, draft, table


def _shipped_parts(
    recipe: Recipe, draft: "AnyDraft", table: "str | Path | Table | None"
) -> "tuple[Path, AnyDraft, str | Path | Table | None]":
    """The shipped target, and what its drafter needs besides: shipped unless it is given."""
    if draft is None and recipe.wants("draft"):
        draft = shipped("draft")
    if table is None and recipe.wants("table"):
        table = shipped("ngram.safetensors")
    return shipped("target"), draft, table


def _draft(draft: "Model | Sequence[Model] | None", layers: Sequence[int] | None) -> "AnyDraft":
    """The draft as it is to be read: a shipped one by its name, or layers of the target."""
    if layers is None:
        return shipped(draft) if isinstance(draft, str) and draft in DRAFTS else draft
    if draft is not None:
        raise ConfigurationError(
            f"draft_layers makes a draft of the target; got draft={arguments.shown(draft)}, too; "
            "leave one of them out"
        )
    from outrider.models.layer_subset import LayerSubset

    return LayerSubset(tuple(layers))


def _sources(
    first: ModelSource, drafts: "Sequence[Model | LayerSubset]", share_encoder: ShareEncoder
) -> Sources:
    """The target ahead of its drafts, some of which may be made of it.

    Raises UnsupportedModel and ConfigurationError for what no configuration of theirs allows.
    """
    if share_encoder is True and not drafts:
        raise ConfigurationError(
            "share_encoder=True is for a draft model; got none; give draft=..., or leave it out"
        )
    beside = [_source(draft, first) for draft in drafts]
    unsupported.check_pair(first.config, [source.config for source in beside])
    if first.group is not None:
        unsupported.check_cut(first.config, all(source.stands_alone for source in beside))
    return first, *beside


def _tokenizer(target: ModelSource, given: "Tokenizers | None") -> "PreTrainedTokenizerBase | None":
    """The one given, or the one beside the target; the corrector has the shipped target's."""
    if given is not None:
        return resolve_tokenizer(given, target.trust)
    if is_shipped(target, CORRECTOR):
        return resolve_tokenizer(shipped("target"))
    return target.tokenizer()


def _processor(target: ModelSource, given: "Tokenizers | None") -> Any:
    """A processor that was given as the tokenizer, or the folder that may have one."""
    if is_processor(given):
        return given
    places = [place for place in (given, target.files) if isinstance(place, (str, Path))]
    return places[0] if places and not target.in_blocks else None


def _source(given: "Model | LayerSubset", target: ModelSource) -> DraftSource:
    """Where a draft comes from: a folder of layers or of a head says what it is by itself."""
    from outrider.models.layer_subset import LayerSubsetSource

    if LayerSubsetSource.reads(given):
        return LayerSubsetSource(target, given)
    return heads.source_of(given, target) or ModelSource(given, "draft", trust=target.trust)


def _place(sources: Sources, device: str | torch.device | None) -> torch.device:
    """The device that all models share."""
    if sources[0].group is not None:
        return sources[0].group.device
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    place = usable(sources[0].loaded_device() or usual if device is None else device)
    for source in sources:
        home = source.loaded_device()
        if home is not None and (home.type, home.index or 0) != (place.type, place.index or 0):
            raise ConfigurationError(
                "target and draft model must share a device; got a "
                f"{source.role} model on {home} and {place} for the rest; move one of them"
            )
    return place


def _name(table: "str | Path | Table | None") -> str | None:
    """What notes call it."""
    if table is None:
        return None
    return str(table) if isinstance(table, (str, Path)) else "a Table"


def _counts(table: "str | Path | Table | None", vocab: int) -> "Table | None":
    """The table, counted with the target's tokenizer."""
    if table is None:
        return None
    from outrider.drafters.ngram_table import opened

    counts = opened(table)
    if counts is not None and counts.vocab_size != vocab:
        raise VocabularyMismatch(
            f"the n-gram table knows {counts.vocab_size} tokens, the target's tokenizer "
            f"{vocab}; count one with that tokenizer and vocab_size={vocab}"
        )
    return counts


def _usual(
    first: ModelSource,
    draft: object,
    words: VocabularyPair,
    place: torch.device,
    options: DraftOptions,
    rule: Verifier | None,
) -> str:
    """The drafter of a user who names none: the shipped head's is the one it is fastest with."""
    asked = options.asked() or rule is not None
    ours = isinstance(draft, Path) and is_shipped(draft, SMOLLM2_HEAD)
    if ours and place.type == "cpu" and not asked:
        return "either"
    reads, differs = reads_more(first.config), any(words.drafts)
    return drafters.usual(draft, reads, differs, place, options)
