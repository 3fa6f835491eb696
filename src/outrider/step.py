"""One step, driven by hand or by the engine: begin, then propose, score, verify, commit.

    draft   = propose(drafter, state)                # a tree of guesses below the pending token
    scores  = score(target, state, draft)            # one call, one law per node
    verdict = verify(rule, state, draft, scores)     # the longest path kept, and one more token
    state, block = commit(target, drafter, state, draft, scores, verdict)

Nothing here reads a device value: every verb runs on the meta device. `length_B` counts committed
tokens, the pending one included; the caches hold one entry less; node 0 writes slot `length_B - 1`.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from outrider import ops, verifiers
from outrider.nodes import of_tree
from outrider.prefill import ingest, width
from outrider.sampling import SamplingRows, warp
from outrider.shaping import shape
from outrider.tree import numbers, offered, shallower
from outrider.types import (
    CONTEXT,
    FAULT,
    LENGTH,
    REASONS,
    RUNNING,
    STOP,
    Block,
    BlockLists,
    Context,
    Draft,
    Drafter,
    Draws,
    Ends,
    LanguageModel,
    Scores,
    Shape,
    Verdict,
    Verifier,
)

__all__ = [
    "CONTEXT",
    "FAULT",
    "LENGTH",
    "REASONS",
    "RUNNING",
    "STOP",
    "Block",
    "BlockLists",
    "State",
    "begin",
    "commit",
    "log_probabilities",
    "propose",
    "score",
    "verify",
]

P = ParamSpec("P")
R = TypeVar("R")


def inference(verb: Callable[P, R]) -> Callable[P, R]:
    """Run in inference mode; the engine is in it already, and entering it anew for every verb
    takes longer than some verbs' work."""

    @wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            return verb(*args, **kwargs)
        with torch.inference_mode():
            return verb(*args, **kwargs)

    return run


class State(NamedTuple):
    """What the next step needs."""

    context: Context
    cache: Any
    memory: Any
    limit_B: Tensor  #: committed length at which a row ends
    limit_reason_B: Tensor
    stop_BS: Tensor  #: stop token ids, -1 padded
    reason_B: Tensor  #: RUNNING, or why the row has ended


