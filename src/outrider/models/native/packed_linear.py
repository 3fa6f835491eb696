"""Products whose weights stay in the type they came in, with float32 activations and sums.

Weights are laid in panels of 16 outputs (`packed_linear.c`) of as many bits as before, and widened
in registers. A row is one sum in one order, whatever stands beside it and however many threads
there are: no form of a call has to be tried at load, and none is padded.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.errors import ConfigurationError
from outrider.models.native import build
from outrider.models.native.packed_formats import FORMATS, GROUP, TILE, Format

_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_PRODUCT = (_WHOLE,) * 6 + (_POINTER,) * 4
_ROWS = (_WHOLE,) * 4 + (_POINTER,) * 3


def unfit(format: str, outputs: int, inputs: int, device: torch.device | str) -> str | None:
    """Why a weight [outputs, inputs] in this format cannot be multiplied with there; None: it can.

    >>> unfit("q9_9", 16, 32, "cpu")[:31]
    "there is no format 'q9_9'; ther"
    """
    found = FORMATS.get(format)
    if found is None:
        return f"there is no format {format!r}; there are {', '.join(FORMATS)}"
    if torch.device(device).type != "cpu":
        return f"its kernels are compiled for a CPU, and the weight is on {device}"
    if outputs < 1 or inputs < 1:
        return f"there is nothing to multiply with: [{outputs}, {inputs}]"
    if not found.dense and inputs % found.chunk:
        return f"{format} has blocks of {found.chunk} inputs, and there are {inputs}"
    return build.unbuilt()


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [outputs, inputs] in a format, in panels: what `from_dense` or `from_blocks` make.

    >>> weight = PackedWeight.from_dense(torch.eye(2, 32), "q8_0")
    >>> weight.format, weight.outputs, weight.inputs, weight.nbytes
    ('q8_0', 2, 32, 544)
    """

    format: str
    outputs: int
    inputs: int
    panels: Tensor  #: uint8, 64-byte aligned

    @classmethod
    def from_dense(cls, weight_OI: Tensor, format: str | None = None) -> "PackedWeight":
        """A weight as it is in float32, bfloat16 or float16 (None: its own type), or rounded to
        "q8_0", "q4_0" or "q4_1" as GGUF files round it.

        Raises ConfigurationError for a format that cannot be made of a dense weight.
        """
        dense = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
        if format is None:
            format = next((name for name, kind in dense.items() if kind == weight_OI.dtype), None)
            if format is None:
                raise ConfigurationError(
                    f"a weight in {weight_OI.dtype} is in no format; name one of {_made()}"
                )
        weight_OI = weight_OI.detach()
        found = _known(format, *weight_OI.shape)
        if format in dense:
            rows = F.pad(weight_OI.to(dense[format]), (0, -weight_OI.shape[1] % found.chunk))
            return cls._laid(rows.contiguous().view(torch.uint8), found, weight_OI.shape[1])
        if found.quantize is None:
            raise ConfigurationError(f"no weight is rounded to {format!r}; name one of {_made()}")
        return cls._laid(found.quantize(weight_OI.float()), found, weight_OI.shape[1])

    @classmethod
    def from_blocks(cls, blocks: Tensor, format: str, inputs: int) -> "PackedWeight":
        """The rows of a GGUF file's tensor, uint8 [outputs, bytes of a row].

        Raises ConfigurationError for an unknown format, or rows of another length.
        """
        found = _known(format, len(blocks), inputs)
        if found.dense and inputs % found.chunk:
            wide = inputs + -inputs % found.chunk
            blocks = F.pad(blocks, (0, (wide - inputs) * found.block // found.chunk))
        want = -(-inputs // found.chunk) * found.block
        if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] != want:
            raise ConfigurationError(
                f"rows of {inputs} inputs in {format} are {want} bytes each; got "
                f"{list(blocks.shape)} in {blocks.dtype}"
            )
        return cls._laid(blocks, found, inputs)

    @classmethod
    def _laid(cls, blocks: Tensor, found: Format, inputs: int) -> "PackedWeight":
        """Rows in panels: group by group, in it chunk by chunk, of each the heads of its tiles and
        then what they hold."""
        outputs, chunks = len(blocks), blocks.shape[1] // found.block
        tiles = -(-outputs // TILE)
        panels = _aligned(tiles * TILE * chunks * (found.head + found.data))
        step = GROUP * TILE
        for first in range(0, outputs, step * _AT_ONCE):
            some = blocks[first : first + step * _AT_ONCE]
            some = F.pad(some, (0, 0, 0, -len(some) % TILE))
            whole = len(some) // step * step
            for part, beside in ((some[:whole], GROUP), (some[whole:], len(some[whole:]) // TILE)):
                if not len(part):
                    continue
                heads, data = found.lay(part.reshape(-1, chunks, found.block))
                heads, data = (
                    x.reshape(len(x) // beside, beside, chunks, x.shape[-1])
                    .transpose(1, 2)
                    .flatten(2)
                    for x in (heads, data)
                )
                laid = torch.cat((heads, data), -1).flatten()
                at = first * chunks * (found.head + found.data)
                panels[at : at + len(laid)] = laid
                first += len(part)
        return cls(found.name, outputs, inputs, panels)

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return self.panels.numel()

    @property
    def wide(self) -> int:
        """Inputs in whole chunks."""
        return self.inputs + -self.inputs % FORMATS[self.format].chunk

    def rows(self, ids: Tensor) -> Tensor:
        """Weights of some outputs: float32 [..., inputs] for ids [...], as embeddings are read.

        Raises IndexError for an id that is no output, RuntimeError where nothing is compiled.
        """
        ids = ids.to(torch.int64).contiguous()
        if ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < self.outputs):
            raise IndexError(f"an id outside the weight's {self.outputs} rows")
        out = torch.empty(*ids.shape, self.wide)
        run = build.function("outrider_packed_rows", _ROWS)
        run(
            FORMATS[self.format].code, ids.numel(), self.wide, self.outputs, ids.data_ptr(),
            self.panels.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out[..., : self.inputs]

    def dequantize(self) -> Tensor:
        """float32 [outputs, inputs], as `gguf.quants.dequantize` computes it."""
        return self.rows(torch.arange(self.outputs)).contiguous()


class PackedLinear:
    """x -> x @ w.T + bias for x [..., inputs] in float32 or bfloat16; the answer is in float32.

    Of several weights the outputs stand side by side. Raises ConfigurationError where `unfit` says
    why.

    >>> run = PackedLinear(PackedWeight.from_dense(torch.eye(2, 3)))        # doctest: +SKIP
    >>> run(torch.tensor([1.0, 2.0, 3.0]))                              # doctest: +SKIP
    tensor([1., 2.])
    """

    def __init__(
        self, weight: PackedWeight | Sequence[PackedWeight], bias: Tensor | None = None
    ) -> None:
        self.weights = (weight,) if isinstance(weight, PackedWeight) else tuple(weight)
        self.inputs = self.weights[0].inputs
        self.outputs = sum(one.outputs for one in self.weights)
        for one in self.weights:
            why = unfit(one.format, one.outputs, one.inputs, one.panels.device)
            if why is not None:
                raise ConfigurationError(why)
            if one.inputs != self.inputs:
                raise ConfigurationError(
                    f"weights of one product have as many inputs; got {self.inputs} and "
                    f"{one.inputs}"
                )
        if bias is not None and bias.shape != (self.outputs,):
            raise ConfigurationError(
                f"a bias of {self.outputs} outputs is wanted; got {list(bias.shape)}"
            )
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self._run: Callable[..., int] = build.function("outrider_packed_linear", _PRODUCT)

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [..., outputs]."""
        if x.shape[-1] != self.inputs or x.device.type != "cpu":
            raise ConfigurationError(
                f"{self.inputs} inputs are wanted on a CPU; got {list(x.shape)} on {x.device}"
            )
        x, rows = x.float().contiguous(), x.numel() // self.inputs
        out = torch.empty(*x.shape[:-1], self.outputs)
        at, bias = out.data_ptr(), None if self.bias is None else self.bias.data_ptr()
        threads = torch.get_num_threads()
        for one in self.weights:
            missing = one.wide - self.inputs
            given = F.pad(x, (0, missing)) if missing else x
            failed = self._run(
                FORMATS[one.format].code, rows, one.wide, one.outputs, self.outputs, threads,
                given.data_ptr(), one.panels.data_ptr(), bias, at,
            )  # fmt: skip
            if failed:
                raise MemoryError(f"no memory for {rows} rows of {self.inputs} inputs")
            at += 4 * one.outputs
            bias = None if bias is None else bias + 4 * one.outputs
        return out


_AT_ONCE = 64  #: groups that are laid at once, lest a second copy of all is made


def _known(format: str, outputs: int, inputs: int) -> Format:
    found = FORMATS.get(format)
    if found is None or outputs < 1 or inputs < 1 or (not found.dense and inputs % found.chunk):
        raise ConfigurationError(unfit(format, outputs, inputs, "cpu"))
    return found


def _made() -> str:
    return ", ".join(name for name, one in FORMATS.items() if one.dense or one.quantize)


def _aligned(count: int) -> Tensor:
    """Bytes from a whole line of a processor's cache on."""
    whole = torch.empty(count + 64, dtype=torch.uint8)
    first = -whole.data_ptr() % 64
    return whole[first : first + count]
