"""One step of beam search: a function of the running beams and their log-probabilities alone.

The search of transformers 5.23 (`GenerationMixin._beam_search`), row by row: of all continuations
the best (1 + number of stop tokens) * num_beams are looked at; those among the first num_beams that
end are finished, their scores divided by length ** penalty; the best num_beams that do not end run
on. With patience it is the search of openai-whisper (`patience.py`). Which model calls the
log-probabilities came from is not its business.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from outrider import arguments
from outrider.engine.beam_search.scorer import Prefix
from outrider.errors import ConfigurationError

# What is asked of a beam search: its width, how finished beams are compared, when it ends.


@dataclass(frozen=True)
class Beams:
    """A beam search as transformers defines it; with `patience`, as openai-whisper does.

    num_beams             beams kept in every step
    length_penalty        a finished beam's score is its log-probability / length ** penalty: above
                          0 longer beams win more often, below 0 shorter ones
    early_stopping        when a search ends, once `num_beams` beams are finished. False: when the
                          best running beam, as it is now, is no better than the worst of them;
                          True: at once; "never": when no running beam could become better at any
                          length
    num_return_sequences  how many of the finished beams are returned, the best first
    patience              None: ends as `early_stopping` says. A number: every beam that ends ahead
                          of num_beams better ones that go on is finished, and the search ends once
                          round(num_beams * patience) are (Kasai et al. 2022); stop tokens do not
                          count in the length then. openai-whisper and CTranslate2 have 1.0

    Raises ConfigurationError for values of another kind.

    >>> Beams(5).length_penalty
    1.0
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    patience: float | None = None

    def __post_init__(self) -> None:
        counts = {"num_beams": self.num_beams, "num_return_sequences": self.num_return_sequences}
        for name, given in counts.items():
            count = arguments.whole(name, given, "give at least 1", least=1)
            object.__setattr__(self, name, count)
        if self.num_return_sequences > self.num_beams:
            raise ConfigurationError(
                "no more sequences can be returned than there are beams; got "
                f"num_return_sequences={self.num_return_sequences} for num_beams={self.num_beams}; "
                "raise num_beams"
            )
        what, do = "a finite number", "leave it out for 1.0"
        penalty = arguments.number("length_penalty", self.length_penalty, what, do)
        if not math.isfinite(penalty):
            arguments.refuse("length_penalty", what, self.length_penalty, do)
        object.__setattr__(self, "length_penalty", penalty)
        if self.early_stopping is not True and self.early_stopping not in (False, "never"):
            what = "True, False or 'never'"
            arguments.refuse("early_stopping", what, self.early_stopping, "leave it out for False")
        if self.patience is None:
            return
        what, do = "a number above 0", "leave it out, or use 1.0 as openai-whisper does"
        patience = arguments.number("patience", self.patience, what, do)
        if not 0 < patience < math.inf or round(self.num_beams * patience) < 1:
            arguments.refuse("patience", what, self.patience, do)
        if self.early_stopping is not False:
            raise ConfigurationError(
                "patience says when the search ends, and so does early_stopping; got "
                f"patience={patience} and early_stopping={self.early_stopping!r}; leave one out"
            )
        object.__setattr__(self, "patience", patience)


DEAD = -1.0e9  #: the score of a beam that is none
_POWER = 60.0  #: of e: float32 holds a log-probability by it
BLOCK = 64  #: values of a block in `largest`


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

    def __post_init__(self) -> None:
        longest, power = max(self.limit - self.prompt, 1), self.beams.length_penalty
        if abs(power) * math.log(longest) > _POWER:
            what = f"a number to whose power {longest} tokens are below {math.exp(_POWER):.0e}"
            arguments.refuse("length_penalty", what, power, "1.0 is usual, 0 compares no lengths")

    @property
    def candidates(self) -> int:
        """Continuations looked at in a step."""
        return max(2, 1 + len(self.stops)) * self.beams.num_beams


class Trail(NamedTuple):
    """How a beam came about, back to the prompt: in each step, the beam that went on."""

    above: "Trail | None"  #: of that beam
    beam: int  #: its place among those that ran
    total: float  #: the text's log-probability with this step's token


