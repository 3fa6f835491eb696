"""A mixture of experts over packed weights: which experts a token gets, their products, their sum.

A token is computed in one order whatever stands beside it (`experts.c`).
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.errors import ConfigurationError
from outrider.models.cpu_kernels import build
from outrider.models.cpu_kernels.packed_linear import (
    PARTS,
    Linear,
    PackedLinear,
    PackedWeight,
    linear,
    product_code,
    unsupported_reason,
)

_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_PRODUCT = (_WHOLE,) * 7 + (_POINTER,) * 4
_SORT = (_WHOLE,) * 2 + (_POINTER,) * 4
_MIXTURE = (_POINTER, _WHOLE, _WHOLE, _POINTER, _POINTER)
_SUM = (_WHOLE,) * 4 + (_POINTER,) * 6


class _ExpertsPart(ctypes.Structure):
    _fields_ = [*((name, _WHOLE) for name in ("format", "per", "outputs")), ("weights", _POINTER)]


class _Experts(ctypes.Structure):
    _fields_ = [
        *((name, _WHOLE) for name in ("parts", "inputs", "outputs")),
        ("of", _ExpertsPart * PARTS),
    ]


class _Mixture(ctypes.Structure):
    _fields_ = [
        *((name, _WHOLE) for name in ("experts", "chosen", "whole")),
        ("route", Linear),
        *((name, _Experts) for name in ("gate_up", "down")),
        *((name, Linear) for name in ("shared_gate_up", "shared_down", "gate")),
    ]


class PackedExperts:
    """Rows of x, sorted by expert, times the weights of theirs, as `PackedLinear` has a product of
    one: a row is the same whatever stands beside it.

    Of each expert several weights may stand side by side, in the formats of the first one's. Raises
    ConfigurationError where `unsupported_reason` says why.

    >>> both = PackedWeight.from_dense(torch.eye(3)), PackedWeight.from_dense(2 * torch.eye(3))
    ...                                                                     # doctest: +SKIP
    >>> run = PackedExperts([[one] for one in both])                        # doctest: +SKIP
    >>> run(torch.ones(3, 3), torch.tensor([1, 3]))[:, 0]                   # doctest: +SKIP
    tensor([1., 2., 2.])
    """

    def __init__(self, weights: Sequence[Sequence[PackedWeight]]) -> None:
        first = weights[0]
        for one in first:
            why = unsupported_reason(one.format, one.outputs, one.inputs, one.panels.device)
            if why is not None:
                raise ConfigurationError(why)
        self.inputs, self.outputs = first[0].inputs, sum(one.outputs for one in first)
        #: each, an expert's first weight, and the addresses of all experts'
        self._parts: list[tuple[int, PackedWeight, Tensor]] = []
        for each in zip(*weights, strict=True):
            one = each[0]
            kinds = {(it.format, it.outputs, it.inputs) for it in each}
            if kinds != {(one.format, one.outputs, self.inputs)}:
                raise ConfigurationError(
                    f"experts have weights of one kind, for {self.inputs} inputs; got "
                    f"{sorted(kinds)}"
                )
            at = torch.tensor([it.panels.data_ptr() for it in each], device="cpu")
            self._parts.append((product_code(one.format), one, at))
        self._weights = weights  # whose memory it is
        self._run = build.function("outrider_packed_experts", _PRODUCT)

    def laid(self) -> _Experts:
        """As compiled layers take it."""
        parts = [
            _ExpertsPart(code, one.per, one.outputs, addresses.data_ptr())
            for code, one, addresses in self._parts
        ]
        return _Experts(len(parts), self.inputs, self.outputs, (_ExpertsPart * PARTS)(*parts))

    def __call__(self, x_SI: Tensor, ends_X: Tensor) -> Tensor:
        """float32 [S, outputs]; the rows of expert k end before ends_X[k] (int64), and those behind
        the last end are zero."""
        x_SI, ends_X = x_SI.float().contiguous(), ends_X.to(torch.int64).contiguous()
        if x_SI.dim() != 2 or x_SI.shape[1] != self.inputs or len(ends_X) != len(self._weights):
            raise ConfigurationError(
                f"rows of {self.inputs} numbers and the ends of {len(self._weights)} experts are "
                f"wanted; got {list(x_SI.shape)} and {list(ends_X.shape)}"
            )
        out = x_SI.new_zeros(len(x_SI), self.outputs)
        at, threads = out.data_ptr(), torch.get_num_threads()
        for code, one, addresses in self._parts:
            missing = one.wide - self.inputs
            given = F.pad(x_SI, (0, missing)) if missing else x_SI
            failed = self._run(
                code, one.per, len(ends_X), one.wide, one.outputs, self.outputs, threads,
                ends_X.data_ptr(), given.data_ptr(), addresses.data_ptr(), at,
            )  # fmt: skip
            if failed:
                raise MemoryError(f"no memory for {len(x_SI)} rows of {self.inputs} inputs")
            at += 4 * one.outputs
        return out


class Groups(NamedTuple):
    """Tokens' choices [T, K], sorted by expert."""

    order_S: Tensor  #: which choice stands there
    place_S: Tensor  #: where a choice stands
    ends_X: Tensor  #: where the choices of each expert end; those of none here stand behind them


