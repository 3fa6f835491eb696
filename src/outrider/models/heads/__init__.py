"""Heads: small modules that draft from the target's hidden states."""

from outrider.models.heads.eagle3 import Eagle3, Eagle3Config, HeadStates

__all__ = ["Eagle3", "Eagle3Config", "HeadStates"]
