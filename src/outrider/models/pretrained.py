"""Every read of a model folder that transformers does for outrider: here, and nowhere else.

A folder's `auto_map` names Python files beside the weights. transformers runs them where it is told
`trust_remote_code=True`, and asks on the terminal where it is told nothing. Here it is always told:
False unless the caller of `outrider.load` or of a command said True (docs/security.md).
tests/models/test_remote_code.py finds loads that go another way.
"""

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
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
from outrider.errors import ConfigurationError, RemoteCodeRefused, first_line
from outrider.models.config import read
from outrider.models.seq2seq import OWN

# A reader of GGUF files that takes a word list in one go, for transformers to read with, or passes
# over it, where tensors alone are wanted.
#
# The package `gguf` has a reader that slices a mapped file for every word of a tokenizer, for each
# value several times: 7.6 s of a processor for the 150,000 words of Qwen2.5, and transformers reads
# a file once for its configuration and once for its tokenizer. This one fills in the same fields,
# from one view a list: 0.4 s.

_LOCK = RLock()  #: transformers imports the reader by name at every call: one swap at a time


@contextmanager
def quick_gguf_reader(file: str | None) -> Iterator[None]:
    """While it lasts transformers reads GGUF metadata so; None: there is no such file to read.

    >>> with quick_gguf_reader(None):
    ...     pass
    """
    if file is None:
        yield
        return
    package: Any = import_module("gguf")
    with _LOCK:
        before, package.GGUFReader = package.GGUFReader, _reader(package, lists=True)
        try:
            yield
        finally:
            package.GGUFReader = before


def gguf_tensors(path: Path) -> Any:
    """The package's reader of a file, mapped, whose `tensors` and `fields` are there, but no list.

    Raises ValueError for what is no such file, or a damaged one.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
    try:
        read = _reader(import_module("gguf"), lists=False)(path, "c")  # torch wants to write to it
    except (ValueError, LookupError) as error:
        raise ValueError(f"it is damaged, or of another version: {error}") from error
    if read.byte_order != "I":
        raise ValueError("its numbers have another order of bytes than this machine's")
    return read


def _reader(gguf: Any, lists: bool) -> Any:
    """The package's reader, but for lists of numbers or strings in this machine's byte order, whose
    contents are left out where no `lists` are wanted."""
    kinds = gguf.GGUFValueType

    class QuickReader(gguf.GGUFReader):  # type: ignore[misc]  # the package has no types
        def _get(self, offset: int, dtype: Any, count: int = 1, *how: Any, **named: Any) -> Any:
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise ValueError(
                    f"it ends within its data, at byte {len(self.data)} of {end} or more"
                )
            return super()._get(offset, dtype, count, *how, **named)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if int(raw_type) == kinds.ARRAY and self.byte_order == "I":
                found = self._list(int(orig_offs))
                if found is not None:
                    return found
            return super()._get_field_parts(orig_offs, raw_type)

        def _list(self, at: int) -> Any:
            head = [self._get(at, np.uint32), self._get(at + 4, np.uint64)]
            kind, count, start = kinds(int(head[0][0])), int(head[1][0]), at + 12
            types = [kinds.ARRAY, kind] if count else [kinds.ARRAY]
            number = self.gguf_scalar_to_np.get(kind)
            if number is not None:
                values = self._get(start, number, count)
                if not lists:
                    return 12 + values.nbytes, head, [], types
                return 12 + values.nbytes, [*head, *values[:, None]], [*range(2, 2 + count)], types
            if kind != kinds.STRING:
                return None
            words: Any = np.asarray(self.data)  # the same pages; slices are cheaper
            parts, where, data = list(head), start, memoryview(words)
            for _ in range(count):
                size = int.from_bytes(data[where : where + 8], "little")
                end = where + 8 + size
                if end > len(data):
                    raise ValueError("it ends within a list of strings")
                if lists:
                    parts += [words[where : where + 8].view(np.uint64), words[where + 8 : end]]
                where = end
            return where - at, parts, [*range(3, len(parts) + 1, 2)], types

    return QuickReader


_log = logging.getLogger("outrider.security")

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
        with quick_gguf_reader(how.get("gguf_file")):
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
        with quick_gguf_reader(how.get("gguf_file")):
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
    if issubclass(kind, PreTrainedModel):  # one class of transformers' own, no choice of several
        return kind._from_config(config)
    try:
        return kind.from_config(config, trust_remote_code=trust)
    except ValueError as error:
        raise _explained(error, config.name_or_path) from error


def read_mtp(kind: Any, model: PreTrainedModel, **how: Any) -> Any:
    """Layers of multi-token prediction of a loaded model: transformers' own classes, no code."""
    return kind.from_pretrained(model, **how)


def read_adapter(model: PreTrainedModel, where: str) -> tuple[Any, Any]:
    """A model that wears a folder's adapter of peft, and what was found missing or too much.

    The folder has safetensors (`peft_models`), so nothing of it runs.
    """
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that peft still reads
        config = peft.PeftConfig.from_pretrained(where)
        config.inference_mode = True
        worn = peft.PeftModel(model, config)
        return worn, worn.load_adapter(where, worn.active_adapter)


def read_tokenizer(where: str, trust: bool, **how: Any) -> PreTrainedTokenizerBase:
    """A tokenizer. Raises ConfigurationError for code nobody asked for."""
    try:
        with quick_gguf_reader(how.get("gguf_file")):
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
