"""Registry of runners: how the layers of a model are run, most specific first."""

from typing import Any

import torch

from outrider.errors import UnsupportedModel
from outrider.models import llama
from outrider.models.causal import CausalModel
from outrider.models.hf import TransformersRunner
from outrider.models.llama import LlamaRunner

#: Architectures that are checked by the tests of this release, by transformers' model_type.
SUPPORTED = {"llama"}


def adapt(model: Any, *, packed: bool = False, vocab_size: int | None = None) -> CausalModel:
    """Drive a loaded transformers model: the lean runner on a CPU, else its own forward.

    Raises UnsupportedModel, with the reason, for architectures that are not driven exactly.
    """
    kind = getattr(model.config, "model_type", type(model).__name__)
    if kind not in SUPPORTED:
        raise UnsupportedModel(
            f"architecture {kind!r} is not supported: its masks and positions have not been "
            f"checked over trees; got {type(model).__name__}; supported: "
            f"{', '.join(sorted(SUPPORTED))}"
        )
    on_cpu = torch.device(model.device).type == "cpu"
    if on_cpu and llama.fits(model):
        return CausalModel(LlamaRunner(model, packed), vocab_size)
    return CausalModel(TransformersRunner(model), vocab_size)


__all__ = ["SUPPORTED", "CausalModel", "LlamaRunner", "TransformersRunner", "adapt"]
