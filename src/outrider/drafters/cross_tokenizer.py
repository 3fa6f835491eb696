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
from torch import Tensor

from outrider import arguments
from outrider.drafters import prompt_lookup, recipes, tree_drafting
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.memory import LearnsNothing
from outrider.drafters.tree_drafting import shapes
from outrider.models.cross_tokenizer_model import TranslatedCache, TranslatedModel
from outrider.types import Context, Draft, DraftShape, DrawKind

# Whole-string translation: what a draft model with another tokenizer says, in the target's tokens.
#
# The draft goes on from the text as its own tokenizer cuts it, with its most probable tokens; these
# spell a string, which the target's tokenizer cuts. Nothing is drawn, so what is proposed is a
# point mass at any temperature (string-level exact match, Timor et al. 2025). Tokens that the
# draft's vocabulary lacks can be proposed, too, unlike with the law over common tokens that
# `models.cross_tokenizer_model` declares.


@dataclass(frozen=True)
class StringMatch(shapes.Chains, LearnsNothing):
    """A chain of `num_speculative_tokens` tokens of the target's.

    Raises ConfigurationError for a draft model that has the target's tokenizer.

    >>> StringMatch(model, 4)                                           # doctest: +SKIP
    """

    model: TranslatedModel
    num_speculative_tokens: int = 4
    name: ClassVar[str] = "string_match"
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
        count = shape.max_depth
        said = self.model.continued(memory, _texts(context), count)
        padded = [(ids + [-1] * count)[:count] for ids in said]
        return torch.tensor(padded, device=context.length_B.device)


def _texts(context: Context) -> list[list[int]]:
    """The committed tokens of every row."""
    rows = zip(
        context.tokens_BL[:, : context.bound].tolist(), context.length_B.tolist(), strict=True
    )
    return [tokens[:length] for tokens, length in rows]


def _string_match(translated: TranslatedModel, num_speculative_tokens: int = 4) -> StringMatch:
    return StringMatch(translated, num_speculative_tokens)


STRING_MATCH = recipes.Recipe(_string_match, ("translated",), ("num_speculative_tokens",))


@dataclass(frozen=True)
class Translated(LearnsNothing):
    """A chain of `num_speculative_tokens` target tokens; `shared_noise` is for sampled rows.

    Raises ConfigurationError for a draft model that has the target's tokenizer.

    >>> Translated(model, 4)                                            # doctest: +SKIP
    """

    model: TranslatedModel
    num_speculative_tokens: int = 4
    shared_noise: bool = False
    name: ClassVar[str] = "translated"
    capturable: ClassVar[bool] = False

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
        return self._strings.shapes

    def open(self, context: Context, capacity: int) -> TranslatedCache:
        """The draft model's cache, with all but the pending token read."""
        return self._strings.open(context, capacity)

    def propose(self, memory: TranslatedCache, context: Context, shape: DraftShape) -> Draft:
        """Strings, draws, or both side by side: rows of one kind do not see those of the other."""
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


def _made(
    translated: TranslatedModel, num_speculative_tokens: int = 4, shared_noise: bool = False
) -> Translated:
    return Translated(translated, num_speculative_tokens, shared_noise)


RECIPE = recipes.Recipe(_made, ("translated",), ("num_speculative_tokens", "shared_noise"))
