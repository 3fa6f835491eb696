"""outrider: speculative decoding that is exact, fast and a pleasure to use.

>>> import outrider
>>> speculator = outrider.load()                      # doctest: +SKIP
>>> print(speculator.generate("def fib(n):").texts)   # doctest: +SKIP
"""

from outrider.drafters import DraftModel, PromptLookup, Root
from outrider.engine import Engine
from outrider.errors import (
    BackendUnavailable,
    CapacityError,
    ConfigurationError,
    NumericalError,
    OutriderError,
    PromptError,
    UnknownName,
    UnsupportedModel,
    VocabularyMismatch,
)
from outrider.load import load
from outrider.request import Limits
from outrider.sampling import Sampling
from outrider.speculator import Completion, Generation, Speculator, Stop, TextBlock
from outrider.stats import RequestStats, Stats

__version__ = "0.1.0.dev0"

__all__ = [
    "BackendUnavailable",
    "CapacityError",
    "Completion",
    "ConfigurationError",
    "DraftModel",
    "Engine",
    "Generation",
    "Limits",
    "NumericalError",
    "OutriderError",
    "PromptError",
    "PromptLookup",
    "RequestStats",
    "Root",
    "Sampling",
    "Speculator",
    "Stats",
    "Stop",
    "TextBlock",
    "UnknownName",
    "UnsupportedModel",
    "VocabularyMismatch",
    "load",
]
