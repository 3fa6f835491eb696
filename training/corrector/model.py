"""A T5 written for training: small, quick on a CPU, exported to transformers' own.

Two things differ inside and not outside: attention is scaled (T5 has the scale in its query
matrix), which Muon's steps need, and the first weights are such that copying is near.
`tests/training/test_corrector.py` compares its logits with `T5ForConditionalGeneration`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention

BUCKETS, FARTHEST = 32, 128  # of T5's relative positions
BEFORE, AFTER = (-1, -2, -3), (1, 2)  # where the first heads look
LOOK = 6.0  # what the first heads add to the scores of the neighbour they look at


@dataclass(frozen=True)
class Shape:
    """The sizes that define a model. Head size is `width // heads`."""

    layers: int = 4  # of the encoder, and as many of the decoder
    width: int = 256
    heads: int = 8
    inner: int = 768
    vocabulary: int = 4096

    @property
    def head_size(self) -> int:
        return self.width // self.heads


class Attention(nn.Module):
    """Attention from `x` to `memory`; `bias` holds positions and what may not be seen."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, shape.width, bias=False)
        self.v = nn.Linear(shape.width, shape.width, bias=False)
        self.o = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q(x), self.k(memory), self.v(memory))
        )
        scores = (query * query.shape[-1] ** -0.5) @ key.mT + bias
        mixed = scores.softmax(-1) @ value
        return self.o(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention to oneself, in a decoder to the encoder's states, and a plain feed-forward."""

    def __init__(self, shape: Shape, decoder: bool) -> None:
        super().__init__()
        norms = 3 if decoder else 2
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width, eps=1e-6) for _ in range(norms))
        self.own = Attention(shape)
        self.cross = Attention(shape) if decoder else None
        self.wi = nn.Linear(shape.width, shape.inner, bias=False)
        self.wo = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(
        self, x: Tensor, bias: Tensor, states: Tensor | None, cross_bias: Tensor | None
    ) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.own(normed, normed, bias)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), states, cross_bias)
        return x + self.wo(F.relu(self.wi(self.norms[-1](x))))


class Stack(nn.Module):
    """Encoder or decoder above the embedding."""

    def __init__(self, shape: Shape, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.bias = nn.Embedding(BUCKETS, shape.heads)
        self.layers = nn.ModuleList(Layer(shape, decoder) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)

    def positions(self, length: int) -> Tensor:
        """What distance adds to the scores, `[1, heads, length, length]`."""
        place = torch.arange(length)
        buckets = T5Attention._relative_position_bucket(
            place - place[:, None], not self.decoder, BUCKETS, FARTHEST
        )
        return self.bias(buckets).permute(2, 0, 1)[None]

    def forward(
        self, x: Tensor, hidden: Tensor, states: Tensor | None = None, cross: Tensor | None = None
    ) -> Tensor:
        bias = self.positions(x.shape[1]) + hidden
        for layer in self.layers:
            x = layer(x, bias, states, cross)
        return self.norm(x)


class T5(nn.Module):
    """Sources and decoder inputs in, logits out; the output projection is the embedding."""

    def __init__(self, shape: Shape, pad: int = 1) -> None:
        super().__init__()
        self.shape, self.pad = shape, pad
        self.shared = nn.Embedding(shape.vocabulary, shape.width)
        self.encoder, self.decoder = Stack(shape, False), Stack(shape, True)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Random weights, and heads that make copying near.

        Some heads of both stacks look at the tokens before, some of the encoder's at those after.
        The decoder begins as a copy of the encoder, and cross attention finds what is alike: so
        it finds in the source the place where the last tokens written stand, and there the token
        that comes next. From random weights alone that takes thousands of steps.
        """
        width, depth = self.shape.width, (2 * self.shape.layers) ** 0.5
        for name, weight in self.named_parameters():
            if ".layers." in name and weight.dim() == 2:
                back = name.endswith(("cross.o.weight", "wo.weight"))
                nn.init.normal_(weight, std=width**-0.5 / (depth if back else 1))
        for layer, twin in zip(self.encoder.layers, self.decoder.layers, strict=True):
            twin.own.load_state_dict(layer.own.state_dict())
            twin.cross.k.weight.copy_(twin.cross.q.weight)
        for stack, looks in ((self.encoder, BEFORE + AFTER), (self.decoder, BEFORE)):
            stack.bias.weight.zero_()
            for head, distance in enumerate(looks[: self.shape.heads]):
                bucket = T5Attention._relative_position_bucket(
                    torch.tensor(distance), not stack.decoder, BUCKETS, FARTHEST
                )
                stack.bias.weight[bucket, head] = LOOK

    def forward(self, sources_BS: Tensor, inputs_BT: Tensor) -> Tensor:
        dtype = self.shared.weight.dtype
        seen = torch.zeros(sources_BS.shape, dtype=dtype).masked_fill(
            sources_BS == self.pad, torch.finfo(dtype).min
        )[:, None, None]
        states = self.encoder(self.shared(sources_BS), seen)
        length = inputs_BT.shape[1]
        later = torch.full((length, length), torch.finfo(dtype).min, dtype=dtype).triu(1)
        x = self.decoder(self.shared(inputs_BT), later, states, seen)
        return F.linear(x * self.shape.width**-0.5, self.shared.weight)


def to_transformers(model: T5, end: int = 0):
    """The same model as a `T5ForConditionalGeneration` in float32."""
    from transformers import T5Config, T5ForConditionalGeneration

    shape = model.shape
    config = T5Config(
        vocab_size=shape.vocabulary,
        d_model=shape.width,
        d_kv=shape.head_size,
        d_ff=shape.inner,
        num_layers=shape.layers,
        num_heads=shape.heads,
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=FARTHEST,
        dropout_rate=0.0,
        pad_token_id=model.pad,
        eos_token_id=end,
        decoder_start_token_id=end,
    )
    twin = T5ForConditionalGeneration(config)
    state = {"shared.weight": model.shared.weight.detach().float()}
    for part, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        found = _stack_state(stack, shape.head_size**-0.5)
        state |= {f"{part}.{name}": weight.detach().float() for name, weight in found.items()}
    for tied in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head"):
        state[f"{tied}.weight"] = state["shared.weight"]
    twin.load_state_dict(state)
    return twin.eval()


def _stack_state(stack: Stack, scale: float) -> dict[str, Tensor]:
    """Weights under the names of transformers; the scale of attention goes into the queries."""
    state = {"final_layer_norm.weight": stack.norm.weight}
    first = "block.0.layer.0.SelfAttention"
    state[f"{first}.relative_attention_bias.weight"] = stack.bias.weight
    for number, layer in enumerate(stack.layers):
        block = f"block.{number}.layer"
        last = len(layer.norms) - 1
        attentions = [("SelfAttention", layer.own), ("EncDecAttention", layer.cross)]
        for place, (name, attention) in enumerate(attentions[:last]):
            for matrix in "qkvo":
                weight = getattr(attention, matrix).weight
                state[f"{block}.{place}.{name}.{matrix}.weight"] = (
                    weight * scale if matrix == "q" else weight
                )
        for matrix in ("wi", "wo"):
            weight = getattr(layer, matrix).weight
            state[f"{block}.{last}.DenseReluDense.{matrix}.weight"] = weight
        for place, norm in enumerate(layer.norms):
            state[f"{block}.{place}.layer_norm.weight"] = norm.weight
    return state
