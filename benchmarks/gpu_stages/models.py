"""Pairs made on the card: real shapes, random weights, agreement constructed by temperature.

Logits of random weights are small, so that at a high temperature both laws are nearly flat and a
draft agrees often. Its acceptance (`alpha`) is measured and stands beside every figure; it says
nothing about trained pairs. The cost of a step does not depend on it.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_stages.card import Card
from outrider_lab.papers.wagner_pairs import (
    WagnerPair,
    WagnerPrompt,
    continued,
    shipped_pair,
)

TEMPERATURE = 2.0


class Size(NamedTuple):
    """A Llama's shape."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int


SIZES = {
    "7B": Size(4096, 11008, 32, 32, 32), "1B": Size(2048, 8192, 16, 32, 8),
    "115M": Size(768, 2048, 9, 12, 12), "70M": Size(512, 2048, 8, 8, 8),
}  # fmt: skip
TINY = Size(32, 48, 2, 2, 2)
PAIRS = {"1B + 70M": ("1B", "70M"), "7B + 115M": ("7B", "115M")}


def llama(card: Card, name: str, vocab: int, context: int, seed: int) -> LlamaForCausalLM:
    """A model with random weights, made where it will run and in the dtype it will run in."""
    size = card.pick(SIZES[name], TINY)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=size.hidden, intermediate_size=size.inner,
        num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, max_position_embeddings=context,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(card.dtype)  # not .to(dtype): rotary tables stay in float32
    try:
        with torch.device(card.device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return model


def random_pair(card: Card, name: str, vocab: int, context: int) -> WagnerPair:
    """A pair of `PAIRS`, without prompts."""
    target, draft = PAIRS[name]
    return WagnerPair(
        f"{name}, random weights, T = {TEMPERATURE:g}", llama(card, target, vocab, context, 0),
        llama(card, draft, vocab, context, 1), [], lambda ids: "",
    )  # fmt: skip


def random_prompts(card: Card, vocab: int, length: int) -> list[WagnerPrompt]:
    """32 prompts of random tokens."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocab, (32, length), generator=rng).tolist()
    return [continued(row, "", str(card.device)) for row in ids]


def packaged(card: Card) -> WagnerPair:
    """The shipped pair in the card's dtype, 32 held-out prompts."""
    return shipped_pair(card.pick(32, 2), card.device, dtype=str(card.dtype).removeprefix("torch."))


class Pairs:
    """The pair in use; another one takes its place, so that the memory is freed first."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self._key: tuple[str, int, int] | None = None
        self._pair: WagnerPair | None = None

    def get(self, name: str, vocab: int = 0, context: int = 0, prompt: int = 0) -> WagnerPair:
        """A pair by name: of `PAIRS`, or "shipped". Zeros take the usual sizes."""
        card = self.card
        vocab, context = vocab or card.pick(32_000, 64), context or card.pick(2048, 256)
        if self._pair is None or self._key != (name, vocab, context):
            self._pair = None
            card.free()
            make = packaged(card) if name == "shipped" else random_pair(card, name, vocab, context)
            self._pair, self._key = make, (name, vocab, context)
        if name == "shipped":
            return self._pair
        prompts = random_prompts(card, vocab, prompt or card.pick(128, 8))
        return replace(self._pair, prompts=prompts)


def weight_bytes(model: Any) -> int:
    """Bytes that a forward has to read at least."""
    return sum(p.numel() * p.element_size() for p in model.parameters())
