"""CPU backend: one lazy pass per law that is looked at, in NumPy, without V-sized copies per node.

A PyTorch operation on a few numbers costs three to five microseconds, NumPy's well below one, and a
walk that stops at the first refusal never touches the laws behind it. Paths and counts equal the
reference's for the same keys. The next token is drawn by inverse transform from one 53-bit uniform
instead of a race over the vocabulary, as are a draft's children: the same law, another draw.
"""

from functools import cache

import torch

from outrider.ops import Backend
from outrider.ops.cpu import (
    beam,
    block,
    commit_tokens,
    keys,
    kseq,
    law_slices,
    match,
    rejection_walk,
    sample,
    top_tokens,
    traversal,
)


@cache
def _unsupported_reason(device: torch.device) -> str | None:
    return None if device.type == "cpu" else f"it needs CPU tensors; got {device.type}"


BACKEND = Backend(
    "cpu",
    {
        "verify:chain": rejection_walk.verify_chain,
        "verify:block": block.verify,
        "verify:match": match.verify,
        "verify:tree": rejection_walk.verify_tree,
        "verify:traversal": traversal.verify,
        "verify:kseq": kseq.verify,
        "streams": keys.split,
        "sample": sample.sample,
        "several": sample.several,
        "independent": sample.independent,
        "survivors": beam.survivors,
        "floors": top_tokens.floors,
        "top_tokens": top_tokens.top_tokens,
        "cache_top_tokens": top_tokens.cache_top_tokens,
        "commit_tokens": commit_tokens.commit_tokens,
        "assisted": law_slices.assisted,
    },
    _unsupported_reason,
    {"verify:kseq": kseq.declines},
)
