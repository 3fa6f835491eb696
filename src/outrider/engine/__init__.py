"""Requests in, blocks of tokens out: rows of a batch, one step after another."""

from outrider.engine import step
from outrider.engine.engine import Engine
from outrider.engine.request import Limits, Request
from outrider.engine.run import Observer, Run

__all__ = ["Engine", "Limits", "Observer", "Request", "Run", "step"]
