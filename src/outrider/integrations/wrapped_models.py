"""Models behind `generate`: checked once, and again after any change, their weights live."""

from pathlib import Path
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel
from transformers import generation as hf

from outrider.errors import ConfigurationError
from outrider.keywords import CONFIGURED
from outrider.models import (
    TransformersRunner,
    TreeDecoder,
    load_checks,
    reads_more,
    runner_of,
    seq2seq,
    unsupported,
)
from outrider.models.config import decoder_of, read
from outrider.models.model_lock import CONFIGURATION

#: What a model was when it passed its check. Nothing here keeps a model alive.
_CHECKED: WeakKeyDictionary[PreTrainedModel, tuple[object, ...]] = WeakKeyDictionary()


def named(config: hf.GenerationConfig) -> dict[str, object]:
    """Speculative keywords of a generation configuration.

    transformers fills in its defaults before we are called, so a value equal to the default is
    taken as not given.
    """
    defaults: dict[str, object] = hf.GenerationConfig._get_default_generation_params()
    named = {name: read(config, name, object) for name in CONFIGURED}
    return {name: value for name, value in named.items() if value != defaults.get(name)}


def driven(model: PreTrainedModel, role: str, shares: bool = False) -> TreeDecoder:
    """The model behind a runner of its own that reads its live weights.

    Checked when it is first seen, and again after any change of its configuration. A draft that
    `shares` attends to the states of the target's encoder.
    """
    name = "draft_model" if role == "draft" else "model"
    if isinstance(model, (str, Path)):
        raise ConfigurationError(
            f"{name} must be a loaded model here; got {str(model)!r}; load it with "
            "transformers' from_pretrained first"
        )
    unsupported.check_loaded(model, name, "one loaded model")
    with CONFIGURATION:
        text = decoder_of(model.config)
        state = (model.device, model.dtype, text._attn_implementation, model.config.to_dict())
        if _CHECKED.get(model) != state:
            unsupported.check(model)
            load_checks.paths(TreeDecoder(runner(model)), role)
            _CHECKED[model] = state
        return TreeDecoder(runner(model, shares))


def runner(model: PreTrainedModel, shares: bool = False) -> TransformersRunner:
    """What runs the model through its own forward."""
    if reads_more(model.config):
        return seq2seq.runner_of(model)(model, shares)
    return runner_of(model)(model)
