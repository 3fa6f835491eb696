"""Prompt lookup (Saxena 2023): copy what followed the last occurrence of the current suffix.

The longest suffix n-gram of `most_ngram` down to `least_ngram` tokens that occurs earlier in the
row's own text wins; among equals the most recent. What followed is proposed as a chain of placed
tokens: a point mass, so no draft law exists and none is needed.
"""

from dataclasses import dataclass
from typing import ClassVar

from outrider.drafters import lookup, recipes
from outrider.drafters.memory import Forgetful, NoMemory
from outrider.drafters.tree_drafting import shapes
from outrider.types import Context, Draft, DraftShape, DrawKind


@dataclass(frozen=True)
class PromptLookup(shapes.Chains, Forgetful):
    """No model and no training: strong on text that repeats itself (code, edits, summaries).

    Its defaults are those of `load` and of `model.generate`. Copies cost nothing to draft, so that
    8 tokens are worth their scoring where a draft model's chain would be shorter. `suffix` finds
    the same places in constant time.
    """

    num_speculative_tokens: int = 8
    most_ngram: int = 4
    least_ngram: int = 1
    name: ClassVar[str] = "prompt_lookup"
    kinds: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.FIXED})

    def __post_init__(self) -> None:
        lookup.check(self)

    def propose(self, memory: NoMemory, context: Context, shape: DraftShape) -> Draft:
        """The chain that followed the best earlier match; rows without one propose nothing."""
        count = shapes.declared(self, shape).max_depth
        corpus = lookup.text(context)
        start_B1 = lookup.latest(corpus, context, self.most_ngram, self.least_ngram)
        return lookup.copied(corpus, start_B1, context, count)


def _made(
    num_speculative_tokens: int = PromptLookup.num_speculative_tokens,
    ngram: tuple[int, int] = (PromptLookup.least_ngram, PromptLookup.most_ngram),
) -> PromptLookup:
    return PromptLookup(num_speculative_tokens, most_ngram=ngram[1], least_ngram=ngram[0])


RECIPE = recipes.Recipe(
    _made,
    takes=("num_speculative_tokens", "ngram"),
    depth=PromptLookup.num_speculative_tokens,
    deepest=16,
)
