"""Which class of transformers opens a checkpoint, by its configuration, and what it reads of it."""

from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NoReturn

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from outrider.errors import (
    ConfigurationError,
    RemoteCodeRefused,
    UnsupportedModel,
    first_line,
    kind_of,
    pickled,
)
from outrider.models import pretrained
from outrider.models.config import found, pairs, read
from outrider.models.program_imports import made_lean
from outrider.models.unsupported import REASONS

if TYPE_CHECKING:
    from outrider.models.sources import ModelSource


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
    every = [found(transformers, name) for name in names]  # not all in every version
    fitting = [
        kind
        for name, kind in zip(names, every, strict=True)
        if kind is not None and (type(config) in kind._model_mapping or name in own)
    ]
    said = read(config, "architectures", list) or ()
    if len(fitting) > 1 and said:  # of types with one class for text and one for speech
        named = (kind for kind in fitting if _opens(kind, config) in said)
        return next(named, fitting[0])
    if fitting:
        return fitting[0]
    for name in read(config, "architectures", list) or ():  # the text part of another model
        kind = found(transformers, name)
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


# A checkpoint's weights, whole or this process's part, and what is wrong with one in words.


def read_weights(source: "ModelSource", **how: object) -> PreTrainedModel:
    """The model with all of its weights from the checkpoint, its adapter merged.

    Raises ConfigurationError for files that are broken, weights that are not there or of another
    size, and packages that are not installed.
    """
    kind = auto_class(source.config)
    more = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # told below
    try:
        with made_lean(source.config.model_type):
            model, told = pretrained.read_model(kind, source.where, source.trust, **more, **how)
    except UnpicklingError as error:
        _refuse(source, pickled(error), error)
    except (UnsupportedModel, RemoteCodeRefused):
        raise
    except ImportError as error:
        if source.quantised_by is None:
            raise ConfigurationError(
                f"the {source.role} model needs a package that is not installed "
                f"({first_line(error)}); got {str(source.given)!r}; install it"
            ) from error
        raise ConfigurationError(
            f"the weights of the {source.role} model are quantised by {source.quantised_by!r}, "
            f"which needs a package that is not installed ({first_line(error)}); got "
            f"{str(source.given)!r}; install it, or give the checkpoint that they were made of"
        ) from error
    except Exception as error:  # a broken file, or sizes in config.json that make no model
        if how.get("distributed_config") is not None and isinstance(error, ValueError):
            raise  # said by who asked for it
        _refuse(source, kind_of(error), error)
    wrong = sorted([*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])])
    if wrong:
        _refuse(source, f"{len(wrong)} of them are not there, or of another size: {wrong[0]}")
    loaded: PreTrainedModel = model
    return loaded if source.adapter is None else source.adapter.merged(loaded, source.role)


def read_part(source: "ModelSource", **how: object) -> PreTrainedModel:
    """This process's part of the model, by the plan that transformers has for its family.

    Raises UnsupportedModel for a family that has none for this number of processes.
    """
    from transformers.distributed import DistributedConfig

    try:
        plan = DistributedConfig(tp_size=source.shards, tp_plan="auto")
        return read_weights(source, distributed_config=plan, **how)
    except ValueError as error:
        raise UnsupportedModel(
            f"{source.config.model_type!r} cannot be cut for {source.shards} processes "
            f"({first_line(error)}); got {source}; use another number of processes, or another "
            "model"
        ) from error


def _refuse(source: "ModelSource", why: str, error: Exception | None = None) -> NoReturn:
    raise ConfigurationError(
        f"cannot read the weights of the {source.role} model; got {str(source.given)!r} ({why}); "
        "download it again, or save it whole"
    ) from error
