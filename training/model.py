"""A Llama written for training: small, compilable, with the parameter names of transformers.

The state dict is the one of `LlamaForCausalLM` with tied embeddings, so a checkpoint moves
between the two without renaming. `tests/training/test_training_models.py` compares their logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes that define a model. Head size is `width // heads`."""

    layers: int = 24
    width: int = 256
    heads: int = 4
    inner: int = 704
    vocabulary: int = 4096
    context: int = 512

    @property
    def head_size(self) -> int:
        return self.width // self.heads


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.head_size = shape.heads, shape.head_size
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = (rows, length, self.heads, self.head_size)
        query = rotate(self.q_proj(x).view(split).transpose(1, 2), cos, sin)
        key = rotate(self.k_proj(x).view(split).transpose(1, 2), cos, sin)
        value = self.v_proj(x).view(split).transpose(1, 2)
        mixed = causal_attention(query, key, value)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, width))


class Mlp(nn.Module):
    """The gated feed-forward half of a layer (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each on a normalised copy added back to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=1e-5)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=1e-5)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Everything below the output projection; named `model` as in transformers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)


class Llama(nn.Module):
    """Tokens in, logits out; the output projection is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        angles = rotary_angles(shape)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Projections back into the stream start small: depth must not blow it up.
                back = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** (0.5 * back))

    def body(self, tokens: Tensor) -> Tensor:
        """The last hidden states, `[rows, length, width]`."""
        length = tokens.shape[1]
        x = self.model.embed_tokens(tokens)
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, `[rows, length, vocabulary]`."""
        return F.linear(self.body(tokens), self.model.embed_tokens.weight)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, chunk: int = 128) -> Tensor:
    """Attention to oneself and the past; all three are `[rows, heads, length, head_size]`.

    The fused kernel is right for a GPU. On a CPU plain products over chunks of queries, each
    with only the keys it may see, compile to 2.5 times the speed of torch's fused kernel
    (length 512, bf16, forward and backward, one Zen 4 core).
    """
    if query.is_cuda:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    length = query.shape[2]
    place = torch.arange(length, device=query.device)
    mixed = []
    for first in range(0, length, chunk):
        end = min(first + chunk, length)
        scores = query[:, :, first:end] @ key[:, :, :end].transpose(-1, -2)
        scores = scores.float() * query.shape[-1] ** -0.5
        scores = scores.masked_fill(place[:end] > place[first:end, None], -torch.inf)
        mixed.append(scores.softmax(-1).to(value.dtype) @ value[:, :, :end])
    return torch.cat(mixed, 2)


def rotary_angles(shape: Shape) -> Tensor:
    """The angle of every position and channel, halves laid out as transformers does."""
    channels = torch.arange(0, shape.head_size, 2).float() / shape.head_size
    angles = torch.outer(torch.arange(shape.context).float(), 10000.0**-channels)
    return torch.cat([angles, angles], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels by the angle of its position."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def load(path: Path, context: int | None = None) -> Llama:
    """Read a checkpoint of a run (`.pt`) or a transformers folder (Llama, tied), in float32.

    `context=None` takes the checkpoint's own.
    """
    if path.suffix == ".pt":
        with torch.serialization.safe_globals([Shape]):
            saved = torch.load(path, weights_only=True, map_location="cpu")
        shape = saved["shape"] if context is None else replace(saved["shape"], context=context)
        return from_state(shape, saved["optimiser"]["weights"])
    from transformers import LlamaForCausalLM

    twin = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = twin.config
    rope = config.rope_parameters
    ours = (True, 1e-5, config.num_attention_heads, 10000.0, "default")
    theirs = (
        config.tie_word_embeddings,
        config.rms_norm_eps,
        config.num_key_value_heads,
        rope["rope_theta"],
        rope["rope_type"],
    )
    if theirs != ours:
        raise SystemExit(
            f"{path} is a Llama that training.model does not build: (tied, epsilon, key heads, "
            f"rotary base, rotary kind) are {theirs}, not {ours}; start from another checkpoint"
        )
    shape = Shape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        context=context or config.max_position_embeddings,
    )
    return from_state(shape, twin.state_dict())


def from_state(shape: Shape, state: dict[str, Tensor]) -> Llama:
    """A model of this shape with these weights; a tied `lm_head` is ignored."""
    model = Llama(shape)
    model.load_state_dict({k: v for k, v in state.items() if not k.startswith("lm_head")})
    return model


def to_transformers(model: Llama, tokenizer_specials: dict[str, int] | None = None):
    """The same model as a `LlamaForCausalLM` in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = model.shape
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        **(tokenizer_specials or {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}),
    )
    twin = LlamaForCausalLM(config)
    state = {k: v.detach().float() for k, v in model.state_dict().items()}
    twin.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    return twin.eval()
