"""Heads: small modules that draft from the target's hidden states, and what is driven like them."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from outrider import plugins
from outrider.models.config import folder_fields, read
from outrider.models.draft_source import TargetBoundSource
from outrider.models.sources import ModelSource

if TYPE_CHECKING:
    from outrider.models.heads.pard import PardSource

#: What makes a draft model of a folder with a head.
HeadKind: TypeAlias = "type[TargetBoundSource] | type[PardSource]"


class LazyKind(NamedTuple):
    """A kind that is imported once a draft has one of its marks: see `marks`."""

    home: str  #: "module:class"
    marks: frozenset[str]

    def load(self) -> "HeadKind":
        """The class."""
        module, _, name = self.home.partition(":")
        kind: HeadKind = vars(import_module(f"{__name__}.{module}"))[name]
        return kind


MTP = "mtp"  #: the draft of a target that brings such layers in its own checkpoint


def _kind(home: str, *marks: str) -> LazyKind:
    return LazyKind(home, frozenset(marks))


#: Where heads come from, each asked in this order whether a folder is its own. To add one: append
#: its class.
SOURCES: "list[LazyKind | HeadKind]" = [
    _kind("mtp:MtpSource", MTP),
    _kind("pard:PardSource", "pard_token"),
    _kind("gemma4_assistant:Gemma4AssistantSource", "gemma4_assistant", "gemma4_unified_assistant"),
    _kind("blockwise:BlockwiseSource", "blockwise_heads"),
    _kind("domino:DominoSource", "speculators_model_type"),
    _kind("dflash:DFlashSource", "speculators_model_type", "dflash_config"),
    _kind("dspark:DSparkSource", "speculators_model_type"),
    *(
        _kind(home, "speculators_model_type", "draft_vocab_size", "eagle_config")
        for home in ("parallel_eagle:PEagleSource", "source:HeadSource")
    ),
]


def _source(given: object) -> type[TargetBoundSource]:
    """What entry points may give: a class of sources."""
    what = "a head's source is a subclass of outrider.models.draft_source.TargetBoundSource"
    return plugins.subclass(given, TargetBoundSource, what)  # type: ignore[type-abstract]


#: Sources of other distributions, each named as a mark of its folders.
PLUGINS = plugins.PluginGroup("outrider.heads", "head", _source)
#: What configurations of heads say of themselves.
_HEADS = re.compile("draft|eagle|hydra|medusa|mtp|pard|speculat", re.IGNORECASE)


def marks(given: object) -> frozenset[str]:
    """What a draft shows of its kind: its name, its type, and the fields of its config.json."""
    if isinstance(given, PreTrainedModel):
        return frozenset({str(read(given.config, "model_type", str))})
    if not isinstance(given, (str, Path)):
        return frozenset()
    fields = folder_fields(given)
    return frozenset({str(given), str(fields.get("model_type")), *fields})


def source_of(given: object, target: ModelSource) -> "TargetBoundSource | PardSource | None":
    """The head that a folder, or "mtp", stands for; None: it stands for another draft.

    Raises ConfigurationError and VocabularyMismatch for a head that cannot be used.
    """
    for kind in _kinds(marks(given)):
        if kind.reads(given):
            return kind(target, given)
    if isinstance(given, (str, Path)):
        _refuse_unknown(Path(given))
    return None


def _kinds(shown: frozenset[str]) -> "Iterator[HeadKind]":
    """Kinds with one of these marks, ours first. Plug-ins are imported where one is named so."""
    for kind in SOURCES:
        if not isinstance(kind, LazyKind):
            yield kind
        elif not kind.marks.isdisjoint(shown):
            yield kind.load()
    if not shown.isdisjoint(PLUGINS.names()):
        lazy = (kind.marks for kind in SOURCES if isinstance(kind, LazyKind))
        found = PLUGINS.load(frozenset().union(*lazy))
        for name in sorted(shown):
            PLUGINS.refuse_broken(name)
            if name in found:
                yield found[name]


def _refuse_unknown(folder: Path) -> None:
    """Refuse a folder that calls itself a head, in a form that nothing here reads, and no model.

    Raises ConfigurationError, which says what was found and what is known.
    """
    fields = folder_fields(folder)
    kind, made = fields.get("model_type"), fields.get("architectures") or []
    names = [name for name in (kind, *made, *fields) if isinstance(name, str)]
    found = [name for name in names if _HEADS.search(name)]
    if kind in CONFIG_MAPPING_NAMES or "auto_map" in fields or not found:
        return
    from outrider.models.heads import formats

    raise formats.bad_head(
        folder,
        f"a head of a form that is not known: model_type={kind!r}, architectures={made}, "
        f"and {found[0]!r}",
        "known are EAGLE-3, P-EAGLE and DFlash (their authors' and speculators' layout), DSpark "
        "and Domino (speculators), PARD, Gemma 4's assistants, blockwise heads (blockwise_heads), "
        "and layers in the target's own checkpoint (draft='mtp')",
    )
