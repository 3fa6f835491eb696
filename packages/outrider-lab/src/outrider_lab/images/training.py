"""The two decoders: a target that reads 65 tokens with three layers, a draft with one."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from outrider.cli.console import Show
from outrider.models.calibrate import cache_dir
from outrider_lab.images.digits import NULL, PIXELS, VOCAB

BATCH, FORGETTING = 32, 0.15  #: share of pictures whose class is not told, for guidance


@dataclass(frozen=True)
class DecoderSize:
    """A small Llama, and how long it is trained."""

    name: str
    hidden: int
    layers: int
    steps: int


TARGET, DRAFT = DecoderSize("target", 96, 3, 700), DecoderSize("draft", 48, 1, 900)


def decoder(size: DecoderSize, texts: Tensor, show: Show) -> Any:
    """The trained decoder: from the cache, or trained now and kept there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = place(size)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2 * PIXELS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).train()
    if path.is_file():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=size.steps)
    choice = torch.Generator().manual_seed(0)
    for step in range(size.steps):
        batch = texts[torch.randint(len(texts), (BATCH,), generator=choice, device="cpu")].clone()
        forgotten = torch.rand(BATCH, generator=choice, device="cpu") < FORGETTING
        batch[forgotten, 0] = NULL
        logits = model(batch[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        show(f"training the {size.name}, {loss.item():.2f} nats a pixel", step + 1, size.steps)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}")  # a file is whole or not there
    torch.save(model.state_dict(), half)
    half.replace(path)
    return model.eval()


def place(size: DecoderSize) -> Path:
    """Where this decoder is kept."""
    made = f"{size.name}-{size.hidden}-{size.layers}-{size.steps}"
    return cache_dir() / "digits" / f"{made}.pt"
