"""Sample-and-match: draw from the target, keep the draft while it agrees.

At node n draw y ~ target law; follow the child that carries y, else emit y and stop. Lossless for
any draft that does not depend on the target's noise, and optimal for point-mass children. With
coupled drafts it is coupled sampling (Daliri, Musco and Suresh 2025): the emitted text is the
target's own Gumbel-max text for the seed, whatever was drafted, because the noise is keyed by
absolute position. At temperature 0 it is greedy matching.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.types import Draft, DrawKind, Draws, Outcome, Scores, Verdict
from outrider.verifiers import tree_walk
from outrider.verifiers.sibling_draws import SiblingLevel
from outrider.verifiers.tree_walk import AliasedVerifier


@dataclass(frozen=True)
class Match:
    """Verifies every kind of draft; on drawn children it accepts sum p q, not sum min(p, q)."""

    name: ClassVar[str] = "match"
    exact: ClassVar[bool] = True
    kinds: ClassVar[frozenset[DrawKind]] = frozenset(DrawKind)
    chain_only: ClassVar[bool] = False

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Path, count and next token; needs no draft law."""
        laws = scores.laws
        vocab, depth = laws.logits_BRV.shape[-1], draft.tree.depth_BN
        race = noise.target_race(draws, draft.tree.max_depth, vocab)
        if depth.shape[0] == 1:
            race = race[:, depth[0]]
        else:
            race = race.gather(1, depth[..., None].expand(-1, -1, vocab))
        chosen_BN = ops.perturbed(laws, race).argmax(-1)
        path, count, node = ops.follow(draft, chosen_BN)
        return Verdict(path, count, chosen_BN.gather(1, node[:, None])[:, 0])

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """Averaged over the target's noise: each child is taken with its target probability."""
        return tree_walk.walked(_decide, draft, scores)


def _decide(law_BnV: Tensor, level: SiblingLevel) -> tree_walk.NodeDecision:
    """Look the target's token up among the children: the first child that carries it is taken."""
    here, favour, against = law_BnV, [], []
    for k in range(level.most):
        token, there = level.token_BnK[..., k, None], level.there_BnK[..., k, None]
        mass = here.gather(-1, token)
        favour.append(mass[..., 0])
        against.append(here.sum(-1))
        here = here.scatter(-1, token, torch.where(there, 0.0, mass))
    total = here.sum(-1, keepdim=True)
    return tree_walk.node_decision(favour, against, here / torch.where(total > 0, total, 1.0))


# Coupled sampling: the target's own Gumbel-max draw decides, the draft shared its noise.
#
# The same rule as `match` (Daliri, Musco and Suresh 2025), restricted to placed and coupled
# children so that a run which asks for it by name cannot be given a drafter that draws with noise
# of its own: `match` would stay exact there but accept only sum p q. Of single coupled drafts it
# accepts sum_x 1 / sum_v max(p_v/p_x, q_v/q_x), between (1 - TV) / (1 + TV) and 1 - TV.

COUPLED = AliasedVerifier("coupled", Match(), frozenset({DrawKind.FIXED, DrawKind.COUPLED}))
