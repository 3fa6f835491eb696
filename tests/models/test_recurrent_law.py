"""The law of what models with states emit under drafts, each kind of mixer: exact enumeration.

Probabilities of all texts come from transformers' own whole forward over every prefix. What is
planted to be seen is what a state alone can get wrong: a rejected token that stays in it, and an
accepted path that is not moved to where the text goes on. They are planted where states of random
weights say much: of Mamba's and xLSTM's too little is heard in so few texts.
"""

from functools import lru_cache

import pytest
from recurrent_models import made, perturbed

from outrider import DraftModel, Engine, SamplingParams, testing, verifiers
from outrider.models import TreeDecoder, runner_of
from outrider.models.recurrent.states import RecurrentStates
from outrider.testing import text_law

VOCAB, PROMPT = 4, (1, 3, 2, 0, 3, 3, 1)
FEW, MANY, MOST = (3, 400), (3, 800), (4, 2000)  # tokens of a text, and how many texts
#: By mixer; attention layers stand between those of most.
KINDS = {
    "gated delta rule": ["qwen3_5_text", "qwen3_next", "kimi_linear"],
    "state-space dual": ["granitemoehybrid"],
    "selective scan": ["mamba"],
    "short convolution": ["lfm2"],
    "matrix memory": ["xlstm"],
}
DRAFTS = {"chain": ((1, 1, 1), "block"), "tree": ((2, 2), "traversal")}
QUICK = [("qwen3_5_text", "tree", 1.0, FEW), ("granitemoehybrid", "chain", 0.7, FEW)]
SEEN = 1e-9  #: chance under which a mistake has been seen


def exhaustive(*about):
    return pytest.param(*about, marks=pytest.mark.exhaustive)


@lru_cache(maxsize=2)
def models(kind):
    """A target and a draft model that agrees with it more or less."""
    model = made(kind, vocab_size=VOCAB)
    driven = [TreeDecoder(runner_of(one)(one)) for one in (model, perturbed(model, 0.3))]
    return model, *driven


def chance(kind, form, temperature, size):
    """Of the emitted texts under the target's law, and the run's statistics."""
    model, target, draft = models(kind)
    (length, rows), sampling = size, SamplingParams(temperature)
    law = text_law(model, PROMPT, length, sampling)
    assert float(law.sum()) == pytest.approx(1)
    counts, rule = DRAFTS[form]
    engine = Engine(target, DraftModel(draft, counts), verifiers.get(rule))
    found, run = testing.p_value(engine, law, PROMPT, length, rows, sampling)
    return found, run.stats


@pytest.mark.parametrize(
    ("kind", "form", "temperature", "size"),
    QUICK
    + [
        exhaustive(kind, form, temperature, MANY)
        for kinds in KINDS.values()
        for kind in kinds
        for form in DRAFTS
        for temperature in (1.0, 0.7)
    ],
)
def test_the_law_is_the_targets(kind, form, temperature, size):
    found, stats = chance(kind, form, temperature, size)
    assert found > 1e-3
    assert 0.2 < stats.accepted / stats.steps < 1.8  # drafts are accepted and rejected


def test_a_rejected_token_that_stays_in_the_state_is_caught(monkeypatch):
    """What is settled is applied with one entry more, whatever stood in that slot."""
    apply = RecurrentStates._apply

    def with_one_more(self, count_B):
        base_B = self.base_B[: self.rows] + count_B
        apply(self, count_B + 1)
        self.base_B[: self.rows] = base_B

    monkeypatch.setattr(RecurrentStates, "_apply", with_one_more)
    assert chance("granitemoehybrid", "chain", 1.0, FEW)[0] < SEEN


def test_an_accepted_path_that_is_not_moved_is_caught(monkeypatch):
    monkeypatch.setattr(RecurrentStates, "keep", lambda self, first_B, path_BD: None)
    assert chance("lfm2", "tree", 1.0, MOST)[0] < SEEN
