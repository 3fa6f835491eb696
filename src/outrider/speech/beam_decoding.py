"""Windows by beam search, side by side: the best beam of each with its log-probabilities.

A beam's score counts what penalties and bans have left of the law without making it a law again.
Whether a text will do is judged as for other texts: by the law of what is allowed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.beam_search import Beams
from outrider.engine.beam_search.decode import search
from outrider.engine.beam_search.lookahead import LookaheadDepth
from outrider.engine.beam_search.step import State
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.stats import RequestStats


class Found(NamedTuple):
    """A window's best beam."""

    tokens: list[int]
    logprobs: list[float]  #: at temperature 1, of the law of what is allowed
    watched_V: Tensor | None  #: logits behind the watched place of the prompt
    stats: RequestStats


class _AllowedTokens:
    """For every step of every window, how probable all that is allowed was behind each beam."""

    def __init__(self, rows: int) -> None:
        self.steps: list[list[Tensor]] = [[] for _ in range(rows)]

    def __call__(self, row: int, state: State, logs_WV: Tensor) -> None:
        """Log-probabilities [W] of all that is allowed."""
        self.steps[row].append(torch.logsumexp(logs_WV, -1))

    def along(self, row: int, beams: Sequence[int]) -> list[float]:
        """Of the beams that a text went on from."""
        table = torch.stack(self.steps[row][: len(beams)]).tolist()
        return [line[beam] for line, beam in zip(table, beams, strict=True)]


def searched(
    engine: Engine, requests: Sequence[Request], beams: Beams, pace: LookaheadDepth
) -> list[Found]:
    """The best beam of each request. Calls are shared: each is told all of them as its steps.

    `pace` knows how far ahead it pays to score; it learns from one search for the next.
    """
    allowed = _AllowedTokens(len(requests))
    found = search(engine.target, engine.drafter, requests, beams, pace=pace, observe=allowed)
    done = []
    for row, (best, *_) in enumerate(found.hypotheses):
        stats = RequestStats(
            prompt_tokens=len(requests[row].prompt),
            new_tokens=len(best.token_ids),
            steps=found.counts.calls,
        )
        stats.seconds = found.seconds
        given = allowed.along(row, best.beams)
        logprobs = [own - all_ for own, all_ in zip(best.logprobs, given, strict=True)]
        done.append(Found(best.token_ids, logprobs, found.watched[row], stats))
    return done
