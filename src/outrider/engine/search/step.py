"""One step of beam search: a function of the running beams and their log-probabilities alone.

The search of transformers 5.23 (`GenerationMixin._beam_search`), row by row: of all continuations
the best (1 + number of stop tokens) * num_beams are looked at; those among the first num_beams that
end are finished, their scores divided by length ** penalty; the best num_beams that do not end run
on. With patience it is the search of openai-whisper (`patient.py`). Which model calls the
log-probabilities came from is not its business.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.search.beams import Beams
from outrider.engine.search.prefix import Prefix

DEAD = -1.0e9  #: the score of a beam that is none


@dataclass(frozen=True)
class Rules:
    """A search's beams, and where its texts end.

    prompt  tokens of the prompt, which no length counts
    limit   tokens of prompt and text at which every text ends
    stops   stop tokens
    ends    further reasons to end, asked about a text that has just grown; None: there are none
    drawn   a generator: continuations are drawn, without replacement, from the law of all of them
            instead of taken from the best on (beam sampling); None: the best
    """

    beams: Beams
    prompt: int
    limit: int
    stops: frozenset[int] = frozenset()
    ends: Callable[[Prefix], bool] | None = None
    drawn: torch.Generator | None = None

    @property
    def candidates(self) -> int:
        """Continuations looked at in a step."""
        return max(2, 1 + len(self.stops)) * self.beams.num_beams


class Finished(NamedTuple):
    """A text that has ended, and its score."""

    score: float
    text: Prefix


class State(NamedTuple):
    """A search between two steps."""

    running: tuple[Prefix, ...]  #: num_beams texts of one length, the best first
    scores_W: Tensor  #: float32: their log-probabilities
    finished: tuple[Finished, ...] = ()  #: at most num_beams, the best first
    improvable: bool = True  #: whether a running beam may become better than a finished one
    over: bool = False
    margin: float = float("inf")  #: least gap so far between the last beam kept and the next one


def start(prompt: Prefix, rules: Rules, device: torch.device | str = "cpu") -> State:
    """The prompt as the only beam that counts."""
    width = rules.beams.num_beams
    scores_W = torch.full((width,), DEAD, device=device)
    scores_W[0] = 0
    return State((prompt,) * width, scores_W)


def ranked(state: State, logs_WV: Tensor, rules: Rules) -> tuple[Tensor, list[Prefix], float]:
    """The candidates: log-probabilities [C] with their texts, and how far the last one that may be
    kept is ahead of the next. The best first, or as they were drawn."""
    vocab = logs_WV.shape[1]
    total = (logs_WV + state.scores_W[:, None]).flatten()
    if rules.drawn is None:
        best_C, at_C = torch.topk(total, min(rules.candidates, total.numel()))
    else:
        at_C = torch.multinomial(torch.softmax(total, -1), rules.candidates, generator=rules.drawn)
        best_C = total[at_C]
    beams, tokens = (at_C // vocab).tolist(), (at_C % vocab).tolist()
    texts = [state.running[b].child(t) for b, t in zip(beams, tokens, strict=True)]
    alive = [
        score
        for score, text in zip(best_C.tolist(), texts, strict=True)
        if not _ends(text, rules) and score > DEAD / 2
    ]
    alive.sort(reverse=True)
    width = rules.beams.num_beams
    return best_C, texts, alive[width - 1] - alive[width] if len(alive) > width else float("inf")


def step(state: State, logs_WV: Tensor, rules: Rules) -> State:
    """The next state, from log-probabilities float32 [W, V] of the running beams.

    A beam of score `DEAD` is none: its row may hold anything finite.
    """
    width = rules.beams.num_beams
    best_C, texts, margin = ranked(state, logs_WV, rules)
    over = [_ends(text, rules) for text in texts]
    over_C = torch.tensor(over, device=best_C.device)

    alive_C = best_C + over_C.float() * DEAD
    kept = torch.topk(alive_C, width)[1]
    running, scores_W = tuple(texts[i] for i in kept.tolist()), alive_C[kept]
    length = texts[0].length - rules.prompt
    finished = _finish(state, best_C, texts, over, length, rules)

    full = len(finished) == width
    longest = length
    if rules.beams.early_stopping == "never" and rules.beams.length_penalty > 0:
        longest = rules.limit - rules.prompt
    possible = float(scores_W[0] / longest**rules.beams.length_penalty)
    improvable = state.improvable and possible > (finished[-1].score if full else DEAD)
    done = not improvable or (full and rules.beams.early_stopping is True) or all(over)
    return State(running, scores_W, finished, improvable, done, min(state.margin, margin))


def _ends(text: Prefix, rules: Rules) -> bool:
    if text.token in rules.stops or text.length >= rules.limit:
        return True
    return rules.ends is not None and rules.ends(text)


def _finish(
    state: State,
    best_C: Tensor,
    texts: list[Prefix],
    over: list[bool],
    length: int,
    rules: Rules,
) -> tuple[Finished, ...]:
    """The finished beams with those that end now: only the first num_beams candidates may."""
    width = rules.beams.num_beams
    full = len(state.finished) == width and rules.beams.early_stopping is True
    new = [at for at in range(min(width, len(texts))) if over[at]]
    if full or not state.improvable or not new:
        return state.finished
    final_C = (best_C / length**rules.beams.length_penalty).tolist()
    merged = [*state.finished, *(Finished(final_C[at], texts[at]) for at in new)]
    return tuple(sorted(merged, key=lambda one: -one.score)[:width])  # ties: who was first
