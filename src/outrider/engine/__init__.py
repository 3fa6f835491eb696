"""Requests in, blocks of tokens out: rows of a batch, one step after another."""

from outrider.engine import step
from outrider.engine.engine import Engine
from outrider.engine.engine_run import EngineRun, Observer
from outrider.engine.request import Request, StopConditions

__all__ = ["Engine", "EngineRun", "Observer", "Request", "StopConditions", "step"]
