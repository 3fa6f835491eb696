"""A sampled row's text is the one that it writes alone, whatever its neighbours are drafted."""

import pytest

from letters import translated
from outrider import DraftModel, Engine, EngineRun, SamplingParams, StopConditions
from outrider.costs import Costs
from outrider.drafters import Either, Recall, Suffix, recall
from outrider.drafters.either import SourceStats
from outrider.engine import step
from outrider.engine.request import Request
from outrider.engine.speculation_policy import Adaptive, FixedLength
from outrider.types import DraftShape
from tiny import decode, pair

TARGET, SMALL = pair(0.4)
COSTS = Costs.of({1: 6.0, 2: 6.4, 5: 7.6, 13: 12.0}).alone()
LIMITS = StopConditions(150)


def either(model=SMALL):
    return Either(Recall(12), DraftModel(model, (1, 1, 1)))


def first(requests, drafter, rule, planner):
    """What the first of them writes."""
    run = EngineRun(Engine(TARGET, drafter, rule, planner(), COSTS), 3, 400)
    run.submit_all(requests)
    run.close()
    return [token for block in run if block.request_id == 0 for token in block.token_ids]


def differ(drafter, rule, planner, seeds=3):
    """How many texts are others beside a neighbour, of another seed and of the same."""
    wrong = 0
    for seed in range(seeds):
        row = Request([1, 2, 3], SamplingParams(0.3, seed=seed), LIMITS)
        alone = first([row], drafter, rule, planner)
        for other in (seed, 50 + seed):
            beside = Request([2, 7], SamplingParams(0.1, seed=other), LIMITS)
            wrong += first([row, beside], drafter, rule, planner) != alone
    return wrong


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    "planner",
    [
        pytest.param(Adaptive, id="planned"),
        pytest.param(FixedLength, id="fixed", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        (either(), None),
        (Recall(12), "traversal"),
        (Recall(12, depth=4), "rejection"),
        (Recall(8, chain=True), "block"),
        (Suffix(8), "block"),
    ],
    ids=["either", "recall", "recall, four deep", "recall, chains", "suffix"],
)
def test_a_row_writes_what_it_writes_alone(drafter, rule, planner):
    assert differ(drafter, rule, planner) == 0


def test_it_would_not_with_trees_as_wide_as_the_batch_needs(monkeypatch):
    monkeypatch.setattr(step, "alike", lambda draft, most: draft)
    assert differ(Recall(8), "traversal", FixedLength)


def test_it_would_not_with_the_widest_rows_number_of_nodes(monkeypatch):
    trees = Recall.trees
    monkeypatch.setattr(
        recall.Recall, "trees", lambda self, rows, shape: trees(self, rows, blind(shape))
    )
    assert differ(Recall(12), "traversal", Adaptive)


def blind(shape: DraftShape) -> DraftShape:
    return shape._replace(sizes=None)


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_a_draft_model_reads_what_was_copied_beside_its_drafts(monkeypatch, temperature):
    """With tokens of its own it would be asked for what stands behind the end of its text."""
    turn = {}

    def copies(self, depth):  # rows take turns, so that in every step one is copied
        return (turn.setdefault(id(self), len(turn)) + self.streak) % 2 == 0

    monkeypatch.setattr(SourceStats, "copies", copies)
    settings = [SamplingParams(temperature, seed=5), SamplingParams(1.5, seed=6)]
    drafter = either(translated(SMALL))
    texts = decode(Engine(TARGET, drafter), [[1, 2, 3], [2, 7]], settings, StopConditions(100))[0]
    assert [len(text) for text in texts] == [100, 100]
