"""Whole-string translation: what a draft model with another tokenizer says, in the target's tokens.

The draft goes on from the text as its own tokenizer cuts it, with its most probable tokens; these
spell a string, which the target's tokenizer cuts. Nothing is drawn, so what is proposed is a point
mass at any temperature (string-level exact match, Timor et al. 2025). Tokens that the draft's
vocabulary lacks can be proposed, too, unlike with the law over common tokens that
`models.cross_tokenizer_model` declares.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import arguments
from outrider.drafters import prompt_lookup, recipes, tree_drafting
from outrider.drafters.tree_drafting import shapes
from outrider.models.cross_tokenizer_model import TranslatedCache, TranslatedModel
from outrider.types import Context, Draft, DraftShape, DrawKind, Scores, Verdict


@dataclass(frozen=True)
class StringMatch(shapes.Chains):
    """A chain of `num_speculative_tokens` tokens of the target's.

    Raises ConfigurationError for a draft model that has the target's tokenizer.

    >>> StringMatch(model, 4)                                           # doctest: +SKIP
    """

    model: TranslatedModel
    num_speculative_tokens: int = 4
    name: ClassVar[str] = "string_match"
    taps: ClassVar[tuple[int, ...]] = ()
    kinds: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.FIXED})
    capturable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, TranslatedModel):
            do = "use drafter='draft_model', which drafts in the target's tokens"
            what = "a draft model with another tokenizer than the target's"
            arguments.refuse("draft", what, self.model, do)
        arguments.wholes(self, recipes.PLAIN, num_speculative_tokens=1)

    def open(self, context: Context, capacity: int) -> TranslatedCache:
        """The draft model's cache, with all but the pending token read."""
        inputs = tree_drafting.inputs_for(self.model, context.inputs)
        cache = self.model.open(context.length_B.shape[0], capacity, inputs)
        self.model.listen(cache, [text[:-1] for text in _texts(context)])
        return cache

    def propose(self, memory: TranslatedCache, context: Context, shape: DraftShape) -> Draft:
        """The draft model's own continuation, one call of it for each of its tokens."""
        corpus = self.strings(memory, context, shape)
        start_B1 = torch.zeros_like(corpus[:, :1])
        return prompt_lookup.copied(corpus, start_B1, context, corpus.shape[1])

    def strings(self, memory: TranslatedCache, context: Context, shape: DraftShape) -> Tensor:
        """The same as target ids alone, [B, n], -1 padded."""
        count = shapes.declared(self, shape).max_depth
        said = self.model.continued(memory, _texts(context), count)
        padded = [(ids + [-1] * count)[:count] for ids in said]
        return torch.tensor(padded, device=context.length_B.device)

    def commit(
        self,
        memory: TranslatedCache,
        context: Context,
        draft: Draft,
        verdict: Verdict,
        scores: Scores,
    ) -> None:
        """Nothing: the next proposal begins with the text as it is then."""


def _texts(context: Context) -> list[list[int]]:
    """The committed tokens of every row."""
    rows = zip(
        context.tokens_BL[:, : context.bound].tolist(), context.length_B.tolist(), strict=True
    )
    return [tokens[:length] for tokens, length in rows]


def _made(translated: TranslatedModel, num_speculative_tokens: int = 4) -> StringMatch:
    return StringMatch(translated, num_speculative_tokens)


RECIPE = recipes.Recipe(_made, ("translated",), ("num_speculative_tokens",))
