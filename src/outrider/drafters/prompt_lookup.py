"""Prompt lookup (Saxena 2023): copy what followed the last occurrence of the current suffix.

The longest suffix n-gram of `most_ngram` down to `least_ngram` tokens that occurs earlier in the
row's own text wins; among equals the most recent. What followed is proposed as a chain of placed
tokens: a point mass, so no draft law exists and none is needed.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from outrider import arguments
from outrider.drafters import recipes
from outrider.drafters.growing import TreeBuilder, shapes
from outrider.drafters.memory import Nothing
from outrider.drafters.root import bare
from outrider.tree import parents_of
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
    name: ClassVar[str] = "prompt_lookup"
    hidden: ClassVar[bool] = False
    kinds: ClassVar[frozenset[Kind]] = frozenset({Kind.FIXED})

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "least_ngram", "most_ngram"):
            object.__setattr__(self, name, arguments.plain(getattr(self, name)))
        arguments.whole(
            "num_speculative_tokens", self.num_speculative_tokens, recipes.PLAIN, least=1
        )
        do = "leave it out for 1"
        least = arguments.whole("least_ngram", self.least_ngram, do, least=1)
        arguments.whole("most_ngram", self.most_ngram, "give at least least_ngram", least=least)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """A copy of each length."""
        return shapes.of_levels(1, self.num_speculative_tokens)

    def open(self, context: Context, capacity: int) -> Nothing:
        """The engine's own tokens are all the memory it needs."""
        return Nothing()

    def propose(self, memory: Nothing, context: Context, shape: Shape) -> Draft:
        """The chain that followed the best earlier match; rows without one propose nothing."""
        count = shapes.declared(self, shape).max_depth
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

        ahead = where[:, None] + torch.arange(1, count + 1, device=device)
        placed = found[:, None] & (ahead <= last)
        if device.type == "cpu":  # no device to wait for: score no more nodes than were found
            count = int(placed.sum(1).max())
            if count == 0:
                return bare(context)
            ahead, placed = ahead[:, :count], placed[:, :count]
        copied = context.tokens_BL.gather(1, ahead.clamp(max=context.tokens_BL.shape[1] - 1))
        tree = TreeBuilder(shapes.fixed(parents_of((1,) * count), device), context)
        tree.fill(copied, placed)
        return tree.draft((Kind.FIXED,))

    def commit(
        self, memory: Nothing, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Nothing to learn: the committed tokens are the memory."""


def _made(
    num_speculative_tokens: int = PromptLookup.num_speculative_tokens,
    ngram: tuple[int, int] = (PromptLookup.least_ngram, PromptLookup.most_ngram),
) -> PromptLookup:
    return PromptLookup(num_speculative_tokens, most_ngram=ngram[1], least_ngram=ngram[0])


RECIPE = recipes.Recipe(
    _made,
    takes=("num_speculative_tokens", "ngram"),
    depth=PromptLookup.num_speculative_tokens,
)