class FinishedBeam(NamedTuple):
    """A text that has ended, and its score."""

    score: float
    text: Prefix
    trail: Trail


class Close(NamedTuple):
    """The last beam that was kept in a step and the first one that was not."""

    margin: float  #: by how much the one was better
    kept: Prefix
    dropped: Prefix


class State(NamedTuple):
    """A search between two steps."""

    running: tuple[Prefix, ...]  #: num_beams texts of one length, the best first
    scores_W: Tensor  #: float32: their log-probabilities
    trails: tuple[Trail | None, ...]  #: how they came about; None: they are the prompt
    finished: tuple[FinishedBeam, ...] = ()  #: at most num_beams, the best first
    improvable: bool = True  #: whether a running beam may become better than a finished one
    over: bool = False
    close: Close | None = None  #: where they were closest so far; None: none was dropped


def start(prompt: Prefix, rules: Rules, device: torch.device | str = "cpu") -> State:
    """The prompt as the only beam that counts."""
    width = rules.beams.num_beams
    scores_W = torch.full((width,), DEAD, dtype=torch.float32, device=device)
    scores_W[0] = 0
    return State((prompt,) * width, scores_W, (None,) * width)


class Candidates(NamedTuple):
    """Continuations of the running beams, the best first, or as they were drawn."""

    totals_C: Tensor  #: their log-probabilities
    texts: list[Prefix]
    trails: list[Trail]
    over: list[bool]  #: which of them have ended
    order: list[int]  #: those that go on, the best first, then those that do not
    close: Close | None  #: the state's, or this step's if that is closer


def ranked(state: State, logs_WV: Tensor, rules: Rules) -> Candidates:
    """The continuations that are looked at."""
    vocab = logs_WV.shape[1]
    total = (logs_WV + state.scores_W[:, None]).flatten()
    if rules.drawn is None:
        best_C, at_C = largest(total, min(rules.candidates, total.numel()))
    else:
        at_C = torch.multinomial(torch.softmax(total, -1), rules.candidates, generator=rules.drawn)
        best_C = total[at_C]
    scores, texts, trails = best_C.tolist(), [], []
    for at, score in zip(at_C.tolist(), scores, strict=True):
        beam, token = divmod(at, vocab)
        texts.append(state.running[beam].child(token))
        trails.append(Trail(state.trails[beam], beam, score))
    over = [_ends(text, rules) for text in texts]
    order = sorted(range(len(over)), key=lambda at: (over[at], -scores[at]))
    alive = [at for at in order if not over[at] and scores[at] > DEAD / 2]
    width, close = rules.beams.num_beams, state.close
    if len(alive) > width:
        kept, dropped = alive[width - 1], alive[width]
        margin = scores[kept] - scores[dropped]
        if close is None or margin < close.margin:
            close = Close(margin, texts[kept], texts[dropped])
    return Candidates(best_C, texts, trails, over, order, close)


