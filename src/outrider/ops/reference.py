"""Laws to probabilities, residuals and draws, in plain PyTorch: the specification.

Computed in float32 whatever the model's dtype, in float64 when the logits are float64 (tests).
"""

import torch
from torch import Tensor

from outrider.noise import exponentials
from outrider.ops.backend import sampler
from outrider.types import Draft, Laws

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


def scaled(laws: Laws) -> Tensor:
    """Filtered logits times inverse temperature [B, R, V]; greedy rows keep temperature 1."""
    logits = laws.logits_BRV.to(_dtype(laws.logits_BRV))
    if laws.floor_BR is not None:
        floor = laws.floor_BR[..., None].to(logits.dtype)
        logits = logits.masked_fill(logits < floor, -torch.inf)
    inverse = laws.inverse_temperature_B
    if laws.greedy == "some":
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


def log_probs(laws: Laws) -> Tensor:
    """Log-probabilities [B, R, V]; -inf outside the support."""
    if laws.greedy != "none":
        return probs(laws).log()
    return scaled(laws).log_softmax(-1)


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


def sample(laws: Laws, keys_BR: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each law [B, R] and its log-sum-exp, kept for the verification.

    `keys_BR` names the streams of `outrider.noise` that the draws come from. The backend in charge
    may draw by another algorithm from the same law.
    """
    fast = sampler(laws.logits_BRV.device)
    if fast is not None:
        return fast(laws, keys_BR)
    tokens = draw(probs(laws), exponentials(keys_BR, laws.logits_BRV.shape[-1]))
    sums = scaled(laws).logsumexp(-1)
    hot = torch.isinf(laws.inverse_temperature_B)[:, None]
    return tokens, torch.where(hot, torch.zeros_like(sums), sums)


def follow(draft: Draft, chosen_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the root to the child that carries each node's chosen token, while there is one.

    Returns the path [B, D] (-1 padded), its length [B] and the node where the walk stands [B].
    """
    batch = draft.tokens_BN.shape[0]
    depth = draft.tree.max_depth
    device = draft.tokens_BN.device
    if depth == 0:
        none = torch.zeros(batch, dtype=torch.int64, device=device)
        return none.new_zeros(batch, 0), none, none
    draws = draft.draws_BNK.expand(batch, -1, -1)
    if draft.tree.is_chain:
        kid = draws[:, :depth, 0]
        hit = (kid >= 0) & (draft.tokens_BN[:, 1 : depth + 1] == chosen_BN[:, :depth])
        going = hit.long().cumprod(1)
        count = going.sum(1)
        return torch.where(going > 0, kid, -1), count, count
    rows = torch.arange(batch, device=device)
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    path = []
    for _ in range(depth):
        kids = draws[rows, node]
        same = draft.tokens_BN.gather(1, kids.clamp(min=0)) == chosen_BN[rows, node][:, None]
        hit = (same & (kids >= 0)).to(torch.int64)
        alive = alive & (hit.amax(1) > 0)
        there = kids.gather(1, hit.argmax(1, keepdim=True))[:, 0]
        path.append(torch.where(alive, there, -1))
        node = torch.where(alive, there, node)
    path_BD = torch.stack(path, 1)
    return path_BD, (path_BD >= 0).sum(1), node
