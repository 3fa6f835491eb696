"""A GGUF file as a model of transformers whose weights stay in its blocks.

transformers knows which of its parameters a tensor of the file is, and in which order llama.cpp
wrote rows; blocks are reordered row by row and never widened. Norms and biases are float32.
"""

import re
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models import experts, memory, pretrained
from outrider.models.config import decoder_of
from outrider.models.cpu_kernels.packed_formats import FORMATS
from outrider.models.cpu_kernels.packed_linear import PackedWeight
from outrider.models.experts import ExpertsTensor
from outrider.models.gguf import GgufFile, StoredTensor
from outrider.models.weight_only import packable
from outrider.models.weight_only_tensor import WeightOnlyTensor

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
    places = {(id(one.module), one.leaf): one for one in packable(model)}
    widened: Counter[str] = Counter()
    files = memory.mappings()

    def put(ours: str, value: Tensor, *read: str) -> None:
        owner, _, leaf = ours.rpartition(".")
        module = model.get_submodule(owner)
        shape = module.get_parameter(leaf).shape
        if value.shape != shape:
            raise ConfigurationError(
                f"{read[0]} of {file.path} is of shape {list(value.shape)}; the model has "
                f"{list(shape)}; the file was damaged, or made for another architecture"
            )
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        for name in read:
            memory.give_back(torch.from_numpy(file.tensors[name].rows), files)

    for name, stored in file.tensors.items():
        if name not in names:
            continue
        owner, _, leaf = names[name].rpartition(".")
        known = places.get((id(model.get_submodule(owner)), leaf))
        if known is not None and len(stored.shape) == _MATRIX:
            put(names[name], _kept(stored, name, known.transposed, reorder, widened), name)
            continue
        value = torch.from_numpy(np.array(reorder(_numbers(stored), name), np.float32))
        if known is not None:  # a matrix of one row, which files have as a vector
            value = WeightOnlyTensor(PackedWeight.from_dense(value))
        put(names[name], value, name)
    for ours, theirs in _of_experts(file, model).items():
        if not all(name in file.tensors for name in theirs):
            continue  # told below
        put(ours, _experts([file.tensors[name] for name in theirs], widened), *theirs)
    experts.run_packed(model)
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
    known_experts = {name for each in _of_experts(file, model).values() for name in each}
    for name, stored in file.tensors.items():
        if len(stored.shape) > _MATRIX and name not in known_experts:
            raise unmapped(f"{name} has {len(stored.shape)} axes")
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


#: What files call the matrices of a layer's experts, by what transformers does.
_EXPERTS = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}


def _of_experts(file: GgufFile, model: PreTrainedModel) -> dict[str, list[str]]:
    """Parameters that hold all experts of a layer, and the tensors of the file that they are of."""
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        layer = re.search(r"layers\.(\d+)\.", path)
        if layer is None or experts.transposed(module):
            continue
        for leaf in experts.stacks(module):
            theirs = [f"blk.{layer[1]}.ffn_{part}_exps.weight" for part in _EXPERTS[leaf]]
            if any(name in file.tensors for name in theirs):
                found[f"{path}.{leaf}"] = theirs
    return found


def _experts(stacks: list[StoredTensor], widened: Counter[str]) -> ExpertsTensor:
    """All experts of a layer in the blocks of the file; outputs of several stacks side by side."""
    count = stacks[0].shape[0]
    sides: list[list[PackedWeight]] = []
    for kind in dict.fromkeys(stored.kind for stored in stacks):
        form, inputs = _VALUES.get(kind, kind.lower()), stacks[0].shape[-1]
        same = [np.split(one.rows, count) for one in stacks if one.kind == kind]
        if form not in FORMATS:
            widened[kind] += len(same)
        sides.append([])
        for rows in map(np.concatenate, zip(*same, strict=True)):
            if form in FORMATS:
                record = PackedWeight.from_blocks(torch.from_numpy(rows), form, inputs)
            else:
                values = _numbers(StoredTensor(kind, (len(rows), inputs), rows))
                record = PackedWeight.from_dense(torch.from_numpy(values).to(_WIDENED))
            sides[-1].append(record)
    return ExpertsTensor(list(zip(*sides, strict=True)))


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
