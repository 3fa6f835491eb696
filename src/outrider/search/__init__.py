"""Beam search over a tree in one cache: identical beams, fewer and wider model calls."""

from outrider.search.beams import Beams

__all__ = ["Beams"]
