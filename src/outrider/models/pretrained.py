"""Every read of a model folder that transformers does for outrider: here, and nowhere else.

A folder's `auto_map` names Python files beside the weights. transformers runs them where it is told
`trust_remote_code=True`, and asks on the terminal where it is told nothing. Here it is always told:
False unless the caller of `outrider.load` or of a command said True (docs/security.md).
tests/models/test_remote_code.py finds loads that go another way.
"""

import copy
import importlib
import logging
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    WhisperFeatureExtractor,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from outrider import arguments
from outrider.errors import ConfigurationError, RemoteCodeRefused, first_line, kind_of
from outrider.models import gguf
from outrider.models.config import read
from outrider.models.seq2seq import OWN
from outrider.types import Tokenizer

_log = logging.getLogger("outrider.security")

#: Models are made here and moved by us, wherever the caller's program has tensors made.
_HOST = torch.device("cpu")

_FELL_BACK: set[str] = set()  #: folders whose own files could not be imported, as was said

#: Fields of a configuration that may name code on the hub: kernels in place of attention's own.
_KERNELS = ("_attn_implementation", "_experts_implementation")


def read_trust(given: object) -> bool:
    """`trust_remote_code` as it was given: True or False and nothing that may be read as either.

    >>> read_trust(False)
    False
    """
    if not isinstance(given, bool):
        do = "leave it out; True runs Python files of the model folder"
        arguments.refuse("trust_remote_code", "True or False", given, do)
    return given


def warn(where: str) -> None:
    """Say in the log that Python files of a model folder may run."""
    _log.warning("trust_remote_code=True: Python files of %s may run in this process", where)


def read_config(where: str, trust: bool, **how: Any) -> PretrainedConfig:
    """A folder's or hub name's configuration. Raises ConfigurationError for code nobody asked for.

    >>> read_config("Qwen/Qwen2.5-0.5B", trust=False).model_type        # doctest: +SKIP
    'qwen2'
    """
    try:
        with gguf.quick_reader(how.get("gguf_file")):
            config: PretrainedConfig = AutoConfig.from_pretrained(
                where, trust_remote_code=trust, **how
            )
    except ImportError as error:
        if not trust or not _has_own(where, error):
            raise
        return read_config(where, False, **how)
    except ValueError as error:
        if _registers(where, how):
            return read_config(where, trust, **how)
        raise _explained(error, where) from error
    parts = [config, *(read(config, name, PretrainedConfig) for name in config.sub_configs)]
    for name in () if trust else _KERNELS:
        for part in parts:
            kernel = read(part, name, str)
            if kernel is not None and "/" in kernel:
                raise _refused(where, f"{name.lstrip('_')}={kernel!r} is a kernel of the hub")
    return config


def _registers(where: str, how: dict[str, Any]) -> bool:
    """Whether this is a model of ours that transformers did not know, and does now."""
    known, _ = PretrainedConfig.get_config_dict(where, **how)
    file = OWN.get(known.get("model_type", ""))
    new = file is not None and file not in sys.modules
    if file is not None:
        importlib.import_module(file)
    return new


def _has_own(where: str, error: ImportError) -> bool:
    """Whether transformers has a class of its own for a folder whose files lack a package.

    Such files come with hybrid models: they need the authors' kernels (mamba_ssm, causal_conv1d,
    fla), where transformers' class of the same type does without. Says so, once a folder.
    """
    known, _ = PretrainedConfig.get_config_dict(where)
    kind = known.get("model_type")
    if "auto_map" not in known or kind not in CONFIG_MAPPING_NAMES:
        return False
    if where not in _FELL_BACK:
        _FELL_BACK.add(where)
        _log.warning(
            "the Python files of %s need a package that is not installed (%s): transformers' own "
            "%s is read in their place, and torch's operators stand for the package's kernels",
            where,
            first_line(error),
            kind,
        )
    return True


def read_model(kind: Any, where: str, trust: bool, **how: Any) -> Any:
    """A model by one of transformers' auto classes, with what else that returns.

    Pickled weights are read as weights only: torch runs nothing of them. Raises ConfigurationError
    for code nobody asked for.
    """
    try:
        with gguf.quick_reader(how.get("gguf_file")), _HOST:
            return kind.from_pretrained(where, trust_remote_code=trust, weights_only=True, **how)
    except ImportError as error:
        if not trust or not _has_own(where, error):
            raise
        return read_model(kind, where, False, **how)
    except ValueError as error:
        raise _explained(error, where) from error


