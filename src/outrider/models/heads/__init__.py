"""Heads: small modules that draft from the target's hidden states, and what is driven like them."""

from pathlib import Path

from outrider.models.draft_source import TargetBoundSource
from outrider.models.heads import formats
from outrider.models.heads.autoregressive_head import (
    AutoregressiveHead,
    HeadCache,
    StateHead,
)
from outrider.models.heads.blockwise import Blockwise, BlockwiseSource, ParallelHead
from outrider.models.heads.dflash import (
    BlockSight,
    DFlash,
    DFlashConfig,
    DFlashSource,
    MaskedBlockHead,
)
from outrider.models.heads.domino import Domino, DominoHead, DominoSource
from outrider.models.heads.dspark import DSpark, DSparkHead, DSparkSource
from outrider.models.heads.eagle3 import Eagle3, Eagle3Config, HeadStates
from outrider.models.heads.formats import save
from outrider.models.heads.gemma4_assistant import Gemma4AssistantSource, KVSharedHead
from outrider.models.heads.model import HeadModel
from outrider.models.heads.mtp import MTP, ChainedHead, MtpSource
from outrider.models.heads.parallel_eagle import (
    ParallelDraftingHead,
    ParallelEagle,
    PEagleSource,
)
from outrider.models.heads.pard import ParallelDraftModel, PardSource
from outrider.models.heads.source import HeadSource
from outrider.models.sources import ModelSource

#: Where heads come from, each asked in this order whether a folder is its own. To add one: append.
SOURCES: list[type[TargetBoundSource] | type[PardSource]] = [
    MtpSource,
    PardSource,
    Gemma4AssistantSource,
    BlockwiseSource,
    DominoSource,
    DFlashSource,
    DSparkSource,
    PEagleSource,
    HeadSource,
]


def source_of(given: object, target: ModelSource) -> TargetBoundSource | PardSource | None:
    """The head that a folder, or "mtp", stands for; None: it stands for another draft.

    Raises ConfigurationError and VocabularyMismatch for a head that cannot be used.
    """
    kind = next((kind for kind in SOURCES if kind.reads(given)), None)
    if kind is None and isinstance(given, (str, Path)):
        formats.refuse_unknown(Path(given))
    return None if kind is None else kind(target, given)


__all__ = [
    "MTP",
    "SOURCES",
    "AutoregressiveHead",
    "BlockSight",
    "Blockwise",
    "ChainedHead",
    "DFlash",
    "DFlashConfig",
    "DSpark",
    "DSparkHead",
    "Domino",
    "DominoHead",
    "Eagle3",
    "Eagle3Config",
    "HeadCache",
    "HeadModel",
    "HeadSource",
    "HeadStates",
    "KVSharedHead",
    "MaskedBlockHead",
    "ParallelDraftModel",
    "ParallelDraftingHead",
    "ParallelEagle",
    "ParallelHead",
    "StateHead",
    "save",
    "source_of",
]
