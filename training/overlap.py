"""How far two laws agree: alpha = sum of min(target, draft), the chance a drawn token is kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def law(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities at a temperature; 0 puts everything on the likeliest token."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return F.softmax(logits.float() / temperature, -1)


def overlap(target_logits: Tensor, draft_logits: Tensor, temperature: float) -> Tensor:
    """Alpha at every position (at temperature 0: whether both choose the same token)."""
    return torch.minimum(law(target_logits, temperature), law(draft_logits, temperature)).sum(-1)


def forward_kl(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Cross-entropy of the draft under the target's law: KL up to a constant of the target.

    The right loss far from the goal: its slope never vanishes where the draft is wrong.
    """
    target_probs = F.softmax(target_logits.float(), -1)
    return -(target_probs * F.log_softmax(draft_logits.float(), -1)).sum(-1).mean()


def overlap_loss(target_logits: Tensor, draft_logits: Tensor, temperatures: list[float]) -> Tensor:
    """Mean of `-log alpha` over positions and temperatures: what decoding is paid for.

    The logarithm weighs positions of low agreement more, where a draft is cut short.
    """
    losses = [-overlap(target_logits, draft_logits, t).log().mean() for t in temperatures]
    return torch.stack(losses).mean()
