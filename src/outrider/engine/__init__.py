"""Requests in, blocks of tokens out: rows of a batch, one step after another."""

from outrider.engine import step
from outrider.engine.engine import Engine, Observer, Run
from outrider.engine.request import Limits, Request

__all__ = ["Engine", "Limits", "Observer", "Request", "Run", "step"]
