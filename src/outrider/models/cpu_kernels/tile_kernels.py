"""Products with bfloat16 weights on processors that have tiles (Intel's AMX), compiled.

Sums are float32, in one order whatever stands beside a row (`tiles.c`), and weights are read as
they lie in a model. oneDNN's own products take another order for more than 32 rows there, so that a
prompt would have to be read 32 tokens at a time; and they lay weights out anew in every call.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models.cpu_kernels import build

TILE, STEP, FEW = 16, 32, 32  #: rows and inputs of a tile, and rows that are few (`tiles.c`)
ROOM = 128 * 2 * 1024 + 2 * 512 * 128  #: halves that a thread needs where rows are many
_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_PRODUCT = (_WHOLE,) * 5 + (_POINTER,) * 5


def unsupported_reason(like: Tensor) -> str | None:
    """Why weights as `like` are not kept in tiles; None: they can be."""
    if like.device.type != "cpu" or like.dtype != torch.bfloat16:
        return "compiled for bfloat16 on a CPU alone"
    if type(like) not in (Tensor, torch.nn.Parameter):  # quantised, say: what it holds is elsewhere
        return f"compiled for plain tensors alone, this is a {type(like).__name__}"
    return build.unbuilt() or _missing()


@lru_cache(maxsize=1)
def _missing() -> str | None:
    """Asks the system, once for the process: without leave the first tile would end it."""
    refused = build.function("outrider_no_tiles", (_WHOLE,))(0)
    return "this processor or its system has no tiles" if refused else None


@lru_cache(maxsize=1)
def _kernel() -> Callable[..., int]:
    why = build.unbuilt() or _missing()
    if why is not None:
        raise RuntimeError(why)
    return build.function("outrider_tiles", _PRODUCT)


def lies_right(weight: Tensor) -> bool:
    """Whether `multiply` reads this weight as it lies: rows of whole steps, next to each other."""
    whole = weight.shape[-1] % STEP == 0 and weight.numel() > 0
    return unsupported_reason(weight) is None and whole and weight.is_contiguous()


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool = False) -> Tensor:
    """x @ weight.T + bias for x [..., I] in bfloat16, with a weight [O, I] that `lies_right`.

    The answer is in bfloat16, or in float32 with `wide`: what the sums are, not rounded any more.
    Raises ValueError for an x of another dtype or number of inputs.
    """
    outputs, inputs = weight.shape
    check(x, inputs)
    x = x.contiguous()
    bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
    rows, threads = x.numel() // inputs, torch.get_num_threads()
    most = (rows + -rows % TILE) * inputs + threads * ROOM if rows > FEW else rows * inputs
    room = x.new_empty(most) if rows > 1 else x
    out = x.new_empty(*x.shape[:-1], outputs, dtype=torch.float32 if wide else torch.bfloat16)
    _kernel()(
        rows, inputs, outputs, threads, not wide, x.data_ptr(), weight.data_ptr(),
        0 if bias is None else bias.data_ptr(), room.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


def check(x: Tensor, inputs: int) -> None:
    """Raise ValueError for an x of another dtype or number of inputs, or that lies elsewhere."""
    if x.dtype != torch.bfloat16 or x.shape[-1] != inputs or x.device.type != "cpu":
        raise ValueError(
            f"{inputs} inputs in bfloat16 are wanted on a CPU; got {list(x.shape)} in {x.dtype} on "
            f"{x.device}"
        )


class TileProduct:
    """The same for any weight [O, I] in bfloat16: one that does not lie right is copied.

    Raises RuntimeError where `unsupported_reason` says why.

    >>> run = TileProduct(torch.eye(2, 3).bfloat16(), None)                 # doctest: +SKIP
    >>> run(torch.tensor([1.0, 2.0, 3.0]).bfloat16())                   # doctest: +SKIP
    tensor([1., 2.], dtype=torch.bfloat16)
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, wide: bool = False) -> None:
        why = unsupported_reason(weight)
        if why is not None:
            raise RuntimeError(why)
        if not weight.numel():
            raise RuntimeError(f"there is nothing to multiply with: {list(weight.shape)}")
        self._missing = -weight.shape[1] % STEP  #: inputs to the next whole step
        weight, self.inputs = weight.detach(), weight.shape[1]
        self.weight = F.pad(weight, (0, self._missing)) if self._missing else weight.contiguous()
        self._bias = None if bias is None else bias.detach().contiguous()
        self._wide = wide

    def __call__(self, x: Tensor) -> Tensor:
        """As many rows."""
        if self._missing:
            check(x, self.inputs)
            x = F.pad(x, (0, self._missing))
        return multiply(x, self.weight, self._bias, self._wide)
