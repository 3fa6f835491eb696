"""Task scores for texts next to timings, by the field's own libraries: ROUGE, BLEU, word errors."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.errors import ConfigurationError
from outrider_lab.bench import intervals

Compute = Callable[[Sequence[str], Sequence[str]], float]


@dataclass(frozen=True)
class Score:
    """A score of texts against references: its name, and the number of all of them together.

    `each` gives the score of a text alone where that of all is the mean of these.
    """

    name: str
    compute: Compute
    each: Callable[[str, str], float] | None = None

    def __call__(self, texts: Sequence[str], references: Sequence[str]) -> float:
        """The score of those texts that have a reference; nan if none has one.

        >>> ROUGE_1(["The Cat sat.", "what"], ["the cat sat", ""])
        1.0
        """
        scored = _referred(texts, references)
        return self.compute(*scored) if scored[0] else float("nan")

    def interval(self, texts: Sequence[str], references: Sequence[str]) -> intervals.Interval:
        """The same with its interval over texts, one for each prompt.

        Raises ValueError if no text has a reference.
        """
        known, right = _referred(texts, references)
        if self.each is not None:
            each = [self.each(text, other) for text, other in zip(known, right, strict=True)]
            return intervals.mean(each)

        def value(units: Sequence[int]) -> float:
            return self.compute([known[u] for u in units], [right[u] for u in units])

        return intervals.interval(value, len(known))


def _referred(texts: Sequence[str], references: Sequence[str]) -> tuple[list[str], list[str]]:
    pairs = [(text, other) for text, other in zip(texts, references, strict=True) if other]
    return [text for text, _ in pairs], [other for _, other in pairs]


def ready() -> None:
    """Say what is missing for ROUGE and BLEU before anything is measured."""
    try:
        import rouge_score  # noqa: F401
        import sacrebleu  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"scores against references need sacrebleu and rouge-score; {error.name} is not "
            "installed; install the extra with pip install 'outrider[bench]', or give rows without "
            "a reference"
        ) from error


def _rouge(name: str, kind: str) -> Score:
    """F1 by rouge-score (Lin 2004): lower case, letters and digits alone; the mean over texts."""

    def each(text: str, reference: str) -> float:
        ready()
        from rouge_score import rouge_scorer

        found = rouge_scorer.RougeScorer([kind]).score(reference, text)
        return float(found[kind].fmeasure)

    def compute(texts: Sequence[str], references: Sequence[str]) -> float:
        return statistics.fmean(map(each, texts, references))

    return Score(name, compute, each)


def _bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    ready()
    import sacrebleu

    return float(sacrebleu.corpus_bleu(list(texts), [list(references)]).score)


#: F1 in [0, 1].
ROUGE_1 = _rouge("ROUGE-1", "rouge1")
ROUGE_2 = _rouge("ROUGE-2", "rouge2")
ROUGE_L = _rouge("ROUGE-L", "rougeL")
#: Of a corpus, by sacrebleu with its own tokenizer; of 100.
BLEU = Score("BLEU", _bleu)


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
