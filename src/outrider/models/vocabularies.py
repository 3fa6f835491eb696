"""The target's vocabulary, and which of its tokens draft models with another tokenizer share."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from outrider.models import load_checks, reads_more
from outrider.models.config import hears, vocabulary_of
from outrider.models.cross_tokenizer_model import TranslatedModel
from outrider.models.draft_source import DraftSource
from outrider.models.sources import ModelSource, read_tokenizer
from outrider.models.token_remap import VocabularyMap, vocabulary_map
from outrider.types import LanguageModel


class VocabularyPair(NamedTuple):
    """The target's vocabulary, and how draft models with another one are translated into it."""

    size: int
    drafts: tuple[VocabularyMap | None, ...] = ()  #: None: the target's own vocabulary

    def over(self, models: Sequence[LanguageModel]) -> tuple[LanguageModel, ...]:
        """Draft models over the target's tokens."""
        each = zip(models, self.drafts, strict=True)
        return tuple(
            model if words is None else TranslatedModel(model, words, self.size)
            for model, words in each
        )


def shared(
    sources: tuple[ModelSource, *tuple[DraftSource, ...]],
    tokenizer: PreTrainedTokenizerBase | None,
    other: str | Path | PreTrainedTokenizerBase | None,
) -> VocabularyPair:
    """How many tokens the target has, and which of them its draft models share."""
    load_checks.draft_tokenizer(other, sources[1:])
    own = None if other is None else read_tokenizer(other, sources[0].trust)
    most, *rest = (vocabulary_of(source.config) for source in sources)
    found = VocabularyPair(load_checks.vocabulary(tokenizer, None, {"target": most}))
    if hears(sources[0].config):  # tokenizers of older checkpoints lack the timestamps
        found = VocabularyPair(most)
    for source, size in zip(sources[1:], rest, strict=True):
        each = {"target": most, "draft": size}
        told = own or source.tokenizer()
        words = None
        if tokenizer is None or told is None:
            load_checks.vocabulary(tokenizer, None, each)
        elif not (source.stands_alone and _of_text(sources[0]) and _of_text(source)):
            load_checks.vocabulary(tokenizer, told, each)
        elif (words := vocabulary_map(tokenizer, told)) is None:
            load_checks.vocabulary(tokenizer, None, each)
        found = found._replace(drafts=(*found.drafts, words))
    return found


def _of_text(source: DraftSource) -> bool:
    return not reads_more(source.config)
