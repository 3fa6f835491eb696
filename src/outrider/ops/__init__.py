"""Numerical operations behind one set of names; the PyTorch reference is the specification."""

from outrider.ops.reference import draw, follow, log_probs, probs, residual, scaled, select

__all__ = ["draw", "follow", "log_probs", "probs", "residual", "scaled", "select"]
