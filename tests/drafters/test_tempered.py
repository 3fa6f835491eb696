"""A draft with a temperature and filters of its own: acceptance moves, the law stays."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch

from outrider import (
    ConfigurationError,
    DraftModel,
    Engine,
    SamplingParams,
    StopConditions,
    ops,
    verifiers,
)
from outrider.drafters import DrafterParts, DraftOptions, make
from outrider.drafters.draft_sampling import Tempered, Warp
from outrider.drafters.ngram_table import count
from outrider.engine import step
from outrider.engine.beam_search import Beams
from outrider.engine.beam_search.search import search
from outrider.engine.request import Request
from outrider.sampling import sampling_params
from outrider.testing import SETTINGS, Case, checks, p_value, text_law
from tiny import PROMPTS, begun, decode, llama, pair

SMALL, LENGTH, PROMPT, ROWS = 5, 2, (1, 3, 2), 2000
SHARP = Warp(temperature=0.5, top_k=3)


@lru_cache
def law(temperature=1.0):
    return text_law(llama(vocab_size=SMALL), PROMPT, LENGTH, SamplingParams(temperature))


@dataclass(frozen=True)
class Hidden:
    """Draws under a warp and declares the rows' own law."""

    drafter: Any

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, memory, context, shape):
        draft = self.drafter.propose(memory, context, shape)
        inverse = context.sampling.inverse_temperature_B
        laws = draft.laws._replace(inverse_temperature_B=inverse, floor_BR=None, lse_BR=None)
        return draft._replace(laws=laws)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("counts", [(1, 1), (2, 1)])
def test_the_law_stays_the_targets(rule, counts):
    target, small = pair(0.4, SMALL)
    if not verifiers.supports(verifiers.get(rule), DraftModel(small).kinds, counts == (1, 1)):
        pytest.skip(f"{rule} verifies chains alone")
    drafter = Tempered(DraftModel(small, counts), SHARP)
    engine = Engine(target, drafter, verifiers.get(rule))
    assert p_value(engine, law(), PROMPT, LENGTH, ROWS)[0] > 1e-4


def test_a_warp_that_is_not_declared_is_caught():
    target, small = pair(0.4, SMALL)
    engine = Engine(target, Hidden(Tempered(DraftModel(small, (1, 1)), SHARP)))
    assert p_value(engine, law(), PROMPT, LENGTH, ROWS)[0] < 1e-12


def test_acceptance_is_the_overlap_with_the_warped_law():
    """At a target's temperature of 1.5 a draft of its own weights accepts all; a colder one less.

    The overlap that a run tells is sum min(p, q) with q the draft's law at its own temperature.
    """
    target, _ = pair(0.4)
    how = [SamplingParams(1.5, seed=row) for row in range(len(PROMPTS))]

    def alpha(temperature):
        drafter = DraftModel(target, (1,))
        if temperature is not None:
            drafter = Tempered(drafter, Warp(temperature=temperature))
        stats = decode(Engine(target, drafter), PROMPTS, how, StopConditions(40))[1].stats
        return stats.overlap / stats.overlaps

    assert alpha(None) == pytest.approx(1, abs=1e-4)
    assert alpha(1.5) == pytest.approx(1, abs=1e-4)
    assert alpha(0.5) < alpha(1.0) < 0.97


def test_the_declared_law_is_the_drafts_at_its_own_temperature_and_filters():
    _, small = pair(0.4)
    drafter = Tempered(DraftModel(small, (1,)), SHARP)
    how = [SamplingParams(0), SamplingParams(0.9, top_p=0.7, seed=1), SamplingParams(1.3, seed=2)]
    state = begun(small, drafter, PROMPTS[:3], how)
    draft = step.propose(drafter, state)
    bare = step.score(small, state, draft).laws.logits_BRV[1:, :1]
    expected = ops.warp(
        bare, sampling_params.rows([SamplingParams(0.5, top_k=3, top_p=0.7), how[2]])
    )
    expected = expected._replace(
        inverse_temperature_B=torch.full((2,), 2.0), floor_BR=floors(bare, how[1:])
    )
    torch.testing.assert_close(ops.probs(draft.laws)[1:, :1], ops.probs(expected))
    assert draft.kind_BNK[0, 0, 0] == 0
    assert (ops.probs(draft.laws)[1:] > 0).sum(-1).max() <= 3


def floors(logits, how):
    """Filters of each row with the temperature and top_k of the draft."""
    own = [SamplingParams(0.5, top_k=3, top_p=row.top_p, min_p=row.min_p) for row in how]
    return ops.floors(logits, sampling_params.rows(own))


def test_greedy_text_and_matched_text_stay():
    target, small = pair(0.4)
    drafter = Tempered(DraftModel(small, (2, 1)), SHARP)
    for how, rule in (
        (SamplingParams(0), None),
        (SamplingParams(0.9, seed=4), verifiers.get("match")),
    ):
        expected = decode(Engine(target, make("none", DrafterParts()), rule), PROMPTS, how)[0]
        assert decode(Engine(target, drafter, rule), PROMPTS, how)[0] == expected


@pytest.mark.parametrize("name", ["draft_model", "beam", "paths", "hub_tree", "ngram_table"])
def test_every_drafter_with_a_law_takes_them_by_name(name):
    small = pair(0.4)[1]
    parts = DrafterParts((small,), count([0, 1, 2, 3] * 4, small.vocab_size), small.vocab_size)
    if name == "ngram_table":
        parts = parts._replace(models=())
    else:
        parts = parts._replace(table=None)
    made = make(name, parts, DraftOptions(own={"temperature": 0.7, "min_p": 0.1}))
    assert made.name == name
    assert made.warp == Warp(temperature=0.7, min_p=0.1)
    assert make(name, parts) == made.drafter


@pytest.mark.parametrize(
    ("name", "own", "what"),
    [
        ("draft_model", {"temperature": 0}, "draft's temperature must be above 0"),
        ("draft_model", {"temperature": "hot"}, "temperature must be"),
        ("draft_model", {"top_k": -1}, "top_k must be"),
        ("draft_model", {"heat": 2}, r"no use for heat.*temperature, top_k, top_p, min_p"),
        ("prompt_lookup", {"temperature": 0.5}, r"no use for temperature.*beam, .*paths"),
    ],
)
def test_what_cannot_be_is_refused(name, own, what):
    parts = DrafterParts((pair()[1],) if name == "draft_model" else ())
    with pytest.raises(ConfigurationError, match=what):
        make(name, parts, DraftOptions(own=own))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("setting", SETTINGS)
def test_it_runs_without_device_reads_and_rows_come_and_go(setting):
    case = Case(lambda model: Tempered(DraftModel(model, (2, 1)), Warp(0.7, 9, 0.8, 0.01)), setting)
    checks.verbs_read_no_device_value(case)
    checks.rows_come_and_go(case)


def test_a_beam_search_has_no_use_for_them():
    target, small = pair()
    with pytest.raises(ConfigurationError, match="beams are not drawn"):
        search(target, Tempered(DraftModel(small), SHARP), [Request(PROMPTS[0])], Beams(2))
