"""Which class of transformers opens a checkpoint: found by its configuration, never tried out."""

from typing import Any

import transformers
from transformers import PretrainedConfig

from outrider.errors import UnsupportedModel
from outrider.models.config import pairs, read
from outrider.models.unsupported import REASONS

#: Auto classes with an output layer over a vocabulary, in the order in which they are asked. The
#: causal one goes first, but for models whose prompts hold images or sound: of some of those it
#: opens the decoder alone.
_SEEING = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForCausalLM")
_TEXT = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
)
#: What configurations call the parts that read images and sound.
_PARTS = ("vision", "audio", "encoder")
_ENCODER_DECODER = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
)


def auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that makes models of this configuration with an output layer.

    Raises UnsupportedModel for what is no language model.

    >>> from transformers import LlamaConfig, LlavaConfig, T5Config
    >>> [auto_class(kind()).__name__ for kind in (LlamaConfig, LlavaConfig, T5Config)]
    ['AutoModelForCausalLM', 'AutoModelForImageTextToText', 'AutoModelForSeq2SeqLM']
    """
    both = pairs(config)  # not a decoder cut out of one
    parts = any(read(config, f"{part}_config", PretrainedConfig) for part in _PARTS)
    names = _ENCODER_DECODER if both else (*_SEEING, *_TEXT) if parts else _TEXT
    own = read(config, "auto_map", dict) or {}  # classes in the folder's own files
    every = [getattr(transformers, name, None) for name in names]  # not all in every version
    found = [
        kind
        for name, kind in zip(names, every, strict=True)
        if kind is not None and (type(config) in kind._model_mapping or name in own)
    ]
    said = read(config, "architectures", list) or ()
    if len(found) > 1 and said:  # of types with one class for text and one for speech
        named = (kind for kind in found if _opens(kind, config) in said)
        return next(named, found[0])
    if found:
        return found[0]
    for name in read(config, "architectures", list) or ():  # the text part of another model
        kind = getattr(transformers, name, None)
        if kind is not None and kind.config_class is type(config) and kind.can_generate():
            return kind
    if config.model_type in REASONS:
        raise UnsupportedModel(
            f"{config.model_type!r} models are not supported: {REASONS[config.model_type]}; got "
            f"{type(config).__name__}; give a language model"
        )
    raise UnsupportedModel(
        f"a {config.model_type!r} model cannot be a target or a draft: transformers "
        f"{transformers.__version__} has no class of it with an output layer over a vocabulary; "
        f"got {type(config).__name__}; give a language model"
    )


def _opens(kind: Any, config: PretrainedConfig) -> str | None:
    """The name of the class that an auto class makes of a configuration."""
    if type(config) not in kind._model_mapping:
        return None
    made = kind._model_mapping[type(config)]
    return made.__name__ if isinstance(made, type) else None
