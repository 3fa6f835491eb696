"""EAGLE-3 heads of Llama layers on a CPU: the same weights in a few calls.

transformers' modules take more time around a head's products than the products take. Here they run
as a lean decoder's do (`models.layer`); what is drafted is that of the module, to rounding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models.cache import SlotCache
from outrider.models.config import read
from outrider.models.heads.eagle3 import Eagle3, HeadStates
from outrider.models.layer import STATIC_ROPE, Layer, chosen
from outrider.models.linear import product
from outrider.types import Nodes


def fits(head: Eagle3) -> bool:
    """Whether it is on a CPU, of Llama layers with fixed rotary tables."""
    layer = head.config.layer
    rope = read(layer, "rope_parameters", dict) or {}
    return (
        head.device.type == "cpu"
        and layer.model_type == "llama"
        and rope.get("rope_type", "default") in STATIC_ROPE
    )


class Eagle3Cpu:
    """A `StateHead` with the weights of an EAGLE-3 head, which must not change any more.

    `positions` are those that a text may have: the head's configuration may say fewer. `int8` keeps
    the weights of its products in 8 bits.

    >>> lean = Eagle3Cpu(head, packed=True, positions=8192)  # doctest: +SKIP
    >>> HeadModel(AutoregressiveHead(lean), 49152)  # doctest: +SKIP
    """

    window: int | None = None

    def __init__(self, head: Eagle3, packed: bool, positions: int, int8: bool = False) -> None:
        config = head.config.layer
        self.taps, self.depth, self.width = head.taps, head.depth, head.width
        self.ids_K, self.device, self.dtype = head.ids_K, head.device, head.dtype
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.size: int = read(config, "head_dim", int) or head.width // self.heads
        self.eps: float = config.rms_norm_eps
        self.hidden, self.inner = head.width, int(config.intermediate_size)
        self._last = max(positions, int(config.max_position_embeddings)) - 1
        self._between, *_ = chosen(
            self, config.hidden_act, head.rotary, self._last + 1, head.fc.weight
        )
        self._layers = [Layer(layer, packed, int8, self._between) for layer in head.layers]
        weight = self._between.weight
        self._state_norm = weight(head.get_parameter("layers.0.hidden_norm.weight"))
        self._norm = weight(head.get_parameter("norm.weight"))
        self._embedding = head.table
        self._output = product(head.output, None, packed, int8, wide=True)
        self.module, self._fc = head, product(head.fc.weight, None, packed, int8)

    def fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        """One state [B, Q, E] of the target's states [B, Q, E'] at the taps."""
        return self._fc(self.module.joined(hidden))

    def entries(self, nodes: Nodes, states_BQE: Tensor, cache: SlotCache) -> HeadStates:
        """Entries of tokens, each with the state of the token before it."""
        positions = nodes.positions_BQ.clamp(max=self._last)
        call = self._between.open(nodes._replace(positions_BQ=positions))
        embedded = F.embedding(nodes.tokens_BQ, self._embedding)
        _, token = call.norm(embedded, None, self._layers[0].before)
        _, normed = call.norm(states_BQE, None, self._state_norm)
        state = normed if self.module.config.norm_before_residual else states_BQE
        x, more = torch.cat([token, normed], -1), None
        for number, (layer, store) in enumerate(zip(self._layers, cache.layers, strict=True)):
            if number:
                state, x = call.norm(state, more, layer.before)
            x = call.attend(layer.qkv(x), store)
            state, x = call.norm(state, layer.out(x), layer.between)
            more = layer.down(call.gate(layer.gate_up(x)))
        state, read = call.norm(state, more, self._norm)
        return HeadStates(read if self.module.config.norm_output else state, read)

    def logits(self, states: HeadStates) -> Tensor:
        """[B, Q, K]: over the tokens that it can propose."""
        return self._output(states.read_BQE)
