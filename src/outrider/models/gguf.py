"""Checkpoints in one GGUF file: weights, configuration, tokenizer and chat template.

transformers reads configuration and tokenizer. Weights stay in the file's blocks,
on a CPU with our kernels; else transformers unpacks them to the dtype that the model runs in. The
law is that of the file's weights either way.
"""

import hashlib
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

from collections import Counter

import torch
from torch import Tensor, nn

from outrider.models import pretrained
from outrider.models.config import decoder_of
from outrider.models.cpu_kernels.packed_formats import FORMATS
from outrider.models.cpu_kernels.packed_linear import PackedWeight
from outrider.models.weight_only import WeightOnlyTensor, packable


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
            read = pretrained.gguf_tensors(self.path)
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


# The file as a model of transformers whose weights stay in its blocks.
#
# transformers knows which of its parameters a tensor of the file is, and in which order llama.cpp
# wrote rows; blocks are reordered row by row and never widened. Norms and biases are float32.

#: Files call types of values otherwise than blocks.
_VALUES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_MATRIX = 2  #: axes
#: What weights are widened to whose blocks no kernel reads: numbers of a few bits times a half.
_WIDENED = torch.float16


class BlockWeights(NamedTuple):
    """What was made of a file."""

    model: PreTrainedModel
    widened: str | None  #: which types were widened, in words; None: all are read in place


def block_weights(file: GgufFile, config: PretrainedConfig, kind: Any) -> BlockWeights:
    """The model of this configuration, `kind` being its class of transformers, with its weights.

    Raises UnsupportedModel for an architecture whose tensors cannot be read one by one: those are
    to be dequantised as a whole. Raises ConfigurationError for tensors that are missing or damaged.
    """
    model = _empty(config, kind)
    names, reorder = _mapping(file, model)
    places = {id(module): (leaf, turned) for module, leaf, turned in packable(model)}
    widened: Counter[str] = Counter()
    for name, stored in file.tensors.items():
        if name not in names:
            continue
        owner, _, leaf = names[name].rpartition(".")
        module = model.get_submodule(owner)
        known = places.get(id(module))
        shape = module.get_parameter(leaf).shape
        if known is not None and known[0] == leaf and len(stored.shape) == 2:
            value: Tensor = _kept(stored, name, known[1], reorder, widened)
        else:
            value = torch.from_numpy(np.array(reorder(_numbers(stored), name), np.float32))
        if value.shape != shape:
            raise ConfigurationError(
                f"{name} of {file.path} is of shape {list(value.shape)}; the model has "
                f"{list(shape)}; the file was damaged, or made for another architecture"
            )
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    model.tie_weights()
    missing = [name for name, weight in model.named_parameters() if weight.is_meta]
    if missing:
        raise ConfigurationError(
            f"{len(missing)} weights are not in {file.path}: {missing[0]}; download it again, or "
            "convert it with a newer llama.cpp"
        )
    return BlockWeights(model.eval(), _said(widened))


def _said(widened: Counter[str]) -> str | None:
    if not widened:
        return None
    counts = ", ".join(f"{count} of type {kind}" for kind, count in sorted(widened.items()))
    return (
        f"{counts} are widened to float16, which takes more memory than the file: no kernel reads "
        "such blocks; convert it to Q4_K_M, Q4_1 or Q8_0 to keep it small"
    )


def _empty(config: PretrainedConfig, kind: Any) -> PreTrainedModel:
    """The model without weights; its buffers are computed."""
    from accelerate import init_empty_weights  # type: ignore[import-untyped]
    from transformers.initialization import no_init_weights

    with init_empty_weights(include_buffers=False), no_init_weights():
        made: PreTrainedModel = pretrained.empty_model(kind, config, trust=False)
    return made


class _Reorder:
    """A tensor's values as the model has them, by what transformers does to them."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, values: "np.ndarray[Any, Any]", name: str) -> "np.ndarray[Any, Any]":
        put: dict[str, Tensor] = {}
        made = self._processor.process(
            weights=values, name=name, tensor_key_mapping={}, parsed_parameters={"tensors": put}
        )
        weights: np.ndarray[Any, Any] = (
            next(iter(put.values())).numpy() if made.name is None and put else made.weights
        )
        return weights


def _mapping(file: GgufFile, model: PreTrainedModel) -> tuple[dict[str, str], _Reorder]:
    """Parameters by the names that the file has for them, and how their values are reordered."""
    import gguf

    def unmapped(why: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"tensors of {file.path} cannot be read one by one ({why}); got the architecture "
            f"{file.architecture!r}; it can be dequantised as a whole: dtype='bfloat16'"
        )

    try:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor
    except ImportError as error:
        raise unmapped("this version of transformers does not say how") from error
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    if file.architecture not in known or _by_other_means(file.architecture):
        raise unmapped("transformers reads this architecture in another way")
    if any(len(stored.shape) > _MATRIX for stored in file.tensors.values()):
        raise unmapped("it has tensors of several experts each")
    layers = int(decoder_of(model.config).num_hidden_layers)
    table = gguf.get_tensor_name_map(known[file.architecture], layers)
    names: dict[str, str] = {}
    for ours, _ in model.named_parameters(remove_duplicate=False):
        path, _, leaf = ours.rpartition(".")
        while path:  # files may name parts as a model without its output layer does
            theirs = table.get_name(path)
            if theirs is not None:
                names.setdefault(f"{theirs}.{leaf}", ours)
                break
            path = path.partition(".")[2]
    config = model.config.to_dict()
    return names, _Reorder(TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config))


def _by_other_means(architecture: str) -> bool:
    """Whether newer versions of transformers have transforms for it, beyond an order of rows."""
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:
        return False
    return bool(is_gguf_arch_supported(architecture))


def _kept(
    stored: StoredTensor, name: str, turned: bool, reorder: _Reorder, widened: Counter[str]
) -> WeightOnlyTensor:
    """A weight in the blocks of the file, its rows in the order of the model's."""
    outputs, inputs = stored.shape
    numbers = np.arange(outputs)[:, None]
    try:
        order = reorder(numbers, name).ravel()
    except ValueError:  # it looks at the columns, too
        order = reorder(np.repeat(numbers, inputs, 1), name)[:, 0]
    whole = np.array_equal(np.sort(order), numbers[:, 0])
    form = _VALUES.get(stored.kind, stored.kind.lower())
    if whole and form in FORMATS:
        rows = stored.rows if np.array_equal(order, numbers[:, 0]) else stored.rows[order]
        record = PackedWeight.from_blocks(torch.from_numpy(rows), form, inputs)
        return WeightOnlyTensor(record, turned)
    widened[stored.kind] += 1
    values = _numbers(stored)[order] if whole else reorder(_numbers(stored), name)
    dense = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(_WIDENED)
    return WeightOnlyTensor(PackedWeight.from_dense(dense), turned)


def _numbers(stored: StoredTensor) -> "np.ndarray[Any, Any]":
    """What is in the blocks, in float32."""
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType[stored.kind]
    rows = stored.rows
    if stored.kind in ("F32", "F16"):
        rows = rows.view(np.float32 if stored.kind == "F32" else np.float16)
    try:
        return np.asarray(dequantize(rows, kind), np.float32).reshape(stored.shape)
    except NotImplementedError as error:
        raise ConfigurationError(
            f"blocks of type {stored.kind} are read by nobody here; convert the file to Q8_0, "
            "Q4_K_M or BF16"
        ) from error
