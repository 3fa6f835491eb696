"""Sample-and-match: draw from the target, keep the draft while it agrees.

At node n draw y ~ target law; follow the child that carries y, else emit y and stop. Lossless for
any draft that does not depend on the target's noise, and optimal for point-mass children (handbook
A5, B6). With coupled drafts it is coupled sampling (Daliri, Musco and Suresh 2025): the emitted text
is the target's own Gumbel-max text for the seed, whatever was drafted, because the noise is keyed by
absolute position. At temperature 0 it is greedy matching.
"""

from dataclasses import dataclass

import torch

from outrider import noise, ops
from outrider.types import Draft, Draws, Kind, Outcome, Scores, Verdict


@dataclass(frozen=True)
class Match:
    """Judges every kind of draft; on drawn children it accepts sum p q instead of sum min(p, q)."""

    name: str = "match"
    exact: bool = True
    kinds: frozenset[Kind] = frozenset(Kind)
    chain_only: bool = False

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Path, count and next token; needs no draft law."""
        laws = scores.laws
        if laws.greedy == "all":
            chosen_BN = laws.logits_BRV.argmax(-1)
        else:
            vocab = laws.logits_BRV.shape[-1]
            race = noise.target_race(draws, draft.tree.max_depth, vocab)
            depth = draft.tree.depth_BN
            race = (
                race[:, depth[0]]
                if depth.shape[0] == 1
                else race.gather(1, depth[..., None].expand(-1, -1, vocab))
            )
            perturbed = ops.scaled(laws) - race.log().to(laws.logits_BRV.dtype)
            if laws.greedy == "some":
                hot = torch.isinf(laws.inverse_temperature_B)[:, None, None]
                perturbed = torch.where(hot, laws.logits_BRV.to(perturbed.dtype), perturbed)
            chosen_BN = perturbed.argmax(-1)
        path, count, node = ops.follow(draft, chosen_BN)
        return Verdict(path, count, chosen_BN.gather(1, node[:, None])[:, 0])

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """Averaged over the target's noise: each placed child is taken with its target probability."""
        law = ops.probs(scores.laws)
        batch = law.shape[0]
        table = draft.draws_BNK.expand(batch, -1, -1)
        reach = torch.zeros_like(law[..., 0])
        reach[:, 0] = 1
        rest = law.clone()
        for node in range(table.shape[1]):
            for k in range(table.shape[2]):
                kid = table[:, node, k]
                for row in torch.nonzero(kid >= 0)[:, 0].tolist():
                    token = draft.tokens_BN[row, kid[row]]
                    reach[row, kid[row]] = reach[row, node] * rest[row, node, token]
                    rest[row, node, token] = 0
        left = rest.sum(-1)
        safe = torch.where(left > 0, left, torch.ones_like(left))
        return Outcome(reach * left, rest / safe[..., None])
