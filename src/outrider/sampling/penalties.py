"""Biases and penalties: what is added to the logits of tokens that were or were not said."""

import torch
from torch import Tensor

from outrider.row_params import Shaping
from outrider.sampling.prefixes import NodePrefixes


def penalised(logits_BRV: Tensor, shaping: Shaping, prefixes: NodePrefixes) -> Tensor:
    """Biases, then the repetition penalty, then frequency and presence penalties."""
    logits, vocab = logits_BRV, logits_BRV.shape[-1]
    if shaping.bias_BV is not None:
        logits = logits + shaping.bias_BV[:, None]
    if shaping.repetition_B is not None:
        factor = shaping.repetition_B[:, None, None]
        less = torch.where(logits < 0, logits * factor, logits / factor)
        logits = torch.where(prefixes.counts(vocab) > 0, less, logits)
    if shaping.frequency_B is not None or shaping.presence_B is not None:
        times = prefixes.counts(vocab, made_only=True)
        if shaping.frequency_B is not None:
            logits = logits - shaping.frequency_B[:, None, None] * times
        if shaping.presence_B is not None:
            logits = logits - shaping.presence_B[:, None, None] * (times > 0)
    return logits
