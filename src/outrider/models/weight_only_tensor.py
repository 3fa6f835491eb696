"""A weight whose numbers are packed, as layers of transformers read it."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models.cpu_kernels.packed_linear import PackedLinear, PackedWeight

_MATRIX = 2  #: axes


class WeightOnlyTensor(torch.Tensor):
    """A weight [O, I] whose numbers are a `PackedWeight`; with `transposed` it is read as [I, O].

    Linear layers and embeddings read it where it lies. Whatever else asks for its numbers gets
    them widened to float32: right, and as large and slow as a dense weight.
    """

    record: PackedWeight
    transposed: bool

    @staticmethod
    def __new__(cls, record: PackedWeight, transposed: bool = False) -> "WeightOnlyTensor":
        shape = record.outputs, record.inputs
        shape = shape[::-1] if transposed else shape
        made: WeightOnlyTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.float32, device=torch.device("cpu"), requires_grad=False
        )
        made.record, made.transposed = record, transposed
        made._products = {}
        return made

    def __init__(self, record: PackedWeight, transposed: bool = False) -> None:
        self._products: dict[int | None, tuple[Tensor | None, PackedLinear]]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WeightOnlyTensor({list(self.shape)}, {self.record.format})"

    def __deepcopy__(self, memo: dict[int, object]) -> "WeightOnlyTensor":
        return self  # it is never written to

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias for x [..., I], in float32."""
        key = None if bias is None else id(bias)
        made = self._products.get(key)
        if made is None or made[0] is not bias:
            made = self._products[key] = bias, PackedLinear(self.record, bias)
        return made[1](x)

    @property
    def records(self) -> tuple[PackedWeight, ...]:
        """All that it consists of."""
        return (self.record,)

    def numbers(self) -> Tensor:
        """All of them, in float32."""
        widened = self.record.dequantize()
        return widened.T if self.transposed else widened

    def again(self) -> "WeightOnlyTensor":
        """Another one of the same record."""
        return WeightOnlyTensor(self.record, self.transposed)

    def at(self, ids: Tensor) -> Tensor | None:
        """Its rows of these numbers, in float32; None: they cannot be read one by one."""
        return None if self.transposed else self.record.rows(ids)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Linear layers and embeddings; the rest is as of any tensor."""
        known = _KNOWN.get(func)
        if known is not None:
            answer = known(*args, **(kwargs or {}))
            if answer is not NotImplemented:
                return answer
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Of an operator that is not known: the same over the widened numbers."""

        def wide(given: object) -> object:
            if isinstance(given, WeightOnlyTensor):
                return given.numbers()
            return [wide(one) for one in given] if isinstance(given, list) else given

        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


def _linear(x: Tensor, weight: object, bias: Tensor | None = None) -> object:
    if not isinstance(weight, WeightOnlyTensor) or weight.transposed:
        return NotImplemented
    return weight.linear(x, bias)


def _embedding(ids: Tensor, weight: object, *_: object, **__: object) -> object:
    """What is padded, and how gradients are scaled, changes no row."""
    if not isinstance(weight, WeightOnlyTensor) or weight.transposed:
        return NotImplemented
    return weight.record.rows(ids)


def embedding(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """ids -> rows of a weight; of a packed one without torch's search for who computes it."""
    if isinstance(weight, WeightOnlyTensor) and not weight.transposed:
        return weight.record.rows
    return partial(F.embedding, weight=weight)


def _addmm(bias: Tensor, x: Tensor, weight: object, **more: object) -> object:
    """As `Conv1D` multiplies."""
    if not isinstance(weight, WeightOnlyTensor) or not weight.transposed or more:
        return NotImplemented
    return weight.linear(x, bias)


def _index(weight: object, at: object) -> object:
    if not isinstance(weight, WeightOnlyTensor):
        return NotImplemented
    if not isinstance(at, Tensor) or at.dtype != torch.int64:
        return NotImplemented
    found = weight.at(at)
    return NotImplemented if found is None else found


def _detached(weight: Tensor) -> object:
    """A parameter is none any more, as of any tensor."""
    return weight.again() if isinstance(weight, WeightOnlyTensor) else NotImplemented


def _float32(weight: Tensor, *given: object, **named: object) -> object:
    """What says float32 already, and is asked for that alone."""
    if isinstance(weight, WeightOnlyTensor) and (*given, *named.values()) == (torch.float32,):
        return weight
    return NotImplemented


def _turned(weight: Tensor) -> object:
    if not isinstance(weight, WeightOnlyTensor) or weight.dim() != _MATRIX:
        return NotImplemented
    return WeightOnlyTensor(weight.record, not weight.transposed)


_KNOWN: dict[Callable[..., object], Callable[..., object]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.addmm: _addmm,
    torch.Tensor.__getitem__: _index,
    torch.Tensor.detach: _detached,
    torch.Tensor.T.__get__: _turned,  # type: ignore[attr-defined]
    torch.Tensor.float: partial(_float32, dtype=torch.float32),
    torch.Tensor.to: _float32,
    torch.Tensor.type: _float32,
}
