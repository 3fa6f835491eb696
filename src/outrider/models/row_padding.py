"""A row alike in all calls of a model's own forward, where products round what they are given.

Such products (`weight_only.rounds_inputs`) make much of a last bit, and torch sums two or three
rows in another order than one or four: so does its attention, and so do products with weights that
are not packed (experts, routers) and those of attention that a model writes out itself. Few rows
are padded here, in calls of runners alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.models import attention, batch_invariance, linear
from outrider.models.batch_invariance import PaddingPolicy

FUSED = "sdpa"
_LARGEST = 256  #: of a head; wider products of a batch are taken for such
_VECTORS = 64  #: so many numbers are whole vectors of every processor, two at a time
_GRAIN = 32768  #: of so many numbers of a tensor one thread more takes its part;
_ALL = 16384  #: of GELU's all do where there are more than so many
_theirs = ALL_ATTENTION_FUNCTIONS[FUSED]
#: Whether a call is under way whose rows have to be alike in all calls.
_pads: ContextVar[bool] = ContextVar("_pads", default=False)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """transformers' fused attention, under its name (models ask for it by that); in calls of
    runners whose products round what they are given, with few rows padded.

    Without a mask, or with what it is not tried for, it is transformers' own.
    """
    elsewhere = torch.compiler.is_compiling() or not _pads.get()  # a tracer takes no such variable
    more = given.get("position_bias") is not None or given.get("softcap") is not None
    if not (elsewhere or more):
        with torch._C.DisableTorchFunction():  # or it is met again
            x = _fused(query, key, value, attention_mask, scaling)
        if x is not None:
            return x.transpose(1, 2).contiguous(), None
    own: tuple[Tensor, None]
    own = _theirs(module, query, key, value, attention_mask, scaling=scaling, **given)
    return own


AttentionInterface.register(FUSED, attend)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor | None:
    """Attention with few rows padded; None: it is not tried for this."""
    if query.dim() != 4 or mask is None or mask.dim() != 4:
        return None
    (heads, queries, size), wide = query.shape[1:], value.shape[-1]
    if mask.shape[2] != queries or wide > size:
        return None
    groups = heads // key.shape[1]
    attend, _ = attention.tried(attention.fused, key.shape[1], groups, size, query.dtype)
    # a mask for each head would be large
    if groups > 1 and (mask.shape[1] > 1 or groups * queries > attend.rows.few[-1]):
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        attend = attend._replace(groups=1)
    if wide < size:  # of latent attention
        value = F.pad(value, (0, size - wide))
    scale = 1.0 if scaling is None else scaling * size**0.5
    asked = query if math.isclose(scale, 1.0) else query * scale
    return attend(asked, key, value, attend.mask(mask))[..., :wide]


class RowPadding:
    """Of all calls of one model.

    Every function of torch is looked at until a call of as many tokens, by as many threads, has met
    none but packed products and attention under `FUSED`: looking takes 1 us of each.
    """

    def __init__(self) -> None:
        self._clear = dict[int, int]()  #: up to how many tokens nothing is padded, by threads

    @contextmanager
    def __call__(self, tokens: int) -> Iterator[None]:
        """In here few rows are padded, in a call of so many tokens."""
        before, threads = _pads.set(True), torch.get_num_threads()
        try:
            if tokens <= self._clear.get(threads, 0):
                yield
                return
            with _Products() as products:
                yield
            if not products.met:
                self._clear[threads] = tokens
        finally:
            _pads.reset(before)


class _Products(TorchFunctionMode):
    """Pads the rows of torch's own products."""

    met = False  #: whether there was one

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """The same with padded rows, or what it is."""
        padded, given = _PADDED.get(func), dict(kwargs or ())
        # one that is written in Python is met with all that it takes, said or not
        writes = given.pop("inplace", False) or given.pop("out", None) is not None
        answer = None if padded is None or writes or not args else padded(*args, **given)
        if answer is None:  # by types and last sizes, which are the model's in all calls
            return func(*args, **(kwargs or {}))
        self.met = True
        return answer.contiguous()  # as torch's own are: models take views of them


