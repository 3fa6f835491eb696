"""Every drafter on models that read a source: the text is plain decoding's, row by row."""

from functools import lru_cache

import pytest
import torch
from transformers import BartForCausalLM, WhisperForCausalLM

from outrider import (
    DraftModel,
    Engine,
    EngineRun,
    Root,
    SamplingParams,
    StopConditions,
    verifiers,
)
from outrider.engine.request import Request
from outrider.models import adapt
from outrider.testing import sources
from source_families import FAMILIES, encoder_decoder, encoder_decoders
from tiny import DRAFTERS, PROMPTS

MATCH = verifiers.get("match")
ROWS = 4
SAMPLED = [SamplingParams(1.0, seed=row) for row in range(ROWS)]
GREEDY = [SamplingParams(0)] * ROWS
#: The second row leaves first, and the last one takes its seat.
LIMITS = [StopConditions(14), StopConditions(5), StopConditions(11), StopConditions(9)]
#: What drafts in every family of the default run; the others draft for one.
SOME = ["reference_lookup", "coupled tree", "coupled dynamic tree"]
EVERY = ("whisper",)


def requests(family, settings, limits=LIMITS):
    target, _ = encoder_decoders(family)
    rows = zip(PROMPTS, settings, limits, sources(target, ROWS), strict=False)
    return [Request(prompt, how, end, source) for prompt, how, end, source in rows]


def told(engine, given, max_num_seqs):
    """Texts of requests that share so many rows."""
    run = EngineRun(engine, max_num_seqs, 128)
    run.submit_all(given)
    run.close()
    texts = [[] for _ in given]
    for block in run:
        texts[block.request_id] += block.token_ids
    return texts, run.stats


@lru_cache
def plain(family, sampled):
    """Each row alone, one token a step."""
    engine = Engine(encoder_decoders(family)[0], Root(), MATCH)
    given = requests(family, SAMPLED if sampled else GREEDY)
    return [told(engine, [request], 1)[0][0] for request in given]


def same(family, make, small=None):
    """Drafts of a drafter leave no trace: alone, three together, and four in two rows."""
    target, own = encoder_decoders(family)
    drafter = make(small or own)
    chain = all(shape.is_chain for shape in drafter.shapes)
    rules = [(GREEDY, None)]
    if verifiers.supports(MATCH, drafter.kinds, chain):
        rules.append((SAMPLED, MATCH))
    for settings, rule in rules:
        expected, engine = plain(family, rule is MATCH), Engine(target, drafter, rule)
        given = requests(family, settings)
        assert told(engine, given[:1], 1)[0] == expected[:1]
        assert told(engine, given[:3], 3)[0] == expected[:3]
        texts, stats = told(engine, given, 2)
        assert texts == expected
    return stats


def pairs(families):
    return [
        pytest.param(family, name, marks=() if quick else pytest.mark.slow)
        for family in families
        for name in DRAFTERS
        for quick in [family in EVERY or name in SOME]
    ]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("family", "name"), pairs(FAMILIES))
def test_text_is_plain_decodings(family, name):
    stats = same(family, DRAFTERS[name])
    if "coupled" in name:  # else the test would show nothing
        assert stats.mean_acceptance_length > 1.2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_depends_on_the_source(family):
    """Else no mistake with sources would be seen above."""
    target, _ = encoder_decoders(family)
    given = requests(family, SAMPLED, [StopConditions(14)] * ROWS)
    texts, _ = told(Engine(target, Root(), MATCH), given, ROWS)
    turned = [
        Request(request.prompt, request.sampling, request.limits, other.inputs)
        for request, other in zip(given, [*given[1:], given[0]], strict=True)
    ]
    others, _ = told(Engine(target, Root(), MATCH), turned, ROWS)
    assert sum(text != other for text, other in zip(texts, others, strict=True)) >= 3


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_sources_that_do_not_follow_their_rows_are_noticed(family, monkeypatch):
    target, _ = encoder_decoders(family)
    kept = type(target.open(1, 64, sources(target, 1)[0]).inputs)
    monkeypatch.setattr(kept, "take", lambda self, rows: self.narrow(len(rows)))
    engine = Engine(target, Root(), MATCH)
    assert told(engine, requests(family, SAMPLED), 3)[0] != plain(family, True)


def alone(family):
    """The draft model's decoder by itself, which takes the target's states."""
    model = encoder_decoder(family, 0.05)  # the draft model's weights
    made = {"bart": BartForCausalLM, "whisper": WhisperForCausalLM}[family]
    config = type(model.config)(**model.config.to_dict())
    decoder = made(config).eval()
    decoder.model.decoder.load_state_dict(model.model.decoder.state_dict())
    head = decoder.get_output_embeddings()
    head.weight = torch.nn.Parameter(model.get_output_embeddings().weight.detach().clone())
    return adapt(decoder)


@pytest.mark.parametrize("name", ["coupled chain", "coupled tree", "beam", "coupled dynamic tree"])
@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_decoders_that_draft_on_the_targets_states(family, name):
    stats = same(family, DRAFTERS[name], alone(family))
    if "coupled" in name:
        assert stats.mean_acceptance_length > 1.2


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_a_decoder_on_other_states_drafts_worse(family, monkeypatch):
    """The states that it is given are of use: with others less is accepted, of the same text."""
    target, _ = encoder_decoders(family)
    small, limits = alone(family), [StopConditions(40)] * ROWS
    drafter = DraftModel(small, (1, 1, 1), shared_noise=True)
    given = requests(family, SAMPLED, limits)
    texts, stats = told(Engine(target, drafter, MATCH), given, ROWS)
    keep = small.runner.reader.keep

    def strange(encoded):
        return keep(encoded._replace(states_BTE=encoded.states_BTE.flip(2)))

    monkeypatch.setattr(small.runner.reader, "keep", strange)
    others, less = told(Engine(target, drafter, MATCH), given, ROWS)
    assert others == texts
    assert less.accepted < 0.9 * stats.accepted