def largest(values_N: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of many values, the largest first, and their places.

    They lie in the `count` blocks whose own largest values are largest: of a vocabulary's values
    nearly all are only compared with their block's.

    >>> largest(torch.tensor([3.0, 9.0, 5.0]), 2)[1].tolist()
    [1, 2]
    """
    blocks = values_N.shape[0] // BLOCK
    if blocks <= count:
        return torch.topk(values_N, count)
    whole = blocks * BLOCK
    most_b = values_N[:whole].view(BLOCK, blocks).amax(0)
    first_C = torch.topk(most_b, count)[1]
    steps = torch.arange(0, whole, blocks, device=values_N.device)
    rest = torch.arange(whole, values_N.shape[0], device=values_N.device)
    at = torch.cat([(first_C[:, None] + steps).flatten(), rest])
    best_C, place_C = torch.topk(values_N[at], count)
    return best_C, at[place_C]


def step(state: State, logs_WV: Tensor, rules: Rules) -> State:
    """The next state, from log-probabilities float32 [W, V] of the running beams.

    A beam of score `DEAD` is none: its row may hold anything finite.
    """
    width = rules.beams.num_beams
    found = ranked(state, logs_WV, rules)
    kept = found.order[:width]
    scores_W = found.totals_C[kept]
    if found.over[kept[-1]]:  # fewer go on than there are beams: the others are none
        scores_W += DEAD * scores_W.new_tensor([found.over[at] for at in kept])
    length = found.texts[0].length - rules.prompt
    finished = _finish(state, found, length, rules)

    full = len(finished) == width
    longest = length
    if rules.beams.early_stopping == "never" and rules.beams.length_penalty > 0:
        longest = rules.limit - rules.prompt
    possible = float(scores_W[0] / longest**rules.beams.length_penalty)
    improvable = state.improvable and possible > (finished[-1].score if full else -math.inf)
    done = not improvable or (full and rules.beams.early_stopping is True) or all(found.over)
    return State(
        tuple(found.texts[at] for at in kept),
        scores_W,
        tuple(found.trails[at] for at in kept),
        finished,
        improvable,
        done,
        found.close,
    )


def _ends(text: Prefix, rules: Rules) -> bool:
    if text.token in rules.stops or text.length >= rules.limit:
        return True
    return rules.ends is not None and rules.ends(text)


def _finish(state: State, found: Candidates, length: int, rules: Rules) -> tuple[FinishedBeam, ...]:
    """The finished beams with those that end now: only the first num_beams candidates may."""
    width = rules.beams.num_beams
    full = len(state.finished) == width and rules.beams.early_stopping is True
    new = [at for at in range(min(width, len(found.over))) if found.over[at]]
    if full or not state.improvable or not new:
        return state.finished
    final = (found.totals_C / length**rules.beams.length_penalty).tolist()
    ended = [FinishedBeam(final[at], found.texts[at], found.trails[at]) for at in new]
    merged = [*state.finished, *ended]
    return tuple(sorted(merged, key=lambda one: -one.score)[:width])  # ties: who was first


def patient_step(state: State, logs_WV: Tensor, rules: Rules) -> State:
    """`step` with patience (Kasai et al. 2022), as openai-whisper counts it: [W, V] to a state.

    Candidates are ranked together; those that end before num_beams that go on have been met are
    finished, and the search ends once round(num_beams * patience) are. Running beams fill what is
    missing at the limit.
    """
    width, wanted = rules.beams.num_beams, _enough(rules)
    best_C, texts, trails, _, _, close = ranked(state, logs_WV, rules)
    scores = best_C.tolist()
    running: list[int] = []
    ended: list[FinishedBeam] = []
    for at, text in enumerate(texts):
        if len(running) == width:
            break
        if text.token in rules.stops or (rules.ends is not None and rules.ends(text)):
            ended.append(FinishedBeam(_final_score(scores[at], text, rules, 1), text, trails[at]))
        else:
            running.append(at)
    room = max(wanted - len(state.finished), 0)
    finished = [*state.finished, *ended[:room]]
    over = len(finished) >= wanted or texts[0].length >= rules.limit
    if over and len(finished) < width:
        alive = [at for at in running if scores[at] > DEAD / 2]
        fill = [
            FinishedBeam(_final_score(scores[at], texts[at], rules, 0), texts[at], trails[at])
            for at in alive
        ]
        finished += fill[: width - len(finished)]
    if over:
        finished.sort(key=lambda one: -one.score)
    places = running + running[-1:] * (width - len(running))
    scores_W = best_C.new_full((width,), DEAD)
    scores_W[: len(running)] = best_C[running]
    return State(
        tuple(texts[at] for at in places),
        scores_W,
        tuple(trails[at] for at in places),
        tuple(finished),
        True,
        over,
        close,
    )


def _enough(rules: Rules) -> int:
    """Finished beams at which the search ends."""
    assert rules.beams.patience is not None
    return round(rules.beams.num_beams * rules.beams.patience)


def _final_score(score: float, text: Prefix, rules: Rules, stops: int) -> float:
    """The score of a text of which `stops` tokens count in no length."""
    length = max(text.length - rules.prompt - stops, 1)
    return float(score / length**rules.beams.length_penalty)
