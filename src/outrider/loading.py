"""Names to objects: models, tokenizer, drafter and rule. The registries meet here."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from outrider import arguments, drafters, verifiers
from outrider.costs import Costs
from outrider.drafters.ngram_file import opened
from outrider.drafters.ngram_table import Table
from outrider.drafters.recipes import DrafterParts, DraftOptions, Recipe
from outrider.engine import speculation_policy as planners
from outrider.engine.engine import Engine
from outrider.engine.speculation_policy import Planner
from outrider.errors import (
    ConfigurationError,
    NumericalError,
    UnsupportedModel,
    VocabularyMismatch,
)
from outrider.models import (
    TreeDecoder,
    budget,
    calibrate,
    distributed,
    isa,
    load_checks,
    reads_more,
    unsupported,
    weight_only,
)
from outrider.models.batch_invariance import PaddingPolicy
from outrider.models.calibrate import Calibration, Setting
from outrider.models.cpu_kernels import build as native
from outrider.models.draft_source import Draft, resolve_draft
from outrider.models.heads import HeadModel
from outrider.models.layer_subset_source import LayerSubset
from outrider.models.runtime_config import (
    RuntimeOptions,
    describe_draft_dtype,
    resolve_runtime,
)
from outrider.models.sources import (
    ModelSource,
    ShareEncoder,
    read_tokenizer,
    usable,
    usable_file,
)
from outrider.models.vocabularies import VocabularyPair, shared
from outrider.shipped import CORRECTOR, DRAFTS, SMOLLM2_HEAD, is_shipped, shipped
from outrider.speech import speech_model
from outrider.text.decoder_prompt import DecoderPrompt, ModelDefaults
from outrider.text.speculator import Speculator
from outrider.types import Drafter, Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Model: TypeAlias = str | Path | PreTrainedModel


_log = logging.getLogger("outrider")

#: The target ahead of its draft models.
Sources: TypeAlias = tuple[ModelSource, *tuple[Draft, ...]]

#: What runs: a target, and what drafts beside it.
Target: TypeAlias = TreeDecoder | distributed.ShardedModel
Beside: TypeAlias = TreeDecoder | HeadModel


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
    target: "Model | None" = None,
    draft: "Model | Sequence[Model] | None" = None,
    *,
    drafter: str | None = None,
    num_speculative_tokens: int | None = None,
    branching: Sequence[int] | None = None,
    width: int | None = None,
    total_tokens: int | None = None,
    tree_acceptance: Sequence[float] | None = None,
    ngram: Sequence[int] | None = None,
    table: str | Path | Table | None = None,
    shared_noise: bool = False,
    drafter_options: Mapping[str, object] | None = None,
    draft_layers: Sequence[int] | None = None,
    planner: str | Planner[Any] | None = None,
    step_costs: str | Path | Costs | None = None,
    rule: str | Verifier | None = None,
    rule_options: Mapping[str, object] | None = None,
    dtype: str | torch.dtype = "auto",
    draft_dtype: str | None = None,
    device: str | torch.device | None = None,
    threads: int | str = "auto",
    pack_weights: bool | str = "auto",
    tokenizer: "str | Path | PreTrainedTokenizerBase | None" = None,
    draft_tokenizer: "str | Path | PreTrainedTokenizerBase | None" = None,
    share_encoder: ShareEncoder = "auto",
    tensor_parallel: int | None = None,
    trust_remote_code: bool = False,
    generation_config: str = "auto",
) -> Speculator:
    """Load a target with a drafter. With no arguments: the shipped Python-code pair.

    target, draft   local paths, hub names, or loaded transformers models; drafter="paths" takes a
                    list of draft models, which share its paths evenly (SpecInfer); a draft may
                    be a folder of trained layers (docs/shallow-drafts.md) or of a head
                    (docs/heads.md) for this target, or have another tokenizer
                    (docs/other-tokenizers.md). Shipped: the target "corrector", for damaged Python,
                    "whisper-base-draft" of Whisper base, "smollm2-head" of SmolLM2-135M-Instruct
    drafter         a name in `drafters.DRAFTERS`, which says what each takes; None: "draft_model"
                    for a draft ("translated" for another tokenizer's, "either" for the shipped
                    head), else "recall" ("suffix" on a GPU), "reference_lookup" with an encoder
    num_speculative_tokens  the depth (gamma) of a chain or tree. None: the length of `branching`,
                    what the planner chooses, or what the drafter usually drafts
    branching       children per level, e.g. (3, 2, 1): a tree instead of a chain
    width           paths of "beam" and "paths"; copies of "reference_lookup"; of "dynamic_tree" the
                    nodes expanded per level and the children of each (EAGLE-2's top_k)
    total_tokens    drafted tokens of "dynamic_tree", the best of all candidates; or of the shape
                    that `tree_acceptance` asks for
    tree_acceptance chance that a node's k-th child is kept, such as (0.6, 0.15, 0.05): the best
                    fixed shape of `total_tokens` nodes (Sequoia)
    ngram           shortest and longest n-gram that a lookup looks for; None: (1, 4)
    table           counts for "ngram_table" and "ngram_tree": a file (`ngram_file.write`) or a
                    `Table`; None: the shipped pair's
    shared_noise    draw with shared noise: the same seed gives the same text for any drafter
    drafter_options options that one drafter has for itself, by name
    draft_layers    decoder layers of the target itself as the draft model, such as (0, 5)
    planner         "adaptive": in each step the draft that is worth most by acceptance so far and
                    measured costs, or none; "fixed": the usual one. None: "adaptive" if no number
                    says how much to draft (docs/planner.md)
    step_costs      of whole steps, by `Costs` or its file; None: measured once, and remembered
    rule            name of a verification rule; None takes the default for the drafter
    rule_options    the rule's own options by name, such as {"lenience": 0.3}
    dtype           what weights are kept in: "float32", "bfloat16", "float16", "int8", "int4" (on a
                    CPU), or "auto": a GGUF file's own blocks; else on a CPU the faster of float32
                    and bfloat16, elsewhere the checkpoint's (docs/processors.md)
    draft_dtype     "int8": what draft models read in 8 bits, on a CPU (docs/drafters.md); "target":
                    in the target's dtype; None: as a draft folder says, else the target's
    threads, pack_weights  "auto" measures once per machine and remembers; a number and a bool
    override.
                    torch has one number of threads for the process: the last load sets it for all
    tokenizer, draft_tokenizer  of transformers, or their paths; None: those beside the models
    share_encoder   whether a draft attends to the target's encoder; "auto": if the two are equal
    tensor_parallel cut the target for so many processes of torchrun: docs/scale.md
    generation_config  "auto": what the model's own says of tokens and sampling holds where a call
                    says nothing; "none": it does not (docs/sampling.md)
    trust_remote_code  run Python files that model folders bring; False refuses (docs/security.md)

    Raises ConfigurationError and its kin before any prompt is read.

    >>> speculator = outrider.load(num_speculative_tokens=3)   # doctest: +SKIP
    """
    isa.level()  # a misspelt one is said before anything is read
    if generation_config not in ("auto", "none"):
        arguments.refuse("generation_config", "'auto' or 'none'", generation_config, "use 'auto'")
    sizes = num_speculative_tokens, branching, width, total_tokens, tree_acceptance
    options = DraftOptions(*sizes, ngram, shared_noise, drafter_options)
    judge = verifiers.chosen(rule, rule_options, shared_noise)
    wish = RuntimeOptions(dtype, threads, pack_weights, draft_dtype)
    draft = _draft(draft, draft_layers)
    target, draft, table = _beside(target, draft, table, drafter, options)
    group = None if tensor_parallel is None else distributed.join(tensor_parallel, device)
    first = seen(target, group, trust_remote_code)
    sources = _sources(first, drafters.models(draft), share_encoder)
    place = _place(sources, device)
    tokenizer = (
        _tokenizer(sources[0]) if tokenizer is None else read_tokenizer(tokenizer, first.trust)
    )
    words = shared(sources, tokenizer, draft_tokenizer)
    drafter = drafter or _usual(first, draft, words, place, options, judge)
    recipe = drafters.check(drafter, options, draft, table)
    ahead = options.num_speculative_tokens or recipe.depth
    planner, options = planners.chosen(planner, recipe, options)
    priced = Costs.read(step_costs) if isinstance(step_costs, (str, Path)) else step_costs
    counts = _counts(table, words.size)
    with budget.under(budget.unspent()):
        running = _run(sources, wish, place, words, ahead, share_encoder)
        own, *others = running.models
        made = recipe.make(DrafterParts(words.over(others), counts, words.size, own), options)
        _check_shape(made, sources, running.models, options)
        notes = _notes(sources, running, wish, place, words, table)
        engine = _engine(sources, running, place, made, judge, planner, priced)
    model = first.model(running.setting.dtype, place)
    return _spoken(engine, tokenizer, notes, sources, model, generation_config == "auto")


def seen(
    target: "Model | None", group: distributed.Group | None = None, trust_remote_code: bool = False
) -> ModelSource:
    """A target before its weights are read, with its configuration; shipped where there is none.

    >>> seen("corrector").config.is_encoder_decoder
    True
    """
    if target is None or target == CORRECTOR:
        target = shipped("target" if target is None else CORRECTOR)
    return ModelSource(target, "target", group, trust_remote_code)


def _spoken(
    engine: Engine,
    tokenizer: "PreTrainedTokenizerBase | None",
    notes: Notes,
    sources: Sources,
    model: "PreTrainedModel",
    follow: bool,
) -> Speculator:
    """The engine with what its target says of texts: how they begin and end, whether it hears.

    `follow`: its generation configuration holds, if it goes on from its prompt.
    """
    first, eos_ids = sources[0], sources[0].eos_ids()
    opening, defaults = None, ModelDefaults()
    with usable_file(str(first), "generation_config.json"):
        if reads_more(first.config):
            opening = DecoderPrompt.of(first.settings(), eos_ids, str(first))
            if opening.start >= engine.target.vocab_size:
                raise ValueError(f"decoder_start_token_id={opening.start} is no token")
        elif follow:
            defaults = ModelDefaults.of(first.settings(), eos_ids)
    if defaults.left_out:
        _log.warning(
            "%s: its generation configuration sets %s, which outrider does not follow",
            first,
            ", ".join(defaults.left_out),
        )
    configs = [source.config for source in sources[1:]]
    hears = speech_model.opened(str(first), first.given, model, tokenizer, configs)
    return Speculator(engine, tokenizer, eos_ids, notes, opening, hears, defaults)


def _beside(
    target: "Model | None",
    draft: "Model | LayerSubset | Sequence[Model] | None",
    table: str | Path | Table | None,
    drafter: str | None,
    options: DraftOptions,
) -> "tuple[Model | Path, Model | LayerSubset | Sequence[Model] | None, str | Path | Table | None]":
    """Target, draft and table, shipped where there is no target.

    What a drafter lacks that is named is said before anything is read.
    """
    if target is None:
        name = drafter or drafters.usual(shipped("draft"))
        target, draft, table = _shipped_parts(drafters.get(name), draft, table)
    if drafter is not None:
        drafters.check(drafter, options, draft, table)
    return target, draft, table


def _shipped_parts(
    recipe: Recipe, draft: "Model | Sequence[Model] | None", table: str | Path | Table | None
) -> tuple[Path, "Model | Sequence[Model] | None", str | Path | Table | None]:
    """The shipped target, and what its drafter needs besides: shipped unless it is given."""
    if draft is None and recipe.wants("draft"):
        draft = shipped("draft")
    if table is None and recipe.wants("table"):
        table = shipped("ngram.safetensors")
    return shipped("target"), draft, table


def _draft(
    draft: "Model | Sequence[Model] | None", layers: Sequence[int] | None
) -> "Model | LayerSubset | Sequence[Model] | None":
    """The draft as it is to be read: a shipped one by its name, or layers of the target."""
    if layers is None:
        return shipped(draft) if isinstance(draft, str) and draft in DRAFTS else draft
    if draft is not None:
        raise ConfigurationError(
            f"draft_layers makes a draft of the target; got draft={arguments.shown(draft)}, too; "
            "leave one of them out"
        )
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
    beside = [resolve_draft(draft, first) for draft in drafts]
    unsupported.check_pair(first.config, [source.config for source in beside])
    if first.group is not None:
        unsupported.check_cut(
            first.config, all(isinstance(source, ModelSource) for source in beside)
        )
    return first, *beside


def _engine(
    sources: Sources,
    running: "_Running",
    place: torch.device,
    drafter: Drafter,
    rule: Verifier | None,
    planner: Planner[Any],
    costs: Costs | None,
) -> Engine:
    """With the costs given, or else with those measured for one row, here or earlier."""
    target = running.models[0]
    if costs is not None:
        return Engine(target, drafter, rule, planner, costs)
    about: tuple[object, ...] = (running.setting, place, drafter.name, drafter.shapes, rule)
    about += (sources[0].shards,)
    if place.type == "cuda":  # as graphs, steps cost a fraction of what they did
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
    engine.priced(1)
    return engine


def _tokenizer(target: ModelSource) -> "PreTrainedTokenizerBase | None":
    """The one beside the target; the shipped corrector has that of the shipped target."""
    if is_shipped(target, CORRECTOR):
        return read_tokenizer(shipped("target"))
    return target.tokenizer()


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


def _counts(table: str | Path | Table | None, vocab: int) -> Table | None:
    """The table, counted with the target's tokenizer."""
    counts = opened(table)
    if counts is not None and counts.vocab_size != vocab:
        raise VocabularyMismatch(
            f"the n-gram table knows {counts.vocab_size} tokens, the target's tokenizer "
            f"{vocab}; count one with that tokenizer and vocab_size={vocab}"
        )
    return counts


class _Running(NamedTuple):
    """Models ready to run, and how they were set up."""

    models: tuple[Target, *tuple[Beside, ...]]  #: the target ahead of its draft models
    setting: Setting
    calibration: Calibration | None
    tree_check: float  #: how far the target's scores of trees are from those of their paths


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


def _run(
    sources: Sources,
    wish: RuntimeOptions,
    place: torch.device,
    words: VocabularyPair,
    ahead: int,
    share: ShareEncoder,
) -> _Running:
    """Target and draft models under the setting that is wished for or fastest.

    Raises UnsupportedModel if one does not score trees as their paths.
    """

    if place.type == "cpu":
        native.start()  # compiles, where it must, while weights are read
    target, *drafts = sources
    each = [words.size if other is None else other.draft.size for other in words.drafts]
    sizes = dict(zip(drafts, each, strict=True))

    def driven(source: Draft, setting: Setting) -> Beside:
        shares = source.shares(target, share, setting.dtype, place)
        return source.driven(setting, place, sizes[source], shares)

    def of_target(setting: Setting) -> TreeDecoder:
        own = target.driven(setting, place, words.size)
        budget.current().allow(target.model(setting.dtype, place).num_parameters())
        return own

    def build(setting: Setting) -> tuple[TreeDecoder, Beside | None]:
        own = of_target(setting)
        return own, driven(drafts[0], setting) if drafts else None

    setting, calibration = resolve_runtime(wish, target, drafts, build, place, ahead)
    if place.type == "cpu":
        torch.set_num_threads(setting.threads)
    whole = of_target(setting)
    own = whole if target.group is None else distributed.split(whole, target.group)
    beside = [driven(source, setting) for source in drafts]
    if wish.pack_weights is True and not _packed(own):
        raise ConfigurationError(
            f"pack_weights=True is for linear layers; got {target}, which has none of torch's "
            f"own; leave "
            "it out"
        )
    for draft in beside:  # a draft need not round alike in every call: no dummy nodes
        if isinstance(draft, TreeDecoder):
            draft.rounding = draft.rounding._replace(rows=PaddingPolicy())
    worst = [
        _trees(source, model, setting, place) if model.trees and not model.taps else 0.0
        for source, model in zip(sources, (own, *beside), strict=True)
    ]
    return _Running((own, *beside), setting, calibration, worst[0])


def _trees(source: Draft, model: Target | Beside, setting: Setting, place: torch.device) -> float:
    """How far a model's scores of trees are from those of their paths."""
    try:
        return load_checks.trees(model, source.role)
    except NumericalError as error:
        if not isinstance(source, ModelSource):
            raise
        raise source.not_numbers(source.model(setting.dtype, place), error) from error


def _packed(model: Target | Beside) -> bool:
    return isinstance(model, TreeDecoder) and model.runner.packed


def _check_shape(
    drafter: Drafter,
    sources: Sources,
    models: Sequence[Target | Beside],
    options: DraftOptions,
) -> None:
    """Refuse trees of draft models that score chains only."""
    for source, model in zip(sources[1:], models[1:], strict=True):
        if not drafter.shapes[0].is_chain and not model.trees:
            raise UnsupportedModel(
                f"the draft model {source} scores chains but not trees; got drafter "
                f"{drafter.name!r} with branching={options.branching}; use drafter='draft_model' "
                "without it"
            )


#: What a draft model attends to, by what it reads.
_WHOSE = {"states": "the target's", "source": "its own"}


def _notes(
    sources: Sources,
    running: _Running,
    wish: RuntimeOptions,
    place: torch.device,
    words: VocabularyPair,
    table: str | Path | Table | None,
) -> Notes:
    named = "a Table" if isinstance(table, Table) else None if table is None else str(table)
    target = running.models[0]
    runner = target.runner if isinstance(target, TreeDecoder) else target.model.runner
    return Notes(
        str(sources[0]),
        ", ".join(map(str, sources[1:])) or named,
        str(place),
        running.setting.dtype,
        running.setting.threads,
        runner.packed,
        words.size,
        running.tree_check,
        running.calibration,
        ", ".join(_WHOSE[model.reads] for model in running.models[1:] if model.reads != "text")
        or None,
        "; ".join(str(other) for other in words.drafts if other is not None) or None,
        sources[0].shards,
        runner.means,
        describe_draft_dtype(wish, sources[1:], running.setting, place),
        native.told() if place.type == "cpu" else "",
        _weights(sources[0], running.setting, place),
    )


def _weights(target: ModelSource, setting: Setting, place: torch.device) -> str:
    """What weights are kept in, and what is computed in."""
    if not target.keeps(setting.dtype, place):
        return f"{setting.dtype}, and so are states"
    found = weight_only.formats(target.model(setting.dtype, place))
    sizes = ", ".join(f"{count / 1e6:.0f} MB {name}" for name, count in sorted(found.items()))
    said = f"{sizes}; states and sums float32"
    return f"{said}; {target.widened}" if target.widened else said
