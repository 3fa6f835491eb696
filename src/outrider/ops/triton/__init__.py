"""Triton backend: exact verification from logits, without host reads, temporaries or sorting.

Kernels read logits in their own dtype, take temperature as an inverse and filters as a floor, and
draw the reference's words for the reference's keys. Block sizes follow a rule, never a search, so
the same call is the same launch. On CPU tensors they run only in Triton's interpreter, for tests.
"""

import os

import torch
import triton
from torch import Tensor

from outrider.ops import Backend, Operation
from outrider.ops.triton import (
    block,
    chain,
    commit_tokens,
    floors,
    match,
    sample,
    traversal,
    tree,
)
from outrider.types import Draft, Laws, Scores

_MOST_ROWS = 65_535
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _unsupported_reason(device: torch.device) -> str | None:
    if device.type == "cuda" and not _INTERPRETED:
        return None
    if device.type == "cpu" and _INTERPRETED:
        return None
    return f"Triton {triton.__version__} needs CUDA tensors; got {device.type}"


def _declines(*inputs: object) -> str | None:
    for each in inputs:
        laws = each.laws if isinstance(each, Scores) else each
        logits = laws.logits_BRV if isinstance(laws, Laws) else laws
        if isinstance(each, Draft) and each.draws_BNK.shape[2] == 0:
            return "the draft has no draw table"
        if not isinstance(logits, Tensor):
            continue
        if logits.dtype is torch.float64:
            return "kernels compute in float32; got float64 logits"
        if logits.shape[0] > _MOST_ROWS:
            return f"a grid has at most {_MOST_ROWS} rows; split the batch"
    return None


_OPS: dict[str, Operation] = {
    "verify:chain": chain.verify,
    "verify:block": block.verify,
    "verify:match": match.verify,
    "verify:tree": tree.verify,
    "verify:traversal": traversal.verify,
    "sample": sample.sample,
    "several": sample.several,
    "floors": floors.floors,
    "commit_tokens": commit_tokens.commit_tokens,
}
BACKEND = Backend("triton", _OPS, _unsupported_reason, dict.fromkeys(_OPS, _declines))
