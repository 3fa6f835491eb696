"""The target's vocabulary, and which of its tokens draft models with another tokenizer share."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from outrider.models import CausalModel, check, reads_more
from outrider.models.beside import Draft
from outrider.models.config import hears, vocabulary_of
from outrider.models.heads import HeadModel
from outrider.models.retold import Translation, between
from outrider.models.sources import Source, read_tokenizer
from outrider.models.translated import TranslatedModel
from outrider.types import LanguageModel


class Words(NamedTuple):
    """The target's vocabulary, and how draft models with another one are translated into it."""

    size: int
    drafts: tuple[Translation | None, ...] = ()  #: None: the target's own vocabulary

    def over(self, models: Sequence[CausalModel | HeadModel]) -> tuple[LanguageModel, ...]:
        """Draft models over the target's tokens."""
        each = zip(models, self.drafts, strict=True)
        return tuple(
            model if words is None else TranslatedModel(model, words, self.size)
            for model, words in each
        )


def shared(
    sources: Sequence[Draft],
    tokenizer: PreTrainedTokenizerBase | None,
    other: str | Path | PreTrainedTokenizerBase | None,
) -> Words:
    """How many tokens the target has, and which of them its draft models share."""
    check.draft_tokenizer(other, sources[1:])
    first = sources[0]
    trust = isinstance(first, Source) and first.trust
    own = None if other is None else read_tokenizer(other, trust)
    most, *rest = (vocabulary_of(source.config) for source in sources)
    found = Words(check.vocabulary(tokenizer, None, {"target": most}))
    if hears(sources[0].config):  # tokenizers of older checkpoints lack the timestamps
        found = Words(most)
    for source, size in zip(sources[1:], rest, strict=True):
        each = {"target": most, "draft": size}
        told = own or source.tokenizer()
        words = None
        if tokenizer is None or told is None:
            check.vocabulary(tokenizer, None, each)
        elif not (isinstance(source, Source) and _of_text(sources[0]) and _of_text(source)):
            check.vocabulary(tokenizer, told, each)
        elif (words := between(tokenizer, told)) is None:
            check.vocabulary(tokenizer, None, each)
        found = found._replace(drafts=(*found.drafts, words))
    return found


def _of_text(source: Draft) -> bool:
    return not reads_more(source.config)
