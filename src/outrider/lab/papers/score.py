"""Task scores for text next to timings."""

import re
from collections import Counter

_WORD = re.compile(r"\w+|[^\w\s]")


def rouge1(text: str, reference: str) -> float:
    """Unigram F1 over words and signs (ROUGE-1, Lin 2004), in [0, 1].

    >>> rouge1("return a + b", "return a - b")
    0.75
    """
    ours, theirs = Counter(_WORD.findall(text)), Counter(_WORD.findall(reference))
    shared = sum((ours & theirs).values())
    total = sum(ours.values()) + sum(theirs.values())
    return 2 * shared / total if total else 0.0
