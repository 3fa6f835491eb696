"""Text the model writes itself: prompts from the corpus, continued in one batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from training.model import Llama, to_transformers


def prompts_from(tokens: np.ndarray, count: int, length: int, seed: int) -> Tensor:
    """`[count, length]` pieces at random places."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length, size=count)
    rows = np.stack([tokens[s : s + length] for s in starts]).astype(np.int64)
    return torch.from_numpy(rows)


@torch.no_grad()
def continue_text(model: Llama, prompts: Tensor, count: int, temperature: float) -> Tensor:
    """`[rows, length + count]`: the prompts and `count` tokens drawn after each."""
    like = next(model.parameters())
    twin = to_transformers(model).to(device=like.device, dtype=like.dtype)
    how = {"do_sample": False}
    if temperature > 0:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    prompts = prompts.to(like.device)
    out = twin.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=count,
        min_new_tokens=count,
        **how,
    )
    return out
