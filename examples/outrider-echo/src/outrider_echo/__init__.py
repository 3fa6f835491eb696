"""A drafter that guesses that the last token repeats, and a rule that trusts no drafter."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from outrider import noise, ops
from outrider.drafters import Recipe
from outrider.drafters.memory import Forgetful
from outrider.tree import chain, children
from outrider.types import Draft, DraftShape, DrawKind, Outcome, Verdict


@dataclass(frozen=True)
class Echo(Forgetful):
    """The pending token, again and again: placed tokens, so they have no law."""

    num_speculative_tokens: int = 3
    name: ClassVar[str] = "echo"
    kinds: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.FIXED})

    @property
    def shapes(self):
        count = self.num_speculative_tokens
        return (DraftShape(count, count + 1, count, is_chain=True),)

    def propose(self, memory, context, shape):
        count, device = self.num_speculative_tokens, context.length_B.device
        pending = context.tokens_BL.gather(1, context.length_B[:, None] - 1)
        draws = children((1,) * count, device)
        return Draft(
            pending.expand(-1, count + 1),
            chain(count, device),
            draws,
            torch.full_like(draws, int(DrawKind.FIXED)),
            torch.full_like(draws, -1),  # no law row
            None,
            self.kinds,
        )

    def commit(self, memory, context, draft, verdict, scores):
        """Nothing to learn."""


#: What `--drafter echo` makes, and the options that it takes.
ECHO = Recipe(Echo, takes=("num_speculative_tokens",))


@dataclass(frozen=True)
class Refuse:
    """Keeps nothing; the next token comes from the target's law at the pending token. Exact."""

    name: ClassVar[str] = "refuse"
    exact: ClassVar[bool] = True
    kinds: ClassVar[frozenset[DrawKind]] = frozenset(DrawKind)
    chain_only: ClassVar[bool] = False

    def __call__(self, draft, scores, draws):
        law_BV = ops.probs(scores.laws)[:, 0]
        race_BV = noise.residual_race(draws, law_BV.shape[-1])
        count_B = torch.zeros_like(draft.tokens_BN[:, 0])
        path_BD = count_B[:, None].expand(-1, draft.tree.max_depth) - 1
        return Verdict(path_BD, count_B, ops.draw(law_BV, race_BV))

    def outcome(self, draft, scores):
        law_BNV = ops.probs(scores.laws)
        stop_BN = torch.zeros_like(law_BNV[..., 0])
        stop_BN[:, 0] = 1  # it always stops at the root
        return Outcome(stop_BN, law_BNV)
