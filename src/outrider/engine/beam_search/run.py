"""Beam searches of several rows side by side, each an ordinary search that asks an oracle.

A row's search goes on for as many steps as its oracle can answer; then all rows that wait are
scored in one call, together with what a proposer guesses will be asked next.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.beam_search.candidate_sources import (
    CandidateSource,
    NoCandidates,
)
from outrider.engine.beam_search.lookahead import LookaheadDepth
from outrider.engine.beam_search.scorer import Prefix, PrefixScorer
from outrider.engine.beam_search.step import (
    DEAD,
    Close,
    FinishedBeam,
    Rules,
    State,
    Trail,
    patient_step,
    start,
    step,
)
from outrider.models.prefill import inference

#: Told of every step before it is taken: the row, its state, and log-probabilities [W, V].
Observe = Callable[[int, State, Tensor], None]


class Hypothesis(NamedTuple):
    """One finished beam."""

    token_ids: list[int]  #: without the prompt
    score: float  #: log-probability / length ** length_penalty
    beams: list[int]  #: for each token the place, among the beams that ran, of the one it went on
    logprobs: list[float]  #: of each token, as penalties and bans left it


@dataclass
class SearchCounts:
    """What a search took.

    calls   of the model         nodes  texts it scored
    slots   of a row's cache, the most that were in use at once
    steps   of all rows' searches; a row alone and without speculation makes a call for each
    close   of each row the last beam kept and the first one dropped, where they were closest: where
            the gap is smaller than the model's rounding, another order of sums may keep the other
    """

    calls: int = 0
    nodes: int = 0
    slots: int = 0
    steps: int = 0
    close: list[Close | None] = field(default_factory=list)

    @property
    def margin(self) -> list[float]:
        """Of each row how close they came."""
        return [float("inf") if one is None else one.margin for one in self.close]


class BeamSearch:
    """Searches of all rows of an oracle.

    rules       of each row
    proposer    what is scored ahead
    pace        how far ahead, call by call; None: as far as its own calls show that it pays
    settle      whether a beam that cannot win may go unscored: the same beams by fewer calls
    observe     told of every step; of beams that went unscored it sees no log-probabilities
    """

    def __init__(
        self,
        oracle: PrefixScorer,
        rules: Sequence[Rules],
        proposer: CandidateSource | None = None,
        settle: bool = False,
        pace: LookaheadDepth | None = None,
        observe: Observe | None = None,
    ) -> None:
        self.oracle, self.rules, self.settle = oracle, rules, settle
        self.observe = observe
        self.proposer = proposer or NoCandidates()
        self.pace = LookaheadDepth(self.proposer.depth) if pace is None else pace
        self.counts = SearchCounts()
        self._further = 0.0  # seconds of a step that needed no call of its own
        self.states = [
            start(root, rule, oracle.model.device)
            for root, rule in zip(oracle.roots(), rules, strict=True)
        ]

    @inference
    def run(self) -> list[list[Hypothesis]]:
        """All rows' finished beams, the best first."""
        waiting, ready, getting = self._advance(), False, 0.0
        self.pace.begin(max(rule.limit - rule.prompt for rule in self.rules))
        while waiting:
            rows, steps = len(waiting), self.counts.steps
            # the first call scores the prompt alone: it tells nothing of others
            depth = self.pace.depth(ready) if steps or not self.pace.adapts else self.pace.chosen
            started = time.perf_counter()
            if depth and not ready:
                self.proposer.ready()
                ready, getting = True, time.perf_counter() - started
            started = time.perf_counter()
            self._score(waiting, depth)
            waiting = self._advance()
            if steps:
                took = time.perf_counter() - started
                answered = max((self.counts.steps - steps) // rows, 1)
                self.pace.learn(depth, answered, took, rows * self._further, getting)
                getting = 0.0
        self.counts.calls, self.counts.nodes = self.oracle.calls, self.oracle.nodes
        self.counts.slots = self.oracle.slots
        self.counts.close = [state.close for state in self.states]
        return [
            [_told(one, rule) for one in state.finished]
            for rule, state in zip(self.rules, self.states, strict=True)
        ]

    def _advance(self) -> dict[int, list[Prefix]]:
        """Step every row as far as its oracle answers; what the others lack, by row."""
        waiting: dict[int, list[Prefix]] = {}
        took, further = 0.0, 0
        for row in range(len(self.states)):
            before = self.counts.steps
            while not self.states[row].over:
                started = time.perf_counter()
                state = self.states[row]
                missing = [
                    text
                    for text in dict.fromkeys(state.running)
                    if not self.oracle.knows(row, text)
                ]
                if missing and not (self.settle and settled(state, row, self)):
                    waiting[row] = missing
                    break
                logs = self.oracle.stacked(row, state.running)
                if self.observe is not None:
                    self.observe(row, state, logs)
                self.states[row] = advanced(state, logs, self.rules[row])
                if self.counts.steps > before:  # the first one may wait for the device
                    took, further = took + time.perf_counter() - started, further + 1
                self.counts.steps += 1
        self._further = took / further if further else 0.0
        return waiting

    def _score(self, waiting: dict[int, list[Prefix]], depth: int) -> None:
        for row in waiting:
            self.oracle.prune(row, self.states[row].running)
        ahead: dict[int, list[Prefix]] = {}
        if depth:
            ahead = self.proposer.propose({row: self.states[row] for row in waiting}, depth)
        wanted: list[list[Prefix]] = [[] for _ in self.states]
        for row, texts in waiting.items():
            room = max(self.oracle.room(row) - len(texts), 0)
            wanted[row] = texts + ahead.get(row, [])[:room]
        self.oracle.ask(wanted)


def _told(one: FinishedBeam, rules: Rules) -> Hypothesis:
    """A finished beam with what its trail says."""
    trail: Trail | None = one.trail
    beams, totals = [], []
    while trail is not None:
        beams.append(trail.beam)
        totals.append(trail.total)
        trail = trail.above
    beams, totals = beams[::-1], totals[::-1]
    logprobs = [b - a for a, b in zip([0.0, *totals], totals, strict=False)]
    return Hypothesis(one.text.tokens()[rules.prompt :], one.score, beams, logprobs)


def advanced(state: State, logs_WV: Tensor, rules: Rules) -> State:
    """The next state by the search that the beams ask for."""
    rule = step if rules.beams.patience is None else patient_step
    return rule(state, logs_WV, rules)


def settled(state: State, row: int, search: BeamSearch) -> bool:
    """Whether the next step is known although some running beams have not been scored.

    Log-probabilities are at most 0, so no continuation of a beam scores more than the beam. If
    num_beams continuations of the others that run on score more than the best beam that was not
    scored, its own cannot be among those kept, nor among the first num_beams that may finish.
    """
    rules, oracle = search.rules[row], search.oracle
    if state.running[0].length + 1 >= rules.limit or oracle.shaped(row):
        return False
    if rules.ends is not None or rules.drawn is not None:
        return False
    scores = state.scores_W.tolist()
    known = [at for at, text in enumerate(state.running) if oracle.knows(row, text)]
    if not known:
        return False
    most = max(scores[at] for at in range(len(scores)) if at not in known)
    totals: Tensor = torch.stack([oracle.logs(row, state.running[at]) for at in known])
    totals = totals + state.scores_W[known][:, None]
    totals[:, sorted(rules.stops)] = DEAD
    return int((totals > most).sum()) >= rules.beams.num_beams