def empty_model(kind: Any, config: PretrainedConfig, trust: bool) -> Any:
    """A model of that configuration by one of transformers' auto classes, no weights read.

    Raises ConfigurationError for code nobody asked for.
    """
    try:
        with _HOST:
            if issubclass(kind, PreTrainedModel):  # one class of transformers' own
                return kind._from_config(config)
            return kind.from_config(config, trust_remote_code=trust)
    except ValueError as error:
        raise _explained(error, config.name_or_path) from error


def read_mtp(kind: Any, model: PreTrainedModel, **how: Any) -> Any:
    """Layers of multi-token prediction of a loaded model: transformers' own classes, no code."""
    with _HOST:
        return kind.from_pretrained(model, **how)


def read_adapter(model: PreTrainedModel, where: str) -> tuple[Any, Any]:
    """A model that wears a folder's adapter of peft, and what was found missing or too much.

    The folder has safetensors (`peft_models`), so nothing of it runs.
    """
    import peft

    with warnings.catch_warnings(), _HOST:
        warnings.simplefilter("ignore", FutureWarning)  # of names that peft still reads
        config = peft.PeftConfig.from_pretrained(where)
        config.inference_mode = True
        worn = peft.PeftModel(model, config)
        return worn, worn.load_adapter(where, worn.active_adapter)


def read_tokenizer(where: str, trust: bool, **how: Any) -> PreTrainedTokenizerBase:
    """A tokenizer. Raises ConfigurationError for code nobody asked for."""
    try:
        with gguf.quick_reader(how.get("gguf_file")):
            made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                where, trust_remote_code=trust, **how
            )
    except ValueError as error:
        raise _explained(error, where) from error
    return made


def read_processor(where: str, trust: bool, pixels_alone: bool = False) -> Any:
    """What makes tensors of images or sound: a folder's or hub name's processor, or what makes
    pixels of images, for a model that reads nothing else.

    Raises ConfigurationError for code nobody asked for.
    """
    kind = AutoImageProcessor if pixels_alone else AutoProcessor
    try:
        return kind.from_pretrained(where, trust_remote_code=trust)
    except ValueError as error:
        raise _explained(error, where) from error


def read_generation_config(where: str) -> GenerationConfig:
    """A generation configuration: JSON of transformers' own class, which can name no code."""
    return GenerationConfig.from_pretrained(where)


def read_feature_extractor(where: str) -> WhisperFeatureExtractor:
    """A Whisper's feature extractor: JSON of transformers' own class, which can name no code."""
    made: WhisperFeatureExtractor = WhisperFeatureExtractor.from_pretrained(where)
    return made


def _refused(where: str, why: str) -> RemoteCodeRefused:
    place = Path(where).absolute() if Path(where).exists() else f"https://hf.co/{where}"
    return RemoteCodeRefused(
        f"this model comes with Python code of its own, which outrider does not run; got {where!r} "
        f"({why}); read the files at {place}, and if you trust them say trust_remote_code=True to "
        "outrider.load, or --trust-remote-code to the command"
    )


def _explained(error: ValueError, where: str) -> ValueError:
    """transformers' refusal to run code as ours; any other error as it is."""
    if "trust_remote_code" not in str(error) or isinstance(error, ConfigurationError):
        return error
    return _refused(where, "its auto_map names files to run")


# Tokenizers as they lie in folders: read, absent, or broken with the reason.

#: Files that a tokenizer is read from: a folder without any has none.
_TOKENIZER_FILES = tuple(
    """
    tokenizer.json tokenizer.model tokenizer_config.json tekken.json spiece.model spm.model
    spm_char.model sentencepiece.model sentencepiece.bpe.model source.spm vocab.json
    vocab-src.json vocab.txt vocab.bpe merges.txt bpe.codes dict.txt prophetnet.tokenizer
    qwen.tiktoken
    """.split()
)


