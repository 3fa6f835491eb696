"""Heads: small modules that draft from the target's hidden states."""

from pathlib import Path
from typing import TypeAlias

from outrider.models.heads import blockwise, dflash_source, source
from outrider.models.heads.autoregressive_head import (
    AutoregressiveHead,
    HeadCache,
    StateHead,
)
from outrider.models.heads.blockwise import Blockwise, BlockwiseSource, ParallelHead
from outrider.models.heads.dflash import DFlash, DFlashConfig, MaskedBlockHead
from outrider.models.heads.dflash_source import DFlashSource
from outrider.models.heads.eagle3 import Eagle3, Eagle3Config, HeadStates
from outrider.models.heads.formats import save
from outrider.models.heads.model import HeadModel
from outrider.models.heads.mtp import MTP, MtpSource
from outrider.models.heads.source import HeadSource
from outrider.models.sources import ModelSource

#: Where any head comes from.
AnySource: TypeAlias = HeadSource | BlockwiseSource | DFlashSource | MtpSource


def source_of(given: object, target: ModelSource) -> AnySource | None:
    """The head that a folder, or "mtp", stands for; None: it stands for another draft.

    Raises ConfigurationError and VocabularyMismatch for a head that cannot be used.
    """
    if given == MTP:
        return MtpSource(target)
    if not isinstance(given, (str, Path)):
        return None
    if blockwise.is_folder(given):
        return BlockwiseSource(target, given)
    if dflash_source.is_folder(given):
        return DFlashSource(target, given)
    return HeadSource(target, given) if source.is_folder(given) else None


__all__ = [
    "MTP",
    "AnySource",
    "AutoregressiveHead",
    "Blockwise",
    "DFlash",
    "DFlashConfig",
    "Eagle3",
    "Eagle3Config",
    "HeadCache",
    "HeadModel",
    "HeadSource",
    "HeadStates",
    "MaskedBlockHead",
    "ParallelHead",
    "StateHead",
    "save",
    "source_of",
]
