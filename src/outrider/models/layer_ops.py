"""What stands between the products of a Llama's layers: norms, rotation, attention, gates.

Two ways: torch's operators, for every dtype and processor, and kernels compiled on the machine for
bfloat16 and float32 (`models.cpu_kernels`), which take three calls where torch takes twenty.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.models.attention import BatchInvariantAttention
from outrider.models.cache import SlotLayer
from outrider.models.decoder import additive
from outrider.types import Nodes

Gate: TypeAlias = Callable[[Tensor], Tensor]


class LayerOpsCall(Protocol):
    """One call of the model: what its layers share is worked out already."""

    def norm(self, state: Tensor, more: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """state + more, and that over its root mean square, times a weight of `weight`."""

    def attend(self, qkv: Tensor, store: SlotLayer) -> Tensor:
        """Attention [B, Q, H E] of qkv [B, Q, (H + 2 K) E], whose keys and values are stored."""

    def gate(self, both: Tensor) -> Tensor:
        """act(gate) * up, [B, Q, I], of both [B, Q, 2 I] side by side."""


class LayerOps(Protocol):
    """A way to run what stands between the products."""

    def open(self, nodes: Nodes) -> LayerOpsCall:
        """A call over these nodes."""

    def weight(self, weight_E: Tensor) -> Tensor:
        """A norm's weight as `LayerOpsCall.norm` wants it."""


class AttentionShape(Protocol):
    """What is to be known of a Llama."""

    heads: int
    kv_heads: int
    size: int  #: of a head
    eps: float


class TorchLayerOps:
    """torch's operators."""

    def __init__(
        self,
        shape: AttentionShape,
        attention: BatchInvariantAttention,
        act: Gate,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        self.shape, self.attention, self.act = shape, attention, act
        self.cos, self.sin = cos, sin

    def weight(self, weight_E: Tensor) -> Tensor:
        """Twice: once for x, once for -x."""
        return torch.cat([weight_E, weight_E]).detach()

    def open(self, nodes: Nodes) -> "_TorchCall":
        """Rotary factors [B, Q, 1, E] and the mask."""
        return _TorchCall(self, nodes)


class _TorchCall:
    def __init__(self, of: TorchLayerOps, nodes: Nodes) -> None:
        self.of = of
        self.mask = of.attention.mask(additive(nodes.visible_BQW, of.cos.dtype))
        self.cos = of.cos[nodes.positions_BQ][:, :, None]
        self.sin = of.sin[nodes.positions_BQ][:, :, None]

    def norm(self, state: Tensor, more: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum, and its norm as the layer norm of (x, -x).

        That row has mean 0 and variance mean(x^2), and layer_norm is one fused kernel on a CPU
        where rms_norm is a dozen operators (60 against 9 microseconds at width 256).
        """
        x = state if more is None else state + more
        both = torch.cat([x, -x], -1)
        normed = torch.layer_norm(both, weight.shape, weight, None, self.of.shape.eps)
        return x, normed[..., : x.shape[-1]]

    def attend(self, qkv: Tensor, store: SlotLayer) -> Tensor:
        """rotate_half(x) * sin is roll(x, half) * (sin with its first half negated)."""
        shape = self.of.shape
        batch, queries, _ = qkv.shape
        heads, rotated = shape.heads, shape.heads + shape.kv_heads
        qkv = qkv.view(batch, queries, rotated + shape.kv_heads, shape.size)
        qk = qkv[:, :, :rotated]
        qk = torch.addcmul(qk * self.cos, qk.roll(shape.size // 2, -1), self.sin).transpose(1, 2)
        keys, values = store.update(qk[:, heads:], qkv[:, :, rotated:].transpose(1, 2))
        x = self.of.attention(qk[:, :heads], keys, values, self.mask)
        return x.transpose(1, 2).reshape(batch, queries, heads * shape.size)

    def gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return self.of.act(gate) * up
