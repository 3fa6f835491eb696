"""Rules that verify a tree from the root down, one node after another.

Such a rule is one function of the target's law at a node and the draws below it: `rule` gives the
probability that each draw is kept, given that the earlier ones were refused, and the law of the
next token once all are refused. `walk` plays it with uniforms, `walked` multiplies it out.
"""

from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.types import Draft, DrawKind, Draws, Outcome, Scores, Verdict, Verifier
from outrider.verifiers.chain import chances
from outrider.verifiers.sibling_draws import SiblingDraws, SiblingLevel, rows

# A rule under another name, for fewer kinds of drafts: a paper's own name for a special case.


class AliasedVerifier(NamedTuple):
    """`rule`, called `name`, for drafts of these `kinds` alone."""

    name: str
    rule: Verifier
    kinds: frozenset[DrawKind]

    @property
    def exact(self) -> bool:
        return self.rule.exact

    @property
    def chain_only(self) -> bool:
        return self.rule.chain_only

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        return self.rule(draft, scores, draws)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        return self.rule.outcome(draft, scores)


class NodeDecision(NamedTuple):
    """Draw k is kept iff u_k * against_k < favour_k, if draws 0..k-1 were refused."""

    favour_BnK: Tensor
    against_BnK: Tensor
    left_BnV: Tensor  #: law of the next token when every draw was refused

    def chances(self, there_BnK: Tensor) -> Tensor:
        """The probability min(1, favour / against) of each test; 0 where there is no draw."""
        return torch.where(there_BnK, chances(self.favour_BnK, self.against_BnK), 0.0)


class NodeRule(Protocol):
    """What a top-down rule does at one node."""

    def __call__(self, law_BnV: Tensor, level: SiblingLevel) -> NodeDecision:
        """Tests of the draws in order, and what is left after the last refusal."""


def node_decision(favour: list[Tensor], against: list[Tensor], left_BnV: Tensor) -> NodeDecision:
    """A `NodeDecision` from one [B, n] entry per draw."""
    return NodeDecision(torch.stack(favour, -1), torch.stack(against, -1), left_BnV)


def walk(rule: NodeRule, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
    """Play the rule: path, count, next token, and sum min(target, draft) at each examined node."""
    law = ops.probs(scores.laws)
    batch, nodes, vocab = law.shape
    siblings = SiblingDraws(draft, law)
    uniform_BNK = noise.accept_uniforms(draws, nodes, siblings.most)
    node = torch.zeros(batch, 1, dtype=torch.int64, device=law.device)
    alive = torch.ones(batch, 1, dtype=torch.bool, device=law.device)
    here, left, path, overlap = law[:, :1], law[:, :1], [node[:, :0]], []
    for _ in range(draft.tree.max_depth):
        level = siblings.at(node)
        decision = rule(here, level)
        test = rows(uniform_BNK, node) * decision.against_BnK < decision.favour_BnK
        kept = test & level.there_BnK & alive[..., None]
        if siblings.laws_BRV is not None:
            shared = torch.minimum(here, level.guess(0, here)).sum(-1)
            overlap.append(torch.where(level.there_BnK[..., 0] & alive, shared, torch.nan))
        left = torch.where(alive[..., None], decision.left_BnV, left)
        first = kept.to(torch.int8).argmax(-1, keepdim=True)
        alive = kept.any(-1)
        there = level.kid_BnK.gather(-1, first)[..., 0]
        path.append(torch.where(alive, there, -1))
        node = torch.where(alive, there, node)
        here = rows(law, node)
    left = torch.where(alive[..., None], here, left)[:, 0]
    following = ops.draw(left, noise.residual_race(draws, vocab))
    path_BD = torch.cat(path, 1)
    return Verdict(
        path_BD, (path_BD >= 0).sum(1), following, torch.cat(overlap, 1) if overlap else None
    )


def walked(rule: NodeRule, draft: Draft, scores: Scores) -> Outcome:
    """The law of the walk: every test replaced by its probability."""
    law = ops.probs(scores.laws)
    siblings = SiblingDraws(draft, law)
    reach = torch.zeros_like(law[..., 0])
    reach[:, 0] = 1
    stop, following = [], []
    for start, end in pairwise(draft.tree.levels):
        level, here = siblings.at(slice(start, end)), law[:, start:end]
        none = here[..., :0]
        decision = rule(here, level) if level.most else NodeDecision(none, none, here)
        left = reach[:, start:end]
        for k, take in enumerate(decision.chances(level.there_BnK).unbind(-1)):
            kid = level.kid_BnK[..., k].clamp(min=0)
            reach = reach.scatter_add(1, kid, left * take)
            left = left * (1 - take)
        stop.append(left)
        following.append(decision.left_BnV)
    return Outcome(torch.cat(stop, 1), torch.cat(following, 1))