def tokenizer_files(folder: Path) -> list[str]:
    """The files of a tokenizer that this folder has."""
    return [name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def tokenizer_beside(given: str | Path, role: str, trust: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model's folder, hub name or GGUF file; None where there is none.

    Raises ConfigurationError for one that is there and cannot be used.
    """
    known = gguf.cache_folder(given)
    if known is not None and (known / "tokenizer").is_dir():
        with suppress(OSError, ValueError):
            return read_tokenizer(str(known / "tokenizer"), trust)
    where, how = gguf.locate(given)
    folder = Path(given)
    there = tokenizer_files(folder)
    try:
        made = read_tokenizer(where, trust, **how)
        gguf.remember(given, made, "tokenizer")
    except RemoteCodeRefused:
        raise
    except Exception as error:  # the tokenizers library raises plain ones
        if folder.is_dir() and not there:
            return None
        if isinstance(error, ImportError):
            raise ConfigurationError(
                f"the tokenizer of {given} needs a package that is not installed "
                f"({first_line(error)}); install it, or pass tokenizer=..."
            ) from error
        if not there and isinstance(error, (OSError, ValueError)):
            return None
        why = kind_of(error)
        if isinstance(error, TypeError) and "NoneType" in why:  # a path that is None
            why = "a file that it is read from, beside those, is missing"
        raise ConfigurationError(
            f"cannot read the tokenizer of the {role} model; got {str(given)!r} "
            f"({', '.join(there[:3]) or 'no file of it'}: {why}); download it again, or pass "
            "tokenizer=..."
        ) from error
    names = {*made.vocab_files_names.values(), "tokenizer.json"}
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        return None  # some families make an empty one of nothing
    return made


def is_processor(given: object) -> bool:
    """Whether it reads images or sound besides text: a processor, which has a tokenizer."""
    return read(given, "tokenizer", PreTrainedTokenizerBase) is not None


def resolve_tokenizer(
    given: str | Path | PreTrainedTokenizerBase, trust: bool = False
) -> PreTrainedTokenizerBase:
    """A tokenizer that was given by path, hub name or as an object."""
    if not isinstance(given, (str, Path)):
        inner = read(given, "tokenizer", PreTrainedTokenizerBase)
        if inner is not None:  # a processor's
            return inner
        if not isinstance(given, Tokenizer):
            do = "see AutoTokenizer, or wrap it: PreTrainedTokenizerFast(tokenizer_object=...)"
            arguments.refuse("tokenizer", "a tokenizer of transformers, or its path", given, do)
        return given
    where, how = gguf.locate(given)
    try:
        return read_tokenizer(where, trust, **how)
    except RemoteCodeRefused:
        raise
    except Exception as error:  # the tokenizers library raises plain ones
        raise ConfigurationError(
            f"cannot load the tokenizer; got {str(given)!r} ({kind_of(error)}); check the path "
            "or pass a tokenizer"
        ) from error


def with_chat_template(tokenizer: Tokenizer | None, given: str | Path) -> PreTrainedTokenizerBase:
    """A copy of this tokenizer with a chat template that is given as a file, or as its text.

    Raises ConfigurationError for a file that is not there, for what is no template, and for a
    tokenizer that is not transformers', or of mistral-common, which has no templates.
    """
    from transformers.tokenization_mistral_common import MistralCommonBackend  # seldom wanted

    what, text = "chat_template", arguments.template(given)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        got = "none" if tokenizer is None else type(tokenizer).__name__
        raise ConfigurationError(
            f"{what} is for a model with a tokenizer of transformers; got {got}; give "
            "tokenizer=..., too, or leave it out"
        )
    if isinstance(tokenizer, MistralCommonBackend):
        raise ConfigurationError(
            f"{what} is for tokenizers that write conversations by one; got a tokenizer of "
            "mistral-common, which writes them by its own code; leave it out, or give a folder "
            "with a tokenizer.json as tokenizer=..."
        )
    own: PreTrainedTokenizerBase = copy.copy(tokenizer)
    own.chat_template = text
    try:
        own.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except Exception as error:  # that it refuses such a message is its own affair
        kinds = {kind.__name__ for kind in type(error).__mro__}  # Jinja is imported by it alone
        if kinds & {"SyntaxError", "TemplateSyntaxError"}:
            raise ConfigurationError(
                f"{what} is no template; got {arguments.shown(given)} ({first_line(error)}); write "
                "it in Jinja, as tokenizers have it"
            ) from error
    return own
