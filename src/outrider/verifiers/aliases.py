"""A rule under another name, for fewer kinds of drafts: a paper's own name for a special case."""

from typing import NamedTuple

from outrider.types import Draft, DrawKind, Draws, Outcome, Scores, Verdict, Verifier


class AliasedVerifier(NamedTuple):
    """`rule`, called `name`, for drafts of these `kinds` alone."""

    name: str
    rule: Verifier
    kinds: frozenset[DrawKind]

    @property
    def exact(self) -> bool:
        """As the rule."""
        return self.rule.exact

    @property
    def chain_only(self) -> bool:
        """As the rule."""
        return self.rule.chain_only

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """As the rule."""
        return self.rule(draft, scores, draws)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """As the rule."""
        return self.rule.outcome(draft, scores)