@inference
def begin(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingRows,
    *,
    limits: Sequence[int],
    limit_reasons: Sequence[int],
    stop_ids: Sequence[Sequence[int]],
    capacity: int,
) -> State:
    """Caches full but for each row's pending token."""
    device = target.device
    lengths = [len(prompt) for prompt in prompts]
    tokens_BL = torch.zeros(len(prompts), capacity, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens_BL[row, : len(prompt)] = torch.tensor(prompt)
    most = max((len(ids) for ids in stop_ids), default=0)
    stops = [list(ids) + [-1] * (most - len(ids)) for ids in stop_ids]
    length_B = torch.tensor(lengths)
    context = Context(tokens_BL.to(device), length_B.to(device), max(lengths), sampling)
    cache = target.open(len(prompts), capacity)
    ingest(target, cache, context.tokens_BL, max(lengths) - 1)
    return State(
        context,
        cache,
        drafter.open(context, capacity),
        torch.tensor(limits, device=device),
        torch.tensor(limit_reasons, device=device),
        torch.tensor(stops, dtype=torch.int64, device=device).view(len(prompts), most),
        torch.zeros(len(prompts), dtype=torch.int64, device=device),
    )


@inference
def propose(drafter: Drafter, state: State, shape: Shape | None = None) -> Draft:
    """A tree of guesses below each row's pending token, in one of the drafter's shapes.

    None takes the usual one. Rows that want less (`shape.most_B`) lose what lies deeper.
    """
    wanted = drafter.shapes[0] if shape is None else shape
    draft = drafter.propose(state.memory, state.context, wanted)
    return draft if wanted.most_B is None else shallower(draft, wanted.most_B)


@inference
def score(target: LanguageModel, state: State, draft: Draft) -> Scores:
    """The target's laws at every node, from one call. Siblings share a position, never a slot."""
    tree, context = draft.tree, state.context
    wide = width(context.bound, tree.nodes, state.cache.capacity)
    nodes = of_tree(draft.tokens_BN, tree, context.length_B - 1, wide)
    logits, hidden = target.forward(state.cache, nodes)
    shaping = context.sampling.shaping
    if shaping is None:
        return Scores(warp(logits, context.sampling), hidden)
    alive = None
    if shaping.processed:  # processors see no node that the drafter left empty
        alive = offered(draft.draws_BNK).expand(logits.shape[0], -1)
    shaped = shape(logits, shaping, context, draft.tokens_BN, tree, alive_BR=alive)
    dead = None
    if shaping.masks:  # rules need a law everywhere; any will do where none may be emitted from
        dead = shaped.amax(-1) == -torch.inf
        shaped = shaped.masked_fill(dead[..., None], 0.0)
    return Scores(warp(shaped, context.sampling), hidden, raw_BNV=logits, dead_BN=dead)


@inference
def verify(rule: Verifier, state: State, draft: Draft, scores: Scores) -> Verdict:
    """The rule's verdict with this step's noise. Rows that have ended keep nothing."""
    context = state.context
    draws = Draws(context.seed_B, context.length_B - 1)
    verdict = verifiers.judge(rule, draft, scores, draws)
    running = state.reason_B == RUNNING
    return verdict._replace(
        path_BD=torch.where(running[:, None], verdict.path_BD, -1),
        count_B=torch.where(running, verdict.count_B, 0),
    )


@inference
def commit(
    target: LanguageModel,
    drafter: Drafter,
    state: State,
    draft: Draft,
    scores: Scores,
    verdict: Verdict,
) -> tuple[State, Block]:
    """Keep the accepted path, append its tokens and the next one, and see which rows end.

    The first stop token, the row's limit or a fault cuts the block on the device.
    """
    context = state.context
    length = context.length_B
    device = length.device
    size = verdict.path_BD.shape[1] + 1
    ends = Ends(length, state.limit_B, state.limit_reason_B, state.stop_BS, state.reason_B)
    block = ops.settle(draft, scores, verdict, ends)
    place = length[:, None] + numbers(size, device)
    context.tokens_BL.scatter_(1, place, block.tokens_BT)  # what lies past it is rewritten later
    if not draft.tree.is_chain:
        target.keep(state.cache, length - 1, verdict.path_BD)
    drafter.commit(state.memory, context, draft, verdict, scores)

    context = context._replace(
        length_B=length + block.emitted_B,
        bound=min(context.bound + size, context.tokens_BL.shape[1]),
    )
    return state._replace(context=context, reason_B=block.reason_B), block


@inference
def log_probabilities(scores: Scores, verdict: Verdict, block: Block) -> Tensor:
    """Log-probability of every token of a block under the law it was emitted from, [B, T].

    That is the processed law: penalties, temperature and filters are in. Greedy rows, whose law is
    one-hot, report the law at temperature 1 instead.
    """
    root = torch.zeros_like(verdict.count_B)[:, None]
    nodes = torch.cat([root, verdict.path_BD.clamp(min=0)], 1)
    laws = scores.laws
    vocab = laws.logits_BRV.shape[-1]
    logits = laws.logits_BRV.gather(1, nodes[..., None].expand(-1, -1, vocab)).float()
    inverse = laws.inverse_temperature_B[:, None, None]
    inverse = torch.where(torch.isinf(inverse), 1.0, inverse)
    if laws.floor_BR is not None:
        floor = laws.floor_BR.gather(1, nodes)[..., None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    logs = (logits * inverse).log_softmax(-1)
    return logs.gather(2, block.tokens_BT.clamp(max=vocab - 1)[..., None])[..., 0]
