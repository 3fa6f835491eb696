"""What lies where in a GGUF file: its tensors in the blocks in which they were written.

The file is mapped, not read: a tensor costs memory where it is copied from. (The package `gguf` has
a reader, which takes half a minute over the words of a large tokenizer; here they are passed over.)
The format is ggml's docs/gguf.md.
"""

import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from outrider.errors import ConfigurationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
