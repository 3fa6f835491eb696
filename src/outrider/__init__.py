"""outrider: speculative decoding that is exact, fast and a pleasure to use.

Public besides the names below: `outrider.drafters`, `outrider.verifiers`, `outrider.engine`,
`outrider.integrations`, `outrider.ops`, `outrider.stochastic`, `outrider.testing`.

>>> import outrider
>>> speculator = outrider.load()                      # doctest: +SKIP
>>> print(speculator.generate("def fib(n):").texts)   # doctest: +SKIP
"""

from typing import TYPE_CHECKING

from outrider import lazy
from outrider.errors import (
    AudioError,
    BackendUnavailable,
    CapacityError,
    ConfigurationError,
    ImageError,
    NumericalError,
    OutriderError,
    PromptError,
    RemoteCodeRefused,
    ShardLost,
    UnknownName,
    UnsupportedModel,
    VocabularyMismatch,
    WorkerTimeout,
)

if TYPE_CHECKING:
    from outrider import (
        drafters as drafters,
        engine as engine,
        integrations as integrations,
        ops as ops,
        stochastic as stochastic,
        testing as testing,
        verifiers as verifiers,
    )
    from outrider.drafters import DraftModel, PromptLookup, ReferenceLookup, Root
    from outrider.engine.beam_search import Beams
    from outrider.engine.engine import Engine
    from outrider.engine.engine_run import EngineRun
    from outrider.engine.request import Request, StopConditions
    from outrider.load_config import LoadConfig
    from outrider.loading import load
    from outrider.sampling.sampling_params import SamplingParams
    from outrider.sampling.timestamps import Timestamps
    from outrider.stats import RequestStats, Stats
    from outrider.stochastic.rounds import speculate
    from outrider.text.output_text import Completion, Generation, Stop, TextBlock
    from outrider.text.speculator import Speculator

__version__ = "0.1.0"

__all__ = [
    "AudioError",
    "BackendUnavailable",
    "Beams",
    "CapacityError",
    "Completion",
    "ConfigurationError",
    "DraftModel",
    "Engine",
    "EngineRun",
    "Generation",
    "ImageError",
    "LoadConfig",
    "NumericalError",
    "OutriderError",
    "PromptError",
    "PromptLookup",
    "ReferenceLookup",
    "RemoteCodeRefused",
    "Request",
    "RequestStats",
    "Root",
    "SamplingParams",
    "ShardLost",
    "Speculator",
    "Stats",
    "Stop",
    "StopConditions",
    "TextBlock",
    "Timestamps",
    "UnknownName",
    "UnsupportedModel",
    "VocabularyMismatch",
    "WorkerTimeout",
    "load",
    "speculate",
]

#: Where each name is imported from when it is first asked for: torch and transformers load then.
_EXPORTS = {
    "DraftModel": "outrider.drafters",
    "PromptLookup": "outrider.drafters",
    "ReferenceLookup": "outrider.drafters",
    "Root": "outrider.drafters",
    "Engine": "outrider.engine.engine",
    "StopConditions": "outrider.engine.request",
    "Request": "outrider.engine.request",
    "EngineRun": "outrider.engine.engine_run",
    "Beams": "outrider.engine.beam_search",
    "SamplingParams": "outrider.sampling.sampling_params",
    "Timestamps": "outrider.sampling.timestamps",
    "LoadConfig": "outrider.load_config",
    "load": "outrider.loading",
    "RequestStats": "outrider.stats",
    "Stats": "outrider.stats",
    "speculate": "outrider.stochastic.rounds",
    "Completion": "outrider.text.output_text",
    "Generation": "outrider.text.output_text",
    "TextBlock": "outrider.text.output_text",
    "Speculator": "outrider.text.speculator",
    "Stop": "outrider.text.output_text",
}
#: Public packages, which are attributes as well.
_PARTS = ("drafters", "engine", "integrations", "ops", "stochastic", "testing", "verifiers")

__getattr__, __dir__ = lazy.exports(__name__, _EXPORTS, _PARTS)
