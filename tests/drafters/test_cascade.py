"""A draft of a draft draws the chain that its model draws alone, in fewer calls."""

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
    verifiers,
)
from outrider.drafters import DrafterParts, make
from outrider.engine import step
from outrider.testing import Case, checks, p_value, text_law
from outrider_lab.drafters.cascade import Cascade, Smaller
from tiny import PROMPTS, begun, decode, llama, pair

DEPTH = 5
SETTINGS = {
    "greedy": [SamplingParams(0)] * 3,
    "sampled": [SamplingParams(1.0, seed=row) for row in range(3)],
    "mixed": [
        SamplingParams(0),
        SamplingParams(0.8, top_k=7, seed=1, repetition_penalty=1.3),
        SamplingParams(1.2, top_p=0.9, no_repeat_ngram_size=2, seed=2),
    ],
}


class Counted:
    """A model that counts its calls."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.model.forward(*args, **kwargs)


def guessers(small):
    """Copies, a model that is always right, and one that is seldom right."""
    return {"copies": None, "itself": Smaller(small), "another": Smaller(pair(0.9)[1])}


def cascade(small, guesser, depth=DEPTH, guesses=3):
    made = guessers(small)[guesser]
    sizes = {"num_speculative_tokens": depth, "guesses": guesses}
    return Cascade(small, **sizes) if made is None else Cascade(small, made, **sizes)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("guesser", ["copies", "itself", "another"])
def test_the_chain_is_the_one_that_the_draft_model_draws_alone(guesser, settings):
    """Token by token and law by law, over several steps of rows that advance at their own pace."""
    target, small = pair(0.4)
    alone, drafter = DraftModel(small, (1,) * DEPTH), cascade(small, guesser)
    rule = verifiers.default(drafter.kinds, True)
    states = [begun(target, made, PROMPTS[:3], SETTINGS[settings]) for made in (alone, drafter)]
    for _ in range(4):
        drafts = []
        for at, made in enumerate((alone, drafter)):
            draft = step.propose(made, states[at])
            scores = step.score(target, states[at], draft)
            verdict = step.verify(rule, states[at], draft, scores)
            states[at], _ = step.commit(target, made, states[at], draft, scores, verdict)
            drafts.append(draft)
        one, other = drafts
        assert one.tokens_BN.tolist() == other.tokens_BN.tolist()
        assert (one.draws_BNK == other.draws_BNK).all()
        if one.laws is None:
            assert other.laws is None
            continue
        for row in range(3):
            for node in range(DEPTH):
                places = [int(draft.row_BNK.expand(3, -1, -1)[row, node, 0]) for draft in drafts]
                laws = [
                    law_of(draft.laws, row, place)
                    for draft, place in zip(drafts, places, strict=True)
                ]
                assert (places[0] < 0) == (places[1] < 0)
                if places[0] >= 0:
                    torch.testing.assert_close(laws[0], laws[1], atol=1e-5, rtol=0)


def law_of(laws, row, place):
    """[V] of one law row."""
    logits = laws.logits_BRV[row, place].float()
    if laws.floor_BR is not None:
        logits = logits.masked_fill(logits < laws.floor_BR[row, place], -torch.inf)
    return (logits * laws.inverse_temperature_B[row]).softmax(-1)


def calls(guesser, sampling, depth=DEPTH, guesses=3):
    """Calls of the draft model for each step, after the prompt."""
    target, small = pair()
    counted = Counted(small)
    made = guessers(small)[guesser]
    sizes = {"num_speculative_tokens": depth, "guesses": guesses}
    drafter = Cascade(counted, **sizes) if made is None else Cascade(counted, made, **sizes)
    prompt = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]
    _, run = decode(Engine(target, drafter), [prompt], sampling, StopConditions(60))
    return (counted.calls - 1) / run.stats.steps


@pytest.mark.parametrize(
    "sampling", [SamplingParams(0), SamplingParams(1.0, seed=3)], ids=["greedy", "drawn"]
)
def test_right_guesses_leave_as_few_calls_as_there_can_be(sampling):
    """Every call brings its guesses and one token more; this shows in what is in the caches."""
    assert calls("itself", sampling, depth=8, guesses=3) == pytest.approx(2)
    assert calls("itself", sampling, depth=5, guesses=4) == pytest.approx(1)


def test_copies_and_other_models_leave_fewer_calls_than_tokens():
    assert calls("copies", SamplingParams(0)) < DEPTH - 0.2
    assert calls("another", SamplingParams(0)) < DEPTH


def test_on_a_device_chains_end_where_half_as_many_calls_have_come(monkeypatch):
    """The same laws and tokens as far as they go: nothing looks at a token to be drawn."""
    target, small = pair(0.4)
    drafter = cascade(small, "another", depth=6, guesses=2)
    whole = step.propose(drafter, begun(target, drafter, PROMPTS[:3], SETTINGS["sampled"]))
    state = begun(target, drafter, PROMPTS[:3], SETTINGS["sampled"])
    monkeypatch.setattr("outrider_lab.drafters.cascade.on_host", lambda tensor: False)
    cut = step.propose(drafter, state)
    sizes = (cut.draws_BNK[..., 0] >= 0).sum(1).tolist()
    assert all(3 <= size <= 6 for size in sizes)
    for row, size in enumerate(sizes):
        found, full = (draft.tokens_BN[row, : size + 1].tolist() for draft in (cut, whole))
        assert found == full


@pytest.mark.parametrize("setting", ["sampled", "mixed"])
def test_a_smaller_model_reads_no_device_value_and_rows_come_and_go(setting):
    case = Case(lambda model: Cascade(model, Smaller(model), 4, 2), setting)
    checks.verbs_read_no_device_value(case)
    checks.rows_come_and_go(case)


VOCAB, LENGTH, PROMPT = 5, 3, (1, 3, 2, 1, 3)


@lru_cache
def law():
    return text_law(llama(vocab_size=VOCAB), PROMPT, LENGTH)


@dataclass(frozen=True)
class Leaky:
    """Leaves out the token that was not guessed: it is drawn and then not declared."""

    drafter: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, memory, context, shape):
        draft = self.drafter.propose(memory, context, shape)
        last = (draft.tokens_BN[:, 1:] == draft.tokens_BN[:, :-1]).any(1)
        keep = torch.where(last[:, None, None], draft.draws_BNK, -1)
        return draft._replace(draws_BNK=keep)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("device", [False, True], ids=["host", "as on a device"])
def test_the_law_is_the_targets(rule, device, monkeypatch):
    target, small = pair(0.4, VOCAB)
    if device:
        monkeypatch.setattr("outrider_lab.drafters.cascade.on_host", lambda tensor: False)
    inner = Smaller(pair(0.9, VOCAB)[1])
    drafter = Cascade(small, inner, num_speculative_tokens=3, guesses=2)
    engine = Engine(target, drafter, verifiers.get(rule))
    assert p_value(engine, law(), PROMPT, LENGTH, 1500)[0] > 1e-4


def test_tokens_that_are_left_out_for_what_they_are_are_caught():
    target, small = pair(0.4, VOCAB)
    drafter = Leaky(Cascade(small, num_speculative_tokens=1, guesses=1))
    assert p_value(Engine(target, drafter), law(), PROMPT, LENGTH, 1500)[0] < 1e-6


def test_more_than_two_models_are_refused():
    small = pair()[1]
    assert isinstance(make("cascade", DrafterParts((small, small))).guesser, Smaller)
    with pytest.raises(ConfigurationError, match="at most one smaller one; got 3 models"):
        make("cascade", DrafterParts((small,) * 3))
