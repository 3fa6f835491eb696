"""Experts whose weights are packed: a mixture's layers keep the type that they came in, too.

transformers has the matrices of a layer's experts in one tensor. Here it is an `ExpertsTensor`, and
the module that reads it computes as transformers' grouped form does, each expert once over its
rows, on the packed kernels: a row is the same whatever stands beside it, which torch's products of
few rows are not.
"""

import re
from collections.abc import Sequence
from types import MethodType

import torch
from torch import Tensor, nn

from outrider.models.config import read
from outrider.models.cpu_kernels.packed_experts import PackedExperts, grouped, summed
from outrider.models.cpu_kernels.packed_linear import PackedWeight
from outrider.models.weight_only_tensor import WeightOnlyTensor

AXES = 3  #: of all experts' matrices
_ROUTES = re.compile("gate|rout")  #: in the name of what chooses them


class ExpertsTensor(WeightOnlyTensor):
    """Weights [X, O, I] of a layer's experts; with `transposed` they are read as [X, I, O].

    Of each expert `experts` has its weights whose outputs stand side by side.
    """

    product: PackedExperts

    @staticmethod
    def __new__(
        cls, experts: Sequence[Sequence[PackedWeight]], transposed: bool = False
    ) -> "ExpertsTensor":
        product = PackedExperts(experts)
        shape = product.outputs, product.inputs
        made: ExpertsTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            (len(experts), *(shape[::-1] if transposed else shape)),
            dtype=torch.float32,
            device=torch.device("cpu"),
            requires_grad=False,
        )
        made.experts, made.transposed, made.product = experts, transposed, product
        return made

    def __init__(self, experts: Sequence[Sequence[PackedWeight]], transposed: bool = False) -> None:
        self.experts: Sequence[Sequence[PackedWeight]]

    @classmethod
    def from_dense(
        cls, weights: Tensor, format: str | None = None, transposed: bool = False
    ) -> "ExpertsTensor":
        """Of dense ones [X, O, I], or [X, I, O] if `transposed`, as `PackedWeight.from_dense`."""
        each = weights.mT if transposed else weights
        return cls([[PackedWeight.from_dense(one, format)] for one in each], transposed)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ExpertsTensor({list(self.shape)}, {self.experts[0][0].format})"

    @property
    def records(self) -> tuple[PackedWeight, ...]:
        return tuple(one for each in self.experts for one in each)

    def numbers(self) -> Tensor:
        widened = torch.stack([torch.cat([w.dequantize() for w in each]) for each in self.experts])
        return widened.mT if self.transposed else widened

    def again(self) -> "ExpertsTensor":
        return ExpertsTensor(self.experts, self.transposed)

    def at(self, ids: Tensor) -> Tensor | None:
        """One expert's weight, if it is one matrix."""
        each = self.experts[int(ids)] if ids.dim() == 0 else ()
        return WeightOnlyTensor(each[0], self.transposed) if len(each) == 1 else None


def stacks(module: nn.Module) -> list[str]:
    """Names of a module's tensors of all experts, if transformers lets others compute what it does
    with them; none in any other module."""
    if read(module, "_apply_gate", object) is None:
        return []
    found = [name for name, it in module.named_parameters(recurse=False) if it.dim() == AXES]
    known = {"gate_up_proj" if _gated(module) else "up_proj", "down_proj"}
    return found if set(found) == known else []


def transposed(module: nn.Module) -> bool:
    """Whether they are [X, I, O]."""
    return bool(read(module, "is_transposed", bool))


def routers(module: nn.Module) -> list[nn.Module]:
    """What says which experts of this layer a token gets: matrices with a row for each of them."""
    stack = next((part for part in module.children() if stacks(part)), None)
    if stack is None:
        return []
    beside = [part for name, part in module.named_children() if _ROUTES.search(name)]
    each = [one for part in beside for one in part.modules() if one is not stack]
    weights = [(one, read(one, "weight", Tensor)) for one in each]
    count = len(stack.get_parameter("down_proj"))
    return [one for one, w in weights if w is not None and w.dim() == AXES - 1 and len(w) == count]


def run_packed(model: nn.Module) -> None:
    """Let its modules compute with the `ExpertsTensor`s that they have got."""
    for module in model.modules():
        names = stacks(module)
        if names and all(isinstance(module.get_parameter(name), ExpertsTensor) for name in names):
            vars(module)["forward"] = MethodType(_forward, module)


def _gated(module: nn.Module) -> bool:
    return read(module, "has_gate", bool) is not False


def _forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What each of T tokens gets [T, H] from its experts [T, K], by their weights [T, K].

    An expert's number may be one too many: it gives nothing, as where another process has it.
    """
    gated, biased = _gated(self), read(self, "has_bias", bool)
    first = "gate_up_proj" if gated else "up_proj"
    up, down = self.get_parameter(first), self.get_parameter("down_proj")
    assert isinstance(up, ExpertsTensor)
    assert isinstance(down, ExpertsTensor)
    groups = grouped(top_k_index, len(up))
    x = up.product(hidden_states[groups.order_S // top_k_index.shape[1]], groups.ends_X)
    if biased:
        known = top_k_index.reshape(-1)[groups.order_S].clamp(max=len(up) - 1)
        x = x + self.get_parameter(f"{first}_bias")[known]
    x = self._apply_gate(x) if gated else self.act_fn(x)  # type: ignore[operator]
    x = down.product(x, groups.ends_X)
    if biased:
        x = x + self.get_parameter("down_proj_bias")[known]
    if read(self, "has_post_expert_norm", bool):
        x = self.post_expert_norm(x)  # type: ignore[operator]
    weights = top_k_weights.masked_fill(top_k_index >= len(up), 0.0)
    return summed(x, weights, groups).to(hidden_states.dtype)
