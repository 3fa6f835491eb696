"""Heads: small modules that draft from the target's hidden states."""

from outrider.models.heads.eagle3 import Eagle3, Eagle3Config, HeadStates
from outrider.models.heads.following import HeadCache, HeadModel, StateHead
from outrider.models.heads.formats import save
from outrider.models.heads.source import HeadSource, is_folder

__all__ = [
    "Eagle3",
    "Eagle3Config",
    "HeadCache",
    "HeadModel",
    "HeadSource",
    "HeadStates",
    "StateHead",
    "is_folder",
    "save",
]