def grouped(ids_TK: Tensor, experts: int) -> Groups:
    """The same choices by expert.

    >>> grouped(torch.tensor([[2, 0], [2, 1]]), 3).order_S                  # doctest: +SKIP
    tensor([1, 3, 0, 2])
    """
    ids_TK = ids_TK.to(torch.int64).contiguous()
    room = ids_TK.new_empty(2, ids_TK.numel())
    ends_X = ids_TK.new_empty(experts)
    build.function("outrider_experts_sort", _SORT)(
        ids_TK.numel(), experts, ids_TK.data_ptr(), room[0].data_ptr(), room[1].data_ptr(),
        ends_X.data_ptr(),
    )  # fmt: skip
    return Groups(room[0], room[1], ends_X)


def summed(given_SH: Tensor, weights_TK: Tensor, groups: Groups) -> Tensor:
    """What each token gets [T, H] of what its experts give, by its weights."""
    given_SH, weights_TK = given_SH.contiguous(), weights_TK.float().contiguous()
    tokens, chosen = weights_TK.shape
    out = given_SH.new_empty(tokens, given_SH.shape[1])
    build.function("outrider_experts_sum", _SUM)(
        tokens, chosen, given_SH.shape[1], torch.get_num_threads(), groups.place_S.data_ptr(),
        weights_TK.data_ptr(), given_SH.data_ptr(), None, None, out.data_ptr(),
    )  # fmt: skip
    return out


class SharedExpert(NamedTuple):
    """One that all tokens go through, and what decides how much of it is added."""

    gate_up: PackedLinear
    down: PackedLinear
    gate: PackedLinear


class PackedMixture:
    """x -> what tokens x [T, H] get of their experts, silu between the products, in one call.

    `route` scores the experts; of the `chosen` most likely the first of equals comes first, and
    with `whole` their weights are divided by their sum. What the shared one gives is multiplied by
    the logistic function of its gate. Raises ConfigurationError for more experts than there are,
    and products that do not fit each other.
    """

    def __init__(
        self,
        route: PackedLinear,
        gate_up: PackedExperts,
        down: PackedExperts,
        chosen: int,
        whole: bool,
        shared: SharedExpert | None = None,
    ) -> None:
        if not 0 < chosen <= route.outputs:
            raise ConfigurationError(
                f"a token gets 1 to {route.outputs} experts; got {chosen}; check the model's "
                "configuration"
            )
        count, width, inner = route.outputs, route.inputs, down.inputs
        found = [(len(one._weights), one.inputs, one.outputs) for one in (gate_up, down)]
        wanted = [(count, width, 2 * inner), (count, inner, width)]
        if shared:
            found += [(1, one.inputs, one.outputs) for one in shared]
            inner = shared.down.inputs
            wanted += [(1, width, 2 * inner), (1, inner, width), (1, width, 1)]
        if found != wanted:
            raise ConfigurationError(
                f"products of {count} experts are wanted for {width} numbers, (experts, inputs, "
                f"outputs) {wanted}; got {found}; check the model's configuration"
            )
        self._kept = route, gate_up, down, shared  # what the structure points to
        each = [linear(one) for one in shared] if shared else [Linear()] * 3
        self._laid = _Mixture(
            route.outputs, chosen, whole, linear(route), gate_up.laid(), down.laid(), *each
        )
        self.at = ctypes.addressof(self._laid)
        self._run = build.function("outrider_mixture", _MIXTURE)

    def __call__(self, x_TH: Tensor) -> Tensor:
        """float32 [T, H]."""
        route = self._kept[0]
        if x_TH.dim() != 2 or x_TH.shape[1] != route.inputs or x_TH.device.type != "cpu":
            raise ConfigurationError(
                f"tokens of {route.inputs} numbers are wanted on a CPU; got {list(x_TH.shape)} on "
                f"{x_TH.device}"
            )
        x_TH = x_TH.float().contiguous()
        out, threads = torch.empty_like(x_TH), torch.get_num_threads()
        failed = self._run(self.at, len(x_TH), threads, x_TH.data_ptr(), out.data_ptr())
        if failed:
            raise MemoryError(f"no memory for {len(x_TH)} tokens of {route.inputs}")
        return out
