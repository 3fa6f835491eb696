"""Which kernel of `outrider.ops` verifies for which rule, and how the draft is laid out for it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from outrider import ops
from outrider.tree import alike
from outrider.types import Draft, DrawKind, Draws, Scores, Verdict, Verifier
from outrider.verifiers import chain
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.kseq import KSeq
from outrider.verifiers.match import Match
from outrider.verifiers.rejection import HubVerifier, Rejection
from outrider.verifiers.sibling_draws import drawn_first
from outrider.verifiers.traversal import Traversal
from outrider.verifiers.tree_walk import AliasedVerifier


class KernelCall(NamedTuple):
    """A kernel and the draft that it is to verify."""

    kernel: ops.VerifyKernel
    draft: Draft
    optional: bool = False  #: it takes some drafts only: naming its backend does not insist on it


def _rejection(draft: Draft) -> KernelCall:
    return KernelCall("chain" if chain.is_plain(draft) else "tree", draft)


def _whole(kernel: ops.VerifyKernel, draft: Draft) -> KernelCall:
    """A rule that verifies paths as a whole; below the bare root there is none.

    There a token is drawn as every kernel draws at a leaf: a row that drafts nothing writes the
    same among rows that draft as alone.
    """
    return KernelCall(kernel if draft.tree.max_depth else "chain", draft)


#: One line for each rule that has kernels. Other rules run as they are written.
_KERNELS: Mapping[type, Callable[[Draft], KernelCall | None]] = {
    Match: partial(KernelCall, "match"),
    Rejection: _rejection,
    HubVerifier: lambda draft: _rejection(drawn_first(draft)),
    BlockVerifier: lambda draft: _whole("block", draft),
    Traversal: lambda draft: _whole("block" if chain.is_plain(draft) else "traversal", draft),
    KSeq: lambda draft: (
        _rejection(draft) if chain.is_plain(draft) else KernelCall("kseq", draft, optional=True)
    ),
}


def run_kernel(rule: Verifier, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
    """Which drafted tokens are accepted: by the rule's kernel where a backend has one (`ops/cpu`,
    `ops/triton`), else by its own formula."""
    if isinstance(rule, AliasedVerifier):
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
