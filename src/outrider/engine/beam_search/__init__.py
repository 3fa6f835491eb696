"""Beam search over a tree in one cache: identical beams, fewer and wider model calls."""

from typing import TYPE_CHECKING

from outrider import lazy

if TYPE_CHECKING:
    from outrider.engine.beam_search.step import Beams

__all__ = ["Beams"]
__getattr__, __dir__ = lazy.exports(__name__, {"Beams": "outrider.engine.beam_search.step"})
