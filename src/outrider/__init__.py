"""outrider: speculative decoding that is exact, fast and a pleasure to use.

Public besides the names below: `outrider.drafters`, `outrider.verifiers`, `outrider.engine`,
`outrider.certify`, `outrider.integrations`, `outrider.ops`, `outrider.theory`, `outrider.testing`.

>>> import outrider
>>> speculator = outrider.load()                      # doctest: +SKIP
>>> print(speculator.generate("def fib(n):").texts)   # doctest: +SKIP
"""

from outrider.drafters import DraftModel, PromptLookup, ReferenceLookup, Root
from outrider.engine.engine import Engine
from outrider.engine.request import Limits, Request
from outrider.engine.run import Run
from outrider.engine.search import Beams
from outrider.errors import (
    AudioError,
    BackendUnavailable,
    CapacityError,
    ConfigurationError,
    NumericalError,
    OutriderError,
    PromptError,
    ShardLost,
    UnknownName,
    UnsupportedModel,
    VocabularyMismatch,
)
from outrider.laws.sampling import Sampling
from outrider.laws.timestamps import Timestamps
from outrider.load import load
from outrider.stats import RequestStats, Stats
from outrider.text.results import Completion, Generation, TextBlock
from outrider.text.speculator import Speculator
from outrider.text.stop import Stop

__version__ = "0.1.0.dev0"

__all__ = [
    "AudioError",
    "BackendUnavailable",
    "Beams",
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
    "ReferenceLookup",
    "Request",
    "RequestStats",
    "Root",
    "Run",
    "Sampling",
    "ShardLost",
    "Speculator",
    "Stats",
    "Stop",
    "TextBlock",
    "Timestamps",
    "UnknownName",
    "UnsupportedModel",
    "VocabularyMismatch",
    "load",
]
