"""RMS norms of hybrid models, gated or not, as one compiled call each.

They are five to twelve of torch's operators, each as long as what it computes. Modelling files
differ in what they do with a gate, and whether weights count from 0 or from 1: a norm is tried on
numbers at load, and computed by the kernel if that gives what the module gives.
"""

import inspect
from collections.abc import Callable
from copy import copy
from itertools import product

import torch
from torch import Tensor

from outrider.models.config import read
from outrider.models.cpu_kernels import build, mixers

Norm = Callable[..., Tensor]


def compile_norms(model: torch.nn.Module) -> int:
    """Replace the forwards of a copy's norms where the kernel computes the same; how many.

    `model` is not the user's own object: its modules are changed.
    """
    if build.unbuilt() is not None:
        return 0
    norms = [part for part in model.modules() if "RMSNorm" in type(part).__name__]
    return sum(map(_compile, norms))


@torch.inference_mode()
def _compile(part: torch.nn.Module) -> bool:
    weight, eps = read(part, "weight", Tensor), read(part, "variance_epsilon", float)
    eps = read(part, "eps", float) if eps is None else eps
    if weight is None or eps is None or weight.dtype != torch.float32:
        return False
    if weight.dim() != 1 or weight.device.type != "cpu":
        return False
    width = len(weight)
    group = read(part, "group_size", int) or width // (read(part, "n_groups", int) or 1)
    if group % mixers.LANES or width % group or not weight.is_contiguous():
        return False
    gated = "gate" in inspect.signature(part.forward).parameters
    random = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 1, 2, width, generator=random, dtype=torch.float32, device="cpu")
    drawn[0] *= torch.tensor([[3.0], [1e-3]], dtype=torch.float32, device="cpu")
    given = tuple(drawn) if gated else (drawn[0],)
    try:
        expected: object = part(*given)
    except Exception:  # takes more than that, such as a residual, or runs on a card alone
        return False
    if not isinstance(expected, Tensor) or expected.shape != given[0].shape:
        return False
    # a twin with the same weights: a forward that held its own module would make it a cycle
    theirs = copy(part).forward
    for ahead, one in product((False, True) if gated else (False,), (False, True)):
        run = _compiled(theirs, weight, eps, group, ahead, one)
        if torch.allclose(run(*given), expected, rtol=1e-5, atol=1e-6):
            vars(part)["forward"] = run
            return True
    return False


def _compiled(theirs: Norm, weight: Tensor, eps: float, group: int, ahead: bool, one: bool) -> Norm:
    def forward(hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        given = (hidden_states,) if gate is None else (hidden_states, gate)
        alike = all(x.dtype == torch.float32 and x.shape == hidden_states.shape for x in given)
        if not alike or torch.is_grad_enabled():
            return theirs(*given)
        return mixers.norm(hidden_states, weight, eps, group, gate, ahead, one)

    return forward
