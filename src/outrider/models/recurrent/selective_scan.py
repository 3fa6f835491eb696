"""The selective scan, the recurrence of Mamba-1 (Gu and Dao 2023): a decay for each element.

    S <- exp(dt A) S + (dt x) B';    out = S C + D x

Mamba, Falcon-Mamba, Jamba, and Zamba with several heads of it in a layer. transformers' scan of
several tokens has no argument for a state to start from: the handle is the one that its mixer asked
the cache for last.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from outrider.models.recurrent.elementwise import ElementwiseState
from outrider.models.recurrent.hooks import Function, StateHandle, asked, wrap_update


class SelectiveScan(ElementwiseState):
    """dt [B, Q, I], dt x [B, Q, I], B and C [B, Q, N]; A [I, N] is the layer's."""

    def __init__(self, a_IN: Tensor) -> None:
        self._a_IN = a_IN.float()

    def shapes(self, *inputs: Tensor) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        dt, _, b, _ = inputs
        return (dt.shape[2], b.shape[2]), ((dt.shape[2],), (dt.shape[2],), (b.shape[2],))

    def entries(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """All but what the state is read with."""
        return inputs[:3]

    def advance(self, state: Tensor, entries: Sequence[Tensor], into: Tensor | None) -> Tensor:
        dt, added, b = entries
        decay = (dt[..., None] * self._a_IN).exp_()
        made = torch.mul(state, decay, out=decay if into is None else into)
        return made.addcmul_(added[..., None], b[:, None])

    def idle(self, entries: Sequence[Tensor], on_B: Tensor) -> list[Tensor]:
        """No time passes in other rows: times one, plus zero."""
        dt, added, b = entries
        off = ~on_B[:, None]
        return [dt.masked_fill(off, 0.0), added.masked_fill(off, 0.0), b]

    def output(self, before: Tensor, behind: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """S C of the state behind the token."""
        return (behind @ inputs[3][..., None])[..., 0]


def _over(
    handle: StateHandle,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
) -> Tensor:
    """Outputs [B, Q, I] of tables [B, Q, I] and [B, Q, N]."""
    wide = x.float()
    out = handle.recur(SelectiveScan(a), dt, dt * wide, b.float(), c.float())
    if d is not None:
        out = out + wide * d.float()
    return out if z is None else out * silu(z.float())


def _steps(dt: Tensor, bias: Tensor | None, plus: bool) -> Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return softplus(dt) if plus else dt


def wrap_scan(theirs: Function) -> Function:
    """`mamba_selective_scan` that goes on from the handle that this thread's mixer asked for."""

    @functools.wraps(theirs)
    def mamba_selective_scan(*given: Any, **named: Any) -> object:
        handle = asked()
        run = theirs if handle is None else functools.partial(_scan, handle)
        return run(*given, **named)

    return mamba_selective_scan


def _scan(
    handle: StateHandle,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **more: object,
) -> object:
    dt = _steps(dt.mT, delta_bias, delta_softplus)
    out = _over(handle, hidden_states.mT, dt, A, B.mT, C.mT, D, None if z is None else z.mT).mT
    if not return_last_state:
        return out
    return out, out.new_empty(out.shape[0], 0)  # of several heads they are stacked, and ignored


def _one_token(
    handle: StateHandle,
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor | None,
    bias: Tensor | None,
    plus: bool,
    gate: Tensor | None,
) -> Tensor:
    return _over(handle, x, _steps(dt, bias, plus), a, b, c, d, gate)


WRAPPERS: Mapping[str, Function] = {
    "mamba_selective_scan": wrap_scan,
    "mamba_selective_state_update": wrap_update(_one_token),
}
