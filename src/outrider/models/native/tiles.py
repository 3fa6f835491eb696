"""Products with bfloat16 weights on processors that have tiles (Intel's AMX), compiled.

Sums are float32, in one order whatever stands beside a row (`tiles.c`). oneDNN's own products take
another order for more than 32 rows there, so that a prompt would have to be read 32 tokens at a
time, and need longer for few rows.
"""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models.native import build

TILE, STEP, GROUP = 16, 32, 32  #: rows, inputs and outputs of tiles.c
_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_PRODUCT = (_WHOLE,) * 5 + (_POINTER,) * 4


def unfit(like: Tensor) -> str | None:
    """Why weights as `like` are not kept in tiles; None: they can be."""
    if like.device.type != "cpu" or like.dtype != torch.bfloat16:
        return "compiled for bfloat16 on a CPU alone"
    return build.unbuilt() or _missing()


@lru_cache(maxsize=1)
def _missing() -> str | None:
    """Asks the kernel, once for the process."""
    refused = build.function("outrider_no_tiles", (_WHOLE,))(0)
    return "this processor or its kernel has no tiles" if refused else None


class TileProduct:
    """x -> x @ weight.T + bias for x [..., I] in bfloat16, the weight [O, I] laid in tiles.

    The answer is in bfloat16, or in float32 with `wide`: what the sums are, not rounded any more.
    Raises RuntimeError where `unfit` says why.

    >>> run = TileProduct(torch.eye(2, 3).bfloat16(), None)                 # doctest: +SKIP
    >>> run(torch.tensor([1.0, 2.0, 3.0]).bfloat16())                   # doctest: +SKIP
    tensor([1., 2.], dtype=torch.bfloat16)
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, wide: bool = False) -> None:
        why = unfit(weight)
        if why is not None:
            raise RuntimeError(why)
        self._run = build.function("outrider_tiles", _PRODUCT)
        self.outputs, self.inputs = weight.shape
        self._dtype = torch.float32 if wide else torch.bfloat16
        self._missing = -self.inputs % STEP  #: inputs to the next whole step
        more = -self.outputs % GROUP
        laid = F.pad(weight.detach(), (0, self._missing, 0, more))
        laid = laid.view(-1, GROUP // TILE, TILE, laid.shape[1] // STEP, STEP // 2, 2)
        bias_O = weight.new_zeros(self.outputs + more, dtype=torch.float32)
        if bias is not None:
            bias_O[: self.outputs] = bias.detach().float()
        self._kept = laid.permute(0, 3, 1, 4, 2, 5).contiguous(), bias_O
        self._at = [table.data_ptr() for table in self._kept]

    def __call__(self, x: Tensor) -> Tensor:
        """As many rows."""
        if x.dtype != torch.bfloat16 or x.shape[-1] != self.inputs:
            raise ValueError(
                f"{self.inputs} inputs in bfloat16 are wanted; got {list(x.shape)} in {x.dtype}"
            )
        if self._missing:
            x = F.pad(x, (0, self._missing))
        x = x.contiguous()
        steps = x.shape[-1]
        out = x.new_empty(*x.shape[:-1], self.outputs, dtype=self._dtype)
        self._run(
            x.numel() // steps, steps, self.outputs, torch.get_num_threads(),
            self._dtype == torch.bfloat16, x.data_ptr(), *self._at, out.data_ptr(),
        )  # fmt: skip
        return out
