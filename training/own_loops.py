"""The loops a model really falls into: greedy text after prompts of the corpus.

A model loops on what it likes to say, not on any lines of the corpus, and so written loops alone
(`unloop.py`) do not teach it out of its own.
"""

from __future__ import annotations

import numpy as np
import torch

from training.model import Llama
from training.rollout import continue_text
from training.unloop import AT_LEAST, SEEN, Loops

PROMPT, WRITTEN = 64, 104  # tokens of the corpus, tokens the model writes after them
LENGTH = PROMPT + WRITTEN  # of a text
PERIODS = range(1, 49)  # tokens of what is said again


def own_loops(
    model: Llama, tokens: np.ndarray, newlines: np.ndarray, count: int, seed: int
) -> Loops:
    """Those of `count` greedy texts that loop, `[found, LENGTH]`."""
    rng = np.random.default_rng(seed)
    ends = [line_end(tokens, newlines, rng) for _ in range(count)]
    prompts = np.stack([tokens[end - PROMPT : end] for end in ends]).astype(np.int64)
    texts = continue_text(model, torch.from_numpy(prompts), WRITTEN, temperature=0).cpu()
    marks = torch.from_numpy(np.stack([first_copies(text) for text in texts.numpy()]))
    looping = marks.any(1)
    return Loops(texts[looping], marks[looping])


def line_end(tokens: np.ndarray, newlines: np.ndarray, rng: np.random.Generator) -> int:
    """A random place just behind a newline, with room for a prompt before it."""
    for _ in range(1000 if len(tokens) > 2 * PROMPT else 0):
        start = int(rng.integers(PROMPT, len(tokens) - PROMPT))
        found = np.flatnonzero(np.isin(tokens[start : start + PROMPT], newlines))
        if len(found):
            return start + int(found[0]) + 1
    raise SystemExit(
        f"found no line to write on from in a corpus of {len(tokens)} tokens; give more text or "
        "train without --unloop"
    )


def first_copies(text: np.ndarray) -> np.ndarray:
    """Marks the second and third copy of what is said three times or more behind the prompt.

    What loops in the end is pushed down from the second copy on: there it is easier to leave. A
    copy is marked from the token by which one can see that it is one.
    """
    places = np.arange(len(text))
    marks = np.zeros(len(text), dtype=bool)
    for period in PERIODS:
        same = np.zeros(len(text), dtype=bool)
        same[period:] = text[period:] == text[:-period]
        begun = np.maximum.accumulate(np.where(same, -1, places)) + 1
        # A few tokens may come some times in a row; it is a loop from the eighth on.
        seen = max(SEEN, AT_LEAST - period)
        for place in np.flatnonzero(places - begun == max(period, AT_LEAST) + SEEN):
            first = begun[place] + seen
            copies = slice(first, first + max(2 * period, AT_LEAST))
            marks[copies] |= same[copies]
    marks[:PROMPT] = False
    return marks
