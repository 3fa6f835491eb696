"""Laws to probabilities, residuals and draws, in plain PyTorch: the specification.

Computed in float32 whatever the model's dtype, in float64 when the logits are float64 (tests).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.row_params import SamplingRows
from outrider.types import Laws

# Top-k, top-p and min-p as one threshold a row, by sorting.


def floors(logits_BRV: Tensor, sampling: SamplingRows) -> Tensor:
    """Top-k, top-p and min-p as the smallest logit that stays in, float32 [B, R]; ties stay in.

    Some filter must be in use.
    """
    logits = logits_BRV.float()
    floor = logits.new_full(logits.shape[:2], -torch.inf)
    if sampling.most_top_k or sampling.any_top_p:
        floor = _nucleus(logits, sampling)
    return least(logits, floor, sampling)


def least(logits_BRV: Tensor, floor_BR: Tensor, sampling: SamplingRows) -> Tensor:
    """The floors raised to min-p's where that is in use."""
    if not sampling.any_min_p:
        return floor_BR
    low = sampling.min_p_B.log() / unscaled(sampling)
    return torch.maximum(floor_BR, logits_BRV.amax(-1) + low[:, None])


def unscaled(sampling: SamplingRows) -> Tensor:
    """Inverse temperatures [B], 1 in greedy rows."""
    inverse = sampling.inverse_temperature_B
    return inverse if sampling.greedy == "none" else torch.where(torch.isinf(inverse), 1.0, inverse)


def partial(sampling: SamplingRows, vocab: int) -> bool:
    """Whether a few of the largest logits tell every floor, so that no row is sorted whole."""
    limited = sampling.all_top_k or not sampling.any_top_p
    return 0 < sampling.most_top_k < vocab and limited


def _nucleus(logits: Tensor, sampling: SamplingRows) -> Tensor:
    """Floors of top-k and top-p."""
    vocab = logits.shape[-1]
    few = partial(sampling, vocab)
    values = logits.topk(min(sampling.most_top_k, vocab) if few else vocab, -1).values  # descending
    floor = logits.new_full(logits.shape[:2], -torch.inf)
    last = (sampling.top_k_B.clamp(1, values.shape[-1]) - 1)[:, None, None]
    last = last.expand(-1, values.shape[1], 1)
    if sampling.most_top_k:
        kth = values.gather(2, last)[..., 0]
        floor = torch.where(sampling.top_k_B[:, None] > 0, kth, floor)
    if not sampling.any_top_p:
        return floor
    weights = values * unscaled(sampling)[:, None, None]
    shares = weights.masked_fill(values < floor[..., None], -torch.inf).softmax(-1)
    if few:  # ties at the top-k floor stay in, those beyond the few as well
        same = floor[..., None]
        missing = (logits == same).sum(-1) - (values == same).sum(-1)
        shares = shares / (1 + missing[..., None] * shares.gather(2, last))
    before = shares.cumsum(-1) - shares
    limit = sampling.top_p_B[:, None, None]
    inside = (before < limit) | (limit >= 1)
    inside[..., 0] = True
    nucleus = torch.where(inside, values, torch.inf).amin(-1)
    return torch.where(limit[..., 0] < 1, torch.maximum(floor, nucleus), floor)


EMPTY = 1e-7  #: a residual with less mass than this is a rounding accident; fall back to the target


def _dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def select(laws: Laws, rows_BR: Tensor) -> Laws:
    """The laws at rows `rows_BR` [B or 1, R'] of each batch row."""
    batch, _, vocab = laws.logits_BRV.shape
    if rows_BR.shape[0] == 1:  # shared topology: one cheap copy of whole rows
        pick = rows_BR[0]
        return laws._replace(
            logits_BRV=laws.logits_BRV.index_select(1, pick),
            floor_BR=None if laws.floor_BR is None else laws.floor_BR.index_select(1, pick),
            lse_BR=None if laws.lse_BR is None else laws.lse_BR.index_select(1, pick),
        )
    index = rows_BR.expand(batch, -1)
    return laws._replace(
        logits_BRV=laws.logits_BRV.gather(1, index[..., None].expand(-1, -1, vocab)),
        floor_BR=None if laws.floor_BR is None else laws.floor_BR.gather(1, index),
        lse_BR=None if laws.lse_BR is None else laws.lse_BR.gather(1, index),
    )


def stack(laws: Sequence[Laws]) -> Laws:
    """The laws of several levels as one table, with what is known of all of them."""
    floors = [law.floor_BR for law in laws if law.floor_BR is not None]
    sums = [law.lse_BR for law in laws if law.lse_BR is not None]
    hosts = [law.host for law in laws if law.host is not None]
    return laws[0]._replace(
        logits_BRV=torch.cat([law.logits_BRV for law in laws], 1),
        floor_BR=torch.cat(floors, 1) if floors else None,
        lse_BR=torch.cat(sums, 1) if len(sums) == len(laws) else None,
        host=hosts[0].stack(hosts[1:]) if len(hosts) == len(laws) else None,
    )


def hot(laws: Laws) -> Tensor:
    """Which rows are greedy, [B, 1, 1]."""
    return torch.isinf(laws.inverse_temperature_B)[:, None, None]


def scaled(laws: Laws) -> Tensor:
    """Filtered logits times inverse temperature [B, R, V]; greedy rows keep temperature 1."""
    logits = laws.logits_BRV.to(_dtype(laws.logits_BRV))
    if laws.floor_BR is not None:
        floor = laws.floor_BR[..., None].to(logits.dtype)
        logits = logits.masked_fill(logits < floor, -torch.inf)
    inverse = laws.inverse_temperature_B
    if laws.greedy != "none":
        inverse = torch.where(torch.isinf(inverse), 1.0, inverse)
    return logits * inverse[:, None, None].to(logits.dtype)


def _one_hot(logits_BRV: Tensor, dtype: torch.dtype) -> Tensor:
    best = logits_BRV.argmax(-1, keepdim=True)  # first of equals
    return torch.zeros_like(logits_BRV, dtype=dtype).scatter_(-1, best, 1.0)


def probs(laws: Laws) -> Tensor:
    """Probabilities [B, R, V] of each law.

    >>> laws = Laws(torch.tensor([[[0.0, 0.0]]]), torch.tensor([1.0]), greedy="none")
    >>> probs(laws).tolist()
    [[[0.5, 0.5]]]
    """
    dtype = _dtype(laws.logits_BRV)
    if laws.greedy == "all":
        return _one_hot(laws.logits_BRV, dtype)
    soft = scaled(laws).softmax(-1)
    if laws.greedy == "none":
        return soft
    hot = torch.isinf(laws.inverse_temperature_B)[:, None, None]
    return torch.where(hot, _one_hot(laws.logits_BRV, dtype), soft)


def residual(law_BV: Tensor, guess_BV: Tensor) -> Tensor:
    """norm((law - guess)+), the law after a rejected draw from `guess`; `law` itself if empty.

    Works on any leading dimensions. In exact arithmetic the empty case has probability 0.
    """
    rest = (law_BV - guess_BV).clamp_(min=0)
    total = rest.sum(-1, keepdim=True)
    empty = 0.0 if law_BV.dtype is torch.float64 else EMPTY
    return torch.where(total > empty, rest / total, law_BV)


def draw(law_V: Tensor, race_V: Tensor) -> Tensor:
    """One index per leading dimension in proportion to `law`, by an exponential race."""
    return (law_V / race_V.to(law_V.dtype)).argmax(-1)
