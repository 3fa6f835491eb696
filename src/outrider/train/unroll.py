"""A head run as it drafts, for all places of a text at once: EAGLE-3's training-time test.

Round 0 reads the target's states; round r reads those that round r - 1 made at the same places. An
entry of round r sees the entries of round 0 up to its own place, which stand for committed text,
and at its own place those of the rounds before it: the tokens drafted so far.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from outrider.models.heads.eagle3 import Eagle3, HeadStates


def unroll(
    head: Eagle3, tokens_BT: Tensor, states: Sequence[Tensor], rounds: int
) -> list[HeadStates]:
    """What the head makes of every place [B, T - 1] in each round.

    `states` are the target's [B, T, E], one for each tap. At place t round r has read token
    t + 1 + r, so its law is of token t + 2 + r; places too near the end repeat the last token and
    mean nothing.
    """
    given_BQE = head.fuse([state[:, :-1] for state in states])
    places = given_BQE.shape[1]
    at = torch.arange(places, device=tokens_BT.device)
    causal, own = at[:, None] >= at, at[:, None] == at
    cache = DynamicCache()
    made = []
    for number in range(rounds):
        ahead = at + 1 + number
        sees = torch.cat([causal, *[own] * number], 1)
        mask = torch.zeros(sees.shape, dtype=given_BQE.dtype, device=sees.device)
        mask = mask.masked_fill(~sees, torch.finfo(given_BQE.dtype).min)[None, None]
        tokens = tokens_BT[:, ahead.clamp(max=places)]
        out = head(tokens, given_BQE, ahead[None], mask, cache)
        given_BQE = out.next_BQE
        made.append(out)
    return made