def _dense(*tensors: object) -> bool:
    """Whether these are float32 numbers and no packed weights."""
    return all(
        isinstance(one, Tensor)
        and type(one) in (Tensor, torch.nn.Parameter)
        and one.dtype == torch.float32
        for one in tensors
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if not _dense(x, weight) or weight.dim() != 2:
        return None
    flat = x.reshape(-1, x.shape[-1])
    out = _rows_of(weight.shape, torch.get_num_threads()).over(
        lambda some: F.linear(some, weight, bias), flat
    )
    return out.view(*x.shape[:-1], out.shape[-1])


def _matmul(x: Tensor, other: Tensor | None = None, *, mat2: Tensor | None = None) -> Tensor | None:
    """x [..., R, I] @ other [..., I, O]; one number a row is no sum. `bmm` calls it mat2."""
    other = mat2 if other is None else other
    if other is None or not _dense(x, other) or min(x.dim(), other.dim()) < 2 or x.shape[-1] == 1:
        return None
    if other.dim() == 2:
        flat = x.reshape(-1, x.shape[-1])
        rows = _rows_of(other.shape[::-1], torch.get_num_threads())
        out = rows.over(lambda some: some @ other, flat)
        return out.view(*x.shape[:-1], out.shape[-1])
    size, heads = min(x.shape[-1], other.shape[-1], _LARGEST), x.shape[:-2].numel()
    rows = _batched(min(heads, batch_invariance.HEADS), size, torch.get_num_threads())
    return rows.over(lambda some: torch.matmul(some, other), x)


def _baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor | None:
    """What is added comes behind: one rounding more than torch's, the same in all calls."""
    x = _matmul(batch1, batch2)
    if x is None or not beta:  # then what is added may be anything, NaN, too
        return None if x is None else x * alpha
    return input * beta + x * alpha


def _times(weight: Tensor, x: Tensor) -> Tensor:
    return x @ weight


def _grouped_mm(
    x: Tensor, weights: Tensor, *, offs: Tensor | None = None, **more: object
) -> Tensor | None:
    """Rows of x by the weights [I, O] of their expert, the ends of whose rows `offs` has."""
    if not _dense(x, weights) or offs is None or any(one is not None for one in more.values()):
        return None
    rows = _rows_of(weights.shape[:0:-1], torch.get_num_threads())
    out, start = x.new_zeros(x.shape[0], weights.shape[-1]), 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            out[start:end] = rows.over(partial(_times, weights[expert]), x[start:end])
            start = end
    return out


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if is_causal or dropout_p or not _dense(query, key, value):
        return None
    return _fused(query, key, value, attn_mask, scale)


@lru_cache(maxsize=256)
def _rows_of(shape: torch.Size, threads: int) -> PaddingPolicy:
    """Counts of rows that are good for a weight [O, I], by so many threads: found with these."""
    return linear.rows_of(shape, torch.float32, packed=False)


@lru_cache(maxsize=64)
def _batched(heads: int, size: int, threads: int) -> PaddingPolicy:
    """The same for attention of this size as two products; more are cut, for what multiplies rows
    may be weights, whose shapes are tried by none."""
    found, _ = attention.tried(attention.unscaled, heads, 1, size, torch.float32)
    return found.rows._replace(step=0)


def _each(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """Of a function of each number: vectors of them round otherwise than what is left of one, at
    the end of every thread's part."""

    def padded(input: Tensor, *args: Any, **given: Any) -> Tensor | None:
        if not _dense(input) or not input.dim():
            return None
        threads, count = torch.get_num_threads(), input.numel()
        whole_rows = input.shape[-1] % _VECTORS == 0
        if whole_rows and (threads < 3 or count <= _ALL):  # one half ends on a vector, too
            return None
        every = function is F.gelu and count > _ALL
        used = threads if every else max(min(threads, -(-count // _GRAIN)), 1)
        whole, more = input.reshape(count), -count % (_VECTORS * used)
        whole = F.pad(whole, (0, more)) if more else whole
        return function(whole, *args, **given)[:count].view(input.shape)

    return padded


_PADDED: dict[Callable[..., object], Callable[..., Tensor | None]] = {
    F.linear: _linear,
    F.scaled_dot_product_attention: _attention,
    torch._grouped_mm: _grouped_mm,
    torch.baddbmm: _baddbmm,
    torch.Tensor.baddbmm: _baddbmm,
    **dict.fromkeys((torch.matmul, torch.bmm, torch.mm), _matmul),
    **dict.fromkeys((torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.mm), _matmul),
    torch.Tensor.__matmul__: _matmul,
    **{function: _each(function) for function in (torch.sigmoid, F.silu, F.gelu, F.softplus)},
    **{function: _each(function) for function in (F.mish, F.elu, torch.exp2)},
    torch.Tensor.sigmoid: _each(torch.sigmoid),
}
