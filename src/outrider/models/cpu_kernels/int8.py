"""Products with weights of 8 bits, compiled.

A weight w of output o is kept as the whole number round(w / s) with s = max |w| / 127 over the
output's weights: one scale for each output. Numbers that a call reads are half as many bytes as in
half precision, and a call of few rows takes the time that it reads. Activations stay as they are
and sums are float32, in one order whatever stands beside a row (`int8.c`).
"""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models.cpu_kernels import build

LANES, OUTPUTS = 16, 4  #: of int8.c
_MOST = 127
_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_PRODUCT = (_WHOLE,) * 5 + (_POINTER,) * 5


def unsupported_reason(device: torch.device) -> str | None:
    """Why nothing is kept in 8 bits there; None: it can be."""
    if device.type != "cpu":
        return f"its kernels are compiled for a CPU, and models run on {device}"
    return build.unbuilt()


class Int8Product:
    """x -> x @ w.T + bias for x [..., I], with w the weight [O, I] to 8 bits.

    Raises RuntimeError where `unsupported_reason` says why.

    >>> run = Int8Product(torch.eye(2, 3), None)                            # doctest: +SKIP
    >>> run(torch.tensor([1.0, 2.0, 3.0]))                              # doctest: +SKIP
    tensor([1., 2.])
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._run = build.function("outrider_int8", _PRODUCT)
        self.outputs, self.inputs = weight.shape
        room, wide = whole_lanes(self.outputs), whole_lanes(self.inputs)
        scale_O, laid = rounded(F.pad(weight.detach().float(), (0, wide - self.inputs)))
        laid = F.pad(laid, (0, 0, 0, room - self.outputs))
        laid = laid.view(room // OUTPUTS, OUTPUTS, wide // LANES, LANES).transpose(1, 2)
        bias_O = scale_O.new_zeros(room)
        if bias is not None:
            bias_O[: self.outputs] = bias.detach().float()
        self._kept = laid.contiguous(), F.pad(scale_O, (0, room - self.outputs)), bias_O
        self._at = [table.data_ptr() for table in self._kept]

    def __call__(self, x: Tensor) -> Tensor:
        """In the dtype of x."""
        if x.dtype == torch.float16:
            return self(x.float()).half()
        if x.shape[-1] != self.inputs:
            raise ValueError(f"{self.inputs} inputs are wanted; got {list(x.shape)}")
        x, rows = x.contiguous(), x.numel() // self.inputs
        out = x.new_empty(*x.shape[:-1], self.outputs)
        failed = self._run(
            rows, self.inputs, self.outputs, torch.get_num_threads(), x.dtype == torch.bfloat16,
            x.data_ptr(), *self._at, out.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for {rows} rows of {self.inputs} inputs")
        return out


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [...] and whole numbers [..., E] of 8 bits, whose product is x [..., E] rounded.

    >>> rounded(torch.tensor([[1.0, -2.0, 0.0], [0.0, 0.0, 0.0]]))
    (tensor([0.0157, 0.0000]), tensor([[  64, -127,    0],
            [   0,    0,    0]], dtype=torch.int8))
    """
    scale = x.abs().amax(-1, keepdim=True) / _MOST
    whole = torch.where(scale > 0, x / scale, 0.0).round().to(torch.int8)
    return scale[..., 0], whole


def whole_lanes(count: int) -> int:
    """The least whole lanes of so many."""
    return -(-count // LANES) * LANES
