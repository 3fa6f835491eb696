"""Checkpoints in one GGUF file: weights, configuration, tokenizer and chat template.

transformers reads configuration and tokenizer. Weights stay in the file's blocks (`gguf_weights`),
on a CPU with our kernels; else transformers unpacks them to the dtype that the model runs in. The
law is that of the file's weights either way.
"""

import hashlib
import mmap
import struct
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import transformers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models import calibrate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from outrider.models.gguf_weights import BlockWeights


# What lies where in a GGUF file: its tensors in the blocks in which they were written.
#
# The file is mapped, not read: a tensor costs memory where it is copied from. (The package `gguf`
# has a reader, which takes half a minute over the words of a large tokenizer; here they are passed
# over.) The format is ggml's docs/gguf.md.

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9
#: Bytes of metadata values by their type: integers, floats and bools.
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32 = 4
_ALIGNMENT = 32  #: of tensors, where a file does not say
_MOST_AXES = 4


class StoredTensor(NamedTuple):
    """A tensor as it lies in a file."""

    kind: str  #: the type's name, such as Q4_K
    shape: tuple[int, ...]  #: of its numbers, as torch counts
    rows: "NDArray[np.uint8]"  #: [rows, bytes of a row], mapped


class GgufFile:
    """The tensors of a file by name, and the architecture that it names.

    Raises ConfigurationError for a file that is damaged or of another version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.architecture = ""
        self.tensors: dict[str, StoredTensor] = {}
        self._alignment = _ALIGNMENT
        with self.path.open("rb") as file:  # to be written to by nobody: torch wants to be able to
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            self._read()
        except (struct.error, ValueError, IndexError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"cannot read the GGUF file; got {str(path)!r} ({error}); download it again, or "
                "convert it with a newer llama.cpp"
            ) from error

    def _read(self) -> None:
        if self._bytes[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, tensors, values = self._unpack("<IQQ", 4)
        if version not in _VERSIONS:
            raise ValueError(f"it is of version {version}, not 2 or 3")
        at = 24
        for _ in range(values):
            at = self._value(at)
        table = []
        for _ in range(tensors):
            name, at = self._string(at)
            (axes,) = self._unpack("<I", at)
            if axes > _MOST_AXES:
                raise ValueError(f"{name} has {axes} axes")
            shape = self._unpack(f"<{axes}Q", at + 4)[::-1]
            kind, offset = self._unpack("<IQ", at + 4 + 8 * axes)
            at += 16 + 8 * axes
            table.append((name, shape, kind, offset))
        start = -(-at // self._alignment) * self._alignment
        for name, shape, kind, offset in table:
            self.tensors[name] = self._tensor(name, shape, kind, start + offset)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, at: int) -> StoredTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        told = GGMLQuantizationType(kind)  # ValueError for one that nobody knows
        block, size = GGML_QUANT_SIZES[told]
        wide = shape[-1] if shape else 1
        if wide % block:
            raise ValueError(f"{name} has rows of {wide}, and {told.name} has blocks of {block}")
        row = wide // block * size
        count = int(np.prod(shape[:-1], dtype=np.int64))
        if at + count * row > len(self._bytes):
            raise ValueError(f"it ends within {name}")
        rows = np.frombuffer(self._bytes, np.uint8, count * row, at).reshape(count, row)
        return StoredTensor(told.name, shape, rows)

    def _value(self, at: int) -> int:
        """Behind a metadata value, of which the architecture and the alignment are kept."""
        key, at = self._string(at)
        (kind,) = self._unpack("<I", at)
        at += 4
        if key == "general.architecture":
            self.architecture, _ = self._string(at)
        elif key == "general.alignment" and kind == _UINT32:
            (self._alignment,) = self._unpack("<I", at)
            if self._alignment < 1:
                raise ValueError("its tensors are aligned to nothing")
        return self._behind(kind, at)

    def _behind(self, kind: int, at: int) -> int:
        if kind in _WIDTHS:
            return at + _WIDTHS[kind]
        if kind == _STRING:
            return at + 8 + int(self._unpack("<Q", at)[0])
        if kind != _ARRAY:
            raise ValueError(f"no metadata is of type {kind}")
        inner, count = self._unpack("<IQ", at)
        at += 12
        if inner in _WIDTHS:
            return at + _WIDTHS[inner] * int(count)
        for _ in range(count):
            at = self._behind(inner, at)
        return at

    def _string(self, at: int) -> tuple[str, int]:
        (size,) = self._unpack("<Q", at)
        end = at + 8 + size
        return self._bytes[at + 8 : end].decode(), end

    def _unpack(self, form: str, at: int) -> tuple[int, ...]:
        return struct.unpack_from(form, self._bytes, at)


_NEEDS = ("gguf", "accelerate")  #: packages that transformers reads such files with


def is_file(given: object) -> bool:
    """Whether a path or a name means a GGUF file.

    >>> is_file("models/SmolLM2-135M-Instruct.Q4_1.gguf"), is_file("models/smollm2")
    (True, False)
    """
    return isinstance(given, (str, Path)) and str(given).lower().endswith(".gguf")


def located(given: str | Path) -> tuple[str, dict[str, Any]]:
    """Where transformers finds it, and what it has to be told besides: for any path or hub name.

    A file on the hub is named as org/name/file.gguf. Raises ConfigurationError where packages for
    such files are missing.

    >>> located("org/name")
    ('org/name', {})
    """
    if not is_file(given):
        return str(given), {}
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"a GGUF file is read with the packages {' and '.join(_NEEDS)}; got {str(given)!r} "
            f"without {' and '.join(missing)}; pip install 'outrider[gguf]'"
        )
    where = Path(given)
    return str(where.parent), {"gguf_file": where.name}


def opened(where: str, how: dict[str, Any]) -> GgufFile:
    """The file that `located` names.

    Raises ConfigurationError for a damaged file, or none.
    """
    from transformers.utils import cached_file

    name = how["gguf_file"]
    path: Path | str | None = Path(where, name)
    if not Path(where, name).is_file():
        path = cached_file(where, name)
    if path is None:
        raise ConfigurationError(f"no such file; got {where}/{name}; check the path")
    return GgufFile(path)


def kept(file: GgufFile, config: PretrainedConfig, kind: Any) -> "BlockWeights | str":
    """The model in the blocks of a file; or why it has to be unpacked.

    `kind` is its class of transformers.
    """
    from outrider.models.gguf_weights import block_weights

    try:
        return block_weights(file, config, kind)
    except UnsupportedModel as error:
        return str(error)


def described(given: object) -> Path | None:
    """Where configuration and tokenizer of a local file are kept once they were read.

    transformers takes up to half a minute for them, in Python. A file that has changed since is
    read anew.
    """
    if not is_file(given):
        return None
    path = Path(str(given))
    try:
        about = path.stat()
    except OSError:
        return None
    name = repr((str(path.resolve()), about.st_size, about.st_mtime_ns, transformers.__version__))
    return calibrate.cache_dir() / f"gguf-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def remember(given: object, part: PretrainedConfig | PreTrainedTokenizerBase, name: str) -> None:
    """Keep a configuration or a tokenizer of a local file; a read-only home is no error."""
    folder = described(given)
    if folder is None:
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
            part.save_pretrained(Path(scratch, name))
            folder.mkdir(exist_ok=True)
            Path(scratch, name).rename(folder / name)
    except OSError:
        return


def unpacked() -> dict[str, Any]:
    """What asks transformers for weights as numbers; older versions know nothing else."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """The model without the mark that its weights were packed: they are numbers now."""
    vars(model.config).pop("quantization_config", None)
    return model
