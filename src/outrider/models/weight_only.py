"""Weights in a type of their own, sums in float32: what a tensor of a model is when it is packed.

The type that weights are kept in and the one that is computed in are two things. A
`WeightOnlyTensor` stands where a layer's weight stood: it has the weight's shape and says float32,
its numbers lie in a `PackedWeight` (bfloat16, 8 or 4 bits, a GGUF file's blocks), and the linear
layer or embedding that reads it runs on the packed kernels. So every model of transformers keeps
its own forward, and tied layers share one record. A layer's experts are packed as well (`experts`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.errors import ConfigurationError
from outrider.models import experts, isa, memory
from outrider.models.cpu_kernels import build
from outrider.models.cpu_kernels.packed_formats import FORMATS
from outrider.models.cpu_kernels.packed_linear import PackedLinear, PackedWeight
from outrider.models.experts import ExpertsTensor
from outrider.models.weight_only_tensor import WeightOnlyTensor

#: Types that a dense checkpoint's weights can be kept in, and their formats.
KINDS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0", "int4": "q4_1"}
STORED = "stored"  #: as the file has them
#: Types that nothing else computes with.
QUANTISED = ("int8", "int4")


def unsupported_reason(device: torch.device) -> str | None:
    """Why no weights are kept so there; None: they can be."""
    if device.type != "cpu":
        return f"its kernels are compiled for a CPU, and models run on {device}"
    return build.unbuilt()


def applies_to(dtype: str, device: torch.device) -> bool:
    """Whether weights of this type are packed, and states and sums float32.

    Quantised weights always are. Half precision is wherever the processor has no tiles (AMX): torch
    reads bfloat16 weights slower than they are read packed even where the processor has products of
    them (AVX-512), and elsewhere takes longer with every row.

    >>> applies_to("float32", torch.device("cpu")), applies_to("bfloat16", torch.device("cuda"))
    (False, False)
    """
    if dtype in (*QUANTISED, STORED):
        return True
    if dtype == "float32" or unsupported_reason(device) is not None:
        return False
    return dtype == "float16" or not isa.has_tiles()


def rounds_inputs(weights: Iterable[Tensor]) -> bool:
    """Whether a product over one of these rounds what it is given, so that the last bit of a sum
    decides about much more: whole numbers, and products of bfloat16 numbers."""
    packed = (weight for weight in weights if isinstance(weight, WeightOnlyTensor))
    formats = {record.format for weight in packed for record in weight.records}
    return not formats <= {"f32", "f16", *(() if isa.has_bf16_products() else ("bf16",))}


def round_to_8_bits(layers: Iterable[nn.Module]) -> bool:
    """Whether an encoder's products over all of these round activations to 8 bits: those of q8_0
    weights do, which is how `dtype="int8"` keeps them, and bfloat16 ones where the processor has
    products of bfloat16 numbers."""
    weights = [layer.weight for layer in layers]
    rounding = ("q8_0", "bf16") if isa.has_bf16_products() else ("q8_0",)
    return all(isinstance(w, WeightOnlyTensor) and w.record.format in rounding for w in weights)


def product(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[float],
    int8: bool = False,
    int8_activations: bool = False,
) -> Callable[[Tensor], Tensor]:
    """Layers over the same x as one product, their outputs side by side; `scales` multiply each.

    Weights that are no `WeightOnlyTensor` are kept in float32. `int8`: in no more than 8 bits.
    `int8_activations`: x is rounded to 8 bits, too, if all weights are in q8_0.
    """
    records = [
        (in_8_bits(weight) if int8 else weight.record)
        if isinstance(weight, WeightOnlyTensor)
        else PackedWeight.from_dense(weight.detach().float(), "f32")
        for weight in weights
    ]
    bias: Tensor | None = None
    if any(one is not None for one in biases):
        each = zip(biases, records, strict=True)
        none = torch.zeros(1, dtype=torch.float32, device="cpu")
        bias = torch.cat(
            [none.expand(r.outputs) if b is None else b.detach().float() for b, r in each]
        )
    whole = int8_activations and all(record.format == "q8_0" for record in records)
    run = PackedLinear(records, bias, "int8" if whole else None)
    if all(scale == 1.0 for scale in scales):
        return run
    sizes = torch.tensor([record.outputs for record in records], device="cpu")
    factor = torch.tensor(scales, dtype=torch.float32, device="cpu").repeat_interleave(sizes)
    return lambda x: run(x).mul_(factor)


def keep(model: nn.Module, dtype: str, name: str, read: bool = False) -> None:
    """Let a model's linear layers and embeddings keep weights of this type; the rest is widened.

    Its modules get other parameters, one by one; tensors that others have are left as they are.
    `name` is what it is called in messages; `read`: nobody has written to its weights since they
    were read from files. Raises ConfigurationError for weights that are no numbers, or whose rows
    are no whole blocks.
    """
    files = memory.mappings() if read else []
    known = {(id(one.module), one.leaf): one for one in packable(model)}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    paths: dict[int, str] = {}
    for path, module in model.named_modules():
        for leaf, weight in module._parameters.items():
            if weight is not None and not isinstance(weight, WeightOnlyTensor):
                owners.setdefault(id(weight), []).append((module, leaf))
                paths.setdefault(id(weight), f"{path}.{leaf} of {name}")
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[leaf] = buffer.float()
    while owners:  # what was there is let go
        _, each = owners.popitem()
        module, leaf = each[0]
        weight = module.get_parameter(leaf)
        packed = [known[id(module), leaf] for module, leaf in each if (id(module), leaf) in known]
        if packed:
            kind = "float32" if packed[0].whole else dtype
            made: Tensor = _packed(weight.detach(), kind, packed[0].transposed, paths[id(weight)])
        else:
            made = weight.detach().float() if weight.is_floating_point() else weight.detach()
        new = nn.Parameter(made, requires_grad=False)
        for module, leaf in each:
            module._parameters[leaf] = new
        memory.give_back(weight, files)
    experts.run_packed(model)


class Packable(NamedTuple):
    """A weight that can be packed."""

    module: nn.Module
    leaf: str  #: its name there
    transposed: bool = False
    whole: bool = False  #: whether it stays in float32, as a router's does, which decides for all


def packable(model: nn.Module) -> list[Packable]:
    """Its weights that can be packed."""
    found: list[Packable] = []
    table = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    for module in model.modules():
        if type(module) is nn.Linear or (module is table and isinstance(module, nn.Embedding)):
            found.append(Packable(module, "weight"))
        elif type(module) is Conv1D:
            found.append(Packable(module, "weight", transposed=True))
        for leaf in experts.stacks(module):
            found.append(Packable(module, leaf, experts.transposed(module)))
        found += [Packable(router, "weight", whole=True) for router in experts.routers(module)]
    return found


def finite(weight: Tensor) -> bool:
    """Whether all of its numbers are numbers: by the largest and the smallest, which are NaN or
    infinite if any is: one pass that keeps nothing, where `torch.isfinite` writes a mask.

    >>> finite(torch.tensor([1.0, float("nan")]))
    False
    """
    if weight.element_size() == 1 or not weight.numel():
        return bool(weight.float().isfinite().all())
    return all(bool(end.isfinite()) for end in weight.aminmax())


def _packed(weight: Tensor, dtype: str, transposed: bool, name: str) -> WeightOnlyTensor:
    if not finite(weight):
        raise ConfigurationError(
            f"weights are numbers; got NaN or infinite ones in {name}; save the checkpoint again"
        )
    if dtype == STORED:
        dtype = str(weight.dtype).removeprefix("torch.")
    form = KINDS[dtype]
    inputs, chunk = weight.shape[-2 if transposed else -1], FORMATS[form].chunk
    if dtype in QUANTISED and inputs % chunk:
        raise ConfigurationError(
            f"{dtype} has blocks of {chunk} inputs; got a layer with {inputs} in {name}; use "
            "dtype='bfloat16' or 'float32'"
        )
    if weight.dim() == experts.AXES:
        return ExpertsTensor.from_dense(weight, form, transposed)
    return WeightOnlyTensor(
        PackedWeight.from_dense(weight.T if transposed else weight, form), transposed
    )


def like(weight_OI: Tensor, other: Tensor) -> Tensor:
    """A dense weight in the dtype of another one, or packed in its format.

    Where no dense weight can be rounded to that format, which is a file's, it takes 8 bits.
    """
    if not isinstance(other, WeightOnlyTensor):
        return weight_OI.to(other.device, other.dtype)
    known = FORMATS[other.record.format]
    made = other.record.format if known.dense or known.quantize else "q8_0"
    return WeightOnlyTensor(PackedWeight.from_dense(weight_OI, made), other.transposed)


def in_8_bits(weight: WeightOnlyTensor) -> PackedWeight:
    """Its record, if it takes no more than 8 bits a weight, else one that does."""
    record = weight.record
    known = FORMATS[record.format]
    if not known.dense or record.inputs % FORMATS["q8_0"].chunk:
        return record
    return PackedWeight.from_dense(record.dequantize(), "q8_0")


def experts_in_8_bits(weights: ExpertsTensor) -> ExpertsTensor:
    """The same of all experts."""
    each = [[in_8_bits(WeightOnlyTensor(one)) for one in expert] for expert in weights.experts]
    return ExpertsTensor(each, weights.transposed)


def formats(model: nn.Module) -> dict[str, int]:
    """How many bytes of its weights are in each format."""
    found: dict[str, int] = {}
    for weight in model.parameters():
        for record in weight.records if isinstance(weight, WeightOnlyTensor) else ():
            found[record.format] = found.get(record.format, 0) + record.nbytes
    return found


def bytes_a_weight(dtype: str) -> float:
    """Of memory, scales of blocks and all.

    >>> bytes_a_weight("float32"), bytes_a_weight("int8")
    (4.0, 1.0625)
    """
    known = FORMATS[KINDS[dtype]]
    return known.block / known.chunk


def states_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of states beside weights of this type.

    >>> states_dtype("int8", torch.device("cpu"))
    torch.float32
    """
    if applies_to(dtype, device):
        return torch.float32
    kind: torch.dtype = getattr(torch, dtype)
    return kind
