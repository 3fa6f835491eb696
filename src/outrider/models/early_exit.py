"""Some decoder layers of a model, run on the model's own cache: no weight and no entry is copied.

What they write lies in the slots of the layers that they are, at and behind the pending token. The
whole model writes these anew when it scores a draft, so they never outlive it.
"""

import copy
from collections.abc import Sequence

from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models import layer_subset
from outrider.models.decoder import ModelRunner, TreeDecoder
from outrider.models.hf import TransformersRunner
from outrider.models.llama import LlamaRunner
from outrider.types import LanguageModel


def part(model: LanguageModel, layers: Sequence[int]) -> TreeDecoder:
    """These layers of a decoder as a model, for caches of the whole one.

    Raises UnsupportedModel for encoder-decoders and models that score no trees, ConfigurationError
    for layers that are not there.
    """
    if not isinstance(model, TreeDecoder) or model.reads != "text" or not model.trees:
        raise UnsupportedModel(
            "layers of a target run on its cache if it is a decoder that scores trees; got "
            f"{model.runner.name if isinstance(model, TreeDecoder) else type(model).__name__}; "
            "use draft_layers=..., which makes a draft model with a cache of its own"
        )
    numbers, have = tuple(layers), model.runner.layers
    ordered = bool(numbers) and list(numbers) == sorted(set(numbers))
    if not ordered or numbers[0] < 0 or numbers[-1] >= have:
        raise ConfigurationError(
            f"the target has {have} decoder layers, counted from 0; got {numbers}; name some of "
            "them, in their order"
        )
    small = TreeDecoder(_few(model.runner, numbers), model.vocab_size)
    small.of = numbers
    return small


def _few(runner: ModelRunner, numbers: tuple[int, ...]) -> ModelRunner:
    """A runner of these layers."""
    if isinstance(runner, LlamaRunner):
        few = copy.copy(runner)
        few.keep_layers(numbers)
        return few
    assert isinstance(runner, TransformersRunner), "every other runner reads more, or is one"
    return type(runner)(layer_subset.cut(runner.model, numbers))
