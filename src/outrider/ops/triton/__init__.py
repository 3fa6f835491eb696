"""Triton backend: exact verification from logits, without host reads, temporaries or sorting.

Kernels read logits in their own dtype, take temperature as an inverse and filters as a floor, and
draw the reference's words for the reference's keys. Block sizes follow a rule, never a search, so
the same call is the same launch. On CPU tensors they run only in Triton's interpreter, for tests.
"""

import os

import torch
import triton

from outrider.ops.backend import Backend
from outrider.ops.triton.block import block
from outrider.ops.triton.chain import chain
from outrider.ops.triton.floors import floors
from outrider.ops.triton.match import match
from outrider.ops.triton.sample import sample
from outrider.ops.triton.traversal import traversal
from outrider.ops.triton.tree import tree
from outrider.types import Draft, Kind, Scores

_MOST_ROWS = 65_535
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _unfit(device: torch.device) -> str | None:
    if device.type == "cuda" and not _INTERPRETED:
        return None
    if device.type == "cpu" and _INTERPRETED:
        return None
    return f"Triton {triton.__version__} needs CUDA tensors; got {device.type}"


def _declines(op: str, draft: Draft, scores: Scores) -> str | None:
    if scores.laws.logits_BRV.dtype is torch.float64:
        return "kernels compute in float32; got float64 logits"
    if scores.laws.logits_BRV.shape[0] > _MOST_ROWS:
        return f"a grid has at most {_MOST_ROWS} rows; split the batch"
    if draft.draws_BNK.shape[2] == 0:
        return "the draft has no draw table"
    if op != "match" and Kind.COUPLED in draft.kinds:
        return "coupled children are judged by a matching rule"
    if op in ("chain", "block") and not draft.tree.is_chain:
        return "the draft branches"
    return None


BACKEND = Backend(
    "triton",
    {"chain": chain, "block": block, "match": match, "tree": tree, "traversal": traversal},
    sample,
    _unfit,
    _declines,
    floors,
)
