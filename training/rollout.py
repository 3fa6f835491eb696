"""Text the model writes itself: prompts from the corpus, continued many at a time."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.model import Attention, Layer, Llama, rotate


def prompts_from(tokens: np.ndarray, count: int, length: int, seed: int) -> Tensor:
    """`[count, length]` pieces at random places."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length, size=count)
    rows = np.stack([tokens[s : s + length] for s in starts]).astype(np.int64)
    return torch.from_numpy(rows)


@torch.no_grad()
def continue_text(
    model: Llama, prompts: Tensor, count: int, temperature: float, seed: int = 0
) -> Tensor:
    """`[rows, length + count]`: the prompts and `count` tokens drawn after each.

    Runs on the model's own weights with keys and values written into place, several times
    faster than a growing cache when many rows are written at once. End-of-text is a token like
    any other: after it the model begins another document.
    """
    device = model.cos.device
    rng = torch.Generator(device).manual_seed(seed)
    rows, length = prompts.shape
    if length + count > model.shape.context:
        raise ValueError(
            f"{length} + {count} tokens exceed the context of {model.shape.context}; "
            "shorten the text or train with a longer --context"
        )
    texts = torch.zeros(rows, length + count, dtype=torch.int64, device=device)
    texts[:, :length] = prompts
    memory = Memory(model, rows, length + count)
    logits = memory.extend(texts[:, :length])
    for place in range(length, length + count):
        texts[:, place] = draw(logits, temperature, rng)
        if place + 1 < length + count:
            logits = memory.extend(texts[:, place : place + 1])
    return texts


def draw(logits: Tensor, temperature: float, rng: torch.Generator) -> Tensor:
    """One token for each row of `[rows, vocabulary]`; temperature 0 takes the likeliest."""
    if temperature == 0:
        return logits.argmax(-1)
    probs = F.softmax(logits.float() / temperature, -1)
    return torch.multinomial(probs, 1, generator=rng)[:, 0]


class Memory:
    """Keys and values of all layers for rows of equal length."""

    def __init__(self, model: Llama, rows: int, length: int) -> None:
        shape = model.shape
        size = (shape.layers, 2, rows, shape.heads, length, shape.head_size)
        like = model.model.norm.weight
        self.model, self.used = model, 0
        self.cache = torch.zeros(size, dtype=like.dtype, device=like.device)

    def extend(self, tokens: Tensor) -> Tensor:
        """Take in `[rows, new]` tokens; the logits after the last of them, `[rows, vocabulary]`."""
        first, end = self.used, self.used + tokens.shape[1]
        body = self.model.model
        x = body.embed_tokens(tokens)
        cos, sin = (t[first:end].to(x.dtype) for t in (self.model.cos, self.model.sin))
        for layer, cache in zip(body.layers, self.cache, strict=True):
            x = x + self._attend(layer, cache, x, cos, sin)
            x = x + layer.mlp.forward(layer.post_attention_layernorm(x))
        self.used = end
        return F.linear(body.norm(x[:, -1]), body.embed_tokens.weight)

    def _attend(self, layer: Layer, cache: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        own: Attention = layer.self_attn
        rows, new, width = x.shape
        first, end = self.used, self.used + new
        split = (rows, new, own.heads, own.head_size)
        normed = layer.input_layernorm(x)
        query = rotate(own.q_proj(normed).view(split).transpose(1, 2), cos, sin)
        cache[0, :, :, first:end] = rotate(own.k_proj(normed).view(split).transpose(1, 2), cos, sin)
        cache[1, :, :, first:end] = own.v_proj(normed).view(split).transpose(1, 2)
        # A prompt comes first and all at once; after it every query sees all that is stored.
        seen = cache[:, :, :, :end]
        mixed = F.scaled_dot_product_attention(query, seen[0], seen[1], is_causal=new > 1)
        return own.o_proj(mixed.transpose(1, 2).reshape(rows, new, width))
