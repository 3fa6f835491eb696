"""CPU backend: one lazy pass per law that is looked at, in NumPy, without V-sized copies per node.

A PyTorch operation on a few numbers costs three to five microseconds, NumPy's well below one, and a
walk that stops at the first refusal never touches the laws behind it. Paths and counts equal the
reference's for the same keys. The next token is drawn by inverse transform from one 53-bit uniform
instead of a race over the vocabulary, as are a draft's children: the same law, another draw.
"""

import torch

from outrider.ops.backend import Backend
from outrider.ops.cpu.block import block
from outrider.ops.cpu.chain import chain
from outrider.ops.cpu.kseq import fits, kseq
from outrider.ops.cpu.match import match
from outrider.ops.cpu.sample import sample
from outrider.ops.cpu.traversal import traversal
from outrider.ops.cpu.tree import tree
from outrider.types import Draft, Kind, Scores


def _unfit(device: torch.device) -> str | None:
    return None if device.type == "cpu" else f"it needs CPU tensors; got {device.type}"


def _declines(op: str, draft: Draft, scores: Scores) -> str | None:
    if op != "match" and Kind.COUPLED in draft.kinds:
        return "coupled children are judged by a matching rule"
    if op in ("chain", "block") and not draft.tree.is_chain:
        return "the draft branches"
    if op == "kseq" and not fits(draft):
        return "a node has placed and drawn children, or draws of several laws"
    return None


BACKEND = Backend(
    "cpu",
    {
        "chain": chain,
        "block": block,
        "match": match,
        "tree": tree,
        "traversal": traversal,
        "kseq": kseq,
    },
    sample,
    _unfit,
    _declines,
)
