# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""The sigmoid approximation on our own skeleton: what it would cost if it were written well.

It needs no log-sum-exp, so the accept tests read two entries a token and the residual two rows a
request, in one launch. Lossy: with the paper's alpha and beta nearly every draft is accepted.
"""

import torch

from outrider.ops.baselines.kernels import sigmoid_one
from outrider.ops.triton.following import race_of
from outrider.ops.triton.launch import block_size, next_power, programs, race_size
from outrider.ops.triton.side import side_of
from outrider.ops.triton.tables import keys_of, tables_of
from outrider.types import Draft, Draws, Scores, Verdict

EXACT = False


def ideal_sigmoid(
    draft: Draft, scores: Scores, draws: Draws, *, alpha: float = -1e4, beta: float = 1e4
) -> Verdict:
    """Path, count and next token under the sigmoid rule; a chain of drawn children only."""
    laws = scores.laws
    assert draft.laws is not None
    assert draft.tree.is_chain
    batch, _, vocab = laws.logits_BRV.shape
    device = laws.logits_BRV.device
    depth = draft.tree.max_depth
    target, target_floor = side_of(laws)
    drafted, draft_floor = side_of(draft.laws, vocab)
    keys, uniforms, _ = keys_of(draws)
    block, warps = block_size(vocab, laws.logits_BRV.dtype, batch)
    block = race_size(block)
    slices = programs(vocab, block)
    path = torch.empty(batch, depth, dtype=torch.int64, device=device)
    count = torch.empty(batch, dtype=torch.int64, device=device)
    next_token = torch.empty(batch, dtype=torch.int64, device=device)
    sigmoid_one[slices, batch](
        target, drafted, tables_of(draft), keys, race_of(device, batch, slices), path, count,
        next_token, alpha, beta, depth, slices, BLOCK=block, NPROG_P2=next_power(slices),
        DEPTH_P2=next_power(max(depth, 1)), TARGET_FLOOR=target_floor, DRAFT_FLOOR=draft_floor,
        INJECTED=uniforms, num_warps=warps,
    )  # fmt: skip
    return Verdict(path, count, next_token)
