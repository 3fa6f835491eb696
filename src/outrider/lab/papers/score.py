"""Task scores for texts next to timings: ROUGE-1 and the word error rate."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.errors import ConfigurationError

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Score:
    """A score of texts against references: its name, and the number of all of them together."""

    name: str
    compute: Callable[[Sequence[str], Sequence[str]], float]

    def __call__(self, texts: Sequence[str], references: Sequence[str]) -> float:
        """The score of those texts that have a reference; nan if none has one.

        >>> ROUGE_1(["a b c", "what"], ["a b c", ""])
        1.0
        """
        scored = [(text, other) for text, other in zip(texts, references, strict=True) if other]
        if not scored:
            return float("nan")
        return self.compute([text for text, _ in scored], [other for _, other in scored])


def rouge1(text: str, reference: str) -> float:
    """Unigram F1 over words and signs (ROUGE-1, Lin 2004), in [0, 1].

    >>> rouge1("return a + b", "return a - b")
    0.75
    """
    ours, theirs = Counter(_WORD.findall(text)), Counter(_WORD.findall(reference))
    shared = sum((ours & theirs).values())
    total = sum(ours.values()) + sum(theirs.values())
    return 2 * shared / total if total else 0.0


def _mean_rouge1(texts: Sequence[str], references: Sequence[str]) -> float:
    return sum(map(rouge1, texts, references)) / len(texts)


ROUGE_1 = Score("ROUGE-1", _mean_rouge1)


def word_errors(language: str | None) -> Score:
    """Word error rate, as jiwer counts it: wrong, missing and added words over the reference's.

    Texts are normalised by transformers' own normalisers of Whisper: signs and case, and in
    English ("en", or a model that knows nothing else: None) contractions and numbers.

    Raises ConfigurationError without jiwer.
    """
    try:
        import jiwer
    except ImportError as error:
        raise ConfigurationError(
            "word error rates need jiwer, which is not installed; pip install 'outrider[bench]'"
        ) from error
    from transformers.models.whisper.english_normalizer import (
        BasicTextNormalizer,
        EnglishTextNormalizer,
    )

    plain = EnglishTextNormalizer({}) if language in (None, "en") else BasicTextNormalizer()

    def rate(texts: Sequence[str], references: Sequence[str]) -> float:
        normal = zip(map(plain, references), map(plain, texts), strict=True)
        said = [(reference, text) for reference, text in normal if reference.strip()]
        return float(jiwer.wer([reference for reference, _ in said], [text for _, text in said]))

    return Score("WER", rate)
