"""Products whose weights stay in the type they came in, with float32 states.

Weights are laid in panels of 16 outputs (`packed_layout.c`) of as many bits as before, and
widened in registers (`packed_linear.c`). A row is one sum in one order, whatever stands beside it
and however many threads there are: no form of a call has to be tried at load, and none is padded.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.errors import ConfigurationError
from outrider.models import isa
from outrider.models.cpu_kernels import build
from outrider.models.cpu_kernels.packed_formats import FORMATS, Format
from outrider.models.memory import empty

_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_PRODUCT = (_WHOLE,) * 7 + (_POINTER,) * 4
_INT8 = (_WHOLE,) * 5 + (_POINTER,) * 4
_ROWS = (_WHOLE,) * 5 + (_POINTER,) * 3
_HALVES = 11  #: the code of bfloat16 weights whose inputs are rounded to bfloat16, too
_LAYOUT = (_WHOLE,) * 7 + (_POINTER,) * 2
PARTS = 3  #: weights of one product in compiled layers, at most
_TILE, _GROUP = 16, 64  #: outputs of a tile, and of tiles that lie together (`packed_tiles.h`)
_AT_ONCE = 1 << 18  #: weights that are rounded or converted at once, lest all are copied twice


class _Part(ctypes.Structure):
    _fields_ = [*((name, _WHOLE) for name in ("format", "per", "outputs")), ("weight", _POINTER)]


class Linear(ctypes.Structure):
    """A `PackedLinear` as compiled layers take it."""

    _fields_ = [
        *((name, _WHOLE) for name in ("parts", "inputs", "outputs")),
        ("of", _Part * PARTS),
        ("bias", _POINTER),
    ]


def unsupported_reason(
    format: str, outputs: int, inputs: int, device: torch.device | str
) -> str | None:
    """Why a weight [outputs, inputs] in this format cannot be multiplied with there; None: it can.

    >>> unsupported_reason("q9_9", 16, 32, "cpu")[:31]
    "there is no format 'q9_9'; ther"
    """
    if torch.device(device).type != "cpu":
        return f"its kernels are compiled for a CPU, and the weight is on {device}"
    return _wrong(format, outputs, inputs) or build.unbuilt()


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [outputs, inputs] in a format, in panels: what `from_dense` and `from_blocks` make.

    They raise RuntimeError where nothing is compiled.

    >>> weight = PackedWeight.from_dense(torch.eye(2, 32), "q8_0")          # doctest: +SKIP
    >>> weight.format, weight.outputs, weight.inputs, weight.nbytes         # doctest: +SKIP
    ('q8_0', 2, 32, 544)
    """

    format: str
    outputs: int
    inputs: int
    panels: Tensor  #: uint8, 64-byte aligned

    @classmethod
    def from_dense(cls, weight_OI: Tensor, format: str | None = None) -> "PackedWeight":
        """A weight as it is in float32, bfloat16 or float16 (None: its own type), or rounded to
        "q8_0", "q4_0" or "q4_1" as the `gguf` package rounds it.

        Raises ConfigurationError for a format that cannot be made of a dense weight.
        """
        if format is None:
            own = (one.name for one in FORMATS.values() if one.dense == weight_OI.dtype)
            format = next(own, None)
            if format is None:
                raise ConfigurationError(
                    f"a weight in {weight_OI.dtype} is in no format; name one of {_made()}"
                )
        weight_OI, found = weight_OI.detach(), _known(format, *weight_OI.shape)
        (outputs, inputs), dense, quantize = weight_OI.shape, found.dense, found.quantize
        step = _GROUP * max(_AT_ONCE // inputs // _GROUP, 1)
        some = (weight_OI[at : at + step] for at in range(0, outputs, step))
        if dense is not None:
            parts = (rows.to(dense).contiguous().view(torch.uint8) for rows in some)
        elif quantize is not None:
            parts = (quantize(rows.float()) for rows in some)
        else:
            raise ConfigurationError(f"no weight is rounded to {format!r}; name one of {_made()}")
        return cls(format, outputs, inputs, _panels(found, parts, outputs, inputs))

    @classmethod
    def from_blocks(cls, blocks: Tensor, format: str, inputs: int) -> "PackedWeight":
        """The rows of a GGUF file's tensor, uint8 [outputs, bytes of a row].

        Raises ConfigurationError for an unknown format, or rows of another length.
        """
        outputs, found = len(blocks), _known(format, len(blocks), inputs)
        want = inputs * found.block // found.chunk
        if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] != want:
            raise ConfigurationError(
                f"rows of {inputs} inputs in {format} are {want} bytes each; got "
                f"{list(blocks.shape)} in {blocks.dtype}"
            )
        return cls(format, outputs, inputs, _panels(found, (blocks,), outputs, inputs))

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return self.panels.numel()

    @property
    def per(self) -> int:
        """Blocks that share a head."""
        return FORMATS[self.format].per

    @property
    def wide(self) -> int:
        """Inputs in whole chunks."""
        return self.inputs + -self.inputs % FORMATS[self.format].chunk

    def rows(self, ids: Tensor) -> Tensor:
        """Weights of some outputs: float32 [..., inputs] for ids [...], as embeddings are read.

        Raises IndexError for an id that is no output, RuntimeError where nothing is compiled.
        """
        ids = ids.to(torch.int64).contiguous()
        out = ids.new_empty(*ids.shape, self.wide, dtype=torch.float32)
        if build.function("outrider_packed_rows", _ROWS)(
            FORMATS[self.format].code, self.per, ids.numel(), self.wide, self.outputs,
            ids.data_ptr(), self.panels.data_ptr(), out.data_ptr(),
        ):  # fmt: skip
            raise IndexError(f"an id outside the weight's {self.outputs} rows")
        return out if self.wide == self.inputs else out[..., : self.inputs]

    def dequantize(self) -> Tensor:
        """float32 [outputs, inputs], as `gguf.quants.dequantize` computes it."""
        return self.rows(torch.arange(self.outputs, device="cpu")).contiguous()


