"""What objects of transformers say of themselves.

Their fields differ by family and by version: this is the one place that looks whether one is there.
"""

import json
import re
from pathlib import Path
from typing import Any, TypeVar

from transformers import PretrainedConfig

from outrider.errors import ConfigurationError

Kind = TypeVar("Kind")
#: Types that read something beside their text at every call, which do not call themselves pairs.
_UNSAID = frozenset({"blip", "kyutai_speech_to_text", "voxtral_realtime"})
#: Types whose encoder of text reads the states that another part has made of images.
_ENCODES_STATES = frozenset({"florence2"})

#: What a decoder calls the width of the states that it attends to, where it has a name for it.
_STATES = ("cross_attention_hidden_size", "encoder_hidden_size")

#: Types whose encoder ends with a projection to the width of the decoder.
_PROJECTS = frozenset({"pp_formulanet"})


def found(of: object, name: str) -> Any:
    """The attribute `name`, whatever it is; None where there is none."""
    return getattr(of, name, None)


def read(of: object, name: str, kind: type[Kind] | tuple[type[Kind], ...]) -> Kind | None:
    """The field `name` of a configuration or a model if it is of this kind, else None.

    >>> from transformers import LlamaConfig
    >>> read(LlamaConfig(vocab_size=96), "vocab_size", int), read(LlamaConfig(), "n_ctx", int)
    (96, None)
    """
    value = found(of, name)
    return value if isinstance(value, kind) else None


def folder_fields(folder: object) -> dict[str, Any]:
    """What a folder's config.json says; nothing if it has none that can be read, or is no path."""
    if not isinstance(folder, (str, Path)):
        return {}
    try:
        fields = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def pairs(config: PretrainedConfig) -> bool:
    """Whether it is an encoder and a decoder that reads what the encoder makes.

    >>> from transformers import BlipConfig, LlamaConfig, T5Config
    >>> [pairs(kind()) for kind in (BlipConfig, LlamaConfig, T5Config)]
    [True, False, True]
    """
    return bool(read(config, "is_encoder_decoder", bool)) or config.model_type in _UNSAID


def decoder_of(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a configuration that says how the decoder is built.

    It is the object that the model reads. (`get_text_config(decoder=True)` of an encoder-decoder is
    a copy with renamed fields, in which the number of layers is the default of the class.)
    """
    if not pairs(config):
        return config.get_text_config(decoder=True)
    return _part(config, "decoder") or read(config, "text_config", PretrainedConfig) or config


def encoder_of(config: PretrainedConfig) -> PretrainedConfig:
    """The part of an encoder-decoder's configuration that says how the encoder is built."""
    text = read(config, "text_config", PretrainedConfig)
    if text is not None and config.model_type in _ENCODES_STATES:
        return text
    found = _part(config, "encoder") or read(config, "vision_config", PretrainedConfig) or config
    return read(found, "text_config", PretrainedConfig) or found


def _part(config: PretrainedConfig, name: str) -> PretrainedConfig | None:
    """A part of a configuration, by either of the names that families have for it."""
    found = read(config, name, PretrainedConfig)
    return found or read(config, f"{name}_config", PretrainedConfig)


def is_speech(config: PretrainedConfig) -> bool:
    """Whether it is a Whisper with an encoder of its own."""
    return bool(config.model_type == "whisper" and config.is_encoder_decoder)


#: Fields of a configuration that name a token which stands for an image, a frame or sound.
_PLACEHOLDER = re.compile(
    r"(image|video|audio|speech|vision|media)(_\w+)?_(token|patch)_(id|index)|im_patch_id"
)
#: Parts of a configuration in which they may be named.
_PARTS = ("vision_config", "audio_config")


def placeholders(config: PretrainedConfig) -> frozenset[int]:
    """Token ids that stand for images or sound in prompts; none for a model of text alone.

    >>> from transformers import LlamaConfig, LlavaConfig
    >>> sorted(placeholders(LlavaConfig())), placeholders(LlamaConfig())
    ([32000], frozenset())
    """
    parts = [config, *(read(config, name, PretrainedConfig) for name in _PARTS)]
    fields = (field for part in parts if part is not None for field in vars(part).items())
    named = [value for name, value in fields if _PLACEHOLDER.fullmatch(name)]
    words = read(config, "vocabulary_map", dict) or {}  # of models that write pictures as tokens
    named.append(words.get("<image>"))
    return frozenset(value for value in named if type(value) is int and value >= 0)


#: What MiniCPM-V 4.7 calls marks between images and their parts.
_MARKS = ("slice_start_id", "slice_end_id", "image_start_id", "image_end_id", "newline_id")


def closers(config: PretrainedConfig) -> frozenset[int]:
    """Token ids that belong to an image they stand directly behind.

    >>> from transformers import LlavaConfig
    >>> closers(LlavaConfig())
    frozenset()
    """
    marks = (read(config, name, int) for name in _MARKS)
    return frozenset(mark for mark in marks if mark is not None)


def reads_sound_in_prompts(config: PretrainedConfig) -> bool:
    """Whether a prompt of such a model may hold sound.

    >>> from transformers import LlavaConfig, VoxtralConfig
    >>> reads_sound_in_prompts(VoxtralConfig()), reads_sound_in_prompts(LlavaConfig())
    (True, False)
    """
    parts = (config, read(config, "audio_config", PretrainedConfig))
    names = (name for part in parts if part is not None for name in vars(part))
    return any(re.match("(audio|speech)_.*(id|index)$", name) for name in names)


def states_width(config: PretrainedConfig) -> int:
    """The width of the encoder's states that a decoder attends to, before it projects them."""
    if pairs(config):
        if config.model_type in _PROJECTS:
            return int(decoder_of(config).hidden_size)
        made = encoder_of(config)
        return read(made, "output_hidden_size", int) or int(made.hidden_size)
    said = (read(config, name, int) for name in _STATES)
    return next((width for width in said if width), int(config.hidden_size))


def vocabulary_of(config: PretrainedConfig) -> int:
    """How many tokens the model's output layer knows."""
    inner = decoder_of(config)
    size = read(inner, "decoder_vocab_size", int) or read(inner, "vocab_size", int)
    if not size:
        raise ConfigurationError(
            f"a configuration must name a vocabulary; got vocab_size={size!r} in "
            f"{config.name_or_path!r} ({type(config).__name__}); mend its config.json"
        )
    return size
