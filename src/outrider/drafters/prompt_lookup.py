"""Prompt lookup (Saxena 2023): copy what followed the last occurrence of the current suffix.

The longest suffix n-gram of `most_ngram` down to `least_ngram` tokens that occurs earlier in the
row's own text wins; among equals the most recent. What followed is proposed as a chain of placed
tokens: a point mass, so no draft law exists and none is needed.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from outrider import arguments
from outrider.drafters import asked
from outrider.drafters.memory import Nothing
from outrider.drafters.root import bare
from outrider.tree import chain
from outrider.types import Context, Draft, Kind, Scores, Shape, Verdict


@dataclass(frozen=True)
class PromptLookup:
    """No model and no training: strong on text that repeats itself (code, edits, summaries).

    Its defaults are those of `load` and of `model.generate`. Copies cost nothing to draft, so that
    8 tokens are worth their scoring where a draft model's chain would be shorter.
    """

    num_speculative_tokens: int = 8
    most_ngram: int = 4
    least_ngram: int = 1
    name: str = "prompt_lookup"
    kinds: frozenset[Kind] = frozenset({Kind.FIXED})
    is_chain: bool = True
    hidden: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "least_ngram", "most_ngram"):
            object.__setattr__(self, name, arguments.plain(getattr(self, name)))
        arguments.whole("num_speculative_tokens", self.num_speculative_tokens, asked.PLAIN, least=1)
        do = "leave it out for 1"
        least = arguments.whole("least_ngram", self.least_ngram, do, least=1)
        arguments.whole("most_ngram", self.most_ngram, "give at least least_ngram", least=least)

    @property
    def max_nodes(self) -> int:
        """The pending token and the longest copy."""
        return self.num_speculative_tokens + 1

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The one shape that it was made for."""
        return (Shape(self.max_nodes, self.max_nodes, self.num_speculative_tokens, self.is_chain),)

    def open(self, context: Context, capacity: int) -> Nothing:
        """The engine's own tokens are all the memory it needs."""
        return Nothing()

    def propose(self, memory: Nothing, context: Context, shape: Shape) -> Draft:
        """The chain that followed the best earlier match; rows without one propose nothing."""
        device = context.length_B.device
        length = context.length_B
        tokens = context.tokens_BL[:, : context.bound]
        at = torch.arange(context.bound, device=device)
        last = length[:, None] - 1

        # run[b, i]: how many tokens ending at i equal the tokens ending at the pending one
        run = torch.zeros_like(tokens)
        alive = at < last
        for back in range(min(self.most_ngram, context.bound)):
            want = tokens.gather(1, (last - back).clamp(min=0))
            here = torch.roll(tokens, back, 1) == want
            alive = alive & here & (at >= back) & (last >= back)
            run = run + alive
        rank = torch.where(run >= self.least_ngram, run * context.bound + at, -1)
        best, where = rank.max(1)
        found = best >= 0

        count = self.num_speculative_tokens
        ahead = where[:, None] + torch.arange(1, count + 1, device=device)
        placed = found[:, None] & (ahead <= last)
        if device.type == "cpu":  # no device to wait for: score no more nodes than were found
            count = int(placed.sum(1).max())
            if count == 0:
                return bare(context)
            ahead, placed = ahead[:, :count], placed[:, :count]
        copied = context.tokens_BL.gather(1, ahead.clamp(max=context.tokens_BL.shape[1] - 1))
        pending = context.tokens_BL.gather(1, last)
        tree = chain(count, device)
        kids = torch.where(placed, torch.arange(1, count + 1, device=device), -1)
        draws = torch.nn.functional.pad(kids, (0, 1), value=-1)[..., None]
        none = torch.full_like(draws, -1)
        return Draft(
            torch.cat([pending, copied], 1),
            tree,
            draws,
            torch.full_like(draws, int(Kind.FIXED)),
            none,
            None,
            self.kinds,
        )

    def commit(
        self, memory: Nothing, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Nothing to learn: the committed tokens are the memory."""
