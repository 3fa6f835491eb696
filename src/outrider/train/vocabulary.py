"""Which tokens a draft proposes: those that the target finds likely most often (FR-Spec's idea)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.train.features import Features

LIKELY = 4  #: of the target's likeliest tokens, how many of each place are counted


def frequent(texts: Sequence[Features], vocab_size: int, most: int) -> Tensor:
    """The `most` tokens [K] in growing order; fewer if the texts know fewer."""
    counts = torch.zeros(vocab_size)
    for text in texts:
        likely = text.top_ids_NM[text.start - 1 :, :LIKELY].flatten().long()
        counts += torch.bincount(likely, minlength=vocab_size)
    known = int((counts > 0).sum())
    return counts.topk(min(most, known)).indices.sort().values
