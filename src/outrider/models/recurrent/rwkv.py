"""RWKV-4 (Peng et al. 2023): averages of values, weighted by exponentials of keys that fade.

    out = (N + e^(u + k) v) / (D + e^(u + k));    N <- e^-w N + e^k v;    D <- e^-w D + e^k

N and D are kept relative to the largest exponent M seen, as transformers does. Besides, each token
is mixed with the one before it, ahead of the attention and of the feed-forward layer: windows of
two inputs. transformers hands a list of states from layer to layer; both forwards are replaced.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.models.recurrent.elementwise import ElementwiseState
from outrider.models.recurrent.hooks import Function, handle_of

_LOWEST = -1e38  #: the largest exponent of no text


class FadingAverage(ElementwiseState):
    """Keys and values [B, Q, A]; states [B, 3, A]: numerator, denominator, largest exponent."""

    def __init__(self, decay_A: Tensor, first_A: Tensor) -> None:
        self._decay_A, self._first_A = -torch.exp(decay_A.float()), first_A.float()

    def shapes(self, *inputs: Tensor) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        wide = inputs[0].shape[2]
        return (3, wide), ((wide,), (wide,), (1,))

    def entries(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Key, value, and whether time passes at all."""
        key, value = inputs
        return key, value, key.new_ones(*key.shape[:2], 1)

    def begin(self, state: Tensor) -> None:
        """Nothing was seen: the largest exponent is the lowest number."""
        state[:, 2] = _LOWEST

    def advance(self, state: Tensor, entries: Sequence[Tensor], into: Tensor | None) -> Tensor:
        key, value, passes = entries
        top, bottom, most = state.unbind(1)
        faded = most + self._decay_A * passes
        new = torch.maximum(faded, key)
        old, now = torch.exp(faded - new), torch.exp(key - new)
        made = torch.stack([old * top + now * value, old * bottom + now, new], 1)
        return made if into is None else into.copy_(made)

    def idle(self, entries: Sequence[Tensor], on_B: Tensor) -> list[Tensor]:
        """No time passes, and a key of no weight: times one, plus zero."""
        key, value, passes = entries
        off = ~on_B[:, None]
        return [key.masked_fill(off, -torch.inf), value, passes.masked_fill(off, 0.0)]

    def output(self, before: Tensor, behind: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """The average, in which the token itself counts by its own weight."""
        key, value = inputs
        top, bottom, most = before.unbind(1)
        own = key + self._first_A
        new = torch.maximum(most, own)
        old, now = torch.exp(most - new), torch.exp(own - new)
        return (old * top + now * value) / (old * bottom + now)


def _mixed(x_BQE: Tensor, before_BQE: Tensor, share: Tensor) -> Tensor:
    return x_BQE * share + before_BQE * (1 - share)


def wrap_attention(theirs: Function) -> Function:
    """`RwkvSelfAttention.forward` over a call's nodes, if it is given a cache of ours."""

    def forward(self: Any, hidden: Tensor, state: object = None, use_cache: bool = False) -> object:
        handle = handle_of(state, self)
        if handle is None:
            return theirs(self, hidden, state=state, use_cache=use_cache)
        before = handle.windows(hidden.mT, 2)[..., 0].mT
        key = self.key(_mixed(hidden, before, self.time_mix_key))
        value = self.value(_mixed(hidden, before, self.time_mix_value))
        gate = torch.sigmoid(self.receptance(_mixed(hidden, before, self.time_mix_receptance)))
        rule = FadingAverage(self.time_decay, self.time_first)
        out = handle.recur(rule, key.float(), value.float())
        return self.output(gate * out.to(hidden.dtype)), state

    return forward


def wrap_feed_forward(theirs: Function) -> Function:
    """`RwkvFeedForward.forward` over a call's nodes, if it is given a cache of ours."""

    def forward(self: Any, hidden: Tensor, state: object = None) -> object:
        handle = handle_of(state, self)
        if handle is None:
            return theirs(self, hidden, state=state)
        before = handle[:, 1].windows(hidden.mT, 2)[..., 0].mT
        key = torch.relu(self.key(_mixed(hidden, before, self.time_mix_key))).square()
        gate = torch.sigmoid(self.receptance(_mixed(hidden, before, self.time_mix_receptance)))
        return gate * self.value(key), state

    return forward


WRAPPERS: Mapping[str, Function] = {
    "RwkvSelfAttention": wrap_attention,
    "RwkvFeedForward": wrap_feed_forward,
}
