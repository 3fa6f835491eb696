"""Penalties, bans and processors of a request in a beam search: on log-probabilities, as
transformers applies them there, where sampling applies them to logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.laws import sampling, shaping
from outrider.laws.sampling import Sampling
from outrider.search.oracle import Shaper
from outrider.search.prefix import Prefix
from outrider.tree import chain
from outrider.types import Context, Inputs


def shaper(
    settings: Sampling,
    prompt: Sequence[int],
    stops: Sequence[int],
    vocab: int,
    device: torch.device | str,
    inputs: Inputs | None = None,
) -> Shaper | None:
    """What a request asks to be done to log-probabilities; None if it asks for nothing.

    `settings` are admitted (`shaping.admit`); temperature and filters are not looked at.
    """
    built = shaping.build([settings], [prompt], [stops], vocab, device)
    if built is None:
        return None
    plain, root = sampling.rows([settings], device), chain(0, device)

    def shape(texts: Sequence[Prefix], logs_WV: Tensor) -> Tensor:
        rows = [0] * len(texts)
        tokens_BL = torch.tensor([text.tokens() for text in texts], device=logs_WV.device)
        length = tokens_BL.shape[1]
        context = Context(
            tokens_BL,
            torch.full((len(texts),), length, device=logs_WV.device),
            length,
            plain.take(rows)._replace(shaping=None),
            None if inputs is None else inputs.take(rows),
        )
        pending_B1 = tokens_BL[:, -1:]
        many = built.take(rows)
        return shaping.shape(logs_WV[:, None], many, context, pending_B1, root)[:, 0]

    return shape
