"""Weight packing for linear layers on a CPU.

oneDNN re-lays a half-precision weight on every call and runs narrow float32 products far below the
memory's speed; packing once removes both. The operators are private to torch, so their presence is
checked and a plain product is the named alternative.
"""

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.errors import ConfigurationError
from outrider.models import batch_invariance, weight_only
from outrider.models.batch_invariance import PaddingPolicy
from outrider.models.cpu_kernels import tile_kernels
from outrider.models.cpu_kernels.int8 import Int8Product
from outrider.models.cpu_kernels.packed_linear import PackedLinear, PackedWeight
from outrider.models.weight_only import in_8_bits
from outrider.models.weight_only_tensor import WeightOnlyTensor

Product = Callable[[Tensor], Tensor]
_HINT = 16  #: rows the packed layout is tuned for; one packing serves every width


@lru_cache(maxsize=8)
def can_pack(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this torch has the packed operators, and this CPU runs them in `dtype`.

    float16 needs instructions that many processors with packed bfloat16 lack, so it is tried.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        square = torch.zeros(16, 16, dtype=dtype, device="cpu")
        _made(square, None, packed=True)(square)
    except (AttributeError, RuntimeError):  # no such operator, or not in this dtype
        return False
    return True


def supports_unpacked(dtype: torch.dtype) -> bool:
    """Whether products read weights of this dtype as they lie in a model, packed or not."""
    return tile_kernels.unsupported_reason(torch.zeros(1, dtype=dtype, device="cpu")) is None


def product(
    weight: Tensor,
    bias: Tensor | None,
    packed: bool = False,
    int8: bool = False,
    wide: bool = False,
    compiled: bool = False,
) -> Product:
    """x -> x @ weight.T + bias for x [..., I], the weight [O, I] packed, to 8 bits or as it is.

    In half precision a row is rounded alike in products of any number of rows: numbers that round
    otherwise are padded. Where the processor has tiles (`cpu_kernels.tile_kernels`) weights need
    not be packed; there alone `wide` has the answer in float32, as its sums are, where it would be
    rounded and widened. A weight of a type of its own (`weight_only`) is read in it; the answer is
    in float32.
    """
    if isinstance(weight, WeightOnlyTensor):
        return PackedLinear(in_8_bits(weight) if int8 else weight.record, bias)
    if int8:
        return Int8Product(weight, bias)
    if tile_kernels.unsupported_reason(weight) is None and weight.numel():
        return tile_kernels.TileProduct(weight, bias, wide)
    weight = weight.detach().contiguous()
    if (
        compiled
        and packed
        and weight.dtype is torch.float32
        and not weight_only.unsupported_reason(weight.device)
    ):
        return PackedLinear(PackedWeight.from_dense(weight, "f32"), bias)
    bias = None if bias is None else bias.detach()
    run = _made(weight, bias, packed)
    if not batch_invariance.applies_to(weight.dtype, weight.device):
        return run
    rows = rows_of(weight.shape, weight.dtype, packed)
    return run if rows.free else padded(run, rows)


def rows_of(shape: Sequence[int], dtype: torch.dtype, packed: bool) -> PaddingPolicy:
    """Numbers of rows that a product with weights [O, I] rounds alike, in half precision."""
    (outputs, inputs), kind = shape, "packed" if packed else "linear"
    return batch_invariance.of_product(
        lambda like: _made(like, None, packed), outputs, inputs, dtype, kind
    )


class BatchInvariantLinear:
    """What a layer computes, a row alike in all calls; its weights are read as they are."""

    def __init__(self, run: Product) -> None:
        self._run = run

    def __call__(self, x: Tensor) -> Tensor:
        """Of any number of rows."""
        return self._run(x)


def steady(layer: torch.nn.Linear) -> BatchInvariantLinear | None:
    """The product of a layer whose own is slower, or rounds rows otherwise in other calls; None:
    its own is as good."""
    weight = layer.weight
    if not batch_invariance.applies_to(weight.dtype, weight.device):
        return None
    if tile_kernels.lies_right(weight):
        return BatchInvariantLinear(lambda x: _in_place(layer, x))
    rows = rows_of(weight.shape, weight.dtype, packed=False)
    if rows.free:
        return None
    return BatchInvariantLinear(padded(lambda x: F.linear(x, layer.weight, layer.bias), rows))


def _in_place(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    """In tiles, unless the model was moved or converted meanwhile, or gradients are asked for."""
    weight = layer.weight
    if x.dtype != weight.dtype or torch.is_grad_enabled() or not tile_kernels.lies_right(weight):
        return F.linear(x, weight, layer.bias)
    return tile_kernels.multiply(x, weight, layer.bias)


def padded(run: Product, rows: PaddingPolicy) -> Product:
    """`run` over x [..., I], whose rows are padded to counts that round alike."""
    few, most = frozenset(rows.few), rows.few[-1]

    def multiply(x: Tensor) -> Tensor:
        count = x.shape[:-1].numel()
        if count in few or (count > most and rows.step == 1):
            return run(x)
        whole = rows.over(run, x.reshape(count, x.shape[-1]))
        return whole.view(*x.shape[:-1], whole.shape[-1])

    return multiply


def _made(weight: Tensor, bias: Tensor | None, packed: bool) -> Product:
    if not packed:
        return lambda x: F.linear(x, weight, bias)
    laid: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _HINT)
    run = torch.ops.mkldnn._linear_pointwise.default  # the overload itself: no look-up per call

    def multiply(x: Tensor) -> Tensor:
        out: Tensor = run(x, laid, bias, "none", [], "")
        return out

    return multiply


def fused(
    parts: Sequence[torch.nn.Linear],
    packed: bool,
    scales: Sequence[float] | None = None,
    int8: bool = False,
    wide: bool = False,
    int8_activations: bool = False,
    compiled: bool = False,
) -> Product:
    """Several layers over the same x as one product, their outputs side by side.

    `scales` multiply each part's output; powers of two change no bit of it. `int8_activations`, for
    many rows: where weights are kept in q8_0, x is rounded to 8 bits as well. More is in `product`.
    Weights are not to be changed afterwards: those of one part alone are read as they lie, and on a
    CUDA device the parts' weights become parts of what is made.
    """
    scales = scales or (1.0,) * len(parts)
    if any(isinstance(part.weight, WeightOnlyTensor) for part in parts):
        weights = [part.weight for part in parts]
        biases = [part.bias for part in parts]
        return weight_only.product(weights, biases, scales, int8, int8_activations)
    if len(parts) == 1 and scales[0] == 1.0:  # nothing to copy
        return product(parts[0].weight, parts[0].bias, packed, int8, wide, compiled)
    each = list(zip(parts, scales, strict=True))
    weight = torch.cat([p.weight.detach() * scale for p, scale in each])
    if weight.device.type == "cuda" and set(scales) == {1.0}:  # not twice on the device
        sizes = [p.out_features for p in parts]
        for part, own in zip(parts, weight.split_with_sizes(sizes), strict=True):
            part.weight.data = own
    if all(p.bias is None for p in parts):
        return product(weight, None, packed, int8, wide, compiled)
    biases = [p.weight.new_zeros(p.out_features) if p.bias is None else p.bias for p in parts]
    bias = torch.cat([b.detach() * scale for b, scale in zip(biases, scales, strict=True)])
    return product(weight, bias, packed, int8, wide, compiled)


# A model whose linear layers read weights laid out anew, beside one that is left as it is.
#
# Packed weights are the model's own, in the order in which a product reads them (`linear`). Those
# of 8 bits are others (`cpu_kernels.int8`): they are for drafts alone, whose law is the one that
# they declare. Everything else is the model's own forward.


def quantize_int8(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its decoder's linear layers, and its output layer, in 8 bits.

    Its other tensors are shared with `model`. Raises ConfigurationError where there is no layer
    that can be kept so.
    """
    made = beside(model)
    parts = {*made.get_decoder().modules(), made.get_output_embeddings()}
    if not sum(_lay(part, int8=True) for part in parts):
        raise ConfigurationError(
            "8 bits are for layers of type Linear and Conv1D; got draft_dtype='int8' with a "
            f"{type(model).__name__}, which has none; leave it out"
        )
    return made


def pack_linear_layers(model: PreTrainedModel) -> PreTrainedModel | None:
    """The model with all its linear layers packed, which takes their memory once more.

    (Not where products read weights as they lie, but for those of type Conv1D.)
    Its other tensors are shared with `model`; None where it has no such layer.
    """
    made = beside(model)
    return made if sum(_lay(part) for part in made.modules()) else None


def beside(model: PreTrainedModel) -> PreTrainedModel:
    """Modules of its own, with the model's tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    made: PreTrainedModel = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    return made


def _lay(part: torch.nn.Module | None, int8: bool = False) -> bool:
    """Let a linear layer compute with weights laid out anew; whether it is one."""
    if part is None or type(part) not in (torch.nn.Linear, Conv1D):
        return False
    if type(part.weight) not in (torch.nn.Parameter, WeightOnlyTensor):
        return False  # quantised by another library, whose product it needs
    weight_OI: Tensor = part.get_parameter("weight")
    if type(part) is Conv1D:
        weight_OI = weight_OI.T
    bias = dict(part.named_parameters()).get("bias")
    vars(part)["forward"] = product(weight_OI, bias, packed=not int8, int8=int8)
    return True
