"""Requests to finished beams: what a search needs is made from the engine's own nouns."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outrider import ops
from outrider.drafters import DraftModel, Root
from outrider.drafters.draft_sampling import Tempered
from outrider.drafters.tree_drafting import inputs_for
from outrider.engine.batch import encoded, references
from outrider.engine.beam_search.candidate_sources import (
    CandidateSource,
    DraftedCandidates,
    NoCandidates,
    OfferedCandidates,
)
from outrider.engine.beam_search.lookahead import LookaheadDepth
from outrider.engine.beam_search.run import (
    BeamSearch,
    Hypothesis,
    Observe,
    SearchCounts,
)
from outrider.engine.beam_search.scorer import NARROW, Prefix, PrefixScorer, Shaper
from outrider.engine.beam_search.step import Beams, Rules
from outrider.engine.request import Request, check, source_ids, wear
from outrider.errors import ConfigurationError
from outrider.row_params import SamplingRows, Shaping
from outrider.sampling import logits_processors, sampling_params
from outrider.sampling.sampling_params import SamplingParams, fresh_seed
from outrider.tree import chain
from outrider.types import Context, Drafter, Inputs, LanguageModel

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
                tokens_BL,
                torch.full((len(texts),), length, device=logs_WV.device),
                length,
                own,
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
    wear(oracle.cache, requests)
    return Prepared(oracle, rules, shapers, inputs)


def admit(drafter: Drafter) -> None:
    """Refuse a drafter that a search has no use for: ConfigurationError."""
    if not isinstance(drafter, DraftModel) and "model" in vars(drafter):
        raise ConfigurationError(
            f"a beam search runs a draft model ahead by a search of its own; got {drafter.name!r}; "
            "use the drafter 'draft_model', one without a model, or 'root'"
        )
    if drafter.taps:
        raise ConfigurationError(
            f"a beam search hands on no states of its beams; got {drafter.name!r} with a head, "
            "which reads them; use another draft, or decode without beams"
        )
    if isinstance(drafter, Tempered):
        raise ConfigurationError(
            "beams are not drawn from a draft's law; got a draft with a temperature or filters of "
            f"its own, {drafter.warp}; leave them out"
        )
