"""Penalties, bans and processors of a request in a beam search: on log-probabilities, as
transformers applies them there, where sampling applies them to logits."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from outrider.engine.beam_search.prefix import Prefix
from outrider.engine.beam_search.scorer import Shaper
from outrider.row_params import SamplingRows, Shaping
from outrider.sampling import logits_processors, sampling_params
from outrider.sampling.sampling_params import SamplingParams
from outrider.tree import chain
from outrider.types import Context


def shaper(
    settings: SamplingParams,
    prompt: Sequence[int],
    stops: Sequence[int],
    vocab: int,
    device: torch.device | str,
    end: int,
    source: Sequence[int] = (),
) -> Shaper | None:
    """What a request asks to be done to log-probabilities; None if it asks for nothing.

    `settings` are admitted (`logits_processors.validate`), `end` is the length at which texts end,
    `source` the ids that an encoder has read. A temperature above 0 means beams that are drawn:
    temperature and filters act then, too.
    """
    built = logits_processors.build(
        [settings], [prompt], [stops], vocab, device, ends=[end], sources=[source]
    )
    drawn = settings.temperature > 0
    if built is None and not drawn:
        return None
    plain, root = sampling_params.rows([settings], device), chain(0, device)

    @lru_cache(maxsize=4)
    def rows(count: int) -> tuple[SamplingRows, Shaping | None]:
        """The settings of so many beams."""
        every = [0] * count
        return plain.take(every), None if built is None else built.take(every)

    def shape(texts: Sequence[Prefix], logs_WV: Tensor) -> Tensor:
        own, many = rows(len(texts))
        logs_W1V = logs_WV[:, None]
        if many is not None:
            tokens_BL = torch.tensor([text.tokens() for text in texts], device=logs_WV.device)
            length = tokens_BL.shape[1]
            context = Context(
                tokens_BL,
                torch.full((len(texts),), length, device=logs_WV.device),
                length,
                own,
            )
            logs_W1V = logits_processors.apply(logs_W1V, many, context, tokens_BL[:, -1:], root)
        if drawn:
            logs_W1V = _warped(logs_W1V, own, len(stops) + 1)
        return logs_W1V[:, 0]

    return shape


def _warped(logs_W1V: Tensor, rows: SamplingRows, least: int) -> Tensor:
    """At a temperature, without what filters leave out.

    The `least` best tokens stay in: a beam goes on whatever stop tokens it may end with.
    """
    laws = sampling_params.warp(logs_W1V, rows)
    warped = logs_W1V * laws.inverse_temperature_B[:, None, None]
    if laws.floor_BR is None:
        return warped
    best_W1K = logs_W1V.topk(min(least, logs_W1V.shape[-1]), -1)[0]
    floor_W11 = torch.minimum(laws.floor_BR[..., None], best_W1K[..., -1:])
    return warped.masked_fill(logs_W1V < floor_W11, -torch.inf)
