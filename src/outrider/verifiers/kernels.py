"""Which kernel of `outrider.ops` judges for which rule, and how the draft is laid out for it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from outrider import ops
from outrider.tree import alike
from outrider.types import Draft, DrawKind, Draws, Scores, Verdict, Verifier
from outrider.verifiers import chain
from outrider.verifiers.block import Block
from outrider.verifiers.hub import Hub
from outrider.verifiers.kseq import KSeq
from outrider.verifiers.match import Match
from outrider.verifiers.narrowed import Narrowed
from outrider.verifiers.rejection import Rejection
from outrider.verifiers.siblings import drawn_first
from outrider.verifiers.traversal import Traversal


class Call(NamedTuple):
    """A kernel and the draft that it is to judge."""

    kernel: ops.Judge
    draft: Draft
    optional: bool = False  #: it takes some drafts only: naming its backend does not insist on it


def _rejection(draft: Draft) -> Call:
    return Call("chain" if chain.is_plain(draft) else "tree", draft)


def _whole(kernel: ops.Judge, draft: Draft) -> Call:
    """A rule that judges paths as a whole; below the bare root there is none.

    There a token is drawn as every kernel draws at a leaf: a row that drafts nothing writes the
    same among rows that draft as alone.
    """
    return Call(kernel if draft.tree.max_depth else "chain", draft)


#: One line for each rule that has kernels. Other rules run as they are written.
_KERNELS: Mapping[type, Callable[[Draft], Call | None]] = {
    Match: lambda draft: Call("match", draft),
    Rejection: _rejection,
    Hub: lambda draft: _rejection(drawn_first(draft)),
    Block: lambda draft: _whole("block", draft),
    Traversal: lambda draft: _whole("block" if chain.is_plain(draft) else "traversal", draft),
    KSeq: lambda draft: (
        _rejection(draft) if chain.is_plain(draft) else Call("kseq", draft, optional=True)
    ),
}


def judge(rule: Verifier, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
    """The rule's verdict: from its kernel where a backend has one, else from its own formula."""
    if isinstance(rule, Narrowed):
        rule = rule.rule
    if draft.fan and DrawKind.COUPLED not in rule.kinds and scores.laws.greedy != "all":
        draft = alike(draft, draft.fan)
    layout = _KERNELS.get(type(rule))
    call = None if layout is None else layout(draft)
    if call is not None:
        verdict = ops.fused(call.kernel, call.draft, scores, draws, optional=call.optional)
        if verdict is not None:
            return verdict
    return rule(draft, scores, draws)
