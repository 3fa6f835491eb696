"""The optimiser: Muon for the matrices inside the layers, Adam for embedding and norms.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by the nearest orthogonal one, so
every direction moves by the same amount. Weights are kept in float32 here whatever the dtype
of the model; with several processes each orthogonalises its share of the matrices.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training import parallel


@dataclass(frozen=True)
class Rates:
    """Peak learning rates and decay; the schedule scales both rates alike."""

    muon: float = 0.02
    adam: float = 4e-3
    weight_decay: float = 0.05
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)


def orthogonal(stack: Tensor, rounds: int = 5) -> Tensor:
    """Newton-Schulz towards `U V^T` of each wide matrix of `[count, rows, columns]`.

    The quintic's coefficients trade exactness for speed: singular values end between about
    0.7 and 1.2, which serves as well as 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack / (stack.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x


class Optimiser:
    """Steps a model from float32 gradients; `state` is all that a resumed run needs."""

    def __init__(self, model: nn.Module, rates: Rates) -> None:
        self.rates = rates
        self.model = dict(model.named_parameters())
        self.weights = {name: p.detach().float().clone() for name, p in self.model.items()}
        self.matrices = [n for n, p in self.model.items() if p.dim() == 2 and ".layers." in n]
        self.others = [n for n in self.model if n not in set(self.matrices)]
        self.first = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.second = {name: torch.zeros_like(self.weights[name]) for name in self.others}
        self.steps = 0

    def step(self, gradients: dict[str, Tensor], scale: float) -> None:
        """Move the weights; `scale` is where the schedule stands, 0 to 1."""
        self.steps += 1
        self._step_others(gradients, scale * self.rates.adam)
        self._step_matrices(gradients, scale * self.rates.muon)
        with torch.no_grad():
            for name, parameter in self.model.items():
                parameter.copy_(self.weights[name])

    def _step_others(self, gradients: dict[str, Tensor], rate: float) -> None:
        slow, fast = self.rates.betas
        for name in self.others:
            gradient, first, second = gradients[name], self.first[name], self.second[name]
            first.lerp_(gradient, 1 - slow)
            second.lerp_(gradient.square(), 1 - fast)
            mean = first / (1 - slow**self.steps)
            spread = (second / (1 - fast**self.steps)).sqrt()
            self.weights[name].sub_(rate * mean / (spread + 1e-10))

    def _step_matrices(self, gradients: dict[str, Tensor], rate: float) -> None:
        # A short momentum at the start: the first gradients of a run say little about later ones.
        momentum = min(self.rates.momentum, 0.85 + 0.1 * self.steps / 300)
        for names in self._stacks():
            moved = [self._nesterov(name, gradients[name], momentum) for name in names]
            stack = torch.stack(moved).bfloat16()
            # The others leave zeros where this process works, so the sum loses nothing to bf16.
            mine = slice(parallel.rank(), None, parallel.count())
            share = torch.zeros_like(stack)
            if len(stack[mine]):
                share[mine] = orthogonal(stack[mine])
            for name, update in zip(names, parallel.add_up(share).float(), strict=True):
                weight = self.weights[name]
                tall = weight.shape[0] > weight.shape[1]
                gain = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.mul_(1 - rate * self.rates.weight_decay)
                weight.sub_(rate * gain * (update.T if tall else update))

    def _nesterov(self, name: str, gradient: Tensor, momentum: float) -> Tensor:
        self.first[name].lerp_(gradient, 1 - momentum)
        ahead = gradient.lerp(self.first[name], momentum)
        return ahead.T if ahead.shape[0] > ahead.shape[1] else ahead

    def _stacks(self, most: int = 24) -> list[list[str]]:
        """Matrices of one (wide) shape together: one batched product instead of many small."""
        groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in self.matrices:
            groups[tuple(sorted(self.weights[name].shape))].append(name)
        return [
            names[i : i + most] for names in groups.values() for i in range(0, len(names), most)
        ]

    def state(self) -> dict[str, object]:
        return {
            "weights": self.weights,
            "first": self.first,
            "second": self.second,
            "steps": self.steps,
        }

    def restore(self, state: dict[str, object]) -> None:
        """Continue exactly where `state` was taken."""
        for part in ("weights", "first", "second"):
            mine: dict[str, Tensor] = getattr(self, part)
            for name, value in state[part].items():  # type: ignore[attr-defined]
                mine[name].copy_(value)
        self.steps = int(state["steps"])  # type: ignore[call-overload]
        with torch.no_grad():
            for name, parameter in self.model.items():
                parameter.copy_(self.weights[name])
