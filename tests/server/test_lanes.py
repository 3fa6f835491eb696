"""Which drafter serves which requests."""

from types import SimpleNamespace

import pytest
import torch

from outrider import DraftModel, Engine, Root, UnknownName
from outrider.drafters import Recall, StaticTree
from outrider.server.lanes import COUPLED, NONE, PREDICTION, Lanes, reproducible
from tiny import pair


def seeded(drafter, dtype):
    """What drafts for requests with a seed where this is the server's drafter."""
    return reproducible(SimpleNamespace(target=SimpleNamespace(dtype=dtype), drafter=drafter))


def test_seeded_requests_are_drafted_by_chains_in_half_precision():
    small = pair()[1]
    half, whole = torch.bfloat16, torch.float32
    assert seeded(Recall(32), half).chain
    assert not seeded(Recall(32), whole).chain
    tree, chain = DraftModel(small, (2, 2, 1)), DraftModel(small, (1, 1, 1))
    assert seeded(tree, half).shapes[0].is_chain
    assert seeded(tree, half).shapes[0].max_depth == 3
    assert seeded(tree, whole).shapes == tree.shapes
    assert all(seeded(tree, dtype).coupled for dtype in (half, whole))
    assert seeded(chain, half).shapes == chain.shapes
    assert seeded(StaticTree(small, (2, 1)), half).shapes[0].is_chain


def test_methods_are_lanes_over_one_target():
    target, small = pair()
    lanes = Lanes(Engine(target, DraftModel(small, (1, 1))))
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
    with pytest.raises(UnknownName, match="'magic'"):
        methods.named("magic")
