"""Beam search over a tree in one cache: identical beams, fewer and wider model calls."""

from outrider.engine.beam_search.beams import Beams

__all__ = ["Beams"]
