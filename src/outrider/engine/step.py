"""One step, driven by hand or by the engine: begin, then propose, score, verify, commit.

    draft   = propose(drafter, batch)                # a tree of guesses below the pending token
    scores  = score(target, batch, draft)            # one call, one law per node
    verdict = verify(rule, batch, draft, scores)     # the longest path kept, and one more token
    batch, block = commit(target, drafter, batch, draft, scores, verdict)

Nothing here reads a device value: every verb runs on the meta device. `length_B` counts committed
tokens, the pending one included; the caches hold one entry less (and
`prompt_rest` less ahead of a first step); node 0 writes slot `length_B - 1`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from outrider import ops
from outrider.drafters.tree_drafting import bare
from outrider.engine.batch import Batch, begin as begin, rest_of_prompts
from outrider.errors import ConfigurationError
from outrider.models.prefill import inference, of_tree, width
from outrider.sampling.custom_processors import process_drafted
from outrider.sampling.logits_processors import apply
from outrider.tree import alike, numbers, offered, shallower
from outrider.types import (
    PLAIN,
    RUNNING,
    Context,
    Draft,
    Drafter,
    DraftShape,
    DrawKind,
    Draws,
    Ends,
    LanguageModel,
    Scores,
    StepTensors,
    Verdict,
    Verifier,
)
from outrider.verifiers import chain
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.kseq import KSeq
from outrider.verifiers.match import Match
from outrider.verifiers.rejection import HubVerifier, Rejection
from outrider.verifiers.sibling_draws import drawn_first
from outrider.verifiers.traversal import Traversal
from outrider.verifiers.tree_walk import AliasedVerifier

_KEY = attrgetter("key")


@inference
def propose(drafter: Drafter, batch: Batch, shape: DraftShape | None = None) -> Draft:
    """A tree of guesses below each row's pending token, in one of the drafter's shapes.

    None takes the usual one; `PLAIN` leaves the drafter alone. Rows that want less
    (`shape.most_B`) lose what lies deeper. Raises ConfigurationError for a shape that it does not
    declare.
    """
    wanted = drafter.shapes[0] if shape is None else shape
    if wanted.key == PLAIN.key and wanted.max_depth == 0:
        return bare(batch.context)
    keys = list(map(_KEY, drafter.shapes))
    if wanted.key not in keys:
        declared = ", ".join(map(str, keys))
        raise ConfigurationError(
            f"drafter {drafter.name!r} declares no shape with key {wanted.key!r}, only {declared}; "
            f"got {wanted}; ask for one of its `shapes`"
        )
    context = batch.context._replace(cache=batch.cache)
    if wanted.most_B is None:
        return drafter.propose(batch.memory, context, wanted)
    shaping = context.sampling.shaping
    if shaping is not None and shaping.processed:  # what is not drafted is no text for them
        shaping = process_drafted(shaping, wanted.most_B)
        context = context._replace(sampling=context.sampling._replace(shaping=shaping))
    draft = drafter.propose(batch.memory, context, wanted)
    return shallower(draft, wanted.most_B.to(draft.tokens_BN.device))


@inference
def score(
    target: LanguageModel, batch: Batch, draft: Draft, aux_layers: tuple[int, ...] = ()
) -> Scores:
    """The target's laws at every node, from one call. Siblings share a position, never a slot.

    The target's states at the aux layers come along, for a drafter that reads them.
    """
    tree, context = draft.tree, batch.context
    wide = width(target, context.bound, tree.nodes, batch.cache.capacity)
    if not context.prompt_rest:
        nodes = of_tree(draft.tokens_BN, tree, context.length_B - 1, wide)
        output = target.forward(batch.cache, nodes, aux_layers=aux_layers)
    else:
        assert tree.nodes == 1, "prompts are read ahead of a step that drafts"
        output = target.forward(batch.cache, rest_of_prompts(context, wide), last=1)
    logits, states = output.logits_BQV, output.hidden
    shaping = context.sampling.shaping
    if shaping is None:
        return Scores(ops.cache_top_tokens(ops.warp(logits, context.sampling)), states)
    alive = None
    if shaping.processed:  # processors see no node that the drafter left empty
        alive = offered(draft.draws_BNK).expand(logits.shape[0], -1)
    shaped = apply(logits, shaping, context, draft.tokens_BN, tree, alive_BR=alive)
    dead = None
    if shaping.masks:  # rules need a law everywhere; any will do where none may be emitted from
        dead = shaped.amax(-1) == -torch.inf
        shaped = shaped.masked_fill(dead[..., None], 0.0)
    laws = ops.cache_top_tokens(ops.warp(shaped, context.sampling))
    return Scores(laws, states, raw_BNV=logits, dead_BN=dead)


# Which kernel of `outrider.ops` verifies for which rule, and how the draft is laid out for it.


class RuleKernel(NamedTuple):
    """A kernel and the draft that it is to verify."""

    kernel: ops.VerifyKernel
    draft: Draft
    optional: bool = False  #: it takes some drafts only: naming its backend does not insist on it


def _rejection(draft: Draft) -> RuleKernel:
    return RuleKernel("chain" if chain.is_plain(draft) else "tree", draft)


def _whole(kernel: ops.VerifyKernel, draft: Draft) -> RuleKernel:
    """A rule that verifies paths as a whole; below the bare root there is none.

    There a token is drawn as every kernel draws at a leaf: a row that drafts nothing writes the
    same among rows that draft as alone.
    """
    return RuleKernel(kernel if draft.tree.max_depth else "chain", draft)


#: One line for each rule that has kernels. Other rules run as they are written.
_KERNELS: Mapping[type, Callable[[Draft], RuleKernel | None]] = {
    Match: partial(RuleKernel, "match"),
    Rejection: _rejection,
    HubVerifier: lambda draft: _rejection(drawn_first(draft)),
    BlockVerifier: lambda draft: _whole("block", draft),
    Traversal: lambda draft: _whole("block" if chain.is_plain(draft) else "traversal", draft),
    KSeq: lambda draft: (
        _rejection(draft) if chain.is_plain(draft) else RuleKernel("kseq", draft, optional=True)
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


@inference
def verify(rule: Verifier, batch: Batch, draft: Draft, scores: Scores) -> Verdict:
    """The rule's verdict with this step's noise. Rows that have ended keep nothing."""
    context = batch.context
    draws = Draws(context.sampling.seed_B, context.length_B - 1)
    verdict = run_kernel(rule, draft, scores, draws)
    if not batch.ended:
        return verdict
    running = batch.reason_B == RUNNING
    return verdict._replace(
        path_BD=torch.where(running[:, None], verdict.path_BD, -1),
        count_B=torch.where(running, verdict.count_B, 0),
    )


@inference
def commit(
    target: LanguageModel,
    drafter: Drafter,
    batch: Batch,
    draft: Draft,
    scores: Scores,
    verdict: Verdict,
) -> tuple[Batch, StepTensors]:
    """Keep the accepted path, append its tokens and the next one, and see which rows end.

    The first stop token, the row's limit or a fault cuts the block on the device.
    """
    context = batch.context
    length = context.length_B
    device = length.device
    size = verdict.path_BD.shape[1] + 1
    ends = Ends(length, batch.limit_B, batch.limit_reason_B, batch.stop_BS, batch.reason_B)
    block = ops.commit_tokens(draft, scores, verdict, ends)
    place = length[:, None] if size == 1 else length[:, None] + numbers(size, device)
    context.tokens_BL.scatter_(1, place, block.tokens_BT)  # what lies past it is rewritten later
    if not draft.tree.is_chain:
        target.keep(batch.cache, length - 1, verdict.path_BD)
    if context.known is not None:  # the prompts have been read by now, all of them
        context.known.keep(target, batch.cache)
    drafter.commit(batch.memory, context, draft, verdict, scores)

    context = context._replace(
        length_B=length + block.emitted_B,
        bound=min(context.bound + size, context.tokens_BL.shape[1]),
        unread=unread(context, draft),
        known=None,
        prompt_rest=0,
    )
    ended = block.lists is None or any(block.lists.reason)
    return batch._replace(context=context, reason_B=block.reason_B, ended=ended), block


def unread(context: Context, draft: Draft) -> int:
    """How many tokens of a row a draft model has not read after a step with this draft."""
    return 0 if draft.tree.max_depth else context.unread + 1


def ignores_drafts(rule: Verifier, greedy: bool) -> bool:
    """Whether a text by this rule is the same whatever is drafted, so that any clock may plan it.

    >>> ignores_drafts(Match(), greedy=False), ignores_drafts(BlockVerifier(), greedy=False)
    (True, False)
    """
    return rule.exact and (greedy or DrawKind.COUPLED in rule.kinds)


class GraphedStep(NamedTuple):
    """What the verbs of one step made."""

    draft: Draft
    scores: Scores
    verdict: Verdict
    batch: Batch
    block: StepTensors


def spec_decode_step(
    target: LanguageModel,
    drafter: Drafter,
    rule: Verifier,
    batch: Batch,
    shape: DraftShape,
    lap: Callable[[str], object] = lambda name: None,
) -> GraphedStep:
    """One step; `lap` is told when a verb has ended."""
    draft = propose(drafter, batch, shape)
    lap("propose")
    scores = score(target, batch, draft, drafter.aux_layers)
    lap("score")
    verdict = verify(rule, batch, draft, scores)
    lap("verify")
    batch, block = commit(target, drafter, batch, draft, scores, verdict)
    lap("commit")
    return GraphedStep(draft, scores, verdict, batch, block)
