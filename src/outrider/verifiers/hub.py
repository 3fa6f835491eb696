"""Hub nodes, from the root down: sampled children first, then the placed ones.

SpecHub (Sun, Zhou et al. 2024) for two children; Hu et al. 2025 for any number. Draft: T = the top
tokens of q, placed; X ~ m = norm(q without T), drawn. Accept X iff u m(X) < p(X); else y ~
norm((p - m)+): if y is in T follow that child, otherwise emit y. Accepts p(T) + sum min(p, m)
outside T, the most any rule can for this draft.

Drawing y and looking it up among T is played as one test for each placed child t in turn, with
probability y(t) / (1 - what the earlier ones took): the same law, without a draw over the
vocabulary at every node. Placed children are verified last wherever they stand in the draft.
"""

from dataclasses import dataclass
from typing import ClassVar

from outrider.types import UNCOUPLED, Draft, DrawKind, Draws, Outcome, Scores, Verdict
from outrider.verifiers.rejection import Rejection
from outrider.verifiers.sibling_draws import drawn_first


@dataclass(frozen=True)
class HubVerifier:
    """Rejection with the placed children last. Exact for any mixture of kinds but coupled."""

    name: ClassVar[str] = "hub"
    exact: ClassVar[bool] = True
    kinds: ClassVar[frozenset[DrawKind]] = UNCOUPLED
    chain_only: ClassVar[bool] = False

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Path, count, next token and overlap of the first drawn child."""
        return Rejection()(drawn_first(draft), scores, draws)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """The walk with every accept test replaced by its probability."""
        return Rejection().outcome(drawn_first(draft), scores)
