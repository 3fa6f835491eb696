"""Certification of drafts with another tokenizer, and of mistakes in the mapping of their ids."""

import dataclasses

import pytest
import torch

from letters import DRAFT, TARGET, translated
from outrider import DraftModel, Engine, SamplingParams
from outrider.drafters import StringMatch, Translated
from outrider_lab.certify import Power, certify
from tiny import pair

POWER = Power(tokens=4096, samples=384, equality_tokens=96, new_tokens=16, rows=96, effect=0.06)
PROMPTS = [[3, 1, 4, 1, 5, 9 + i % 8, i % 23, 2, 6] for i in range(32)]


def engine(make, rule=None):
    target, small = pair(0.5)
    return Engine(target, make(translated(small)), rule)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda model: Translated(model, 3), "block"),
        (lambda model: DraftModel(model, (2, 2)), "traversal"),
        (lambda model: StringMatch(model, 3), "match"),
    ],
    ids=["chain", "tree", "strings"],
)
def test_translated_drafts_are_exact(make, rule):
    report = certify(engine(make, rule), PROMPTS, SamplingParams(1.0), POWER)
    assert report.verdict == "exact", report.as_dict()


@dataclasses.dataclass(frozen=True)
class Moved:
    """A chain whose tokens take other ids than the law that is declared: two orders of one set.

    The ids of common tokens in the order of the draft's vocabulary stand for those in the order of
    the target's.
    """

    drafter: DraftModel

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, memory, context, shape):
        draft = self.drafter.propose(memory, context, shape)
        common = sorted(set(TARGET) & set(DRAFT))
        order = torch.arange(len(TARGET))
        ours = [TARGET.index(token) for token in common]
        order[ours] = torch.tensor(sorted(ours)).roll(1)
        return draft._replace(
            tokens_BN=torch.cat([draft.tokens_BN[:, :1], order[draft.tokens_BN[:, 1:]]], 1)
        )


def test_ids_that_change_places_are_flagged():
    wrong = engine(lambda model: Moved(DraftModel(model, (1,))), "rejection")
    report = certify(wrong, PROMPTS, SamplingParams(1.0), POWER)
    assert report.verdict == "not exact", report.as_dict()
