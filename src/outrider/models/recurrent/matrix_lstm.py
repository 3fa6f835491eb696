"""The matrix memory of xLSTM (Beck et al. 2024): values by keys, behind exponential gates.

    m' = max(log f + m, i);    C <- e^(log f + m - m') C + e^(i - m') k v'
    out = q C / (max(|q n|, e^-m') + eps)

with gates f (a logistic function, given by its logarithm) and i of each token and head. n is what C
is for values of one, and is kept as one more column of it; m keeps the exponentials small.
transformers hands a layer's state to the backend of its layer, whose forward is replaced.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from outrider.models.recurrent.elementwise import ElementwiseState
from outrider.models.recurrent.hooks import Function, StateHandle


class MatrixMemory(ElementwiseState):
    """Queries and keys [B, Q, H, K], values [B, Q, H, V], input and log forget gates [B, Q, H].

    States [B, H, K + 1, V + 1]: C beside n, and m in the last line.
    """

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def shapes(self, *inputs: Tensor) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        _, k, v, _, _ = inputs
        heads, keys, values = k.shape[2], k.shape[3], v.shape[3]
        return (heads, keys + 1, values + 1), ((heads, keys), (heads, values), (heads,), (heads,))

    def entries(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """All but the query."""
        return inputs[1:]

    def advance(self, state: Tensor, entries: Sequence[Tensor], into: Tensor | None) -> Tensor:
        key, value, given, kept = entries
        faded = kept + state[..., -1, 0]
        most = torch.maximum(faded, given)
        old, new = torch.exp(faded - most), torch.exp(given - most)
        added = (new[..., None] * key)[..., None] * pad(value, (0, 1), value=1.0)[..., None, :]
        made = pad(state[..., :-1, :] * old[..., None, None] + added, (0, 0, 0, 1))
        made[..., -1, 0] = most
        return made if into is None else into.copy_(made)

    def idle(self, entries: Sequence[Tensor], on_B: Tensor) -> list[Tensor]:
        """Nothing fades, and an input of no weight: times one, plus zero."""
        key, value, given, kept = entries
        off = ~on_B[:, None]
        return [key, value, given.masked_fill(off, -torch.inf), kept.masked_fill(off, 0.0)]

    def output(self, before: Tensor, behind: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """What the query finds, by the weight of what is there."""
        query = inputs[0] * inputs[0].shape[-1] ** -0.5
        found = (query[..., None, :] @ behind[..., :-1, :])[..., 0, :]
        least = torch.exp(-behind[..., -1, 0])
        weight = torch.maximum(found[..., -1].abs(), least) + self._eps
        read: Tensor = found[..., :-1] / weight[..., None]
        return read


def wrap_backend(theirs: Function) -> Function:
    """`xLSTMBackend.forward` over a call's nodes, if it is given handles for its states."""

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        igate: Tensor,
        fgate: Tensor,
        c_initial: Tensor | StateHandle | None = None,
        *others: object,
        **more: object,
    ) -> object:
        if not isinstance(c_initial, StateHandle):
            given = (query, key, value, igate, fgate, c_initial)
            return theirs(self, *given, *others, **more)
        tables = (x.transpose(1, 2).float() for x in (query, key, value, igate))
        kept = logsigmoid(fgate.transpose(1, 2).float())
        out = c_initial.recur(MatrixMemory(self.config.eps), *tables, kept)
        return out.to(query.dtype).transpose(1, 2), (c_initial,) * 3

    return forward


WRAPPERS: Mapping[str, Function] = {"xLSTMBackend": wrap_backend}
