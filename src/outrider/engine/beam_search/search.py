"""Beam searches of several rows side by side, each an ordinary search that asks an oracle.

A row's search goes on for as many steps as its oracle can answer; then all rows that wait are
scored in one call, together with what a proposer guesses will be asked next.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outrider import ops
from outrider.drafters import DraftModel, Root
from outrider.drafters.draft_sampling import Tempered
from outrider.drafters.tree_drafting import inputs_for
from outrider.engine.batch import encoded, references
from outrider.engine.beam_search.lookahead import (
    CandidateSource,
    DraftedCandidates,
    LookaheadDepth,
    NoCandidates,
    OfferedCandidates,
)
from outrider.engine.beam_search.scorer import NARROW, Prefix, PrefixScorer, Shaper
from outrider.engine.beam_search.step import (
    DEAD,
    Beams,
    Close,
    FinishedBeam,
    Rules,
    State,
    Trail,
    patient_step,
    start,
    step,
)
from outrider.engine.request import Request, assign_adapters, check, source_ids
from outrider.errors import ConfigurationError
from outrider.models.prefill import inference
from outrider.row_params import SamplingRows, Shaping
from outrider.sampling import logits_processors, sampling_params
from outrider.sampling.sampling_params import SamplingParams, fresh_seed
from outrider.tree import chain
from outrider.types import Context, Drafter, Inputs, LanguageModel

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


# Requests to finished beams: what a search needs is made from the engine's own nouns.

# Penalties, bans and processors of a request in a beam search: on log-probabilities, as
# transformers applies them there, where sampling applies them to logits.


def shaper(
    settings: SamplingParams,
    prompt: Sequence[int],
    stops: Sequence[int],
    vocab: int,
    device: torch.device | str,
    end: int,
    source: Sequence[int] = (),
) -> Shaper | None:
    """What a request asks to be done to log-probabilities; None if it asks for nothing.

    `settings` are admitted (`logits_processors.validate`), `end` is the length at which texts end,
    `source` the ids that an encoder has read. A temperature above 0 means beams that are drawn:
    temperature and filters act then, too.
    """
    built = logits_processors.build(
        [settings], [prompt], [stops], vocab, device, ends=[end], sources=[source]
    )
    drawn = settings.temperature > 0
    if built is None and not drawn:
        return None
    plain, root = sampling_params.rows([settings], device), chain(0, device)

    @lru_cache(maxsize=4)
    def rows(count: int) -> tuple[SamplingRows, Shaping | None]:
        """The settings of so many beams."""
        every = [0] * count
        return plain.take(every), None if built is None else built.take(every)

    def shape(texts: Sequence[Prefix], logs_WV: Tensor) -> Tensor:
        own, many = rows(len(texts))
        logs_W1V = logs_WV[:, None]
        if many is not None:
            tokens_BL = torch.tensor([text.tokens() for text in texts], device=logs_WV.device)
            length = tokens_BL.shape[1]
            context = Context(
                tokens_BL, torch.full((len(texts),), length, device=logs_WV.device), length, own
            )
            logs_W1V = logits_processors.apply(logs_W1V, many, context, tokens_BL[:, -1:], root)
        if drawn:
            logs_W1V = _warped(logs_W1V, own, len(stops) + 1)
        return logs_W1V[:, 0]

    return shape


def _warped(logs_W1V: Tensor, rows: SamplingRows, least: int) -> Tensor:
    """At a temperature, without what filters leave out.

    The `least` best tokens stay in: a beam goes on whatever stop tokens it may end with.
    """
    laws = ops.warp(logs_W1V, rows)
    warped = logs_W1V * laws.inverse_temperature_B[:, None, None]
    if laws.floor_BR is None:
        return warped
    best_W1K = logs_W1V.topk(min(least, logs_W1V.shape[-1]), -1)[0]
    floor_W11 = torch.minimum(laws.floor_BR[..., None], best_W1K[..., -1:])
    return warped.masked_fill(logs_W1V < floor_W11, -torch.inf)


@dataclass(frozen=True)
class Searched:
    """Finished beams of each request, the best first, and what they took."""

    hypotheses: list[list[Hypothesis]]
    counts: SearchCounts
    seconds: float
    watched: list[Tensor | None]  #: the model's logits [V] behind each request's watched place


def search(
    target: LanguageModel,
    drafter: Drafter,
    requests: Sequence[Request],
    beams: Beams,
    settle: bool = True,
    pace: LookaheadDepth | None = None,
    draft_beams: int | None = None,
    observe: Observe | None = None,
) -> Searched:
    """Beam search of several requests side by side; `drafter` says what is scored ahead.

    The beams are those of an ordinary search, whatever the drafter. Requests with a temperature
    above 0 draw their beams (beam sampling). `settle`, `pace` and `observe` are those of
    `BeamSearch`; a draft model searches with `draft_beams` (None: as many as the target).

    Raises PromptError, CapacityError or ConfigurationError before any work is done.
    """
    admit(drafter)
    started = time.perf_counter()
    ahead = max(shape.max_nodes for shape in drafter.shapes)
    ready = prepared(target, requests, beams, ahead * (draft_beams or beams.num_beams))
    oracle, device = ready.oracle, torch.device(target.device)
    proposer: CandidateSource = NoCandidates()
    if isinstance(drafter, DraftModel):
        own = inputs_for(drafter.model, ready.inputs)
        roots = oracle.roots()
        prompts = [request.prompt for request in requests]
        small = PrefixScorer(drafter.model, prompts, oracle.capacity, own, ready.shapers, roots)
        proposer = DraftedCandidates(small, ready.rules, drafter.shapes[0].max_depth, draft_beams)
    elif not isinstance(drafter, Root):
        given = [request.reference for request in requests]
        copied = references(given, ready.inputs, target.vocab_size, device)
        proposer = OfferedCandidates(drafter, device, copied)
    places = [request.watched for request in requests]
    watched: list[Tensor | None] = [None] * len(requests)
    if any(place is not None for place in places):
        behind = oracle.behind(places)
        watched = [None if at is None else row for at, row in zip(places, behind, strict=True)]
    found = BeamSearch(oracle, ready.rules, proposer, settle, pace, observe)
    hypotheses = [row[: beams.num_return_sequences] for row in found.run()]
    return Searched(hypotheses, found.counts, time.perf_counter() - started, watched)


class Prepared(NamedTuple):
    """What a search needs of its requests."""

    oracle: PrefixScorer
    rules: list[Rules]
    shapers: list[Shaper | None]
    inputs: Inputs | None  #: all rows' as one, read by the encoder


def prepared(
    target: LanguageModel, requests: Sequence[Request], beams: Beams, ahead: int
) -> Prepared:
    """Requests checked and read; there is room for `ahead` texts scored ahead of the beams.

    Raises PromptError, CapacityError or ConfigurationError before any work is done.
    """
    reads = target.reads != "text"
    for number, request in enumerate(requests):
        check(request, number, target, reads)
    device = torch.device(target.device)
    prompts = [request.prompt for request in requests]
    stops = [request.limits.stop_ids for request in requests]
    asked = [request.sampling for request in requests]
    settings = logits_processors.validate(asked, prompts, stops, target.vocab_size, device)
    inputs = encoded(target, [r.source for r in requests if r.source is not None])
    shapers, rules = [], []
    for request, how in zip(requests, settings, strict=True):
        limit, _ = request.end(target.context)
        ids = request.limits.stop_ids
        source = source_ids(request.source)
        vocab = target.vocab_size
        shapers.append(shaper(how, request.prompt, ids, vocab, device, limit, source))
        drawn = None
        if how.temperature > 0:
            seed = fresh_seed() if how.seed is None else how.seed
            drawn = torch.Generator(device).manual_seed(seed % 2**63)
        rules.append(Rules(beams, len(request.prompt), limit, frozenset(ids), drawn=drawn))
    capacity = max(rule.prompt + beams.num_beams * (rule.limit - rule.prompt) for rule in rules)
    # what was scored ahead of a beam that goes on stays for as many steps
    capacity = target.width(capacity + 2 * ahead + 2 * NARROW)
    media = [request.media for request in requests]
    oracle = PrefixScorer(target, prompts, capacity, inputs, shapers, media=media)
    assign_adapters(oracle.cache, requests)
    return Prepared(oracle, rules, shapers, inputs)


def admit(drafter: Drafter) -> None:
    """Refuse a drafter that a search has no use for: ConfigurationError."""
    if not isinstance(drafter, DraftModel) and "model" in vars(drafter):
        raise ConfigurationError(
            f"a beam search runs a draft model ahead by a search of its own; got {drafter.name!r}; "
            "use the drafter 'draft_model', one without a model, or 'none'"
        )
    if drafter.aux_layers:
        raise ConfigurationError(
            f"a beam search hands on no states of its beams; got {drafter.name!r} with a head, "
            "which reads them; use another draft, or decode without beams"
        )
    if isinstance(drafter, Tempered):
        raise ConfigurationError(
            "beams are not drawn from a draft's law; got a draft with a temperature or filters of "
            f"its own, {drafter.warp}; leave them out"
        )
