"""Which drafter serves which requests."""

import pytest

from outrider import DraftModel, Engine, Root, UnknownName
from outrider.drafters import Recall, StaticTree
from outrider.server.speculation_methods import COUPLED, NONE, PREDICTION, MethodRouter
from tiny import pair


@pytest.mark.parametrize("alike", [True, False])
def test_seeded_requests_are_drafted_by_chains_where_trees_round_otherwise(monkeypatch, alike):
    target, small = pair()
    monkeypatch.setattr(type(target), "trees_alike", alike)

    def seeded(drafter):
        """What drafts for requests with a seed where this is the server's drafter."""
        return MethodRouter(Engine(target, drafter))[COUPLED].drafter

    assert seeded(Recall(32)).chain != alike
    tree, chain = DraftModel(small, (2, 2, 1)), DraftModel(small, (1, 1, 1))
    assert seeded(tree).shapes[0].is_chain != alike
    assert seeded(tree).shapes[0].max_depth == 3
    assert seeded(tree).shared_noise
    assert seeded(chain).shapes == chain.shapes
    assert seeded(StaticTree(small, (2, 1))).shapes[0].is_chain != alike


def test_methods_are_lanes_over_one_target():
    target, small = pair()
    lanes = MethodRouter(Engine(target, DraftModel(small, (1, 1))))
    methods = lanes.methods
    assert methods.named("draft_model") == methods.named("default")
    assert methods.named("ngram") == "prompt_lookup"
    assert methods.nodes["default"] == 3
    assert methods.nodes["layer_skip"] == 0, "it says what it lacks when it is asked for"
    assert {COUPLED, NONE, PREDICTION, "recall", "suffix"} <= set(lanes)
    made = {name: lanes[name] for name in (COUPLED, NONE, PREDICTION, "recall", "prompt_lookup")}
    assert all(engine.target is target for engine in made.values())
    assert isinstance(made[NONE].drafter, Root)
    assert lanes[COUPLED] is made[COUPLED]
    with pytest.raises(UnknownName, match="'magic'") as unknown:
        methods.named("magic")
    assert "suffix" in str(unknown.value)
    assert "layer_skip" not in str(unknown.value), "it cannot be made here"
    alone = MethodRouter(Engine(target, Recall(8))).methods
    assert alone.named("recall") == methods.named("default")
    with pytest.raises(UnknownName, match="'draft_model'"):  # there is none
        alone.named("draft_model")
