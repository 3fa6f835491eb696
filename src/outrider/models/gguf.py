"""GGUF files: read by transformers for configuration and tokenizer, and by ourselves for tensors.

Weights stay in the file's blocks, on a CPU with our kernels (`outrider.models.gguf_weights`); else
transformers unpacks them to the dtype that the model runs in. The law is that of the file's weights
either way.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import transformers
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from outrider.errors import ConfigurationError
from outrider.models import calibrate
from outrider.models.config import read

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A reader of GGUF files that takes a word list in one go, for transformers to read with, or passes
# over it, where tensors alone are wanted.
#
# The package `gguf` has a reader that slices a mapped file for every word of a tokenizer, for each
# value several times: 7.6 s of a processor for the 150,000 words of Qwen2.5, and transformers reads
# a file once for its configuration and once for its tokenizer. This one fills in the same fields,
# from one view a list: 0.4 s.

_LOCK = RLock()  #: transformers imports the reader by name at every call: one swap at a time


@contextmanager
def quick_reader(file: str | None) -> Iterator[None]:
    """While it lasts transformers reads GGUF metadata so; None: there is no such file to read.

    >>> with quick_reader(None):
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


def _tensors(path: Path) -> Any:
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


class StoredTensor(NamedTuple):
    """A tensor as it lies in a file."""

    kind: str  #: the type's name, such as Q4_K
    shape: tuple[int, ...]  #: of its numbers, as torch counts
    rows: "NDArray[np.uint8]"  #: [rows, bytes of a row], mapped


class GgufFile:
    """A file's tensors by name, in the blocks in which they were written, and its architecture.

    The file is mapped, not read: a tensor costs memory where it is copied from. Raises
    ConfigurationError for a file that is damaged or of another version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            read = _tensors(self.path)
            self.architecture = _text(read.fields.get("general.architecture"))
            self.tensors = {
                one.name: StoredTensor(
                    one.tensor_type.name, tuple(map(int, one.shape[::-1])), _rows(one.data)
                )
                for one in read.tensors
            }
        except ValueError as error:
            raise ConfigurationError(
                f"cannot read the GGUF file; got {str(path)!r} ({error}); download it again, or "
                "convert it with a newer llama.cpp"
            ) from error


#: Widths of experts as a configuration calls them, and the tensors that have them.
_WIDTHS = {
    "moe_intermediate_size": ".ffn_up_exps.weight",
    "shared_expert_intermediate_size": ".ffn_up_shexp.weight",
}


def read_widths(config: PretrainedConfig, file: GgufFile) -> None:
    """Note how wide experts are, for which transformers takes what the type's first model had."""
    for field, tensor in _WIDTHS.items():
        name = next((name for name in file.tensors if name.endswith(tensor)), None)
        if name is not None and read(config, field, int) is not None:
            setattr(config, field, file.tensors[name].shape[-2])


def _text(field: Any) -> str:
    """What a field of the metadata says; "" where there is none."""
    if field is None:
        return ""
    kinds = [kind.name for kind in field.types]
    if kinds != ["STRING"]:
        raise ValueError(f"its {field.name} is no text but {' of '.join(kinds)}")
    said = bytes(field.parts[field.data[0]])
    try:
        return said.decode()
    except UnicodeDecodeError:
        raise ValueError(f"its {field.name} is no UTF-8: {said[:40]!r}") from None


def _rows(data: "np.ndarray[Any, Any]") -> "NDArray[np.uint8]":
    """The bytes [rows, bytes of a row] of a tensor's values or blocks."""
    whole = np.atleast_1d(np.asarray(data)).view(np.uint8)
    return whole.reshape(-1, whole.shape[-1])


_NEEDS = ("gguf", "accelerate")  #: packages that transformers reads such files with


def is_file(given: object) -> bool:
    """Whether a path or a name means a GGUF file.

    >>> is_file("models/SmolLM2-135M-Instruct.Q4_1.gguf"), is_file("models/smollm2")
    (True, False)
    """
    return isinstance(given, (str, Path)) and str(given).lower().endswith(".gguf")


def locate(given: str | Path) -> tuple[str, dict[str, Any]]:
    """Where transformers finds it, and what it has to be told besides: for any path or hub name.

    A file on the hub is named as org/name/file.gguf. Raises ConfigurationError where packages for
    such files are missing.

    >>> locate("org/name")
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


def open_file(where: str, how: dict[str, Any]) -> GgufFile:
    """The file that `locate` names.

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


def cache_folder(given: object) -> Path | None:
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
    folder = cache_folder(given)
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


def dequantize_options() -> dict[str, Any]:
    """What asks transformers for weights as numbers; older versions know nothing else."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
