"""A draft model with another tokenizer, at its best for each row: the default of such pairs.

Rows at temperature 0 get its continuation as a string in the target's tokens (`string_match`), in
which several of its tokens may be one of the target's. Sampled rows get draws from its law over
the common tokens (`draft_model`), declared: there a point mass is kept less often. So does
transformers choose, by the call instead of by the row.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from outrider.drafters import recipes
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.string_match import StringMatch
from outrider.drafters.tree_drafting import shapes
from outrider.models.cross_tokenizer_model import TranslatedCache, TranslatedModel
from outrider.types import Context, Draft, DraftShape, DrawKind, Scores, Verdict


@dataclass(frozen=True)
class Translated:
    """A chain of `num_speculative_tokens` target tokens; `shared_noise` is for sampled rows.

    Raises ConfigurationError for a draft model that has the target's tokenizer.

    >>> Translated(model, 4)                                            # doctest: +SKIP
    """

    model: TranslatedModel
    num_speculative_tokens: int = 4
    shared_noise: bool = False
    name: ClassVar[str] = "translated"
    capturable: ClassVar[bool] = False
    taps: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        count = self._strings.num_speculative_tokens
        object.__setattr__(self, "num_speculative_tokens", count)

    @cached_property
    def _strings(self) -> StringMatch:
        return StringMatch(self.model, self.num_speculative_tokens)

    @cached_property
    def _draws(self) -> DraftModel:
        return DraftModel(self.model, (1,) * self.num_speculative_tokens, self.shared_noise)

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """Greedy rows' tokens are placed, the others drawn."""
        return self._draws.kinds

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """A chain of each length."""
        return self._strings.shapes

    def open(self, context: Context, capacity: int) -> TranslatedCache:
        """The draft model's cache, with all but the pending token read."""
        return self._strings.open(context, capacity)

    def propose(self, memory: TranslatedCache, context: Context, shape: DraftShape) -> Draft:
        """Strings, draws, or both side by side: rows of one kind do not see those of the other."""
        shapes.declared(self, shape)
        greedy = context.sampling.greedy
        if greedy == "all":
            return self._strings.propose(memory, context, shape)
        if greedy == "none":
            return self._draws.propose(memory, context, shape)
        text_BN = self._strings.strings(memory, context, shape)
        drawn = self._draws.propose(memory, context, shape)
        hot_B1 = torch.isinf(context.sampling.inverse_temperature_B)[:, None]
        there_BN = torch.nn.functional.pad(text_BN >= 0, (0, 1))
        placed_BN = torch.cat([drawn.tokens_BN[:, :1], text_BN.clamp(min=0)], 1)
        return drawn._replace(
            tokens_BN=torch.where(hot_B1, placed_BN, drawn.tokens_BN),
            draws_BNK=torch.where((hot_B1 & ~there_BN)[..., None], -1, drawn.draws_BNK),
        )

    def commit(
        self,
        memory: TranslatedCache,
        context: Context,
        draft: Draft,
        verdict: Verdict,
        scores: Scores,
    ) -> None:
        """Nothing: the text tells."""


def _made(
    translated: TranslatedModel, num_speculative_tokens: int = 4, shared_noise: bool = False
) -> Translated:
    return Translated(translated, num_speculative_tokens, shared_noise)


RECIPE = recipes.Recipe(_made, ("translated",), ("num_speculative_tokens", "shared_noise"))
