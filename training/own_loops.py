"""The loops a model really falls into: greedy text after prompts of the corpus.

A model loops on what it likes to say, not on any lines of the corpus, and so written loops alone
(`unloop.py`) do not teach it out of its own. Pushed down are not all tokens of a loop but those at
which the model saw alternatives: pushed off the middle of a word it says another word, and a
strange one, and goes on with the loop.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from training.model import Llama
from training.rollout import continue_text
from training.unloop import GRAM, Loops, loops

PROMPT, WRITTEN = 64, 160  # tokens of the corpus, tokens the model writes after them
LENGTH = PROMPT + WRITTEN  # of a text
LEAST_CERTAIN = 1 / 3  # share of the repeated tokens that are pushed down
ROWS = 16  # texts read at once


def own_loops(
    model: Llama, tokens: np.ndarray, newlines: np.ndarray, count: int, seed: int
) -> Loops:
    """Those of `count` greedy texts that loop, `[found, LENGTH]`."""
    rng = np.random.default_rng(seed)
    ends = [line_end(tokens, newlines, rng) for _ in range(count)]
    prompts = np.stack([tokens[end - PROMPT : end] for end in ends]).astype(np.int64)
    texts = continue_text(model, torch.from_numpy(prompts), WRITTEN, temperature=0).cpu()
    texts = texts[[loops(text[PROMPT:].tolist()) for text in texts]]
    if not len(texts):
        return Loops(texts, torch.zeros_like(texts, dtype=torch.bool))
    marks = torch.tensor([repeated(text.tolist()) for text in texts]).view(texts.shape).bool()
    return Loops(texts, marks & least_certain(certainty(model, texts), marks))


@torch.no_grad()
def certainty(model: Llama, texts: Tensor) -> Tensor:
    """The model's probability of each token after those before it, `[rows, length]`."""
    found = torch.ones(texts.shape)
    for first in range(0, len(texts), ROWS):
        # Always as many rows, the first ones again at the end: other shapes would be compiled anew.
        rows = torch.arange(first, first + ROWS) % len(texts)
        part = texts[rows]
        probs = model(part[:, :-1].to(model.cos.device)).float().softmax(-1).cpu()
        found[rows, 1:] = probs.gather(-1, part[:, 1:, None])[..., 0]
    return found


def least_certain(certain: Tensor, marks: Tensor) -> Tensor:
    """The tokens of each row that are no likelier than `LEAST_CERTAIN` of its marked ones."""
    among = certain.masked_fill(~marks, torch.nan)
    return certain <= among.nanquantile(LEAST_CERTAIN, dim=1, keepdim=True)


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


def repeated(text: list[int]) -> list[bool]:
    """Whether a token behind the prompt ends a 4-gram that was written before."""
    seen: set[tuple[int, ...]] = set()
    marks = [False] * len(text)
    for end in range(PROMPT + GRAM, len(text) + 1):
        gram = tuple(text[end - GRAM : end])
        marks[end - 1] = gram in seen
        seen.add(gram)
    return marks