class PackedLinear:
    """x -> x @ w.T + bias for x [..., inputs] in float32 or bfloat16; the answer is in float32.

    Of several weights the outputs stand side by side. With weights of 8 bits or fewer each row and
    block of inputs (32; 16 with q6_k) is rounded to 16 bits by a scale of its own first, half a
    step of which is 2^-16 of the block's largest, and a block's products are summed as whole
    numbers, exactly. With `activations` "int8" they are rounded to
    8 bits (-127 to 127; -63 to 63 on x86 without VNNI, whose products of bytes would overflow):
    faster for many rows, for q8_0 weights alone, and off by about 0.5 % of a result, or 1 %. A row
    is the same in every call either way.

    With bfloat16 weights and a processor that has products of two such numbers, `activations` None
    is "bfloat16": rows are rounded to it before they are multiplied, and sums are float32 (as
    llama.cpp computes there). "float32" asks for float32 products, which is what None is elsewhere.

    Raises ConfigurationError where `unsupported_reason` says why, and for other activations.

    >>> run = PackedLinear(PackedWeight.from_dense(torch.eye(2, 3)))        # doctest: +SKIP
    >>> run(torch.tensor([1.0, 2.0, 3.0]))                              # doctest: +SKIP
    tensor([1., 2.])
    """

    def __init__(
        self,
        weight: PackedWeight | Sequence[PackedWeight],
        bias: Tensor | None = None,
        activations: str | None = None,
    ) -> None:
        self.weights = (weight,) if isinstance(weight, PackedWeight) else tuple(weight)
        self.inputs = self.weights[0].inputs
        self.outputs = sum(one.outputs for one in self.weights)
        for one in self.weights:
            why = unsupported_reason(one.format, one.outputs, one.inputs, one.panels.device)
            if why is not None:
                raise ConfigurationError(why)
            if one.inputs != self.inputs:
                raise ConfigurationError(
                    f"weights of one product have as many inputs; got {self.inputs} and "
                    f"{one.inputs}"
                )
        formats = ", ".join(dict.fromkeys(one.format for one in self.weights))
        if activations not in (None, "float32", "int8") or (
            activations == "int8" and formats != "q8_0"
        ):
            raise ConfigurationError(
                f"activations are None, 'float32', or 'int8' with q8_0 weights; got "
                f"{activations!r} with {formats} weights"
            )
        if bias is not None and bias.shape != (self.outputs,):
            raise ConfigurationError(
                f"a bias of {self.outputs} outputs is wanted; got {list(bias.shape)}"
            )
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.activations = activations
        #: Formats, as packed_linear.c numbers them.
        self.codes = [product_code(one.format, rounded=activations is None) for one in self.weights]
        self._run: Callable[..., int] = (
            build.function("outrider_packed_int8", _INT8)
            if activations == "int8"
            else build.function("outrider_packed_linear", _PRODUCT)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [..., outputs]."""
        if x.shape[-1] != self.inputs or x.device.type != "cpu":
            raise ConfigurationError(
                f"{self.inputs} inputs are wanted on a CPU; got {list(x.shape)} on {x.device}"
            )
        x, rows = x.float().contiguous(), x.numel() // self.inputs
        out = x.new_empty(*x.shape[:-1], self.outputs)
        at, bias = out.data_ptr(), None if self.bias is None else self.bias.data_ptr()
        threads = torch.get_num_threads()
        for one, code in zip(self.weights, self.codes, strict=True):
            missing = one.wide - self.inputs
            given = F.pad(x, (0, missing)) if missing else x
            kind = () if self.activations == "int8" else (code, one.per)
            failed = self._run(
                *kind, rows, one.wide, one.outputs, self.outputs, threads, given.data_ptr(),
                one.panels.data_ptr(), bias, at,
            )  # fmt: skip
            if failed == 2:  # the library in use was not compiled for what `isa` says
                raise ConfigurationError("no products of bfloat16 numbers are compiled here")
            if failed:
                raise MemoryError(f"no memory for {rows} rows of {self.inputs} inputs")
            at += 4 * one.outputs
            bias = None if bias is None else bias + 4 * one.outputs
        return out


def linear(product: PackedLinear) -> Linear:
    """As compiled layers take it; what it points to is the product's."""
    parts = [
        _Part(code, one.per, one.outputs, one.panels.data_ptr())
        for one, code in zip(product.weights, product.codes, strict=True)
    ]
    bias = None if product.bias is None else product.bias.data_ptr()
    return Linear(len(parts), product.inputs, product.outputs, (_Part * PARTS)(*parts), bias)


def product_code(format: str, rounded: bool = True) -> int:
    """A format, as packed_linear.c numbers it; `rounded`: inputs of bfloat16 weights are rounded
    to it where the processor has products of two such numbers."""
    if rounded and format == "bf16" and isa.has_bf16_products():
        return _HALVES
    return FORMATS[format].code


def _panels(of: Format, parts: Iterable[Tensor], outputs: int, inputs: int) -> Tensor:
    """A file's rows of so many inputs as `packed_tiles.h` has them; all parts of them but the last
    are of whole groups."""
    size = build.function("outrider_packed_chunk", (_WHOLE,) * 2)(of.code, of.per)
    lay = build.function("outrider_packed_layout", _LAYOUT)
    chunks, at = -(-inputs // of.chunk), 0
    panels = empty(-(-outputs // _TILE) * chunks * size)
    for rows_OB in map(Tensor.contiguous, parts):
        some, bytes_of_row = rows_OB.shape
        if lay(
            of.code, of.per, some, chunks, of.block, bytes_of_row, torch.get_num_threads(),
            rows_OB.data_ptr(), panels.data_ptr() + at,
        ):  # fmt: skip
            raise MemoryError(f"no memory to lay {some} rows of {bytes_of_row} bytes")
        at += some // _TILE * chunks * size
    return panels


def _wrong(format: str, outputs: int, inputs: int) -> str | None:
    """Why there is no such weight."""
    found = FORMATS.get(format)
    if found is None:
        return f"there is no format {format!r}; there are {', '.join(FORMATS)}"
    if outputs < 1 or inputs < 1:
        return f"there is nothing to multiply with: [{outputs}, {inputs}]"
    block = 1 if found.dense else found.chunk
    if inputs % block:
        return f"{format} has blocks of {block} inputs, and there are {inputs}"
    return None


def _known(format: str, outputs: int, inputs: int) -> Format:
    why = _wrong(format, outputs, inputs)
    if why is not None:
        raise ConfigurationError(why)
    return FORMATS[format]


def _made() -> str:
    return ", ".join(name for name, one in FORMATS.items() if one.dense or one.quantize)
