"""Every exact rule keeps the target's law to 1e-12 on every draft it may verify."""

from functools import lru_cache

import enumeration as e
import numpy as np
import own_trees
import pytest

from outrider import verifiers
from outrider.types import DrawKind

TOLERANCE = 1e-12
EXACT = [rule for rule in verifiers.VERIFIERS.values() if rule.exact]

# name -> how to draw every draft of the scheme, as small as the rules allow
FORESTS = {
    **{
        f"chain V={v} D={d}": (lambda v=v, d=d: e.without(e.world(v, d, seed=d), (1,) * d))
        for v in (2, 3, 4)
        for d in (1, 2, 3)
    },
    "chain with replacement": lambda: e.separate(e.world(4, 3), (1, 1, 1)),
    "chain placed": lambda: e.placed(e.world(4, 3), (1, 1, 1)),
    "chain that stops after an unlikely token": lambda: e.stopped(e.world(4, 3), 3),
    "RSD-C 2,2": lambda: e.without(e.world(4, 2), (2, 2)),
    "RSD-C 3,2": lambda: e.without(e.world(4, 2), (3, 2)),
    "RSD-C 2,2,1": lambda: e.without(e.world(4, 3, thin=True), (2, 2, 1)),
    "RSD-C 3,1,2 V=3": lambda: e.without(e.world(3, 3, thin=True), (3, 1, 2)),
    "RSD-S V=2 D=3 W=2": lambda: own_trees.beam(e.world(2, 3), 2, 3),
    "RSD-S V=2 D=3 W=3": lambda: own_trees.beam(e.world(2, 3), 3, 3),
    "RSD-S V=3 D=2 W=2": lambda: own_trees.beam(e.world(3, 2), 2, 2),
    "RSD-S V=3 D=2 W=3": lambda: own_trees.beam(e.world(3, 2), 3, 2),
    "i.i.d. children 2,2": lambda: e.separate(e.world(4, 2), (2, 2)),
    "i.i.d. children 3,2 V=3": lambda: e.separate(e.world(3, 2), (3, 2)),
    "i.i.d. children 2,2,1 V=2": lambda: e.separate(e.world(2, 3), (2, 2, 1)),
    "i.i.d. paths 2x3": lambda: own_trees.merged(e.world(4, 3), 2, 3),
    "i.i.d. paths 3x2": lambda: own_trees.merged(e.world(4, 2), 3, 2),
    "i.i.d. paths 3x3 V=2": lambda: own_trees.merged(e.world(2, 3), 3, 3),
    "placed 2,2": lambda: e.placed(e.world(4, 2), (2, 2)),
    "placed 3,2": lambda: e.placed(e.world(4, 2), (3, 2)),
    "placed 2,2,1": lambda: e.placed(e.world(4, 3), (2, 2, 1)),
    "hub 2,2": lambda: e.hub(e.world(4, 2), (2, 2)),
    "hub 3,2": lambda: e.hub(e.world(4, 2), (3, 2)),
    "hub 2,2,1": lambda: e.hub(e.world(4, 3), (2, 2, 1)),
    "hub 2,2 placed first": lambda: e.hub(e.world(4, 2), (2, 2), last=True),
    "placed beside drawn 3,2": lambda: e.mixed(e.world(4, 2), (3, 2)),
}
BIG = {"RSD-C 2,2,1", "RSD-C 3,2"}


@lru_cache(maxsize=1)
def forest(name: str) -> e.Forest:
    return FORESTS[name]()


#: Seconds each; by default smaller trees of their kinds show the same.
DEAR = {"RSD-C 2,2,1", "i.i.d. children 3,2 V=3", "i.i.d. paths 3x2"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in DEAR else []) for n in FORESTS],
)
def test_law_is_the_targets(name):
    trees = forest(name)
    total = np.bincount(trees.case_R, trees.weight_R, len(trees.world.cases))
    assert np.abs(total - 1).max() < TOLERANCE, "the drafts' probabilities do not add up"
    verified = 0
    for rule in EXACT:
        if not verifiers.supports(rule, trees.kinds, trees.tree.is_chain):
            continue
        if name in BIG and rule.name == "hub":
            continue  # hub is rejection where nothing is placed, and the smaller trees show it
        if name == "i.i.d. children 3,2 V=3" and rule.name == "otm":
            continue  # a plan for each of 120,000 nodes; paths of three draws show the same
        verified += 1
        wrong = dict(zip(trees.world.cases, e.errors(rule, trees), strict=True))
        assert max(wrong.values()) < TOLERANCE, f"{rule.name}: {wrong}"
    assert verified >= 2


def _tokens(rule: str, trees: e.Forest) -> np.ndarray:
    return e.emitted(verifiers.get(rule), trees)[1]


@pytest.mark.parametrize("name", ["chain V=4 D=3", "RSD-C 2,2", "RSD-S V=3 D=2 W=3", "hub 3,2"])
def test_verifying_the_whole_path_never_emits_fewer_tokens(name):
    trees = forest(name)
    assert (_tokens("traversal", trees) >= _tokens("rejection", trees) - TOLERANCE).all()
    assert (_tokens("traversal", trees) > _tokens("rejection", trees) + 1e-3).any()


@pytest.mark.parametrize("name", ["hub 2,2 placed first", "placed beside drawn 3,2"])
def test_hub_verifies_drawn_children_first_and_gains_by_it(name):
    trees = forest(name)
    assert (_tokens("hub", trees) >= _tokens("rejection", trees) - TOLERANCE).all()
    assert (_tokens("hub", trees) > _tokens("rejection", trees) + 1e-3).any()


@pytest.mark.parametrize("name", ["chain V=3 D=3", "chain that stops after an unlikely token"])
def test_traversal_of_a_chain_is_block_verification(name):
    trees = forest(name)
    as_tree = trees.tree._replace(is_chain=False)
    branching = e.Forest(**{**vars(trees), "tree": as_tree})
    left, right = verifiers.get("traversal"), verifiers.get("block")
    np.testing.assert_allclose(
        e.emitted(left, branching)[1], e.emitted(right, trees)[1], atol=TOLERANCE
    )
    one = left.outcome(branching.draft(), trees.scores())
    two = right.outcome(trees.draft(), trees.scores())
    np.testing.assert_allclose(one.stop_BN, two.stop_BN, atol=TOLERANCE)


def test_the_papers_toy_of_block_verification():
    world = e.World(2, 3, 0, ("random",))
    world.target[:], world.draft[:] = (1 / 3, 2 / 3), (2 / 3, 1 / 3)
    trees = e.without(world, (1, 1))
    assert _tokens("rejection", trees) == pytest.approx(1 + 10 / 9, abs=TOLERANCE)
    assert _tokens("block", trees) == pytest.approx(1 + 11 / 9, abs=TOLERANCE)


def test_one_drafted_token_is_kept_with_one_minus_total_variation():
    trees = forest("chain V=4 D=1")
    world = trees.world
    kept = np.minimum(world.target[:, 0], world.draft[:, 0]).sum(-1)
    for rule in ("rejection", "block", "traversal", "hub", "kseq", "multi_round"):
        np.testing.assert_allclose(_tokens(rule, trees), 1 + kept, atol=TOLERANCE)


def test_kinds_are_what_was_grown():
    assert forest("hub 2,2").kinds == {DrawKind.FIXED, DrawKind.WITHOUT}
    assert forest("i.i.d. paths 2x3").kinds == {DrawKind.WITH}
    assert forest("RSD-S V=2 D=3 W=2").kinds == {DrawKind.WITHOUT}
